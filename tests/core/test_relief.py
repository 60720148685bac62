"""The relief ladder: each rung runs where it stands, gives what its verdict says, and falls through when it is less."""

from __future__ import annotations

import random

import pytest

from allocator.capacity import CapacityRefusal, Demand
from daemon.core import pressure
from daemon.core.limits import CoreConfig
from daemon.core.memory import Memory
from daemon.core.outputs import Decided
from tests.core.rank_double import Shape
from tests.core.scenes import chunk_retracted, crowd, drive, last_row_parks, parked_and_shrunk, stage
from tests.core.world import World

ROWS_RUNGS = ["reclaim", "spill", "throttle", "retract", "park"]
CHUNK_RUNGS = ["reclaim", "spill", "shrink", "park", "end"]


def rungs(decided: Decided) -> list[str]:
    """The rungs that ran in a climb."""
    return [rung.split(":")[0] for rung in decided.reason.split(" > ")]


def climbs(world: World, request: int | None = None) -> list[Decided]:
    """Every climb that was told; of one request's chunk, or (0) of rows."""
    return [one for one in world.verdicts("relief") if request is None or one.request == request]


class Narrow:
    """A memory that has room for as many more pages as a test says, whatever is free; it still takes honestly.

    `once`: only until somebody was told how much room there is.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.once = False
        refusal, room_pages = Memory.refusal, Memory.room_pages

        def refuse(memory: Memory, demand: Demand) -> CapacityRefusal | None:
            if self.room is None or demand[-1] <= self.room:
                return refusal(memory, demand)
            return refusal(memory, memory.demand(10**6))

        def room(memory: Memory, planned: Demand) -> int:
            if self.room is None:
                return room_pages(memory, planned)
            left = max(0, self.room - planned[-1])
            self.room = None if self.once else self.room
            return left

        monkeypatch.setattr(Memory, "refusal", refuse)
        monkeypatch.setattr(Memory, "room_pages", room)


def small(**changes: object) -> World:
    """Three requests that decode, in a memory with room to spare."""
    config: dict[str, object] = {"page_size": 1, "max_running_requests": 4, "max_batched_tokens": 64, "overlap": False}
    world = World(CoreConfig(**config | changes), pages=300, caching=False)  # type: ignore[arg-type]
    for k in range(3):
        world.send(f"r{k}", 5 + k, 30)
    drive(world, lambda: all(stage(world, f"r{k}") == "running" for k in range(3)))
    while world.reports_waiting:
        world.report()
    return world


# --- the tables ------------------------------------------------------------------------------------------------------


def test_the_ladders_have_these_rungs_in_this_order() -> None:
    """Rows may take from others and never end for memory; a chunk shrinks, parks, or ends, and takes from nobody."""
    assert [rung.name for rung in pressure.ROWS_LADDER] == ROWS_RUNGS
    assert [rung.name for rung in pressure.CHUNK_LADDER] == CHUNK_RUNGS


def test_reclaim_what_the_cache_holds_comes_before_anybody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached pages that nobody reads pay for rows and chunks: no climb, no retraction, and the evictions are told."""
    config = CoreConfig(page_size=4, max_running_requests=2, max_batched_tokens=64)
    world = World(config, pages=40)
    for k in range(3):
        world.send(f"old{k}", [k * 7 + j for j in range(40)], 2)
        world.run()
    before = world.core.gauges()
    assert before["cached_units_full"] > 25
    world.send("new", [90 - j for j in range(60)], 60)
    world.run()
    after = world.core.gauges()
    assert (after["climbs_total"], after["retractions_total"]) == (0, 0)
    told = sum(one.numbers["units_full"] for one in world.verdicts("evicted"))
    assert told == after["evicted_units_full_total"] > 0
    assert {one.reason for one in world.verdicts("evicted")} == {"reclaim"}
    assert all(min(one.numbers.values()) > 0 for one in world.verdicts("evicted"))
    world.check_rest()


