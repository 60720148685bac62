"""Incidents and user reports on windows, state and the prefix cache, on a whole daemon in one process.

The rank is the toy whose storage is exact hashes: a stale, foreign or missing unit of any kind changes its tokens. So
"right" below always means: the tokens are those of the sequence alone, whatever was cached, moved or taken away.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from allocator.capacity import Demand, StageWalk
from allocator.columns import i32
from allocator.geometry import StageGeometry
from allocator.plan import UNIT_ALIGN_BYTES
from daemon.core.limits import CoreConfig
from daemon.core.requests import State
from daemon.rank.modeled import ModeledRunner
from ipc.messages import RankSettings
from tools.inprocess import InProcess, Sent
from tools.toy_reference import Toy, mismatches

PAGE, INTERVAL, WINDOW = 16, 64, 64
HYBRID = Toy(windows=(WINDOW,), state=True)
SHAPES = [Toy(), Toy(windows=(WINDOW,)), Toy(state=True), HYBRID, Toy(windows=(WINDOW, 128), state=True)]
IDS = ["full", "window", "state", "window+state", "2 windows+state"]
STATE, FULL = 0, -1


def world(
    toy: Toy = HYBRID, *, rows: int = 8, room: Demand = (), slots: int = 0, rank_page: int = PAGE, **config: Any
) -> InProcess:
    """An engine of this shape. `room`: the smallest arena for so many units per band; `slots`: all slots there are."""
    fields: dict[str, Any] = {"checkpoint_interval": INTERVAL, "chunked_prefill_size": 64, "max_batched_tokens": 128}
    chosen = CoreConfig(page_size=rank_page, max_running_requests=rows, **(fields | config))
    keeps = chosen.enable_prefix_caching and chosen.state_cache == "extra_buffer"
    settings = RankSettings(
        model_path="",
        model_name="toy",
        dtype="auto",
        page_size=rank_page,
        max_running_requests=rows,
        max_batched_tokens=chosen.max_batched_tokens,
        max_model_len=0,
        arena_bytes=16 << 20,
        mem_fraction_ppm=0,
        runner="modeled",
        invariants=2,
        options=toy.options(),
        checkpoint_interval=chosen.checkpoint_interval if keeps else 0,
    )
    runner = ModeledRunner(settings)
    prepared = runner.prepare()
    if slots:
        prepared = prepared._replace(virtual_slots=slots)
    size = arena_bytes(prepared.geometry, room) if room else 0
    return InProcess(chosen, settings, runner, prepared=prepared, arena_bytes=size)


def arena_bytes(stage: StageGeometry, room: Demand) -> int:
    """The fewest bytes that hold so many units of each band."""
    size = stage.chain_start_bytes
    while StageWalk(StageGeometry(size, stage.chain_start_bytes, stage.bands)).overlap_bytes(room) > 0:
        size += UNIT_ALIGN_BYTES
    return size


def ids(seed: int, tokens: int) -> list[int]:
    """Token ids; a longer prompt of the same seed begins with the shorter one."""
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(tokens)]


def assert_right(toy: Toy, *requests: Sent) -> None:
    """Each request has ended by length or stop with the tokens of a cold run."""
    for sent in requests:
        assert sent.finished is not None, sent.refused
        assert sent.finished.reason in ("length", "stop"), sent.finished
        assert mismatches(toy, sent.prompt, sent.tokens) == [], sent.id


def held(engine: InProcess) -> Demand:
    """Units per band that the cache holds."""
    memory = engine.state.memory
    assert memory is not None
    assert memory.cache is not None
    return memory.cache.held()


def close(engine: InProcess) -> None:
    """At rest live units are the cache's; after a flush nothing is held on either side."""
    engine.run()
    engine.check_rest()
    assert engine.live_units() == held(engine), "what is live at rest is what the cache holds"
    engine.flush_cache()
    engine.run()
    engine.check_free()


