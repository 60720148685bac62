"""Uses: what is outside the forwards and touches units for a while, by virtual ids.

Owns which uses are open and what they do to the units that they name: a hold waits for a peer's rows; a publication
fixes units, to be read (it *lends*) or, when it ends a hold, to be written (it *receives*); a send keeps them from
being handed out again, and fixes them too once it cannot be waited for. Must never free a unit or know where one lies.
Host copies are only known to be open: the ranks order every later writer behind them.

Invariants: a use begins with a number above every earlier one and ends once; a unit is held by at most one use; nothing
but its peer writes a unit that is held or fixed, and nobody reads one that is received; `publications` counts, per
band, the open uses that fix units of it.
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

UseKind = Literal["backup", "load", "hold", "send", "fix", "lend", "receive"]
Mark = Literal["held", "sent", "fixed", "received"]

MARKS: dict[UseKind, tuple[Mark, ...]] = {
    "backup": (),
    "load": (),
    "hold": ("held",),
    "send": ("sent",),
    "fix": ("fixed",),
    "lend": ("fixed",),
    "receive": ("fixed", "received"),
}
"""What an open use of each kind makes of the units that it names."""


class Use(NamedTuple):
    """An open use; `columns` are the units that it marks, else empty."""

    kind: UseKind
    columns: Columns


class Marked:
    """How many open uses mark each id, per band; `uses` counts the marks of each band."""

    __slots__ = ("_sizes", "columns", "uses")

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self.uses = [0] * len(sizes)
        self.columns: list[NDArray[np.uint16] | None] = [None] * len(sizes)  # made when first needed

    def add(self, columns: Columns) -> None:
        """One more use marks these units."""
        for band, ids in columns:
            column = self.columns[band]
            if column is None:
                column = self.columns[band] = np.zeros(self._sizes[band], dtype=np.uint16)
            column[ids] += 1
            self.uses[band] += 1

    def remove(self, columns: Columns) -> None:
        """A use that marked these units is over."""
        for band, ids in columns:
            column = self.columns[band]
            assert column is not None
            column[ids] -= 1
            self.uses[band] -= 1
            assert self.uses[band] >= 0

    def mask(self, band: int, ids: Int32s) -> NDArray[np.bool_] | None:
        """For each id whether its unit is marked; None where nothing of the band is."""
        column = self.columns[band]
        return column[ids] > 0 if column is not None and self.uses[band] else None

    def rename(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Units go by other ids, which mark nothing yet."""
        column = self.columns[band]
        if column is not None:
            column[targets] = column[sources]
            column[sources] = 0


