"""Uses on the logical chain: holds, publications, sends, quarantine, host copies: what may not touch whose units."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from allocator.errors import InvariantBroken
from allocator.ops import Backup, CopyState, Fix, Free, Hold, Load, Op, Part, Publish, Rebind, Send, Take
from tests.allocator.logical_world import LogicalWorld
from tests.allocator.shapes import full_geometry, ids

Parts = list[Any]


def slots(*values: int) -> np.ndarray:
    """An int64 column of host slots."""
    return np.array(values, dtype=np.int64)


def test_a_published_unit_that_is_freed_waits_for_the_release() -> None:
    """It stays live and counted, its id is not handed out, the ranks hear nothing; the release frees it."""
    world = LogicalWorld(full_geometry(6))
    world.take((3,))
    world.do(world.chain.publish(1, [ids(2, 3)]))
    world.step()
    assert world.free(ids(1, 2)) == [[1]]
    assert world.chain.quarantined() == (1,)
    assert world.chain.live_units() == (2,)
    world.step()
    world.fixed([(512, 1024)], 1)
    assert world.take((2,))[0].tolist() == [1, 4], "2 is quarantined, 3 is live"
    world.step()
    assert world.end(1) == [(0, [2])]
    assert world.chain.quarantined() == (0,)
    world.step()
    assert world.take((1,))[0].tolist() == [2]
    assert world.free(ids(1, 2, 3, 4)) == [[1, 2, 3, 4]]
    world.step()
    world.chain.check_idle()
    world.mirror.check_idle()


def test_an_owner_page_waits_for_its_windows_unit() -> None:
    """A published window unit keeps its page; a published page does not keep an unpublished window unit."""
    world = LogicalWorld()
    world.take((0, 4, 4))
    world.do(world.chain.publish(1, [None, ids(1), ids(2)]))
    world.step()
    assert world.free(None, ids(1, 2, 3), ids(1, 2, 3)) == [[2, 3], [3]]
    assert world.chain.quarantined() == (0, 1, 2)
    world.step()
    assert world.end(1) == [(1, [1]), (2, [1, 2])]
    world.step()
    assert world.chain.live_units() == (0, 1, 1)


def test_a_window_unit_freed_before_its_page_keeps_it_too() -> None:
    """Retired while published, the unit waits; its page, freed later, waits for it although it is not published."""
    world = LogicalWorld()
    world.take((0, 2, 2))
    world.do(world.chain.publish(1, [None, ids(1, 2), None]))
    world.step()
    assert world.free(None, ids(1), None) == []
    assert world.free(None, None, ids(1)) == []
    assert world.chain.quarantined() == (0, 1, 1)
    world.step()
    world.refuses("band.free_of_bound_unit", lambda: world.chain.free([None, ids(1), None]), "wait for a release")
    world.refuses("band.free_of_bound_unit", lambda: world.chain.free([None, None, ids(1)]), "wait for a release")
    assert world.end(1) == [(1, [1]), (2, [1])]
    world.step()
    assert world.chain.live_ids(1).tolist() == world.chain.live_ids(2).tolist() == [2]


def test_a_unit_published_twice_waits_for_both() -> None:
    """Two peers read the same page: it goes only when both transfers are over, in whichever order."""
    for order in ((1, 2), (2, 1)):
        world = LogicalWorld(full_geometry(4))
        world.take((2,))
        world.do(world.chain.publish(1, [ids(1, 2)]))
        world.do(world.chain.publish(2, [ids(1)]))
        world.step()
        assert world.free(ids(1, 2)) == []
        world.step()
        first = world.end(order[0])
        world.step()
        assert first == ([(0, [2])] if order[0] == 1 else [])
        second = world.end(order[1])
        world.step()
        assert second == ([(0, [1])] if order[1] == 2 else [(0, [1, 2])])
        world.chain.check_idle()


def test_a_receive_is_held_then_published_then_released() -> None:
    """While held nobody may free or write the rows; the publication must be of exactly those; then they are fixed."""
    world = LogicalWorld()
    world.take((2, 3, 3))
    world.do(world.chain.hold(4, [ids(1), ids(1, 2), ids(1, 2)]))
    world.step()
    chain = world.chain
    assert chain.open_uses() == (4,)
    world.refuses("band.free_outside_reservation", lambda: chain.free([None, ids(1), None]), "window:64 ids 1 are held")
    world.refuses("band.free_outside_reservation", lambda: chain.free([ids(1, 2), None, None]))
    world.refuses("band.write_of_fixed_unit", lambda: chain.copy_state(ids(2), ids(1)))
    world.refuses("band.write_of_fixed_unit", lambda: chain.load(5, [ids(1), None, None], [slots(0), None, None]))
    world.refuses("band.write_of_fixed_unit", lambda: chain.hold(5, [None, None, ids(2, 3)]))
    world.refuses("band.write_of_fixed_unit", lambda: chain.publish(5, [None, None, ids(2)]))
    world.refuses("use.once", lambda: chain.publish(4, [ids(1), ids(1, 2), ids(1)]), "other units than it holds")
    world.refuses("use.once", lambda: chain.hold(4, [ids(2), None, None]), "numbers only rise")
    world.do(chain.publish(4, [ids(1), ids(2, 1), ids(1, 2)]))
    world.step()
    world.refuses("band.write_of_fixed_unit", lambda: chain.copy_state(ids(2), ids(1)), "are published")
    assert world.free(ids(1), ids(1), ids(1)) == []
    world.step()
    assert world.end(4) == [(0, [1]), (1, [1]), (2, [1])]
    world.step()
    assert chain.live_units() == (1, 2, 2)


def test_a_hold_that_ends_without_publication_gives_its_rows_back() -> None:
    """An aborted receive: end the use, then free in the same step."""
    world = LogicalWorld(full_geometry(4))
    world.take((2,))
    world.do(world.chain.hold(1, [ids(1, 2)]))
    world.step()
    assert world.end(1) == []
    assert world.free(ids(1, 2)) == [[1, 2]]
    world.step()
    world.chain.check_idle()
    world.mirror.check_idle()


def test_nobody_reads_what_a_peer_is_writing() -> None:
    """From the publication of a hold to its release its units are no source of a copy, a backup, a send or a loan."""
    world = LogicalWorld()
    world.take((3, 2, 2))
    chain = world.chain
    world.do(chain.publish(1, [ids(3), None, None]))
    world.do(chain.hold(2, [ids(1), ids(1), None]))
    world.step()
    for use, source in ((3, ids(3)), (5, ids(1))):  # lent units are read by anyone, and held ones still are
        world.do(chain.copy_state(source, ids(2)))
        world.do(chain.send(use, [source, None, None]))
        world.do(chain.backup(use + 1, [source, None, None], [slots(0), None, None]))
    world.do(chain.publish(2, [ids(1), ids(1), None]))
    world.step()
    name = "use.reads_received_unit"
    for _ in range(2):
        world.refuses(name, lambda: chain.copy_state(ids(1), ids(2)))
        world.refuses(name, lambda: chain.backup(9, [ids(1, 2), None, None], [slots(0, 1), None, None]), "state ids 1")
        world.refuses(name, lambda: chain.send(9, [ids(2), ids(1), None]))
        world.refuses(name, lambda: chain.publish(9, [ids(1), None, None]), "a peer may be writing them")
        world.refuses("band.write_of_fixed_unit", lambda: chain.copy_state(ids(2), ids(1)), "published")
        world.refuses("band.write_of_fixed_unit", lambda: chain.hold(9, [ids(1), None, None]), "published")
        world.step()
    world.end(1, 2)
    world.step()
    world.do(chain.copy_state(ids(1), ids(2)))
    world.do(chain.backup(9, [ids(1), ids(1), None], [slots(0), slots(0), None]))
    world.step()


def test_a_received_window_unit_keeps_its_mark_under_another_page() -> None:
    """Rebound, it may not be read under its new name, and what takes its old page may."""
    world = LogicalWorld()
    world.take((0, 1, 2), bound=(None, ids(0), None))
    chain = world.chain
    world.do(chain.hold(1, [None, ids(1), None]))
    world.do(chain.publish(1, [None, ids(1), None]))
    world.do(chain.rebind(1, ids(1), ids(2)))
    world.refuses("use.reads_received_unit", lambda: chain.send(2, [None, ids(2), None]), "window:64 ids 2 are")
    world.step()
    world.fixed([None, (200, 204), None], 1)
    world.take((0, 1, 0), onto=(None, ids(1), None))
    world.do(chain.send(2, [None, ids(1), None]))
    world.step()
    world.end(1)
    world.do(chain.send(3, [None, ids(2), None]))
    world.step()


@pytest.mark.parametrize("fixed", [False, True])
def test_a_sent_unit_that_is_freed_waits_for_the_release(fixed: bool) -> None:
    """As a published one: live, counted, not handed out, unheard of by the ranks; its windows keep their page."""
    world = LogicalWorld()
    world.take((2, 3, 3))
    chain = world.chain
    world.do(chain.send(1, [ids(1), ids(2), ids(1)]))
    world.do(chain.send(2, [ids(1), None, None]))
    world.step()
    if fixed:
        world.do(chain.fix(1))
    assert world.free(ids(1, 2), ids(1, 2, 3), ids(1, 2, 3)) == [[2], [1, 3], [3]]
    assert chain.quarantined() == chain.live_units() == (1, 1, 2)
    world.step()
    world.refuses("band.free_of_bound_unit", lambda: chain.free([ids(1), None, None]), "wait for a release")
    world.refuses("use.names_live_units", lambda: chain.send(3, [ids(1), None, None]), "wait for a release")
    if fixed:
        world.fixed([(8, 16), None, (504, 512)], 1)
    assert [column.tolist() for column in world.take((1, 1, 1))] == [[2], [3], [3]]
    assert world.end(1) == [(1, [2]), (2, [1, 2])]
    assert chain.quarantined() == (1, 0, 0), "the other send still reads the slot"
    world.step()
    assert world.end(2) == [(0, [1])]
    world.free(ids(2), ids(3), ids(3))
    world.step()
    chain.check_idle()
    world.mirror.check_idle()


def test_a_rebound_sent_unit_waits_under_its_new_name() -> None:
    """The send follows the unit to its new page, and lets it go from there."""
    world = LogicalWorld()
    world.take((0, 1, 2), bound=(None, ids(0), None))
    world.do(world.chain.send(1, [None, ids(1), None]))
    world.step()
    world.do(world.chain.rebind(1, ids(1), ids(2)))
    assert world.free(None, ids(2), ids(1, 2)) == [[1]]
    world.step()
    assert world.end(1) == [(1, [2]), (2, [2])]
    world.step()
    world.chain.check_idle()


def test_only_an_open_send_is_fixed_and_once() -> None:
    """Anything else is named; fixed units are nobody's to write, and the use does not end in the step that fixes it."""
    world = LogicalWorld()
    world.take((3, 0, 2))
    chain = world.chain
    world.do(chain.hold(1, [None, None, ids(1)]))
    world.do(chain.publish(2, [None, None, ids(2)]))
    world.do(chain.backup(3, [ids(1), None, None], [slots(0), None, None]))
    world.do(chain.send(4, [ids(1, 2), None, None]))
    world.do(chain.hold(5, [ids(2), None, None]))
    world.step()
    for use, text in ((1, "a hold"), (2, "a lend"), (3, "a backup"), (6, "not open")):
        world.refuses("use.once", partial(chain.fix, use), text)
    world.do(chain.fix(4))
    world.refuses("use.once", lambda: chain.end_uses([4]), "fixes it")
    world.refuses("use.once", lambda: chain.fix(4), "a fix")
    world.refuses("band.write_of_fixed_unit", lambda: chain.copy_state(ids(3), ids(1)), "published or fixed")
    world.refuses("band.write_of_fixed_unit", lambda: chain.publish(5, [ids(2), None, None]), "are fixed")
    world.do(chain.copy_state(ids(1), ids(3)))
    world.step()
    world.end(4)
    world.refuses("use.once", lambda: chain.fix(4), "not open")
    world.do(chain.publish(5, [ids(2), None, None]))
    world.step()


