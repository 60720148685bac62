"""Resuming: a front end that comes back gets what it lacks, and nothing twice."""

from __future__ import annotations

import pytest

from allocator.columns import i64, pack_i64
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from ipc.messages import Continued, Finished, Refused, Sampling
from tests.core.scenes import drive, stage
from tests.core.world import World

CONFIG = CoreConfig(page_size=4, max_running_requests=2, max_batched_tokens=16, chunked_prefill_size=8)
SCORED = Sampling(temperature=0.0, logprobs=1, prompt_logprobs=1)


def told(out: Outputs) -> list[tuple[str, int, list[int]]]:
    """Kind, position and tokens of each reply."""
    lines = []
    for message in (reply.message for reply in out.replies):
        if isinstance(message, Continued):
            lines.append(("continued", message.output_tokens, i64(message.tokens).tolist()))
        elif isinstance(message, Finished):
            lines.append((f"finished {message.reason}", message.output_tokens, []))
        else:
            assert isinstance(message, Refused)
            lines.append((f"refused {message.code}", message.value, []))
    return lines


def running(tokens: int = 6, max_tokens: int = 20, **fields: object) -> World:
    """One request has so many output tokens, with two forwards in flight."""
    world = World(CONFIG)
    world.send("a", 9, max_tokens, **fields)
    drive(world, lambda: len(world.output("a")) == tokens)
    world.tick()
    return world


@pytest.mark.parametrize("lost", [0, 1, 4, 6])
def test_a_live_choice_goes_on_behind_what_the_client_holds(lost: int) -> None:
    """Tokens and log probabilities that did not reach the client come at once, the others as ever."""
    world = running(sampling=SCORED)
    whole = list(world.output("a"))
    assert told(world.resume("a", lost=lost)) == [("continued", 6 - lost, whole[6 - lost :])]
    assert stage(world, "a") == "running"
    world.run()
    world.check_rest()
    assert world.core.gauges()["resumed_total"] == 1


@pytest.mark.parametrize("lost", [0, 3, 99])
def test_an_ended_choice_is_told_with_its_output_until_it_is_acknowledged(lost: int) -> None:
    """As often as it is asked; afterwards nobody knows it any more."""
    world = running(sampling=SCORED)
    world.run()
    whole = list(world.output("a"))
    for _ in range(2):
        held = max(0, len(whole) - lost)
        assert told(world.resume("a", lost=lost)) == [
            ("continued", held, whole[held:]),
            ("finished length", 20, []),
        ]
    world.check_rest()
    world.feed(inputs.Acknowledged(0, "fe", ["a"]))
    assert told(world.resume("a")) == [("refused unknown_request", 0, [])]
    assert not world.core._state.ended_bytes


def test_a_waiting_choice_is_told_what_it_has() -> None:
    """Nothing, or what it had before it lost its row."""
    world = running()
    world.send("waits", 9, 3)
    world.feed(inputs.EpochEnded(world.now_ns, 1, "a rank died", True))
    assert told(world.resume("waits")) == [("continued", 0, [])]
    assert told(world.resume("a", lost=2)) == [("continued", 4, world.expected("a")[0][4:6])]
    world.begin()
    world.run()
    world.check_rest()


def test_an_output_that_a_stop_string_cut_is_told_up_to_there() -> None:
    """The front end found a stop string behind four of six tokens: what it lost of the four comes, no more."""
    world = running()
    whole = list(world.output("a"))
    world.feed(inputs.FinishAsked(world.now_ns, "fe", "a", 0, 4))
    assert told(world.resume("a", lost=4)) == [("continued", 2, whole[2:4]), ("finished stop", 4, [])]
    beyond = world.resume("a", holds=whole)
    assert told(beyond) == [("continued", 6, []), ("finished stop", 4, [])]


def test_what_is_not_known_is_refused_by_name() -> None:
    """Another front end's id, an id of nobody, a choice that there is not."""
    world = running(n=2)
    assert told(world.resume("nobody")) == [("refused unknown_request", 0, [])]
    assert told(world.resume("a", frontend="other")) == [("refused unknown_request", 0, [])]
    assert told(world.resume("a", choice=2)) == [("refused bad_parameter", 2, [])]
    assert told(world.resume("a", choice=-1)) == [("refused bad_parameter", -1, [])]
    world.run()
    world.check_rest()


