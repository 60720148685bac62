"""Pressure: the ladder's rungs in order, its victims, protection, parking, and the two answers that end a request."""

from __future__ import annotations

import pytest

from allocator.capacity import CapacityRefusal, Demand
from allocator.columns import i64
from daemon.core.limits import CoreConfig
from daemon.core.memory import Memory
from ipc.messages import Sampling
from tests.core.scenes import (
    chunk_retracted,
    chunk_retracted_while_parked,
    drive,
    last_row_parks,
    parked_and_shrunk,
    stage,
)
from tests.core.world import World, facts

SCENES = [parked_and_shrunk, chunk_retracted, chunk_retracted_while_parked, last_row_parks]


def overcommitted(priorities: tuple[int, int, int] = (0, 0, 0), **changes: object) -> World:
    """Three requests whose outputs cannot all be held; the estimate lets them in. The older, the shorter."""
    config: dict[str, object] = {"page_size": 1, "max_running_requests": 3, "max_batched_tokens": 64} | changes
    world = World(CoreConfig(**config), pages=60, caching=False)  # type: ignore[arg-type]
    for k, priority in enumerate(priorities):
        world.send(f"r{k}", 8 + k, 20, priority=priority)
    return world


@pytest.mark.parametrize("scene", SCENES)
def test_every_scene_comes_to_rest_with_the_right_tokens(scene: object) -> None:
    """Whatever rung was used, each client gets exactly the tokens of a lone run."""
    world = scene()  # type: ignore[operator]
    world.run()
    world.check_rest()
    assert {client.finished[0].reason for client, _ in world.by_request.values()} == {"length"}


def test_the_cheapest_to_redo_is_retracted_and_told_with_numbers() -> None:
    """The victim is the one with the fewest tokens; the decision says by whom, what was lost and how often."""
    world = overcommitted()
    drive(world, lambda: bool(world.verdicts("retracted")))
    (decision,) = world.verdicts("retracted")
    assert decision.request == 1, "the shortest"
    assert decision.by in (2, 3)
    assert decision.numbers["pages"] == decision.numbers["tokens"] >= 8
    assert decision.numbers["times"] == 1
    assert decision.numbers["units_short"] >= 1
    why = {name: decision.numbers[name] for name in ("candidates", "protected", "own_priority", "next_priority")}
    assert why == {"candidates": 3, "protected": 0, "own_priority": 0, "next_priority": 0}
    assert decision.numbers["next"] in (2, 3)
    assert decision.numbers["redo_tokens"] < decision.numbers["next_redo_tokens"]
    assert stage(world, "r0") == "retracted", "queued again in the same iteration"
    world.run()
    world.check_rest()


def test_low_priority_is_retracted_first() -> None:
    """Priority comes before cost when victims are chosen."""
    world = overcommitted((0, -1, -2))
    drive(world, lambda: bool(world.verdicts("retracted")))
    assert world.verdicts("retracted")[0].request == 3
    world.run()
    world.check_rest()


def test_the_expected_share_of_output_tightens_and_relaxes() -> None:
    """Retraction raises what running requests are expected to grow by, steps and ends below it lower it again; `full`
    pins it to one."""
    world = overcommitted()
    shares = [world.core.view()["share_ppm"]]
    while not world.verdicts("retracted"):
        if world.wants_tick:
            world.tick()
            shares.append(world.core.view()["share_ppm"])
        else:
            world.report()
    assert shares[:-1] == sorted(shares[:-1], reverse=True)
    assert shares[-1] > shares[0] > shares[-2]
    tight = shares[-1]
    drive(world, lambda: world.core.view()["share_ppm"] < tight)
    assert not world.verdicts("ended")
    world.run()
    full = overcommitted(reserve="full")
    full.run()
    assert full.core.view()["share_ppm"] == 1_000_000


def test_the_rest_of_a_prompt_is_promised_in_full() -> None:
    """Beside a long prompt that just began, a request is priced with all of that prompt, not a share of it."""
    config = CoreConfig(page_size=1, max_running_requests=3, max_batched_tokens=32, chunked_prefill_size=4)
    world = World(config, pages=32)
    world.send("long", 30, 1)
    world.send("small", 4, 6)
    world.tick()
    assert (stage(world, "long"), stage(world, "small")) == ("prefilling", "waiting")
    world.run()
    world.check_rest()


def test_an_arrival_is_looked_at_while_a_row_is_parked() -> None:
    """A world that waits for a result because nothing fits is asked again when something new arrives."""
    world = last_row_parks()
    drive(world, lambda: stage(world, "a") == "parked_row")
    assert not world.wants_tick
    world.send("new", 1, 1)
    assert world.wants_tick
    world.run()
    world.check_rest()


