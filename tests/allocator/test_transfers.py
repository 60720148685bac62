"""Host copies, transfers, state copies and rebinds on the ranks: what waits, what stays, what is counted, what ends."""

from __future__ import annotations

import pytest

from allocator.columns import i32
from allocator.effects import Bind, Copy, Effect, HostRead, PublishUnits, WaitCopy
from allocator.errors import InvariantBroken
from allocator.ops import Backup, Op, Part, Take
from allocator.physical.chain import PhysicalChain
from tests.allocator.worlds import World, full_geometry, hybrid_geometry, ids, room, waits

STATE, WINDOW, FULL = 0, 1, 2


def names(effects: list[Effect]) -> list[str]:
    """The names of effects, in order."""
    return [type(effect).__name__ for effect in effects]


def settled(world: World) -> None:
    """Every forward is processed."""
    world.process(len(world.in_flight))
    world.step()


def one_band(pages: int, taken: int) -> tuple[World, list[int]]:
    """Full attention only: `pages` units, the first `taken` of them live and written; unit `pages` is the first."""
    world = World(full_geometry(pages, unit_bytes=8))
    (column,) = world.take(taken)
    world.step(writes={0: column})
    settled(world)
    return world, column


def state_and_full(slots: int, pages: int) -> tuple[World, list[int], list[int]]:
    """A full arena of slots (16 bytes) and pages (8 bytes), all written."""
    world = World(hybrid_geometry(room(16 * slots + 8 * pages, 16, 8)))
    mine, column = world.take(slots, pages)
    world.step(writes={0: mine, 1: column})
    settled(world)
    return world, mine, column


# --- state ----------------------------------------------------------------------------------------


def test_a_slot_freed_under_a_forward_is_taken_without_a_wait() -> None:
    """Its next user is a forward, which runs behind the last one anyway; nothing touches it on the schedule stream."""
    world, slots, _ = state_and_full(slots=2, pages=1)
    world.step(writes={0: slots})
    world.free({0: slots[:1]})
    (fresh,) = world.take(1, 0)[0]
    effects = world.step()
    assert names(effects) == ["Bind", "Bind"], "unbound, bound: neither waited for nor zeroed"
    assert world.where(0, [fresh]) == [2], "the freed one"
    world.step(writes={0: [fresh]})
    world.drain()


def test_a_page_freed_beside_it_is_waited_for() -> None:
    """Pages are zeroed on the schedule stream, so the same take waits for them, once."""
    world, slots, pages = state_and_full(slots=2, pages=2)
    world.step(writes={0: slots, 1: pages})
    forward = world.seq
    world.free({0: slots[:1], 1: pages[:1]})
    world.take(1, 1)
    effects = world.step()
    assert waits(effects) == [("forward", forward)]
    assert names(effects) == ["Bind", "Bind", "Bind", "WaitForward", "Zero", "Bind"], "state first, without the wait"
    world.drain()


def test_a_state_copy_runs_behind_the_forwards_before_it() -> None:
    """Source and target are right on every rank, though the source's writer and the target's last owner run late."""
    world, slots, _ = state_and_full(slots=3, pages=1)
    world.step(writes={0: slots})
    forward = world.seq
    world.free({0: slots[1:2]})
    (fresh,) = world.take(1, 0)[0]
    world.copy_state(slots[:1], [fresh])
    effects = world.step(writes={0: slots[:1]})
    assert waits(effects) == [("forward", forward)]
    assert world.known[0, fresh] != world.known[0, slots[0]], "the copy is of the state before that forward"
    world.drain()


def test_one_state_is_copied_into_several_slots() -> None:
    """A source may repeat; targets hold what it held."""
    world, slots, _ = state_and_full(slots=4, pages=1)
    world.copy_state([slots[3], slots[3]], slots[:2])
    effects = world.step(writes={})
    assert [len(i32(effect.sources)) for effect in effects if isinstance(effect, Copy)] == [2]
    assert len({world.known[0, slot] for slot in (slots[0], slots[1], slots[3])}) == 1
    world.drain()


