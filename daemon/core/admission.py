"""Admission: which waiting requests start in this step, by what the arena can still promise.

Owns the price of an admission and the verdicts admit, wait and unschedulable. Must never take memory or retract
anybody, and must change nothing for a request that waits. Invariants: at most one request is partly prefilled; a
request is admitted only when its whole prompt, its expected output and everything promised to the others fit together.

    promised = the resident chunk's remaining prompt, in full
             + share x (what all requests with a row may still grow by)

`share` is an estimate in parts per million: retraction raises it, progress lowers it, `reserve = full` pins it to one.
A request that was retracted `retracts_max` times is protected from then on: protected requests are admitted only when
all of them fit the empty arena at their longest, so the ladder always finds somebody else to ask.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from daemon.core.endings import end
from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import EndReason, Verdict
from daemon.core.requests import QUEUED, Request
from daemon.core.rows import Batch, Rows
from daemon.core.state import CoreState

LOOKAHEAD = 16  # waiting requests looked at in one step
SHARE_ONE_PPM = 1_000_000


@dataclass(slots=True)
class Chunk:
    """Prompt tokens [start, start + count) of a request in this step, and the pages it takes for them."""

    request: Request
    start: int
    count: int
    pages: int


@dataclass(slots=True)
class StepPlan:
    """A step being planned; nothing of it has happened yet. `needy` rows of the batch need one page each."""

    batch: Batch
    needy: Rows
    budget_tokens: int
    pages: int
    chunks: list[Chunk] = field(default_factory=list)
    new_rows: int = 0


@dataclass(slots=True)
class PrefillBudget:
    """What is promised while the pass admits; all in pages."""

    held: int
    ceiling: int
    resident_rest: int
    share_ppm: int

    def price(self, planned: int, prompt: int, ceiling: int) -> int:
        """Pages that must fit now for a request of `prompt` pages (`ceiling` at its longest) to be admitted."""
        assert prompt <= ceiling, "a request's prompt is within its ceiling"
        growth = self.ceiling + ceiling - prompt - self.held - planned - self.resident_rest
        expected = -(-max(growth, 0) * self.share_ppm // SHARE_ONE_PPM)
        return planned + prompt + self.resident_rest + expected


def admit(core: CoreState, plan: StepPlan, now_ns: int, out: Outputs) -> None:
    """Add chunks of new requests to the plan, in the queue's order, until something runs out."""
    if not len(core.queue):
        return
    if plan.budget_tokens <= 0:
        _waits(core.queue.first(1)[0], "budget", {"limit": core.config.max_batched_tokens}, now_ns, out)
        return
    if core.throttled_steps and core.holding:
        _waits(core.queue.first(1)[0], "throttled", {"steps": core.throttled_steps}, now_ns, out)
        return
    budget = _open_budget(core, plan)
    resident_taken = core.resident is not None
    for request in core.queue.first(LOOKAHEAD):
        if plan.budget_tokens <= 0:
            return
        if plan.new_rows >= core.rows.free_count:
            _waits(request, "rows", {"limit": core.rows.capacity}, now_ns, out)
            return
        target = request.prompt_tokens + request.output_tokens
        count = min(target, core.config.chunked_prefill_size, plan.budget_tokens)
        if count < target and resident_taken:
            _waits(request, "resident", {"prompt_tokens": target}, now_ns, out)
            continue
        if not _fits(core, request, budget, plan, now_ns, out):
            return
        if request.state not in QUEUED:
            continue  # it ended as unschedulable
        resident_taken |= count < target
        _plan_new(core, request, budget, plan, count, target)


def _open_budget(core: CoreState, plan: StepPlan) -> PrefillBudget:
    assert core.memory is not None, "only an epoch admits"
    rest = 0
    if core.resident is not None:
        planned = sum(chunk.pages for chunk in plan.chunks if chunk.request is core.resident)
        held = int(core.rows.pages[core.resident.row])
        rest = core.memory.pages_of(core.resident.target_tokens) - held - planned
    return PrefillBudget(core.memory.live_units()[-1], core.ceiling_pages, rest, core.share_ppm)


def _fits(core: CoreState, request: Request, budget: PrefillBudget, plan: StepPlan, now_ns: int, out: Outputs) -> bool:
    """False when the pass must stop at this request; it waits then. True also when it ended as unschedulable."""
    memory = core.memory
    assert memory is not None, "only an epoch admits"
    if request.retractions >= core.config.retracts_max:
        protected = _protected_pages(core, plan) + request.ceiling_pages
        if protected > memory.capacity_pages:
            numbers = {"protected_pages": protected, "capacity_pages": memory.capacity_pages}
            _waits(request, "protected", numbers, now_ns, out)
            return False
    prompt = memory.pages_of(request.prompt_tokens + request.output_tokens)
    price = budget.price(plan.pages, prompt, request.ceiling_pages)
    refusal = memory.refusal(price)
    if refusal is None:
        return True
    numbers = {"pages": price, "pages_short": refusal.units_short, "stage": refusal.stage, "band": refusal.band}
    if core.holding or core.in_flight or plan.new_rows:
        _waits(request, "memory", numbers, now_ns, out)
        return False
    detail = f"nothing holds memory and still: {refusal.text()}"
    end(core, request, EndReason.UNSCHEDULABLE, detail, now_ns, out)
    return True


def _protected_pages(core: CoreState, plan: StepPlan) -> int:
    """Pages at their longest of all protected requests that have a row or get one in this step."""
    starting = [chunk.request for chunk in plan.chunks if chunk.request.row < 0]
    holders = [owner for owner in core.rows.owners if owner is not None]
    return sum(one.ceiling_pages for one in holders + starting if one.retractions >= core.config.retracts_max)


def _plan_new(
    core: CoreState, request: Request, budget: PrefillBudget, plan: StepPlan, count: int, target: int
) -> None:
    assert core.memory is not None, "only an epoch admits"
    assert 0 < count <= min(target, plan.budget_tokens), "a chunk has tokens and fits the budget"
    pages = core.memory.pages_of(count)
    plan.chunks.append(Chunk(request, 0, count, pages))
    plan.pages += pages
    plan.budget_tokens -= count
    plan.new_rows += 1
    budget.ceiling += request.ceiling_pages
    if count < target:
        budget.resident_rest = core.memory.pages_of(target) - pages


def _waits(request: Request, reason: str, numbers: dict[str, int], now_ns: int, out: Outputs) -> None:
    """Say once per change of reason why the request was passed over."""
    if request.last_wait != reason:
        request.last_wait = reason
        out.decisions.append(Decided(now_ns, Verdict.WAITS, request.number, reason, numbers))
