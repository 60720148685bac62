"""The logical state of all bands: which virtual ids are live, how many units each band holds, and the step digest.

Owns what the deciding chain and the ranks' mirrors have in common, so that the two can only differ by what they are
told. Must never decide whether a demand fits, and never know a physical unit.

Invariants: an owner page or state slot is live exactly between a take and a free that name it; a window band's unit is
bound to a live owner page and is released before, or in the same op as, that page; `counts` equal the live ids.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from allocator.checks import Checks, some
from allocator.columns import Int32s
from allocator.digest import START, advance
from allocator.geometry import Geometry
from allocator.logical.virtual_ids import VirtualIds
from allocator.ops import Flush, Op, Take, canonical_bytes
from allocator.parts import op_columns

OptionalIds = Int32s | None


class LogicalBands:
    """Live ids and counts per band, in chain order; validates and applies ops; keeps the chained logical digest."""

    __slots__ = ("_checks", "_windows", "counts", "digest", "kinds", "names", "owner", "pages", "seq", "slots")

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
        self._windows = {
            b: np.zeros(geometry.virtual_pages + 1, dtype=np.bool_) for b, k in enumerate(self.kinds) if k == "window"
        }
        self.seq = 0
        self.digest = START

    # --- minting: the deciding chain only ------------------------------------------------------------------------

    def mint(self, demand: Sequence[int], bound: Sequence[OptionalIds] | None) -> tuple[Int32s, ...]:
        """Takes the lowest free ids for a demand that fits; ids per band, ascending int32.

        A window band binds its units to pages minted here: to all of them, or to those whose indexes (ascending,
        among the minted ones) `bound` gives for that band.
        """
        pages = self.pages.mint(demand[self.owner]) if demand[self.owner] else np.empty(0, dtype=np.int32)
        out: list[Int32s] = []
        for band, kind in enumerate(self.kinds):
            ids = pages
            if kind == "state":
                ids = self.slots.mint(demand[band]) if demand[band] else np.empty(0, dtype=np.int32)
            elif kind == "window":
                chosen = bound[band] if bound is not None else None
                ids = pages[:0] if not demand[band] else pages if chosen is None else pages[chosen]
                assert ids.size == demand[band], "a window's demand must equal the pages it binds"
                self._windows[band][ids] = True
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
            return
        columns = op_columns(op.parts, len(self.kinds), self._checks)
        if isinstance(op, Take):
            self._check_take(columns)
            for band, ids in columns:
                self._bind(band, ids)
        else:
            self.check_free(columns)
            self.release(columns)

    def check_free(self, columns: Sequence[tuple[int, Int32s]]) -> None:
        """Every id is live in its band, and no owner page would leave a window's unit behind."""
        released = {band: ids for band, ids in columns if band in self._windows}
        for band, ids in columns:
            if band in self._windows:
                held = self._window_holds(band, ids)
                if not held.all():
                    detail = f"band {self.names[band]}: ids {some(ids[~held])} hold no unit: a repeated free"
                    self._checks.broken("band.free_of_bound_unit", detail)
            elif band == self.owner:
                self.pages.check_release(ids)
                self._check_windows_released(ids, released)
            else:
                self.slots.check_release(ids)

    def release(self, columns: Sequence[tuple[int, Int32s]]) -> None:
        """Frees checked ids."""
        for band, ids in columns:
            if band in self._windows:
                self._windows[band][ids] = False
            else:
                (self.pages if band == self.owner else self.slots).release(ids)
            self.counts[band] -= ids.size
            assert self.counts[band] >= 0

    def live_ids(self, band: int) -> Int32s:
        """Live ids of a band, ascending: for idle checks and tests."""
        if band in self._windows:
            return self._windows[band].nonzero()[0].astype(np.int32)
        return (self.pages if band == self.owner else self.slots).live_ids()

    # --- digest --------------------------------------------------------------------------------------------------

    def end_step(self, seq: int, ops: list[Op]) -> bytes:
        """The chained digest after step `seq`: over seq, ops, live units per band and the id spaces' heads."""
        if seq != self.seq + 1:
            self._checks.broken("chain.step_order", f"step {seq} follows step {self.seq}; seq must be dense")
        self.seq = seq
        self.digest = advance(self.digest, struct.pack("<q", seq) + canonical_bytes(ops) + self.heads())
        return self.digest

    def heads(self) -> bytes:
        """Live units per band, then minted count and highest id of each id space, as int64."""
        pages, slots = self.pages, self.slots
        numbers = (*self.counts, pages.minted, pages.highest, slots.minted, slots.highest)
        return struct.pack(f"<{len(numbers)}q", *numbers)

    # --- inside --------------------------------------------------------------------------------------------------

    def _check_take(self, columns: list[tuple[int, Int32s]]) -> None:
        minted = next((ids for band, ids in columns if band == self.owner), None)
        for band, ids in columns:
            if band not in self._windows:
                (self.pages if band == self.owner else self.slots).check_claim(ids)
                continue
            held = self._window_holds(band, ids)
            if held.any():
                detail = f"band {self.names[band]}: ids {some(ids[held])} hold a unit already"
                self._checks.broken("band.take_of_unbound_id", detail)
            fresh = np.isin(ids, minted) if minted is not None else np.zeros(ids.size, dtype=np.bool_)
            if not self.pages.are_live(ids[~fresh]):
                detail = f"band {self.names[band]}: of ids {some(ids)} some are no page of the owner's"
                self._checks.broken("chain.window_segment_bound", detail)

    def _bind(self, band: int, ids: Int32s) -> None:
        if band in self._windows:
            self._windows[band][ids] = True
        else:
            (self.pages if band == self.owner else self.slots).claim(ids)
        self.counts[band] += ids.size

    def _window_holds(self, band: int, ids: Int32s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        column = self._windows[band]
        if ids[0] < 1 or ids[-1] >= column.size:
            detail = f"band {self.names[band]}: ids {some(ids)} lie outside 1..{column.size - 1}"
            self._checks.broken("chain.window_segment_bound", detail)
        return column[ids]

    def _check_windows_released(self, ids: Int32s, released: dict[int, Int32s]) -> None:
        for band, column in self._windows.items():
            kept = column[ids]
            if band in released:
                kept = kept & ~np.isin(ids, released[band])
            if kept.any():
                detail = f"pages {some(ids[kept])} still hold units of band {self.names[band]}"
                self._checks.broken("chain.window_segment_released", detail)
