"""The executor: performs the effects of a physical chain on this rank's device and id tables.

Owns the host's id tables (virtual id -> physical unit, per band), the order of effects, and the check of everything
they name. Must never choose a unit or reorder effects: they are safe only in the order given. Invariants: nothing
outside the chain's bytes is zeroed, copied, sent or bound, but for a band's resting unit, which unbound ids (and id 0)
read as; an effect that is refused has touched nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allocator.columns import Int32s, Int64s, i32, i64
from allocator.effects import (
    Bind,
    Copy,
    Effect,
    HostRead,
    HostWait,
    HostWrite,
    PublishUnits,
    SendUnits,
    WaitCopy,
    WaitForward,
    Zero,
)
from allocator.geometry import Geometry
from daemon.rank.device import Device
from daemon.rank.errors import StepRefused


class Executor:
    """Executes effects in order; `tables[band]` is int32[virtual ids + 1].

    `resting[band]` is the unit that unbound ids read as: `PhysicalChain.resting_unit`. With `notes` each effect is
    noted once its instruction was given to the device, until `take_performed`.
    """

    def __init__(
        self, geometry: Geometry, stage: int, device: Device, resting: Sequence[int], *, notes: bool = False
    ) -> None:
        self._performed: list[Effect] | None = [] if notes else None
        self._stage = geometry.stages[stage]
        self._device = device
        self._resting = list(resting)
        bands = self._stage.bands
        assert len(self._resting) == len(bands), "one resting unit for each band"
        ids = [geometry.virtual_slots if band.kind == "state" else geometry.virtual_pages for band in bands]
        self.tables: list[Int32s] = [
            np.full(count + 1, unit, dtype=np.int32) for count, unit in zip(ids, self._resting, strict=True)
        ]
        # Units [first, end) of each band lie inside the chain's bytes.
        self._first = [-(-self._stage.chain_start_bytes // b.unit_bytes) if b.unit_bytes else 0 for b in bands]
        self._end = [self._stage.arena_bytes // b.unit_bytes if b.unit_bytes else 0 for b in bands]
        device.open_tables(self.tables)

    def execute(self, effects: list[Effect]) -> None:
        """Perform every effect, then order the next forward behind them.

        Raises StepRefused for an unknown effect, and for a band, id or unit out of range.
        """
        for effect in effects:
            self._perform(effect)
        if effects:
            self._device.schedule_done()

    def take_performed(self) -> list[Effect]:
        """The effects whose instructions were given to the device since the last call, in order."""
        assert self._performed is not None, "this executor takes no notes"
        performed, self._performed = self._performed, []
        return performed

    def _perform(self, effect: Effect) -> None:
        device = self._device
        match effect:
            case Bind(band, _, _):
                self._bind(effect)
            case Zero(band, _):
                device.zero(band, self._units(band, effect.units))
            case Copy(band, _, _):
                device.copy(band, *self._pairs(effect))
            case WaitForward(seq):
                device.wait_forward(seq)
            case WaitCopy(use):
                device.wait_copy(use)
            case HostWait(use):
                device.host_wait(use)
            case HostRead(use, band, _, _):
                device.host_read(use, band, *self._slots(effect))
            case HostWrite(use, band, _, _):
                units, slots = self._slots(effect)
                _require_distinct(units, effect)
                device.host_write(use, band, units, slots)
            case SendUnits(use, band, _, after):
                device.send_units(use, band, self._units(band, effect.units), after)
            case PublishUnits(use, band, _, _, after):
                units = self._units(band, effect.units)
                virtual = self._virtual(band, effect.virtual, units.size)
                device.publish_units(use, band, virtual, units, after)
            case _:
                raise StepRefused(f"unknown effect {effect!r}")
        if self._performed is not None:
            self._performed.append(effect)

    def _bind(self, effect: Bind) -> None:
        band, physical = effect.band, i32(effect.physical)
        virtual = self._virtual(band, effect.virtual, physical.size)
        self._check_units(band, physical[physical != self._resting[band]])
        self.tables[band][virtual] = physical
        self._device.bind(band, virtual, physical)

    def _pairs(self, effect: Copy) -> tuple[Int32s, Int32s]:
        """Sources and targets of a copy, which a device may perform in any order."""
        sources, targets = self._units(effect.band, effect.sources), self._units(effect.band, effect.targets)
        _require_pairs(sources.size, targets.size, effect)
        _require_distinct(targets, effect)
        if np.intersect1d(sources, targets).size:
            raise StepRefused(
                f"a copy in band {effect.band} whose target {np.intersect1d(sources, targets)[0]} is a source"
            )
        return sources, targets

    def _slots(self, effect: HostRead | HostWrite) -> tuple[Int32s, Int64s]:
        units, slots = self._units(effect.band, effect.units), i64(effect.slots)
        _require_pairs(units.size, slots.size, effect)
        return units, slots

    def _units(self, band: int, column: bytes) -> Int32s:
        units = i32(column)
        self._check_units(band, units)
        return units

    def _check_units(self, band: int, units: Int32s) -> None:
        self._check_band(band)
        if not units.size:
            return
        low, high = int(units.min()), int(units.max())
        if low < self._first[band] or high >= self._end[band]:
            geometry = self._stage.bands[band]
            raise StepRefused(
                f"units {low}..{high} of band {geometry.name} ({geometry.unit_bytes} bytes each) leave the chain's "
                f"bytes [{self._stage.chain_start_bytes}, {self._stage.arena_bytes})"
            )

    def _virtual(self, band: int, column: bytes, size: int) -> Int32s:
        self._check_band(band)
        virtual, table = i32(column), self.tables[band]
        if virtual.size != size:
            raise StepRefused(f"{virtual.size} ids for {size} units in band {band}")
        if virtual.size and (int(virtual.min()) < 1 or int(virtual.max()) >= table.size):
            low, high = int(virtual.min()), int(virtual.max())
            raise StepRefused(f"ids {low}..{high} in band {band}; ids run from 1 to {table.size - 1}")
        return virtual

    def _check_band(self, band: int) -> None:
        if not 0 <= band < len(self.tables):
            raise StepRefused(f"band {band} of {len(self.tables)}")
        if not self._stage.bands[band].unit_bytes:
            raise StepRefused(f"band {self._stage.bands[band].name} stores nothing on this stage")


def _require_pairs(left: int, right: int, effect: Effect) -> None:
    if left != right:
        raise StepRefused(f"{type(effect).__name__} pairs {left} with {right}")


def _require_distinct(targets: Int32s, effect: Effect) -> None:
    if np.unique(targets).size != targets.size:
        raise StepRefused(f"{type(effect).__name__} writes a unit twice")