def test_nothing_is_admitted_while_throttled() -> None:
    """After a retraction the next steps admit nobody, and the waiting head is told why."""
    world = overcommitted()
    drive(world, lambda: bool(world.verdicts("retracted")))
    admitted = len(world.verdicts("admitted"))
    before = len([step for step in world.steps if step.forward])
    drive(world, lambda: len(world.verdicts("admitted")) > admitted)
    assert len([step for step in world.steps if step.forward]) - before >= 4
    assert any(decision.reason == "throttled" for decision in world.verdicts("waits"))
    world.run()
    world.check_rest()


def test_full_reserve_never_retracts() -> None:
    """With `reserve` full only what fits at its longest is admitted: no retraction, no park."""
    world = overcommitted(reserve="full")
    world.run()
    world.check_rest()
    assert world.core.gauges()["retractions_total"] == world.core.gauges()["parks_total"] == 0


@pytest.mark.parametrize("retracts_max", [0, 1, 2])
def test_a_request_is_retracted_at_most_so_often(retracts_max: int) -> None:
    """The bound holds, and protected requests still come to their end because they were admitted to fit."""
    world = overcommitted(retracts_max=retracts_max)
    for k in range(6):
        world.send(f"more{k}", 5, 30)
    world.run()
    world.check_rest()
    ended = world.verdicts("ended")
    assert max(decision.numbers["retractions"] for decision in ended) <= retracts_max


def test_a_parked_chunk_keeps_what_it_holds_and_is_told_once() -> None:
    """Parking changes no page, happens without an end, and is decided once per episode."""
    world = parked_and_shrunk()
    drive(world, lambda: stage(world, "long") == "parked_chunk")
    number = world.clients["fe", "long"].accepted.first_request
    view = world.core.request_view(number)
    assert view is not None
    start = view["extent"][0]
    assert view["pages"] == start > 0
    drive(world, lambda: stage(world, "long") != "parked_chunk")
    verdicts = [decision.verdict for decision in world.decisions if decision.request == number]
    assert [verdict for verdict in verdicts if verdict in ("parked", "unparked")] == ["parked", "unparked"]
    shrunk = world.verdicts("shrunk")
    drive(world, lambda: len(world.verdicts("shrunk")) > len(shrunk))
    numbers = world.verdicts("shrunk")[-1].numbers
    assert 0 < numbers["tokens"] < numbers["wanted_tokens"]
    world.run()
    world.check_rest()


