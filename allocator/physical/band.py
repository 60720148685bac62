"""An end band: the units of one kind on one rank's arena, growing from one side.

Owns where each virtual id of the band lies and the state of every unit. Must never choose by an event, a clock or
another rank's state. Units are counted by *position*: 0 lies at the band's own side of the arena, higher positions
toward its neighbour; [0, frontier) is the band's span.

    position   0 ............................ frontier ............ capacity
               live | hole | pending | vacated        beyond

Invariants: every position is in exactly one state; `unit_of` and `holder` are inverse on live positions; nothing beyond
the frontier is anything but beyond. A band between two ends (a float) is another class, not built yet.
"""

from __future__ import annotations

import numpy as np

from allocator.checks import Checks, some
from allocator.columns import Int32s, pack_i32
from allocator.effects import Bind, Copy, Effect, WaitForward, Zero
from allocator.free_set import FreeSet
from allocator.geometry import BandGeometry
from allocator.physical.clearance import Consumer
from allocator.physical.compaction import (
    BEYOND,
    HOLE,
    LIVE,
    PENDING,
    STATE_NAMES,
    VACATED,
    plan_moves,
    plan_retreat,
)
from allocator.physical.forward_steps import ForwardSteps, PendingBatches
from allocator.physical.ledger import BandLedger