def test_what_a_quota_takes_from_the_cache_is_told_apart() -> None:
    """A namespace beyond its quota gives pages back though nobody needs them: evicted for the quota, not reclaimed."""
    config = CoreConfig(page_size=4, max_running_requests=2, max_batched_tokens=64, cache_quotas={"salt:a": 200_000})
    world = World(config, pages=60, caching=True)
    for k in range(4):
        world.send(f"r{k}", [k * 7 + j for j in range(40)], 2, namespace="salt:a")
        world.run()
    told, gauges = world.verdicts("evicted"), world.core.gauges()
    assert {one.reason for one in told} == {"quota"}
    assert sum(one.numbers["units_full"] for one in told) == gauges["quota_evicted_units_full_total"] > 0
    assert gauges["cached_units_full"] <= 12
    world.check_rest()


def test_spill_has_no_tier_and_says_so() -> None:
    """The second rung runs in every climb and gives nothing: there is no host tier."""
    for world in (parked_and_shrunk(), last_row_parks()):
        world.run()
        told = climbs(world)
        assert told
        assert all(one.reason.startswith("reclaim > spill: no tier > ") for one in told)
        assert {one.numbers["spill_units"] for one in told} == {0}


def test_throttle_admits_nobody_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were short once: the next steps admit nobody, whoever arrives."""
    narrow, world = Narrow(monkeypatch), small()
    narrow.room = 2
    world.tick()
    (told,) = climbs(world)
    assert told.numbers["throttle_steps"] == pressure.THROTTLE_STEPS
    narrow.room = None
    world.send("late", 3, 3)
    forwards = world.core.gauges()["forwards_total"]
    drive(world, lambda: stage(world, "late") != "waiting")
    assert world.core.gauges()["forwards_total"] - forwards >= pressure.THROTTLE_STEPS - 1
    assert [one.reason for one in world.verdicts("waits") if one.request == 1] == ["throttled"], "the head is told"
    world.run()
    world.check_rest()


def test_retract_stops_at_the_first_victim_that_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three rows fit: one is retracted, the cheapest, and the climb ends there with its numbers."""
    narrow, world = Narrow(monkeypatch), small()
    narrow.room = 2
    world.tick()
    (told,), (victim,) = climbs(world), world.verdicts("retracted")
    assert rungs(told) == ["reclaim", "spill", "throttle", "retract"]
    assert (told.request, told.by) == (0, 1)
    assert (told.numbers["rows"], told.numbers["pages"]) == (3, 3)
    assert (told.numbers["retract_requests"], told.numbers["retract_pages"]) == (1, victim.numbers["pages"])
    assert told.numbers["units_short"] > 0
    assert stage(world, "r0") == "retracted"
    narrow.room = None
    world.run()
    world.check_rest()


def test_retract_falls_through_to_park_when_it_gives_less_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page at all: victims go until one row is left, which nobody may take; it parks and comes back."""
    narrow, world = Narrow(monkeypatch), small()
    narrow.room = 0
    world.tick()
    (told,) = climbs(world)
    assert rungs(told) == ROWS_RUNGS
    assert (told.numbers["retract_requests"], told.numbers["park_requests"]) == (2, 1)
    assert sorted(stage(world, f"r{k}") for k in range(3)) == ["parked_row", "retracted", "retracted"]
    narrow.room = None
    world.run()
    world.check_rest()
    assert {world.finished(f"r{k}").reason for k in range(3)} == {"length"}


def test_where_nobody_may_be_retracted_the_rung_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are protected: the rung gives nothing, the youngest park, the oldest get the page there is."""
    narrow, world = Narrow(monkeypatch), small(retracts_max=0)
    narrow.room = 1
    world.tick()
    (told,) = climbs(world)
    assert told.reason == "reclaim > spill: no tier > throttle > retract: nobody may be > park"
    assert told.numbers["park_requests"] == 2
    assert [stage(world, f"r{k}") for k in range(3)] == ["running", "parked_row", "parked_row"]
    narrow.room = None
    world.run()
    world.check_rest()


