"""Floats: where an empty one is placed, which way one grows, what it hands back, and how its neighbours see it."""

from __future__ import annotations

import pytest

from allocator.effects import Copy
from allocator.physical.layout import Level
from tests.allocator.worlds import World, hybrid_geometry, room, waits

STATE, WINDOW, FULL = 0, 1, 2


def three_bands() -> tuple[World, list[int]]:
    """State (units 2, 3), a window and full attention (20 to 25), 8 bytes each; units 4 to 19 are free. And pages."""
    world = World(hybrid_geometry(room(8 * 24, 8, 8, 8)))
    slots, _, pages = world.take(2, 0, 6)
    world.step(writes={STATE: slots, FULL: pages})
    world.process()
    world.step()
    assert world.where(FULL, pages) == [25, 24, 23, 22, 21, 20]
    return world, pages


def bind(world: World, pages: list[int]) -> list[int]:
    """Window units for these live pages, taken and written in a step of their own; where they lie."""
    world.take(0, len(pages), 0, onto={WINDOW: pages})
    world.step(writes={WINDOW: pages})
    world.process()
    world.step()
    return world.where(WINDOW, pages)


@pytest.mark.parametrize(("count", "first"), [(1, 11), (2, 11), (5, 9), (6, 9)])
def test_an_empty_float_is_placed_in_the_middle_of_its_gap(count: int, first: int) -> None:
    """Between what its neighbours hold, so that both sides can grow; an odd unit is left on the side above."""
    world, pages = three_bands()
    assert bind(world, pages[:count]) == list(range(first, first + count))
    world.drain()


def test_a_float_grows_toward_its_larger_gap() -> None:
    """Above while that gap is as large, then below, in turns; its units follow no order of ids."""
    world, pages = three_bands()
    assert bind(world, pages[:2]) == [11, 12], "7 units free below, 7 above"
    assert bind(world, pages[2:3]) == [13]
    assert bind(world, pages[3:4]) == [10], "7 below, 6 above"
    assert bind(world, pages[4:5]) == [14], "6 below, 6 above"
    assert world.chain().relief.reliefs == 0
    world.drain()


def test_a_float_grows_on_both_sides_when_one_gap_is_not_enough() -> None:
    """What the larger gap does not hold is taken from the other one, in the same take, without a move."""
    world, pages = three_bands()
    assert bind(world, pages[:1]) == [11]
    world.take(5, 0, 0)
    world.take(0, 0, 5)
    world.step()
    assert world.chain().spans() == [(16, 72), (88, 96), (120, 208)], "2 units free below, 3 above"
    assert sorted(bind(world, pages[1:5])) == [10, 12, 13, 14]
    assert world.chain().relief.reliefs == 0
    world.drain()


def test_a_float_hands_back_holes_at_its_boundaries_and_moves_nothing() -> None:
    """A flush shrinks its span to the outermost units in use; holes inside stay for later takes."""
    world, pages = three_bands()
    at = bind(world, pages)
    assert at == [9, 10, 11, 12, 13, 14]
    world.free({WINDOW: [pages[0], pages[2], pages[5]]})
    world.flush()
    effects = world.step()
    assert not any(isinstance(effect, Copy) for effect in effects)
    assert world.chain().spans()[WINDOW] == (80, 112)
    assert world.counts(WINDOW) == (3, 1, 0, 24 - 4)
    assert world.where(WINDOW, pages) == [0, 10, 0, 12, 13, 0]
    assert bind(world, [pages[0]]) == [11], "the hole inside comes before growth"
    world.drain()


def test_a_float_keeps_boundary_units_that_pend() -> None:
    """Units freed under a forward stay in the span until it is processed; then the float is empty and beyond."""
    world, pages = three_bands()
    bind(world, pages[:3])
    world.step(writes={WINDOW: pages[:3]})
    world.free({WINDOW: pages[:3]})
    world.flush()
    assert waits(world.step()) == []
    assert world.counts(WINDOW) == (0, 0, 3, 21)
    world.process()
    world.flush()
    world.step()
    assert world.counts(WINDOW) == (0, 0, 0, 24)
    assert world.chain().spans()[WINDOW] is None
    world.drain()


def test_an_empty_float_is_transparent() -> None:
    """After a flush emptied it, either neighbour grows over where it was, and it is placed anew in what is left."""
    world, pages = three_bands()
    bind(world, pages[:4])
    world.free({WINDOW: pages[:4]})
    world.flush()
    slots = world.take(12, 0, 0)[STATE]
    world.step()
    assert world.chain().relief.reliefs == 0
    assert world.where(STATE, slots) == list(range(4, 16))
    assert bind(world, pages[:2]) == [17, 18], "the middle of 16 to 19"
    world.drain()


def test_a_float_of_holes_is_parked_without_a_move() -> None:
    """A take that needs its bytes hands back its holes by a relief of the lowest level: nothing moves, nobody waits."""
    world, pages = three_bands()
    bind(world, pages[:4])
    world.free({WINDOW: pages[:4]})
    world.take(12, 0, 0)
    assert waits(world.step()) == []
    relief = world.chain().relief
    assert (relief.reliefs, relief.moves, relief.by_level[Level.NO_MOVE]) == (1, 0, 1)
    assert world.chain().spans() == [(16, 128), None, (160, 208)]
    world.drain()


def test_two_floats_stay_in_chain_order_and_one_sees_through_the_other() -> None:
    """The longer window lies left of the shorter; while that is empty it may have all the space between the ends."""
    world = World(hybrid_geometry(room(8 * 20, 8, 8, 8, 8)))
    long, short = 1, 2
    slots, _, _, pages = world.take(1, 0, 0, 5)
    world.step()
    assert (world.where(0, slots), world.where(3, pages)) == ([2], [21, 20, 19, 18, 17])
    world.take(0, 3, 0, 0, onto={long: pages[:3]})
    world.step(writes={long: pages[:3]})
    assert world.where(long, pages[:3]) == [8, 9, 10], "the middle of 3 to 16"
    world.take(0, 0, 2, 0, onto={short: pages[:2]})
    world.step(writes={short: pages[:2]})
    assert world.where(short, pages[:2]) == [13, 14], "the middle of 11 to 16"
    world.take(0, 2, 0, 0, onto={long: pages[3:]})
    world.step(writes={long: pages[3:]})
    assert world.where(long, pages[3:]) == [6, 7], "5 units free below, 2 above"
    world.drain()


def test_a_stage_without_a_band_has_other_neighbours() -> None:
    """One take on three stages: one lacks the window, one lacks full attention, and its window is an end there."""
    stages = [room(8 * 24, 8, 8, 8), room(8 * 24, 8, 0, 8), room(8 * 24, 8, 8, 0)]
    world = World(hybrid_geometry(*stages))
    slots, _, pages = world.take(1, 3, 3)
    world.step(writes={STATE: slots, WINDOW: pages, FULL: pages})
    assert [world.where(FULL, pages, stage) for stage in range(3)] == [[25, 24, 23], [25, 24, 23], [0, 0, 0]]
    assert world.where(WINDOW, pages, stage=1) == [0, 0, 0]
    assert world.where(WINDOW, pages, stage=2) == [25, 24, 23], "the last stored band grows down, whatever its kind"
    assert world.counts(WINDOW, stage=1) == (0, 0, 0, 0)
    world.drain()
