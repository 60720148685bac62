"""Compaction of an end: which units an opportunistic flush moves, and how far the frontier retreats.

Owns two pure plans over a band's columns. Must never wait for a forward, move a unit that an unfinished forward writes,
or let the frontier pass a unit that pends. Urgent compaction is relief's: it makes room for *other* bands.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int32s
from allocator.free_set import FreeSet
from allocator.physical.units import HOLE, LIVE

_SCAN = 1024

_NONE = np.empty(0, dtype=np.int32)


def plan_moves(
    state: NDArray[np.uint8],
    frontier: int,
    holes: FreeSet,
    movable: Callable[[Int32s], NDArray[np.bool_]],
    moves_max: int,
) -> tuple[Int32s, Int32s]:
    """Sources (highest live positions, descending) and targets (lowest holes, ascending), pair by pair.

    Each source lies above its target. Stops at the first source that is not `movable`.
    """
    assert 0 <= frontier <= state.size
    count = min(moves_max, holes.count)
    if count == 0:
        return _NONE, _NONE
    targets = holes.peek_lowest(count)
    sources = _highest_live(state, frontier, int(targets[0]), count)
    pairs = min(sources.size, targets.size)
    useful = sources[:pairs] > targets[:pairs]
    pairs = int(useful.sum())  # sources fall, targets rise: the useful pairs are a prefix
    stuck = (~movable(sources[:pairs])).nonzero()[0]
    if stuck.size:
        pairs = int(stuck[0])
    return sources[:pairs], targets[:pairs]


def plan_retreat(state: NDArray[np.uint8], frontier: int, begin: int = 0) -> int:
    """The frontier after it gave back the holes at its boundary; `begin` when nothing but holes is inside."""
    assert 0 <= begin <= frontier <= state.size
    top = frontier
    while top > begin:
        base = max(begin, top - _SCAN)
        used = (state[base:top] != HOLE).nonzero()[0]
        if used.size:
            return base + int(used[-1]) + 1
        top = base
    return begin


def plan_advance(state: NDArray[np.uint8], begin: int, frontier: int) -> int:
    """The begin of a float's span after it gave back the holes at that boundary; something inside is no hole."""
    assert 0 <= begin < frontier <= state.size
    base = begin
    while base < frontier:
        top = min(frontier, base + _SCAN)
        used = (state[base:top] != HOLE).nonzero()[0]
        if used.size:
            return base + int(used[0])
        base = top
    return frontier


def _highest_live(state: NDArray[np.uint8], frontier: int, floor: int, count: int) -> Int32s:
    """Up to `count` live positions above `floor`, from the frontier down."""
    found: list[NDArray[np.int64]] = []
    held = 0
    top = frontier
    while top > floor and held < count:
        base = max(floor, top - _SCAN)
        live = (state[base:top] == LIVE).nonzero()[0][::-1] + base
        found.append(live)
        held += live.size
        top = base
    return np.concatenate(found)[:count].astype(np.int32) if found else _NONE
