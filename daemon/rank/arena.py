"""The arena: one rank's byte region in host memory, and whole-unit operations on it.

Owns the bytes. Must never know what a unit holds or who owns it. Invariants: unit `u` of a band lies at byte
`u * unit_bytes`; bytes [0, chain_start) are the sink, the padding slot and other fixed allocations, and no operation
writes them: the executor has checked every unit that arrives here.
"""

from __future__ import annotations

import numpy as np

from allocator.columns import Bytes8s, Int32s
from allocator.geometry import StageGeometry
from daemon.rank.errors import StepRefused

BLOCK_BYTES = 1 << 20  # at most this much is gathered at once by a copy, or one unit


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
        self._units[band][units] = 0

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Copy units pair by pair; no target is a source."""
        view = self._units[band]
        step = max(1, BLOCK_BYTES // self._stage.bands[band].unit_bytes)
        for begin in range(0, sources.size, step):
            view[targets[begin : begin + step]] = view[sources[begin : begin + step]]