def test_the_resident_may_be_the_victim() -> None:
    """A chunk in the middle of its prompt is the cheapest: it goes back to the queue and is prefilled again later."""
    world = chunk_retracted()
    number = world.clients["fe", "long"].accepted.first_request
    world.run()
    told = [one for one in world.verdicts("retracted") if one.request == number]
    assert told
    assert told[0].numbers["tokens"] < 20, "it was still being prefilled"
    world.check_rest()


@pytest.mark.parametrize("scene", [parked_and_shrunk, chunk_retracted])
def test_a_chunk_never_retracts_anybody(scene: object) -> None:
    """Every retraction is for rows: the chunk's climbs have no such rung, and no retraction names its request."""
    world = scene()  # type: ignore[operator]
    world.run()
    number = world.clients["fe", "long"].accepted.first_request
    for one in climbs(world, number):
        assert not set(rungs(one)) & {"throttle", "retract"}
        assert not [name for name in one.numbers if name.startswith("retract")]
    assert all(one.by != number or stage(world, "long") == "ended" for one in world.verdicts("retracted"))
    world.check_rest()


def test_shrink_takes_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a chunk fits: it runs with that, and both numbers are told."""
    narrow = Narrow(monkeypatch)
    world = World(CoreConfig(page_size=4, max_batched_tokens=16, max_running_requests=2, overlap=False))
    world.send("r", 40, 4)
    world.turn()
    world.turn()
    narrow.room = 2
    world.turn()
    (told,), (shrunk,) = climbs(world), world.verdicts("shrunk")
    assert rungs(told) == ["reclaim", "spill", "shrink"]
    assert (told.request, told.numbers["tokens"], told.numbers["shrink_tokens"]) == (1, 16, 8)
    assert shrunk.numbers == {"tokens": 8, "wanted_tokens": 16}
    narrow.room = None
    world.run()
    world.check_rest()


def test_park_keeps_a_chunk_beside_others_and_admits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits and others hold memory: zero tokens, everything kept, told once, and the queue waits for it."""
    narrow = Narrow(monkeypatch)
    config = CoreConfig(page_size=16, max_batched_tokens=16, max_running_requests=3, overlap=False)
    world = World(config, caching=False)
    world.send("small", 3, 12)
    world.turn()
    world.turn()
    world.send("long", 60, 4)
    drive(world, lambda: stage(world, "long") == "prefilling")
    world.send("next", 3, 3)
    narrow.room = 0
    for _ in range(6):
        world.turn()
    assert stage(world, "long") == "parked_chunk"
    shrunk, told = climbs(world, 2)
    assert rungs(shrunk) == ["reclaim", "spill", "shrink"], "its last page had room"
    assert rungs(told) == ["reclaim", "spill", "shrink", "park"]
    assert told.numbers["shrink_tokens"] == 0
    view = world.core.request_view(2)
    assert view is not None
    assert view["waits_for"] == "memory"
    assert view["waits_numbers"]["units_short"] > 0
    assert stage(world, "next") == "waiting"
    assert [one.reason for one in world.verdicts("waits") if one.request == 3][-1] == "parked"
    assert world.core.view()["relief"]["chunk"][0] == told.reason
    narrow.room = None
    world.run()
    world.check_rest()
    assert "chunk" not in world.core.view()["relief"]


