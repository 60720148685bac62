"""Requeue: a request with a row waits again, with everything given back and its output kept.

Owns the one way from a row back to the queue. Must never decide who takes it, nor what of its work stays in the cache:
retractions (`pressure`), ends of epochs and clients that come back (`epochs`, `resuming`) do. Invariants: number,
arrival and output stay; of what is in flight for it nothing is committed any more.
"""

from __future__ import annotations

from allocator.capacity import Demand
from daemon.core import deadlines
from daemon.core.endings import leave
from daemon.core.requests import Event, Request
from daemon.core.state import CoreState


def requeue(core: CoreState, request: Request, now_ns: int) -> tuple[int, Demand]:
    """The positions that were scheduled for it, and the units of each band that it gave back."""
    assert request.row >= 0, "only what has a row gives something back"
    had = int(core.rows.scheduled[request.row])
    freed = leave(core, request)
    core.move(request, Event.RETRACT)
    request.reached_tokens = max(request.reached_tokens, had)
    request.last_wait = ""
    core.queue_up(request, now_ns)
    deadlines.watch(core, request, now_ns)
    return had, freed
