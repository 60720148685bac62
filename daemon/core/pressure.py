"""Pressure: the relief ladder, for when the next step does not fit.

Owns the rungs and the choice of victims. Must never admit anything, and never raise because memory is short. Rung 0,
what the prefix cache can give back, is in every answer of `memory`; rung 1 (spill to the host tier) has nothing to give
while there is none; what is here are rungs 2 to 4. Windows were retired before the first question. Invariants: the
ladder stops as soon as the step fits; the last request that can go on is never a victim; a parked request keeps what it
holds and is retried in every step.

    decode rows short of pages:  throttle admissions -> retract, one by one -> park the youngest rows
    resident chunk short:        shrink -> park -> end with reason memory when nothing else holds any
"""

from __future__ import annotations

import numpy as np

from allocator.capacity import CapacityRefusal
from allocator.columns import Int32s
from daemon.core import caching
from daemon.core.admission import SHARE_ONE_PPM, Chunk, StepPlan, shortage
from daemon.core.checkpoints import cut
from daemon.core.endings import end, leave
from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import EndReason, Verdict
from daemon.core.requests import Event, Request, State
from daemon.core.rows import Batch, Rows
from daemon.core.state import CoreState

THROTTLE_STEPS = 4  # steps with scheduled tokens after a retraction in which nothing is admitted
SHARE_RAISE_PPM = 100_000
SHARE_FALL_PPM = 500
SHARE_MIN_PPM = 100_000


def plan_decode(core: CoreState, now_ns: int, out: Outputs) -> tuple[Batch, Int32s, Rows]:
    """The decode rows of this step, where they start and those of them that need a page; relieves until they fit."""
    assert core.memory is not None, "only an epoch decodes"
    rows = core.rows
    while True:
        batch = rows.decode_batch()
        starts = rows.scheduled[batch.rows]
        needy = batch.rows[starts >= rows.covered[batch.rows]]
        refusal = core.memory.refusal(core.memory.demand(len(needy))) if len(needy) else None
        if refusal is not None and _retract_one(core, needy, refusal, now_ns, out):
            continue
        if refusal is not None:
            batch, needy = _park_youngest(core, batch, needy, refusal, now_ns, out)
            starts = rows.scheduled[batch.rows]
        if core.parked_rows:
            _unpark(core, batch, now_ns, out)
        return batch, starts, needy


def plan_resident(core: CoreState, plan: StepPlan, now_ns: int, out: Outputs) -> None:
    """Plan the resident chunk: whole, shrunk to what fits, or parked with zero tokens."""
    request = core.resident
    if request is None or plan.budget_tokens <= 0:
        return
    memory = core.memory
    assert memory is not None, "only an epoch has a resident chunk"
    start, held = request.scheduled_tokens, int(core.rows.pages[request.row])
    wanted = min(request.target_tokens - start, core.config.chunked_prefill_size, plan.budget_tokens)
    assert wanted > 0, "a resident request has prompt tokens left"
    count = wanted = cut(memory.checkpoint_interval, start, wanted, request.target_tokens)
    refusal = memory.refusal(memory.demand(plan.pages + memory.pages_of(start + count) - held))
    if refusal is not None:
        room = memory.room_pages(memory.demand(plan.pages))
        count = min(wanted, (held + room) * memory.page_size - start)
        count = cut(memory.checkpoint_interval, start, max(count, 0), request.target_tokens)
    if count <= 0:
        assert refusal is not None, "only a shortage leaves no tokens"
        _park_chunk(core, request, len(plan.batch), refusal, now_ns, out)
        return
    if request.state is State.PARKED_CHUNK:
        core.move(request, Event.UNPARK)
        out.decisions.append(Decided(now_ns, Verdict.UNPARKED, request.number, "memory", {"tokens": count}))
    if count < wanted:
        numbers = {"tokens": count, "wanted_tokens": wanted}
        out.decisions.append(Decided(now_ns, Verdict.SHRUNK, request.number, "memory", numbers))
    plan.add(Chunk(request, start, count, memory.pages_of(start + count) - held))


def relax(core: CoreState) -> None:
    """A step with tokens was scheduled: throttling runs out and the expected share of output falls."""
    if core.throttled_steps:
        core.throttled_steps -= 1
    elif core.config.reserve != "full":
        core.share_ppm = max(SHARE_MIN_PPM, core.share_ppm - SHARE_FALL_PPM)


