"""Reports of users of other systems on the ranks: shared arena, state slots, windows. `World` checks contents."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from allocator.capacity import CapacityForm
from allocator.demand import Purpose, RequestSizes, request_demand
from allocator.effects import Copy
from allocator.errors import InvariantBroken
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.ops import Free, Part
from tests.allocator.byte_arena import PACES
from tests.allocator.worlds import World, full_geometry, hybrid_geometry, ids, room, waits

STATE, WINDOW, FULL = 0, 1, 2


def settled(world: World) -> None:
    """Every forward is processed."""
    world.process(len(world.in_flight))
    world.step()


# --- U: shared arena and joint capacity -----------------------------------------------------------


def test_U1_state_slots_are_had_from_cached_pages_wherever_they_lie() -> None:
    """Every byte is a cached page; requests come that need a slot of seven pages each. Scattered victims go one by one
    until the answer is yes; the slot is had, no cached page that stays loses a byte, and no request is turned away.
    """
    world = World(hybrid_geometry(room(60 * 8, 56, 8), pages=200))
    _, cached = world.take(0, world.logical.max_extra())
    world.step(writes={1: cached})
    settled(world)
    order = np.random.default_rng(1).permutation(cached).tolist()
    running: list[list[list[int]]] = []
    for _ in range(6):
        while world.logical.refusal((1, 1)) is not None:
            victim = order.pop()
            cached.remove(victim)
            world.free({1: [victim]})
        running.append(world.take(1, 1))
        world.step(writes={0: running[-1][0], 1: running[-1][1]})
        if len(world.in_flight) == 2:
            world.process()
    assert len(cached) == len(order) >= 60 - 6 * 9
    assert world.chain().relief.moved_bytes == world.chain().relief.least_bytes > 0
    world.drain()


@pytest.mark.parametrize("seed", range(6))
def test_U2_the_last_joint_unit_that_is_promised_is_had(seed: int) -> None:
    """In any fragmentation the largest joint demand that is answered yes is placed on every rank, and one more unit of
    any of its kinds is refused, with nothing changed.
    """
    rng = np.random.default_rng(seed)
    world = World(hybrid_geometry(room(400, 24, 16, 8), room(330, 16, 8, 8)))
    slots, _, pages = world.take(3, 6, 12, bound={WINDOW: list(range(0, 12, 2))})
    world.step(writes={STATE: slots, FULL: pages})
    window = pages[::2]
    gone = rng.permutation(12)[:7].tolist()
    freed = [pages[index] for index in gone]
    world.free({STATE: [slots[seed % 3]], WINDOW: [page for page in freed if page in window], FULL: freed})
    world.step(writes={FULL: [page for page in pages if page not in freed][:1]})
    joint = (0, 1, 1)
    most = world.logical.max_extra((1, 0, 0), joint)
    assert most > 0
    demand = (1, most, most)
    assert world.logical.refusal((1, most + 1, most + 1)) is not None
    slots, fresh, more = world.take(*demand)
    world.step(writes={STATE: slots, WINDOW: fresh, FULL: more})
    digest = world.logical.state_digest()
    for more_still in ((1, most, most), (0, 0, 99), (9, 0, 0)):
        assert world.logical.refusal(more_still) is not None
    assert world.logical.state_digest() == digest
    world.drain()


@pytest.mark.parametrize("seed", range(2))
def test_U3_reserved_loads_never_land_in_another_bands_bytes(seed: int) -> None:
    """Loads into two windows are reserved and held back, while state slots are forced in from the left and pages from
    the right, in turns: the floats move, loads are queued late and end later still, and every unit of every band holds
    its own bytes on every rank.
    """
    rng = np.random.default_rng(seed)
    long, short, full = 1, 2, 3
    world = World(hybrid_geometry(room(8 * 26, 8, 8, 8, 8), pages=60, slots=60))
    slots, _, _, pages = world.take(1, 2, 2, 3, bound={long: [0, 1], short: [1, 2]})
    world.step(writes={0: slots, long: pages[:2], short: pages[1:], full: pages})
    host = world.backup(1, {long: pages[:2], short: pages[1:], full: pages})
    world.step()
    world.end(1)
    moved = 0
    for use in range(2, 12):
        _, _, _, fresh = world.take(0, 2, 2, 3, bound={long: [0, 1], short: [1, 2]})
        world.step()
        reserved = [world.where(long, fresh[:2]), world.where(short, fresh[1:])]
        press = 0 if use % 2 else full
        demand = [0, 0, 0, 0]
        demand[press] = 1 + int(rng.integers(0, 2))
        forced: list[int] = []
        while world.logical.refusal((demand[0], 0, 0, demand[full])) is None:
            forced += world.take(*demand)[press]
            world.step(writes={press: forced[-1:]})
            settled(world)
        moved += reserved != [world.where(long, fresh[:2]), world.where(short, fresh[1:])]
        world.load(use, {long: fresh[:2], short: fresh[1:], full: fresh}, host)
        world.step()
        world.end(use)
        world.step(writes={})
        rows = {long: fresh[:2], short: fresh[1:], full: fresh}
        world.free({**rows, press: rows.get(press, []) + forced})
        world.flush()
        world.step()
        settled(world)
    assert moved == 10, "the reservation of every load moved before it was queued"
    world.drain()


@pytest.mark.parametrize("kind", ["send", "publish"])
def test_U6_answers_are_those_of_a_recount_through_a_hundred_toggles(kind: str) -> None:
    """An outgoing transfer of changing units is switched on and off under fragmentation, with moves under forwards:
    every answer equals one that is worked out afresh, and at the end no page is missing.
    """
    rng = np.random.default_rng(6)
    world = World(hybrid_geometry(room(8 * 20, 8, 8, 8), pages=60), paces=PACES[:2])
    demands = [(a, b, c) for a in (0, 1, 4) for b in (0, 2) for c in (0, 1, 6) if (a, b, c) != (0, 0, 0)]
    slots, _, pages = world.take(2, 3, 5, bound={WINDOW: [0, 2, 4]})
    world.step(writes={STATE: slots, WINDOW: pages[::2], FULL: pages})
    for use in range(1, 101):
        parts = {STATE: slots[:1], FULL: [pages[int(rng.integers(0, len(pages)))]]}
        world.send(use, parts) if kind == "send" else world.publish(use, parts, writes=False)
        world.step()
        if kind == "publish":
            world.report()
        _same_as_a_recount(world, demands, bool(kind == "publish"))
        loose = [page for page in pages if page not in parts[FULL] and page not in world.logical.live_ids(WINDOW)]
        if loose:
            world.free({FULL: loose[:1]})
            pages.remove(loose[0])
        world.flush()
        world.step(writes={FULL: [page for page in pages if page not in parts[FULL]][:1]})
        if world.logical.refusal((0, 0, 2)) is None:
            pages += world.take(0, 0, 2)[FULL]
        world.flush()
        world.step()
        _same_as_a_recount(world, demands, bool(kind == "publish"))
        world.end(use)
        world.process(len(world.in_flight) if use % 3 else 0)
        world.step()
        _same_as_a_recount(world, demands, False)
        if len(world.in_flight) == 2:
            world.process()
        if len(pages) > 8:
            spare = [page for page in pages if page not in world.logical.live_ids(WINDOW)]
            world.free({FULL: spare[::2]})
            pages = [page for page in pages if page not in spare[::2]]
    world.drain()
    assert world.chain().relief.flush_moves > 20


def _same_as_a_recount(world: World, demands: list[tuple[int, int, int]], fixed: bool) -> None:
    """Each answer equals that of a form made now from what the ranks hold and report."""
    extents = tuple(tuple(ranks[0].chain.fixed_extents()) for ranks in world.stages)
    assert any(extent for extent in extents[0]) is fixed
    fresh = CapacityForm(world.geometry, extents if fixed else None)
    counts = tuple(int(row[0]) for row in world.chain().band_counts().reshape(-1, 4))
    for demand in demands:
        wanted = fresh.fits([held + more for held, more in zip(counts, demand, strict=True)])
        assert (world.logical.refusal(demand) is None) is wanted, (counts, demand, extents)


def test_U6_two_batches_of_moves_behind_one_forward_both_come_back() -> None:
    """Two flushes move units while the same forward may still read them: when it is processed, all old units return."""
    world = World(full_geometry(9, unit_bytes=8))
    (pages,) = world.take(9)
    world.step()
    world.free({0: pages[:2]})
    world.step(writes={0: pages[4:5]})
    for _ in range(2):
        world.flush(1)
        assert sum(isinstance(effect, Copy) for effect in world.step()) == 1
    assert world.counts(0) == (7, 0, 2, 0)
    world.process()
    world.step()
    assert world.counts(0) == (7, 2, 0, 0)
    world.flush()
    world.step()
    assert world.counts(0) == (7, 0, 0, 2)
    world.drain()


PAGE, WINDOW_TOKENS = 4, 8
BANDS = [
    BandGeometry("state", "state", 16),
    BandGeometry(f"window:{WINDOW_TOKENS}", "window", 8, WINDOW_TOKENS),
    BandGeometry("full", "full", 8),
]


@pytest.mark.parametrize("checkpoint_slot", [False, True])
def test_U8_a_request_holds_at_its_peak_what_it_was_charged(checkpoint_slot: bool) -> None:
    """Requests of many sizes run alone, chunk by chunk and token by token: slots and pages at the peak, counted by the
    rank, equal the charge, never more; the window's charge is reached by some of them.
    """
    geometry = Geometry(PAGE, 40, 8, [StageGeometry(32 + 16 * 4 + 8 * 60, 32, BANDS)])
    reached = False
    for prompt in range(9, 26):
        world = World(geometry, paces=PACES[:1])
        output, chunk = 9, 6
        sizes = RequestSizes(prompt, output, chunk_tokens=chunk, checkpoint_slot=checkpoint_slot)
        charged = request_demand(BANDS, PAGE, sizes, Purpose.CEILING)
        peak = _run_alone(world, prompt, output, chunk, charged[STATE])
        assert (peak[STATE], peak[FULL]) == (charged[STATE], charged[FULL])
        assert peak[WINDOW] <= charged[WINDOW]
        reached |= peak[WINDOW] == charged[WINDOW]
        world.drain()
    assert reached


def _run_alone(world: World, prompt: int, output: int, chunk: int, slots: int) -> list[int]:
    """Prefill in chunks, then one token at a time; window pages retire once no later token can see them."""
    peak = [0, 0, 0]
    state = world.take(slots, 0, 0)[STATE]
    pages: list[int] = []
    window: list[int] = []
    start, end = 0, prompt + output - 1
    while start < end:
        stop = min(start + chunk, prompt) if start < prompt else start + 1
        expired = [page for page in window if (pages.index(page) + 1) * PAGE <= start - (WINDOW_TOKENS - 1)]
        if expired:
            world.free({WINDOW: expired})
            window = [page for page in window if page not in expired]
        missing = -(-stop // PAGE) - len(pages)
        if missing:
            _, fresh, more = world.take(0, missing, missing)
            pages, window = pages + more, window + fresh
        world.step(writes={STATE: state[:1], WINDOW: window[-1:], FULL: pages[-1:]})
        world.process()
        peak = [max(a, world.counts(band)[0]) for band, a in enumerate(peak)]
        start = stop
    return peak


# --- S: recurrent state slots ---------------------------------------------------------------------


def test_S1_a_refused_take_of_several_kinds_leaves_no_trace_on_any_rank() -> None:
    """One of two slots is free: the take of two slots and pages is refused; the others' decoding goes on, and every
    digest is that of a world in which nobody asked.
    """
    worlds = []
    for asks in (True, False):
        world = World(hybrid_geometry(room(16 * 3 + 8 * 6, 16, 8), slots=3), paces=PACES[:2])
        slots, pages = world.take(2, 2)
        for turn in range(6):
            if asks:
                refusal = world.logical.refusal((2, 1))
                assert refusal is not None
                assert not refusal.never
            world.step(writes={0: slots, 1: pages[turn % 2 :]})
            if len(world.in_flight) == 2:
                world.process()
        worlds.append(world)
    assert worlds[0].chain().digest == worlds[1].chain().digest
    assert worlds[0].logical.state_digest() == worlds[1].logical.state_digest()
    for world in worlds:
        world.drain()


def test_S2_checkpoints_under_stalled_backups_are_skipped_or_had_behind_the_copy() -> None:
    """Every slot but the working one is a node's, read by a backup that does not end. Another checkpoint is a plain no,
    decoding goes on without a wait; once a node is dropped its slot is had, behind its own copy only, without the host.
    """
    world = World(hybrid_geometry(room(16 * 4 + 8 * 2, 16, 8), slots=4))
    slots, pages = world.take(4, 2)
    world.step(writes={0: slots, 1: pages})
    settled(world)
    for use, slot in enumerate(slots[1:], start=1):
        world.backup(use, {0: [slot]})
    world.step()
    for _ in range(5):
        assert world.logical.refusal((1, 0)) is not None
        world.step(writes={0: slots[:1], 1: pages[-1:]})
        assert world.launch_waits == []
        world.process()
    world.free({0: slots[2:3]})
    (kept,) = world.take(1, 0)[0]
    world.copy_state(slots[:1], [kept])
    assert waits(world.step()) == [("copy", 2)]
    world.step(writes={0: slots[:1]})
    assert world.known[0, kept] != world.known[0, slots[0]]
    world.drain()


def test_S4_sessions_return_every_slot_they_took() -> None:
    """Opened and closed under their own last forward, with one working and two more slots each, hundreds of sessions
    leave every slot and page free, and the ranks' counts as at the start.
    """
    world = World(hybrid_geometry(room(16 * 7 + 8 * 4, 16, 8), slots=7), paces=[PACES[1]])
    start = world.chain().band_counts().tolist()
    open_: list[list[list[int]]] = []
    for turn in range(600):
        if len(open_) == 2:
            slots, pages = open_.pop(turn % 2)
            world.free({0: slots, 1: pages})
        slots, pages = world.take(3, 1)
        open_.append([slots, pages])
        if turn % 3 == 0:
            world.copy_state(slots[:1], slots[1:2])
        if len(world.in_flight) == 2:
            world.process()
        world.step(writes={0: slots[:1], 1: pages} if turn % 4 else None)
    world.drain()
    world.flush()
    world.step()
    assert world.chain().band_counts().tolist() == start
    assert world.logical.max_extra((6, 0)) == 6


@pytest.mark.parametrize("order", list(permutations(("hit", "miss", "preempt", "resume"))))
def test_S7_a_recycled_slot_never_shows_through_a_hit(order: tuple[str, ...]) -> None:
    """A node keeps a state. Hits copy it into slots that others left a moment ago, under forwards that still write
    them: every working slot holds the node's state when its first forward reads it, whatever came before.
    """
    world = World(hybrid_geometry(room(16 * 3 + 8 * 3, 16, 8), slots=3))
    (node, working), pages = world.take(2, 1)
    world.step(writes={0: [node, working], 1: pages})
    kept = world.known[0, node]
    for what in order:
        if what == "preempt":  # under its own forward; the next one gets this very slot
            world.step(writes={0: [working]})
            world.free({0: [working]})
            (working,) = world.take(1, 0)[0]
        if what == "miss":  # the first forward resets what it finds
            world.known.pop((0, working), None)
            world.step(writes={0: [working]})
            assert world.known[0, working] != kept
        else:
            world.copy_state([node], [working])
            world.step(writes={})
            assert world.known[0, working] == kept
            world.step(writes={0: [working]})
        if len(world.in_flight) >= 2:
            world.process(len(world.in_flight) - 1)
    assert world.known[0, node] == kept
    world.drain()


# --- W: windows -----------------------------------------------------------------------------------


def test_W1_expired_rows_pay_for_the_next_page_under_the_forward_that_reads_them() -> None:
    """The arena is full, much of it window rows that no later token sees. They are freed while the last forward still
    reads them, and the decode step's page and row are had in the same step, behind it: nothing is retracted.
    """
    world = World(hybrid_geometry(room(8 * 12, 0, 8, 8), pages=12))
    _, window, pages = world.take(0, 6, 6)
    world.step(writes={WINDOW: window, FULL: pages})
    world.step(writes={WINDOW: window[-1:], FULL: pages[-1:]})
    assert world.logical.refusal((0, 1, 1)) is not None
    world.free({WINDOW: window[:2]})
    assert world.logical.refusal((0, 1, 1)) is None
    _, fresh, page = world.take(0, 1, 1)
    effects = world.step(writes={WINDOW: fresh, FULL: page})
    assert waits(effects) == [("forward", 2)]
    world.drain()


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_W3_owners_and_free_units_add_up_after_every_step_with_rejected_drafts(page_size: int) -> None:
    """Drafts take pages ahead and give the rejected ones back, in windows too, under forwards and flushes: units held
    by somebody plus free ones equal the arena, to the unit, after every step.
    """
    stage = room(8 * 30, 0, 8, 8)
    world = World(Geometry(page_size, 30, 0, [stage]), paces=PACES[:2])
    total = world.chain().band_counts().reshape(-1, 4).sum(axis=1).tolist()
    rng = np.random.default_rng(page_size)
    owners: dict[int, list[int]] = {}
    for turn in range(60):
        request = turn % 3
        mine = owners.setdefault(request, [])
        draft = 1 + int(rng.integers(0, 3))
        if world.logical.refusal((0, draft, draft)) is None:
            mine += world.take(0, draft, draft)[FULL]
        world.step(writes={WINDOW: mine[-draft:], FULL: mine[-draft:]})
        rejected = int(rng.integers(0, min(draft, len(mine)) + 1))
        if rejected:
            world.free({WINDOW: mine[-rejected:], FULL: mine[-rejected:]})
            del mine[-rejected:]
        if len(mine) > 6:
            world.free({WINDOW: mine, FULL: mine})
            mine.clear()
        world.flush(2)
        if len(world.in_flight) == 2:
            world.process()
        world.step()
        counts = world.chain().band_counts().reshape(-1, 4)
        held = sum(map(len, owners.values()))
        assert counts[:, 0].tolist() == [0, held, held]
        assert counts.sum(axis=1).tolist() == total
    world.drain()


def test_W6_a_page_that_re_enters_the_window_is_freed_once() -> None:
    """Retired under a host copy, bound again to a new unit, then finished: counts never exceed the arena, and a second
    free of it stops loudly, with band and page, at the daemon and on a rank alike.
    """
    world = World(hybrid_geometry(room(8 * 10, 0, 8, 8)), paces=PACES[1:2])
    _, window, pages = world.take(0, 3, 3)
    world.step(writes={WINDOW: window, FULL: pages})
    host = world.backup(1, {WINDOW: window[:1]})
    world.step()
    world.free({WINDOW: window[:1]})
    world.step()
    world.end(1)
    world.take(0, 1, 0, onto={WINDOW: pages[:1]})
    world.load(2, {WINDOW: pages[:1]}, host)
    world.step()
    world.end(2)
    world.step(writes={WINDOW: pages[2:]})
    world.free({WINDOW: pages, FULL: pages})
    with pytest.raises(InvariantBroken, match=r"band window:64: ids 1, 2, 3 hold no unit: a repeated free"):
        world.logical.free([None, ids(*pages), None])
    with pytest.raises(InvariantBroken, match=r"page ids 1, 2, 3 are free already: a repeated free"):
        world.logical.free([None, None, ids(*pages)])
    world.step()
    settled(world)
    assert world.counts(WINDOW)[0] == world.counts(FULL)[0] == 0
    assert [sum(world.counts(band)) for band in (WINDOW, FULL)] == [10, 10]
    chain = world.chain()
    chain.begin_step(world.seq + 1, world.processed)
    with pytest.raises(InvariantBroken, match="band window:64: a free names ids 1, which are not bound") as caught:
        chain.apply([Free([Part(WINDOW, ids(1).tobytes())])])
    assert caught.value.name == "band.free_of_bound_unit"