class EndBand:
    """Units [lowest_unit, highest_unit] of a band; unit u lies at byte u * unit_bytes of the arena."""

    def __init__(
        self,
        index: int,
        geometry: BandGeometry,
        lowest_unit: int,
        highest_unit: int,
        virtual_ids: int,
        steps: ForwardSteps,
        checks: Checks,
        grows_up: bool = False,
    ) -> None:
        self.index = index
        self.geometry = geometry
        assert lowest_unit >= 1, "unit 0 is the sink"
        self.capacity = max(0, highest_unit - lowest_unit + 1)
        self._anchor, self._direction = (lowest_unit, 1) if grows_up else (highest_unit, -1)
        self._consumer = Consumer.FORWARD if geometry.kind == "state" else Consumer.ZERO
        self._steps = steps
        self._checks = checks
        self._state = np.full(self.capacity, BEYOND, dtype=np.uint8)
        self._holder = np.zeros(self.capacity, dtype=np.int32)  # virtual id of each live position
        self._unit_of = np.zeros(virtual_ids + 1, dtype=np.int32)  # physical unit of each virtual id, 0: the sink
        self._holes = FreeSet(self.capacity, filled=False)
        self._pending = PendingBatches()
        self.ledger = BandLedger(self.capacity, steps)
        self.frontier = 0
        self.live = 0

    # --- reading -------------------------------------------------------------------------------------------------

    def physical(self, virtual_ids: Int32s) -> Int32s:
        """Physical units of virtual ids (int32); 0, the sink, where none is bound."""
        return self._unit_of[virtual_ids]

    def counts(self) -> tuple[int, int, int, int, int]:
        """Live, hole, pending, vacated and beyond units; they add up to `capacity`."""
        beyond = self.capacity - self.frontier
        return self.live, self._holes.count, self._pending.units, self.ledger.vacated.units, beyond

    def available(self) -> int:
        """Units a take can have, by waiting where it must."""
        return self.capacity - self.live

    # --- changes -------------------------------------------------------------------------------------------------

    def check_take(self, ids: Int32s) -> None:
        """Ids (strictly ascending) are inside the id space and unbound, and there is room; nothing changes."""
        self._check_range(ids, "band.take_of_unbound_id")
        bound = self._unit_of[ids] != 0
        if bound.any():
            detail = f"band {self.geometry.name}: ids {some(ids[bound])} are bound already"
            self._checks.broken("band.take_of_unbound_id", detail)
        if ids.size > self.available():
            counts = ", ".join(
                f"{n} {what}"
                for n, what in zip(self.counts(), ("live", "hole", "pending", "vacated", "beyond"), strict=True)
            )
            self._checks.broken("chain.realizable", f"band {self.geometry.name}: {ids.size} units wanted, {counts}")

    def take(self, ids: Int32s) -> list[Effect]:
        """Binds checked ids to units: holes, then pending batches, then growth, then vacated units."""
        assert ids.size <= self.available(), "check_take comes first"
        positions, behind = self._acquire(ids.size)
        assert positions.size == ids.size
        units = self._anchor + self._direction * positions
        self._state[positions] = LIVE
        self._holder[positions] = ids
        self._unit_of[ids] = units
        self.live += ids.size
        effects: list[Effect] = []
        if behind and self.ledger.stream_wait(self._consumer, behind):
            effects.append(WaitForward(behind))
        column = pack_i32(units)
        if self._consumer is Consumer.ZERO:
            effects.append(Zero(self.index, column))
        effects.append(Bind(self.index, ids.tobytes(), column))
        return effects

    def check_free(self, ids: Int32s) -> None:
        """Every id (strictly ascending) is bound; nothing changes."""
        self._check_range(ids, "band.free_of_bound_unit")
        loose = self._unit_of[ids] == 0
        if loose.any():
            detail = f"band {self.geometry.name}: ids {some(ids[loose])} are not bound: a repeated free"
            self._checks.broken("band.free_of_bound_unit", detail)

    def free(self, ids: Int32s) -> list[Effect]:
        """Unbinds checked ids at once; their units pend behind the newest forward in flight, if there is one."""
        positions = np.sort(self._positions(ids))
        self._unit_of[ids] = 0
        self.live -= ids.size
        assert self.live >= 0
        behind = self._steps.newest_in_flight
        if behind:
            self._state[positions] = PENDING
            self._pending.add(behind, positions)
        else:
            self._become_holes(positions)
        return [Bind(self.index, ids.tobytes(), bytes(ids.nbytes))]

    def progress(self, processed_through: int) -> None:
        """Forwards up to this one are processed: what pended behind them is a hole."""
        for batches in (self._pending, self.ledger.vacated):
            positions = batches.release_through(processed_through)
            if positions is not None:
                self._become_holes(positions)

    def record_writes(self, seq: int, ids: Int32s) -> None:
        """Forward `seq` writes the units of these bound ids."""
        loose = self._unit_of[ids] == 0
        if loose.any():
            detail = f"band {self.geometry.name}: forward {seq} writes ids {some(ids[loose])}, which are not bound"
            self._checks.broken("band.free_of_bound_unit", detail)
        self.ledger.record_writes(seq, self._positions(ids))

    def flush(self, moves_max: int) -> list[Effect]:
        """Opportunistic compaction: moves the highest units into the lowest holes, and retreats the frontier.

        Waits for nothing. While units pend, only holes at the boundary are given back.
        """
        effects: list[Effect] = []
        if self._pending.units == 0 and moves_max > 0:
            sources, targets = plan_moves(
                self._state, self.frontier, self._holes, self.ledger.may_move_unwaited, moves_max
            )
            if sources.size:
                effects = self._move(sources, targets)
        self._retreat()
        return effects

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recounts every unit and both directions of the id table; raises InvariantBroken where they differ."""
        counted = tuple(int((self._state == code).sum()) for code in (LIVE, HOLE, PENDING, VACATED, BEYOND))
        if counted != self.counts() or sum(counted) != self.capacity:
            self._conserve(f"counted {counted}, kept {self.counts()} of {self.capacity}")
        if (self._state[self.frontier :] != BEYOND).any() or (self._state[: self.frontier] == BEYOND).any():
            self._conserve(f"the span does not end at the frontier {self.frontier}")
        ids = self._unit_of.nonzero()[0].astype(np.int32)
        positions = self._positions(ids)
        if ids.size != self.live or (self._state[positions] != LIVE).any() or (self._holder[positions] != ids).any():
            self._conserve("bound ids and live units differ")
        columns = (self._holes.members(), self._pending.positions(), self.ledger.vacated.positions())
        for code, column in zip((HOLE, PENDING, VACATED), columns, strict=True):
            if not np.array_equal((self._state == code).nonzero()[0], column):
                self._conserve(f"{STATE_NAMES[code]} units and their record differ")
        if not self._holes.check():
            self._conserve("the set of holes is damaged")

    # --- inside --------------------------------------------------------------------------------------------------

    def _acquire(self, k: int) -> tuple[Int32s, int]:
        """k positions in the order of taking, and the newest forward they may still be touched by (0: none)."""
        chosen: list[Int32s] = []
        behind = 0
        inside = min(k, self._holes.count)
        if inside:
            chosen.append(self._holes.take_lowest(inside))
            k -= inside
        settled = min(k, self._pending.units)
        if settled:
            behind = max(behind, self._settle(self._pending, settled, chosen))
            k -= settled
        grown = min(k, self.capacity - self.frontier)
        if grown:
            chosen.append(np.arange(self.frontier, self.frontier + grown, dtype=np.int32))
            self.frontier += grown
            k -= grown
        if k:
            assert self.frontier == self.capacity, "growth comes before vacated units"
            behind = max(behind, self._settle(self.ledger.vacated, k, chosen))
        return (chosen[0] if len(chosen) == 1 else np.concatenate(chosen)), behind

    def _settle(self, batches: PendingBatches, k: int, chosen: list[Int32s]) -> int:
        """Whole batches become holes, of which the k lowest are chosen; returns the forward to wait for."""
        assert self._holes.count == 0, "holes come before what pends"
        seq, positions = batches.settle(k)
        self._become_holes(positions)
        chosen.append(self._holes.take_lowest(k))
        return seq

    def _move(self, sources: Int32s, targets: Int32s) -> list[Effect]:
        """Moves live units into holes; the sources are vacated while a forward in flight may read them."""
        if self._pending.units:
            self._checks.broken("band.geometry_ready", f"band {self.geometry.name} moves while units pend")
        self._holes.remove(targets)
        ids = self._holder[sources]
        assert sources.size == targets.size
        assert (sources > targets).all(), "a move goes toward the band's own side"
        source_units = pack_i32(self._anchor + self._direction * sources)
        target_units = self._anchor + self._direction * targets
        self._state[targets] = LIVE
        self._holder[targets] = ids
        self._unit_of[ids] = target_units
        left = np.sort(sources)
        behind = self._steps.newest_in_flight
        if behind:
            self._state[left] = VACATED
            self.ledger.vacated.add(behind, left)
        else:
            self._become_holes(left)
        column = pack_i32(target_units)
        return [Copy(self.index, source_units, column), Bind(self.index, pack_i32(ids), column)]

    def _retreat(self) -> None:
        """Gives the holes at the boundary back to beyond."""
        frontier = plan_retreat(self._state, self.frontier)
        assert 0 <= frontier <= self.frontier
        if frontier < self.frontier:
            self._holes.remove(np.arange(frontier, self.frontier, dtype=np.int32))
            self._state[frontier : self.frontier] = BEYOND
            self.frontier = frontier

    def _become_holes(self, positions: Int32s) -> None:
        self._state[positions] = HOLE
        self._holes.add(positions)

    def _positions(self, ids: Int32s) -> Int32s:
        return (self._unit_of[ids] - self._anchor) * self._direction

    def _check_range(self, ids: Int32s, name: str) -> None:
        if ids[0] < 1 or ids[-1] >= self._unit_of.size:
            detail = f"band {self.geometry.name}: ids {some(ids)} lie outside 1..{self._unit_of.size - 1}"
            self._checks.broken(name, detail)

    def _conserve(self, detail: str) -> None:
        self._checks.broken("chain.byte_conservation", f"band {self.geometry.name}: {detail}")