def retract(core: CoreState, request: Request, by: int, numbers: dict[str, int], now_ns: int, out: Outputs) -> None:
    """Take everything back and queue the request again in this iteration, its output kept as prompt."""
    assert request.row >= 0, "only what has a row gives something back"
    lost = int(core.rows.scheduled[request.row])
    pages = leave(core, request)
    core.move(request, Event.RETRACT)
    request.retractions += 1
    request.last_wait = ""
    core.queue_up(request, now_ns)
    core.totals.retractions += 1
    core.totals.retracted_tokens += lost
    numbers = {"pages": pages, "tokens": lost, "times": request.retractions, **numbers}
    out.decisions.append(Decided(now_ns, Verdict.RETRACTED, request.number, "memory", numbers, by))


def _retract_one(core: CoreState, needy: Rows, refusal: CapacityRefusal, now_ns: int, out: Outputs) -> bool:
    """Rungs 2 and 3. False when nobody may be retracted."""
    victim = _cheapest(core)
    if victim is None:
        return False
    core.throttled_steps = THROTTLE_STEPS
    if core.config.reserve != "full":
        core.share_ppm = min(SHARE_ONE_PPM, core.share_ppm + SHARE_RAISE_PPM)
    others = [number for number in core.rows.request[needy].tolist() if number != victim.number]
    retract(core, victim, min(others, default=0), shortage(refusal), now_ns, out)
    return True


def _cheapest(core: CoreState) -> Request | None:
    """The victim: lowest priority, then least to redo beside what stays cached, then youngest.

    Never one that is protected, nor the last one going on.
    """
    owners = [core.rows.owners[row] for row in core.rows.decode_batch().rows.tolist()]
    owners.append(core.resident)
    going = [owner for owner in owners if owner is not None]
    if len(going) < 2:
        return None

    def cost(request: Request) -> tuple[int, int, int]:
        redo = int(core.rows.scheduled[request.row]) - caching.stays(core, request)
        return (request.priority, redo, -request.number)

    return min((one for one in going if one.retractions < core.config.retracts_max), key=cost, default=None)


def _park_youngest(
    core: CoreState, batch: Batch, needy: Rows, refusal: CapacityRefusal, now_ns: int, out: Outputs
) -> tuple[Batch, Rows]:
    """Rung 4: the oldest needy rows get the pages there are; the others are left out of this step."""
    assert core.memory is not None, "only an epoch decodes"
    room = core.memory.room_pages(core.memory.none)
    by_age = needy[np.argsort(core.rows.request[needy])]
    served, parked = np.sort(by_age[:room]), by_age[room:]
    for row in parked.tolist():
        request = core.rows.owners[row]
        assert request is not None, "decode rows are owned"
        if request.state is not State.PARKED_ROW:
            core.move(request, Event.PARK)
            core.parked_rows.append(request)
            core.totals.parks += 1
            out.decisions.append(Decided(now_ns, Verdict.PARKED, request.number, "memory", shortage(refusal)))
    return core.rows.batch_of(np.setdiff1d(batch.rows, parked, assume_unique=True)), served


def _unpark(core: CoreState, batch: Batch, now_ns: int, out: Outputs) -> None:
    scheduled = set(batch.rows.tolist())
    for request in [one for one in core.parked_rows if one.row in scheduled]:
        core.parked_rows.remove(request)
        core.move(request, Event.UNPARK)
        out.decisions.append(Decided(now_ns, Verdict.UNPARKED, request.number, "memory", {"tokens": 1}))


def _park_chunk(
    core: CoreState, request: Request, decoding: int, refusal: CapacityRefusal, now_ns: int, out: Outputs
) -> None:
    if core.holding == 1 and not core.in_flight and not decoding:
        detail = f"nothing else holds memory and the next chunk does not fit: {refusal.text()}"
        end(core, request, EndReason.MEMORY, detail, now_ns, out)
        return
    if request.state is State.PARKED_CHUNK:
        return
    core.move(request, Event.PARK)
    core.totals.parks += 1
    numbers = {"start": request.scheduled_tokens} | shortage(refusal)
    out.decisions.append(Decided(now_ns, Verdict.PARKED, request.number, "memory", numbers))
