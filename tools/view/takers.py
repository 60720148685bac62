"""Takers: which request took each id, and how many units of each are left behind, behind every step of a batch.

Owns the history within a batch: what was so behind its n-th step can be asked when all its steps are over. Must never
decide anything. Invariant: a history answers as columns would have that were followed step by step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int32s, Int64s
from tools.view.units import Mask

FIRST_REQUESTS = 1024  # columns by request number grow from here


class Takers:
    """The request that took each id of one kind (0: not known)."""

    def __init__(self, ids: int) -> None:
        self.now = np.zeros(ids, np.int32)
        self._before = np.zeros(ids, np.int32)  # in front of the batch
        self._log: list[tuple[int, Int32s, Int32s]] = []

    def put(self, step: int, ids: Int32s, takers: Int32s | int) -> None:
        """These ids have these takers behind the batch's step number `step`."""
        self.now[ids] = takers
        self._log.append((step, ids, self.now[ids]))

    def history(self, steps: int) -> History:
        """What was put in a batch of so many steps."""
        return History(self._before, *_joined(self._log), steps)

    def settle(self) -> None:
        """A batch begins here."""
        for _, ids, takers in self._log:
            self._before[ids] = takers
        self._log.clear()


class History:
    """Takers of ids behind each step of a batch."""

    def __init__(self, before: Int32s, at: Int64s, ids: Int32s, takers: Int32s, steps: int) -> None:
        self._before, self._steps = before, steps + 1  # a step that no chain could apply is behind the others
        keys = ids.astype(np.int64) * self._steps + at
        order = np.argsort(keys, kind="stable")  # of two in one step the later one holds
        self._keys, self._takers = keys[order], takers[order]

    def of(self, at: Int64s, ids: Int32s) -> Int32s:
        """The taker of each id behind the step that stands beside it."""
        found = self._before[ids]
        if self._keys.size:
            wanted = ids.astype(np.int64) * self._steps
            place = np.searchsorted(self._keys, wanted + at, "right") - 1
            put = (place >= 0) & (self._keys[place] >= wanted)
            found[put] = self._takers[place[put]]
        return found


class Held(NamedTuple):
    """Who began (`holds`) or ended to hold memory, in front of which step of the batch."""

    step: int
    request: int
    holds: bool


class Holding:
    """Which requests hold memory behind each step of a batch."""

    def __init__(self, changed: list[Held], active: Mask, steps: int) -> None:
        self._active, self._steps = active, steps
        columns = np.array(changed, np.int64).reshape(-1, len(Held._fields))
        keys = columns[:, 1] * (steps + 1) + columns[:, 0]
        order = np.argsort(keys, kind="stable")
        self.keys, self.holds = keys[order], columns[order, 2] != 0

    def key(self, at: Int64s, requests: Int32s) -> Int64s:
        """Where a request at a step stands among `keys`."""
        return requests.astype(np.int64) * (self._steps + 1) + at

    def of(self, at: Int64s, requests: Int32s) -> Mask:
        """Whether each request held memory behind the step that stands beside it."""
        found: Mask = self._active[requests]
        if self.keys.size:
            first = self.key(np.zeros_like(at), requests)
            place = np.searchsorted(self.keys, first + at, "right")
            before = np.maximum(place - 1, 0)
            told = (place > 0) & (self.keys[before] >= first)
            found[told] = self.holds[before[told]]
            behind = np.minimum(place, self.keys.size - 1)  # what a change ends was so before it
            later = ~told & (place < self.keys.size) & (self.keys[behind] <= first + self._steps)
            found[later] = ~self.holds[behind[later]]
        return found


class LeftBehind:
    """Live units of one band by their taker, and how many have one that does not hold memory any more."""

    def __init__(self) -> None:
        self.count = 0
        self._live_of = np.zeros(FIRST_REQUESTS, np.int64)

    def follow(self, came: tuple[Int64s, Int32s], left: tuple[Int64s, Int32s], holding: Holding, steps: int) -> Int64s:
        """`count` behind each step; `came` and `left` are steps and takers of units that became live, and ended."""
        at, takers = np.concatenate([came[0], left[0]]), np.concatenate([came[1], left[1]])
        sign = np.repeat(np.array([1, -1], np.int64), [came[0].size, left[0].size])
        self._grow(int(takers.max(initial=0)))
        change = np.zeros(steps, np.int64)
        idle = ~holding.of(at, takers)
        np.add.at(change, at[idle], sign[idle])
        self._turned(change, at, takers, sign, holding, steps)
        np.add.at(self._live_of, takers, sign)
        counts: Int64s = self.count + np.cumsum(change)
        self.count = int(counts[-1])
        return counts

    def _turned(self, change: Int64s, at: Int64s, takers: Int32s, sign: Int64s, holding: Holding, steps: int) -> None:
        """Units of those who begin or end to hold memory, as many as they have in front of that step."""
        requests, turned_at = np.divmod(holding.keys, steps + 1)
        known = (requests < self._live_of.size) & (turned_at < steps)  # what is behind the batch counts in the next
        requests, turned_at, holds = requests[known], turned_at[known], holding.holds[known]
        keys = holding.key(at, takers)
        order = np.argsort(keys, kind="stable")
        sums = np.concatenate([[0], np.cumsum(sign[order])])
        until = np.searchsorted(keys[order], requests * (steps + 1) + turned_at, "left")
        since = np.searchsorted(keys[order], requests * (steps + 1), "left")
        units = self._live_of[requests] + sums[until] - sums[since]
        np.add.at(change, turned_at, np.where(holds, -units, units))

    def _grow(self, most: int) -> None:
        if most >= self._live_of.size:
            self._live_of = np.concatenate([self._live_of, np.zeros(max(most, self._live_of.size), np.int64)])


def _joined(log: list[tuple[int, Int32s, Int32s]]) -> tuple[Int64s, Int32s, Int32s]:
    """Steps, ids and takers of a log."""
    if not log:
        none = np.zeros(0, np.int32)
        return none.astype(np.int64), none, none
    at, ids, takers = zip(*log, strict=True)
    steps: NDArray[np.int64] = np.repeat(np.array(at, np.int64), [some.size for some in ids])
    return steps, np.concatenate(ids), np.concatenate(takers)
