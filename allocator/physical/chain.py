"""The physical chain: realizes the ops of each step on one rank's arena, as effects.

Owns every band's layout on this rank. Must never decide whether a demand fits, mint an id, read an event, or perform an
effect. Invariants: every op that the logical chain accepted is realized, or `chain.realizable` ends the epoch, never
skipped; ranks of one stage that got the same steps return the same effects and the same layout digests; the spans of
the stored bands lie in chain order and do not overlap.

    chain start | state, grows up -> |   gap   | floats, either way |   gap   | <- full attention, grows down | end

The first stored band grows up and the last one down, whatever their kinds; those between float.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from allocator.checks import STRICT, Checks, some
from allocator.columns import I32, Int32s, i32, pack_i32
from allocator.digest import START, advance
from allocator.effects import Copy, Effect, HostWait, WaitCopy, WaitForward, canonical_bytes
from allocator.geometry import Geometry, StageGeometry
from allocator.ops import CopyState, Fix, Flush, Free, Op, Rebind, Take
from allocator.parts import op_columns
from allocator.physical import uses
from allocator.physical.band import Band, Growth
from allocator.physical.clearance import CLEARANCE, TO_READ, Clear, Consumer, to_write
from allocator.physical.forward_steps import ForwardSteps
from allocator.physical.ledger import StageLedger
from allocator.physical.relief import Relief, ReliefCounts, plan_in_place
from allocator.physical.units import Units


class PhysicalChain:
    """One rank's layout. For every step, in seq order, with or without a forward:

        chain.begin_step(seq, processed_through, released)    # logical progress, before any op
        effects = chain.apply(ops)                            # once; execute them in order
        layout = chain.end_step()                             # the digest to report
        waits = chain.launched(seq, {band: written ids})      # only if the step has a forward, right before its launch

    `written ids` are the virtual ids whose units the forward writes (int32, any order), None where that is not known
    (speculation): those units do not move until the forward is processed. `waits` come before the forward.
    """

    def __init__(self, geometry: Geometry, stage: int, checks: Checks | None = None) -> None:
        self.checks = checks or Checks()
        self.stage = geometry.stages[stage]
        self._steps = ForwardSteps(self.checks)
        self._effects: list[Effect] | None = None
        self._late: list[Effect] = []  # waits at the launch: they count with the next step's effects
        self._digest = START
        self._ledger = StageLedger(self.checks)
        # Band by index in chain order; None where this stage stores nothing of the kind.
        self._bands = self._build(geometry)
        self._stored = [band for band in self._bands if band is not None]
        self._relief = Relief(self.stage, self._stored, self._ledger, self._steps, self.checks)

    def _build(self, geometry: Geometry) -> list[Band | None]:
        """The bands of a stage in chain order."""
        stored = [index for index, band in enumerate(self.stage.bands) if band.unit_bytes]
        bands: list[Band | None] = [None] * len(self.stage.bands)
        for index in stored:
            info = self.stage.bands[index]
            size = info.unit_bytes
            first = -(-self.stage.chain_start_bytes // size)
            capacity = max(0, self.stage.arena_bytes // size - first)
            last = index == stored[-1]
            anchor, direction = (first + capacity - 1, -1) if last else (first, 1)
            ids = geometry.virtual_slots if info.kind == "state" else geometry.virtual_pages
            resting = resting_unit(self.stage, index)
            units = Units(info.name, capacity, anchor, direction, ids, resting, self.checks)
            floats = not last and index != stored[0]
            bands[index] = Band(index, info, units, floats, self._steps, self._ledger, self._wait_for_uses, self.checks)
        return bands

    # --- one step ------------------------------------------------------------------------------------------------

    def begin_step(self, seq: int, processed_through: int, released: Sequence[int] = ()) -> None:
        """Logical progress of step `seq`: forwards processed, host copies and transfers released."""
        if self._steps.begin(seq, processed_through):
            for band in self._stored:
                band.progress(processed_through)
        for number in released:
            use = self._ledger.end(number)
            if use is not None:
                for band in self._stored:
                    band.use_over(use)

    def apply(self, ops: list[Op], ends: list[int] | None = None) -> list[Effect]:
        """Applies the step's ops in order; effects to execute in order.

        `ends` gets how many effects there are before the first op (waits of the launch before) and after each.
        """
        self._steps.require_open("apply")
        if self._effects is not None:
            self.checks.broken("chain.step_order", f"the ops of step {self._steps.seq} were applied already")
        effects: list[Effect] = []
        places = [] if ends is None else ends
        places.append(len(self._late))
        for op in ops:
            effects += self._apply(op)
            places.append(len(self._late) + len(effects))
        assert self._effects is None, "ops change nothing twice"
        self._effects = self._late + effects
        self._late = []
        return effects

    @property
    def applied(self) -> list[Effect]:
        """What the open step's digest will be over: the waits of the launch before, then the effects of its ops."""
        assert self._effects is not None, f"the ops of step {self._steps.seq} are not applied"
        return list(self._effects)

    def end_step(self) -> bytes:
        """Closes the step; the chained layout digest (16 bytes) over its effects, spans and unit counts."""
        if self._effects is None:
            self.checks.broken("chain.step_order", f"step {self._steps.seq} ends before its ops were applied")
        assert self._effects is not None
        if self.checks.level >= STRICT:
            self.check()
        self._steps.end()
        numbers = [self._steps.seq]
        for band in self._stored:
            numbers += (band.index, band.units.begin, band.units.frontier, *band.counts())
        layout = struct.pack(f"<{len(numbers)}q", *numbers)
        self._digest = advance(self._digest, canonical_bytes(self._effects) + layout)
        self._effects = None
        return self._digest

    def launched(self, seq: int, writes: Mapping[int, Int32s | None]) -> list[Effect]:
        """The forward of step `seq` is about to be launched; it writes the units of these virtual ids, per band.

        Returns waits to perform first: nearly always none, but a host copy may still read a page that it appends to.
        """
        self._steps.launch(seq)
        effects: list[Effect] = []
        for index, ids in sorted(writes.items(), key=lambda item: item[0]):
            band = self._bands[index]
            if band is None:
                continue
            if ids is None:
                effects += self._wait_for_uses(band.record_unknown(seq), Consumer.FORWARD)
            elif ids.size:
                effects += self._wait_for_uses(band.record_writes(seq, ids), Consumer.FORWARD)
        self._late += effects
        return effects

    # --- reading -------------------------------------------------------------------------------------------------

    def physical(self, band: int, virtual_ids: Int32s) -> Int32s:
        """Physical units of virtual ids in a band (int32), the resting unit where none is bound."""
        stored = self._bands[band]
        return np.zeros(virtual_ids.shape, dtype=I32) if stored is None else stored.units.unit_of[virtual_ids]

    def resting_unit(self, band: int) -> int:
        """What an unbound id of a band reads as."""
        return resting_unit(self.stage, band)

    def band_counts(self) -> Int32s:
        """int32[bands * 4]: live, hole, pending (vacated and fenced ones included) and beyond units of each band."""
        out = np.zeros((len(self._bands), 4), dtype=I32)
        for band in self._stored:
            live, hole, pending, vacated, fenced, beyond = band.counts()
            out[band.index] = (live, hole, pending + vacated + fenced, beyond)
        return out.reshape(-1)

    def spans(self) -> list[tuple[int, int] | None]:
        """First and end byte of each band's span, in chain order; None for an empty one."""
        return [None if band is None else band.byte_span() for band in self._bands]

    def fixed_extents(self) -> list[tuple[int, int] | None]:
        """Lowest and end byte of the published units of each band, in chain order; None where there are none."""
        out: list[tuple[int, int] | None] = []
        for band in self._bands:
            pinned = None if band is None else self._relief.pinned(band, keep_transfers=False)
            size = 0 if band is None else band.unit_bytes
            out.append(None if pinned is None else (pinned[0] * size, pinned[1] * size))
        return out

    @property
    def open_uses(self) -> int:
        """Host copies, holds and transfers that no step has released."""
        return self._ledger.unreleased

    @property
    def relief(self) -> ReliefCounts:
        """What reliefs did so far: for metrics and benchmarks."""
        return self._relief.counts

    @property
    def digest(self) -> bytes:
        """The layout digest after the newest ended step."""
        return self._digest

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Conservation of every band, recounted from its columns, and of the chain. Costs as much as it is large."""
        edge = self.stage.chain_start_bytes
        for band in self._stored:
            band.check()
            _, _, pending, vacated, _, _ = band.counts()
            if self._steps.newest_in_flight == 0 and pending + vacated:
                detail = f"band {band.geometry.name}: {pending + vacated} units pend behind no forward"
                self.checks.broken("chain.byte_conservation", detail)
            low, high = band.byte_span() or (edge, edge)
            if low < edge or high > self.stage.arena_bytes:
                detail = f"band {band.geometry.name} has bytes {low} to {high}, the bands before it end at {edge}"
                self.checks.broken("chain.byte_conservation", detail)
            edge = high

    def check_idle(self) -> None:
        """Nothing is live, nothing pends, no use is on record: raises InvariantBroken naming what leaked."""
        self.check()
        for band in self._stored:
            live, _, pending, vacated, fenced, _ = band.counts()
            if live + pending + vacated + fenced:
                detail = f"band {band.geometry.name}: {live} units live, {pending + vacated + fenced} pending at idle"
                self.checks.broken("chain.idle", detail)
            written = band.ledger.written_positions()
            if written.size or not band.ledger.is_clear():
                writes = some(written) if written.size else "none"
                detail = f"writes at positions {writes}, {band.ledger.uses} uses on record at idle"
                self.checks.broken("chain.idle", f"band {band.geometry.name}: {detail}")
        if not self._ledger.is_clear():
            self.checks.broken("chain.idle", f"uses {[use.number for use in self._ledger]} on record at idle")

    # --- inside --------------------------------------------------------------------------------------------------

    def _apply(self, op: Op) -> list[Effect]:
        if isinstance(op, Take):
            return self._take(op)
        if isinstance(op, Free):
            columns = self._columns(op)
            for band, ids in columns:
                band.check_bound(ids, "a free names")
            return [effect for band, ids in columns for effect in band.free(ids)]
        if isinstance(op, Flush):
            return self._flush(op.moves_max)
        if isinstance(op, Rebind):
            stored = self._bands[op.band]
            if stored is None:
                return []
            stored.check_bound(i32(op.sources), "a rebind names")
            stored.check_take(np.sort(i32(op.targets)))
            return stored.rebind(i32(op.sources), i32(op.targets))
        if isinstance(op, CopyState):
            return self._copy_state(op)
        if isinstance(op, Fix):
            uses.fix(op, self._stored, self._ledger)
            return []
        return uses.begin_use(op, self._columns(op), self._ledger, self._steps, self._wait_for_uses)

    def _columns(self, op: uses.HasParts) -> list[tuple[Band, Int32s]]:
        """The parts of an op that this stage stores."""
        columns = op_columns(op.parts, len(self._bands), self.checks)
        return [(band, ids) for band, ids in ((self._bands[index], ids) for index, ids in columns) if band is not None]

    def _take(self, op: Take) -> list[Effect]:
        """A joint take: every part is checked, then room is found in place or made, then each band takes."""
        columns = self._columns(op)
        wanted = [0] * len(self._stored)
        for band, ids in columns:
            band.check_take(ids)
            wanted[self._stored.index(band)] = ids.size
        plan = plan_in_place(self._stored, wanted, self.stage.chain_start_bytes, self.stage.arena_bytes)
        effects: list[Effect] = []
        if plan is None:
            effects = self._relief.make_room(wanted)
            plan = [Growth()] * len(self._stored)
        for band, ids in columns:
            effects += band.take(ids, plan[self._stored.index(band)])
        return effects

    def _flush(self, moves_max: int) -> list[Effect]:
        effects: list[Effect] = []
        for band in self._stored:
            effects += band.flush(moves_max)
        moves = sum(len(effect.sources) // I32.itemsize for effect in effects if isinstance(effect, Copy))
        self._relief.counts.flush_moves += moves
        return effects

    def _copy_state(self, op: CopyState) -> list[Effect]:
        """A state copy waits for every forward launched before it: one may write the source or use the target."""
        band = self._bands[op.band]
        if band is None:
            return []
        sources, targets = i32(op.sources), i32(op.targets)
        for ids in (sources, targets):
            band.check_bound(ids, "a state copy names")
        effects: list[Effect] = []
        newest = self._steps.newest_in_flight
        if newest and band.ledger.stream_wait(Consumer.SCHEDULE_COPY, newest):
            effects.append(WaitForward(newest))
        units = band.units
        copier = Consumer.SCHEDULE_COPY
        for ids, hazards in ((sources, TO_READ), (targets, to_write(copier))):
            effects += uses.clear(band, units.positions(ids), hazards, copier, self._ledger, self._wait_for_uses)
        return [*effects, Copy(op.band, pack_i32(units.unit_of[sources]), pack_i32(units.unit_of[targets]))]

    def _wait_for_uses(self, numbers: Sequence[int], consumer: Consumer) -> list[Effect]:
        """Ends uses on this rank by what a consumer of their units must do about them, by the CLEARANCE table."""
        effects: list[Effect] = []
        for number in numbers:
            hazard = self._ledger.hazard(number)
            clear = CLEARANCE[consumer][hazard]
            if clear is Clear.EXCLUDED:
                detail = f"use {number} has fixed units that {consumer.value} is about to touch"
                self.checks.broken("band.write_of_fixed_unit", detail)
            use = self._ledger.wait(number)
            effects.append(WaitCopy(number) if clear is Clear.STREAM_WAIT else HostWait(number))
            for band in self._stored:
                band.use_over(use)
        return effects


def resting_unit(stage: StageGeometry, band: int) -> int:
    """What an unbound id of a band reads as: unit 0, the sink, for tokens; the padding slot for state.

    Raises ValueError where the bytes before the chain do not hold it beside the sinks of the other bands.
    """
    info = stage.bands[band]
    start, size = stage.chain_start_bytes, info.unit_bytes
    if not size:
        return 0
    sink_bytes = max((other.unit_bytes for other in stage.bands if other.kind != "state"), default=0)
    if info.kind != "state":
        if start < size:
            raise ValueError(f"band {info.name}: its sink needs {size} bytes before the chain, which starts at {start}")
        return 0
    padding = start // size - 1
    if padding < 0 or padding * size < sink_bytes:
        raise ValueError(
            f"band {info.name}: its padding slot needs {size} bytes between the sinks, which end at {sink_bytes}, and "
            f"the chain, which starts at {start}"
        )
    return padding
