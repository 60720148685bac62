"""Passes: which waiting requests the newest scheduling pass passed over, and why; and what any live request waits for.

Owns `CoreState.skipped`, made anew by every pass, and the verdict `waits`, told once per change of reason. Must never
be read by anything that decides. Invariant: what a pass looked at and left in the queue is in `skipped`, in the order
of the queue; the others stand behind it, or came later.

The journal holds the verdicts alone; replaying it gives the notes of every pass (`bandmaster why`).
"""

from __future__ import annotations

from typing import NamedTuple

from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import Verdict
from daemon.core.requests import QUEUED, Request, State
from daemon.core.state import CoreState

PARKED = {State.PARKED_ROW: "rows", State.PARKED_CHUNK: "chunk"}
"""Parked states, and the kind of climb of the relief ladder that left them so (`relief`)."""


class PassedOver(NamedTuple):
    """A pass that gave a live request no tokens: the pass by number, the request's state, and why, with numbers."""

    number: int
    state: State
    reason: str
    numbers: dict[str, int]


def begin(core: CoreState) -> None:
    """A pass begins."""
    core.skipped.clear()
    core.totals.passes += 1


def skip(core: CoreState, request: Request, reason: str, numbers: dict[str, int], now_ns: int, out: Outputs) -> None:
    """The pass leaves a waiting request where it is: note it, and say so once per change of reason.

    That another micro-batch is to take it is no reason to tell: it comes and goes with every step.
    """
    core.skipped[request.number] = (reason, numbers)
    if request.last_wait != reason and reason != "microbatch":
        request.last_wait = reason
        out.decisions.append(Decided(now_ns, Verdict.WAITS, request.number, reason, numbers))


def places(core: CoreState) -> dict[int, int]:
    """How many requests stand before each queued one, by its number."""
    return {request.number: ahead for ahead, request in enumerate(core.queue)}


def waits_for(core: CoreState, request: Request, ahead: int) -> tuple[str, dict[str, int]]:
    """What a live request waits for, in a word and numbers; `ahead` of it stand so many, if it is queued.

    `queue`: nobody looked at it, the newest pass ended before it, at request `stopped_at` (0: it came later). `ranks`:
    there is no epoch.
    """
    if core.memory is None:
        return "ranks", {}
    if request.state in QUEUED:
        return queued_for(core, request, ahead, ended_at(core))
    if request.state in PARKED:
        told = core.relief.get(PARKED[request.state])
        return "memory", dict(told.numbers) if told is not None else {}
    return ("report", {"step": core.flights[0].seq}) if core.flights else ("", {})


def queued_for(core: CoreState, request: Request, ahead: int, ended: int) -> tuple[str, dict[str, int]]:
    """The same of a queued request in an epoch, where it is known at which request the newest pass ended."""
    return core.skipped.get(request.number) or ("queue", {"ahead": ahead, "stopped_at": ended})


def ended_at(core: CoreState) -> int:
    """The last request that the newest pass looked at and left in the queue; 0: none."""
    return next(reversed(core.skipped), 0)


def passed_over(core: CoreState, number: int) -> PassedOver | None:
    """Why the newest pass gave this live request no tokens; None when it did, or the request is not live."""
    request = core.requests.get(number)
    if request is None or not (request.state in QUEUED or request.state in PARKED):
        return None
    looked_at = number in core.skipped or request.state in PARKED
    ahead = 0 if looked_at else next(at for at, queued in enumerate(core.queue) if queued is request)
    return PassedOver(core.totals.passes, request.state, *waits_for(core, request, ahead))
