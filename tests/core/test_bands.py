"""Several bands: windows retire before anything is taken back, state is all or nothing, one decision for all bands."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.capacity import Demand
from allocator.checks import STRICT, Checks
from allocator.columns import i32, i64, pack_i64
from allocator.errors import InvariantBroken
from allocator.geometry import Geometry
from allocator.ops import Free, Take
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.scheduler import SchedulerCore
from tests.core.rank_double import Shape, geometry
from tests.core.scenes import drive, stage
from tests.core.workload import FAMILIES
from tests.core.world import World, facts

EVERYTHING = Shape(windows=(12, 6), state=True)


def world(shape: Shape, pages: int, caching: bool = False, **fields: object) -> World:
    """A world of several bands, pages of one token, without a cache unless a test is about one."""
    settings: dict[str, object] = {"page_size": 1, "max_running_requests": 4, "max_batched_tokens": 64}
    config = CoreConfig(**(settings | {"checkpoint_interval": 64} | fields))  # type: ignore[arg-type]
    return World(config, pages, shape=shape, caching=caching)


def live(one: World) -> Demand:
    """Live units per band."""
    memory = one.core._state.memory
    assert memory is not None
    return memory.live_units()


# --- windows ---------------------------------------------------------------------------------------------------------


def test_W1_expired_window_rows_go_back_before_anybody_is_retracted() -> None:
    """Prefill filled the window band with rows that every window has left: the decode step that is short frees them."""
    shape = Shape(windows=(4,), full_bytes=32, window_bytes=256)
    one = world(shape, pages=37, overlap=False, chunked_prefill_size=16)
    one.send("a", 16, 4)
    one.send("b", 16, 4)
    one.tick()
    assert live(one) == (32, 32), "the window's units of both prompts are live, most of them expired"
    one.report()
    one.tick()
    ops = one.steps[-1].ops
    assert [type(op) for op in ops] == [Free, Take], "expired units go back in the same step, before it takes"
    assert [part.band for op in ops[:1] if isinstance(op, Free) for part in op.parts] == [0]
    assert live(one)[0] == 2 * 4, "each row holds its window, this step's token among it"
    one.run()
    assert one.core.gauges()["retractions_total"] == one.core.gauges()["parks_total"] == 0
    one.check_rest()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("windows", [(7,), (33, 5), (64, 16, 2)])
@pytest.mark.parametrize("caching", [False, True])
def test_a_row_holds_the_window_and_the_chunk_no_more(page_size: int, windows: tuple[int, ...], caching: bool) -> None:
    """At every step of a long prompt and its output, a window's units are those that are read and written."""
    config = CoreConfig(page_size=page_size, max_batched_tokens=32, chunked_prefill_size=24, max_running_requests=2)
    one = World(config, 400, facts(97, 512), shape=Shape(windows=windows), caching=caching)
    one.send("r", 150, 40)
    while one.core.gauges()["live"]:
        if not one.wants_tick:
            one.report()
            continue
        steps = len(one.steps)
        one.tick()
        forward = one.steps[-1].forward
        if len(one.steps) == steps or forward is None:
            continue
        start, count = int(i32(forward.starts)[0]), int(i32(forward.counts)[0])
        if caching:
            start -= start % page_size  # a gift to the cache ends on a page, and its window before it
        for band, tokens in enumerate(windows):
            first = max(0, start - tokens + 1) // page_size
            last = (int(i32(forward.starts)[0]) + count - 1) // page_size
            held = one.core._state.rows.named_units(np.array([0]))[band]
            assert held == last - first + 1, f"window {tokens} at {start}: {held} units"
    one.run()
    one.check_rest()


def test_a_prompt_longer_than_the_arena_of_its_window_runs_chunk_by_chunk() -> None:
    """A window band that never holds the whole prompt at once is enough for it: what passed goes back on the way."""
    one = world(Shape(windows=(8,), full_bytes=16, window_bytes=256), pages=40, chunked_prefill_size=16)
    one.send("long", 200, 5)
    one.run()
    assert one.finished("long").reason == "length"
    one.check_rest()


# --- state -----------------------------------------------------------------------------------------------------------


def test_S1_a_request_waits_for_all_of_its_slots() -> None:
    """One slot is left of the two that a request owns: it waits with the reason, takes none, others keep decoding."""
    shape = Shape(state=True, full_bytes=256, slot_bytes=20 * 256)
    one = world(shape, pages=20 * 3 + 15, caching=True, overlap=False)
    one.send("a", 6, 12)
    one.send("b", 6, 12)
    one.tick()
    assert (stage(one, "a"), stage(one, "b")) == ("running", "waiting")
    assert live(one)[0] == 2
    (waits,) = [decision for decision in one.verdicts("waits") if decision.reason == "memory"]
    assert (waits.numbers["stage"], waits.numbers["units_short"] > 0) == (0, True)
    one.report()
    one.tick()
    assert live(one)[0] == 2, "nothing of it was taken"
    assert stage(one, "a") == "running"
    one.run()
    assert {one.finished(id).reason for id in ("a", "b")} == {"length"}
    one.check_rest()


