"""Virtual ids: the numbers by which everything outside a physical chain names a unit.

Owns one bounded id space (owner pages, or state slots). Must never know where a unit lies. Ids run from 1 to `limit`;
0 stands for the sink (pages) or the padding slot (state). Order: the lowest free ids are minted first, so two chains
fed the same takes and frees mint the same ids. Invariant: an id is free or live, never both, and never named twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from allocator.checks import Checks, some
from allocator.columns import Int32s
from allocator.free_set import FreeSet


class VirtualIds:
    """One id space. `live` ids are out; `minted` counts all ever taken and `highest` is the largest of them."""

    __slots__ = ("_checks", "_free", "highest", "limit", "live", "minted", "name")

    def __init__(self, name: str, limit: int, checks: Checks) -> None:
        if not 0 <= limit < 2**31 - 1:
            raise ValueError(f"{name}: the id limit must be in [0, 2**31 - 2], not {limit}")
        self.name = name
        self.limit = limit
        self._checks = checks
        self._free = FreeSet(limit + 1, filled=True)
        self._free.remove(np.zeros(1, dtype=np.int32))
        self.live = 0
        self.minted = 0
        self.highest = 0

    def mint(self, k: int) -> Int32s:
        """The k lowest free ids, ascending, now live. The caller has checked that so many are free."""
        assert 0 < k <= self._free.count
        ids = self._free.take_lowest(k)
        self._count(ids)
        return ids

    def check_claim(self, ids: Int32s) -> None:
        """Every id (strictly ascending) lies in the space and is free, else `band.take_of_unbound_id`."""
        self._check_range(ids, "band.take_of_unbound_id")
        free = self._free.contains(ids)
        if np.count_nonzero(free) < ids.size:
            self._checks.broken("band.take_of_unbound_id", f"{self.name} ids {some(ids[~free])} are live already")

    def claim(self, ids: Int32s) -> None:
        """Makes checked ids live that another chain minted."""
        assert ids.size <= self._free.count
        self._free.remove(ids)
        self._count(ids)

    def check_release(self, ids: Int32s) -> None:
        """Every id (strictly ascending) is live, else `band.free_of_bound_unit` names those that are not."""
        self._check_range(ids, "band.free_of_bound_unit")
        free = self._free.contains(ids)
        if np.count_nonzero(free):
            self._checks.broken(
                "band.free_of_bound_unit", f"{self.name} ids {some(ids[free])} are free already: a repeated free"
            )

    def release(self, ids: Int32s) -> None:
        """Returns checked ids to the space."""
        self._free.add(ids)
        self.live -= ids.size
        assert self.live >= 0
        assert self.live + self._free.count == self.limit, "ids are live or free"

    def are_live(self, ids: Int32s) -> bool:
        """Whether every id, already known to be in the space, is live."""
        return not np.count_nonzero(self._free.contains(ids))

    def live_mask(self, ids: Int32s) -> NDArray[np.bool_]:
        """For each id, in any order, whether it is live; ids outside the space are not."""
        inside = (ids > 0) & (ids <= self.limit)
        free: NDArray[np.bool_] = self._free.contains(np.where(inside, ids, 0))
        return inside & ~free

    def live_ids(self) -> Int32s:
        """All live ids, ascending: for idle checks and tests."""
        out = np.ones(self.limit + 1, dtype=np.bool_)
        out[self._free.members()] = False
        out[0] = False
        return out.nonzero()[0].astype(np.int32)

    def _count(self, ids: Int32s) -> None:
        self.live += ids.size
        self.minted += ids.size
        highest = int(ids[-1])
        if highest > self.highest:
            self.highest = highest
        assert self.live + self._free.count == self.limit, "ids are live or free"

    def _check_range(self, ids: Int32s, name: str) -> None:
        if ids[0] < 1 or ids[-1] > self.limit:
            outside = ids[(ids < 1) | (ids > self.limit)]
            self._checks.broken(name, f"{self.name} ids {some(outside)} lie outside 1..{self.limit}")
