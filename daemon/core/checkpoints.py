"""Checkpoints: recurrent states kept where a later request may start, and their way to the prefix cache.

Owns the copies from working to checkpoint slots and the gifts that wait. Must never keep a state that consumed a token
which was discarded, and never fail: what cannot be given now is counted and tried again. Invariants: a row has at most
one kept state, the newest, and it stands at the row's `floor`; as long as it is there the windows keep what a start
from there would read; a gift takes one fresh slot or nothing happens.

    forward ends at a grid point      -> next step copies working -> checkpoint slot            (kept)
    that forward was processed,
      and the point is wanted         -> pages and state to the cache, a fresh slot to the row  (given)
    the request ends or is retracted  -> its newest state goes to the cache with its slot       (caching)

While a row decodes it keeps its state at every grid point and gives none: only the newest of them will be where its
turn ended. Which points are wanted before that says `grid`, by `checkpoint_policy`.
"""

from __future__ import annotations

import numpy as np

from daemon.core import caching
from daemon.core.grid import Kind, Wanted, cut, next_point
from daemon.core.requests import Request
from daemon.core.rows import NO_FLOOR, NO_GRID, Rows
from daemon.core.state import CoreState, Gift
from daemon.core.tree_nodes import Match


def wanted(core: CoreState, request: Request, known: int, target: int, continues: bool) -> Wanted:
    """What is wanted of a request's first `target` tokens, of which the cache knows `known`.

    One that `continues` a turn from its very end has a client that sends back what it got: the next turn will start
    behind this one's output and not in its prompt, which is no new one either and needs no marks: the ends of earlier
    turns are some. Where several choices share the prompt, they start at its end.
    """
    memory, config = core.memory, core.config
    assert memory is not None, "only an epoch has a grid"
    interval = memory.checkpoint_interval if request.group.store else 0
    ends = not continues or request.group.accepted.n > 1
    mark = 0 if continues else config.checkpoint_mark_tokens
    return Wanted(interval, known, target, mark, ends, config.checkpoint_policy == "grid")


def first_chunk(core: CoreState, request: Request, match: Match | None, count: int, target: int) -> int:
    """How many of `count` tokens behind what it found run as the first chunk of a request, of `target` in all."""
    if match is None:
        return cut(wanted(core, request, 0, target, False), 0, count)
    continues = match.node is not None and bool(match.slot) and match.node.kind == Kind.TURN
    return cut(wanted(core, request, match.matched_tokens, target, continues), match.tokens, count)


def resident_chunk(core: CoreState, request: Request, count: int) -> int:
    """How many of `count` tokens run as the next chunk of the partly prefilled request."""
    return cut(_wanted_of(core, request), request.scheduled_tokens, count)


def chunk_ends(core: CoreState, request: Request, end: int) -> None:
    """A chunk of the request up to `end` is launched: where its row keeps its next state."""
    memory = core.memory
    assert memory is not None, "only an epoch has rows"
    if memory.checkpoint_interval and request.group.store:
        core.rows.grid_at[request.row] = next_point(memory.checkpoint_interval, end)
    else:
        core.rows.grid_at[request.row] = NO_GRID


def keep(core: CoreState) -> None:
    """Before a step is formed: states of rows that stand on the grid are copied to their checkpoint slots."""
    memory, rows = core.memory, core.rows
    assert memory is not None, "only an epoch has rows"
    if not memory.checkpoint_interval:
        return
    going = rows.going()
    due = going[rows.scheduled[going] == rows.grid_at[going]]
    if _resident_is_due(core) and not holds_back(core):
        assert core.resident is not None, "who is due is there"
        due = np.append(due, core.resident.row)
    if not len(due):
        return
    due = due[rows.slots[due, 1].argsort()]
    memory.copy_state(rows.slots[due, 0], rows.slots[due, 1])
    positions = rows.scheduled[due]
    rows.floor[due] = positions
    rows.grid_at[due] = positions + memory.checkpoint_interval
    core.totals.checkpoints_kept += len(due)
    if core.gifts:
        _overtaken(core, due)
    for row, kind in _to_give(core, due):
        core.gifts[row] = Gift(int(rows.floor[row]), _forward_of(core, row), kind)
    if core.gifts and (core.microbatches > 1 or _newest_forward(core) <= core.processed_through):
        give_ready(core)  # its forward was processed: the next chunk could overwrite it before a report comes