@pytest.mark.parametrize("toy", SHAPES, ids=IDS)
def test_S7_hits_misses_and_resumes_in_any_order_give_the_cold_tokens(toy: Toy) -> None:
    """Seeded orders of forks of three trunks, retractions and aborts: every output is that of a cold run."""
    for seed in range(3):
        draw, engine = random.Random(seed), world(toy, rows=4)
        sent: list[Sent] = []
        for k in range(24):
            trunk = ids(draw.randrange(3), 300)[: draw.randrange(1, 300)]
            sent.append(engine.submit(trunk + ids(100 + k, draw.randrange(1, 20)), draw.randrange(1, 90)))
            for _ in range(draw.randrange(12)):
                engine.turn()
            if draw.random() < 0.4:
                engine.retract(draw.choice(sent))
            if draw.random() < 0.1:
                engine.abort(draw.choice(sent))
        engine.run()
        whole = [one for one in sent if one.finished is not None and one.finished.reason != "abort"]
        assert_right(toy, *whole)
        assert sum(sum(one.cached) for one in sent) > 0, "the cache took part"
        close(engine)


@pytest.mark.parametrize("lost", ["state", "window:64"])
def test_P3_a_hit_ends_where_every_kind_is_still_there(lost: str) -> None:
    """Only the state, or only the window of a cached prefix goes: the usable hit shrinks to what all kinds have."""
    engine = world()
    first = engine.generate(ids(1, 300), 8)
    again = engine.generate(ids(1, 300), 8)
    assert (again.cached, again.cuts) == ([256], ["state"])
    band = next(index for index, one in enumerate(engine.bands) if one.name == lost)
    engine.evict_only(band)
    assert held(engine)[band] == 0
    resent = engine.generate(ids(1, 300), 8)
    assert resent.cached == [0]
    assert resent.cuts == [lost]
    assert resent.finished is not None
    assert resent.finished.matched_tokens >= 288, "its pages are known as before"
    assert_right(HYBRID, first, again, resent)
    close(engine)


@pytest.mark.parametrize("toy", SHAPES, ids=IDS)
def test_P11_a_resumed_request_computes_its_length_less_the_new_hit(toy: Toy) -> None:
    """Retracted in mid-decode while its pages stay cached: the work after it is the sequence without the hit."""
    engine = world(toy)
    sent = engine.submit(ids(2, 200), 150)
    while len(sent.tokens) < 100:
        engine.turn()
    assert engine.retract(sent)
    before, had = len(engine.steps), len(sent.tokens)
    engine.run()
    assert_right(toy, sent)
    assert len(sent.admissions) == 2
    hit = sent.cached[1]
    assert hit > 0
    forwards = [step.forward for step in engine.steps[before:] if step.forward is not None]
    work = sum(int(i32(forward.counts).sum()) for forward in forwards)
    assert work - (150 - had) <= 200 + had - hit, "not more than what the hit left, and one token per output"
    assert work >= 200 + had - hit
    close(engine)


def test_incident_17_a_shared_prefix_is_shared_again_after_a_retraction() -> None:
    """Two readers of one prefix, one is retracted and comes back: locks and protected units are what they were."""
    engine = world(rows=4)
    engine.generate(ids(3, 280), 4)
    cache = engine.state.memory.cache  # type: ignore[union-attr]
    assert cache is not None
    readers = [engine.submit(ids(3, 280) + ids(50 + k, 5), 200) for k in range(2)]
    while min(len(sent.tokens) for sent in readers) < 20:
        engine.turn()
    locks, locked = cache.open_locks, cache.locked()
    assert locks == 2
    assert locked[FULL] >= 256 // PAGE
    assert engine.retract(readers[1])
    assert cache.open_locks == 1
    while len(readers[1].admissions) < 2 or engine.state.counts[State.RUNNING] < 2:
        engine.turn()
    assert cache.open_locks == 2
    assert cache.locked()[FULL] >= locked[FULL]
    assert readers[1].cached[1] >= 256
    engine.run()
    assert_right(HYBRID, *readers)
    assert cache.open_locks == 0
    assert cache.locked() == memory_none(engine)
    close(engine)


def memory_none(engine: InProcess) -> Demand:
    """No unit of any band."""
    return (0,) * len(engine.bands)


