"""Incidents and reports about pressure, queues and preemption, each with its set-up, its action and what is right.

What a log shows best stands in `tests/scenarios`; here is what a property or a sweep shows.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from allocator.errors import InvariantBroken
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from tests.core.scenes import crowd, drive, last_row_parks, parked_and_shrunk, stage
from tests.core.workload import FAMILIES, Workload
from tests.core.world import World, facts
from tools.worlds.prompts import stream_tokens

SMALL = CoreConfig(
    page_size=4, max_running_requests=4, max_batched_tokens=64, chunked_prefill_size=64, checkpoint_interval=8
)


def tokens_of(stream: int, count: int) -> list[int]:
    """A prompt."""
    return stream_tokens(stream, count, 97)


# --- what runs, and how many -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_incident_6_rows_are_counted_with_a_resident_chunk_under_preemption(limit: int, policy: str) -> None:
    """A chunk in flight, the cap reached, and a priority that wants a row: the cap holds, nothing asserts."""
    config = msgspec.structs.replace(
        SMALL,
        max_running_requests=limit,
        max_batched_tokens=16,
        chunked_prefill_size=4,
        schedule_policy=policy,
        priority_preemption=policy != "fcfs",
    )
    world = World(config)
    for k in range(6):
        world.send(f"r{k}", 5 + 6 * (k % 2), 12, priority=0 if policy == "fcfs" else k)
        world.turn()
    while world.turn():
        gauges = world.core.gauges()
        assert gauges["running"] + gauges["prefilling"] <= limit
    world.check_rest()
    assert world.rank is not None
    assert max(world.rank.rows) == limit - 1


@pytest.mark.parametrize("chunks_before", range(6))
def test_C2_an_abort_in_mid_prefill_beside_others_gives_back_what_the_chunk_holds(chunks_before: int) -> None:
    """Cancelled after chunk k while others decode and one waits: one terminal event, and the next gets its pages."""
    config = msgspec.structs.replace(SMALL, chunked_prefill_size=8, max_batched_tokens=10)
    world = World(config, pages=20)
    world.send("decodes", 4, 30)
    world.send("chunked", tokens_of(1, 48), 2)
    world.send("waits", tokens_of(2, 48), 2)
    for _ in range(2 + 2 * chunks_before):
        world.turn()
    world.abort("chunked")
    assert world.finished("chunked").reason == "abort"
    world.run()
    world.check_rest()
    assert world.finished("waits").reason == "length"


def test_C4_a_chunk_that_is_parked_for_long_raises_no_alarm_and_a_leak_beside_it_does() -> None:
    """The strict checks know who holds what while a chunk is parked; a page that nobody holds is found all the same."""
    for leak in (False, True):
        world = parked_and_shrunk()
        drive(world, lambda world=world: stage(world, "long") == "parked_chunk")  # type: ignore[misc]
        memory = world.core._state.memory
        assert memory is not None
        parked = 0
        while stage(world, "long") == "parked_chunk":
            parked += 1
            world.check_owners()
            world.turn()
        assert parked > 1
        if not leak:
            world.run()
            world.check_rest()
            continue
        drive(world, lambda world=world, memory=memory: memory.refusal(memory.demand(1)) is None)  # type: ignore[misc]
        memory.take(memory.demand(1))
        with pytest.raises(AssertionError):
            world.check_owners()
        with pytest.raises(InvariantBroken, match="still holds"):
            world.feed(inputs.EpochEnded(world.now_ns, world.epoch, "test"))


@pytest.mark.parametrize("scene", [parked_and_shrunk, last_row_parks])
def test_C7_what_comes_late_for_who_was_parked_or_retracted_is_counted_once(scene: object) -> None:
    """Tokens delivered, tokens discarded and tokens sampled add up, whatever was in flight."""
    world: World = scene()  # type: ignore[operator]
    sampled = 0
    while world.wants_tick or world.reports_waiting:
        if not world.wants_tick and world.rank is not None:
            sampled += len(world.rank.reports[0].tokens) // 8
        world.turn()
    gauges = world.core.gauges()
    assert gauges["output_tokens_total"] + gauges["surplus_tokens_total"] == sampled
    world.check_rest()


# --- memory that is promised -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_H8_what_counts_as_evictable_is_had_to_the_last_unit(family: str) -> None:
    """The arena is full of cached prefixes: the largest request that an empty arena holds runs, and nobody pays."""
    world = World(SMALL, pages=60, model=facts(97, 4000), shape=FAMILIES[family], caching=True)
    memory = world.core._state.memory
    assert memory is not None
    number = 0
    while memory.refusal(memory.demand(10, memory.slots_each)) is None and number < 40:
        world.send(f"warm{number}", tokens_of(number, 30), 2)
        world.run()
        if memory.chain.refusal(memory.demand(4, memory.slots_each)) is not None:
            break
        number += 1
    assert number < 40, "the cache fills the arena"
    held = world.core.gauges()["capacity_pages"]
    world.send("large", tokens_of(1000, memory.capacity_tokens), 1)
    world.run()
    assert world.finished("large").reason == "length", world.finished("large").detail
    gauges = world.core.gauges()
    assert gauges["retractions_total"] == gauges["parks_total"] == 0
    assert held > 0
    world.check_rest()


def test_H8_a_zero_budget_schedules_no_chunk() -> None:
    """With nothing free and nothing reclaimable the resident chunk has no token in any step until it is unparked."""
    world = parked_and_shrunk()
    drive(world, lambda: stage(world, "long") == "parked_chunk")
    row = next(entry["row"] for entry in world.core.view()["requests"] if entry["id"] == "long")
    parked_at, steps = world.now_ns, len(world.steps)
    drive(world, lambda: bool(world.verdicts("unparked")))
    assert world.verdicts("unparked")[0].now_ns > parked_at
    for step in world.steps[steps - 1 : -1]:
        assert step.forward is None or row not in np.frombuffer(step.forward.rows, "<i4")
    assert world.steps[-1].forward is not None
    assert row in np.frombuffer(world.steps[-1].forward.rows, "<i4"), "it goes on in the step that unparks it"
    world.run()
    world.check_rest()


def test_U8_a_request_with_state_and_windows_holds_at_most_what_it_was_charged() -> None:
    """Under every policy for checkpoints and for what is stored: the peak per band is the ceiling, never above it."""
    for checkpoint_policy in ("likely", "grid"):
        for store in (True, False):
            config = msgspec.structs.replace(SMALL, checkpoint_policy=checkpoint_policy, chunked_prefill_size=12)
            world = World(config, pages=200, shape=FAMILIES["windows_state"], caching=True)
            world.send("r", tokens_of(5, 61), 30, store=store)
            state, most = world.core._state, [0, 0, 0, 0]
            while world.turn():
                for owner in state.rows.owners:
                    if owner is not None:
                        held = [len(ids) for ids in state.rows.held(owner.row)]
                        most = [max(pair) for pair in zip(most, held, strict=True)]
                        assert all(have <= limit for have, limit in zip(held, owner.ceiling, strict=True))
            assert most[0] == state.memory.slots_each  # type: ignore[union-attr]
            world.check_rest()


def test_S1_every_slot_of_a_request_is_taken_at_once_or_none_under_random_load() -> None:
    """At no moment does a row own some of its state slots."""
    for seed in range(6):
        workload = Workload(seed, pressed=bool(seed % 2), family="window_state", caching=True)
        for _ in range(80):
            workload.act()
            state = workload.world.core._state
            if state.memory is None:
                continue
            for owner in state.rows.owners:
                if owner is not None and state.memory.slots_each == 2:
                    assert state.rows.slots[owner.row, 0] > 0, "a row has its working slot"
                    assert state.rows.slots[owner.row, 1] > 0, "and the one for its checkpoint"


# --- throughput and fairness -----------------------------------------------------------------------------------------


def forwards(reserve: str, pages: int, used_ppm: int) -> tuple[int, int]:
    """Forwards until twenty requests are done, and retractions; each uses `used_ppm` of the output that it asks for."""
    config = msgspec.structs.replace(
        SMALL, page_size=1, max_running_requests=10, max_batched_tokens=128, reserve=reserve, retracts_max=2
    )
    world = World(config, pages=pages, caching=False)
    for k in range(20):
        world.send(f"r{k}", tokens_of(k, 10), 30)
    while world.turn():
        for (frontend, id), client in world.clients.items():
            done = len(client.tokens[0])
            if not client.finished and done >= 30 * used_ppm // 1_000_000 and used_ppm < 1_000_000:
                world.feed(inputs.FinishAsked(world.now_ns, frontend, id, 0, done))
    world.check_rest()
    gauges = world.core.gauges()
    return gauges["forwards_total"], gauges["retractions_total"]


@pytest.mark.parametrize("used_ppm", [300_000, 1_000_000])
def test_H10_overcommitting_never_costs_more_than_it_brings(used_ppm: int) -> None:
    """From 0.8 to 2.0 times the memory, the estimate needs at most 5% more forwards than full reservation."""
    demand = 10 * 39  # pages that ten requests hold at their longest
    for oversubscription in range(8, 21, 2):
        pages = demand * 10 // oversubscription
        (estimate, retractions), (full, none) = forwards("estimate", pages, used_ppm), forwards("full", pages, used_ppm)
        assert none == 0
        assert estimate <= full * 105 / 100 + 1, f"{oversubscription / 10}x: {estimate} forwards, {full} with full"
        assert retractions <= 20 * 2


def test_O3_a_high_priority_takes_a_row_and_the_low_one_resumes_with_equal_output() -> None:
    """All rows are taken by low priorities: the high one is admitted in the next step, and all tokens are right."""
    config = msgspec.structs.replace(
        SMALL, max_running_requests=2, schedule_policy="priority", priority_preemption=True
    )
    world = World(config)
    for k in range(2):
        world.send(f"low{k}", tokens_of(k, 8), 20, priority=-1)
    for _ in range(6):
        world.turn()
    world.send("high", tokens_of(9, 8), 3, priority=5)
    drive(world, lambda: bool(world.wants_tick))
    world.tick()
    assert stage(world, "high") in ("prefilling", "running"), "within one step's decision"
    (preempted,) = world.verdicts("retracted")
    assert preempted.reason == "priority"
    assert world.by_request[preempted.by][0].generate.id == "high"
    world.run()
    world.check_rest()
    assert all(world.output(f"low{k}") == world.expected(f"low{k}")[0] for k in range(2))


def test_O3_equal_priorities_take_nothing_from_each_other() -> None:
    """Preemption is for the higher priority alone: an equal one waits for a row."""
    config = msgspec.structs.replace(
        SMALL, max_running_requests=1, schedule_policy="priority", priority_preemption=True
    )
    world = World(config)
    world.send("first", 8, 10, priority=3)
    for _ in range(4):
        world.turn()
    world.send("second", 8, 3, priority=3)
    world.run()
    world.check_rest()
    assert not world.verdicts("retracted")


def test_R9_a_namespace_that_floods_does_not_slow_down_another() -> None:
    """One tenant sends fifty requests, another three: the three are done after a few turns, not after the flood."""
    config = msgspec.structs.replace(
        SMALL, max_running_requests=2, schedule_policy="fair", fair_quantum_tokens=16, enable_prefix_caching=False
    )
    world = World(config)
    for k in range(50):
        world.send(f"flood{k}", tokens_of(k, 12), 4, namespace="flood")
    for k in range(3):
        world.send(f"few{k}", tokens_of(100 + k, 12), 4, namespace="few")
    world.run()
    world.check_rest()
    ended = [world.by_request[one.request][0].generate.id for one in world.verdicts("ended")]
    last = max(ended.index(f"few{k}") for k in range(3))
    assert last <= 10, f"the three were done as number {last + 1} of 53"


def test_O1_a_queue_at_its_limit_costs_the_accepted_ones_nothing() -> None:
    """Ten times the load that fits the queue: the accepted ones need as many forwards as without the refused."""
    config = msgspec.structs.replace(SMALL, max_queued_requests=10)
    counted = []
    for offered in (10, 100):
        world = World(config, caching=False)
        for k in range(offered):
            world.send(f"r{k}", tokens_of(k, 8), 6)
        world.run()
        world.check_rest()
        counted.append(world.core.gauges()["forwards_total"])
    assert counted[0] == counted[1]


def test_O5_declared_lengths_under_every_policy_are_never_taken_back() -> None:
    """With full reservation nobody is retracted or parked, whatever the order of the queue and of evictions."""
    for seed in range(12):
        world = Workload(seed, pressed=True, caching=True, family="window", reserve="full", priority_preemption=False)
        world.run(100)
        gauges = world.world.core.gauges()
        assert gauges["retractions_total"] == gauges["parks_total"] == 0, f"seed {seed}"


def test_M2_a_preemption_is_told_like_any_retraction() -> None:
    """Victim, for whom, reason, pages freed, work lost and how often: of memory and of priority alike."""
    world = crowd(70, 4, 20, 6)
    world.run()
    for one in world.verdicts("retracted"):
        assert {"pages", "tokens", "times"} <= set(one.numbers)
        assert one.numbers["pages"] > 0
        assert one.by in world.by_request or one.by == 0
    world.check_rest()
