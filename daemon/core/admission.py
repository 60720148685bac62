"""Admission: which waiting requests start in this step, by what the arena can still promise.

Owns the price of an admission and the verdicts admit, wait and unschedulable. Must never take memory or retract
anybody, and must change nothing for a request that waits. Invariants: at most one request is partly prefilled; a
request is admitted only when its whole prompt, its expected output and everything promised to the others fit together,
in all bands jointly.

    promised = what the resident chunk needs for the rest of its prompt, in full
             + share x (what all requests with a row may still grow by)

State slots are no estimate: they are taken at admission, all of a request's or none. A window costs what it holds at
once: while a chunk is prefilled that chunk and the window before it, later the window alone.

`share` is an estimate in parts per million: retraction raises it, progress lowers it, `reserve = full` pins it to one.
A request that was retracted `retracts_max` times is protected from then on: protected requests are admitted only when
all of them fit the empty arena at their longest, so the ladder always finds somebody else to ask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from allocator.capacity import CapacityRefusal, Demand
from allocator.columns import Int32s
from allocator.demand import joint
from daemon.core import caching, checkpoints, passes
from daemon.core.caching import Hit
from daemon.core.endings import end
from daemon.core.memory import larger, minus, plus, smaller
from daemon.core.outputs import Outputs
from daemon.core.reasons import EndReason
from daemon.core.requests import Request
from daemon.core.rows import Batch, Rows
from daemon.core.state import CoreState
from daemon.core.tree_nodes import Match

LOOKAHEAD = 16  # waiting requests looked at in one step
LOOKUPS_MAX = 4  # of those passed over in one step for their length, so many are looked up in the cache
SHARE_ONE_PPM = 1_000_000


@dataclass(slots=True)
class Chunk:
    """Prompt tokens [start, start + count) of a request in this step, and the pages and state slots it takes.

    `hit` is what a new request found in the prefix cache: it starts behind it. None when there is no cache, and for a
    request that goes on.
    """

    request: Request
    start: int
    count: int
    pages: int
    slots: int = 0
    hit: Hit | None = None

    @property
    def target(self) -> int:
        """Tokens that the request's prefill must cover."""
        return self.request.target_tokens if self.request.row >= 0 else self.request.sequence_tokens

    @property
    def last(self) -> bool:
        """The prefill ends with it."""
        return self.start + self.count == self.target


@dataclass(slots=True)
class StepPlan:
    """A step being planned; nothing of it has happened yet.

    `starts` are the next positions of the batch's rows, `needy` those of the rows that need one page each; `partial`: a
    request is partly prefilled when the step is done.
    """

    batch: Batch
    starts: Int32s
    needy: Rows
    budget_tokens: int
    pages: int
    partial: bool
    slots: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    new_rows: int = 0

    def add(self, chunk: Chunk) -> None:
        """Plan a chunk: its tokens leave the budget, its units join what the step takes."""
        assert 0 < chunk.count <= self.budget_tokens, "a chunk has tokens and fits the budget"
        if not chunk.last:
            assert chunk.request.row >= 0 or not self.partial, "one request at a time is partly prefilled"
            self.partial = True
        elif chunk.request.row >= 0:
            self.partial = False
        self.chunks.append(chunk)
        self.pages += chunk.pages
        self.slots += chunk.slots
        self.budget_tokens -= chunk.count


