"""Incidents of serving systems of this kind, each as the state that led to it, the action, and the right behaviour.

The numbers are those of our list of incidents; the ones that concern parts not built yet are tested with those parts.
"""

from __future__ import annotations

import numpy as np
import pytest

from allocator.capacity import Demand
from allocator.checks import OFF, STRICT, WARN, Checks
from allocator.columns import i64, pack_i64
from allocator.errors import InvariantBroken
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.memory import Memory
from daemon.core.scheduler import SchedulerCore
from ipc.messages import EXPLICIT, Generate, Sampling
from tests.core.rank_double import geometry
from tests.core.scenes import drive, last_row_parks, parked_and_shrunk, stage
from tests.core.workload import Workload
from tests.core.world import World, facts


def test_incident_1_a_resident_chunk_parks_when_nothing_is_free() -> None:
    """Nothing free, nothing reclaimable, a chunk resident: it parks with zero tokens and goes on when memory frees."""
    world = parked_and_shrunk()
    drive(world, lambda: stage(world, "long") == "parked_chunk")
    gauges = world.core.gauges()
    assert gauges["live_units_full"] == gauges["capacity_pages"], "nothing is free"
    row = next(entry["row"] for entry in world.core.view()["requests"] if entry["id"] == "long")
    forward = world.steps[-1].forward
    assert forward is not None
    assert row not in np.frombuffer(forward.rows, np.int32), "the parked chunk has no tokens in the step"
    world.run()
    world.check_rest()
    assert world.finished("long").reason == "length"


def test_incident_2_relief_that_was_paid_for_is_used() -> None:
    """After a retraction the decode rows that asked for it are in the very step that was short."""
    world = parked_and_shrunk()
    drive(world, lambda: bool(world.verdicts("retracted")))
    decision = world.verdicts("retracted")[0]
    asked = next(entry["row"] for entry in world.core.view()["requests"] if entry["request"] == decision.by)
    forward = world.steps[-1].forward
    assert forward is not None
    assert asked in np.frombuffer(forward.rows, np.int32)
    world.run()
    world.check_rest()


def test_incident_4_a_freed_page_is_visible_to_the_very_next_question() -> None:
    """A result ends a request and frees its pages; the admission in the next tick may have every one of them."""
    world = World(CoreConfig(page_size=4, max_running_requests=2), pages=4)
    world.send("all", 14, 3)
    world.send("next", 14, 3)
    drive(world, lambda: stage(world, "all") == "ended")
    world.tick()
    assert stage(world, "next") == "running"
    world.run()
    world.check_rest()


def test_incident_4_frees_of_one_input_are_counted_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question of memory sees what was given back before it, in whichever order they come."""
    asked: list[tuple[int, int]] = []
    honest = Memory.refusal

    def spy(memory: Memory, demand: Demand) -> object:
        answer = honest(memory, demand)
        held = sum(
            int(rows.pages[row])
            for rows in [world.core._state.rows]
            for row in range(rows.capacity)
            if rows.owners[row] is not None
        )
        asked.append((memory.live_units()[0], held))
        return answer

    world = parked_and_shrunk()
    monkeypatch.setattr(Memory, "refusal", spy)
    world.run()
    assert asked
    assert all(live == held for live, held in asked), "no page is in a place that nobody counts"


def test_incident_5_one_decision_serves_every_rank() -> None:
    """Every step carries the digest that all ranks must hold after it, and equal inputs lead to equal ones."""
    world = Workload(5, pressed=True).run(150)
    digests = [step.logical for step in world.steps]
    assert len(set(digests)) == len(digests)
    again = Workload(5, pressed=True).run(150)
    assert [step.logical for step in again.steps] == digests


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_incident_6_the_cap_on_running_requests_holds_with_a_chunk_resident(limit: int) -> None:
    """A chunked prompt in flight while the cap is reached: rows are counted with it, and nothing asserts."""
    config = CoreConfig(page_size=4, max_running_requests=limit, max_batched_tokens=16, chunked_prefill_size=4)
    world = World(config)
    for k in range(6):
        world.send(f"r{k}", 5 + 6 * (k % 2), 12)
    world.run()
    world.check_rest()
    assert world.rank is not None
    assert max(world.rank.rows) == limit - 1, "all rows were used, and no row beyond the cap"


def test_incident_7_a_request_without_tokens_has_an_extent_never_none() -> None:
    """Parked, retracted or waiting: the extent is (start, target), and a retracted one starts at (0, 0)."""
    world = parked_and_shrunk()
    seen = set()
    for _ in range(2000):
        for entry in world.core.view()["requests"]:
            start, target = entry["extent"]
            assert 0 <= start <= target
            seen.add((entry["stage"], start == target == 0))
        if not (world.wants_tick or world.reports_waiting):
            break
        if world.wants_tick:
            world.tick()
        else:
            world.report()
    assert {("retracted", True), ("parked_chunk", False), ("prefilling", False)} <= seen
    world.check_rest()


def test_incident_9_token_columns_have_one_width_on_every_path() -> None:
    """Explicit tokens of a step are whole int64 columns for first prompts and for kept output alike."""
    world = parked_and_shrunk()
    world.run()
    for step in world.steps:
        if step.forward is not None:
            counts = np.frombuffer(step.forward.counts, np.int32)
            flags = np.frombuffer(step.forward.flags, np.uint8)
            assert len(i64(step.forward.tokens)) == int(counts[(flags & EXPLICIT) != 0].sum())


def test_incident_11_a_drain_and_a_parked_chunk_do_not_wait_for_each_other() -> None:
    """A drain that begins while a chunk is parked ends: progress is scheduled tokens, and throttling follows it."""
    world = parked_and_shrunk()
    drive(world, lambda: stage(world, "long") == "parked_chunk")
    world.feed(inputs.Controlled(world.now_ns, "drain"))
    world.run()
    world.check_rest()
    assert world.finished("long").reason == "length"
    assert not world.verdicts("stalled")


def test_incident_12_what_can_never_fit_is_refused_before_anything_is_touched() -> None:
    """A demand above the empty arena is refused at arrival; what runs keeps every page."""
    world = World(CoreConfig(page_size=4, max_running_requests=2), pages=24)
    world.send("runs", 20, 6)
    world.tick()
    held = world.core.gauges()["live_units_full"]
    world.send("never", 200, 1)
    assert world.refusals[-1].code == "never_fits"
    assert world.core.gauges()["live_units_full"] == held
    world.run()
    world.check_rest()
    assert world.core.gauges()["retractions_total"] == 0


@pytest.mark.parametrize("seed", range(8))
def test_incident_13_a_question_changes_nothing(seed: int) -> None:
    """Asking what fits, at any moment and any number of times, leaves the state's digest as it was."""
    workload = Workload(seed, pressed=True)
    for _ in range(120):
        workload.act()
        core = workload.world.core
        before = core.state_digest()
        memory = core._state.memory
        for pages in (0, 1, 7, 10**6) if memory is not None else ():
            memory.refusal((pages,))
            memory.room_pages((pages,))
        core.gauges()
        core.view()
        assert core.state_digest() == before


