"""A set of free small integers that hands out its lowest members first.

Owns the one structure behind virtual ids and holes. Must never cost more than a few numpy calls per operation, however
full or scattered the set is. Two parts: the `front`, a short sorted column of every member below `edge`, from which
takes are slices; and the `back`, all members from `edge` on as a boolean column in blocks with a count per block, from
which the front is refilled many at a time. Invariant: front and back are disjoint and together are the members.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int32s

SHIFT = 9
BLOCK = 1 << SHIFT
REFILL = 256
FRONT_MAX = 1024

_EMPTY = np.empty(0, dtype=np.int32)


class FreeSet:
    """Free members of [0, size). `count` is how many there are."""

    __slots__ = ("_back", "_blocks", "_edge", "_front", "_member", "count", "size")

    def __init__(self, size: int, filled: bool) -> None:
        self.size = size
        self.count = size if filled else 0
        self._member = np.full(size, filled, dtype=np.bool_)
        blocks = max(1, -(-size // BLOCK))
        self._back = np.full((blocks, BLOCK), False)  # `full` touches the memory now, and not while serving
        self._back.reshape(-1)[:size] = filled
        self._blocks = self._back.sum(axis=1, dtype=np.int64)
        self._front = _EMPTY
        self._edge = 0

    def take_lowest(self, k: int) -> Int32s:
        """Removes and returns the k lowest members, ascending (int32). The caller has asked `count` before."""
        assert 0 < k <= self.count
        if self._front.size < k:
            self._refill(k - self._front.size)
        ids = self._front[:k]
        self._front = self._front[k:]
        self._member[ids] = False
        self.count -= k
        assert self.count >= 0
        return ids

    def peek_lowest(self, k: int) -> Int32s:
        """The k lowest members, ascending (int32), which stay members."""
        assert 0 < k <= self.count
        if self._front.size < k:
            self._refill(k - self._front.size)
        return self._front[:k]

    def remove(self, ids: Int32s) -> None:
        """Removes members, named ascending, each once."""
        if ids.size == 0:
            return
        self._member[ids] = False
        self.count -= ids.size
        assert self.count >= 0, "more was removed from a free set than it held"
        split = int(ids.searchsorted(self._edge))
        if split:
            self._front = self._front[self._member[self._front]]
        if split < ids.size:
            far = ids[split:]
            self._back.reshape(-1)[far] = False
            self._blocks -= np.bincount(far >> SHIFT, minlength=self._blocks.size)

    def add(self, ids: Int32s) -> None:
        """Adds ids, named ascending; none is a member, and each is named once."""
        if ids.size == 0:
            return
        assert ids[0] <= ids[-1], "ids must ascend"
        self._member[ids] = True
        self.count += ids.size
        assert self.count <= self.size, "an id was added that is a member"
        if ids[-1] < self._edge:
            split = ids.size
        else:
            split = int(ids.searchsorted(self._edge))
            self._put_back(ids[split:])
        if split:
            front = np.concatenate((self._front, ids[:split]))
            front.sort()
            if front.size > FRONT_MAX:
                self._edge = int(front[REFILL])
                self._put_back(front[REFILL:])
                front = front[:REFILL].copy()
            self._front = front

    def contains(self, ids: Int32s) -> NDArray[np.bool_]:
        """For each id in [0, size), whether it is a member."""
        return self._member[ids]

    def members(self) -> Int32s:
        """All members, ascending: for checks and tests, not for a hot path."""
        return self._member.nonzero()[0].astype(np.int32)

    def check(self) -> bool:
        """Whether front and back are disjoint, ordered, and together the members."""
        back = self._back.reshape(-1)[: self.size].nonzero()[0]
        whole = np.concatenate((self._front, back))
        ordered = bool((self._front < self._edge).all()) and bool((back >= self._edge).all())
        counted = whole.size == self.count and bool((self._back.sum(axis=1) == self._blocks).all())
        return ordered and counted and bool(np.array_equal(whole, self.members()))

    def _put_back(self, ids: Int32s) -> None:
        low, high = int(ids[0]) >> SHIFT, int(ids[-1]) >> SHIFT
        self._back.reshape(-1)[ids] = True
        self._blocks[low : high + 1] += np.bincount((ids >> SHIFT) - low, minlength=high + 1 - low)

    def _refill(self, short: int) -> None:
        """Moves at least `short` of the lowest members of the back to the front."""
        holding = self._blocks.nonzero()[0]
        sizes = np.cumsum(self._blocks[holding])
        assert sizes.size
        assert int(sizes[-1]) >= short
        wanted = min(max(short, REFILL), int(sizes[-1]))
        holding = holding[: int(sizes.searchsorted(wanted)) + 1]
        inside = self._back[holding].reshape(-1).nonzero()[0][:wanted]
        ids = ((holding[inside >> SHIFT] << SHIFT) | (inside & (BLOCK - 1))).astype(np.int32)
        self._back.reshape(-1)[ids] = False
        self._blocks -= np.bincount(ids >> SHIFT, minlength=self._blocks.size)
        self._front = np.concatenate((self._front, ids))
        self._edge = int(ids[-1]) + 1
        assert self._edge <= self.size