def test_incident_20_without_a_fresh_slot_the_floor_still_advances() -> None:
    """No third slot is ever to be had: window units stay within the price at every turn, and the request finishes."""
    engine = world(rows=1, slots=2)
    memory = engine.state.memory
    assert memory is not None
    sent = engine.submit(ids(4, 200), 400)
    window, price = memory.windows[0][0], memory.ceiling(600)
    most = 0
    while engine.turn():
        if sent.finished is None:
            most = max(most, engine.live_units()[window] - held(engine)[window])
    assert 0 < most <= price[window], "a request never holds more window units than it was priced"
    assert most < 600 // PAGE // 2, "the floor advanced"
    assert_right(HYBRID, sent)
    assert engine.core.gauges()["checkpoints_skipped_total"] > 0
    assert held(engine)[STATE] == 1, "an end gives its newest checkpoint without a fresh slot"
    again = engine.generate(sent.prompt + sent.tokens + ids(61, 5), 10)
    assert again.cached == [0], "what is cached and its reader need three slots: it is served without the hit"
    assert_right(HYBRID, again)
    close(engine)


def test_S1_one_slot_short_of_two_waits_and_holds_nothing() -> None:
    """Three slots, two a request: the second one waits with what the first holds unchanged, and runs after it."""
    engine = world(rows=2, slots=3, checkpoint_interval=1024)
    first = engine.submit(ids(18, 100), 60)
    while len(first.tokens) < 5:
        engine.turn()
    second = engine.submit(ids(19, 100), 20)
    while len(first.tokens) < 50:
        engine.turn()
        assert engine.live_units()[STATE] == 2, "a part of what it needs is not taken"
    assert not second.admissions
    waits = [one for one in engine.decisions if one.request == second.number and one.verdict == "waits"]
    assert waits[-1].reason == "memory"
    assert waits[-1].numbers["band"] == STATE
    engine.run()
    assert_right(HYBRID, first, second)
    close(engine)


def test_S2_checkpoints_that_find_no_slot_are_skipped_and_counted() -> None:
    """Long prompts past several marks with every slot in use: no request fails or waits, the gifts are counted out."""
    rows = 4
    engine = world(rows=rows, slots=2 * rows)
    sent = [engine.submit(ids(60 + k, 250), 100) for k in range(rows)]
    engine.run()
    assert_right(HYBRID, *sent)
    gauges = engine.core.gauges()
    assert gauges["checkpoints_skipped_total"] > 0
    assert (gauges["retractions_total"], gauges["parks_total"]) == (0, 0)
    assert not [one for one in engine.decisions if (one.verdict, one.reason) == ("waits", "memory")]
    close(engine)


