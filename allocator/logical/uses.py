"""Uses: what is outside the forwards and touches units for a while, by virtual ids.

Owns which uses are open, which units they hold for a peer's rows, and which units a peer may know the addresses of
(published: fixed). Must never free a unit or know where one lies. Host copies and sends are only known to be open:
whoever frees their units may do so at once, because the ranks order every later writer behind them.

Invariants: a use begins with a number above every earlier one and ends once; a unit is held by at most one use, and not
held and published at once; `publications` counts, per band, the open publications that name units of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.checks import Checks, some
from allocator.columns import Int32s

Columns = list[tuple[int, Int32s]]
"""(band, ids ascending) of each part, in chain order."""

UseKind = Literal["backup", "load", "hold", "send", "publish"]


class Use(NamedTuple):
    """An open use; `columns` are the units that it holds or has published, else empty."""

    kind: UseKind
    columns: Columns


class Uses:
    """The open uses of one epoch, over id spaces of `sizes[band]` ids (0 included)."""

    __slots__ = ("_checks", "_held", "_names", "_published", "_sizes", "highest", "holds", "open", "publications")

    def __init__(self, sizes: Sequence[int], names: Sequence[str], checks: Checks) -> None:
        self._checks = checks
        self._sizes = tuple(sizes)
        self._names = tuple(names)
        self.open: dict[int, Use] = {}
        self.highest = 0
        self.holds = 0
        self.publications = [0] * len(sizes)
        # Per band, made when first needed: whether each id is held, and how many publications name it.
        self._held: list[NDArray[np.bool_] | None] = [None] * len(sizes)
        self._published: list[NDArray[np.uint16] | None] = [None] * len(sizes)

    @property
    def any_published(self) -> bool:
        """Whether some unit is fixed."""
        return any(self.publications)

    def check_new(self, use: int) -> None:
        """A use that begins has a number above all earlier ones."""
        if use <= self.highest:
            self._checks.broken("use.once", f"use {use} begins after use {self.highest}: numbers only rise")

    def check_open(self, use: int) -> Use:
        """The open use of this number."""
        if use not in self.open:
            self._checks.broken("use.once", f"use {use} is not open: it never began, or it ended before")
        return self.open[use]

    def check_writable(self, columns: Columns, what: str) -> None:
        """Nothing but its peer writes a unit that is held or published."""
        for band, ids in columns:
            fixed = self.published(band, ids)
            if fixed is not None and np.count_nonzero(fixed):
                detail = f"{what}: {self._names[band]} ids {some(ids[fixed])} are published"
                self._checks.broken("band.write_of_fixed_unit", detail)
        self.check_unheld(columns, what, "band.write_of_fixed_unit")

    def check_unheld(self, columns: Columns, what: str, name: str) -> None:
        """No unit is reserved for a peer's rows."""
        if not self.holds:
            return
        for band, ids in columns:
            column = self._held[band]
            if column is not None and np.count_nonzero(column[ids]):
                detail = f"{what}: {self._names[band]} ids {some(ids[column[ids]])} are held for a peer's rows"
                self._checks.broken(name, detail)

    def check_publish(self, use: int, columns: Columns) -> None:
        """A publication is new, of units that nobody holds, or it is of exactly what its own hold holds."""
        mine = self.open.get(use)
        if mine is None or mine.kind != "hold":
            self.check_new(use)
            self.check_unheld(columns, f"publication {use}", "band.write_of_fixed_unit")
            return
        equal = len(mine.columns) == len(columns) and all(
            a == b and np.array_equal(x, y) for (a, x), (b, y) in zip(mine.columns, columns, strict=True)
        )
        if not equal:
            self._checks.broken("use.once", f"use {use} publishes other units than it holds")

    def begin(self, kind: UseKind, use: int, columns: Columns) -> None:
        """A checked use begins, or a hold becomes its publication."""
        if kind == "publish":
            self._drop_hold(use)
            for band, ids in columns:
                column = self._published[band]
                if column is None:
                    column = self._published[band] = np.zeros(self._sizes[band], dtype=np.uint16)
                column[ids] += 1
                self.publications[band] += 1
        elif kind == "hold":
            for band, ids in columns:
                held = self._held[band]
                if held is None:
                    held = self._held[band] = np.zeros(self._sizes[band], dtype=np.bool_)
                held[ids] = True
            self.holds += 1
        self.open[use] = Use(kind, columns if kind in ("hold", "publish") else [])
        self.highest = max(self.highest, use)

    def end(self, use: int) -> Columns:
        """An open use is over; the units that it had published."""
        kind, columns = self.open[use]
        if kind == "hold":
            self._drop_hold(use)
        del self.open[use]
        if kind != "publish":
            return []
        for band, ids in columns:
            column = self._published[band]
            assert column is not None
            column[ids] -= 1
            self.publications[band] -= 1
            assert self.publications[band] >= 0
        return columns

    def published(self, band: int, ids: Int32s) -> NDArray[np.bool_] | None:
        """For each id whether its unit is published; None where nothing of the band is."""
        column = self._published[band]
        if column is None or not self.publications[band]:
            return None
        return column[ids] > 0

    def rename(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Published units of a window band go by other pages from now on, pair by pair."""
        column = self._published[band]
        if column is None or not self.publications[band] or not np.count_nonzero(column[sources]):
            return
        column[targets] = column[sources]
        column[sources] = 0
        for use, (kind, columns) in self.open.items():
            if kind == "publish":
                renamed = [(b, _renamed(ids, sources, targets) if b == band else ids) for b, ids in columns]
                self.open[use] = Use(kind, renamed)

    def content(self) -> list[tuple[int, str, list[tuple[int, bytes]]]]:
        """Every open use, by number: for digests."""
        return [
            (use, kind, [(band, ids.tobytes()) for band, ids in columns])
            for use, (kind, columns) in sorted(self.open.items())
        ]

    def check(self) -> None:
        """A recount: what is held and published is what the open uses name, and nothing else."""
        for band, size in enumerate(self._sizes):
            published = np.zeros(size, dtype=np.uint16)
            held = np.zeros(size, dtype=np.uint16)
            publications = 0
            for kind, columns in self.open.values():
                for index, ids in columns:
                    if index == band:
                        (published if kind == "publish" else held)[ids] += 1
                        publications += kind == "publish"
            mine, holding = self._published[band], self._held[band]
            same = not published.any() if mine is None else np.array_equal(mine, published)
            same &= not held.any() if holding is None else np.array_equal(holding, held)
            if not same or publications != self.publications[band]:
                self._checks.broken("use.once", f"band {self._names[band]}: open uses and marked units differ")

    def _drop_hold(self, use: int) -> None:
        mine = self.open.get(use)
        if mine is None:
            return
        assert mine.kind == "hold"
        for band, ids in mine.columns:
            held = self._held[band]
            assert held is not None
            held[ids] = False
        self.holds -= 1


def _renamed(ids: Int32s, sources: Int32s, targets: Int32s) -> Int32s:
    """The ids, ascending, with every source (ascending) replaced by its target."""
    at = np.minimum(sources.searchsorted(ids), sources.size - 1)
    return np.sort(np.where(sources[at] == ids, targets[at], ids))