@pytest.mark.parametrize("kind", ["backup", "load"])
def test_units_of_host_copies_are_freed_at_once(kind: str) -> None:
    """The chain frees and hands out their ids at once (the ranks order it); the use stays open until it is ended."""
    world = LogicalWorld(full_geometry(3))
    world.take((3,))
    chain = world.chain
    place = [slots(5, 6)]
    world.do((chain.backup if kind == "backup" else chain.load)(1, [ids(1, 2)], place))
    world.step()
    assert world.free(ids(1, 2, 3)) == [[1, 2, 3]]
    assert world.take((3,))[0].tolist() == [1, 2, 3]
    world.step()
    assert chain.open_uses() == (1,)
    assert world.end(1) == []
    world.step()
    assert chain.open_uses() == ()


def test_host_slots_stay_beside_their_units() -> None:
    """Ids given in any order are put in order together with their slots, one column per part."""
    world = LogicalWorld()
    world.take((1, 3, 3))
    op = world.chain.backup(1, [ids(1), None, ids(3, 1, 2)], [slots(9), None, slots(30, 10, 20)])
    assert op == Backup(
        1,
        [Part(0, ids(1).tobytes()), Part(2, ids(1, 2, 3).tobytes())],
        [slots(9).tobytes(), slots(10, 20, 30).tobytes()],
    )
    world.do(op)
    world.step()
    for wrong in ([slots(9), None, slots(1)], [slots(9), None, None]):
        with pytest.raises(ValueError, match="3 units need as many host slots"):
            world.chain.load(2, [ids(1), None, ids(1, 2, 3)], wrong)
    world.refuses(
        "op.canonical", lambda: world.chain.load(2, [ids(1), None, None], [slots(-1), None, None]), "negative"
    )


