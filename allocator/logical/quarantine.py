"""Quarantine: freed units that a transfer may still read or write, until that is proved to be over.

Owns which ids wait, per band. Must never end a wait by itself or by time. Invariants: a quarantined unit is live, has
no owner but the allocator, is published, sent or an owner page that keeps a quarantined window unit, and is freed once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from allocator.checks import Checks, some
from allocator.columns import Int32s
from allocator.logical.bands import LogicalBands
from allocator.logical.uses import Columns


class Quarantine:
    """Ids that their owner freed and the ranks have not heard of; `counts` per band, in chain order."""

    __slots__ = ("_checks", "_state", "counts", "waiting")

    def __init__(self, state: LogicalBands, checks: Checks) -> None:
        self._state = state
        self._checks = checks
        self.counts = [0] * len(state.kinds)
        # Per band, made when first needed: whether each id waits.
        self.waiting: dict[int, NDArray[np.bool_]] = {}

    def check_owned(self, columns: Columns, what: str, name: str) -> None:
        """No id waits in quarantine: what waits has no owner who could name it."""
        for band, ids in columns:
            if not self.counts[band]:
                continue
            column = self.waiting[band]
            inside = ids[(ids > 0) & (ids < column.size)]
            lost = inside[column[inside]]
            if lost.size:
                detail = f"{self._state.names[band]} ids {some(lost)} were freed and wait for a release"
                self._checks.broken(name, f"{what}: {detail}")

    def hold_back(self, columns: Columns) -> Columns:
        """Of ids that are freed and checked, those that can go now; the others wait from here on."""
        going: Columns = []
        for band, ids in columns:
            kept = self._kept(band, ids)
            stays = ids[kept]
            if stays.size:
                if band not in self.waiting:
                    size = (self._state.slots if self._state.kinds[band] == "state" else self._state.pages).limit + 1
                    self.waiting[band] = np.zeros(size, dtype=np.bool_)
                self.waiting[band][stays] = True
                self.counts[band] += stays.size
                ids = ids[~kept]
            if ids.size:
                going.append((band, ids))
        return going

    def release(self, ended: Columns) -> Columns:
        """Of the units of ended transfers (any order, repeats allowed), and of their pages, those that go now."""
        owner = self._state.owner
        candidates: dict[int, list[Int32s]] = {}
        for band, ids in ended:
            candidates.setdefault(band, []).append(ids)
        going: Columns = []
        for band in range(owner + 1):
            if band not in candidates or not self.counts[band]:
                continue
            ids = np.unique(np.concatenate(candidates[band]))
            ids = ids[self.waiting[band][ids]]
            ids = ids[~self._kept(band, ids)]
            if not ids.size:
                continue
            self.waiting[band][ids] = False
            self.counts[band] -= ids.size
            assert self.counts[band] >= 0
            going.append((band, ids))
            if self._state.kinds[band] == "window":
                candidates.setdefault(owner, []).append(ids)
        return going

    def ids(self, band: int) -> Int32s:
        """Ids that wait in a band, ascending."""
        if band not in self.waiting:
            return np.empty(0, dtype=np.int32)
        return self.waiting[band].nonzero()[0].astype(np.int32)

    def check(self) -> None:
        """A recount: what waits is live, kept, and counted."""
        for band in self.waiting:
            ids = self.ids(band)
            same = ids.size == self.counts[band] and bool(self._state.live_mask(band, ids).all())
            if not same or not self._kept(band, ids).all():
                name = self._state.names[band]
                self._checks.broken("chain.byte_conservation", f"band {name}: quarantine and its {ids.size} ids differ")

    def _kept(self, band: int, ids: Int32s) -> NDArray[np.bool_]:
        """For each id whether its unit is published or sent, or its page keeps a window's unit that waits."""
        used = self._state.uses.kept(band, ids)
        kept = np.zeros(ids.size, dtype=np.bool_) if used is None else used
        if band == self._state.owner:
            for window, waiting in self.waiting.items():
                if self._state.kinds[window] == "window":
                    kept |= waiting[ids]
        return kept
