"""The executor: performs the effects of a physical chain on this rank's arena and id tables.

Owns the id tables (virtual id -> physical unit, per band) and the order of schedule work. Must never choose a unit or
reorder effects: they are safe only in the order given. Invariants: id 0 is the sink and stays bound to unit 0; an
unbound id is bound to the sink.
"""

from __future__ import annotations

import numpy as np

from allocator.columns import Int32s, i32
from allocator.effects import Bind, Copy, Effect, WaitForward, Zero
from allocator.geometry import Geometry
from daemon.rank.arena import ArenaBytes
from daemon.rank.device import Device
from daemon.rank.errors import StepRefused


class Executor:
    """Executes effects in order; `tables[band]` is int32[virtual ids + 1]."""

    def __init__(self, geometry: Geometry, stage: int, arena: ArenaBytes, device: Device) -> None:
        bands = geometry.stages[stage].bands
        self._arena = arena
        self._device = device
        self.tables: list[Int32s] = [
            np.zeros((geometry.virtual_slots if band.kind == "state" else geometry.virtual_pages) + 1, dtype=np.int32)
            for band in bands
        ]

    def execute(self, effects: list[Effect]) -> None:
        """Perform every effect, then order the next forward behind them; raises StepRefused for ids out of range."""
        for effect in effects:
            match effect:
                case Bind():
                    self._bind(effect)
                case Zero():
                    self._arena.zero(effect.band, i32(effect.units))
                case Copy():
                    self._arena.copy(effect.band, i32(effect.sources), i32(effect.targets))
                case WaitForward():
                    self._device.wait_forward(effect.seq)
                case _:
                    raise StepRefused(f"unknown effect {effect!r}")
        if effects:
            self._device.schedule_done()

    def _bind(self, effect: Bind) -> None:
        virtual = i32(effect.virtual)
        table = self.tables[effect.band]
        if virtual.size and (int(virtual.min()) < 1 or int(virtual.max()) >= table.size):
            low, high = int(virtual.min()), int(virtual.max())
            raise StepRefused(f"bind of ids {low}..{high} in band {effect.band}; ids run from 1 to {table.size - 1}")
        table[virtual] = i32(effect.physical)