def test_a_slot_that_an_older_forward_may_write_is_not_moved_by_a_flush() -> None:
    """Taken without a wait, a slot's last tenant may still be written: moving it would need that wait."""
    world, slots, _ = state_and_full(slots=3, pages=1)
    world.step(writes={0: slots})
    world.free({0: slots[2:]})
    (fresh,) = world.take(1, 0)[0]
    world.step()
    assert world.where(0, [fresh]) == [4]
    settled(world)
    world.step(writes={0: slots[:2]})
    world.free({0: slots[:1]})
    world.step()
    world.flush()
    assert not any(isinstance(effect, Copy) for effect in world.step())
    world.drain()


# --- copies ---------------------------------------------------------------------------------------


def test_a_unit_freed_under_a_backup_is_counted_and_comes_back() -> None:
    """It is no hole while the copy reads, is in the figure of pending units, and is a hole after the release."""
    world, pages = one_band(4, taken=3)
    world.backup(1, {0: pages[:1]})
    world.step()
    world.free({0: pages[:1]})
    world.step()
    assert world.counts(0) == (2, 0, 1, 1)
    world.end(1)
    (page,) = world.take(1)
    assert waits(world.step()) == [], "released in this very step: a hole for its take"
    assert world.where(0, page) == [4]
    world.drain()


def test_holes_and_growth_come_before_a_unit_that_a_copy_reads() -> None:
    """Only the take that has nothing else waits, and for that copy alone."""
    world, pages = one_band(4, taken=3)
    world.backup(1, {0: pages[:1]})
    world.backup(2, {0: pages[1:2]})
    world.step()
    world.free({0: pages[:1]})
    world.take(1)
    assert waits(world.step()) == [], "growth"
    (page,) = world.take(1)
    assert waits(world.step()) == [("copy", 1)]
    assert world.where(0, page) == [4]
    world.drain()


def test_growth_comes_before_what_pends_under_a_copy() -> None:
    """A unit freed under a forward and a backup would take both waits: a clear one of a later forward, then growth,
    come first, each with its own wait only.
    """
    world, pages = one_band(5, taken=3)
    world.backup(1, {0: pages[:1]})
    world.step(writes={0: pages[2:]})
    world.free({0: pages[:1]})
    world.step(writes={0: pages[2:]})
    world.free({0: pages[1:2]})
    world.step()
    assert world.counts(0) == (1, 0, 2, 2)
    first, second = world.in_flight
    for wanted in ([("forward", second)], [], [], [("copy", 1)]):
        world.take(1)
        assert waits(world.step()) == wanted
    assert first < second
    world.drain()


def test_two_backups_of_one_unit_both_have_to_end() -> None:
    """Freed while two of them read it, the unit is out of circulation until the second one is over."""
    world, pages = one_band(3, taken=2)
    for use in (1, 2):
        world.backup(use, {0: pages[:1]})
    world.step()
    world.free({0: pages[:1]})
    world.step()
    world.end(1)
    world.step()
    assert world.counts(0) == (1, 0, 1, 1)
    world.take(2)
    assert waits(world.step()) == [("copy", 2)]
    world.drain()


def test_two_sends_of_one_unit_both_have_to_end() -> None:
    """Freed while our engine reads it for two peers, the unit is live, in quarantine, until the second send is over."""
    world, pages = one_band(3, taken=2)
    for use in (1, 2):
        world.send(use, {0: pages[:1]})
    world.step()
    world.free({0: pages[:1]})
    world.step()
    world.end(1)
    world.step()
    assert world.counts(0) == (2, 0, 0, 1)
    assert world.logical.quarantined() == (1,)
    world.end(2)
    world.step()
    assert world.counts(0) == (1, 1, 0, 1)
    assert world.logical.quarantined() == (0,)
    world.drain()


