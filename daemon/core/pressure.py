"""Pressure: what happens when the next step does not fit, rung by rung, and the choice of victims.

Owns the two ladders and every retraction. Must never admit anything, and never raise because memory is short. Windows
were retired before the first question. Invariants: the last request that can go on is never a victim; a chunk never
retracts anybody; a parked request keeps what it holds and is retried in every step.

    rung       rows  chunk
    reclaim     x     x     what the prefix cache can give back: it is in every answer of `memory`, here are its numbers
    spill       x     x     to a host tier; there is none
    throttle    x           nothing is admitted in the next steps
    retract     x           the cheapest to redo give everything back, one by one
    shrink            x     as many of its tokens as fit
    park        x     x     the youngest rows, or the chunk, stay out of this step
    end               x     reason memory: nobody else holds any
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from allocator.capacity import CapacityRefusal
from allocator.columns import Int32s
from daemon.core import caching, checkpoints, relief
from daemon.core.budget import shortage
from daemon.core.endings import end
from daemon.core.memory import Memory
from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import EndReason, Verdict
from daemon.core.relief import Gave, Need, Rung
from daemon.core.requests import Event, Request, State
from daemon.core.requeue import requeue
from daemon.core.rows import Batch, Rows
from daemon.core.state import CoreState
from daemon.core.step_plan import Chunk, StepPlan

THROTTLE_STEPS = 4  # steps with scheduled tokens after a shortage of decode rows in which nothing is admitted


@dataclass(slots=True, kw_only=True)
class RowsNeed(Need):
    """Decode rows: all of them, the positions they are at, and those that need a page."""

    kind: ClassVar[str] = "rows"

    batch: Batch
    starts: Int32s
    needy: Rows


@dataclass(slots=True, kw_only=True)
class ChunkNeed(Need):
    """The resident request's next chunk: `wanted` tokens from `start` on, of which it gets `count`."""

    kind: ClassVar[str] = "chunk"

    plan: StepPlan
    resident: Request
    start: int
    held_pages: int
    wanted: int
    count: int = 0


def plan_decode(core: CoreState, now_ns: int, out: Outputs) -> tuple[Batch, Int32s, Rows]:
    """The decode rows of this step, where they start and those of them that need a page; relieves until they fit."""
    batch, starts, needy, refusal = _decode_rows(core)
    if refusal is None:
        if core.relief:
            relief.fits(core, RowsNeed.kind)
    else:
        need = RowsNeed(
            core=core,
            now_ns=now_ns,
            out=out,
            refusal=refusal,
            asked={"rows": len(batch), "pages": len(needy)},
            by=int(core.rows.request[needy].min()),
            batch=batch,
            starts=starts,
            needy=needy,
        )
        relief.climb(need, ROWS_LADDER)
        batch, starts, needy = need.batch, need.starts, need.needy
    if core.parked_rows:
        _unpark(core, batch, now_ns, out)
    return batch, starts, needy


def plan_resident(core: CoreState, plan: StepPlan, now_ns: int, out: Outputs) -> None:
    """Plan the resident chunk: whole, shrunk to what fits, or parked with zero tokens."""
    request, memory = core.resident, core.memory
    if request is None or plan.budget_tokens <= 0 or checkpoints.holds_back(core):
        if core.relief:
            relief.fits(core, ChunkNeed.kind)
        return
    assert memory is not None, "only an epoch has a resident chunk"
    start, held = request.scheduled_tokens, int(core.rows.pages[request.row])
    wanted = min(request.target_tokens - start, core.config.chunked_prefill_size, plan.budget_tokens)
    assert wanted > 0, "a resident request has prompt tokens left"
    count = wanted = checkpoints.resident_chunk(core, request, wanted)
    refusal = memory.refusal(memory.demand(plan.pages + memory.pages_of(start + count) - held))
    if refusal is None:
        relief.fits(core, ChunkNeed.kind)
    else:
        need = ChunkNeed(
            core=core,
            now_ns=now_ns,
            out=out,
            refusal=refusal,
            asked={"start": start, "tokens": wanted, "pages": memory.pages_of(start + wanted) - held},
            request=request.number,
            plan=plan,
            resident=request,
            start=start,
            held_pages=held,
            wanted=wanted,
        )
        relief.climb(need, CHUNK_LADDER)
        count = need.count
    if count <= 0:
        return
    if request.state is State.PARKED_CHUNK:
        core.move(request, Event.UNPARK)
        out.decisions.append(Decided(now_ns, Verdict.UNPARKED, request.number, "memory", {"tokens": count}))
    if count < wanted:
        numbers = {"tokens": count, "wanted_tokens": wanted}
        out.decisions.append(Decided(now_ns, Verdict.SHRUNK, request.number, "memory", numbers))
    plan.add(Chunk(request, start, count, memory.pages_of(start + count) - held))


