"""Relief: room for a take across the bands of a stage, by the least rearrangement.

Owns the joint plan in place (`plan_in_place`) and the rearrangement when none exists (`Relief.make_room`). Must never
move a fixed unit, copy over bytes that another band still holds, or choose by anything but layout and logical progress.

A rearrangement: search the cheapest layout (`layout`) with every unit that a transfer touches or awaits where it is; if
there is none, search with all but fixed units free to go; settle what pends; then bring band after band into its new
piece of the arena, in an order in which nobody's bytes are needed before their holder has left, waiting on the host for
our own engine only where a unit that it reads moves. Every unit outside its band's piece moves once, into a hole inside
it, so no scratch memory is needed. The order exists: if a band's new piece reaches into the bytes of a band to its
right, that one's new piece, further right, cannot reach into the first one's.

| level | what moves | |
| - | - | - |
| NO_MOVE | nothing | spans only give back holes at their boundaries |
| FLUSH_ENDS | units of the two ends | |
| RELAYOUT | units of a float | |

Among layouts the one that moves the fewest bytes wins, and among those the lower level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from allocator.checks import Checks
from allocator.effects import Effect, WaitForward
from allocator.geometry import StageGeometry
from allocator.physical.band import Band, Growth
from allocator.physical.clearance import Consumer, Hazard
from allocator.physical.forward_steps import ForwardSteps
from allocator.physical.layout import BandLayout, Layout, Level, search
from allocator.physical.ledger import StageLedger
from allocator.physical.units import Units

_NONE = np.empty(0, dtype=np.int32)


@dataclass
class ReliefCounts:
    """What relief did so far; for metrics and benchmarks, never to decide."""

    reliefs: int = 0
    moves: int = 0
    moved_bytes: int = 0
    least_bytes: int = 0  # the sum of proven lower bounds
    flush_moves: int = 0
    by_level: dict[Level, int] = field(default_factory=lambda: dict.fromkeys(Level, 0))


def plan_in_place(bands: Sequence[Band], wanted: Sequence[int], start_byte: int, end_byte: int) -> list[Growth] | None:
    """How each band (in chain order) covers what it wants without a move; None when it takes a rearrangement."""
    growths: list[Growth] = []
    edge = start_byte  # end of the bytes that the bands before have, their growth included
    for number, (band, k) in enumerate(zip(bands, wanted, strict=True)):
        span = band.byte_span()
        if not k:
            growths.append(Growth())
            edge = span[1] if span is not None else edge
            continue
        growth = Growth()
        if k > band.units.holes.count:
            room = band.room()
            short = max(0, k - room.holes - room.pending)
            after = next((s[0] for s in (b.byte_span() for b in bands[number + 1 :]) if s is not None), end_byte)
            growth = _grow(band, short, edge, after) if short else growth
            if growth.below + growth.above + room.late < short:
                return None
        growths.append(growth)
        edge = _end_after(band, span, growth, edge)
    return growths


def _grow(band: Band, short: int, edge: int, after: int) -> Growth:
    """As much of `short` as the band can grow between the bytes `edge` and `after`."""
    units, size = band.units, band.unit_bytes
    first, end = -(-edge // size), after // size  # whole units between the neighbours
    if not band.floats:
        at = units.anchor + units.direction * units.frontier  # the next unit outward
        room = (end - at) if units.direction > 0 else at - first + 1
        return Growth(above=max(0, min(short, room, units.capacity - units.frontier)))
    low, high = max(0, first - units.anchor), min(units.capacity, end - units.anchor)
    if units.begin == units.frontier:
        k = max(0, min(short, high - low))
        return Growth(above=k, at=low + (max(0, high - low) - k) // 2)
    room_below, room_above = max(0, units.begin - low), max(0, high - units.frontier)
    if room_below > room_above:
        below = min(short, room_below)
        return Growth(below, min(short - below, room_above))
    above = min(short, room_above)
    return Growth(min(short - above, room_below), above)


def _end_after(band: Band, span: tuple[int, int] | None, growth: Growth, edge: int) -> int:
    """The end byte of a rising band's span once it has grown."""
    units = band.units
    if units.direction < 0:
        return edge  # the last of the chain
    if span is None and not growth.above:
        return edge
    frontier = (growth.at if span is None and band.floats else units.frontier) + growth.above
    return (units.anchor + frontier) * band.unit_bytes


