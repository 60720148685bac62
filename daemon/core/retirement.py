"""Retirement: window units that no later position can see go back before a step is formed.

Owns how far each row's windows have moved. Must never look at a forward in flight: a freed unit pends behind the newest
launched forward on the ranks, so what is in flight may still read it. Invariants: a window of W tokens keeps the units
of positions [s - W + 1, s) for the next position s to be launched, by whole pages; of a row with a floor c, those
from c - W + 1 on; what a row gave back it never owns again.

    page k of a row is retired when (k + 1) x page size <= min(s, floor) - W + 1

Where a row's pages may go to the cache at any page's end, s is first rounded down to a page: a start from there reads
one page more than the row's own next token.
"""

from __future__ import annotations

import numpy as np

from allocator.columns import Int32s
from daemon.core import caching
from daemon.core.rows import Rows, RowTable
from daemon.core.state import CoreState


def retire(core: CoreState) -> None:
    """Give back what fell out of the windows of all rows that go on; work grows with the rows that cross a page."""
    rows = core.rows
    if not rows.windows:
        return
    going = rows.going()
    due = going[_reach(core, going) >= rows.retire_at[going]]
    if core.resident is not None:
        row = core.resident.row
        if min(rows.scheduled[row], rows.floor[row]) >= rows.retire_at[row]:
            due = np.append(due, row)
    if len(due):
        _retire_rows(core, due)


def _reach(core: CoreState, going: Rows) -> Int32s:
    """The position that the windows of each row reach back from."""
    rows = core.rows
    assert core.memory is not None, "only an epoch has rows"
    if not core.memory.checkpoint_interval:
        return rows.scheduled[going]
    return np.minimum(rows.scheduled[going], rows.floor[going])


def _retire_rows(core: CoreState, due: Rows) -> None:
    memory, rows = core.memory, core.rows
    assert memory is not None, "only an epoch has rows"
    reach, shared = _reach(core, due), rows.shared[due]
    if memory.retires_by_page:
        reach -= reach % rows.page_size
    parts: list[Int32s | None] = [None] * len(memory.none)
    ends: list[Int32s] = []
    for at, (band, tokens) in enumerate(memory.windows):
        before = rows.window_first[due, at]
        after = np.maximum(before, (reach - (tokens - 1)) // rows.page_size)
        parts[band] = _entries(rows, due, np.maximum(before, shared), after)
        rows.window_first[due, at] = after
        ends.append(after * rows.page_size + (tokens + rows.page_size - 1))
        if memory.cache is not None:
            for row in due[before < shared].tolist():
                caching.advance(core, row, band, int(rows.window_first[row, at]))
    retire_at = ends[0] if len(ends) == 1 else np.minimum.reduce(ends)
    if memory.retires_by_page:
        retire_at += -retire_at % rows.page_size
    rows.retire_at[due] = retire_at
    memory.give_back(parts)


def _entries(rows: RowTable, due: Rows, first: Int32s, end: Int32s) -> Int32s:
    """Table entries [first, end) of each of `due`, one after the other; none where end is not above first."""
    counts = end - first
    some = counts > 0
    if int(counts.max()) <= 1:  # decoding rows cross one page at a time
        return rows.table[due[some], first[some]]
    due, first, counts = due[some], first[some], counts[some]
    starts = np.repeat(first - np.cumsum(counts) + counts, counts)
    return rows.table[np.repeat(due, counts), starts + np.arange(len(starts))]