def test_uses_name_live_units_with_an_owner() -> None:
    """Free, foreign and quarantined ids are named, for every kind of use, and nothing begins."""
    world = LogicalWorld()
    world.take((1, 2, 3), bound=(None, ids(0, 1), None))
    world.do(world.chain.publish(1, [None, None, ids(3)]))
    world.free(None, None, ids(3))
    world.step()
    chain = world.chain
    calls: list[Callable[[Parts, Parts], Op]] = [
        lambda parts, _: chain.hold(2, parts),
        lambda parts, _: chain.publish(2, parts),
        lambda parts, _: chain.send(2, parts),
        lambda parts, places: chain.backup(2, parts, places),
        lambda parts, places: chain.load(2, parts, places),
    ]
    dead: list[Parts] = [
        [ids(2), None, None],
        [None, ids(3), None],
        [None, None, ids(4)],
        [None, None, ids(0)],
        [None, None, ids(3)],
    ]
    for parts, call in product(dead, calls):
        places: Parts = [None if part is None else slots(1) for part in parts]
        world.refuses("use.names_live_units", partial(call, parts, places))
    assert chain.open_uses() == (1,)
    with pytest.raises(ValueError, match="at least one id"):
        chain.send(2, [None, None, None])
    world.refuses("op.canonical", lambda: chain.send(2, [None, None, ids(1, 1)]), "named twice")


