"""A tenant that holds memory and gives it back in the same step stream, so that what is live must move.

Owns units of its own, taken through the core's memory like anybody's. Must never take what the core needs to go on: it
leaves room for the longest live request, and lets everything go when the core stands still or nothing is live.
"""

from __future__ import annotations

import random

import numpy as np

from allocator.capacity import Demand
from allocator.columns import Int32s
from daemon.core.memory import plus
from daemon.core.state import CoreState

ACTS = ("pages", "owner", "slots", "release", "release", "windows")


class Balloon:
    """Pages with windows, pages without, and state slots: `churn` does one random thing with them."""

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self.takes = 0
        self._pages: list[int] = []
        self._bound: set[int] = set()  # of those, the ones whose window units it still has
        self._slots: list[int] = []

    @property
    def held(self) -> int:
        """Pages and slots it holds."""
        return len(self._pages) + len(self._slots)

    def churn(self, rng: random.Random) -> None:
        """Take, or give back, a random amount of a random kind; a take may cost the cache what nobody reads."""
        memory = self._core.memory
        assert memory is not None, "only an epoch has memory"
        act = rng.choice(ACTS)
        if act == "release":
            keep = rng.choice([0.0, 0.5, 0.8])
            self._release([page for page in self._pages if rng.random() >= keep], keep == 0.0)
        elif act == "windows":
            self._release_windows({page for page in sorted(self._bound) if rng.random() < 0.6})
        elif act == "slots":
            self._take(memory.demand(0, 1) if memory.state >= 0 else memory.none, rng)
        else:
            alone = (*memory.none[:-1], 1)
            self._take(memory.demand(1) if act == "pages" else alone, rng)

    def settle_before_tick(self) -> None:
        """Let everything go when nothing lives, nothing moves, or the longest request would not fit alone."""
        core = self._core
        if not self.held or core.memory is None:
            return
        stands = not core.live or core.blocked or core.stalled_ticks > 0
        if stands or (core.holding <= 1 and core.memory.refusal(self._reserve()) is not None):
            self.deflate()

    def deflate(self) -> None:
        """Give everything back."""
        self._release(list(self._pages), slots=True)

    def _reserve(self) -> Demand:
        memory = self._core.memory
        assert memory is not None, "only an epoch has memory"
        longest = max((r.prompt_tokens + r.max_output for r in self._core.requests.values()), default=1)
        return memory.ceiling(longest)

    def _take(self, per: Demand, rng: random.Random) -> None:
        memory = self._core.memory
        assert memory is not None, "only an epoch has memory"
        reserve = self._reserve() if self._core.holding <= 1 else memory.demand(2)
        if not any(per) or memory.refusal(plus(reserve, per)) is not None:
            return
        low, high = 1, memory.geometry.virtual_pages + memory.geometry.virtual_slots
        while low < high:
            middle = (low + high + 1) // 2
            fits = memory.refusal(plus(reserve, tuple(middle * units for units in per))) is None
            low, high = (middle, high) if fits else (low, middle - 1)
        count = rng.choice([low, max(1, low - 1), rng.randint(1, low)])
        ids = memory.take(tuple(count * units for units in per))
        self.takes += 1
        if per[-1]:
            taken = ids[-1].tolist()
            self._pages += taken
            self._bound |= set(taken) if memory.windows and per[memory.windows[0][0]] else set()
        else:
            self._slots += ids[memory.state].tolist()

    def _release(self, pages: list[int], slots: bool) -> None:
        memory = self._core.memory
        assert memory is not None, "only an epoch has memory"
        gone = set(pages)
        parts: list[Int32s | None] = [None] * len(memory.none)
        for band, _ in memory.windows:
            parts[band] = np.array(sorted(gone & self._bound), dtype=np.int32)
        parts[-1] = np.array(sorted(gone), dtype=np.int32)
        if slots and memory.state >= 0:
            parts[memory.state] = np.array(sorted(self._slots), dtype=np.int32)
            self._slots = []
        self._pages = [page for page in self._pages if page not in gone]
        self._bound -= gone
        memory.give_back(parts)
        memory.settle()

    def _release_windows(self, pages: set[int]) -> None:
        memory = self._core.memory
        assert memory is not None, "only an epoch has memory"
        parts: list[Int32s | None] = [None] * len(memory.none)
        for band, _ in memory.windows:
            parts[band] = np.array(sorted(pages), dtype=np.int32)
        self._bound -= pages
        memory.give_back(parts)
        memory.settle()
