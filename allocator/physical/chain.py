"""The physical chain: realizes the ops of each step on one rank's arena, as effects.

Owns every band's layout on this rank. Must never decide whether a demand fits, mint an id, read an event, or perform an
effect. Invariants: every op that the logical chain accepted is realized, or `chain.realizable` ends the epoch, never
skipped; ranks of one stage that got the same steps return the same effects and the same layout digests.

What this version serves: one band with units per stage, an end. More than one needs floats and relief, which are not
built; such a geometry is refused when the chain is made.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from allocator.checks import STRICT, Checks, some
from allocator.columns import I32, Int32s
from allocator.digest import START, advance
from allocator.effects import Effect, canonical_bytes
from allocator.errors import NotBuilt
from allocator.geometry import Geometry, StageGeometry
from allocator.ops import Flush, Op, Part, Take
from allocator.parts import op_columns
from allocator.physical.band import EndBand
from allocator.physical.forward_steps import ForwardSteps


class PhysicalChain:
    """One rank's layout. For every step, in seq order, with or without a forward:

        chain.begin_step(seq, processed_through, released, extents)   # logical progress, before any op
        effects = chain.apply(ops)                                    # once; execute them in order
        layout = chain.end_step()                                     # the digest to report
        chain.launched(seq, {band: written ids})                      # only if the step has a forward, at its launch

    `written ids` are the virtual ids whose units the forward writes (int32, any order): those units do not move until
    the forward is processed.
    """

    def __init__(self, geometry: Geometry, stage: int, checks: Checks | None = None) -> None:
        self.checks = checks or Checks()
        self.stage = geometry.stages[stage]
        self._steps = ForwardSteps(self.checks)
        self._effects: list[Effect] | None = None
        self._digest = START
        # Band by index in chain order; None where this stage stores nothing of the kind.
        self._bands = _build_bands(geometry, self.stage, self._steps, self.checks)
        self._stored = [band for band in self._bands if band is not None]
        assert len(self._stored) <= 1, "more than one stored band was refused"

    # --- one step ------------------------------------------------------------------------------------------------

    def begin_step(
        self, seq: int, processed_through: int, released: Sequence[int] = (), extents: Sequence[object] = ()
    ) -> None:
        """Logical progress of step `seq`: forwards processed, transfers released, extents fixed elsewhere."""
        if released or extents:
            raise NotBuilt(f"step {seq} releases transfers or fixes extents; this version has neither")
        if self._steps.begin(seq, processed_through):
            for band in self._stored:
                band.progress(processed_through)

    def apply(self, ops: list[Op]) -> list[Effect]:
        """Applies the step's ops in order; effects to execute in order on the schedule stream."""
        self._steps.require_open("apply")
        if self._effects is not None:
            self.checks.broken("chain.step_order", f"the ops of step {self._steps.seq} were applied already")
        effects: list[Effect] = []
        for op in ops:
            if isinstance(op, Flush):
                for band in self._stored:
                    effects += band.flush(op.moves_max)
            else:
                effects += self._apply_units(op.parts, isinstance(op, Take))
        assert self._effects is None, "ops change nothing twice"
        self._effects = effects
        return effects

    def end_step(self) -> bytes:
        """Closes the step; the chained layout digest (16 bytes) over its effects, spans and hole counts."""
        if self._effects is None:
            self.checks.broken("chain.step_order", f"step {self._steps.seq} ends before its ops were applied")
        assert self._effects is not None
        if self.checks.level >= STRICT:
            self.check()
        self._steps.end()
        numbers = [self._steps.seq]
        for band in self._stored:
            numbers += (band.index, band.frontier, *band.counts())
        layout = struct.pack(f"<{len(numbers)}q", *numbers)
        self._digest = advance(self._digest, canonical_bytes(self._effects) + layout)
        self._effects = None
        return self._digest

    def launched(self, seq: int, writes: Mapping[int, Int32s]) -> None:
        """The forward of step `seq` is launched; it writes the units of these virtual ids, per band."""
        self._steps.launch(seq)
        for index, ids in sorted(writes.items()):
            band = self._bands[index]
            if band is not None and ids.size:
                band.record_writes(seq, ids)

    # --- reading -------------------------------------------------------------------------------------------------

    def physical(self, band: int, virtual_ids: Int32s) -> Int32s:
        """Physical units of virtual ids in a band (int32), 0 (the sink) where none is bound."""
        stored = self._bands[band]
        return np.zeros(virtual_ids.shape, dtype=I32) if stored is None else stored.physical(virtual_ids)

    def band_counts(self) -> Int32s:
        """int32[bands * 4]: live, hole, pending (vacated ones included) and beyond units of each band."""
        out = np.zeros((len(self._bands), 4), dtype=I32)
        for band in self._stored:
            live, hole, pending, vacated, beyond = band.counts()
            out[band.index] = (live, hole, pending + vacated, beyond)
        return out.reshape(-1)

    @property
    def digest(self) -> bytes:
        """The layout digest after the newest ended step."""
        return self._digest

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Conservation of every band, recounted from its columns. Costs as much as the bands are large."""
        for band in self._stored:
            band.check()
            _, _, pending, vacated, _ = band.counts()
            if self._steps.newest_in_flight == 0 and pending + vacated:
                detail = f"band {band.geometry.name}: {pending + vacated} units pend behind no forward"
                self.checks.broken("chain.byte_conservation", detail)

    def check_idle(self) -> None:
        """Nothing is live, nothing pends, no use is on record: raises InvariantBroken naming what leaked."""
        self.check()
        for band in self._stored:
            live, _, pending, vacated, _ = band.counts()
            if live + pending + vacated:
                detail = f"band {band.geometry.name}: {live} units live, {pending + vacated} pending at idle"
                self.checks.broken("chain.idle", detail)
            written = band.ledger.written_positions()
            if written.size:
                self.checks.broken("chain.idle", f"band {band.geometry.name}: writes on record at {some(written)}")

    # --- inside --------------------------------------------------------------------------------------------------

    def _apply_units(self, parts: list[Part], take: bool) -> list[Effect]:
        """One take or free: every part is checked before the first one changes anything."""
        stored: list[tuple[EndBand, Int32s]] = []
        for index, ids in op_columns(parts, len(self._bands), self.checks):
            band = self._bands[index]
            if band is None:
                continue
            if take:
                band.check_take(ids)
            else:
                band.check_free(ids)
            stored.append((band, ids))
        effects: list[Effect] = []
        for band, ids in stored:
            effects += band.take(ids) if take else band.free(ids)
        return effects


def _build_bands(geometry: Geometry, stage: StageGeometry, steps: ForwardSteps, checks: Checks) -> list[EndBand | None]:
    """The bands of a stage in chain order; raises NotBuilt for what this version cannot lay out."""
    stored = [index for index, band in enumerate(stage.bands) if band.unit_bytes]
    if len(stored) > 1:
        names = ", ".join(stage.bands[index].name for index in stored)
        raise NotBuilt(
            f"bands {names} share this arena; one band per arena is served, because floats, relief and relocation "
            "between bands are not built"
        )
    bands: list[EndBand | None] = [None] * len(stage.bands)
    for index in stored:
        band = stage.bands[index]
        if band.kind == "state":
            raise NotBuilt(f"band {band.name}: state slots need a padding slot and copies, which are not built")
        if stage.chain_start_bytes < band.unit_bytes:
            raise ValueError(
                f"band {band.name}: its sink needs {band.unit_bytes} bytes before the chain, which starts at "
                f"{stage.chain_start_bytes}"
            )
        lowest = -(-stage.chain_start_bytes // band.unit_bytes)
        highest = stage.arena_bytes // band.unit_bytes - 1
        bands[index] = EndBand(index, band, lowest, highest, geometry.virtual_pages, steps, checks)
    return bands