def test_one_wait_ends_a_copy_for_all_its_units_in_all_bands() -> None:
    """A backup of several units of two bands is waited for once, whatever is taken of it, and released all the same."""
    world, slots, pages = state_and_full(slots=2, pages=2)
    world.backup(1, {0: slots, 1: pages})
    world.step()
    world.free({0: slots, 1: pages})
    world.take(2, 2)
    assert waits(world.step()) == [("copy", 1)]
    assert world.chain().open_uses == 1
    world.end(1)
    world.step()
    assert world.chain().open_uses == 0
    world.drain()


def test_a_backup_reads_what_the_forwards_before_it_wrote() -> None:
    """Whatever is written, moved or freed after it was submitted, host memory holds the contents of that moment."""
    world, pages = one_band(6, taken=5)
    world.step(writes={0: pages[2:]})
    slots = world.backup(1, {0: pages[1:]})
    world.step(writes={0: pages[4:]})
    assert waits(world.launch_waits) == [("copy", 1)], "it appends to a page that the copy reads"
    world.free({0: pages[:3]})
    world.flush()
    world.step()
    world.end(1)
    fresh = world.take(4)[0]
    world.step()
    world.load(2, {0: fresh}, slots)
    world.step()
    world.end(2)
    world.step(writes={})
    world.drain()


def test_a_copy_of_a_stage_that_stores_nothing_of_it_is_no_copy_there() -> None:
    """The use is known on every stage, submitted where its band is stored, and over everywhere by its release."""
    world = World(hybrid_geometry(room(8 * 9, 8, 8, 8), room(8 * 9, 8, 0, 8)))
    _, _, pages = world.take(1, 2, 2)
    world.step(writes={WINDOW: pages, FULL: pages})
    world.backup(1, {WINDOW: pages})
    world.step()
    assert [names(effects) for effects in world.effects] == [["HostRead"], []]
    assert [world.chain(stage).open_uses for stage in range(2)] == [1, 1]
    world.end(1)
    world.step()
    assert [world.chain(stage).open_uses for stage in range(2)] == [0, 0]
    world.drain()


def test_host_slots_stay_with_their_units_in_every_band() -> None:
    """One copy of all three bands names the slots of each band's units in the order of its ids."""
    world = World(hybrid_geometry(room(8 * 12, 8, 8, 8)))
    slots, _, pages = world.take(2, 3, 3)
    world.step(writes={STATE: slots, WINDOW: pages, FULL: pages})
    kept = world.backup(1, {STATE: slots, WINDOW: pages[1:], FULL: pages})
    effects = world.step()
    assert names(effects) == ["HostRead"] * 3
    assert all(isinstance(effect, HostRead) and len(effect.slots) == 2 * len(effect.units) for effect in effects)
    world.end(1)
    world.free({STATE: slots, WINDOW: pages, FULL: pages})
    slots, window, pages = world.take(2, 2, 3, bound={WINDOW: [1, 2]})
    world.load(2, {STATE: slots, WINDOW: window, FULL: pages}, kept)
    assert names(world.step())[-3:] == ["HostWrite"] * 3
    world.end(2)
    world.step(writes={})
    world.drain()


# --- flushes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["written", "unknown", "load", "send", "publish", "hold", "backup"])
def test_a_flush_waits_for_nothing_and_stops_at_what_it_may_not_touch(what: str) -> None:
    """The highest unit would fill the lowest hole: it stays, unless only a copy reads it; and nobody is waited for."""
    world, pages = one_band(5, taken=5)
    last = pages[4:]
    if what == "load":
        slots = world.backup(1, {0: last})
        world.step()
        world.end(1)
        world.load(2, {0: last}, slots)
    elif what == "send":
        world.send(2, {0: last})
    elif what == "publish":
        world.publish(2, {0: last}, writes=False)
    elif what == "hold":
        world.hold(2, {0: last})
    elif what == "backup":
        world.backup(2, {0: last})
    world.free({0: pages[:1]})
    writes = {"written": {0: last}, "unknown": {0: pages[2:3]}}.get(what)
    world.step(writes=writes, unknown=[0] if what == "unknown" else [])
    world.flush()
    effects = world.step()
    assert waits(effects) == []
    assert names(effects) == (["Copy", "Bind"] if what == "backup" else [])
    assert world.where(0, last) == ([5] if what == "backup" else [1])
    settled(world)
    if world.uses:
        world.end(2)
    world.flush()
    world.step()
    assert world.where(0, last) == [5]
    assert world.counts(0) == (4, 0, 0, 1)
    world.drain()


