"""Devices: one rank's arena for one epoch, and the order of everything that touches its bytes.

Owns the border between the executor and what performs a physical chain's effects: one method per effect of
`allocator.effects`, plus what a step worker tells a device about forwards and uses. Must never decide anything by
whether an event has fired, choose a unit, or reorder what it is told. `HostDevice` is here (a call returns when its
work is done); `cuda.CudaDevice` has streams and events.

How a step calls it, in this order:

    release(uses), retire_through(seq)      logical progress of the step
    effects, in the order given             through the executor, which has checked every band, id and unit
    schedule_done()                         the next forward runs behind them
    effects that `launched` returned        waits only, then schedule_done() again
    (the forward is enqueued)               by the runner
    record_forward(seq)                     forwards come in seq order, once each

Columns are int32 numpy arrays (host slots int64) of equal length that the device may read until the call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from allocator.columns import Bytes8s, Int32s, Int64s
from allocator.geometry import StageGeometry
from daemon.rank.arena import HostArena
from daemon.rank.errors import StepRefused
from daemon.rank.host_pool import HostPool, no_pool
from daemon.rank.transfers import TransferEngine, no_engine


class Device(Protocol):
    """Performs effects in the order in which they come; `allocator.effects` says what each is ordered behind."""

    def open_tables(self, tables: Sequence[Int32s]) -> None:
        """Called once, before any effect: every band's id table as it is at first, int32[ids + 1], in chain order."""

    def wait_forward(self, seq: int) -> None:
        """Order following schedule work behind the end of forward `seq`; one that was retired needs no wait."""

    def wait_copy(self, use: int) -> None:
        """Order following schedule work behind the end of host copy `use`."""

    def host_wait(self, use: int) -> None:
        """Return only when this rank's transfer engine has finished transfer `use`."""

    def zero(self, band: int, units: Int32s) -> None:
        """Zero whole units of a band, as schedule work."""

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Copy units pair by pair, as schedule work; no target is a source, targets are distinct."""

    def bind(self, band: int, virtual: Int32s, physical: Int32s) -> None:
        """table[virtual] = physical in the device's own id table, as schedule work."""

    def host_read(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Host copy `use`: units into host slots, behind the schedule work and the forwards before it."""

    def host_write(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Host copy `use`: host slots into units, behind the schedule work and the forwards before it."""

    def send_units(self, use: int, band: int, units: Int32s, after: int) -> None:
        """The engine reads these units once the schedule work before and forward `after` (0: none) have ended."""

    def publish_units(self, use: int, band: int, virtual: Int32s, units: Int32s, after: int) -> None:
        """The peer learns these units' addresses, no earlier than a send of them would start."""

    def schedule_done(self) -> None:
        """Order the next forward behind all schedule work issued so far."""

    def record_forward(self, seq: int) -> None:
        """Forward `seq` has been launched in full; raises StepRefused when `seq` does not rise."""

    def retire_through(self, seq: int) -> None:
        """Forwards up to `seq` were processed: they have ended, and what was kept of them is no longer needed."""

    def release(self, uses: Sequence[int]) -> None:
        """These uses are over on every rank; forget them. Uses that this device was never told of are no error."""


class HostDevice:
    """A host arena, each effect done when its call returns: waits only check that they name what has begun.

    `pool` holds host copies and `engine` moves units between ranks; without one, the effects that need it are refused.
    """

    def __init__(
        self,
        stage: StageGeometry,
        data: Bytes8s | None = None,
        pool: HostPool | None = None,
        engine: TransferEngine | None = None,
    ) -> None:
        self.arena = HostArena(stage, data)
        self._pool = pool
        self._engine = engine
        self._newest = 0
        self._copies: set[int] = set()
        self._transfers: set[int] = set()

    def open_tables(self, tables: Sequence[Int32s]) -> None:
        """The executor's own tables are all that a host forward reads."""

    def wait_forward(self, seq: int) -> None:
        """Check that `seq` was launched; its work is done."""
        if seq > self._newest:
            raise StepRefused(f"wait for forward {seq}, but the newest launched one is {self._newest}")

    def wait_copy(self, use: int) -> None:
        """Check that the copy began and was not released; its work is done."""
        if use not in self._copies:
            raise StepRefused(f"wait for host copy {use}, which is not under way")

    def host_wait(self, use: int) -> None:
        """The engine waits; it has its own deadline."""
        if use not in self._transfers or self._engine is None:
            raise StepRefused(f"wait for transfer {use}, which is not under way")
        self._engine.wait(use)

    def zero(self, band: int, units: Int32s) -> None:
        """Zero whole units of a band."""
        self.arena.zero(band, units)

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Copy units pair by pair."""
        self.arena.copy(band, sources, targets)

    def bind(self, band: int, virtual: Int32s, physical: Int32s) -> None:
        """The executor has entered them in its tables."""

    def host_read(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Units into host slots."""
        pool = self._pool or no_pool(use)
        pool.put(band, slots, self.arena.units(band), units)
        self._copies.add(use)

    def host_write(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Host slots into units."""
        pool = self._pool or no_pool(use)
        pool.get(band, slots, self.arena.units(band), units)
        self._copies.add(use)

    def send_units(self, use: int, band: int, units: Int32s, after: int) -> None:
        """Everything before has ended: the engine starts."""
        self.wait_forward(after)
        engine = self._engine or no_engine(use)
        engine.submit(use, band, units)
        self._transfers.add(use)

    def publish_units(self, use: int, band: int, virtual: Int32s, units: Int32s, after: int) -> None:
        """Everything before has ended: the peer is told."""
        self.wait_forward(after)
        engine = self._engine or no_engine(use)
        engine.publish(use, band, virtual, units)
        self._transfers.add(use)

    def schedule_done(self) -> None:
        """Nothing is outstanding."""

    def record_forward(self, seq: int) -> None:
        """Note the newest forward; raises StepRefused when `seq` does not rise."""
        if seq <= self._newest:
            raise StepRefused(f"forward {seq} recorded after forward {self._newest}")
        self._newest = seq

    def retire_through(self, seq: int) -> None:
        """Nothing is kept per forward."""

    def release(self, uses: Sequence[int]) -> None:
        """Forget copies, and have the engine forget transfers."""
        for use in uses:
            self._copies.discard(use)
            if use in self._transfers:
                self._transfers.discard(use)
                assert self._engine is not None, "only an engine begins a transfer"
                self._engine.end(use)
