"""A modeled device under one physical chain: real bytes, two streams, forwards that run when they please.

It executes effects as a rank would, and checks what no chain may do:

  lost_write          a forward reads other bytes than its pages' last writers left (zeros where nobody wrote)
  unordered_overlap   schedule-stream work and a forward it is not ordered behind touch one unit, and one of them writes
  sink_written        the sink or a byte outside the band changed

The schedule stream runs at once, in order. A forward is launched with the page table of that moment, runs behind all
schedule work issued before, in launch order, at the latest when something waits for it: how long it is delayed is
decided by `lazy`, so two devices with other timing must still agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allocator.columns import I32, Int32s, i32
from allocator.effects import Bind, Copy, Effect, WaitForward, Zero
from allocator.geometry import Geometry


class DeviceFault(AssertionError):
    """The chain let the device do what it must never do."""


@dataclass
class Flying:
    """A launched forward: units it reads with the bytes they must hold, and what it writes where."""

    seq: int
    reads: dict[int, bytes]
    writes: list[tuple[int, int, int]]  # unit, offset, value
    ran: bool = False

    @property
    def written_units(self) -> set[int]:
        return {unit for unit, _, _ in self.writes}


class DeviceModel:
    """One rank's arena and streams; a band of token pages."""

    def __init__(self, geometry: Geometry, stage: int, band: int, seed: int, lazy: float) -> None:
        shape = geometry.stages[stage]
        self.unit_bytes = shape.bands[band].unit_bytes
        self._arena = np.zeros(shape.arena_bytes, dtype=np.uint8)
        self._first = shape.chain_start_bytes
        self._arena[self._first :] = 0xEE  # what an earlier user of the memory left: not zeros, and no live bytes
        self._table = np.zeros(geometry.virtual_pages + 1, dtype=I32)
        self._wanted: dict[int, bytearray] = {}  # logical content of each live page, after all launched forwards
        self._flights: list[Flying] = []
        self._ordered_behind = 0  # schedule work issued now runs after every forward up to this one
        self._rng = np.random.default_rng(seed)
        self._lazy = lazy
        self.waits = 0
        self.moves = 0

    # --- the schedule stream -------------------------------------------------------------------------------------

    def processed(self, through: int) -> None:
        """The host saw these forwards end."""
        self._run_through(through)
        self._ordered_behind = max(self._ordered_behind, through)
        self._flights = [flight for flight in self._flights if flight.seq > through]

    def execute(self, effects: list[Effect]) -> None:
        """Schedule work in order."""
        for effect in effects:
            if isinstance(effect, WaitForward):
                self.waits += 1
                self._run_through(effect.seq)
                self._ordered_behind = max(self._ordered_behind, effect.seq)
            elif isinstance(effect, Zero):
                for unit in i32(effect.units).tolist():
                    self._touch(unit, writes=True, what="zeroing")
                    self._unit(unit)[:] = 0
            elif isinstance(effect, Copy):
                self._copy(i32(effect.sources).tolist(), i32(effect.targets).tolist())
            else:
                assert isinstance(effect, Bind)
                self._bind(i32(effect.virtual), i32(effect.physical))
            self._drift()

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        assert len(set(sources + targets)) == 2 * len(sources), "a copy's sources and targets are disjoint"
        for source, target in zip(sources, targets, strict=True):
            self.moves += 1
            self._touch(source, writes=False, what="moving from")
            self._touch(target, writes=True, what="moving to")
            self._unit(target)[:] = self._unit(source)

    def _bind(self, virtual: Int32s, physical: Int32s) -> None:
        for page, unit in zip(virtual.tolist(), physical.tolist(), strict=True):
            if unit and page not in self._wanted:
                self._wanted[page] = bytearray(self.unit_bytes)
            elif not unit:
                del self._wanted[page]
            self._table[page] = unit
        live = self._table[self._table > 0]
        if len(np.unique(live)) != len(live):
            raise DeviceFault("lost_write: two live pages share a unit")

    def _touch(self, unit: int, writes: bool, what: str) -> None:
        """Schedule work touches a unit: every forward it is not ordered behind must leave that unit alone."""
        if unit * self.unit_bytes < self._first or (unit + 1) * self.unit_bytes > self._arena.size:
            raise DeviceFault(f"sink_written: {what} unit {unit}, outside the band")
        for flight in self._flights:
            if flight.seq <= self._ordered_behind:
                continue
            if unit in flight.written_units or (writes and unit in flight.reads):
                raise DeviceFault(f"unordered_overlap: {what} unit {unit} beside forward {flight.seq}")

    # --- forwards ------------------------------------------------------------------------------------------------

    def launch(self, seq: int, reads: list[int], writes: list[tuple[int, int, int]]) -> None:
        """Forward `seq` reads whole virtual pages and then writes bytes (page, offset, value) of some of them."""
        resolved = {int(self._table[page]): bytes(self._wanted[page]) for page in reads}
        if 0 in resolved:
            raise DeviceFault("lost_write: a live page reads as the sink")
        targets = [(int(self._table[page]), offset, value) for page, offset, value in writes]
        for page, offset, value in writes:
            self._wanted[page][offset] = value
        self._flights.append(Flying(seq, resolved, targets))
        self._drift()

    def _drift(self) -> None:
        """Launched forwards get on with it, or not."""
        for flight in self._flights:
            if not flight.ran:
                if self._rng.random() < self._lazy:
                    return
                self._run(flight)

    def _run_through(self, seq: int) -> None:
        for flight in self._flights:
            if flight.seq <= seq and not flight.ran:
                self._run(flight)

    def _run(self, flight: Flying) -> None:
        for unit, wanted in flight.reads.items():
            if bytes(self._unit(unit)) != wanted:
                raise DeviceFault(f"lost_write: forward {flight.seq} reads other bytes than written in unit {unit}")
        for unit, offset, value in flight.writes:
            self._unit(unit)[offset] = value
        flight.ran = True

    def check(self, physical: Int32s) -> None:
        """The chain's own table is the one that its effects built; with nothing flying, all live bytes are right."""
        assert np.array_equal(physical, self._table[1:]), "effects and the chain's own table differ"
        if self._arena[: self._first].any():
            raise DeviceFault("sink_written: bytes before the chain are not zero")
        if all(flight.ran for flight in self._flights):
            for page, wanted in self._wanted.items():
                if bytes(self._unit(int(self._table[page]))) != bytes(wanted):
                    raise DeviceFault(f"lost_write: page {page} holds other bytes than its writers left")

    def _unit(self, unit: int) -> np.ndarray:
        return self._arena[unit * self.unit_bytes : (unit + 1) * self.unit_bytes]
