"""Recent: bounded memories of what the engine decided, and sums that agree with it."""

from __future__ import annotations

from daemon.core.inputs import Arrived, Recovered, RecoveredChoice, RecoveredGroup, Ticked
from daemon.core.outputs import Decided, Outputs
from daemon.mailbox import Iteration
from daemon.recent import DECISIONS_KEPT, ENDED_KEPT, FIRST_KEPT, LAST_KEPT, LIVE_KEPT, Recent
from ipc.messages import Accepted, Finished, Generate, Sampling


def show(recent: Recent, *decisions: Decided) -> None:
    """One iteration with one input and these decisions."""
    recent.take(Iteration(1, [Ticked(1)], [Outputs(decisions=list(decisions))], core_ns=3, flush_ns=4))


def accept(recent: Recent, request: int, n: int = 1) -> None:
    """A request arrives."""
    arrived = Arrived(1, "fe", Generate(f"r{request}", b"", Sampling(), n=n), 1)
    decided = Decided(1, "accepted", request, "", {"n": n, "prompt_tokens": 7, "max_tokens": 9})
    recent.take(Iteration(1, [arrived], [Outputs(decisions=[decided])]))


def admitted(request: int, waited_ms: int, queried: int, cached: int) -> Decided:
    """A request gets its row."""
    numbers = {"waited_ms": waited_ms, "queried_tokens": queried, "cached_tokens": cached}
    return Decided(2, "admitted", request, "", numbers)


def test_decisions_behind_a_serial_come_once_and_in_order() -> None:
    """Asking with the newest serial gives what came since; the bound keeps the newest."""
    recent = Recent()
    for number in range(1, 8):
        show(recent, Decided(number, "idle", 0, ""))
    told = recent.decisions(0, 100)
    assert [entry.serial for entry in told] == [1, 2, 3, 4, 5, 6, 7]
    assert [entry.decided.now_ns for entry in told] == [1, 2, 3, 4, 5, 6, 7]
    assert [entry.serial for entry in recent.decisions(5, 100)] == [6, 7]
    assert [entry.serial for entry in recent.decisions(0, 2)] == [6, 7]
    assert recent.decisions(recent.serial, 100) == []
    assert recent.decisions(recent.serial + 5, 100) == []


def test_memory_is_bounded() -> None:
    """Decisions, live and ended requests and the decisions of one request: each to its limit, oldest first."""
    recent = Recent()
    for request in range(1, LIVE_KEPT + 11):
        accept(recent, request)
    assert recent.life(10) is None
    assert recent.life(11) is not None
    assert recent.decisions(0, 10**6)[0].serial == LIVE_KEPT + 10 - DECISIONS_KEPT + 1
    for request in range(11, ENDED_KEPT + 12):
        show(recent, Decided(2, "ended", request, "length"))
    assert recent.life(11) is None
    assert recent.life(12) is not None


def test_a_life_keeps_its_beginning_and_its_end() -> None:
    """The first and the newest decisions are there; those between are counted."""
    recent = Recent()
    accept(recent, 1)
    for number in range(100):
        show(recent, Decided(number, "waits", 1, "memory"))
    life = recent.life(1)
    assert life is not None
    assert [told.serial for told in life.first] == list(range(1, FIRST_KEPT + 1))
    assert [told.serial for told in life.last] == list(range(101 - LAST_KEPT + 1, 102))
    assert life.left_out == 101 - FIRST_KEPT - LAST_KEPT
    assert (life.id, life.frontend, life.prompt_tokens) == ("r1", "fe", 7)


def test_every_choice_has_its_life_and_whoever_took_from_another_hears_of_it() -> None:
    """n choices are n requests; a retraction stands in both lives."""
    recent = Recent()
    accept(recent, 1, n=2)
    accept(recent, 3)
    show(recent, Decided(2, "retracted", 2, "memory", {}, by=3))
    told: dict[int, list[str]] = {}
    for request in (1, 2, 3):
        life = recent.life(request)
        assert life is not None
        told[request] = [entry.decided.verdict for entry in life.first]
    assert told == {1: ["accepted"], 2: ["accepted", "retracted"], 3: ["accepted", "retracted"]}
    show(recent, Decided(3, "ended", 3, "length"))
    assert recent.life(3) is not None
    assert recent.life(4) is None


def test_why_a_request_waits_again() -> None:
    """By what took its row, until it has one again; who waits already loses none, and the taker waits for nothing."""
    recent = Recent()
    accept(recent, 1)
    accept(recent, 2)
    ways: dict[int, list[str]] = {1: [], 2: []}
    for decided in (
        admitted(1, 5, 0, 0),
        Decided(3, "requeued", 1, "epoch"),
        Decided(4, "resumed", 1, "adopted"),
        admitted(1, 5, 0, 0),
        Decided(5, "retracted", 1, "memory", {}, by=2),
        admitted(1, 5, 0, 0),
        Decided(6, "resumed", 1, "adopted"),
    ):
        show(recent, decided)
        for request, way in ways.items():
            life = recent.life(request)
            assert life is not None
            way.append(life.back)
    assert ways == {1: ["", "requeued", "requeued", "", "retracted", "", "resumed"], 2: [""] * 7}


def test_sums() -> None:
    """Times and tokens add up; the second admission of a retracted request is no first one."""
    recent = Recent()
    accept(recent, 1)
    show(recent, admitted(1, 5, 40, 10))
    show(recent, Decided(2, "retracted", 1, "memory"))
    show(recent, admitted(1, 50, 44, 20))
    sums = recent.sums()
    assert sums["iterations"] == 4
    assert (sums["core_ns"], sums["flush_ns"]) == (9, 12)
    assert (sums["admitted"], sums["first_admitted"], sums["waited_ms"]) == (2, 1, 5)
    assert (sums["queried_tokens"], sums["cached_tokens"]) == (84, 30)


def test_what_an_earlier_life_waited_for_is_not_counted_again() -> None:
    """Of two choices that go on the one that had run was admitted first in the life before; both are known by name."""
    recent = Recent()
    ended = Finished("a", 2, 7, "length", "", 3, 1)
    choices = [RecoveredChoice(bytes(8), started=True), RecoveredChoice(b""), RecoveredChoice(bytes(8), ended)]
    group = RecoveredGroup("fe", Generate("a", bytes(24), Sampling(), n=3), 1, Accepted("a", 5, 3, 9, 1), 1, choices)
    told = [Decided(9, "recovered", request, "") for request in (5, 6)]
    recent.take(Iteration(9, [Recovered(9, [group], 8)], [Outputs(decisions=told)]))
    show(recent, admitted(5, 60_000, 0, 0), admitted(6, 50, 0, 0))
    sums = recent.sums()
    assert (sums["admitted"], sums["first_admitted"], sums["waited_ms"]) == (2, 1, 50)
    for request in (5, 6):
        life = recent.life(request)
        assert life is not None
        assert (life.id, life.frontend, life.prompt_tokens, len(life.first)) == ("a", "fe", 3, 2)
    assert recent.life(7) is None
