"""Overview: the live requests as rows for a watcher, in a time that does not depend on how many wait.

Owns a read-only view. Must never change anything, and no decision may read it. Invariant: at most `rows_max` requests
are looked at: those on the ranks first, by row, then the queue from its head, of which at most `QUEUED_MAX`.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from daemon.core.passes import PARKED, ended_at, queued_for, waits_for
from daemon.core.requests import Request, State
from daemon.core.state import CoreState

NS_PER_MS = 1_000_000
QUEUED_MAX = 64
NOTHING: tuple[str, dict[str, int]] = ("", {})  # what a request waits for that makes progress
LOOKED_MAX = 1024  # of the queue, for the place of one request
STAGES = {state: state.value for state in State}


class LiveRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One live request. Counts in tokens and pages; `row` and `ahead` are -1 where it has none or is not queued.

    `scheduled_tokens` of `target_tokens` are what its prefill covers; `ahead` of it stand so many in the queue;
    `waits_for` with its numbers is empty for one that makes progress.
    """

    request: int
    id: str
    frontend: str
    choice: int
    stage: str
    age_ms: int
    priority: int
    row: int
    prompt_tokens: int
    output_tokens: int
    max_output: int
    scheduled_tokens: int
    target_tokens: int
    pages: int
    shared_pages: int
    cached_tokens: int
    retractions: int
    losses: int
    ahead: int
    waits_for: str
    waits_numbers: dict[str, int]


def live_rows(core: CoreState, now_ns: int, rows_max: int) -> list[LiveRow]:
    """The rows of an overview; see the module for which they are."""
    found = []
    if core.memory is not None:
        owners = [owner for owner in core.rows.owners if owner is not None][:rows_max]
        places = [owner.row for owner in owners]
        columns = (core.rows.output, core.rows.pages, core.rows.shared)
        counts = zip(*(column[places].tolist() for column in columns), strict=True) if places else ()
        found = [_on_row(core, owner, now_ns, *three) for owner, three in zip(owners, counts, strict=True)]
    ended = ended_at(core)
    for ahead, request in enumerate(islice(core.queue, min(QUEUED_MAX, rows_max - len(found)))):
        found.append(_in_queue(core, request, now_ns, ahead, ended))
    return found


def live_row(core: CoreState, number: int, now_ns: int) -> LiveRow | None:
    """One live request; None when it is not live. `ahead` stops counting at `LOOKED_MAX`."""
    request = core.requests.get(number)
    if request is None:
        return None
    if request.row < 0:
        places = enumerate(islice(core.queue, LOOKED_MAX))
        ahead = next((at for at, queued in places if queued is request), LOOKED_MAX)
        return _in_queue(core, request, now_ns, ahead, ended_at(core))
    row, rows = request.row, core.rows
    return _on_row(core, request, now_ns, int(rows.output[row]), int(rows.pages[row]), int(rows.shared[row]))


def _on_row(core: CoreState, request: Request, now_ns: int, output: int, pages: int, shared: int) -> LiveRow:
    reason, numbers = waits_for(core, request, 0) if request.state in PARKED else NOTHING
    return _row(core, request, now_ns, -1, output, pages, shared, reason, numbers)


def _in_queue(core: CoreState, request: Request, now_ns: int, ahead: int, ended: int) -> LiveRow:
    has_epoch = core.memory is not None
    reason, numbers = queued_for(core, request, ahead, ended) if has_epoch else waits_for(core, request, ahead)
    return _row(core, request, now_ns, ahead, request.output_tokens, 0, 0, reason, numbers)


def _row(
    core: CoreState,
    request: Request,
    now_ns: int,
    ahead: int,
    output_tokens: int,
    pages: int,
    shared: int,
    reason: str,
    numbers: dict[str, int],
) -> LiveRow:
    group = request.group
    return LiveRow(
        request.number,
        group.id,
        core.frontends[group.frontend],
        request.choice,
        STAGES[request.state],
        (now_ns - request.arrived_ns) // NS_PER_MS,
        request.priority,
        request.row,
        request.prompt_tokens,
        output_tokens,
        request.max_output,
        request.scheduled_tokens,
        request.target_tokens,
        pages,
        shared,
        request.cached_tokens,
        request.retractions,
        request.losses,
        ahead,
        reason,
        numbers,
    )
