"""One band of a stage, an end or a float: which positions a take gets, what a free leaves, what a flush moves.

Owns the order of taking inside a band and the band's part of every operation. Must never choose by an event, a clock or
another rank's state, and never look at another band: room to grow is given to it. Units are counted by *position*. An
end's position 0 lies at its own side of the arena and its span begins there; a float's positions rise with the arena's
bytes and its span begins anywhere.

Order of taking: holes; pending batches (whole, oldest first; for a band whose consumer need not wait, just the units
wanted); growth; vacated units; units behind a host copy. Only then relief, which is not this module's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from allocator.checks import Checks, some
from allocator.columns import Int32s, pack_i32
from allocator.effects import Bind, Copy, Effect, WaitForward, Zero
from allocator.geometry import BandGeometry
from allocator.physical.clearance import CLEARANCE, Clear, Consumer, Hazard, to_move_from, to_write
from allocator.physical.compaction import plan_advance, plan_moves, plan_retreat
from allocator.physical.forward_steps import ForwardSteps, PendingBatches
from allocator.physical.ledger import COPIES, BandLedger, StageLedger, Use
from allocator.physical.units import FENCED, HOLE, LIVE, PENDING, VACATED, Units

WaitForUses = Callable[[Sequence[int], Consumer], list[Effect]]
"""Ends uses, of all bands of the stage, by what a consumer must do about them; the effects that do it."""


class Growth(NamedTuple):
    """Units by which a span grows: below its begin and past its frontier (an empty float: from position `at`)."""

    below: int = 0
    above: int = 0
    at: int = 0


class Room(NamedTuple):
    """Free units inside a span: holes; units that pend behind a forward; and `late` ones, which come after growth:
    vacated, or touched by a host copy."""

    holes: int
    pending: int
    late: int


class Band:
    """Units [first_unit, end_unit) of a band that a stage stores; unit u lies at byte u * unit_bytes of the arena."""

    def __init__(
        self,
        index: int,
        geometry: BandGeometry,
        units: Units,
        floats: bool,
        steps: ForwardSteps,
        stage: StageLedger,
        stage_wait: WaitForUses,
        checks: Checks,
    ) -> None:
        self.index = index
        self.geometry = geometry
        self.unit_bytes = geometry.unit_bytes
        self.floats = floats
        self.units = units
        self.consumer = Consumer.FORWARD if geometry.kind == "state" else Consumer.ZERO
        self._steps = steps
        self._stage = stage
        self._stage_wait = stage_wait  # ends uses, of all bands, by waiting for them
        self._checks = checks
        self.pending = PendingBatches()
        self.ledger = BandLedger(units.capacity, steps)

    # --- reading -------------------------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Live, hole, pending, vacated, fenced and beyond units; they add up to the capacity."""
        units = self.units
        beyond = units.capacity - (units.frontier - units.begin)
        return units.live, units.holes.count, self.pending.units, self.ledger.vacated.units, units.fenced, beyond

    def byte_span(self) -> tuple[int, int] | None:
        """First and end byte of the span; None for an empty one."""
        units = self.units
        if units.begin == units.frontier:
            return None
        ends = (units.anchor + units.direction * units.begin, units.anchor + units.direction * (units.frontier - 1))
        return min(ends) * self.unit_bytes, (max(ends) + 1) * self.unit_bytes

    def room(self) -> Room:
        """What a take can have without growing, by what it waits for."""
        units, pending = self.units, self.pending.units
        clear = pending
        if pending and not self.ledger.is_clear():
            touched = self.ledger.touched(self.pending.positions())
            clear = pending if touched is None else int(np.count_nonzero(~touched))
        return Room(units.holes.count, clear, pending - clear + self.ledger.vacated.units + units.fenced)

    # --- take and free -------------------------------------------------------------------------------------------

    def check_take(self, ids: Int32s) -> None:
        """Ids (strictly ascending) are inside the id space and unbound; nothing changes."""
        self._check_range(ids, "band.take_of_unbound_id")
        bound = self.units.bound(ids)
        if np.count_nonzero(bound):
            self._broken("band.take_of_unbound_id", f"ids {some(ids[bound])} are bound already")

    def take(self, ids: Int32s, growth: Growth) -> list[Effect]:
        """Binds checked ids to units; the room for `growth` is this band's to have."""
        effects: list[Effect] = []
        positions = self._acquire(ids.size, growth, effects)
        assert positions.size == ids.size
        column = self.units.bind(positions, ids).tobytes()
        if self.consumer is Consumer.ZERO:
            effects.append(Zero(self.index, column))
        effects.append(Bind(self.index, ids.tobytes(), column))
        return effects

    def check_bound(self, ids: Int32s, what: str) -> None:
        """Every id is inside the id space and bound; nothing changes."""
        self._check_range(ids, "band.free_of_bound_unit")
        bound = self.units.bound(ids)
        if np.count_nonzero(bound) < ids.size:
            self._broken("band.free_of_bound_unit", f"{what} ids {some(ids[~bound])}, which are not bound")

    def free(self, ids: Int32s) -> list[Effect]:
        """Unbinds checked ids at once; their units pend behind the newest forward in flight, if there is one."""
        stays = self.ledger.on_transfer(self.units.positions(ids)) if self.ledger.uses else None
        if stays is not None and stays.any():
            self._broken("band.free_of_fixed_unit", f"ids {some(ids[stays])} are on a transfer that is not released")
        positions = self.units.unbind(ids)
        behind = self._steps.newest_in_flight
        if behind:
            self.units.become(PENDING, positions)
            self.pending.add(behind, positions)
        else:
            self.become_free(positions)
        return [Bind(self.index, ids.tobytes(), self.units.resting_column(ids.size))]

    def progress(self, through: int) -> None:
        """The schedule stream runs behind forwards up to this one: what pended behind them is free."""
        for batches in (self.pending, self.ledger.vacated):
            positions = batches.release_through(through)
            if positions is not None:
                self.become_free(positions)

    def become_free(self, positions: Int32s) -> None:
        """Positions (ascending) become holes, or fenced where a host copy or our engine may still touch them."""
        touched = self.ledger.touched(positions)
        if touched is not None and touched.any():
            self.units.become(FENCED, positions[touched])
            positions = positions[~touched]
        if positions.size:
            self.units.become(HOLE, positions)

    def settle_all(self) -> int:
        """All pending and vacated units are free; the newest forward to wait for (0: none)."""
        behind = 0
        for batches in (self.pending, self.ledger.vacated):
            if batches.units:
                seq, positions = batches.settle(batches.units)
                behind = max(behind, seq)
                self.become_free(positions)
        return behind

    # --- other ops -----------------------------------------------------------------------------------------------

    def rebind(self, sources: Int32s, targets: Int32s) -> list[Effect]:
        """Units of `sources` become units of `targets`; checked before."""
        positions = self.units.positions(sources)
        units = self.units.unit_of[sources]
        self.units.unit_of[sources] = self.units.resting
        self.units.unit_of[targets] = units
        self.units.holder[positions] = targets
        column = self.units.resting_column(sources.size) + pack_i32(units)
        return [Bind(self.index, sources.tobytes() + targets.tobytes(), column)]

    def flush(self, moves_max: int) -> list[Effect]:
        """Opportunistic compaction of an end; a float only gives back holes at its boundaries. Waits for nothing.

        While units pend only holes at the boundary are given back; a band that holds unpublished rows is left alone.
        """
        if self.ledger.held:
            return []
        effects: list[Effect] = []
        units = self.units
        if not self.floats and self.pending.units == 0 and moves_max > 0:
            sources, targets = plan_moves(
                units.state, units.frontier, units.holes, self.ledger.may_move_unwaited, moves_max
            )
            if sources.size:
                effects = self._move_behind(sources, targets)
        self._retreat()
        return effects

    def record_writes(self, seq: int, ids: Int32s) -> list[int]:
        """Forward `seq` writes the units of these bound ids; the uses that it must wait for first."""
        self.check_bound(ids, f"forward {seq} writes")
        positions = self.units.positions(ids)
        self.ledger.record_writes(seq, positions)
        touched = self.ledger.touched(positions)
        if touched is None or not touched.any():
            return []
        return self._stage.uses_of(self.index, positions[touched], to_write(Consumer.FORWARD))

    def record_unknown(self, seq: int) -> list[int]:
        """Forward `seq` may write any live unit (speculation); the uses that it must wait for first.

        Published units are the daemon's promise: no row of such a forward has one as its last page.
        """
        self.ledger.record_unknown(seq)
        if self.ledger.is_clear():
            return []
        live = self.units.find(LIVE, self.units.begin, self.units.frontier)
        hazards = tuple(hazard for hazard in to_write(Consumer.FORWARD) if hazard is not Hazard.FIXED)
        return self._stage.uses_of(self.index, live, hazards)

    # --- uses ----------------------------------------------------------------------------------------------------

    def use_over(self, use: Use) -> None:
        """A use of this band's units ended: counts fall, and free units that nothing touches any more are holes."""
        column = use.column(self.index)
        if column is None:
            return
        if use.hazard is None:
            self.ledger.remove(None, self.units.positions(column))
            return
        self.ledger.remove(use.hazard, column)
        free = column[self.units.state[column] == FENCED]
        touched = self.ledger.touched(free)
        self.units.unfence(free if touched is None else free[~touched])

    # --- the span ------------------------------------------------------------------------------------------------

    def relocate(self, begin: int, frontier: int, k: int, effects: list[Effect]) -> int:
        """The span becomes [begin, frontier), with k holes to spare; the number of units moved.

        Live units outside move into holes inside; `effects` gains the waits and moves. While this runs, and only then,
        live units lie outside the span. The bytes of the new span are this band's, or nobody's.
        """
        units = self.units
        old = [(units.begin, min(begin, units.frontier)), (max(frontier, units.begin), units.frontier)]
        outside = [(low, high) for low, high in old if low < high]
        for low, high in outside:
            self._give_up(low, high)
        found = [units.find(LIVE, low, high) for low, high in outside]
        sources = np.concatenate(found) if found else np.empty(0, dtype=np.int32)
        self._take_in(begin, frontier, effects)
        while units.holes.count < sources.size + k:
            self._settle_late(sources.size + k - units.holes.count, Consumer.SCHEDULE_COPY, effects)
        if sources.size:
            touching = self._stage.uses_of(self.index, sources, to_move_from())
            effects += self._stage_wait(touching, Consumer.SCHEDULE_COPY)
            effects += self._move(sources, units.holes.peek_lowest(sources.size))
            self.become_free(sources)
            for low, high in outside:
                self._give_up(low, high)
        return int(sources.size)

    def _give_up(self, low: int, high: int) -> None:
        """Free positions of [low, high), at an end of the span, leave it; live ones follow once they have moved."""
        if self.units.fenced:
            self._fence(self.units.find(FENCED, low, high))
        self.units.drop(low, high)

    def _take_in(self, begin: int, frontier: int, effects: list[Effect]) -> None:
        """The span is [begin, frontier): positions it did not have are holes, behind uses that touch their bytes."""
        units = self.units
        fresh = [
            np.arange(low, high, dtype=np.int32)
            for low, high in ((begin, min(units.begin, frontier)), (max(units.frontier, begin), frontier))
            if low < high
        ]
        effects += self._clear_bytes(fresh, Consumer.SCHEDULE_COPY)
        for positions in fresh:
            units.become(HOLE, positions)
        units.begin, units.frontier = (begin, frontier) if begin < frontier else (0, 0)

    def bytes_of(self, low: int, high: int) -> tuple[int, int]:
        """Bytes of positions [low, high)."""
        first, last = self.units.anchor + self.units.direction * low, self.units.anchor + self.units.direction * high
        if self.units.direction < 0:
            first, last = last + 1, first + 1
        return first * self.unit_bytes, last * self.unit_bytes

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recounts the band; raises InvariantBroken where anything differs."""
        self.units.check(self.pending.positions(), self.ledger.vacated.positions())
        if sum(self.counts()) != self.units.capacity:
            self._broken("chain.byte_conservation", f"{self.counts()} do not add up to {self.units.capacity}")

    # --- inside --------------------------------------------------------------------------------------------------

    def _acquire(self, k: int, growth: Growth, effects: list[Effect]) -> Int32s:
        """k positions in the order of taking; waits that their consumer needs join `effects`."""
        chosen: list[Int32s] = []
        left = k - self._take_holes(k, chosen)
        if left and self.pending.units:
            left -= self._take_pending(min(left, self.room().pending), chosen, effects)
        if left and growth.below + growth.above:
            # Waits of the bands before this one may have made holes of units that the plan did not count.
            above = min(growth.above, left)
            growth = Growth(min(growth.below, left - above), above, growth.at)
            chosen += self._grow(growth, effects)
            left -= growth.below + growth.above
        while left:
            self._settle_late(left, self.consumer, effects)
            left -= self._take_holes(left, chosen)
        return chosen[0] if len(chosen) == 1 else np.concatenate(chosen)

    def _take_holes(self, k: int, chosen: list[Int32s]) -> int:
        inside = min(k, self.units.holes.count)
        if inside:
            chosen.append(self.units.holes.take_lowest(inside))
        return inside

    def _take_pending(self, k: int, chosen: list[Int32s], effects: list[Effect]) -> int:
        """k pending units that no use touches; whole batches settle where the consumer must wait for their forward."""
        assert self.units.holes.count == 0, "holes come before what pends"
        if CLEARANCE[self.consumer][Hazard.FORWARD] is Clear.NONE and self.ledger.is_clear():
            # What that forward still writes there is on record since its launch: nothing moves these units before.
            chosen += self.pending.pick(k)
            return k
        newest = 0
        while self.units.holes.count < k:
            newest, positions = self.pending.settle(k - self.units.holes.count)
            self.become_free(positions)
        if newest and self.ledger.stream_wait(Consumer.ZERO, newest):
            effects.append(WaitForward(newest))
        return self._take_holes(k, chosen)

    def _settle(self, batches: PendingBatches, k: int, effects: list[Effect]) -> None:
        """Whole batches, oldest first, that hold k units are free behind a wait for the newest forward among them."""
        seq, positions = batches.settle(k)
        if self.ledger.stream_wait(Consumer.ZERO, seq):
            effects.append(WaitForward(seq))
        self.become_free(positions)

    def _grow(self, growth: Growth, effects: list[Effect]) -> list[Int32s]:
        """The span takes in positions on one side or both; bytes that a copy may still touch are waited for."""
        units = self.units
        if units.begin == units.frontier:
            units.begin = units.frontier = growth.at
        low, high = units.begin - growth.below, units.frontier + growth.above
        assert 0 <= low <= high <= units.capacity, "growth stays inside the band's own bytes"
        grown = [np.arange(a, b, dtype=np.int32) for a, b in ((low, units.begin), (units.frontier, high)) if a < b]
        units.begin, units.frontier = low, high
        effects += self._clear_bytes(grown, self.consumer)
        return grown

    def _settle_late(self, k: int, consumer: Consumer, effects: list[Effect]) -> None:
        """More holes: from units that pend or are vacated, else behind the first host copy that touches a free unit."""
        for batches in (self.pending, self.ledger.vacated):
            if batches.units:
                self._settle(batches, min(k, batches.units), effects)
                return
        for use in list(self._stage):
            column = use.column(self.index) if use.hazard in COPIES else None
            if column is not None and (self.units.state[column] == FENCED).any():
                effects += self._stage_wait([use.number], consumer)
                return
        self._broken("chain.realizable", f"{k} units short in place")

    def _move_behind(self, sources: Int32s, targets: Int32s) -> list[Effect]:
        """Moves live units into holes; the sources are vacated while a forward in flight may read them."""
        if self.pending.units:
            self._broken("band.geometry_ready", "it moves while units pend")
        left = np.sort(sources)
        effects = self._move(sources, targets)
        behind = self._steps.newest_in_flight
        if behind > self._steps.retired_through:
            self.units.become(VACATED, left)
            self.ledger.vacated.add(behind, left)
        else:
            self.become_free(left)
        return effects

    def _move(self, sources: Int32s, targets: Int32s) -> list[Effect]:
        """Copies live units into holes, pair by pair; the caller gives the sources a state."""
        self.units.holes.remove(np.sort(targets))
        source_units = pack_i32(self.units.units(sources))
        self.ledger.move_writes(sources, targets)
        ids = self.units.move(sources, targets)
        column = pack_i32(self.units.units(targets))
        return [Copy(self.index, source_units, column), Bind(self.index, pack_i32(ids), column)]

    def _clear_bytes(self, grown: list[Int32s], consumer: Consumer) -> list[Effect]:
        """Waits for uses that may still touch bytes that the span takes in."""
        if not self._stage.strays:
            return []
        numbers: set[int] = set()
        for positions in grown:
            low, high = self.bytes_of(int(positions[0]), int(positions[-1]) + 1)
            numbers.update(self._stage.uses_of_bytes(low, high))
        return self._stage_wait(sorted(numbers), consumer)

    def _retreat(self) -> None:
        """Gives the holes at the boundaries back to beyond."""
        units = self.units
        frontier = plan_retreat(units.state, units.frontier, units.begin)
        begin = units.begin
        if self.floats and frontier > begin:
            begin = plan_advance(units.state, begin, frontier)
        self._give_up(units.begin, begin)
        self._give_up(frontier, units.frontier)
        units.begin, units.frontier = (begin, frontier) if begin < frontier else (0, 0)

    def _fence(self, positions: Int32s) -> None:
        """Fenced positions leave the span: their bytes stay on record until the uses that touch them are over."""
        for use in self._stage:
            column = use.column(self.index) if use.hazard in COPIES else None
            if column is None:
                continue
            mine = positions[np.isin(positions, column)]
            for run in np.split(mine, np.flatnonzero(np.diff(mine) > 1) + 1):
                if run.size:
                    low, high = self.bytes_of(int(run[0]), int(run[-1]) + 1)
                    self._stage.fence(low, high, use.number)

    def _check_range(self, ids: Int32s, name: str) -> None:
        if ids.min() < 1 or ids.max() >= self.units.unit_of.size:
            self._broken(name, f"ids {some(ids)} lie outside 1..{self.units.unit_of.size - 1}")

    def _broken(self, name: str, detail: str) -> None:
        self._checks.broken(name, f"band {self.geometry.name}: {detail}")