def test_a_use_ends_once_and_not_in_the_step_that_begins_it() -> None:
    """Ending what is unknown, twice, or begun or published in this step raises; the step must list what ended."""
    world = LogicalWorld(full_geometry(4))
    world.take((2,))
    chain = world.chain
    world.do(chain.hold(1, [ids(1)]))
    world.refuses("use.once", lambda: chain.end_uses([1]), "begins, publishes or fixes")
    world.refuses("use.once", lambda: chain.end_uses([7]), "not open")
    world.step()
    world.do(chain.publish(1, [ids(1)]))
    world.refuses("use.once", lambda: chain.end_uses([1]))
    world.step()
    world.refuses("use.once", lambda: chain.end_uses([1, 1]), "ends twice")
    chain.end_uses([1])
    with pytest.raises(InvariantBroken, match="released_in_step"):
        chain.step_digest(3, [Free([])])
    with pytest.raises(InvariantBroken, match="not open"):
        chain.end_uses([1])
    world.refuses("use.once", lambda: chain.send(1, [ids(2)]), "numbers only rise")


def test_released_uses_are_in_the_digest_and_only_then() -> None:
    """Two steps that differ only in what they release differ in their digest; a step without releases is as before."""
    left, right = LogicalWorld(full_geometry(4)), LogicalWorld(full_geometry(4))
    for world in (left, right):
        world.take((2,))
        world.do(world.chain.send(1, [ids(1)]))
        world.do(world.chain.send(2, [ids(2)]))
        world.step()
    left.chain.end_uses([1])
    right.chain.end_uses([2])
    assert left.chain.step_digest(2, [], [1]) != right.chain.step_digest(2, [], [2])


