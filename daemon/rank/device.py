"""Devices: when what was launched is done, and how later work is ordered behind it.

Owns streams and events behind one small interface. Must never decide anything by whether an event has fired. CPU work
is done when the call returns; CUDA work is ordered by events. Invariant: forwards are recorded once each, in seq order.
"""

from __future__ import annotations

from typing import Protocol

from daemon.rank.errors import StepRefused


class Device(Protocol):
    """Orders the schedule stream (zero, copy) against the forward stream."""

    def wait_forward(self, seq: int) -> None:
        """Order following schedule work behind the end of forward `seq`."""

    def schedule_done(self) -> None:
        """Order the next forward behind all schedule work issued so far."""

    def record_forward(self, seq: int) -> None:
        """Forward `seq` has been launched in full."""

    def retire_through(self, seq: int) -> None:
        """Forwards up to `seq` were processed: their events are no longer needed."""


class ImmediateDevice:
    """A host device: a call returns when its work is done, so waits only check that they name a launched forward."""

    def __init__(self) -> None:
        self._newest = 0

    def wait_forward(self, seq: int) -> None:
        """Check that `seq` was launched; its work is done."""
        if seq > self._newest:
            raise StepRefused(f"wait for forward {seq}, but the newest launched one is {self._newest}")

    def schedule_done(self) -> None:
        """Nothing is outstanding."""

    def record_forward(self, seq: int) -> None:
        """Note the newest forward; raises StepRefused when `seq` does not rise."""
        if seq <= self._newest:
            raise StepRefused(f"forward {seq} recorded after forward {self._newest}")
        self._newest = seq

    def retire_through(self, seq: int) -> None:
        """Nothing is kept per forward."""