def test_S6_more_requests_than_slots_run_one_after_the_other() -> None:
    """The slots of the arena bound how many run at once, whatever the limit of running requests says."""
    one = world(Shape(state=True, slot_bytes=30 * 256), pages=95, max_running_requests=8)
    for k in range(6):
        one.send(f"r{k}", 3, 4)
    most = 0
    while one.core.gauges()["live"]:
        most = max(most, one.core.gauges()["running"] + one.core.gauges()["prefilling"])
        one.tick() if one.wants_tick else one.report()
    assert most == 2
    one.run()
    one.check_rest()


def test_slots_of_a_step_name_every_row() -> None:
    """Each row of a forward has its own working slot, the same in every step of a generation."""
    one = world(Shape(state=True), pages=200)
    for k in range(3):
        one.send(f"r{k}", 3 + k, 6)
    slot_of: dict[int, int] = {}
    while one.core.gauges()["live"]:
        one.tick() if one.wants_tick else one.report()
        forward = one.steps[-1].forward
        if forward is not None:
            for row, slot in zip(i32(forward.rows).tolist(), i32(forward.slots).tolist(), strict=True):
                assert slot_of.setdefault(row, slot) == slot
    assert sorted(slot_of.values()) == [1, 2, 3]
    one.run()
    one.check_rest()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stops", [True, False])
def test_without_a_second_slot_a_sequence_is_gone_on_from_its_end(overlap: bool, stops: bool) -> None:
    """`no_buffer`: a next turn starts behind all that the last one consumed, also when it ended by a stop token."""
    one = world(EVERYTHING, pages=200, caching=True, overlap=overlap, state_cache="no_buffer")
    one.send("probe", 9, 8)
    one.run()
    answer = one.output("probe")
    stop = pack_i64([answer[-1]]) if stops else b""
    at = answer.index(answer[-1]) + 1 if stops else len(answer)
    one.feed(inputs.Controlled(one.now_ns, "flush_cache"))
    one.send("turn1", 9, 20 if stops else 8, stop_ids=stop)
    one.run()
    first = one.output("turn1")
    assert len(first) == at
    prompt = [*i64(one.clients["fe", "turn1"].generate.prompt).tolist(), *first]
    one.send("turn2", [*prompt, 3, 1, 4], 5)
    one.run()
    assert one.finished("turn2").cached_tokens == len(prompt) - (0 if stops and overlap else 1)
    one.check_rest()


@pytest.mark.parametrize("late", [False, True])
def test_every_checkpoint_of_a_prompt_is_given_whenever_reports_come(late: bool) -> None:
    """Reports at once, or all of them when no step can be formed without: under `grid` every point's state is given."""
    fields = {"chunked_prefill_size": 40, "checkpoint_interval": 16, "checkpoint_policy": "grid"}
    one = world(EVERYTHING, pages=400, caching=True, **fields)
    one.send("r", 100, 2)
    while one.core.gauges()["live"]:
        if late and one.wants_tick:
            one.tick()
            continue
        for _ in range(one.reports_waiting):
            one.report()
        one.tick()
    gauges = one.core.gauges()
    assert gauges["checkpoints_kept_total"] == gauges["checkpoints_given_total"] == 6
    one.run()
    one.check_rest()


# --- one decision for all bands --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["window", "window_state", "windows_state"])
def test_H1_what_never_fits_is_refused_at_once_and_others_are_served(name: str) -> None:
    """A prompt within the model's length and above the arena is refused with both numbers; small ones are served."""
    config = CoreConfig(page_size=4, max_running_requests=4, max_batched_tokens=64, checkpoint_interval=8)
    one = World(config, 250, facts(97, 4000), shape=FAMILIES[name])
    memory = one.core._state.memory
    assert memory is not None
    room = memory.capacity_tokens
    assert room < 2100
    one.send("large", 2100, 10)
    for k in range(3):
        one.send(f"small{k}", 8, 4)
    (refusal,) = one.refusals
    assert (refusal.code, refusal.limit, refusal.value) == ("never_fits", room, 2100)
    assert "are missing" in refusal.message
    one.run()
    assert {one.finished(f"small{k}").reason for k in range(3)} == {"length"}
    one.send("just", room - 1, 2)
    one.run()
    assert one.finished("just").reason == "length", "what is accepted fits the empty arena"
    one.check_rest()


def test_incident_1_a_chunk_of_several_bands_shrinks_and_parks() -> None:
    """Nothing is free in any band and a long prompt is resident: its chunk shrinks to what fits jointly, or parks."""
    config = CoreConfig(
        page_size=1, max_running_requests=9, max_batched_tokens=64, chunked_prefill_size=4, overlap=False
    )
    one = World(config, 190, shape=Shape(windows=(6,), state=True), caching=False)
    for k in range(8):
        one.send(f"s{k}", 1, 24)
    one.send("long", 40, 1)
    one.run()
    shrunk, parked = one.verdicts("shrunk"), one.verdicts("parked")
    assert shrunk or parked or one.verdicts("retracted")
    for decision in parked:
        assert {"stage", "band", "units_short"} <= set(decision.numbers)
    assert {client.finished[0].reason for client, _ in one.by_request.values()} == {"length"}
    one.check_rest()