def test_a_moved_unit_that_a_copy_reads_leaves_a_guarded_hole() -> None:
    """The old unit stays inside the span, is taken last, and its taker waits for the copy."""
    world, pages = one_band(5, taken=5)
    world.backup(1, {0: pages[4:]})
    world.free({0: pages[:1]})
    world.step()
    world.flush()
    world.step()
    assert world.counts(0) == (4, 0, 1, 0)
    (page,) = world.take(1)
    assert waits(world.step()) == [("copy", 1)]
    assert world.where(0, page) == [1]
    world.drain()


def test_a_band_with_held_rows_is_left_alone_and_its_neighbours_are_not() -> None:
    """Rows that await publication keep their whole band where it is, holes at the boundary too."""
    world = World(hybrid_geometry(room(8 * 12, 8, 8)))
    slots, pages = world.take(3, 5)
    world.step(writes={0: slots, 1: pages})
    settled(world)
    world.hold(1, {1: pages[1:2]})
    world.free({0: slots[:1], 1: [pages[0], pages[4]]})
    world.step()
    world.flush()
    effects = world.step()
    assert [effect.band for effect in effects if isinstance(effect, Copy)] == [0]
    assert world.counts(1) == (3, 2, 0, 7)
    world.publish(1, {1: pages[1:2]})
    world.step()
    world.flush()
    world.step()
    assert world.counts(1) == (3, 0, 0, 9)
    assert world.where(1, pages[1:2]) == [12], "published: the others moved around it"
    world.drain()


# --- transfers ------------------------------------------------------------------------------------


def test_a_unit_freed_under_a_send_is_out_of_circulation_until_the_release() -> None:
    """Nobody waits for our engine: other units are taken, and at the release it is a hole."""
    world, pages = one_band(5, taken=3)
    world.send(1, {0: pages[:1]})
    world.step(writes={0: pages[1:]})
    world.free({0: pages[:1]})
    world.take(2)
    assert waits(world.step()) == []
    assert world.counts(0) == (5, 0, 0, 0)
    settled(world)
    assert world.counts(0) == (5, 0, 0, 0), "the forward is over, the engine may not be"
    world.end(1)
    world.step()
    assert world.counts(0) == (4, 1, 0, 0)
    world.drain()


def test_a_take_that_needs_the_unit_under_a_send_is_refused_until_it_is_over() -> None:
    """Where the unit that our engine reads is all there is, the daemon hears that the end of a transfer would help."""
    world, pages = one_band(2, taken=2)
    world.send(1, {0: pages[:1]})
    world.step()
    world.free({0: pages[:1]})
    refusal = world.logical.refusal((1,))
    assert refusal is not None
    assert refusal.transfers
    assert not refusal.never
    world.end(1)
    world.take(1)
    assert waits(world.step()) == []
    world.drain()


def test_a_send_that_never_ends_is_fixed_and_its_units_stay() -> None:
    """Once it is fixed nobody waits for it on the host: a relief goes around its unit, which still reads the same."""
    world = World(hybrid_geometry(room(8 * 6, 8, 8)))
    _, pages = world.take(1, 5)
    world.step()
    world.free({1: pages[:3]})
    world.send(1, {1: pages[3:4]})
    world.step()
    before = world.where(1, pages[3:4])
    world.fix(1)
    world.step()
    world.report()
    assert [extent is not None for extent in world.chain().fixed_extents()] == [False, True]
    while world.logical.refusal((1, 0)) is None:
        world.take(1, 0)
        assert all(kind != "host" for kind, _ in waits(world.step()))
    assert world.where(1, pages[3:4]) == before
    world.end(1)
    world.step()
    assert world.chain().fixed_extents() == [None, None]
    world.drain()


