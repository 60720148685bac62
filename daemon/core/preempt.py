"""Preemption by priority: running requests give way to a waiting one of higher priority, if that lets it start.

Owns the choice of victims. Must never take anybody before admission's own question was answered with yes for the arena
without them, and never for a request whose priority is not above theirs. Off unless `priority_preemption`. Invariants:
one request at a time is helped, the first candidate of the pass that waits for no other choice of its own; no victim is
taken that is not needed; who was retracted `retracts_max` times is protected from this too, so that it ends.

    rows and memory, as admission would find them -> enough?        nothing happens
        without everybody of lower priority -> not enough?          nothing happens
        without the cheapest of them, one more each time, until it is enough; then again without each that is not needed

It runs before a step is planned, and reckons with what the rows and the resident chunk will want of that step.

A no is remembered (`CoreState.helpless`), because decoding rows alone never turn it into a yes: what they take they
were promised. For the same request it is asked again when somebody got a row or gave one back, or another one is partly
prefilled; each time in vain twice as many passes later at the earliest, up to `PAUSE_MAX_PASSES`. What else may turn it
(a window that shrinks, an estimate that falls) is found `ASK_AGAIN_PASSES` after the last question at the latest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from allocator.capacity import Demand
from daemon.core import admission, caching, checkpoints, pressure
from daemon.core.budget import open_budget, without
from daemon.core.memory import plus
from daemon.core.outputs import Outputs
from daemon.core.requests import Request
from daemon.core.state import CoreState, Helpless
from daemon.core.step_plan import Chunk, StepPlan
from daemon.core.tree_alone import held_alone

PAUSE_MAX_PASSES = 8  # a request that could not be helped is helped so much later than it could be, at most
ASK_AGAIN_PASSES = 64  # or so much later, where no row came or went


def preempt(core: CoreState, now_ns: int, out: Outputs) -> Request | None:
    """Retract for the first waiting request whoever must give way for it to start in this step; mostly nobody.

    Asked only where the configuration has it. The request that somebody gave way to: it is the first candidate of the
    step's pass.
    """
    if not len(core.queue) or core.throttled_steps or core.suspects:
        return None
    candidates = itertools.islice(core.queue.walk(), admission.LOOKAHEAD)
    request = next((one for one in candidates if not admission.sibling(core, one, ())), None)
    if request is None or _known_helpless(core, request):
        return None
    lower = [one for one in core.rows.owners if one is not None and _below(core, one, request)]
    if lower and starts(core, request, []):
        return None
    if not lower or not starts(core, request, lower):
        _remember(core, request)
        return None
    for victim in _needed(core, request, lower):
        assert victim.priority < request.priority, "nobody gives way to an equal"
        _, redo, _ = pressure.redo_cost(core, victim)
        why = {"priority": request.priority, "own_priority": victim.priority, "redo_tokens": redo}
        why["candidates"] = len(lower)
        pressure.retract(core, victim, request.number, why, now_ns, out, "priority")
    return request


def starts(core: CoreState, request: Request, victims: Sequence[Request]) -> bool:
    """Whether admission would let the request start in the next step if these gave their rows back. Changes nothing."""
    if core.rows.free_count + len(victims) < 1:
        return False
    plan = _plan(core, victims)
    if plan.budget_tokens < 1:
        return False
    match, chunk = admission.first_chunk(core, request, plan, look=True)
    if plan.partial and not chunk.last:
        return False
    budget = open_budget(core, plan)
    chunk.hit = caching.hold(core, request, match)  # what it will read itself does not come free with the victims
    refused = without(core, budget, victims, _freed(core, victims)).refusal(core, chunk, plan)
    caching.drop(core, chunk.hit)
    return refused is None


def _known_helpless(core: CoreState, request: Request) -> bool:
    """Nobody could give way for it when that was asked last, and it is not the time to ask again."""
    told = core.helpless
    if told is None or told.request != request.number or core.blocked:
        return False
    passes = core.totals.passes - told.asked_pass
    assert passes > 0, "asked once in a pass"
    return passes < told.pause_passes or (passes < ASK_AGAIN_PASSES and told.rows == core.row_changes())


def _remember(core: CoreState, request: Request) -> None:
    told, pause = core.helpless, 1
    if told is not None and told.request == request.number:
        pause = min(2 * told.pause_passes, PAUSE_MAX_PASSES)
    core.helpless = Helpless(request.number, core.totals.passes, core.row_changes(), pause)


def _below(core: CoreState, running: Request, request: Request) -> bool:
    """A running request may be asked to give way; where nobody may ever be overtaken, only to an older one."""
    protected = running.retractions >= core.config.retracts_max
    overtakes = core.config.overtaken_max > 0 or request.number < running.number
    return running.priority < request.priority and not protected and overtakes


def _needed(core: CoreState, request: Request, lower: Sequence[Request]) -> list[Request]:
    """The victims: lowest priority first, then least to compute again, then youngest; none that is not needed."""
    by_cost, count = sorted(lower, key=lambda one: pressure.redo_cost(core, one)), 1
    while not starts(core, request, by_cost[:count]):
        count += 1
        assert count <= len(by_cost), "all of them together are enough"
    chosen = by_cost[:count]
    for victim in chosen[-2::-1]:  # the dearest first; without the last one it was not enough
        others = [one for one in chosen if one is not victim]
        if starts(core, request, others):
            chosen = others
    return chosen


def _plan(core: CoreState, victims: Sequence[Request]) -> StepPlan:
    """What the rows and the resident chunk will want of the next step, without the victims'."""
    rows, memory, resident = core.rows, core.memory, core.resident
    assert memory is not None, "only an epoch schedules"
    batch = rows.decode_batch(core.forming)
    gone = np.array([one.row for one in victims], np.intp)
    going = np.setdiff1d(batch.rows, gone, assume_unique=True)
    starts_at = rows.scheduled[going]
    needy = going[starts_at >= rows.covered[going]]
    budget = core.config.max_batched_tokens - len(going)
    plan = StepPlan(batch, starts_at, needy, budget, len(needy), resident is not None and resident not in victims)
    if resident is not None and plan.partial and budget > 0:
        start, held = resident.scheduled_tokens, int(rows.pages[resident.row])
        wanted = min(resident.target_tokens - start, core.config.chunked_prefill_size, budget)
        count = checkpoints.resident_chunk(core, resident, wanted)
        plan.add(Chunk(resident, start, count, memory.pages_of(start + count) - held))
    return plan


def _freed(core: CoreState, victims: Sequence[Request]) -> Demand:
    """Units that come free or become evictable when these give everything back."""
    memory = core.memory
    assert memory is not None, "only an epoch has rows"
    units = core.rows.held_units(np.array([one.row for one in victims], np.intp))
    locks = [one.lock for one in victims if one.lock is not None]
    windows = [band for band, _ in memory.windows]
    return plus(units, held_alone(locks, len(memory.none), memory.owner, memory.state, windows))