def test_incident_21_an_aborted_chunk_hands_its_row_on_under_a_new_generation() -> None:
    """Abort in mid-prefill with the chunk in flight: the row's next owner starts afresh, nothing old is mixed in."""
    config = CoreConfig(page_size=4, max_running_requests=1, max_batched_tokens=8)
    world = World(config)
    world.send("chunked", 30, 4)
    world.tick()
    world.tick()
    world.abort("chunked")
    world.send("next", 7, 4)
    world.report()
    world.tick()
    forward = world.steps[-1].forward
    assert forward is not None
    assert np.frombuffer(forward.rows, np.int32).tolist() == [0]
    assert np.frombuffer(forward.generations, np.int32).tolist() == [2]
    assert np.frombuffer(forward.table_indexes, np.int32).tolist() == [0, 1], "its table starts at the first entry"
    world.run()
    world.check_rest()


def test_incident_22_a_wait_for_memory_says_whose() -> None:
    """Decisions about memory name stage, band and units short."""
    world = World(CoreConfig(page_size=4, max_running_requests=2), pages=6)
    world.send("a", 16, 8)
    world.send("b", 16, 8)
    world.tick()
    (waits,) = world.verdicts("waits")
    assert (waits.reason, waits.numbers["stage"], waits.numbers["band"]) == ("memory", 0, 0)
    assert waits.numbers["units_short"] > 0
    parked = last_row_parks()
    parked.run()
    assert {"stage", "band", "units_short"} <= set(parked.verdicts("parked")[0].numbers)
    world.run()
    world.check_rest()


@pytest.mark.parametrize("level", [OFF, WARN, STRICT])
def test_a_leak_is_found_when_nothing_is_live(level: int) -> None:
    """A page that stays live although the counts say nothing is held: the recount at idle names it, but at level 0."""
    core = SchedulerCore(CoreConfig(page_size=4), Checks(level))
    core.feed(inputs.EpochBegan(0, 1, geometry(8), facts()))
    core.feed(inputs.Arrived(0, "fe", Generate("r", pack_i64([1, 2, 3]), Sampling(), max_tokens=4), 1))
    memory = core._state.memory
    assert memory is not None
    memory.take((1,))
    memory.chain.counts[0] = 0
    core.feed(inputs.Aborted(0, "fe", "r", "client"))
    if level == OFF:
        assert [decision.verdict for decision in core.feed(inputs.Ticked(0)).decisions] == ["idle"]
        return
    with pytest.raises(InvariantBroken, match="counts 0 units, its ids do not"):
        core.feed(inputs.Ticked(0))


def test_what_is_still_held_at_idle_is_named() -> None:
    """A leak that is counted is told with its band and ids."""
    core = SchedulerCore(CoreConfig(page_size=4))
    core.feed(inputs.EpochBegan(0, 1, geometry(8), facts()))
    memory = core._state.memory
    assert memory is not None
    memory.take((2,))
    with pytest.raises(InvariantBroken, match="band full still holds 2 units: 1, 2"):
        core.feed(inputs.EpochEnded(0, 1, "test"))