def test_a_rebind_moves_window_units_and_what_is_published_of_them() -> None:
    """The units go by other pages; a freed one waits under its new name; held, free and taken ones are refused."""
    world = LogicalWorld()
    world.take((0, 2, 2))
    world.take((0, 0, 3))
    chain = world.chain
    world.do(chain.publish(1, [None, ids(1), ids(1)]))
    world.step()
    world.do(chain.rebind(1, ids(1, 2), ids(5, 3)))
    world.step()
    assert chain.live_ids(1).tolist() == world.mirror.live_ids(1).tolist() == [3, 5]
    assert world.free(None, ids(5, 3), ids(1, 2, 3)) == [[3], [2, 3]]
    assert chain.quarantined() == (0, 1, 1), "unit 5 of the window, page 1"
    world.step()
    name = "band.rebind_of_bound_unit"
    world.take((0, 1, 1))
    world.refuses(name, lambda: chain.rebind(1, ids(2), ids(1)), "wait for a release")
    world.refuses(name, lambda: chain.rebind(1, ids(5), ids(4)), "wait for a release")
    world.refuses(name, lambda: chain.rebind(1, ids(4), ids(2)), "ids 4 hold no unit")
    world.refuses(name, lambda: chain.rebind(1, ids(2), ids(3)), "hold one or are free")
    world.refuses(name, lambda: chain.rebind(2, ids(2), ids(4)), "no window")
    world.refuses("op.canonical", lambda: chain.rebind(1, ids(2), ids(4, 5)))
    world.refuses("op.canonical", lambda: chain.rebind(1, ids(), ids()))
    world.do(chain.hold(2, [None, ids(2), None]))
    world.refuses("band.write_of_fixed_unit", lambda: chain.rebind(1, ids(2), ids(4)), "held")
    world.step()
    assert world.end(1) == [(1, [5]), (2, [1])]
    world.end(2)
    world.step()
    assert world.free(None, ids(2), ids(2, 4, 5)) == [[2], [2, 4, 5]]
    world.step()
    chain.check_idle()


def test_state_copies_name_live_slots() -> None:
    """Sources may repeat; targets ascend, are live and no source; nothing is counted."""
    world = LogicalWorld()
    world.take((4, 0, 0))
    chain = world.chain
    world.do(chain.copy_state(ids(1, 1), ids(3, 4)))
    world.step()
    assert chain.live_units() == (4, 0, 0)
    world.refuses("op.canonical", lambda: chain.copy_state(ids(1, 1), ids(4, 3)))
    world.refuses("op.canonical", lambda: chain.copy_state(ids(1, 2), ids(2, 3)))
    world.refuses("op.canonical", lambda: chain.copy_state(ids(1), ids(2, 3)))
    world.refuses("use.names_live_units", lambda: chain.copy_state(ids(5), ids(1)), "slots 5 are not live")
    world.refuses("use.names_live_units", lambda: chain.copy_state(ids(1), ids(6)), "slots 6 are not live")
    for outside in (-38, 0, 99):
        between = ids(1, outside, 1)
        world.refuses("use.names_live_units", partial(chain.copy_state, between, ids(2, 3, 4)), f"slots {outside} are")
    with pytest.raises(ValueError, match="no state band"):
        LogicalWorld(full_geometry(4)).chain.copy_state(ids(1), ids(2))