def test_end_comes_only_when_nobody_else_holds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and with no room: reason memory, and the next in the queue starts in the same pass if it fits."""
    narrow = Narrow(monkeypatch)
    world = World(CoreConfig(page_size=4, max_batched_tokens=8, max_running_requests=2, overlap=False))
    world.send("long", 20, 4)
    world.turn()
    world.turn()
    world.send("next", 3, 3)
    narrow.room, narrow.once = 0, True
    world.turn()
    (told,) = climbs(world)
    assert rungs(told) == ["reclaim", "spill", "shrink", "end"]
    assert world.finished("long").reason == "memory"
    assert stage(world, "next") == "running"
    world.run()
    world.check_rest(refused=True)


# --- bounds and numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retracts_max", [0, 1, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_retractions_per_request_are_bounded_under_any_load(retracts_max: int, caching: bool) -> None:
    """Far more is asked for than fits: nobody is retracted more often than the bound, and everybody is served."""
    config = CoreConfig(
        page_size=2, max_running_requests=8, max_batched_tokens=64, chunked_prefill_size=8, retracts_max=retracts_max
    )
    world = World(config, pages=50, caching=caching)
    for k in range(16):
        world.send(f"r{k}", 4 + k % 5, 30)
    world.run()
    world.check_rest()
    times = [one.numbers["retractions"] for one in world.verdicts("ended")]
    assert max(times) <= retracts_max
    assert sum(times) == world.core.gauges()["retractions_total"]


def test_M2_each_retraction_is_one_line_with_its_numbers() -> None:
    """Victim, reason, for whom, pages freed, work lost, times so far and the pressure that led to it; sums agree."""
    world = crowd(80, 1, 20, 1)
    world.run()
    told = world.verdicts("retracted")
    totals = world.core.gauges()
    assert len(told) == totals["retractions_total"] > 1
    for one in told:
        assert one.request > 0
        assert one.reason == "memory"
        assert one.by != one.request
        assert one.numbers["pages"] > 0
        assert one.numbers["lost_tokens"] == one.numbers["tokens"] - one.numbers["cached_tokens"]
        assert {"units_short", "stage", "band"} <= set(one.numbers)
    assert sum(one.numbers["lost_tokens"] for one in told) == totals["retracted_tokens_total"]
    by_request = {one.request: one.numbers["times"] for one in told}
    assert by_request == {
        one.request: one.numbers["retractions"] for one in world.verdicts("ended") if one.request in by_request
    }


def test_retraction_numbers_name_every_band() -> None:
    """With windows and state the units of each band that came back are in the line."""
    config = CoreConfig(page_size=4, checkpoint_interval=16, max_running_requests=6, max_batched_tokens=64)
    world = World(config, pages=44, shape=Shape(windows=(20,), state=True), caching=True)
    for k in range(6):
        world.send(f"r{k}", [k * 11 + j for j in range(10)], 60)
    world.run()
    told = world.verdicts("retracted")
    assert told
    assert all({"pages", "units_state", "units_window:20"} <= set(one.numbers) for one in told)
    assert max(one.numbers["units_state"] for one in told) >= 1
    world.check_rest()


@pytest.mark.parametrize("caching", [True, False])
def test_tokens_computed_again_have_a_total_of_their_own(caching: bool) -> None:
    """All that was scheduled is the prompts less hits, plus outputs but the last, plus what was computed again."""
    config = CoreConfig(page_size=1, max_running_requests=3, max_batched_tokens=64, overlap=False)
    world = World(config, pages=60, caching=caching)
    for k in range(3):
        world.send(f"r{k}", [k * 30 + j for j in range(8 + k)], 20)
    world.run()
    totals = world.core.gauges()
    assert totals["retractions_total"] > 0
    first = sum(8 + k for k in range(3))
    again = totals["recomputed_tokens_total"]
    assert totals["prompt_tokens_total"] - again >= first
    # What the queue made of it: a request that resumes prefills its prompt and the output that it had.
    kept = sum(one.numbers["tokens"] for one in world.verdicts("admitted")) - first
    assert again <= kept
    assert (
        again + sum(one.numbers.get("cached_tokens", 0) for one in world.verdicts("admitted"))
        >= kept - totals["retractions_total"]
    )
    if not caching:
        assert again == totals["retracted_tokens_total"]
    world.check_rest()


def test_a_retraction_for_priority_says_so_and_is_counted_apart() -> None:
    """The same transition for another reason: told as such, counted in both totals, nobody else is held back."""
    world = small()
    state = world.core._state
    out_before = len(world.decisions)
    from daemon.core.outputs import Outputs

    out = Outputs()
    pressure.retract(state, state.requests[1], 3, {"asked": 1}, world.now_ns, out, reason="priority")
    (told,) = out.decisions
    assert (told.verdict, told.request, told.by, told.reason) == ("retracted", 1, 3, "priority")
    assert told.numbers["asked"] == 1
    totals = world.core.gauges()
    assert (totals["preemptions_total"], totals["retractions_total"]) == (1, 1)
    assert state.throttled_steps == 0
    assert len(world.decisions) == out_before
    world.wants_tick = True
    world.run()
    world.check_rest()


def test_a_climb_that_changes_nothing_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone row without a page: one climb is told, however many ticks find the same."""
    narrow = Narrow(monkeypatch)
    world = World(CoreConfig(page_size=1, max_running_requests=1, stall_steps=50, overlap=False))
    world.send("r", 3, 9)
    world.turn()
    world.turn()
    narrow.room = 0
    for _ in range(20):
        world.tick()
    assert len(climbs(world)) == 1
    assert world.core.gauges()["climbs_total"] == 20
    narrow.room = None
    world.run()
    world.check_rest()


