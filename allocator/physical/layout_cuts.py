"""Cuts between the bands of an arena: which places they can take, which they wish for, and what a place costs.

Owns the arithmetic of the layout search (layout.py says what is searched and why it is right). Must never choose.
Invariant: places are counted in multiples of the coarser neighbour's unit, as Python ints or int64; no layout of bytes
is lost by that, see there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Extent = tuple[int, int]
"""First unit and the end (exclusive)."""

_NEAR = np.concatenate((np.arange(48), 48 << np.arange(42))).astype(np.int64)
"""Where the first and the last live units are looked for, from both ends of a span: most often little is free there."""

_PROBES = 512
"""Places per question to a band after that."""


@dataclass(frozen=True, slots=True)
class BandLayout:
    """One stored band, in units of `unit_bytes`; unit u lies at bytes [u * unit_bytes, (u + 1) * unit_bytes).

    Units [first_unit, limit_unit) may be used; all live ones lie in [span_begin, span_end), and the spans of the bands
    with a need follow each other in chain order without overlap. `need_units` >= live units; 0: nothing is live or
    pinned, and the band is left out. `pinned`: units that stay where they are lie in it. `live_below(u)`: live units
    with an index below u, for an int64 array of indexes.
    """

    unit_bytes: int
    first_unit: int
    limit_unit: int
    span_begin: int
    span_end: int
    need_units: int
    pinned: Extent | None
    live_below: Callable[[Int64s], Int64s]

    @property
    def span(self) -> Extent | None:
        """The span, or None where it is empty."""
        return (self.span_begin, self.span_end) if self.span_begin < self.span_end else None


def join(one: Extent | None, other: Extent | None) -> Extent | None:
    """The smallest extent that covers both."""
    if one is None or other is None:
        return other if one is None else one
    return min(one[0], other[0]), max(one[1], other[1])


class Cuts:
    """Cut k lies between bands k and k + 1 of `bands` (all with a need), at a multiple of `steps[k]` bytes."""

    __slots__ = ("bands", "end_byte", "live", "start_byte", "steps", "wishes")

    def __init__(self, bands: Sequence[BandLayout], start_byte: int, end_byte: int) -> None:
        assert bands
        assert all(band.need_units > 0 for band in bands), "bands without a need are left out"
        self.bands = bands
        self.start_byte, self.end_byte = start_byte, end_byte
        self.steps = [max(a.unit_bytes, b.unit_bytes) for a, b in pairwise(bands)]
        self.wishes = self._wishes()
        self.live = [0] * len(bands)

    # --- what is possible ------------------------------------------------------------------------------------------

    def bounds(self, pinned: Sequence[Extent | None]) -> tuple[list[int], list[int]] | None:
        """The lowest and the highest place of every cut in any layout; None when there is no layout.

        The first walk is the closed form of capacity: every band as early as it can start.
        """
        lows: list[int] = []
        edge = self.start_byte
        for k, (band, pin) in enumerate(zip(self.bands, pinned, strict=True)):
            begin = max(band.first_unit, -(-edge // band.unit_bytes))
            end = begin + band.need_units
            if pin is not None:
                if begin > pin[0]:
                    return None
                end = max(end, pin[1])
            edge = end * band.unit_bytes
            if end > band.limit_unit or edge > self.end_byte:
                return None
            if k < len(self.steps):
                lows.append(-(-edge // self.steps[k]))
        highs = [0] * len(self.steps)
        edge = self.end_byte
        for k in range(len(self.steps), 0, -1):
            band, pin = self.bands[k], pinned[k]
            begin = min(band.limit_unit, edge // band.unit_bytes) - band.need_units
            edge = (begin if pin is None else min(begin, pin[0])) * band.unit_bytes
            highs[k - 1] = edge // self.steps[k - 1]
            assert lows[k - 1] <= highs[k - 1], "the walks from both sides agree"
        return lows, highs

    def least(self, k: int, at: int) -> int:
        """The lowest place of cut k when cut k - 1 lies at `at`."""
        band = self.bands[k]
        begin = max(band.first_unit, -(-at * self.steps[k - 1] // band.unit_bytes))
        return -(-(begin + band.need_units) * band.unit_bytes // self.steps[k])

    def least_all(self, k: int, at: Int64s) -> Int64s:
        """`least` of every place in `at`."""
        band = self.bands[k]
        begin = np.maximum(band.first_unit, -(-at * self.steps[k - 1] // band.unit_bytes))
        return -(-(begin + band.need_units) * band.unit_bytes // self.steps[k])

    def most(self, k: int, at: int) -> int:
        """The highest place of cut k - 1 when cut k lies at `at`."""
        band = self.bands[k]
        end = min(band.limit_unit, at * self.steps[k] // band.unit_bytes)
        return (end - band.need_units) * band.unit_bytes // self.steps[k - 1]

    # --- what is wished --------------------------------------------------------------------------------------------

    def _wishes(self) -> list[int]:
        """A place of least cost for every cut, as if it were the only one: the middle of its gap.

        Bands without a span share the gap they lie in; what is over goes in equal parts between the neighbours.
        """
        out: list[int] = []
        left, before = self.start_byte, -1
        for k in [k for k, band in enumerate(self.bands) if band.span] + [len(self.bands)]:
            sizes = [band.need_units * band.unit_bytes for band in self.bands[before + 1 : k]]
            beyond = k == len(self.bands)
            right = self.end_byte if beyond else self.bands[k].span_begin * self.bands[k].unit_bytes
            assert left <= right, "spans lie in chain order"
            out += _share(left, right, sizes, before >= 0, not beyond)
            if not beyond:
                left, before = self.bands[k].span_end * self.bands[k].unit_bytes, k
        # Rounded toward the neighbour whose unit is the step: that one's border of the gap is a candidate.
        rounded = zip(out, self.steps, self.bands, strict=False)
        return [byte // step if step == band.unit_bytes else -(-byte // step) for byte, step, band in rounded]

    def nearest(self, lows: Sequence[int], highs: Sequence[int]) -> list[int]:
        """The layout between these bounds, which some layout keeps, with its cuts near their wishes."""
        lows, highs = list(lows), list(highs)
        cuts = range(len(lows))
        for k in cuts[1:]:
            lows[k] = max(lows[k], self.least(k, lows[k - 1]))
        for k in reversed(cuts[1:]):
            highs[k - 1] = min(highs[k - 1], self.most(k, highs[k]))
        pushed_left = [min(max(w, low), high) for w, low, high in zip(self.wishes, lows, highs, strict=True)]
        for k in reversed(cuts[1:]):
            pushed_left[k - 1] = max(lows[k - 1], min(pushed_left[k - 1], self.most(k, pushed_left[k])))
        pushed_right = self._push_right(self.wishes, lows, highs)
        # Both are layouts; what lies half way is one up to rounding, which a last push repairs.
        half = [(a + b) // 2 for a, b in zip(pushed_left, pushed_right, strict=True)]
        at = self._push_right(half, lows, highs)
        assert all(low <= t <= high for low, t, high in zip(lows, at, highs, strict=True)), (lows, at, highs)
        return at

    def _push_right(self, wishes: Sequence[int], lows: Sequence[int], highs: Sequence[int]) -> list[int]:
        at: list[int] = []
        for k, wish in enumerate(wishes):
            least = max(lows[k], self.least(k, at[-1])) if at else lows[k]
            at.append(min(highs[k], max(wish, least)))
        return at

    def in_place(self, pinned: Sequence[Extent | None], extents: Sequence[Extent | None]) -> list[int] | None:
        """Cuts that leave every unit of `extents` where it is; None when there are none."""
        bounds = self.bounds([join(p, e) for p, e in zip(pinned, extents, strict=True)])
        return None if bounds is None else self.nearest(*bounds)

    # --- what it costs ---------------------------------------------------------------------------------------------

    def count(self) -> list[Extent | None]:
        """Counts live units, and finds the first one and the end of the last one of every band."""
        out: list[Extent | None] = []
        for k, band in enumerate(self.bands):
            self.live[k], extent = _live_extent(band)
            assert self.live[k] <= band.need_units, "a band needs its live units"
            out.append(extent)
        return out

    def costs(self, ats: Sequence[Int64s]) -> list[Int64s]:
        """Bytes to move for every place of every cut (each row ascending), with one question to every band at most."""
        split = [int(np.searchsorted(at, wish, "right")) for at, wish in zip(ats, self.wishes, strict=True)]
        out = [np.empty(at.size, dtype=np.int64) for at in ats]
        none = np.empty(0, dtype=np.int64)
        for k, band in enumerate(self.bands):
            # A cut right of its wish takes units from the beginning of the band after it, one left of it from the end
            # of the band before it.
            unit = band.unit_bytes
            begins = -(-ats[k - 1][split[k - 1] :] * self.steps[k - 1] // unit) if k else none
            ends = ats[k][: split[k]] * self.steps[k] // unit if k < len(ats) else none
            if begins.size + ends.size == 0:
                continue
            below = band.live_below(np.clip(np.concatenate((begins, ends)), band.first_unit, band.limit_unit))
            if begins.size:
                out[k - 1][split[k - 1] :] = below[: begins.size].astype(np.int64) * unit
            if ends.size:
                out[k][: split[k]] = (self.live[k] - below[begins.size :].astype(np.int64)) * unit
        return out


def _share(left: int, right: int, sizes: list[int], has_left: bool, has_right: bool) -> list[int]:
    """Bytes of the cuts in the gap [left, right) for bands of these sizes, and the neighbours on its sides, if any."""
    count = len(sizes) - 1 + has_left + has_right
    if count <= 0:
        return []
    spare = max(0, right - left - sum(sizes)) // count
    between = sizes if has_left else sizes[1:]
    edge = left if has_left else left + sizes[0]
    cuts: list[int] = []
    for nth in range(count):
        cuts.append(min(right, edge + spare // 2))
        edge += spare + (between[nth] if nth < len(between) else 0)
    return cuts


def _live_extent(band: BandLayout) -> tuple[int, Extent | None]:
    """Live units of a band, and where the first one begins and the last one ends (None without any)."""
    if band.span is None:
        return 0, None
    begin, end = band.span
    middle = (begin + end) // 2
    probes = np.concatenate((np.minimum(begin + _NEAR, middle), np.maximum(end - _NEAR[::-1], middle)))
    below = band.live_below(probes)
    live = int(below[-1])
    assert below[0] == 0, "live units lie in the span"
    if live == 0:
        return 0, None
    first, first_end = _around(probes, below, 1)
    last, last_end = _around(probes, below, live)
    while first_end - first > 1 or last_end - last > 1:
        probes = np.sort(np.concatenate((_spread(first, first_end), _spread(last, last_end))))
        below = band.live_below(probes)
        first, first_end = _around(probes, below, 1)
        last, last_end = _around(probes, below, live)
    assert begin <= first < last_end <= end
    return live, (first, last_end)


def _around(probes: Int64s, below: Int64s, count: int) -> Extent:
    """The two neighbouring probes between which the number of live units below reaches `count`."""
    index = int(np.searchsorted(below, count, "left"))
    return int(probes[index - 1]), int(probes[index])


def _spread(begin: int, end: int) -> Int64s:
    """Places from begin to end, both included."""
    steps = min(end - begin, _PROBES)
    return begin + (end - begin) * np.arange(steps + 1, dtype=np.int64) // steps
