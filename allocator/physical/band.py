"""One band of a stage, an end or a float: which positions a take gets, what a free leaves, what a flush moves.

Owns the order of taking inside a band and the band's part of every operation. Must never choose by an event, a clock or
another rank's state, and never look at another band: room to grow is given to it. Units are counted by *position*. An
end's position 0 lies at its own side of the arena and its span begins there; a float's positions rise with the arena's
bytes and its span begins anywhere.

Order of taking: holes; pending batches (whole, oldest first; for a band whose consumer need not wait, just the units
wanted); growth; vacated units; units behind a host copy. Only then relief, which is not this module's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from allocator.checks import Checks, some
from allocator.columns import Int32s, pack_i32
from allocator.effects import Bind, Copy, Effect, WaitForward, Zero
from allocator.geometry import BandGeometry
from allocator.physical.clearance import CLEARANCE, Clear, Consumer, Hazard
from allocator.physical.compaction import plan_advance, plan_moves, plan_retreat
from allocator.physical.forward_steps import ForwardSteps, PendingBatches
from allocator.physical.ledger import COPIES, BandLedger, StageLedger, Use
from allocator.physical.units import FENCED, HOLE, LIVE, PENDING, VACATED, Units


class Growth(NamedTuple):
    """Units by which a span grows: below its begin and past its frontier (an empty float: from position `at`)."""

    below: int = 0
    above: int = 0
    at: int = 0


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
        stage_wait: Callable[[list[int]], list[Effect]],
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
        self.stage_wait = stage_wait  # ends uses, of all bands, by waiting for them
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

    def in_place(self) -> int:
        """Units that a take has before it grows: holes, and pending ones that only a forward may still touch."""
        return self.units.holes.count + self._pending_clear()

    def in_place_late(self) -> int:
        """Units that it has besides, after growth: vacated ones, and those that uses may still touch."""
        return self.ledger.vacated.units + self.units.fenced + self.pending.units - self._pending_clear()

    def freed_on_network(self) -> Int32s:
        """Positions, ascending, that are free but for our transfer engine, which may still read them.

        They are among `in_place_late`, and no take in place may have them.
        """
        columns = [use.column(self.index) for use in self._stage if use.hazard is Hazard.NETWORK]
        freed = [c[np.isin(self.units.state[c], (PENDING, VACATED, FENCED))] for c in columns if c is not None]
        return np.unique(np.concatenate(freed)) if freed else np.empty(0, dtype=np.int32)

    def is_empty(self) -> bool:
        """Whether neighbours see through the band."""
        return self.units.begin == self.units.frontier

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
        stays = self.ledger.fixed(self.units.positions(ids)) if self.ledger.uses else None
        if stays is not None and stays.any():
            self._broken("band.free_of_fixed_unit", f"ids {some(ids[stays])} are published: a peer may touch them")
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
        fixed = self.ledger.fixed(positions)
        if fixed is not None and fixed.any():
            self._broken(
                "band.write_of_fixed_unit", f"forward {seq} writes ids {some(ids[fixed])}, which are published"
            )
        self.ledger.record_writes(seq, positions)
        touched = self.ledger.touched(positions)
        if touched is None or not touched.any():
            return []
        return self._stage.uses_of(self.index, positions[touched], (*COPIES, Hazard.NETWORK))

    def record_unknown(self, seq: int) -> list[int]:
        """Forward `seq` may write any live unit (speculation); the uses that it must wait for first."""
        self.ledger.record_unknown(seq)
        if self.ledger.is_clear():
            return []
        live = self.units.find(LIVE, self.units.begin, self.units.frontier)
        return self._stage.uses_of(self.index, live, (*COPIES, Hazard.NETWORK))

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

    def give_up(self, low: int, high: int) -> None:
        """Free positions of [low, high), at an end of the span, leave it; live ones follow once they have moved."""
        if self.units.fenced:
            self._fence(self.units.find(FENCED, low, high))
        self.units.drop(low, high)

    def take_in(self, begin: int, frontier: int) -> list[Effect]:
        """The span is [begin, frontier): positions it did not have are holes; waits for uses that touch their bytes."""
        units = self.units
        fresh = [
            np.arange(low, high, dtype=np.int32)
            for low, high in ((begin, min(units.begin, frontier)), (max(units.frontier, begin), frontier))
            if low < high
        ]
        effects = self.clear_bytes(fresh)
        for positions in fresh:
            units.become(HOLE, positions)
        units.begin, units.frontier = (begin, frontier) if begin < frontier else (0, 0)
        return effects

    def holes_for(self, k: int) -> list[Effect]:
        """Waits for host copies until the span has k holes."""
        effects: list[Effect] = []
        while self.units.holes.count < k:
            self._settle_late(k - self.units.holes.count, effects)
        return effects

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
            left -= self._take_pending(min(left, self._pending_clear()), chosen, effects)
        if left and growth.below + growth.above:
            # Waits of the bands before this one may have made holes of units that the plan did not count.
            above = min(growth.above, left)
            growth = Growth(min(growth.below, left - above), above, growth.at)
            chosen += self._grow(growth, effects)
            left -= growth.below + growth.above
        while left:
            self._settle_late(left, effects)
            left -= self._take_holes(left, chosen)
        return chosen[0] if len(chosen) == 1 else np.concatenate(chosen)

    def _take_holes(self, k: int, chosen: list[Int32s]) -> int:
        inside = min(k, self.units.holes.count)
        if inside:
            chosen.append(self.units.holes.take_lowest(inside))
        return inside

    def _pending_clear(self) -> int:
        """Pending units that no use touches: their forward is all that a taker waits for."""
        if not self.pending.units or self.ledger.is_clear():
            return self.pending.units
        touched = self.ledger.touched(self.pending.positions())
        return self.pending.units if touched is None else int(np.count_nonzero(~touched))

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
        effects += self.clear_bytes(grown)
        return grown

    def _settle_late(self, k: int, effects: list[Effect]) -> None:
        """More holes: from units that pend or are vacated, else behind the first host copy that touches a free unit."""
        for batches in (self.pending, self.ledger.vacated):
            if batches.units:
                self._settle(batches, min(k, batches.units), effects)
                return
        for use in list(self._stage):
            column = use.column(self.index) if use.hazard in COPIES else None
            if column is not None and (self.units.state[column] == FENCED).any():
                effects += self.stage_wait([use.number])
                return
        self._broken("chain.realizable", f"{k} units short in place")

    def _move_behind(self, sources: Int32s, targets: Int32s) -> list[Effect]:
        """Moves live units into holes; the sources are vacated while a forward in flight may read them."""
        if self.pending.units:
            self._broken("band.geometry_ready", "it moves while units pend")
        left = np.sort(sources)
        effects = self.move(sources, targets)
        behind = self._steps.newest_in_flight
        if behind > self._steps.retired_through:
            self.units.become(VACATED, left)
            self.ledger.vacated.add(behind, left)
        else:
            self.become_free(left)
        return effects

    def move(self, sources: Int32s, targets: Int32s) -> list[Effect]:
        """Copies live units into holes, pair by pair; the caller gives the sources a state."""
        self.units.holes.remove(np.sort(targets))
        source_units = pack_i32(self.units.units(sources))
        self.ledger.move_writes(sources, targets)
        ids = self.units.move(sources, targets)
        column = pack_i32(self.units.units(targets))
        return [Copy(self.index, source_units, column), Bind(self.index, pack_i32(ids), column)]

    def clear_bytes(self, grown: list[Int32s]) -> list[Effect]:
        """Waits for uses that may still touch bytes that the span takes in."""
        if not self._stage.strays:
            return []
        numbers: set[int] = set()
        for positions in grown:
            low, high = self.bytes_of(int(positions[0]), int(positions[-1]) + 1)
            numbers.update(self._stage.uses_of_bytes(low, high))
        return self.stage_wait(sorted(numbers))

    def _retreat(self) -> None:
        """Gives the holes at the boundaries back to beyond."""
        units = self.units
        frontier = plan_retreat(units.state, units.frontier, units.begin)
        begin = units.begin
        if self.floats and frontier > begin:
            begin = plan_advance(units.state, begin, frontier)
        self.give_up(units.begin, begin)
        self.give_up(frontier, units.frontier)
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
        if ids[0] < 1 or ids[-1] >= self.units.unit_of.size:
            self._broken(name, f"ids {some(ids)} lie outside 1..{self.units.unit_of.size - 1}")

    def _broken(self, name: str, detail: str) -> None:
        self._checks.broken(name, f"band {self.geometry.name}: {detail}")