def test_a_livelock_is_reported_with_the_last_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report carries what the ladder did last, rung by rung, who waits for what, and the numbers of both."""
    narrow = Narrow(monkeypatch)
    world = World(CoreConfig(page_size=1, max_running_requests=2, stall_steps=5, overlap=False))
    world.send("r", 3, 9)
    world.turn()
    world.turn()
    world.send("next", 3, 9)
    narrow.room = 0
    world.run()
    (stalled,) = world.verdicts("stalled")
    assert stalled.reason.startswith(
        "livelock: rows: reclaim > spill: no tier > throttle > retract: nobody may be > park"
    )
    assert "request 2 waits: parked" in stalled.reason
    assert stalled.numbers["rows_units_short"] > 0
    assert stalled.numbers["rows_park_requests"] == stalled.numbers["parked"] == 1
    assert stalled.numbers["waits_requests"] == 1
    narrow.room = None
    world.tick()
    world.run()
    world.check_rest()
    assert world.finished("r").reason == world.finished("next").reason == "length"


FAMILIES = {"full": Shape(), "window": Shape(windows=(12,)), "state": Shape(windows=(20,), state=True)}


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("seed", range(3))
def test_whatever_memory_answers_nothing_is_raised_and_everybody_ends(
    seed: int, family: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory that says no whenever it likes, hundreds of times: no rung raises, nothing leaks, all tokens come.

    A request whose chunk was refused while it was alone ends with memory, one that never began with unschedulable; all
    others get their whole output, and nobody is retracted beyond the bound.
    """
    rng = random.Random(f"{seed} {family} {policy}")
    refusal, room_pages = Memory.refusal, Memory.room_pages
    asked = 0

    def moody() -> bool:
        nonlocal asked
        asked += 1
        return asked < 400 and rng.random() < 0.35

    monkeypatch.setattr(Memory, "refusal", lambda memory, d: refusal(memory, memory.demand(10**6) if moody() else d))
    monkeypatch.setattr(Memory, "room_pages", lambda memory, d: 0 if moody() else room_pages(memory, d))
    config = CoreConfig(
        page_size=2,
        checkpoint_interval=4,
        max_running_requests=4,
        max_batched_tokens=32,
        chunked_prefill_size=8,
        retracts_max=3,
        schedule_policy=policy,
        overlap=rng.random() < 0.5,
    )
    world = World(config, pages=60, shape=FAMILIES[family], caching=True)
    for k in range(10):
        prompt = [rng.randrange(90) for _ in range(rng.choice([3, 17, 30]))]
        world.send(f"r{k}", prompt, rng.choice([2, 14]), priority=rng.randint(0, 2) if policy == "priority" else 0)
        for _ in range(rng.randrange(6)):
            world.turn()
    world.run()
    world.check_rest(refused=True)
    assert asked > 60
    ended = world.verdicts("ended")
    assert {one.reason for one in ended} <= {"length", "memory", "unschedulable"}
    assert max(one.numbers["retractions"] for one in ended) <= 3
    assert len(climbs(world)) > 3
    for one in climbs(world):
        assert rungs(one) == [name for name in (CHUNK_RUNGS if one.request else ROWS_RUNGS) if name in rungs(one)]
