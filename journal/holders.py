"""Holders: which request has a row, and which had a virtual id last, followed from decisions and steps alone.

Owns the two columns. Must never decide anything: it serves to put a request's number to an op or a row. An id that the
prefix cache holds belongs to the last request that had it; one that no request's row ever had belongs to nobody.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from allocator.columns import Int32s, Int64s, i32
from allocator.geometry import Geometry
from allocator.ops import CopyState, Fix, Flush, Op, Rebind, Take
from daemon.core.outputs import Decided
from ipc.messages import Step

STEPS_KEPT = 64
GENERATIONS_KEPT = 8
NO_IDS: Int32s = np.zeros(0, np.int32)
NOBODY: Int64s = np.zeros(0, np.int64)


class Holders:
    """Of one epoch; `rows_max` rows."""

    def __init__(self, geometry: Geometry, rows_max: int) -> None:
        self._rows: Int64s = np.zeros(rows_max, np.int64)
        self._tenants: dict[tuple[int, int], int] = {}  # request by row and generation, of the newest few generations
        self._pages: Int64s = np.zeros(geometry.virtual_pages + 1, np.int64)
        self._slots: Int64s = np.zeros(geometry.virtual_slots + 1, np.int64)
        bands = geometry.stages[0].bands
        self._of = [self._slots if band.kind == "state" else self._pages for band in bands]
        self._ring: deque[tuple[int, list[Int64s]]] = deque(maxlen=STEPS_KEPT)

    def admitted(self, decided: Decided) -> None:
        """A request gets a row."""
        self.enter(decided.request, decided.numbers.get("row", -1), decided.numbers.get("generation", 0))

    def enter(self, request: int, row: int, generation: int, pages: Int32s = NO_IDS) -> None:
        """A request has a row, and these owner pages in its table."""
        if 0 <= row < len(self._rows):
            self._rows[row] = request
            self._tenants[row, generation] = request
            self._tenants.pop((row, generation - GENERATIONS_KEPT), None)
            self._pages[pages] = request

    def step(self, step: Step) -> None:
        """Note whom the ops of a step concern: frees, who had it; takes, whose table it enters."""
        before = [self._before(op) for op in step.ops]
        forward = step.forward
        if forward is not None:
            if forward.table_rows:
                self._note(self._pages, i32(forward.table_pages), i32(forward.table_rows))
            if forward.slots:
                self._note(self._slots, i32(forward.slots), i32(forward.rows))
        after = [self._holders(op) if isinstance(op, Take) else held for op, held in zip(step.ops, before, strict=True)]
        self._ring.append((step.seq, after))

    def of_op(self, seq: int, op: int) -> list[int]:
        """The requests that an op of one of the newest steps concerns, ascending."""
        for at, held in self._ring:
            if at == seq and 0 <= op < len(held):
                return _numbers(held[op])
        return []

    def of_rows(self, rows: Int32s, generations: Int32s) -> list[int]:
        """The requests that have or had these rows in these generations, in their order; 0 where it is not known."""
        return [self._tenants.get(key, 0) for key in zip(rows.tolist(), generations.tolist(), strict=True)]

    def of_row(self, row: int) -> list[int]:
        """The request that has a row, if that is known."""
        return [int(self._rows[row])] if 0 <= row < len(self._rows) and self._rows[row] else []

    def _before(self, op: Op) -> Int64s:
        """Who had the ids of an op; those of a take belong to nobody until a table has them, a copied state to whom
        it was copied from."""
        if isinstance(op, Take):
            for part in op.parts:
                if self._look(part.band, i32(part.ids)).size:
                    self._of[part.band][i32(part.ids)] = 0
            return NOBODY
        held = self._holders(op)
        if isinstance(op, CopyState):
            sources, targets = self._look(op.band, i32(op.sources)), i32(op.targets)
            if sources.size and sources.size == self._look(op.band, targets).size:
                self._of[op.band][targets] = sources
        return held

    def _note(self, held: Int64s, ids: Int32s, rows: Int32s) -> None:
        """Ids enter the tables of rows; a step that names what is not there is refused elsewhere."""
        fits = ids.size == rows.size and int(ids.min()) >= 0 and int(rows.min()) >= 0
        if fits and int(ids.max()) < len(held) and int(rows.max()) < len(self._rows):
            held[ids] = self._rows[rows]

    def _holders(self, op: Op) -> Int64s:
        if isinstance(op, Flush | Fix):
            return NOBODY
        if isinstance(op, Rebind | CopyState):
            return np.concatenate([self._look(op.band, i32(op.targets)), self._look(op.band, i32(op.sources))])
        found = [self._look(part.band, i32(part.ids)) for part in op.parts]
        return found[0] if len(found) == 1 else np.concatenate([NOBODY, *found])

    def _look(self, band: int, ids: Int32s) -> Int64s:
        if not 0 <= band < len(self._of):
            return NOBODY
        held = self._of[band]
        return held[ids] if not ids.size or 0 <= int(ids.min()) <= int(ids.max()) < len(held) else NOBODY


def _numbers(held: Int64s) -> list[int]:
    return [number for number in np.unique(held).tolist() if number]
