"""Clock: the only reader of time and entropy in the daemon.

Owns the mapping from the monotonic clock to nanoseconds since 1970, fixed once per process. Must never be read by
anything pure: the core receives its readings inside inputs. Invariant: `now_ns` never goes backwards, whatever happens
to the wall clock.
"""

from __future__ import annotations

import secrets
import time
from typing import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


class Clock(Protocol):
    """What the actors ask of time and chance."""

    def now_ns(self) -> int:
        """Nanoseconds since 1970, never going backwards."""

    def seed(self) -> int:
        """A sampling seed of 63 bits."""

    def token(self) -> str:
        """A secret of 128 bits in hexadecimal digits, also the name of a daemon's life."""


class SystemClock:
    """The machine's clock and the operating system's entropy."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """Nanoseconds since 1970 as of process start, advanced by the monotonic clock."""
        return self._offset_ns + time.monotonic_ns()

    def seed(self) -> int:
        """A sampling seed of 63 bits from the operating system."""
        return secrets.randbits(63)

    def token(self) -> str:
        """32 hexadecimal digits from the operating system."""
        return secrets.token_hex(16)
