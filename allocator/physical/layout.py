"""The layout search: where the bands of an arena should meet, so that a demand fits and the fewest bytes move.

Owns the choice of the cuts. Must never change a band, emit an effect, or answer otherwise than the closed form of
capacity: `search` finds a layout exactly when the walk of capacity.py, with the pinned extents, says that one exists.

A layout is a row of cuts c_1 <= ... <= c_{B-1}; band k owns bytes [c_k, c_{k+1}) and may use the units wholly inside.
Live units wholly inside their band's piece stay; every other one moves exactly once, into a free place of its piece:
there are enough, because a piece holds at least `need_units` >= live units. No move needs scratch:

    Band i waits for band j when a place in i's new piece lies on j's old bytes. If i < j, every cut between them comes
    to lie beyond where j began, so beyond where any band of i..j-1 ended; if i > j, mirrored, before. One cut cannot do
    both, so across a border between two bands all waiting goes in one direction. A cycle would have to cross a border
    both ways: there is none, and bands can be moved one after the other, each onto bytes already left.

The least cost is the sum of one function per cut: f_k(c) = bytes of band k's live units that end after c, plus bytes of
band k+1's that begin before c. Chain order makes f_k fall up to the present gap between the two bands, stay 0 in it,
and rise after it. Cuts are coupled only by the space between them: c_{k+1} >= M_k(c_k), with M_k never falling. Hence:

* Cuts may be taken at multiples of either neighbour's unit alone (the coarser is taken: fewer places), because rounding
  a cut down to the left band's unit, or up to the right one's, changes no unit's place.
* Where every cut can lie at its wish (the middle of its gap, or the possible place nearest to it), that is optimal. Two
  bands always can.
* Otherwise some optimal layout has every cut between the wishes pushed left from the right end and the wishes pushed
  right from the left end, just as far as the needs force: moving a cut back to there costs no more and breaks no space.
  That range is as wide as the missing space, not as the pool.
* The range is divided into cells. In a cell the least of f_k lies at the end nearer to the wish; letting a cut count as
  its cell's left end for the cut after it, and as its right end for the one before it, gives a lower bound by one pass
  of dynamic programming. Cells through which nothing 1.05 times better than the best known layout leads are dropped,
  the others divided further, until the bound is met. With cells of one place (small ranges) the bound is the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from allocator.physical.layout_cuts import BandLayout, Cuts, Extent, Int64s, join
from allocator.physical.layout_refine import solve

__all__ = ["BandLayout", "Int64s", "Layout", "Level", "search"]


class Level(IntEnum):
    """How much of the chain a layout rearranges."""

    NO_MOVE = 0
    FLUSH_ENDS = 1  # only units of the first and the last stored band lie outside their pieces
    RELAYOUT = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """A unit range [begin, end) for each given band, in order; the bytes that must move for it, and a proved least."""

    ranges: list[Extent]
    cost_bytes: int
    bound_bytes: int
    level: Level


def search(bands: Sequence[BandLayout], start_byte: int, end_byte: int) -> Layout | None:
    """The layout of bytes [start_byte, end_byte) that moves the fewest live bytes, or at most 1.05 times as many.

    Among layouts of one cost: the lowest level, then cuts near the middle of the present gaps. None when no layout
    holds the needs. `bands`: every stored band, in chain order.
    """
    assert all(band.need_units or band.pinned is None for band in bands), "a band without a need pins nothing"
    needed = [band for band in bands if band.need_units]
    if not needed:
        return Layout(_ranges(bands, [], start_byte, end_byte), 0, 0, Level.NO_MOVE)
    cuts = Cuts(needed, start_byte, end_byte)
    pinned = [band.pinned for band in needed]
    bounds = cuts.bounds(pinned)
    if bounds is None:
        return None
    cost, bound, level = 0, 0, Level.NO_MOVE
    at = cuts.in_place(pinned, [band.span for band in needed])
    if at is None:
        extents = cuts.count()
        at = cuts.in_place(pinned, extents)
        if at is None:
            found = solve(cuts, *bounds)
            assert found is not None, "a layout exists"
            at, cost, bound, level = found.at, found.cost_bytes, found.bound_bytes, Level.FLUSH_ENDS
            inner = [
                None if band is bands[0] or band is bands[-1] else extent
                for band, extent in zip(needed, extents, strict=True)
            ]
            if not _stay(cuts, at, inner):
                level = Level.RELAYOUT
                narrower = cuts.bounds([join(p, e) for p, e in zip(pinned, inner, strict=True)])
                other = solve(cuts, *narrower, cutoff=cost) if narrower else None
                if other is not None:
                    at, cost, level = other.at, other.cost_bytes, Level.FLUSH_ENDS
    assert 0 <= bound <= cost, (bound, cost)
    edges = [place * step for place, step in zip(at, cuts.steps, strict=True)]
    return Layout(_ranges(bands, edges, start_byte, end_byte), cost, bound, level)


def _stay(cuts: Cuts, at: Sequence[int], extents: Sequence[Extent | None]) -> bool:
    """Whether all these extents, None where any will do, lie inside their bands' pieces."""
    edges = [cuts.start_byte, *(place * step for place, step in zip(at, cuts.steps, strict=True)), cuts.end_byte]
    for band, extent, begin, end in zip(cuts.bands, extents, edges, edges[1:], strict=False):
        if extent and (begin > extent[0] * band.unit_bytes or end < extent[1] * band.unit_bytes):
            return False
    return True


def _ranges(bands: Sequence[BandLayout], cuts: Sequence[int], start_byte: int, end_byte: int) -> list[Extent]:
    """Unit ranges of all bands; the cuts (bytes) lie between those with a need, and the others get nothing."""
    edges = [start_byte, *cuts, end_byte]
    out: list[Extent] = []
    passed = 0
    for band in bands:
        unit = band.unit_bytes
        begin = min(band.limit_unit, max(band.first_unit, -(-edges[passed] // unit)))
        if not band.need_units:
            out.append((begin, begin))
            continue
        passed += 1
        out.append((begin, min(band.limit_unit, edges[passed] // unit)))
        assert out[-1][1] - begin >= band.need_units, "a piece holds its need"
    return out