@dataclass(slots=True)
class PrefillBudget:
    """What is promised while the pass admits, in units per band.

    `longest` is what all rows together hold at their longest, the partly prefilled one as long as it is; `rest` what
    that one still needs for its prompt, beside what it has and this step takes. `named` is what of `longest` is there
    already: pages in the rows' tables, the cache's among them, which stay shared for good, and slots; of a window what
    is held against eviction, each unit once, because every reader replaces what it shares by units of its own.
    """

    named: Demand
    longest: Demand
    rest: Demand
    share_ppm: int

    def price(self, planned: Demand, need: Demand, covered: Demand, longest: Demand) -> Demand:
        """Units that must fit now for a request to be admitted.

        `need` it takes until its prompt is covered, `covered` it has then, and `longest` at its longest; `planned` were
        promised to this step.
        """
        units: list[int] = []
        columns = zip(planned, need, covered, longest, self.named, self.longest, self.rest, strict=True)
        for taken, own, has, most, named, others, rest in columns:
            growth = others + most - has - named - taken - rest
            expected = -(-max(growth, 0) * self.share_ppm // SHARE_ONE_PPM)
            units.append(taken + own + rest + expected)
        return tuple(units)


def admit(core: CoreState, plan: StepPlan, now_ns: int, out: Outputs) -> None:
    """Add chunks of new requests to the plan, in the queue's order, until something runs out."""
    if not len(core.queue):
        return
    if plan.budget_tokens <= 0:
        passes.skip(core, core.queue.first(1)[0], "budget", {"limit": core.config.max_batched_tokens}, now_ns, out)
        return
    if core.throttled_steps and core.holding:
        passes.skip(core, core.queue.first(1)[0], "throttled", {"steps": core.throttled_steps}, now_ns, out)
        return
    budget, passed_over = _open_budget(core, plan), 0
    for request in core.queue.first(LOOKAHEAD):
        if plan.budget_tokens <= 0:
            passes.skip(core, request, "budget", {"limit": core.config.max_batched_tokens}, now_ns, out)
            return
        if plan.new_rows >= core.rows.free_count:
            passes.skip(core, request, "rows", {"limit": core.rows.capacity}, now_ns, out)
            return
        # Without a hit it is told from its length alone; of those that only a hit could help, few are looked up.
        chunk = _chunk(core, request, None, plan)
        if not plan.partial or chunk.last or passed_over < LOOKUPS_MAX:
            match = caching.look(core, request)
            chunk = _chunk(core, request, match, plan)
        if not chunk.last and plan.partial:
            passed_over += 1
            passes.skip(core, request, "resident", {"prompt_tokens": request.sequence_tokens}, now_ns, out)
            continue
        chunk.hit = caching.hold(core, request, match)
        refusal = _refusal(core, chunk, budget, plan)
        if refusal is not None and chunk.start and _alone(core, plan):
            # What it found is held beside what it takes, and nobody else gives anything back: it starts cold.
            caching.drop(core, chunk.hit)
            chunk = _chunk(core, request, None, plan)
            chunk.hit = caching.hold(core, request, match, cold=True)
            refusal = _refusal(core, chunk, budget, plan)
        if refusal is None:
            _plan_new(core, chunk, budget, plan)
            continue
        caching.drop(core, chunk.hit)
        if not _alone(core, plan):
            passes.skip(core, request, *refusal[:2], now_ns, out)
            return
        detail = f"nothing holds memory and still: {refusal.text}"
        end(core, request, EndReason.UNSCHEDULABLE, detail, now_ns, out)


def _chunk(core: CoreState, request: Request, match: Match | None, plan: StepPlan) -> Chunk:
    """The first chunk of a new request, behind what it finds in the cache (None: from its first token)."""
    memory = core.memory
    assert memory is not None, "only an epoch admits"
    start, target = match.tokens if match is not None else 0, request.sequence_tokens
    count = min(target - start, core.config.chunked_prefill_size, plan.budget_tokens)
    count = checkpoints.chunk(core, request, start, count, target, match.matched_tokens if match is not None else 0)
    pages = memory.pages_of(start + count) - memory.pages_of(start)
    return Chunk(request, start, count, pages, memory.slots_each)


def _open_budget(core: CoreState, plan: StepPlan) -> PrefillBudget:
    memory, resident = core.memory, core.resident
    assert memory is not None, "only an epoch admits"
    rest, longest = memory.none, core.steady
    if resident is not None and plan.partial:
        prompt = memory.ceiling(resident.target_tokens)
        pages = sum(chunk.pages for chunk in plan.chunks if chunk.request is resident)
        after = plus(_had(core, resident.row), memory.demand(pages))
        rest = minus(larger(prompt, after), after)
        longest = plus(minus(longest, resident.steady), larger(resident.steady, prompt))
    named, live = list(core.rows.all_named_units()), memory.live_units()
    free = memory.cache.reclaimable() if memory.cache is not None else memory.none
    for band, _ in memory.windows:
        named[band] = live[band] - free[band]
    return PrefillBudget(tuple(named), longest, rest, core.share_ppm)


def _had(core: CoreState, row: int) -> Demand:
    """What a row has of what it holds at its longest: pages in its table; slots and window units of its own."""
    own = [len(ids) for ids in core.rows.held(row)]
    return (*own[:-1], int(core.rows.pages[row]))


class _Refusal(NamedTuple):
    """Why a request is not admitted now: the verdict's reason and numbers, and the sentence."""

    reason: str
    numbers: dict[str, int]
    text: str


def _alone(core: CoreState, plan: StepPlan) -> bool:
    """Nobody holds memory that will come back."""
    return not (core.holding or core.in_flight or plan.new_rows)


def _refusal(core: CoreState, chunk: Chunk, budget: PrefillBudget, plan: StepPlan) -> _Refusal | None:
    """Why a request that begins with this chunk cannot be admitted, or None. Changes nothing."""
    memory, request = core.memory, chunk.request
    assert memory is not None, "only an epoch admits"
    if request.retractions >= core.config.retracts_max:
        refused = memory.never_fits(plus(_protected(core, plan), request.ceiling))
        if refused is not None:
            return _Refusal("protected", shortage(refused), refused.text())
    prompt = memory.ceiling(chunk.target)
    beside = memory.demand(memory.pages_of(chunk.target) - memory.pages_of(chunk.start), memory.slots_each)
    found = _found(core, chunk)
    need = smaller(minus(prompt, found), beside)
    longest = larger(request.steady, prompt)
    price = budget.price(memory.demand(plan.pages, plan.slots), need, plus(found, need), longest)
    refused = memory.refusal(price)
    if refused is None:
        return None
    return _Refusal("memory", {"units": price[refused.band]} | shortage(refused), refused.text())


def _found(core: CoreState, chunk: Chunk) -> Demand:
    """What a new request has from the start of what it holds at its longest: cached pages, and window units that it
    alone reads; those that others read too each of them will replace."""
    memory = core.memory
    assert memory is not None, "only an epoch has a cache"
    if chunk.hit is None:
        return memory.none
    found = [0] * len(memory.none)
    found[memory.owner] = len(chunk.hit.match.pages)
    for band, _ in memory.windows:
        found[band] = chunk.hit.pinned[band]
    return tuple(found)


def shortage(refusal: CapacityRefusal) -> dict[str, int]:
    """The numbers of a verdict about memory: where it lacks and how much."""
    return {"units_short": refusal.units_short, "stage": refusal.stage, "band": refusal.band}


def _protected(core: CoreState, plan: StepPlan) -> Demand:
    """Units at their longest of all protected requests that have a row or get one in this step."""
    assert core.memory is not None, "only an epoch admits"
    starting = [chunk.request for chunk in plan.chunks if chunk.request.row < 0]
    holders = [owner for owner in core.rows.owners if owner is not None]
    protected = [one.ceiling for one in holders + starting if one.retractions >= core.config.retracts_max]
    return joint(protected) if protected else core.memory.none


def _plan_new(core: CoreState, chunk: Chunk, budget: PrefillBudget, plan: StepPlan) -> None:
    memory, request = core.memory, chunk.request
    assert memory is not None, "only an epoch admits"
    plan.add(chunk)
    plan.new_rows += 1
    found = _found(core, chunk)
    budget.named = plus(budget.named, found)
    if chunk.last:
        budget.longest = plus(budget.longest, request.steady)
        return
    prompt = memory.ceiling(chunk.target)
    after = plus(found, memory.demand(chunk.pages, chunk.slots))
    budget.longest = plus(budget.longest, larger(request.steady, prompt))
    budget.rest = minus(larger(prompt, after), after)