def test_W1_rows_that_left_the_window_pay_before_anyone_is_retracted() -> None:
    """An arena that holds the windows of the present, not those of the past: long decodes, and nobody is retracted."""
    toy = Toy(windows=(WINDOW,))
    tokens, rows = 600, 3
    full = rows * -(-tokens // PAGE)
    kept = rows * (WINDOW // PAGE + 2) + 128 // PAGE
    engine = world(toy, rows=rows, room=(kept, full), enable_prefix_caching=False)
    sent = [engine.submit(ids(70 + k, 40), tokens - 40) for k in range(rows)]
    engine.run()
    assert_right(toy, *sent)
    gauges = engine.core.gauges()
    assert (gauges["retractions_total"], gauges["parks_total"]) == (0, 0)
    engine.check_free()


@pytest.mark.parametrize("toy", [Toy(state=True), HYBRID], ids=["state", "window+state"])
def test_U1_an_arena_of_cached_pages_gives_way_to_state_slots(toy: Toy) -> None:
    """All bytes hold prefixes that nobody reads: requests that each need slots run at once, none is retracted."""
    rows = 8
    room = (2 * rows + 4, *(rows * 20,) * (len(toy.windows) + 1))
    engine = world(toy, rows=rows, room=room)
    for k in range(10):
        engine.generate(ids(200 + k, 290), 1)
    before = held(engine)
    short = [engine.submit(ids(300 + k, 20), 40) for k in range(rows)]
    engine.run()
    assert_right(toy, *short)
    assert engine.core.gauges()["retractions_total"] == 0
    assert held(engine)[FULL] < before[FULL] + rows * 4, "cached prefixes made room"
    close(engine)


def test_U2_what_can_never_fit_leaves_every_cached_token() -> None:
    """A prompt far above the arena is refused at once and costs the cache nothing; one that fits evicts and runs."""
    engine = world(rows=2, room=(6, 40, 40))
    engine.generate(ids(5, 300), 1)
    before = held(engine)
    refused = engine.submit(ids(6, 4000), 1)
    engine.run()
    assert refused.refused is not None
    assert refused.refused.code == "never_fits"
    assert held(engine) == before
    assert engine.generate(ids(5, 300), 1).cached == [256]
    fits = engine.generate(ids(7, 500), 1)
    assert_right(HYBRID, fits)
    assert held(engine) != before
    close(engine)


@pytest.mark.parametrize("toy", SHAPES, ids=IDS)
def test_H5_a_retraction_frees_the_pages_that_it_promised(toy: Toy) -> None:
    """With shared prefixes, windows and state: the pages told in the decision are those that came free, at once."""
    engine = world(toy, rows=4)
    engine.generate(ids(14, 200), 1)
    sent = [engine.submit(ids(14, 150) + ids(80 + k, 60), 150) for k in range(4)]
    draw = random.Random(1)
    while engine.turn():
        victim = draw.choice(sent)
        if draw.random() < 0.05 and victim.finished is None:
            before = engine.live_units()[FULL]
            if engine.retract(victim):
                told = engine.decisions[-1]
                assert told.verdict == "retracted"
                assert told.numbers["pages"] == before - engine.live_units()[FULL]
    assert_right(toy, *sent)
    assert engine.core.gauges()["retractions_total"] > 5
    close(engine)


def test_M3_a_live_request_shows_what_it_holds_of_every_kind() -> None:
    """Stage, age, units per kind, shared pages, the hit, what it waits for; the sums are the chain's."""
    engine = world(rows=1)
    engine.generate(ids(15, 250), 1)
    runs, waits = engine.submit(ids(15, 230) + ids(16, 10), 100), engine.submit(ids(17, 20), 5)
    while len(runs.tokens) < 10:
        engine.turn()
    view, other = (engine.core.request_view(sent.number, engine.now_ns) for sent in (runs, waits))
    assert view is not None
    assert other is not None
    assert (view["stage"], view["hit_cut"]) == ("running", "state")
    assert view["cached_tokens"] == runs.cached[0] > 0
    assert view["age_ms"] > 0
    assert view["shared_pages"] >= view["cached_tokens"] // PAGE
    own = (view["held_units"][band.name] for band in engine.bands)
    assert tuple(mine + cached for mine, cached in zip(own, held(engine), strict=True)) == engine.live_units()
    assert (other["stage"], other["held_units"], other["waits_for"]) == ("waiting", {}, "rows")
    engine.run()
    close(engine)


@pytest.mark.parametrize("mode", ["extra_buffer", "no_buffer"])
def test_U8_slots_at_the_peak_are_those_that_admission_charged(mode: str) -> None:
    """One request alone, below the first checkpoint: two slots with a checkpoint slot, one without."""
    toy = Toy(state=True)
    engine = world(toy, rows=2, state_cache=mode, rank_page=1 if mode == "no_buffer" else PAGE)
    sent = engine.submit(ids(9, 20), 30)
    most = 0
    while engine.turn():
        cached = held(engine)[STATE]
        most = max(most, engine.live_units()[STATE] - cached)
    assert most == (2 if mode == "extra_buffer" else 1)
    assert_right(toy, sent)
    close(engine)


def test_no_buffer_caches_the_state_at_a_requests_end_only() -> None:
    """A turn that goes on where the last one ended hits there exactly; a fork before it does not."""
    toy = Toy(state=True)
    engine = world(toy, state_cache="no_buffer", rank_page=1)
    first = engine.generate(ids(11, 90), 30)
    end = 90 + 30 - 1
    turn = engine.generate(first.prompt + first.tokens + ids(12, 10), 10)
    fork = engine.generate(ids(11, 80) + ids(13, 10), 10)
    assert turn.cached == [end]
    assert (fork.cached, fork.cuts) == ([0], ["state"])
    assert_right(toy, first, turn, fork)
    close(engine)