def parks(core: CoreState) -> bool:
    """Somebody was left out of this step for want of memory: parking is final, nothing may be admitted behind it."""
    return bool(core.parked_rows) or (core.resident is not None and core.resident.state is State.PARKED_CHUNK)


def relax(core: CoreState) -> None:
    """A step with tokens was scheduled: throttling runs out and the expected share of output falls."""
    if core.throttled_steps:
        core.throttled_steps -= 1
    else:
        core.expected.relax()


def retract(
    core: CoreState,
    request: Request,
    by: int,
    numbers: dict[str, int],
    now_ns: int,
    out: Outputs,
    reason: str = "memory",
) -> None:
    """Take everything back and queue the request again in this iteration, its output kept as prompt.

    `reason` is `memory`, or `priority` where request `by` is to have its place. Told with the units it gave back, the
    cached ones that nobody else reads now, the work (positions it had, those that stay cached and those lost), and
    `numbers`: for want of what, and why it and nobody else.
    """
    assert request.row >= 0, "only what has a row gives something back"
    memory = core.memory
    assert memory is not None, "only an epoch has rows"
    before = _reclaimable_pages(memory)
    stays = caching.retracted(core, request)
    had, freed = requeue(core, request, now_ns)
    request.retractions += 1
    core.totals.retractions += 1
    core.totals.preemptions += reason == "priority"
    core.totals.retracted_tokens += had - stays
    told = {"pages": freed[memory.owner], "unlocked_pages": _reclaimable_pages(memory) - before}
    for band, units in zip(memory.chain.bands[: memory.owner], freed, strict=False):
        told[f"units_{band.name}"] = units
    told |= {"tokens": had, "cached_tokens": stays, "lost_tokens": had - stays, "times": request.retractions}
    out.decisions.append(Decided(now_ns, Verdict.RETRACTED, request.number, reason, told | numbers, by))


# --- rungs -------------------------------------------------------------------------------------------------------


def _reclaim(need: Need) -> Gave:
    """What the prefix cache can give back was counted in the refusal and did not suffice."""
    cache = need.memory.cache
    return Gave({"units": cache.reclaimable()[need.refused.band] if cache is not None else 0})


def _spill(need: Need) -> Gave:
    """There is no host tier to spill to."""
    return Gave({"units": 0}, "no tier")


def _throttle(need: RowsNeed) -> Gave:
    """Who runs is short already: nobody new comes in for some steps."""
    need.core.throttled_steps = THROTTLE_STEPS
    return Gave({"steps": THROTTLE_STEPS})


def _retract(need: RowsNeed) -> Gave:
    """Victims one by one, until the rows that are left fit or nobody may be taken."""
    core, victims, pages = need.core, 0, 0
    while need.refusal is not None:
        found = _cheapest(core)
        if found is None:
            break
        victim, why = found
        others = [number for number in core.rows.request[need.needy].tolist() if number != victim.number]
        core.expected.tighten()
        retract(core, victim, min(others, default=0), shortage(need.refusal) | why, need.now_ns, need.out)
        victims, pages = victims + 1, pages + need.out.decisions[-1].numbers["pages"]
        need.acted = True
        need.batch, need.starts, need.needy, need.refusal = _decode_rows(core)
    return Gave({"requests": victims, "pages": pages}, "" if victims else "nobody may be")


def _park_rows(need: RowsNeed) -> Gave:
    """The oldest needy rows get the pages there are; the others are left out of this step."""
    core, memory = need.core, need.memory
    room = memory.room_pages(memory.none)
    by_age = need.needy[np.argsort(core.rows.request[need.needy])]
    served, parked = np.sort(by_age[:room]), by_age[room:]
    for row in parked.tolist():
        request = core.rows.owners[row]
        assert request is not None, "decode rows are owned"
        if request.state is not State.PARKED_ROW:
            core.move(request, Event.PARK)
            core.parked_rows.append(request)
            core.totals.parks += 1
            need.acted = True
            need.tell(Verdict.PARKED, request, shortage(need.refused))
    need.batch = core.rows.batch_of(np.setdiff1d(need.batch.rows, parked, assume_unique=True))
    need.starts, need.needy, need.refusal = core.rows.scheduled[need.batch.rows], served, None
    return Gave({"requests": len(parked)})