def test_windows_are_bound_onto_live_pages() -> None:
    """`onto` names live pages without a unit, counted with `bound`; anything else is refused with nothing changed."""
    world = LogicalWorld()
    world.take((0, 0, 4))
    _, window, pages = world.take((0, 4, 2), onto=(None, ids(1, 3), None))
    assert window.tolist() == [1, 3, 5, 6]
    assert pages.tolist() == [5, 6]
    _, window, pages = world.take((0, 2, 1), bound=(None, ids(), None), onto=(None, ids(2, 4), None))
    assert window.tolist() == [2, 4]
    assert pages.tolist() == [7]
    _, window, _ = world.take((0, 1, 0), onto=(None, ids(7), None))
    assert window.tolist() == [7]
    world.step()
    chain = world.chain
    world.take((0, 0, 2))
    before = chain.state_digest()
    for demand, pages in (((0, 1, 0), ids(8, 9)), ((0, 2, 0), ids(9, 8)), ((0, 0, 1), ids(8)), ((0, 1, 1), ids(8))):
        with pytest.raises(ValueError, match=r"do not match|must ascend"):
            chain.take(demand, onto=(None, pages, None))
    assert chain.state_digest() == before
    world.refuses("band.take_of_unbound_id", lambda: chain.take((0, 1, 0), onto=(None, ids(7), None)), "a unit already")
    world.refuses("chain.window_segment_bound", lambda: chain.take((0, 1, 0), onto=(None, ids(12), None)), "no page")
    world.refuses("chain.window_segment_bound", lambda: chain.take((0, 1, 0), onto=(None, ids(0), None)), "outside")
    world.do(chain.publish(1, [None, None, ids(9)]))
    world.free(None, None, ids(9))
    world.fixed([None, None, (440, 448)], 1)
    onto = (None, ids(9), None)
    world.refuses("chain.window_segment_bound", lambda: chain.take((0, 1, 0), onto=onto), "wait for a release")
    world.step()


PAGE, WINDOW = Part(2, ids(1).tobytes()), Part(1, ids(1).tobytes())
SLOT, OTHER = Part(0, ids(1).tobytes()), Part(0, ids(2).tobytes())
PLACE = [slots(3).tobytes()]
BEGIN: list[Op] = [Take([Part(0, ids(1, 2).tobytes()), WINDOW, Part(2, ids(1, 2).tobytes())])]
ONE, TWO = ids(1).tobytes(), ids(2).tobytes()
RECEIVED: list[Op] = [Hold(1, [SLOT]), Publish(1, [SLOT])]