class Uses:
    """The open uses of one epoch, over id spaces of `sizes[band]` ids (0 included)."""

    __slots__ = ("_checks", "_marked", "_names", "_sizes", "highest", "open")

    def __init__(self, sizes: Sequence[int], names: Sequence[str], checks: Checks) -> None:
        self._checks = checks
        self._sizes = tuple(sizes)
        self._names = tuple(names)
        self.open: dict[int, Use] = {}
        self.highest = 0
        self._marked: dict[Mark, Marked] = {mark: Marked(sizes) for mark in ("held", "sent", "fixed", "received")}

    @property
    def any_fixed(self) -> bool:
        """Whether some unit is fixed."""
        return any(self._marked["fixed"].uses)

    @property
    def any_kept(self) -> bool:
        """Whether some unit must not be handed out again before a use is over."""
        return self.any_fixed or any(self._marked["sent"].uses)

    @property
    def publications(self) -> list[int]:
        """Per band, the open uses that fix units of it."""
        return self._marked["fixed"].uses

    # --- checks --------------------------------------------------------------------------------------------------

    def check_new(self, use: int) -> None:
        """A use that begins has a number above all earlier ones."""
        if use <= self.highest:
            self._checks.broken("use.once", f"use {use} begins after use {self.highest}: numbers only rise")

    def check_open(self, use: int) -> Use:
        """The open use of this number."""
        if use not in self.open:
            self._checks.broken("use.once", f"use {use} is not open: it never began, or it ended before")
        return self.open[use]

    def check_fix(self, use: int) -> None:
        """Only an open send is fixed, and only once."""
        kind = self.check_open(use).kind
        if kind != "send":
            self._checks.broken("use.once", f"use {use} is no send that could be fixed: it is a {kind}")

    def check_writable(self, columns: Columns, what: str) -> None:
        """Nothing but its peer writes a unit that is held or fixed."""
        self._check_unmarked("fixed", columns, what, "band.write_of_fixed_unit", "are published or fixed")
        self.check_unheld(columns, what, "band.write_of_fixed_unit")

    def check_unheld(self, columns: Columns, what: str, name: str) -> None:
        """No unit is reserved for a peer's rows."""
        self._check_unmarked("held", columns, what, name, "are held for a peer's rows")

    def check_readable(self, columns: Columns, what: str) -> None:
        """No unit is one that a peer may be writing."""
        detail = "are received: a peer may be writing them until the release"
        self._check_unmarked("received", columns, what, "use.reads_received_unit", detail)

    def check_publish(self, use: int, columns: Columns) -> None:
        """A publication is new, of units that no peer writes, or it is of exactly what its own hold holds."""
        what = f"publication {use}"
        mine = self.open.get(use)
        if mine is None or mine.kind != "hold":
            self.check_new(use)
            self.check_unheld(columns, what, "band.write_of_fixed_unit")
            self.check_readable(columns, what)
            return
        equal = len(mine.columns) == len(columns) and all(
            a == b and np.array_equal(x, y) for (a, x), (b, y) in zip(mine.columns, columns, strict=True)
        )
        if not equal:
            self._checks.broken("use.once", f"use {use} publishes other units than it holds")
        # A send that was open when the hold began may have been fixed since: its engine may still read the rows.
        self._check_unmarked("fixed", columns, what, "band.write_of_fixed_unit", "are fixed")

    # --- changes -------------------------------------------------------------------------------------------------

    def begin(self, kind: UseKind, use: int, columns: Columns) -> None:
        """A checked use begins; one that lends and names an open hold receives what that holds."""
        if kind == "lend" and use in self.open:
            self.end(use)
            kind = "receive"
        self._open(kind, use, columns)
        self.highest = max(self.highest, use)

    def fix(self, use: int) -> None:
        """The units of an open send are fixed from now on."""
        self._open("fix", use, self.end(use))

    def end(self, use: int) -> Columns:
        """An open use is over; the units that it marked."""
        kind, columns = self.open.pop(use)
        for mark in MARKS[kind]:
            self._marked[mark].remove(columns)
        return columns

    def rename(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Units of a window band go by other pages from now on, pair by pair."""
        kept = self.kept(band, sources)
        if kept is None or not np.count_nonzero(kept):
            return
        for marked in self._marked.values():
            marked.rename(band, sources, targets)
        for use, (kind, columns) in self.open.items():
            renamed = [(b, _renamed(ids, sources, targets) if b == band else ids) for b, ids in columns]
            self.open[use] = Use(kind, renamed)

    # --- questions -----------------------------------------------------------------------------------------------

    def kept(self, band: int, ids: Int32s) -> NDArray[np.bool_] | None:
        """For each id whether its unit is fixed or sent: freed, it waits. None where nothing of the band is."""
        fixed, sent = self._marked["fixed"].mask(band, ids), self._marked["sent"].mask(band, ids)
        return fixed if sent is None else sent if fixed is None else fixed | sent

    def content(self) -> list[tuple[int, str, list[tuple[int, bytes]]]]:
        """Every open use, by number: for digests."""
        return [
            (use, kind, [(band, ids.tobytes()) for band, ids in columns])
            for use, (kind, columns) in sorted(self.open.items())
        ]

    def check(self) -> None:
        """A recount: what is marked is what the open uses name, and nothing else."""
        for mark, marked in self._marked.items():
            fresh = Marked(self._sizes)
            for kind, columns in self.open.values():
                if mark in MARKS[kind]:
                    fresh.add(columns)
            for band, name in enumerate(self._names):
                empty = np.zeros(self._sizes[band], dtype=np.uint16)
                mine, counted = (empty if c is None else c for c in (marked.columns[band], fresh.columns[band]))
                if not np.array_equal(mine, counted) or marked.uses[band] != fresh.uses[band]:
                    self._checks.broken("use.once", f"band {name}: open uses and {mark} units differ")

    # --- inside --------------------------------------------------------------------------------------------------

    def _open(self, kind: UseKind, use: int, columns: Columns) -> None:
        for mark in MARKS[kind]:
            self._marked[mark].add(columns)
        self.open[use] = Use(kind, columns if MARKS[kind] else [])

    def _check_unmarked(self, mark: Mark, columns: Columns, what: str, name: str, detail: str) -> None:
        marked = self._marked[mark]
        for band, ids in columns:
            found = marked.mask(band, ids)
            if found is not None and np.count_nonzero(found):
                self._checks.broken(name, f"{what}: {self._names[band]} ids {some(ids[found])} {detail}")


def _renamed(ids: Int32s, sources: Int32s, targets: Int32s) -> Int32s:
    """The ids, ascending, with every source (ascending) replaced by its target."""
    at = np.minimum(sources.searchsorted(ids), sources.size - 1)
    return np.sort(np.where(sources[at] == ids, targets[at], ids))
