"""The refinement of the layout search: cuts of least cost, within a proved factor, on ranges of any size.

Owns the cells and the dynamic programming over them (layout.py says why the bound holds). Must never look at a unit:
costs come from `Cuts.costs`, in a few calls for all places of a round. Invariant: no layout between the given bounds
costs less than the bound returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from allocator.physical.layout_cuts import Cuts, Int64s

PARTS = 1024
"""Cells per cut and round; ranges of up to this many places are searched exhaustively."""

SLACK = 20
"""The search ends once cost * SLACK <= bound * (SLACK + 1): within 1.05 of the least possible."""

_ROUNDS_MAX = 64
"""Never needed so far by a factor of ten; a search that would need more ends with the bound it has proved."""

_NEVER = 1 << 50


@dataclass(frozen=True, slots=True)
class Solution:
    """Cuts, the bytes they move, and bytes that no layout between the same bounds can do without."""

    at: list[int]
    cost_bytes: int
    bound_bytes: int


@dataclass(slots=True)
class _Cells:
    """Cells of one cut, ascending and disjoint: places [low, high], and the cost at both."""

    low: Int64s
    high: Int64s
    at_low: Int64s
    at_high: Int64s

    def divide(self, keep: npt.NDArray[np.bool_]) -> Int64s:
        """Smaller cells instead of those kept, as their ends (low, high, low, high, ...).

        Half of the parts go where the cell is wide, half where its cost changes much.
        """
        low, high = self.low[keep], self.high[keep]
        width = high - low + 1
        total = int(width.sum())
        parts = width
        if total > PARTS:
            drop = np.abs(self.at_low[keep] - self.at_high[keep])
            half, drops = PARTS // 2, max(int(drop.sum()), 1)
            parts = np.minimum(width, 2 + (half * (width / total) + half * (drop / drops)).astype(np.int64))
        cell = np.repeat(np.arange(low.size), parts)
        nth = np.arange(cell.size) - np.repeat(np.cumsum(parts) - parts, parts)
        begin = low[cell] + width[cell] * nth // parts[cell]
        end = low[cell] + width[cell] * (nth + 1) // parts[cell] - 1
        return np.stack((begin, end), 1).ravel()


def solve(cuts: Cuts, lows: Sequence[int], highs: Sequence[int], cutoff: int = _NEVER) -> Solution | None:
    """The cheapest cuts between bounds that some layout keeps; None when they would cost more than `cutoff`."""
    wishes = [min(max(w, low), high) for w, low, high in zip(cuts.wishes, lows, highs, strict=True)]
    count = range(len(wishes))
    if all(cuts.least(k, wishes[k - 1]) <= wishes[k] for k in count[1:]):
        cost = sum(int(row[0]) for row in cuts.costs([np.array([w], dtype=np.int64) for w in wishes]))
        return Solution(wishes, cost, cost) if cost <= cutoff else None
    ends = _first_cells(cuts, wishes)
    best, cost, dropped, bound = list(wishes), _NEVER, _NEVER, 0
    for _ in range(_ROUNDS_MAX):
        costs = cuts.costs(ends)
        found, found_cost = _best_point(cuts, ends, costs)
        if found_cost < cost:
            best, cost = _settle(cuts, ends, costs, found), found_cost
        cells = [_Cells(row[::2], row[1::2], paid[::2], paid[1::2]) for row, paid in zip(ends, costs, strict=True)]
        through = _through(cuts, cells)
        bound = min(dropped, cost, int(through[0].min()))
        if cost * SLACK <= bound * (SLACK + 1) or bound > cutoff:
            break
        # A cell through which nothing 1.05 times better leads is dropped; what it could have led to stays in the bound.
        keep = [row * (SLACK + 1) < cost * SLACK for row in through]
        dropped = min(dropped, *(int(row[~kept].min(initial=_NEVER)) for row, kept in zip(through, keep, strict=True)))
        assert all(kept.any() for kept in keep), "the best path of the bound goes through kept cells"
        ends = [row.divide(kept) for row, kept in zip(cells, keep, strict=True)]
    return Solution(best, cost, bound) if cost <= cutoff else None


def _first_cells(cuts: Cuts, wishes: list[int]) -> list[Int64s]:
    """Cells over the places that the optimum may need: from the wishes pushed left to the wishes pushed right."""
    left, right = list(wishes), list(wishes)
    for k in range(1, len(wishes)):
        right[k] = max(right[k], cuts.least(k, right[k - 1]))
    for k in range(len(wishes) - 1, 0, -1):
        left[k - 1] = min(left[k - 1], cuts.most(k, left[k]))
    out: list[Int64s] = []
    for low, wish, high in zip(left, wishes, right, strict=True):
        # No cell reaches over the wish, so the cost changes in one direction within each.
        edges = [edge for edge in ((low, wish - 1), (wish, wish), (wish + 1, high)) if edge[0] <= edge[1]]
        begin, end = np.array(edges, dtype=np.int64).T
        out.append(_Cells(begin, end, 0 * begin, 0 * begin).divide(np.ones(begin.size, dtype=bool)))
    return out


def _best_point(cuts: Cuts, points: list[Int64s], costs: list[Int64s]) -> tuple[list[int], int]:
    """The cheapest layout with every cut at one of its points (ascending): their indexes, and the cost."""
    totals = [costs[0]]
    reached: list[Int64s] = []
    for k in range(1, len(points)):
        # How many points of the cut before leave enough space; they are its first ones.
        reached.append(np.searchsorted(cuts.least_all(k, points[k - 1]), points[k], "right"))
        cheapest = np.append(np.int64(_NEVER), np.minimum.accumulate(totals[-1]))
        totals.append(costs[k] + cheapest[reached[-1]])
    index = int(np.argmin(totals[-1]))
    cost = int(totals[-1][index])
    found = [index]
    if cost >= _NEVER:
        return found, _NEVER
    for k in range(len(points) - 1, 0, -1):
        index = int(np.argmin(totals[k - 1][: reached[k - 1][index]]))
        found.append(index)
    return found[::-1], cost


def _through(cuts: Cuts, cells: list[_Cells]) -> list[Int64s]:
    """For every cell, a lower bound of every layout with its cut in it and the others in cells."""
    least = [np.minimum(row.at_low, row.at_high) for row in cells]
    forward, backward = [least[0]], [least[-1]]
    enough = [cuts.least_all(k, cells[k - 1].low) for k in range(1, len(cells))]
    for k in range(1, len(cells)):
        reached = np.searchsorted(enough[k - 1], cells[k].high, "right")
        cheapest = np.append(np.int64(_NEVER), np.minimum.accumulate(forward[-1]))
        forward.append(least[k] + cheapest[reached])
    for k in range(len(cells) - 1, 0, -1):
        reached = np.searchsorted(cells[k].high, enough[k - 1], "left")
        cheapest = np.append(np.minimum.accumulate(backward[-1][::-1])[::-1], np.int64(_NEVER))
        backward.append(least[k - 1] + cheapest[reached])
    return [a + b - c for a, b, c in zip(forward, backward[::-1], least, strict=True)]


def _settle(cuts: Cuts, points: list[Int64s], costs: list[Int64s], found: list[int]) -> list[int]:
    """Among the layouts around these points that cost the same, the one with its cuts near their wishes."""
    lows: list[int] = []
    highs: list[int] = []
    for row, paid, index in zip(points, costs, found, strict=True):
        same = paid == paid[index]
        linked = same[:-1] & same[1:] & (np.diff(row) <= 1)
        linked[::2] = same[:-1][::2] & same[1:][::2]  # both ends of one cell
        breaks = np.flatnonzero(~linked)
        nth = int(np.searchsorted(breaks, index, "left"))
        lows.append(int(row[breaks[nth - 1] + 1]) if nth else int(row[0]))
        highs.append(int(row[breaks[nth]]) if nth < breaks.size else int(row[-1]))
    return cuts.nearest(lows, highs)