def test_incident_2_what_retraction_frees_is_used_in_the_same_step() -> None:
    """A decode step short in any band retracts somebody, asks again and runs in the same iteration; nobody fails."""
    one = world(EVERYTHING, pages=125, max_running_requests=3, overlap=False)
    for k in range(3):
        one.send(f"r{k}", 8 + k, 40)
    drive(one, lambda: bool(one.verdicts("retracted")))
    step = one.steps[-1]
    assert step.forward is not None
    assert [type(op) for op in step.ops][-1] is Take, "the retry takes what was given back"
    assert one.verdicts("retracted")[0].numbers["units_short"] > 0
    one.run()
    assert {client.finished[0].reason for client, _ in one.by_request.values()} == {"length"}
    one.check_rest()


def test_incident_5_stages_of_other_sizes_are_served_by_one_decision() -> None:
    """Three stages whose bands differ in bytes, one of them without the windows: the tightest decides for all."""
    wide = geometry(400, 4, EVERYTHING)
    tight = geometry(60, 4, EVERYTHING)
    bare = geometry(200, 4, Shape(windows=(12, 6), state=True, window_bytes=0))
    stages = [wide.stages[0], tight.stages[0], bare.stages[0]]
    joint = Geometry(4, 400, 400, stages)
    cores = {
        name: SchedulerCore(CoreConfig(page_size=4, checkpoint_interval=8), Checks(STRICT))
        for name in ("joint", "tight")
    }
    for name, shape in (("joint", joint), ("tight", Geometry(4, 400, 400, tight.stages))):
        cores[name].feed(inputs.EpochBegan(0, 1, shape, facts(97, 4000)))
    rooms = {name: core._state.memory.capacity_tokens for name, core in cores.items() if core._state.memory is not None}
    assert rooms["joint"] == rooms["tight"]


def test_incident_21_a_row_handed_on_takes_new_units_of_every_band() -> None:
    """Abort in mid-prefill with the chunk in flight: the next owner's state starts anew, under a new generation."""
    one = world(EVERYTHING, pages=120, max_running_requests=1, chunked_prefill_size=8, max_batched_tokens=8)
    one.send("chunked", 30, 4)
    one.tick()
    one.tick()
    one.abort("chunked")
    one.send("next", 7, 4)
    one.report()
    one.tick()
    forward = one.steps[-1].forward
    assert forward is not None
    assert i32(forward.generations).tolist() == [2]
    assert i32(forward.starts).tolist() == [0], "the slot's content is ignored"
    one.run()
    one.check_rest()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("pages", [90, 110, 150])
def test_growth_is_promised_band_by_band(caching: bool, pages: int) -> None:
    """With everything reserved no mix of long prompts and outputs is ever retracted or parked, in any family."""
    for name, shape in FAMILIES.items():
        config = CoreConfig(
            page_size=4,
            max_running_requests=5,
            max_batched_tokens=40,
            chunked_prefill_size=16,
            reserve="full",
            checkpoint_interval=8,
        )
        one = World(config, pages, facts(97, 300), shape=shape, caching=caching)
        for k in range(12):
            one.send(f"r{k}", 3 + 11 * k % 70, 5 + 17 * k % 60)
            one.tick() if k % 3 == 0 else None
        one.run()
        gauges = one.core.gauges()
        assert gauges["retractions_total"] == gauges["parks_total"] == 0, name
        one.check_rest()


# --- what cannot be configured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"checkpoint_interval": 6}, "checkpoint_interval 6 is no multiple of page_size 4"),
        ({"checkpoint_interval": 0}, "checkpoint_interval 0"),
        ({"state_cache": "no_buffer"}, "no_buffer needs page_size 1, not 4"),
        ({"state_cache": "buffer"}, "'buffer' is none of"),
    ],
)
def test_states_that_cannot_be_cached_so_break_the_epoch_by_name(fields: dict[str, object], names: str) -> None:
    """What a model with state cannot do is named when its epoch begins; without state or without a cache it is fine."""
    config = CoreConfig(page_size=4, **fields)  # type: ignore[arg-type]
    with pytest.raises(InvariantBroken, match=names):
        World(config, shape=Shape(state=True))
    World(config, shape=Shape(windows=(8,)))
    World(config, shape=Shape(state=True), caching=False)


def test_a_question_of_several_bands_changes_nothing() -> None:
    """Asking what fits leaves the digest as it was, cache or not."""
    one = world(EVERYTHING, pages=120, caching=True)
    one.send("a", 30, 8)
    drive(one, lambda: stage(one, "a") == "ended")
    one.send("b", 9, 20)
    one.tick()
    memory = one.core._state.memory
    assert memory is not None
    before = one.core.state_digest()
    for pages in (0, 1, 7, 1000):
        memory.refusal(memory.demand(pages, 2))
        memory.room_pages(memory.demand(pages))
    assert one.core.state_digest() == before
    assert np.array(live(one)).min() > 0
    one.run()
    one.check_rest()
