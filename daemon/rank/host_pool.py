"""The host pool: bytes of units that were copied out of the arena, by band and slot.

Owns one block of host memory per band, [slots, unit_bytes]. Must never choose a slot: the daemon names them.
Invariants: a slot beyond the pool is refused; a slot that was never written is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Bytes8s, Int32s, Int64s
from allocator.geometry import StageGeometry
from daemon.rank.errors import StepRefused


def host_rows(slots: int, unit_bytes: int) -> Bytes8s:
    """uint8[slots, unit_bytes] of ordinary memory, taken from the system when first touched."""
    return np.zeros((slots, unit_bytes), dtype=np.uint8)


class HostPool:
    """`slots` slots for every band that a stage stores; `allocate(slots, unit_bytes)` makes a band's rows."""

    def __init__(self, stage: StageGeometry, slots: int, allocate: Callable[[int, int], Bytes8s] = host_rows) -> None:
        self.slots = slots
        self._names = [band.name for band in stage.bands]
        self._rows = [allocate(slots if band.unit_bytes else 0, band.unit_bytes) for band in stage.bands]
        self._filled: list[NDArray[np.bool_]] = [np.zeros(rows.shape[0], dtype=np.bool_) for rows in self._rows]

    def rows(self, band: int) -> Bytes8s:
        """All slots of a band, uint8[slots, unit_bytes]: a view."""
        return self._rows[band]

    def fill(self, band: int, slots: Int64s) -> None:
        """A copy into these slots begins; raises StepRefused for one beyond the pool."""
        self._check(band, slots)
        self._filled[band][slots] = True

    def require(self, band: int, slots: Int64s) -> None:
        """A copy out of these slots begins; raises StepRefused for one beyond the pool or never filled."""
        self._check(band, slots)
        empty = slots[~self._filled[band][slots]]
        if empty.size:
            raise StepRefused(f"host slot {empty[0]} of band {self._names[band]} is read but was never written")

    def put(self, band: int, slots: Int64s, units: Bytes8s, chosen: Int32s) -> None:
        """rows[slots] = units[chosen]; `units` uint8[units, unit_bytes] is the band's view of a host arena."""
        self.fill(band, slots)
        self._rows[band][slots] = units[chosen]

    def get(self, band: int, slots: Int64s, units: Bytes8s, chosen: Int32s) -> None:
        """units[chosen] = rows[slots]."""
        self.require(band, slots)
        units[chosen] = self._rows[band][slots]

    def _check(self, band: int, slots: Int64s) -> None:
        have = self._rows[band].shape[0]
        if slots.size and (int(slots.min()) < 0 or int(slots.max()) >= have):
            low, high = int(slots.min()), int(slots.max())
            raise StepRefused(
                f"host slots {low}..{high} of band {self._names[band]}; the host pool has {have}, numbered from 0"
            )


def no_pool(use: int) -> NoReturn:
    """Refuse host copy `use`: raises StepRefused."""
    raise StepRefused(
        f"host copy {use} needs a host pool, and this rank has none: this version gives ranks no host tier; "
        "the daemon must not order backups or loads"
    )