class Moody:
    """A chain that refuses every `every`-th question of a decode row, whatever is free; it still takes honestly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
        self.asked = 0
        honest = Memory.refusal

        def refusal(memory: Memory, demand: Demand) -> CapacityRefusal | None:
            self.asked += 1
            return honest(memory, (10**6,) if self.asked % every == 0 else demand)

        monkeypatch.setattr(Memory, "refusal", refusal)


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_retracted_again_and_again_keep_every_token(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of retractions on either side of a whole tail: rows change, the kept output is always complete."""
    config = CoreConfig(page_size=4, max_running_requests=3, max_batched_tokens=600, retracts_max=100, overlap=overlap)
    world = World(config, pages=400, model=facts(97, 400))
    Moody(monkeypatch, 5)
    for k in range(3):
        world.send(f"r{k}", 5 + k, 300 - k, sampling=Sampling(temperature=0.0, presence_penalty=0.5))
    world.run()
    world.check_rest()
    most = max(decision.numbers["times"] for decision in world.verdicts("retracted"))
    assert most > 10
    for step in world.steps:
        for row in step.forward.sampling if step.forward else []:
            number = (row.choice, i64(row.prompt_ids).tolist())
            assert any(
                i64(client.generate.prompt).tolist() == number[1]
                and client.tokens[0][: len(row.output_ids) // 8] == i64(row.output_ids).tolist()
                for client, _ in world.by_request.values()
            )


@pytest.mark.parametrize("retracts_max", [0, 1, 4])
def test_the_bound_holds_against_a_chain_that_always_complains(
    retracts_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A protected request is not chosen again, however often it would help: it parks instead."""
    config = CoreConfig(page_size=1, max_running_requests=3, max_batched_tokens=64, retracts_max=retracts_max)
    world = World(config, pages=200)
    Moody(monkeypatch, 3)
    for k in range(3):
        world.send(f"r{k}", 5 + k, 40)
    world.run()
    world.check_rest()
    most = max((one.numbers["times"] for one in world.verdicts("retracted")), default=0)
    assert min(retracts_max, 2) <= most <= retracts_max


def test_the_oldest_rows_get_the_pages_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protected rows short of pages: as many as fit go on, oldest first, the youngest park and come back."""
    config = CoreConfig(page_size=1, max_running_requests=3, max_batched_tokens=64, retracts_max=0, overlap=False)
    world = World(config, pages=200)
    for k in range(3):
        world.send(f"r{k}", 5, 9)
    world.tick()
    world.report()
    with monkeypatch.context() as patch:
        honest = Memory.refusal
        patch.setattr(Memory, "refusal", lambda memory, demand: honest(memory, demand if demand[0] < 3 else (10**6,)))
        patch.setattr(Memory, "room_pages", lambda memory, planned: 2)
        world.tick()
    assert [stage(world, f"r{k}") for k in range(3)] == ["running", "running", "parked_row"]
    assert [decision.request for decision in world.verdicts("parked")] == [3]
    world.report()
    world.tick()
    assert stage(world, "r2") == "running"
    world.run()
    world.check_rest()


class Disagreeing:
    """A chain whose answers can be turned to no; it still takes honestly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuse = False
        honest, room = Memory.refusal, Memory.room_pages

        def refusal(memory: Memory, demand: Demand) -> CapacityRefusal | None:
            return honest(memory, (10**6,)) if self.refuse else honest(memory, demand)

        monkeypatch.setattr(Memory, "refusal", refusal)
        monkeypatch.setattr(Memory, "room_pages", lambda memory, planned: 0 if self.refuse else room(memory, planned))


def test_a_lone_parked_chunk_ends_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else holds memory and the chunk still does not fit: it ends with that reason and where it lacked."""
    chain = Disagreeing(monkeypatch)
    world = World(CoreConfig(page_size=4, max_batched_tokens=8, max_running_requests=2))
    world.send("r", 20, 4)
    world.tick()
    world.report()
    chain.refuse = True
    world.tick()
    assert world.finished("r").reason == "memory"
    assert "band full" in world.finished("r").detail
    chain.refuse = False
    world.run()
    with pytest.raises(AssertionError, match="what fits the empty arena is served"):
        world.check_rest()
    world.check_rest(refused=True)


def test_a_chunk_does_not_end_while_others_hold_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With company, or with a forward in flight, the chunk parks and waits."""
    chain = Disagreeing(monkeypatch)
    world = World(CoreConfig(page_size=4, max_batched_tokens=8, max_running_requests=2))
    world.send("r", 20, 4)
    world.tick()
    chain.refuse = True
    world.tick()
    assert stage(world, "r") == "parked_chunk"
    chain.refuse = False
    world.run()
    world.check_rest()
    assert world.finished("r").reason == "length"


def test_what_can_never_fit_ends_as_unschedulable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing holds memory, nothing is in flight and the head does not fit: it ends instead of blocking the queue."""
    chain = Disagreeing(monkeypatch)
    world = World(CoreConfig(page_size=4, max_running_requests=2))
    world.send("a", 5, 2)
    world.send("b", 5, 2)
    chain.refuse = True
    world.tick()
    assert {world.finished(id).reason for id in ("a", "b")} == {"unschedulable"}
    assert "band full" in world.finished("a").detail
    chain.refuse = False
    world.run()
    world.check_rest(refused=True)


def test_a_livelock_is_detected_and_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token scheduled for `stall_steps` ticks with work waiting and nothing in flight: one report, then a timer."""
    chain = Disagreeing(monkeypatch)
    world = World(CoreConfig(page_size=1, max_running_requests=1, stall_steps=5, overlap=False))
    world.send("r", 3, 9)
    world.send("next", 3, 9)
    world.tick()
    world.report()
    chain.refuse = True
    world.run()
    (stalled,) = world.verdicts("stalled")
    assert stalled.numbers["ticks"] == 5
    assert stalled.numbers["live"] == 2
    assert world.core.gauges()["stalls_total"] == 1
    out = world.tick()
    assert out.due_ns == world.now_ns + 1_000_000_000, "it is tried again later"
    assert not out.wants_tick
    world.now_ns += 400_000_000
    later = world.send("third", 3, 9)
    assert later.due_ns == out.due_ns, "inputs do not put it off"
    chain.refuse = False
    world.tick()
    world.run()
    world.check_rest()
    assert world.finished("r").reason == world.finished("next").reason == "length"
