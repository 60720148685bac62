"""Rows: what a rank keeps of each running request between steps.

Owns, per row: its generation, its virtual page table, the number of tokens it has stored, its sampling parameters. Must
never hold a physical unit: translations are made per step. Invariants: a row continues exactly where it stopped; a
forward with a higher generation starts the row afresh; a lower one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allocator.columns import Int32s, i32
from allocator.geometry import BandGeometry
from allocator.parts import ascends
from daemon.rank.errors import StepRefused
from daemon.rank.sampling_table import SamplingTable
from ipc.messages import Forward


class RowTable:
    """Columns over rows [0, rows_max): `generations`, `lengths` int32[rows], `tables` int32[rows, pages_per_row]."""

    def __init__(self, rows_max: int, pages_per_row: int) -> None:
        self.rows_max = rows_max
        self.generations: Int32s = np.full(rows_max, -1, dtype=np.int32)
        self.lengths: Int32s = np.zeros(rows_max, dtype=np.int32)
        self.tables: Int32s = np.zeros((rows_max, pages_per_row), dtype=np.int32)
        self.has_sampled = np.zeros(rows_max, dtype=np.bool_)  # in this generation
        self.sampling = SamplingTable(rows_max)

    def apply(self, forward: Forward) -> None:
        """Take over a forward's rows, table entries and sampling; a row whose generation rose starts afresh."""
        rows, generations = i32(forward.rows), i32(forward.generations)
        starts, counts = i32(forward.starts), i32(forward.counts)
        self._check(rows, generations, starts, counts)
        known = self.generations[rows]
        if np.count_nonzero(generations != known):
            self._start_afresh(rows, generations, known, starts)
        behind = self.lengths[rows] != starts
        if np.count_nonzero(behind):
            at = int(np.flatnonzero(behind)[0])
            raise StepRefused(f"row {rows[at]} starts at {starts[at]}, but holds {self.lengths[rows[at]]} tokens")
        self._enter_pages(forward)
        self.lengths[rows] = starts + counts
        for item in forward.sampling:
            self._check_sampling_row(item.row, item.generation)
            self.sampling.put(item)

    def sample(self, carried: Int32s, sampled: Int32s) -> None:
        """Note the rows that sample now; the carried ones, whose input is their last sample, must have one."""
        if np.count_nonzero(self.has_sampled[carried]) < carried.size:
            row = int(carried[~self.has_sampled[carried]][0])
            raise StepRefused(f"row {row} has no sampled token yet in generation {self.generations[row]}")
        self.has_sampled[sampled] = True

    def written_pages(self, forward: Forward, page_size: int) -> Int32s:
        """Virtual owner pages that an applied forward writes, row by row; the daemon lets no two share one."""
        rows, starts = i32(forward.rows), i32(forward.starts)
        first, last = starts // page_size, (starts + i32(forward.counts) - 1) // page_size
        if not np.count_nonzero(first != last):  # as in every step that only decodes
            return self.tables[rows, first]
        pages = last - first + 1
        owner = np.repeat(rows, pages)
        within = np.arange(owner.size) - np.repeat(np.cumsum(pages) - pages, pages)
        return self.tables[owner, np.repeat(first, pages) + within]

    def written_ids(self, forward: Forward, bands: Sequence[BandGeometry], page_size: int) -> dict[int, Int32s]:
        """Virtual ids that an applied forward writes, per band: pages in the owner and every window, working slots."""
        pages, slots = self.written_pages(forward, page_size), i32(forward.slots)
        return {index: slots if band.kind == "state" else pages for index, band in enumerate(bands)}

    def _check(self, rows: Int32s, generations: Int32s, starts: Int32s, counts: Int32s) -> None:
        if rows.size == 0 or not (rows.size == generations.size == starts.size == counts.size):
            raise StepRefused(f"forward columns of {rows.size}, {generations.size}, {starts.size}, {counts.size} rows")
        outside = rows.view(np.uint32) >= self.rows_max  # a negative row is far above every row there is
        if np.count_nonzero(outside):
            raise StepRefused(f"row {rows[outside][0]} in a forward; rows run from 0 to {self.rows_max - 1}")
        if not ascends(rows) and np.unique(rows).size != rows.size:
            raise StepRefused("a row appears twice in one forward")
        if np.count_nonzero(counts < 1) or np.count_nonzero(starts < 0):
            raise StepRefused(f"a row with {int(counts.min())} tokens from position {int(starts.min())}")

    def _start_afresh(self, rows: Int32s, generations: Int32s, known: Int32s, starts: Int32s) -> None:
        """Rows whose generation is not the known one: a lower one is refused, a higher one voids what is held."""
        old = generations < known
        if np.count_nonzero(old):
            at = int(np.flatnonzero(old)[0])
            raise StepRefused(f"row {rows[at]} of generation {generations[at]}, known {known[at]}")
        risen = generations > known
        fresh = rows[risen]
        self.generations[fresh] = generations[risen]
        self.tables[fresh] = 0
        self.lengths[fresh] = starts[risen]
        self.has_sampled[fresh] = False
        self.sampling.reset(fresh)

    def _enter_pages(self, forward: Forward) -> None:
        rows, indexes, pages = i32(forward.table_rows), i32(forward.table_indexes), i32(forward.table_pages)
        if rows.size == 0:
            return
        width = self.tables.shape[1]
        outside = (rows.view(np.uint32) >= self.rows_max) | (indexes.view(np.uint32) >= width)  # negative ones too
        if np.count_nonzero(outside):
            at = int(np.flatnonzero(outside)[0])
            raise StepRefused(
                f"table entry {indexes[at]} of row {rows[at]}; there are {self.rows_max} of {width} pages"
            )
        self.tables[rows, indexes] = pages

    def _check_sampling_row(self, row: int, generation: int) -> None:
        if not 0 <= row < self.rows_max or self.generations[row] != generation:
            raise StepRefused(f"sampling of row {row} generation {generation}, which no forward has started")
