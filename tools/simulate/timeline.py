"""Timeline: the memory of every band over simulated time, in as many buckets as a plot can show.

Owns the buckets. Must never grow with the length of a run: when time runs past the last bucket, two become one.
"""

from __future__ import annotations

import numpy as np

from allocator.capacity import Demand
from allocator.columns import Int64s

BUCKETS = 512
FIRST_WIDTH_NS = 50_000_000


class Timeline:
    """Units per band, live and of those idle, at the last moment of each of `BUCKETS` stretches of `width_ns`.

    -1: nothing happened. Idle is what only the cache holds. `peak` is the most that was ever live, `peak_busy` the most
    of it that was not idle.
    """

    def __init__(self, bands: int) -> None:
        self.width_ns = FIRST_WIDTH_NS
        self.live = np.full((BUCKETS, bands), -1, np.int64)
        self.idle = np.full((BUCKETS, bands), -1, np.int64)
        self.peak = np.zeros(bands, np.int64)
        self.peak_busy = np.zeros(bands, np.int64)

    def add(self, now_ns: int, live: Demand, idle: Demand) -> None:
        """What is held now; time never runs backwards."""
        bucket = now_ns // self.width_ns
        while bucket >= BUCKETS:
            self._halve()
            bucket = now_ns // self.width_ns
        units, spare = np.array(live, np.int64), np.array(idle, np.int64)
        self.live[bucket], self.idle[bucket] = units, spare
        np.maximum(self.peak, units, out=self.peak)
        np.maximum(self.peak_busy, units - spare, out=self.peak_busy)

    def filled(self) -> tuple[Int64s, Int64s]:
        """Live and idle units [bucket, band] up to the last one with anything; gaps hold what was there before."""
        some = np.flatnonzero(self.live[:, 0] >= 0)
        if not len(some):
            return self.live[:0], self.idle[:0]
        at = np.arange(int(some[-1]) + 1)
        source = some[np.maximum(np.searchsorted(some, at, side="right") - 1, 0)]
        return self.live[source], self.idle[source]

    def _halve(self) -> None:
        half = BUCKETS // 2
        for units in (self.live, self.idle):
            units[:half] = np.where(units[1::2] >= 0, units[1::2], units[0::2])
            units[half:] = -1
        self.width_ns *= 2
