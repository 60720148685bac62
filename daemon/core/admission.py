"""Admission: which waiting requests start in this step, by what the arena can still promise.

Owns the pass over the queue and the verdicts admit, wait and unschedulable. Must never take memory or retract anybody,
and must change nothing for a request that waits. Invariants: at most one request is partly prefilled; a request is
admitted only when its whole prompt, its expected output and everything promised to the others fit together
(`daemon.core.budget`), in all bands jointly; nobody is overtaken more often than the queue allows.

    passed over, the next one is asked    resident   another prompt is partly prefilled, and it would need more chunks
                                          sibling    another choice of it computes a prompt that it can then share
    the pass ends here                    budget, throttled, rows, microbatch, memory, protected
    the pass does not begin               trial: suspects (`daemon.core.suspects`) start one by one, and nobody beside
    it ends                               unschedulable: nobody holds memory that would come back, and it does not fit

Where windows are what lacks, a smaller chunk may fit: the request starts with one, and goes on as memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence

from daemon.core import caching, checkpoints, microbatches, passes
from daemon.core.budget import PrefillBudget, Refusal, open_budget
from daemon.core.endings import end
from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import EndReason, Verdict
from daemon.core.requests import Request
from daemon.core.state import CoreState
from daemon.core.step_plan import Chunk, StepPlan
from daemon.core.tree_nodes import Match

LOOKAHEAD = 16  # waiting requests looked at in one step
SIBLINGS_MAX = 128  # choices that wait for another one of theirs and are passed over in one step beside those
LOOKUPS_MAX = 4  # of those passed over in one step for their length, so many are looked up in the cache
REFRESHES_MAX = 4  # looked up in one step for the policy that sorts by it; one where nobody can start


def admit(core: CoreState, plan: StepPlan, first: Request | None, now_ns: int, out: Outputs) -> None:
    """Add chunks of new requests to the plan, in the queue's order, until something runs out.

    `first`: the one for which others gave way by priority.
    """
    while core.suspects and not _try_next(core, plan, now_ns, out):
        pass
    if core.suspects:
        return
    while len(core.queue) and not _pass(core, plan, first, now_ns, out):
        assert not plan.new_rows, "only where nobody holds memory a request ends for want of it"
        first = None


def _try_next(core: CoreState, plan: StepPlan, now_ns: int, out: Outputs) -> bool:
    """Start the next suspect, if nobody else holds anything; False when it ended and the next one is asked."""
    if core.trial is not None or not _alone(core, plan):
        numbers = {"suspects": len(core.suspects), "tried": core.trial.number if core.trial is not None else 0}
        passes.skip(core, core.queue.head(), "trial", numbers, now_ns, out)
        return True
    request = core.requests[next(iter(core.suspects))]
    match, chunk = first_chunk(core, request, plan, look=True)
    budget = open_budget(core, plan)
    chunk, chunk_tokens, refusal = _fit(core, chunk, match, budget, plan, may_start_cold=True)
    if refusal is not None:
        _end_unschedulable(core, request, refusal, now_ns, out)
        return False
    core.trial = request
    _start(core, chunk, chunk_tokens, budget, plan, now_ns, out)
    return True


def _end_unschedulable(core: CoreState, request: Request, refusal: Refusal, now_ns: int, out: Outputs) -> None:
    end(core, request, EndReason.UNSCHEDULABLE, f"nothing holds memory and still: {refusal.text}", now_ns, out)


def _pass(core: CoreState, plan: StepPlan, first: Request | None, now_ns: int, out: Outputs) -> bool:
    """One walk over the queue; False when a request ended and the walk must begin again."""
    _refresh(core, 1 if _closed(core, plan) else REFRESHES_MAX)
    walk, looked, siblings, hopeless = core.queue.walk(first), 0, 0, 0
    budget: PrefillBudget | None = None
    for request in walk:
        closed = _closed(core, plan, request is first)
        if closed is not None:
            passes.skip(core, request, *closed, now_ns, out)
            return True
        other = sibling(core, request, plan.chunks)
        if other and siblings < SIBLINGS_MAX:
            siblings += 1
            passes.skip(core, request, "sibling", {"sibling": other}, now_ns, out)
            continue
        looked += 1
        if looked > LOOKAHEAD:
            return True
        match, chunk = first_chunk(core, request, plan, hopeless < LOOKUPS_MAX)
        if not chunk.last and plan.partial:
            hopeless += 1
            passes.skip(core, request, "resident", {"prompt_tokens": request.sequence_tokens}, now_ns, out)
            continue
        budget = budget or open_budget(core, plan)
        may_start_cold = request is first or _alone(core, plan)
        chunk, chunk_tokens, refusal = _fit(core, chunk, match, budget, plan, may_start_cold)
        if refusal is None:
            _start(core, chunk, chunk_tokens, budget, plan, now_ns, out)
            walk.take(chunk.charged_tokens)
            continue
        if not _alone(core, plan):
            passes.skip(core, request, *refusal[:2], now_ns, out)
            return True
        _end_unschedulable(core, request, refusal, now_ns, out)
        return False
    return True


def _refresh(core: CoreState, most: int) -> None:
    """Look some waiting requests up, where the queue sorts by what the cache knows of them."""
    sorts = core.queue.longest_prefix
    if sorts is None:
        return
    for request in sorts.due(most):
        match = caching.look(core, request)
        sorts.found(request, match.tokens if match is not None else 0)


def first_chunk(core: CoreState, request: Request, plan: StepPlan, look: bool) -> tuple[Match | None, Chunk]:
    """How a new request would begin: behind its hit, or from its first token where there is no need to look it up.

    Whether it needs more chunks than one is told from its length alone; where only a hit could help, `look` says
    whether it is looked up.
    """
    chunk, match = _chunk(core, request, None, plan), None
    if not plan.partial or chunk.last or look:
        match = caching.look(core, request)
        chunk = _chunk(core, request, match, plan)
    return match, chunk


def _fit(
    core: CoreState, chunk: Chunk, match: Match | None, budget: PrefillBudget, plan: StepPlan, may_start_cold: bool
) -> tuple[Chunk, int, Refusal | None]:
    """The chunk with which the request can begin, holding its hit, and the longest chunk of its prompt (0: as
    configured); or why it cannot, holding nothing."""
    request = chunk.request
    chunk.hit = caching.hold(core, request, match)
    refusal = budget.refusal(core, chunk, plan)
    if refusal is None:
        return chunk, 0, None
    smaller, chunk_tokens = _shrunk(core, chunk, match, budget, plan)
    if smaller is not None:
        return smaller, chunk_tokens, None
    caching.drop(core, chunk.hit)
    if chunk.start and may_start_cold:
        # What it found is held beside what it takes, and it is not to wait until others give something back.
        left_tokens, chunk = chunk.start, _chunk(core, request, None, plan)
        chunk.hit, chunk.left_tokens = caching.hold(core, request, match, cold=True), left_tokens
        refusal = budget.refusal(core, chunk, plan)
        if refusal is None:
            return chunk, 0, None
        caching.drop(core, chunk.hit)
    return chunk, 0, refusal


def _closed(core: CoreState, plan: StepPlan, made_way: bool = False) -> tuple[str, dict[str, int]] | None:
    """Why nobody can start in this step, whoever it is, with the numbers; None: somebody may.

    Who others `made_way` for starts in any micro-batch.
    """
    if plan.budget_tokens <= 0:
        return "budget", {"limit": core.config.max_batched_tokens}
    if core.throttled_steps and core.holding:
        return "throttled", {"steps": core.throttled_steps}
    if plan.new_rows >= core.rows.free_count:
        return "rows", {"limit": core.rows.capacity}
    share = 0 if made_way else microbatches.full(core, plan.new_rows)
    if share:
        return "microbatch", {"rows": core.rows.bound[core.forming] + plan.new_rows, "limit": share}
    return None


def sibling(core: CoreState, request: Request, planned: Sequence[Chunk]) -> int:
    """Another choice of this request that computes whole pages of the prompt which this one can share later, or 0.

    `planned` are chunks that the step being formed has so far.
    """
    group, memory = request.group, core.memory
    assert memory is not None, "only an epoch admits"
    owed = group.sampling.prompt_logprobs >= 0 and request.prompt_logprobs_next < request.prompt_tokens
    if group.accepted.n == 1 or memory.cache is None or not group.store or owed:
        return 0
    grid = memory.checkpoint_interval or memory.page_size
    shared = (request.prompt_tokens - 1) // grid * grid
    for chunk in planned:
        if chunk.request.group is group and chunk.start < shared:
            return chunk.request.number
    first = group.accepted.first_request
    for number in range(first, first + group.accepted.n):
        other = core.requests.get(number)
        if other is None or other.row < 0 or other.lock is None or other.lock.hit_pages * memory.page_size >= shared:
            continue
        gift = core.gifts.get(other.row)
        coming = gift is not None and not gift.refused and gift.position <= request.prompt_tokens
        if other.processed_tokens < shared or coming:
            return number
    return 0


def _chunk(core: CoreState, request: Request, match: Match | None, plan: StepPlan, most: int = 0) -> Chunk:
    """The first chunk of a new request, behind what it finds in the cache (None: from its first token).

    `most` tokens at most, 0 as configured.
    """
    memory = core.memory
    assert memory is not None, "only an epoch admits"
    start, target = match.tokens if match is not None else 0, request.sequence_tokens
    count = min(target - start, most or core.config.chunked_prefill_size, plan.budget_tokens)
    count = checkpoints.first_chunk(core, request, match, count, target)
    pages = memory.pages_of(start + count) - memory.pages_of(start)
    return Chunk(request, start, count, pages, memory.slots_each)


def _shrunk(
    core: CoreState, chunk: Chunk, match: Match | None, budget: PrefillBudget, plan: StepPlan
) -> tuple[Chunk | None, int]:
    """The same start with the largest smaller chunk that fits, a power of two of pages, and that size in tokens."""
    memory = core.memory
    assert memory is not None, "only an epoch admits"
    if not memory.windows or plan.partial:
        return None, 0  # what full pages and slots take does not hang on the chunk; nobody else may be partly prefilled

    def begins(most: int) -> Chunk | None:
        smaller = _chunk(core, chunk.request, match, plan, most)
        smaller.hit = chunk.hit
        return smaller if smaller.count <= most and budget.refusal(core, smaller, plan, most) is None else None

    most, best = memory.page_size, begins(memory.page_size)
    while best is not None and 2 * most < chunk.count:
        larger = begins(2 * most)
        if larger is None:
            break
        most, best = 2 * most, larger
    return best, most


def _alone(core: CoreState, plan: StepPlan) -> bool:
    """Nobody holds memory that will come back."""
    return not (core.holding or core.in_flight or plan.new_rows)


def _start(
    core: CoreState,
    chunk: Chunk,
    chunk_tokens: int,
    budget: PrefillBudget,
    plan: StepPlan,
    now_ns: int,
    out: Outputs,
) -> None:
    """The request starts in this step."""
    if chunk_tokens:
        wanted = min(chunk.computed_tokens, core.config.chunked_prefill_size, plan.budget_tokens)
        numbers = {"tokens": chunk.count, "wanted_tokens": wanted}
        out.decisions.append(Decided(now_ns, Verdict.SHRUNK, chunk.request.number, "memory", numbers))
    plan.add(chunk)
    plan.new_rows += 1
    budget.promise(core, chunk, chunk_tokens)