class Relief:
    """The rearrangement of one stage's bands (the stored ones, in chain order)."""

    def __init__(
        self, stage: StageGeometry, bands: Sequence[Band], ledger: StageLedger, steps: ForwardSteps, checks: Checks
    ) -> None:
        self._start, self._end = stage.chain_start_bytes, stage.arena_bytes
        self._bands = bands
        self._ledger = ledger
        self._steps = steps
        self._checks = checks
        self.counts = ReliefCounts()

    def make_room(self, wanted: Sequence[int]) -> list[Effect]:
        """Effects after which each band has `wanted` holes; raises InvariantBroken when no layout serves them."""
        # The search first: a take that no layout serves has settled nothing and waited for nobody.
        layout = self._search(wanted, keep_transfers=True)
        if layout is None and any(use.parts and use.hazard in (Hazard.NETWORK, None) for use in self._ledger):
            layout = self._search(wanted, keep_transfers=False)
        if layout is None:
            self._refuse(wanted)
            raise AssertionError("a refusal raises")
        effects: list[Effect] = []
        self._wait_forward(max(band.settle_all() for band in self._bands), effects)
        if layout.cost_bytes:
            self._wait_forward(self._steps.newest_in_flight, effects)
        moved = self._realize(layout, wanted, effects)
        assert moved == layout.cost_bytes, f"{moved} bytes moved, {layout.cost_bytes} planned"
        self.counts.reliefs += 1
        self.counts.moved_bytes += moved
        self.counts.least_bytes += layout.bound_bytes
        self.counts.by_level[layout.level] += 1
        return effects

    # --- the search ----------------------------------------------------------------------------------------------

    def _search(self, wanted: Sequence[int], keep_transfers: bool) -> Layout | None:
        layouts: list[BandLayout] = []
        for band, k in zip(self._bands, wanted, strict=True):
            units = band.units
            need = units.live + k
            first, end = unit_range(units, 0, units.capacity)
            begin, stop = unit_range(units, units.begin, units.frontier)
            pinned = self.pinned(band, keep_transfers)
            layouts.append(BandLayout(band.unit_bytes, first, end, begin, stop, need, pinned, units.live_below))
        return search(layouts, self._start, self._end)

    def pinned(self, band: Band, keep_transfers: bool) -> tuple[int, int] | None:
        """Lowest and end unit index of what stays: published units, and for the first search all on transfers."""
        if band.ledger.is_clear():
            return None
        hazards = (Hazard.FIXED, Hazard.NETWORK, None) if keep_transfers else (Hazard.FIXED,)
        low, high = band.units.capacity, -1
        for use in self._ledger:
            column = use.column(band.index) if use.hazard in hazards else None
            if column is not None:
                positions = np.sort(band.units.positions(column)) if use.hazard is None else column
                low, high = min(low, int(positions[0])), max(high, int(positions[-1]))
        return unit_range(band.units, low, high + 1) if high >= 0 else None

    def _refuse(self, wanted: Sequence[int]) -> None:
        counts = "; ".join(
            f"{band.geometry.name}: {k} wanted beside live, hole, pending, vacated, fenced, beyond = {band.counts()}"
            for band, k in zip(self._bands, wanted, strict=True)
        )
        self._checks.broken("chain.realizable", f"no layout serves this take: {counts}")

    # --- the rearrangement ---------------------------------------------------------------------------------------

    def _realize(self, layout: Layout, wanted: Sequence[int], effects: list[Effect]) -> int:
        """Brings band after band into its piece; the bytes moved."""
        targets = [
            self._target_span(band, pieces, band.units.live + k)
            for band, pieces, k in zip(self._bands, layout.ranges, wanted, strict=True)
        ]
        moved = 0
        left = list(range(len(self._bands)))
        while left:
            number = next(n for n in left if self._is_open(n, targets[n], left))
            band = self._bands[number]
            units = band.relocate(*targets[number], wanted[number], effects)
            self.counts.moves += units
            moved += units * band.unit_bytes
            left.remove(number)
        return moved

    def _is_open(self, number: int, target: tuple[int, int], left: Sequence[int]) -> bool:
        """Whether no band that has not moved yet holds bytes of this band's new span."""
        if target[0] == target[1]:
            return True
        low, high = self._bands[number].bytes_of(*target)
        spans = (self._bands[other].byte_span() for other in left if other != number)
        return all(span is None or span[1] <= low or high <= span[0] for span in spans)

    def _target_span(self, band: Band, piece: tuple[int, int], need: int) -> tuple[int, int]:
        """The band's new span inside its piece, in positions: what it has there, grown to hold what it needs."""
        units = band.units
        if not need:
            return 0, 0
        low, high = position_range(units, *piece)
        assert high - low >= need, "the search gave each band the room it needs"
        if not band.floats:
            assert low == 0, "an end's piece begins at its own side"
            return 0, max(min(units.frontier, high), need)
        begin, frontier = max(units.begin, low), min(units.frontier, high)
        if begin >= frontier:
            begin = low + (high - low - need) // 2
            return begin, begin + need
        short = max(0, need - (frontier - begin))
        first_below = begin - low > high - frontier
        below = min(short, begin - low) if first_below else max(0, short - (high - frontier))
        return begin - below, frontier + short - below

    def _wait_forward(self, seq: int, effects: list[Effect]) -> None:
        """Everything that follows on the schedule stream runs behind forward `seq` (0: none)."""
        if seq and self._bands[0].ledger.stream_wait(Consumer.SCHEDULE_COPY, seq):
            effects.append(WaitForward(seq))


def unit_range(units: Units, low: int, high: int) -> tuple[int, int]:
    """Positions [low, high) as unit indexes [first, end) of the arena."""
    first, last = units.anchor + units.direction * low, units.anchor + units.direction * high
    return (first, last) if units.direction > 0 else (last + 1, first + 1)


def position_range(units: Units, first: int, end: int) -> tuple[int, int]:
    """Unit indexes [first, end) as positions [low, high)."""
    if units.direction > 0:
        return first - units.anchor, end - units.anchor
    return units.anchor - end + 1, units.anchor - first + 1