@pytest.mark.parametrize(
    ("ops", "name"),
    [
        ([Take([])], "op.canonical"),
        ([Send(1, [])], "op.canonical"),
        ([Backup(1, [SLOT], [])], "op.canonical"),
        ([Load(1, [SLOT], [slots(1, 2).tobytes()])], "op.canonical"),
        ([Load(1, [SLOT], [slots(-1).tobytes()])], "op.canonical"),
        ([Rebind(1, b"abc", ONE)], "op.canonical"),
        ([Rebind(1, b"", b"")], "op.canonical"),
        ([Rebind(0, ONE, TWO)], "band.rebind_of_bound_unit"),
        ([Rebind(1, TWO, ONE)], "band.rebind_of_bound_unit"),
        ([Rebind(1, ONE, ids(3).tobytes())], "band.rebind_of_bound_unit"),
        ([CopyState(2, ONE, TWO)], "op.canonical"),
        ([CopyState(9, ONE, TWO)], "op.canonical"),
        ([CopyState(0, ONE, ids(3).tobytes())], "use.names_live_units"),
        ([Send(0, [SLOT])], "use.once"),
        ([Send(1, [SLOT]), Send(1, [SLOT])], "use.once"),
        ([Send(2, [SLOT]), Hold(1, [SLOT])], "use.once"),
        ([Send(1, [SLOT]), Publish(1, [SLOT])], "use.once"),
        ([Hold(1, [SLOT]), Publish(1, [OTHER])], "use.once"),
        ([Hold(1, [Part(0, ids(3).tobytes())])], "use.names_live_units"),
        ([Hold(1, [SLOT]), Free([SLOT])], "band.free_outside_reservation"),
        ([Hold(1, [SLOT]), Load(2, [SLOT], PLACE)], "band.write_of_fixed_unit"),
        ([Hold(1, [WINDOW]), Rebind(1, ONE, TWO)], "band.write_of_fixed_unit"),
        ([Publish(1, [SLOT]), Free([SLOT])], "band.free_of_fixed_unit"),
        ([Publish(1, [WINDOW]), Free([WINDOW])], "band.free_of_fixed_unit"),
        ([Publish(1, [PAGE]), Free([WINDOW, PAGE])], "band.free_of_fixed_unit"),
        ([Publish(1, [SLOT]), CopyState(0, TWO, ONE)], "band.write_of_fixed_unit"),
        ([Publish(1, [WINDOW]), Rebind(1, ONE, TWO), Free([Part(1, TWO)])], "band.free_of_fixed_unit"),
        ([Send(1, [SLOT]), Free([SLOT])], "band.free_of_fixed_unit"),
        ([Send(1, [SLOT]), Fix(1), Free([SLOT])], "band.free_of_fixed_unit"),
        ([Send(1, [SLOT]), Fix(1), CopyState(0, TWO, ONE)], "band.write_of_fixed_unit"),
        ([Send(1, [SLOT]), Fix(1), Fix(1)], "use.once"),
        ([Fix(1)], "use.once"),
        ([Hold(1, [SLOT]), Fix(1)], "use.once"),
        ([*RECEIVED, CopyState(0, ONE, TWO)], "use.reads_received_unit"),
        ([*RECEIVED, Backup(2, [SLOT], PLACE)], "use.reads_received_unit"),
        ([*RECEIVED, Send(2, [SLOT])], "use.reads_received_unit"),
        ([*RECEIVED, Publish(2, [SLOT])], "use.reads_received_unit"),
    ],
)
def test_a_mirror_stops_at_what_no_correct_chain_decided(ops: list[Op], name: str) -> None:
    """Each op that breaks a rule is refused under the rule's name, and the ops before it were fine."""
    world = LogicalWorld()
    world.mirror.apply_step(1, BEGIN)
    if len(ops) > 1:
        world.mirror.apply_step(2, ops[:-1])
    with pytest.raises(InvariantBroken) as caught:
        world.mirror.apply_step(2 + (len(ops) > 1), ops[-1:])
    assert caught.value.name == name


def test_a_mirror_stops_at_a_release_that_it_does_not_know() -> None:
    """A use that never began, or that a step releases twice, is named."""
    for released in ([1], [2, 2]):
        world = LogicalWorld()
        world.mirror.apply_step(1, [*BEGIN, Send(2, [SLOT])])
        with pytest.raises(InvariantBroken, match=f"use {released[0]} is not open"):
            world.mirror.apply_step(2, [], released)


def test_open_uses_are_leaks_at_idle() -> None:
    """With nothing live, a use that nobody ended is named on both sides."""
    world = LogicalWorld(full_geometry(3))
    world.take((1,))
    world.do(world.chain.backup(1, [ids(1)], [slots(0)]))
    world.free(ids(1))
    world.step()
    for side in (world.chain, world.mirror):
        with pytest.raises(InvariantBroken, match="uses 1 are still open"):
            side.check_idle()
