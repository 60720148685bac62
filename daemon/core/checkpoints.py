"""Checkpoints: recurrent states kept where a later request may start, and their way to the prefix cache.

Owns the grid, the copies from working to checkpoint slots and the gifts that wait. Must never keep a state that
consumed a token which was discarded, and never fail: what cannot be given now is counted and tried again. Invariants: a
row has at most one kept state, the newest; as long as it waits, the windows keep what a start from there would read
(`floor`); a gift takes one fresh slot or nothing happens.

    forward ends at a grid point -> next step copies working -> checkpoint slot (kept)
    that forward was processed   -> pages and state to the cache, a fresh slot to the row (given)
"""

from __future__ import annotations

import numpy as np

from daemon.core import caching
from daemon.core.requests import Request
from daemon.core.rows import NO_FLOOR, NO_GRID
from daemon.core.state import CoreState, Keep


def cut(interval: int, start: int, count: int, target: int) -> int:
    """How many tokens of a chunk [start, start + count) of a prompt of `target` tokens run: it ends on the grid.

    A chunk ends at the last grid point it reaches; one that reaches none runs as is. The prompt's last token is never
    in the chunk that ends at the last grid point before it. `interval` 0: there is no grid.
    """
    if not interval:
        return count
    end = start + count
    last = (end if end < target else target - 1) // interval * interval
    return last - start if last > start else count


def next_grid(interval: int, end: int) -> int:
    """Where a row whose newest chunk ends at `end` keeps its next state."""
    return -(-end // interval) * interval if interval else NO_GRID


def keep(core: CoreState) -> None:
    """Before a step is formed: states of rows that stand on the grid are copied to their checkpoint slots."""
    memory, rows = core.memory, core.rows
    assert memory is not None, "only an epoch has rows"
    if not memory.checkpoint_interval:
        return
    going = rows.decode_batch().rows
    due = going[rows.scheduled[going] == rows.grid_at[going]]
    if core.resident is not None and rows.scheduled[core.resident.row] == rows.grid_at[core.resident.row]:
        due = np.append(due, core.resident.row)
    if not len(due):
        return
    due = due[rows.slots[due, 1].argsort()]
    memory.copy_state(rows.slots[due, 0], rows.slots[due, 1])
    positions = rows.scheduled[due]
    rows.floor[due] = positions
    rows.grid_at[due] = positions + memory.checkpoint_interval
    core.totals.checkpoints_kept += len(due)
    seq = next((flight.seq for flight in reversed(core.flights) if flight.forward), core.processed_through)
    for row, position in zip(due.tolist(), positions.tolist(), strict=True):
        older = core.keeps.pop(row, None)
        if older is not None and older.seq <= core.processed_through:  # it waited behind one that found no slot
            core.totals.checkpoints_skipped += not older.refused
        core.keeps[row] = Keep(position, seq)
    if seq <= core.processed_through:  # nothing is in flight: the next chunk could overwrite it before a report comes
        give_ready(core)


def give_ready(core: CoreState) -> None:
    """Give kept states whose forward was processed, oldest first; where one finds no slot, none behind it would."""
    while core.keeps:
        row, kept = next(iter(core.keeps.items()))
        if kept.seq > core.processed_through:
            return
        owner = core.rows.owners[row]
        assert owner is not None, "a row that is taken back waits for nothing"
        if not _give(core, owner, kept):
            core.totals.checkpoints_skipped += not kept.refused
            kept.refused = True
            return
        del core.keeps[row]
        core.totals.checkpoints_given += 1


def _give(core: CoreState, request: Request, kept: Keep) -> bool:
    """Pages and state up to a kept one go to the cache; False when no slot can be had for the row."""
    memory, rows, row = core.memory, core.rows, request.row
    assert memory is not None, "only an epoch has rows"
    assert request.lock is not None, "a row of a model with checkpoints reads through a lock"
    if not kept.refused:  # at a second try the pages were given before
        caching.give(core, request, caching.sequence_of(core, request, kept.position), 0)
    if not request.lock.node.slot:
        fresh = memory.take_slot()
        if fresh is None:
            return False
        tokens = caching.sequence_of(core, request, kept.position)
        given = caching.give(core, request, tokens, int(rows.slots[row, 1]))
        assert given, "the cache lacked this state"
        rows.slots[row, 1] = fresh
    rows.floor[row] = NO_FLOOR
    return True
