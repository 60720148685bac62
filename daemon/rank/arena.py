"""The arena: one rank's byte region, and whole-unit operations on it.

Owns the bytes. Must never know what a unit holds or who owns it: it is told physical units by effects. Invariants: unit
`u` of a band lies at byte `u * unit_bytes`; bytes [0, chain_start) are the sink and other fixed allocations, stay zero,
and no operation writes them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from allocator.columns import Bytes8s, Int32s
from allocator.geometry import StageGeometry
from daemon.rank.errors import StepRefused


class ArenaBytes(Protocol):
    """Whole-unit operations that the executor needs; implementations for host memory and for a GPU."""

    def zero(self, band: int, units: Int32s) -> None:
        """Zero whole units of a band."""

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Copy units pair by pair; sources and targets are disjoint."""


def check_units(stage: StageGeometry, band: int, units: Int32s) -> None:
    """Raise StepRefused unless every unit lies inside the chain's part of the arena."""
    unit_bytes = stage.bands[band].unit_bytes
    if unit_bytes == 0:
        raise StepRefused(f"band {band} stores nothing on this stage, yet an effect names {units.size} of its units")
    if units.size == 0:
        return
    low, high = int(units.min()), int(units.max())
    if low * unit_bytes < stage.chain_start_bytes or (high + 1) * unit_bytes > stage.arena_bytes:
        raise StepRefused(
            f"units {low}..{high} of band {stage.bands[band].name} ({unit_bytes} bytes each) leave the chain's bytes "
            f"[{stage.chain_start_bytes}, {stage.arena_bytes})"
        )


class HostArena:
    """An arena in host memory: `data` uint8[arena_bytes], one view of shape [units, unit_bytes] per band."""

    def __init__(self, stage: StageGeometry, data: Bytes8s | None = None) -> None:
        self._stage = stage
        self.data: Bytes8s = np.zeros(stage.arena_bytes, dtype=np.uint8) if data is None else data
        if self.data.shape != (stage.arena_bytes,):
            raise StepRefused(f"arena of {self.data.shape} bytes for a geometry of {stage.arena_bytes}")
        self._units = [self._view(band.unit_bytes) for band in stage.bands]

    def _view(self, unit_bytes: int) -> Bytes8s:
        count = self._stage.arena_bytes // unit_bytes if unit_bytes else 0
        return self.data[: count * unit_bytes].reshape(count, unit_bytes)

    def units(self, band: int) -> Bytes8s:
        """All units of a band, uint8[units, unit_bytes]: a view."""
        return self._units[band]

    def zero(self, band: int, units: Int32s) -> None:
        """Zero whole units of a band."""
        check_units(self._stage, band, units)
        self._units[band][units] = 0

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Copy units pair by pair; sources and targets are disjoint."""
        check_units(self._stage, band, sources)
        check_units(self._stage, band, targets)
        view = self._units[band]
        view[targets] = view[sources]