def test_an_address_leaves_after_the_newest_forward() -> None:
    """Units taken from what a forward may still write are published behind it, under their ids and present units."""
    world, pages = one_band(3, taken=2)
    world.step(writes={0: pages})
    world.free({0: pages[:1]})
    world.hold(1, {0: (fresh := world.take(2)[0])})
    world.step(writes={0: pages[1:]})
    newest = world.seq
    world.publish(1, {0: fresh})
    (effect,) = world.step()
    assert isinstance(effect, PublishUnits)
    assert effect.after == newest
    assert i32(effect.virtual).tolist() == sorted(fresh)
    assert i32(effect.units).tolist() == world.where(0, sorted(fresh))
    world.drain()


def test_held_rows_move_until_they_are_published_and_not_after() -> None:
    """A relief moves a held row, so its address is read at publication; from then on every demand leaves it there."""
    world = World(hybrid_geometry(room(8 * 6, 8, 8)))
    _, pages = world.take(1, 5)
    world.step()
    world.free({1: pages[:2]})
    row = pages[4:]
    world.hold(1, {1: row})
    world.step()
    assert world.where(1, row) == [3]
    world.take(1, 0)
    world.step()
    assert world.where(1, row) == [7], "state took unit 3"
    world.publish(1, {1: row})
    world.step()
    world.report()
    assert world.chain().fixed_extents() == [None, (56, 64)]
    world.take(1, 0)
    world.step()
    assert world.where(1, row) == [7]
    world.end(1)
    world.step(writes={1: pages[2:]})
    world.drain()


def test_fixed_extents_span_all_publications_of_a_band() -> None:
    """From the lowest published byte to the end of the highest one, over all that are open; units between may move."""
    world, pages = one_band(8, taken=7)
    world.publish(1, {0: pages[1:3]}, writes=False)  # units 7 and 6
    world.publish(2, {0: [pages[2], pages[5]]}, writes=False)  # units 6 and 3
    world.step()
    assert world.chain().fixed_extents() == [(24, 64)]
    world.report()
    world.end(2)
    world.step()
    assert world.chain().fixed_extents() == [(48, 64)], "unit 6 is fixed by the first one still"
    world.free({0: pages[:1]})
    world.flush()
    world.step()
    assert world.where(0, pages[1:3]) == [7, 6]
    assert world.where(0, pages[6:]) == [8]
    world.end(1)
    world.step()
    assert world.chain().fixed_extents() == [None]
    world.drain()


def test_published_units_keep_being_read_while_they_are_fixed() -> None:
    """What a peer reads, forwards read too; nobody waits for anything, and nobody writes it."""
    world, pages = one_band(3, taken=3)
    world.publish(1, {0: pages[:2]}, writes=False)
    world.step(writes={0: pages[2:]})
    assert world.launch_waits == []
    with pytest.raises(InvariantBroken, match="use 1 has fixed units that the next forward is about to touch"):
        world.step(writes={0: pages[:1]})


# --- the other ops --------------------------------------------------------------------------------


def test_a_rebind_moves_no_byte() -> None:
    """A window's unit goes to another page where it lies; the old page reads as the sink; both are freed as usual."""
    world = World(hybrid_geometry(room(8 * 12, 8, 8, 8)))
    _, window, pages = world.take(0, 2, 4, bound={WINDOW: [0, 1]})
    world.step(writes={WINDOW: window})
    at = world.where(WINDOW, window)
    world.rebind(WINDOW, window, [pages[3], pages[2]])
    effects = world.step(writes={WINDOW: [pages[2]]})
    assert names(effects) == ["Bind"]
    assert isinstance(effects[0], Bind)
    assert world.where(WINDOW, pages) == [0, 0, at[1], at[0]]
    world.free({WINDOW: [pages[3]], FULL: window})
    world.step()
    world.drain()