def holds_back(core: CoreState) -> bool:
    """The resident may not go on now: it would overwrite a kept state that waits for the report of its forward.

    Only where more forwards are in flight than that one and its own next.
    """
    resident = core.resident
    if resident is None or core.microbatches == 1:
        return False
    gift = core.gifts.get(resident.row)
    return gift is not None and gift.seq > core.processed_through and _resident_is_due(core)


def _resident_is_due(core: CoreState) -> bool:
    """The partly prefilled request stands where its state is to be kept."""
    rows, resident = core.rows, core.resident
    return resident is not None and bool(rows.scheduled[resident.row] == rows.grid_at[resident.row])


def _forward_of(core: CoreState, row: int) -> int:
    """The forward behind which a row's state is the one that was just kept, or a later one."""
    if core.microbatches == 1:
        return _newest_forward(core)
    if core.resident is not None and core.resident.row == row:
        return core.resident.chunk_seq
    return core.launched[int(core.rows.microbatch[row])]


def _newest_forward(core: CoreState) -> int:
    return next((flight.seq for flight in reversed(core.flights) if flight.forward), core.processed_through)


def give_ready(core: CoreState) -> None:
    """Give wanted states whose forward was processed, oldest first; where one finds no slot, none behind it would."""
    while core.gifts:
        row, gift = next(iter(core.gifts.items()))
        if gift.seq > core.processed_through:
            return
        owner = core.rows.owners[row]
        assert owner is not None, "a row that is taken back waits for nothing"
        if not _give(core, owner, gift):
            core.totals.checkpoints_skipped += not gift.refused
            gift.refused = True
            return
        del core.gifts[row]
        core.rows.floor[row] = NO_FLOOR


def _overtaken(core: CoreState, due: Rows) -> None:
    """Newer states take the place of what waited in these rows' slots."""
    for row in due.tolist():
        older = core.gifts.pop(row, None)
        core.totals.checkpoints_skipped += older is not None and not older.refused


def _wanted_of(core: CoreState, request: Request) -> Wanted:
    """What is wanted of a request that is being prefilled."""
    return wanted(core, request, request.known_tokens, request.target_tokens, request.continues)


def _to_give(core: CoreState, due: Rows) -> list[tuple[int, Kind]]:
    """Which of the states just kept are to be given, and why; while rows decode only the policy `grid` wants any."""
    if core.config.checkpoint_policy == "grid":
        return [(row, Kind.GRID) for row in due.tolist()]
    resident = core.resident
    if resident is None or not (due == resident.row).any():
        return []
    kind = _wanted_of(core, resident).kind(resident.scheduled_tokens)
    return [(resident.row, kind)] if kind is not Kind.NONE else []


def _give(core: CoreState, request: Request, gift: Gift) -> bool:
    """Pages and state up to a kept one go to the cache; False when no slot can be had for the row."""
    memory, rows, row = core.memory, core.rows, request.row
    assert memory is not None, "only an epoch has rows"
    assert request.lock is not None, "a row of a model with checkpoints reads through a lock"
    caching.give(core, request, gift.position)
    if caching.has_state(core, request, gift.position):
        return True
    fresh = memory.take_slot()
    if fresh is None:
        return False
    given = caching.place(core, request, gift.position, int(rows.slots[row, 1]), gift.kind)
    assert given, "the cache lacked this state"
    rows.slots[row, 1] = fresh
    return True
