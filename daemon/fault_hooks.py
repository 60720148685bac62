"""Fault hooks of the daemon: a disk and a clock that do wrong where a specification says so.

Owns the wrappers around the journal's storage and the daemon's clock. Must never be in the way without a fault for
them: `faulty_storage` and `faulty_clock` give back what they were given then.
"""

from __future__ import annotations

from typing import Any

from daemon.clock import NS_PER_MS, Clock
from daemon.faults import Faults
from journal.storage import DiskStorage, Storage


class FaultyStorage:
    """A disk whose writes and fsyncs are counted since the process started, and go wrong at chosen ones."""

    def __init__(self, inner: Storage, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # every other operation is the real disk's

    def write(self, handle: int, data: bytes) -> int:
        """One write, or part of one, or none."""
        struck = [spec.action for spec in self._faults.hit("journal.write")]
        part = data[: max(1, len(data) // 2)] if "short" in struck else data
        written = self._inner.write(handle, part)
        for _ in self._faults.hit("journal.written"):
            pass  # what can strike here has ended or stopped the process
        return written

    def sync(self, handle: int) -> None:
        """One fsync, or an error."""
        for _ in self._faults.hit("journal.fsync"):
            pass
        self._inner.sync(handle)


class SkewedClock:
    """A clock that jumps once, forward or backward, and goes on from there."""

    def __init__(self, inner: Clock, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._skew_ns = 0

    def now_ns(self) -> int:
        """The machine's time and the skew so far."""
        for spec in self._faults.hit("clock"):
            self._skew_ns += spec.low_ms * NS_PER_MS
        return self._inner.now_ns() + self._skew_ns

    def seed(self) -> int:
        """The real clock's."""
        return self._inner.seed()

    def token(self) -> str:
        """The real clock's."""
        return self._inner.token()


def faulty_storage(storage: DiskStorage, faults: Faults) -> Storage:
    """The storage, with a faulty disk between if a fault strikes there."""
    if not faults.at("journal.write", "journal.written", "journal.fsync"):
        return storage
    faulty: Storage = FaultyStorage(storage, faults)  # every other operation by delegation
    return faulty


def faulty_clock(clock: Clock, faults: Faults) -> Clock:
    """The clock, with a skewed one around it if a fault strikes there."""
    return SkewedClock(clock, faults) if faults.at("clock") else clock