@pytest.mark.parametrize("had", [0, 3], ids=["waits", "runs"])
def test_a_request_sent_anew_goes_on_behind_what_its_client_holds(had: int) -> None:
    """The daemon lost it altogether: it was sent again, and then the client says what it has; a row is given up."""
    world = running(had) if had else World(CONFIG)
    if not had:
        world.send("a", 9, 20)
    whole = world.expected("a")[0]
    out = world.resume("a", holds=whole[:8])
    assert told(out) == [("continued", 8, [])]
    assert [(one.verdict, one.reason) for one in out.decisions] == [("resumed", "adopted")]
    world.run()
    assert world.output("a") == whole
    world.check_rest()


def test_tokens_that_only_the_client_knows_may_have_been_the_last() -> None:
    """A stop token, or the last by length: the request ends, behind the reply."""
    world = World(CONFIG)
    world.send("length", 9, 3)
    assert told(world.resume("length", holds=[4, 5, 6])) == [
        ("continued", 3, []),
        ("finished length", 3, []),
    ]
    world.send("stop", 9, 9, stop_ids=pack_i64([6]))
    assert told(world.resume("stop", holds=[4, 6])) == [
        ("continued", 2, []),
        ("finished stop", 2, []),
    ]
    world.send("not yet", 9, 9, stop_ids=pack_i64([6]), min_tokens=2)
    assert told(world.resume("not yet", holds=[4, 6])) == [("continued", 2, [])]
    assert world.core.gauges()["live"] == 1


@pytest.mark.parametrize("tokens", [[1] * 21, [97], [-1]], ids=["too many", "no token", "negative"])
def test_tokens_that_nobody_can_have_been_told_are_a_conflict(tokens: list[int]) -> None:
    """Beyond the most output, or outside the vocabulary."""
    world = running()
    out = world.resume("a", holds=tokens)
    assert [line[0] for line in told(out)] == ["finished fault"]
    assert "agree" in world.finished("a").detail
    world.run()
    world.check_all_free()


def test_a_client_that_came_back_cannot_hold_anything_else_later() -> None:
    """After the first time in a life both sides agree; what differs then is a fault."""
    world = running()
    world.resume("a", lost=2)
    held = [(token + 1) % 97 for token in world.output("a")]
    out = world.resume("a", holds=held)
    assert [line[0] for line in told(out)] == ["finished fault"]


def test_a_client_that_holds_other_tokens_than_those_of_the_end_is_told_so() -> None:
    """The choice ended before its client came back with tokens that were never its own."""
    world = running(max_tokens=8)
    world.run()
    held = [(token + 1) % 97 for token in world.output("a")[:3]]
    for _ in range(2):
        out = world.core.feed(inputs.Resumed(world.now_ns, "fe", "a", 0, pack_i64(held)))
        assert told(out) == [("continued", 3, []), ("finished fault", 3, [])]


def test_a_repeated_request_is_answered_with_its_acceptance_and_its_ends() -> None:
    """Sent again under the same id: the front end then asks for the output of each choice."""
    world = running(max_tokens=8, n=2)
    world.run()
    generate = world.clients["fe", "a"].generate
    out = world.arrive(generate)
    assert [type(reply.message).__name__ for reply in out.replies] == ["Accepted", "Finished", "Finished"]
    assert told(world.resume("a", choice=1, lost=9))[0][0] == "continued"


def test_outputs_of_ended_requests_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten first when nobody acknowledges them."""
    monkeypatch.setattr("daemon.core.endings.ENDED_BYTES_MAX", 3 * 5 * 8)
    world = World(CONFIG)
    for k in range(5):
        world.send(f"r{k}", 4, 5)
        world.run()
    assert [world.knows("fe", f"r{k}") for k in range(5)] == [False, False, True, True, True]


def test_what_is_kept_of_a_conflict_counts_towards_the_bound() -> None:
    """Whatever a client says that it holds, what is held of ended requests is counted as it is."""
    world = World(CONFIG)
    world.send("a", 4, 5, sampling=Sampling(temperature=0.0, logprobs=2))
    world.run()
    for held in ([96] * 9, [95], [94] * 7):
        world.core.feed(inputs.Resumed(world.now_ns, "fe", "a", 0, pack_i64(held)))
        assert world.core.state.ended_bytes == 8 * len(held)
    world.feed(inputs.Acknowledged(world.now_ns, "fe", ["a"]))
    assert world.core.state.ended_bytes == 0
