"""The logical state of all bands: which virtual ids are live, how many units each band holds, and the step digest.

Owns what the deciding chain and the ranks' mirrors have in common, so that the two can only differ by what they are
told. Must never decide whether a demand fits, and never know a physical unit.

Invariants: an owner page or state slot is live exactly between a take and a free that name it; a window band's unit is
bound to a live owner page and is released before, or in the same op as, that page; `counts` equal the live ids; every
method that changes something has checked all of it first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from allocator.checks import Checks, some
from allocator.columns import Int32s
from allocator.digest import START, advance
from allocator.geometry import Geometry
from allocator.logical.uses import Columns, UseKind, Uses
from allocator.logical.virtual_ids import VirtualIds
from allocator.ops import (
    Backup,
    CopyState,
    Fix,
    Flush,
    Free,
    Hold,
    Load,
    Op,
    Rebind,
    Send,
    Take,
    UseOp,
    canonical_bytes,
)
from allocator.parts import ascends, op_columns, pair_columns, same, slot_columns

OptionalIds = Int32s | None
Bools = NDArray[np.bool_]

NO_IDS: Int32s = np.empty(0, dtype=np.int32)
NO_IDS.flags.writeable = False


def use_kind(op: UseOp) -> UseKind:
    """The kind of use that an op begins: a publication lends, unless it ends a hold."""
    if isinstance(op, Backup):
        return "backup"
    if isinstance(op, Load):
        return "load"
    if isinstance(op, Hold):
        return "hold"
    return "send" if isinstance(op, Send) else "lend"


class LogicalBands:
    """Live ids and counts per band, in chain order; validates and applies ops; keeps the chained logical digest."""

    __slots__ = ("_checks", "counts", "digest", "kinds", "names", "owner", "pages", "seq", "slots", "uses", "windows")

    def __init__(self, geometry: Geometry, checks: Checks) -> None:
        bands = geometry.stages[0].bands
        self._checks = checks
        self.kinds = tuple(band.kind for band in bands)
        self.names = tuple(band.name for band in bands)
        self.owner = len(bands) - 1
        self.counts = [0] * len(bands)
        self.pages = VirtualIds("page", geometry.virtual_pages, checks)
        self.slots = VirtualIds("slot", geometry.virtual_slots, checks)
        # Per window band, whether each owner page has a unit of it.
        self.windows: dict[int, Bools] = {
            b: np.full(geometry.virtual_pages + 1, False) for b, k in enumerate(self.kinds) if k == "window"
        }
        sizes = [geometry.virtual_slots + 1 if k == "state" else geometry.virtual_pages + 1 for k in self.kinds]
        self.uses = Uses(sizes, self.names, checks)
        self.seq = 0
        self.digest = START

    # --- minting: the deciding chain only ------------------------------------------------------------------------

    def mint(
        self, demand: Sequence[int], bound: Sequence[OptionalIds] | None, onto: Sequence[OptionalIds] | None
    ) -> tuple[Int32s, ...]:
        """Takes the lowest free ids for a checked demand that fits; ids per band, ascending int32.

        A window band binds units to pages minted here, all of them or those whose indexes `bound` gives (ascending,
        among the minted ones), and to the live pages that `onto` gives.
        """
        wanted = demand[self.owner]
        pages = self.pages.mint(wanted) if wanted else NO_IDS
        out: list[Int32s] = []
        for band, kind in enumerate(self.kinds):
            ids = pages
            wanted = demand[band]
            if kind == "state":
                ids = self.slots.mint(wanted) if wanted else NO_IDS
            elif kind == "window":
                chosen = bound[band] if bound is not None else None
                older = onto[band] if onto is not None else None
                ids = NO_IDS if not wanted else pages if chosen is None else pages[chosen]
                if older is not None and older.size:
                    ids = np.concatenate((ids, older))
                    ids.sort()
                assert ids.size == wanted, "a window's demand must equal the pages it binds"
                self.windows[band][ids] = True
            self.counts[band] += ids.size
            out.append(ids)
        assert self.counts[self.owner] == self.pages.live
        return tuple(out)

    # --- explicit ids: both sides --------------------------------------------------------------------------------

    def apply(self, op: Op) -> None:
        """Applies an op with explicit ids; raises InvariantBroken, with nothing changed, where it does not hold."""
        if isinstance(op, Flush):
            if op.moves_max < 0:
                self._checks.broken("op.canonical", f"a flush of {op.moves_max} moves")
        elif isinstance(op, Rebind):
            self.check_rebind(op.band, *(pairs := pair_columns(op, self._checks)))
            self.rebind(op.band, *pairs)
        elif isinstance(op, CopyState):
            self.check_copy(op.band, *pair_columns(op, self._checks))
        elif isinstance(op, Fix):
            self.uses.check_fix(op.use)
            self.uses.fix(op.use)
        else:
            columns = op_columns(op.parts, len(self.kinds), self._checks)
            if isinstance(op, Take):
                self._check_take(columns)
                for band, ids in columns:
                    self._bind(band, ids)
            elif isinstance(op, Free):
                self.check_free(columns)
                self._check_unkept(columns)
                self.release(columns)
            else:
                if isinstance(op, Backup | Load):
                    slot_columns(columns, op.slots, self._checks)
                self.check_use(op, columns)
                self.uses.begin(use_kind(op), op.use, columns)

    def end_use(self, use: int) -> None:
        """An open use is over; raises InvariantBroken when it is not open."""
        self.uses.check_open(use)
        self.uses.end(use)

    def check_free(self, columns: Columns, quarantined: dict[int, Bools] | None = None) -> None:
        """Every id is live in its band and not held, and no owner page would leave a window's unit behind.

        `quarantined` are window units that wait for a release and may stay behind.
        """
        released: dict[int, Int32s] = {}
        for band, ids in columns:
            if band in self.windows:
                held = self._window_holds(band, ids)
                if np.count_nonzero(held) < ids.size:
                    detail = f"band {self.names[band]}: ids {some(ids[~held])} hold no unit: a repeated free"
                    self._checks.broken("band.free_of_bound_unit", detail)
                released[band] = ids
            elif band == self.owner:
                self.pages.check_release(ids)
                self._check_windows_released(ids, released, quarantined or {})
            else:
                self.slots.check_release(ids)
        self.uses.check_unheld(columns, "a free", "band.free_outside_reservation")

    def release(self, columns: Columns) -> None:
        """Frees checked ids."""
        for band, ids in columns:
            if band in self.windows:
                self.windows[band][ids] = False
            else:
                (self.pages if band == self.owner else self.slots).release(ids)
            self.counts[band] -= ids.size
            assert self.counts[band] >= 0

    def check_onto(self, band: int, ids: Int32s) -> None:
        """A window band can bind units to these live owner pages (ascending)."""
        if band not in self.windows:
            self._checks.broken("chain.window_segment_bound", f"band {self.names[band]} is no window: it mints ids")
        held = self._window_holds(band, ids)
        if np.count_nonzero(held):
            detail = f"band {self.names[band]}: ids {some(ids[held])} hold a unit already"
            self._checks.broken("band.take_of_unbound_id", detail)
        if not self.pages.are_live(ids):
            detail = f"band {self.names[band]}: of ids {some(ids)} some are no page of the owner's"
            self._checks.broken("chain.window_segment_bound", detail)

    def check_use(self, op: UseOp, columns: Columns) -> None:
        """The use is new and names live units.

        Who writes them writes none that a peer knows or waits for; who reads them reads none that a peer writes.
        """
        kind = use_kind(op)
        what = f"{'publication' if kind == 'lend' else kind} {op.use}"
        if not columns:
            self._checks.broken("op.canonical", f"{what} names no unit")
        for band, ids in columns:
            dead = ~self.live_mask(band, ids)
            if np.count_nonzero(dead):
                detail = f"{what}: {self.names[band]} ids {some(ids[dead])} are not live"
                self._checks.broken("use.names_live_units", detail)
        if kind == "lend":
            self.uses.check_publish(op.use, columns)
            return
        self.uses.check_new(op.use)
        if kind in ("hold", "load"):
            self.uses.check_writable(columns, what)
        else:
            self.uses.check_readable(columns, what)

    def check_rebind(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Sources (ascending) hold a unit of this window band that nobody writes; targets are live and hold none."""
        name = "band.rebind_of_bound_unit"
        if band not in self.windows:
            self._checks.broken(name, f"band {band} is no window band")
        if not ascends(sources) or not ascends(np.sort(targets)):
            self._checks.broken("op.canonical", f"a rebind of ids {some(sources)} to {some(targets)}")
        holds = self._window_holds(band, sources)
        taken = self._window_holds(band, targets) | ~self.live_mask(self.owner, targets)
        if np.count_nonzero(holds) < sources.size or np.count_nonzero(taken):
            detail = f"ids {some(sources[~holds])} hold no unit, pages {some(targets[taken])} hold one or are free"
            self._checks.broken(name, f"band {self.names[band]}: {detail}")
        self.uses.check_unheld([(band, sources)], "a rebind", "band.write_of_fixed_unit")

    def rebind(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Moves checked units of a window band to other pages."""
        self.windows[band][sources] = False
        self.windows[band][targets] = True
        self.uses.rename(band, sources, targets)

    def check_copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """All slots are live, targets ascend, none is a source, none is a peer's to write, no source is received."""
        if not 0 <= band < len(self.kinds) or self.kinds[band] != "state":
            self._checks.broken("op.canonical", f"a state copy in band {band}, which holds no state")
        if not ascends(targets) or np.isin(targets, sources).any():
            self._checks.broken("op.canonical", f"a state copy of slots {some(sources)} to {some(targets)}")
        for ids in (sources, targets):
            dead = ~self.live_mask(band, ids)
            if np.count_nonzero(dead):
                self._checks.broken("use.names_live_units", f"a state copy: slots {some(ids[dead])} are not live")
        self.uses.check_writable([(band, targets)], "a state copy")
        self.uses.check_readable([(band, sources)], "a state copy")

    def live_mask(self, band: int, ids: Int32s) -> Bools:
        """For each id, in any order, whether it is live in its band; ids outside the space are not."""
        if band in self.windows:
            column = self.windows[band]
            inside = (ids > 0) & (ids < column.size)
            return inside & column[np.where(inside, ids, 0)]
        return (self.pages if band == self.owner else self.slots).live_mask(ids)

    def live_ids(self, band: int) -> Int32s:
        """Live ids of a band, ascending: for idle checks and tests."""
        if band in self.windows:
            return self.windows[band].nonzero()[0].astype(np.int32)
        return (self.pages if band == self.owner else self.slots).live_ids()

    # --- digest --------------------------------------------------------------------------------------------------

    def end_step(self, seq: int, ops: list[Op], released: Sequence[int]) -> bytes:
        """The chained digest after step `seq`: over seq, ops, live units per band, the id spaces' heads, releases."""
        if seq != self.seq + 1:
            self._checks.broken("chain.step_order", f"step {seq} follows step {self.seq}; seq must be dense")
        self.seq = seq
        ended = struct.pack(f"<{len(released)}q", *released)
        self.digest = advance(self.digest, struct.pack("<q", seq) + canonical_bytes(ops) + self.heads() + ended)
        return self.digest

    def heads(self) -> bytes:
        """Live units per band, then minted count and highest id of each id space, as int64."""
        pages, slots = self.pages, self.slots
        numbers = (*self.counts, pages.minted, pages.highest, slots.minted, slots.highest)
        return struct.pack(f"<{len(numbers)}q", *numbers)

    # --- inside --------------------------------------------------------------------------------------------------

    def _check_take(self, columns: Columns) -> None:
        if not columns:
            self._checks.broken("op.canonical", "a take without parts")
        minted = columns[-1][1] if columns[-1][0] == self.owner else NO_IDS
        for band, ids in columns:
            if band not in self.windows:
                (self.pages if band == self.owner else self.slots).check_claim(ids)
                continue
            if same(ids, minted):  # a unit of every page that the op mints
                self._check_fresh(band, ids)
                continue
            if minted.size:
                at = np.minimum(minted.searchsorted(ids), minted.size - 1)
                fresh = minted[at] == ids
                self._check_fresh(band, ids[fresh])
                ids = ids[~fresh]
            if ids.size:
                self.check_onto(band, ids)

    def _check_fresh(self, band: int, ids: Int32s) -> None:
        if ids.size and np.count_nonzero(held := self._window_holds(band, ids)):
            detail = f"band {self.names[band]}: ids {some(ids[held])} hold a unit already"
            self._checks.broken("band.take_of_unbound_id", detail)

    def _check_unkept(self, columns: Columns) -> None:
        for band, ids in columns:
            kept = self.uses.kept(band, ids)
            if kept is not None and np.count_nonzero(kept):
                detail = f"{self.names[band]} ids {some(ids[kept])} are published or sent: they stay until the release"
                self._checks.broken("band.free_of_fixed_unit", detail)

    def _bind(self, band: int, ids: Int32s) -> None:
        if band in self.windows:
            self.windows[band][ids] = True
        else:
            (self.pages if band == self.owner else self.slots).claim(ids)
        self.counts[band] += ids.size

    def _window_holds(self, band: int, ids: Int32s) -> Bools:
        column = self.windows[band]
        if np.count_nonzero((ids < 1) | (ids >= column.size)):
            detail = f"band {self.names[band]}: ids {some(ids)} lie outside 1..{column.size - 1}"
            self._checks.broken("chain.window_segment_bound", detail)
        return column[ids]

    def _check_windows_released(self, ids: Int32s, released: dict[int, Int32s], quarantined: dict[int, Bools]) -> None:
        for band, column in self.windows.items():
            kept = ids[column[ids]]
            going = released.get(band)
            if kept.size and going is not None:
                if same(kept, going):
                    continue  # a finish names just the window units of its pages
                at = np.minimum(going.searchsorted(kept), going.size - 1)
                kept = kept[going[at] != kept]
            if kept.size and band in quarantined:
                kept = kept[~quarantined[band][kept]]
            if kept.size:
                detail = f"pages {some(kept)} still hold units of band {self.names[band]}"
                self._checks.broken("chain.window_segment_released", detail)