def test_a_rebound_unit_keeps_its_backup() -> None:
    """A copy that reads a unit reads it under any name: freed by the new page, it is fenced until the copy is over."""
    world = World(hybrid_geometry(room(8 * 12, 8, 8, 8)))
    _, window, pages = world.take(0, 1, 2, bound={WINDOW: [0]})
    world.step(writes={WINDOW: window})
    settled(world)
    world.backup(1, {WINDOW: window})
    world.step()
    world.rebind(WINDOW, window, pages[1:])
    world.free({WINDOW: pages[1:]})
    world.step()
    assert world.counts(WINDOW)[:3] == (0, 0, 1)
    world.drain()


def test_a_launch_of_unknown_writes_waits_for_every_copy_of_a_live_unit() -> None:
    """A speculative forward may write any of them, so it waits; copies of freed units are no concern of its."""
    world, pages = one_band(5, taken=5)
    world.backup(1, {0: pages[:1]})
    world.send(2, {0: pages[1:2]})
    world.backup(3, {0: pages[2:3]})
    world.step()
    world.free({0: pages[2:3]})
    world.step(writes={0: pages[:2]}, unknown=[0])
    assert waits(world.launch_waits) == [("copy", 1), ("host", 2)]
    world.drain()


def test_waits_at_a_launch_are_in_the_next_digest() -> None:
    """A rank that was told other writes, and so waited otherwise, is found out one step later."""
    digests: list[list[bytes]] = []
    for written in ([1], [2]):
        chain = PhysicalChain(full_geometry(4, unit_bytes=8), 0)
        out: list[bytes] = []
        ops: list[list[Op]] = [
            [Take([Part(0, ids(1, 2).tobytes())])],
            [Backup(1, [Part(0, ids(1).tobytes())], [bytes(8)])],
            [],
        ]
        for seq, one in enumerate(ops, start=1):
            chain.begin_step(seq, 0)
            chain.apply(one)
            out.append(chain.end_step())
            if seq == 2:
                assert chain.launched(2, {0: ids(*written)}) == ([WaitCopy(1)] if written == [1] else [])
        digests.append(out)
    assert digests[0][:2] == digests[1][:2]
    assert digests[0][2] != digests[1][2]


# --- loud ends ------------------------------------------------------------------------------------


def test_a_use_begins_and_ends_once() -> None:
    """A number on record is not used again, also after this rank waited for it, and a second release stops there."""
    chain = PhysicalChain(full_geometry(3, unit_bytes=8), 0)
    backup = Backup(7, [Part(0, ids(1).tobytes())], [bytes(8)])
    chain.begin_step(1, 0)
    chain.apply([Take([Part(0, ids(1).tobytes())]), backup])
    chain.end_step()
    assert chain.launched(1, {0: ids(1)}) == [WaitCopy(7)]
    chain.begin_step(2, 0)
    with pytest.raises(InvariantBroken, match="use 7 is on record already"):
        chain.apply([backup])


def test_a_use_left_behind_is_a_leak_at_idle() -> None:
    """With everything freed and processed, a copy that was never released is named."""
    world, pages = one_band(2, taken=1)
    world.backup(5, {0: pages})
    world.step()
    world.free({0: pages})
    world.step()
    with pytest.raises(InvariantBroken, match="0 units live, 1 pending at idle"):
        world.chain().check_idle()
    world.end(5)
    world.step()
    world.chain().check_idle()


def test_a_use_names_bound_units_only() -> None:
    """A copy of an unbound id is refused on the rank before anything is submitted."""
    chain = PhysicalChain(full_geometry(3, unit_bytes=8), 0)
    chain.begin_step(1, 0)
    with pytest.raises(InvariantBroken, match="use 7 names ids 2, which are not bound") as caught:
        chain.apply([Take([Part(0, ids(1).tobytes())]), Backup(7, [Part(0, ids(1, 2).tobytes())], [bytes(16)])])
    assert caught.value.name == "band.free_of_bound_unit"
    assert chain.open_uses == 0