def _shrink(need: ChunkNeed) -> Gave:
    """As many of the chunk's tokens as the room left by the rows holds, cut like any chunk."""
    memory = need.memory
    room = memory.room_pages(memory.demand(need.plan.pages))
    count = min(need.wanted, (need.held_pages + room) * memory.page_size - need.start)
    need.count = checkpoints.resident_chunk(need.core, need.resident, max(count, 0))
    if need.count:
        need.refusal = None
    return Gave({"tokens": need.count})


def _park_chunk(need: ChunkNeed) -> Gave | None:
    """Zero tokens for the chunk, as long as somebody else may give memory back."""
    core, request = need.core, need.resident
    if _alone(need):
        return None
    if request.state is not State.PARKED_CHUNK:
        core.move(request, Event.PARK)
        core.totals.parks += 1
        need.acted = True
        need.tell(Verdict.PARKED, request, {"start": need.start} | shortage(need.refused))
    need.refusal = None
    return Gave({"requests": 1})


def _end_chunk(need: ChunkNeed) -> Gave:
    """Nobody else holds memory, nothing is in flight: waiting would never end."""
    detail = f"nothing else holds memory and the next chunk does not fit: {need.refused.text()}"
    end(need.core, need.resident, EndReason.MEMORY, detail, need.now_ns, need.out)
    need.plan.partial = False
    need.refusal, need.acted = None, True
    return Gave({"requests": 1})


ROWS_LADDER: tuple[Rung[RowsNeed], ...] = (
    Rung("reclaim", _reclaim),
    Rung("spill", _spill),
    Rung("throttle", _throttle),
    Rung("retract", _retract),
    Rung("park", _park_rows),
)
CHUNK_LADDER: tuple[Rung[ChunkNeed], ...] = (
    Rung("reclaim", _reclaim),
    Rung("spill", _spill),
    Rung("shrink", _shrink),
    Rung("park", _park_chunk),
    Rung("end", _end_chunk),
)

# --- inside ------------------------------------------------------------------------------------------------------


def _decode_rows(core: CoreState) -> tuple[Batch, Int32s, Rows, CapacityRefusal | None]:
    """All decode rows of the micro-batch, their positions, those that need a page, and why that does not fit, if so."""
    rows, memory = core.rows, core.memory
    assert memory is not None, "only an epoch decodes"
    batch = rows.decode_batch(core.forming)
    starts = rows.scheduled[batch.rows]
    needy = batch.rows[starts >= rows.covered[batch.rows]]
    return batch, starts, needy, memory.refusal(memory.demand(len(needy))) if len(needy) else None


def _cheapest(core: CoreState) -> tuple[Request, dict[str, int]] | None:
    """The victim, lowest priority first, then least to redo beside what stays cached, then youngest; and why it.

    Never one that is protected, nor the last one going on. The numbers say between how many it was chosen, how many are
    protected, and by what it and the next best (0: there is none) were compared.
    """
    owners = [core.rows.owners[row] for row in core.rows.going().tolist()]
    owners.append(core.resident)
    going = [owner for owner in owners if owner is not None]
    if len(going) < 2:
        return None
    ranked = sorted((redo_cost(core, one), one) for one in going if one.retractions < core.config.retracts_max)
    if not ranked:
        return None
    (priority, redo, _), victim = ranked[0]
    why = {"candidates": len(ranked), "protected": len(going) - len(ranked)}
    why |= {"redo_tokens": redo, "own_priority": priority, "next": 0}
    if len(ranked) > 1:
        next_priority, next_redo, number = ranked[1][0]
        why |= {"next": -number, "next_redo_tokens": next_redo, "next_priority": next_priority}
    return victim, why


def redo_cost(core: CoreState, request: Request) -> tuple[int, int, int]:
    """Who has the lowest is retracted first: priority, tokens to compute again, the number with its sign turned."""
    redo = int(core.rows.scheduled[request.row]) - caching.stays(core, request)
    return (request.priority, redo, -request.number)


def _alone(need: ChunkNeed) -> bool:
    """Nobody but the chunk's request holds memory that would come back."""
    return need.core.holding == 1 and not need.core.in_flight and not len(need.plan.batch)


def _unpark(core: CoreState, batch: Batch, now_ns: int, out: Outputs) -> None:
    scheduled = set(batch.rows.tolist())
    for request in [one for one in core.parked_rows if one.row in scheduled]:
        core.parked_rows.remove(request)
        core.move(request, Event.UNPARK)
        out.decisions.append(Decided(now_ns, Verdict.UNPARKED, request.number, "memory", {"tokens": 1}))


def _reclaimable_pages(memory: Memory) -> int:
    return memory.cache.reclaimable()[memory.owner] if memory.cache is not None else 0
