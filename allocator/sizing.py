"""Sizing: one byte budget becomes a stage's geometry, boot targets per band, and a table that explains them.

Owns the floor (one request at batch size 1) and the order in which the budget is spent. Must never partition the
arena: targets are for reports and admission defaults, at run time any band takes any free bytes. Invariants: the terms
of the table add up to the budget; the targets fit the geometry by the same closed form that decides at run time; a
budget below the floor is refused with the table and the bytes missing.

    budget = fixed allocations of the rank | sink (and padding slot) | chain: state, windows, full attention
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allocator.capacity import Demand, StageWalk
from allocator.cost import request_cost
from allocator.demand import Purpose, RequestSizes, pages_for, request_demand
from allocator.errors import BudgetTooSmall
from allocator.geometry import StageGeometry
from allocator.plan import UNIT_ALIGN_BYTES, StoragePlan, align_up


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the sizing table."""

    name: str
    size_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests of `tokens` stored tokens fit at once, by memory alone."""

    tokens: int
    requests: int


@dataclass(frozen=True)
class Sizing:
    """The result: geometry, id limits, boot targets (units per band, chain order) and the table behind them."""

    geometry: StageGeometry
    page_size: int
    virtual_pages: int
    virtual_slots: int
    terms: list[Term]
    targets: Demand
    slots_wanted: int
    concurrency: list[Concurrency]
    slots_per_request: int = 1

    def lines(self) -> list[str]:
        """The table as text, one line per entry."""
        width = max(len(term.name) for term in self.terms)
        out = [f"{term.name:<{width}}  {term.size_bytes:>16,d} bytes  {term.note}".rstrip() for term in self.terms]
        for band, units in zip(self.geometry.bands, self.targets, strict=True):
            if band.kind == "state":
                out.append(
                    f"band {band.name}: {units:,d} slots of {band.unit_bytes:,d} bytes{self._slots_short(units)}"
                )
            else:
                tokens = units * self.page_size
                out.append(
                    f"band {band.name}: {units:,d} pages of {band.unit_bytes:,d} bytes, {tokens:,d} tokens at "
                    f"{band.unit_bytes / self.page_size:,.0f} bytes each"
                )
        return out + [f"requests of {row.tokens:,d} tokens at once: {row.requests:,d}" for row in self.concurrency]

    def _slots_short(self, slots: int) -> str:
        """Empty where every running request has its slots; else both numbers."""
        if slots >= self.slots_wanted:
            return ""
        per = self.slots_per_request
        requests = f"{slots // per:,d} of {self.slots_wanted // per:,d} requests"
        return f", of {self.slots_wanted:,d} wanted: state for {requests} at once, at {per} each"


def size_arena(
    plan: StoragePlan,
    budget_bytes: int,
    *,
    max_running_requests: int,
    max_model_len: int,
    max_batched_tokens: int,
    fixed: Sequence[Term] = (),
    slots_per_request: int = 1,
    state_slots: int = 0,
) -> Sizing:
    """Spends the budget: fixed terms, sink, state slots, then the most full-attention tokens whose windows also fit.

    `state_slots` 0 means `slots_per_request` for every running request. Raises BudgetTooSmall below the floor.
    """
    for name, value in (
        ("max_running_requests", max_running_requests),
        ("max_model_len", max_model_len),
        ("max_batched_tokens", max_batched_tokens),
        ("slots_per_request", slots_per_request),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    bands = plan.band_geometries()
    start_bytes = _chain_start(plan)
    fixed_bytes = sum(term.size_bytes for term in fixed)
    floor = _floor(plan, max_model_len, max_batched_tokens, slots_per_request)
    terms = [*fixed, Term("sink and padding", start_bytes, "never handed out")]
    # The last band grows down from a multiple of its unit, so the arena needs no more than the walk says.
    arena_bytes = (budget_bytes - fixed_bytes) // UNIT_ALIGN_BYTES * UNIT_ALIGN_BYTES
    missing = _missing_bytes(plan, start_bytes, arena_bytes, floor)
    if missing > 0:
        needs = [
            Term(f"floor: {band.name}", units * band.unit_bytes, f"{units} units for one request at batch size 1")
            for band, units in zip(bands, floor, strict=True)
        ]
        raise BudgetTooSmall(budget_bytes, [*terms, *needs], missing)
    geometry = StageGeometry(arena_bytes, start_bytes, bands)
    walk = StageWalk(geometry)
    slots_wanted = state_slots or slots_per_request * max_running_requests
    slots = _state_slots(walk, plan, floor, slots_wanted)
    longest = _sizes(plan, max_model_len, max_batched_tokens, slots_per_request)
    targets = _targets(walk, plan, slots, max_running_requests, longest, floor)
    chain_bytes = arena_bytes - start_bytes
    rounding = budget_bytes - fixed_bytes - arena_bytes
    terms += [Term("chain", chain_bytes, "shared by all bands")]
    terms += [Term("rounding", rounding, f"the arena is a multiple of {UNIT_ALIGN_BYTES} bytes")] if rounding else []
    assert sum(term.size_bytes for term in terms) == budget_bytes
    assert walk.overlap_bytes(targets) <= 0, "targets fit the geometry they come with"
    virtual_pages = _virtual_pages(walk, plan, max_running_requests, max_model_len)
    virtual_slots = _virtual_slots(walk, plan, virtual_pages + slots_wanted)
    lengths = sorted({max(1, max_model_len // 16), max(1, max_model_len // 4), max_model_len})
    interval = _interval(plan, slots_per_request)
    rows = [
        Concurrency(tokens, requests_at_once(walk, plan, tokens, max_batched_tokens, interval))
        for tokens in lengths
        if any(band.unit_bytes for band in bands)
    ]
    return Sizing(
        geometry,
        plan.page_size,
        virtual_pages,
        virtual_slots,
        terms,
        targets,
        slots_wanted,
        rows,
        slots_per_request,
    )


def _chain_start(plan: StoragePlan) -> int:
    """Bytes before the chain: the sink (unit 0 of every token band), then the padding slot of the state band."""
    token_units = [band.geometry.unit_bytes for band in plan.bands if band.geometry.kind != "state"]
    start = max(token_units)
    for band in plan.bands:
        unit = band.geometry.unit_bytes
        if band.geometry.kind == "state" and unit:
            start = align_up(start, unit) + unit
    return align_up(start, UNIT_ALIGN_BYTES)


def _floor(plan: StoragePlan, max_model_len: int, max_batched_tokens: int, slots_per_request: int) -> Demand:
    """The smallest request there is, one prompt and one output token, with its windows and state in full."""
    one = RequestSizes(prompt_tokens=1, output_tokens=1)
    least = request_demand(plan.band_geometries(), plan.page_size, one, Purpose.CEILING)
    longest = _sizes(plan, max_model_len, max_batched_tokens, slots_per_request)
    most = request_demand(plan.band_geometries(), plan.page_size, longest, Purpose.CEILING)
    pick = {"full": least, "window": most, "state": (slots_per_request,) * len(plan.bands)}
    return tuple(pick[band.geometry.kind][index] for index, band in enumerate(plan.bands))


def _sizes(plan: StoragePlan, tokens: int, max_batched_tokens: int, slots_per_request: int) -> RequestSizes:
    """A request of `tokens` stored tokens; one that owns a checkpoint slot holds its windows back to the checkpoint."""
    chunk = min(tokens, max_batched_tokens)
    return RequestSizes(tokens, 0, chunk_tokens=chunk, checkpoint_interval=_interval(plan, slots_per_request))


def _interval(plan: StoragePlan, slots_per_request: int) -> int:
    """Tokens between checkpoints of a request that owns a checkpoint slot; 0: none does."""
    return max((band.checkpoint_interval for band in plan.bands), default=0) if slots_per_request > 1 else 0


def _missing_bytes(plan: StoragePlan, start_bytes: int, arena_bytes: int, floor: Demand) -> int:
    """Bytes that the arena lacks for the floor (at most 0: it fits); alignment of the last band included."""
    bands = plan.band_geometries()
    last = bands[-1].unit_bytes
    end = StageWalk(StageGeometry(0, start_bytes, bands)).overlap_bytes([*floor[:-1], 0])
    needed = (-(-end // last) + floor[-1]) * last if last else end
    return align_up(needed, UNIT_ALIGN_BYTES) - arena_bytes


def _state_slots(walk: StageWalk, plan: StoragePlan, floor: Demand, wanted: int) -> int:
    """State slots: as many as wanted, or as fit beside the floor of the other bands; 0 without a state band."""
    states = [index for index, band in enumerate(plan.bands) if band.geometry.kind == "state"]
    if not states:
        return 0
    (band,) = states
    assert wanted >= 1

    def fits(slots: int) -> bool:
        counts = list(floor)
        counts[band] = slots
        return walk.overlap_bytes(counts) <= 0

    return _most(fits, wanted)


def _targets(
    walk: StageWalk, plan: StoragePlan, slots: int, max_running_requests: int, longest: RequestSizes, floor: Demand
) -> Demand:
    """The most full-attention pages whose window targets also fit beside the state slots.

    Windows are wanted for every running request at the model's length, and for one batch of new tokens.
    """
    bands, interval = plan.band_geometries(), longest.checkpoint_interval
    cost = request_cost(bands, plan.page_size, longest.prompt_tokens, longest.chunk_tokens, interval)

    def counts(pages: int) -> list[int]:
        out: list[int] = []
        for index, band in enumerate(bands):
            window = min(pages, max_running_requests * cost.owned[index] + cost.tail[index])
            out.append(slots if band.kind == "state" else pages if band.kind == "full" else max(floor[index], window))
        return out

    limit = _page_limit(walk, plan, max_running_requests, longest.prompt_tokens)
    return tuple(counts(_most(lambda pages: walk.overlap_bytes(counts(pages)) <= 0, limit)))


def _page_limit(walk: StageWalk, plan: StoragePlan, max_running_requests: int, max_model_len: int) -> int:
    """More pages than could ever be wanted: what an otherwise empty arena holds, or every request at its longest."""
    unit = plan.bands[-1].geometry.unit_bytes
    if unit:
        return max(0, walk.arena_bytes // unit - -(-walk.start_bytes // unit))
    return max_running_requests * pages_for(max_model_len, plan.page_size)


def _virtual_pages(walk: StageWalk, plan: StoragePlan, max_running_requests: int, max_model_len: int) -> int:
    """The id limit: every page that bytes can hold; where pages have no bytes here, twice the longest working set and
    the pages that the windows' bytes can hold.

    The daemon takes the smallest over all ranks, and a rank that stores no owner bytes must not be the one to limit a
    prefix cache.
    """
    limit = _page_limit(walk, plan, max_running_requests, max_model_len)
    if plan.bands[-1].geometry.unit_bytes:
        return limit
    windows = sum(band.geometry.unit_bytes for band in plan.bands if band.geometry.kind == "window")
    return 2 * limit + ((walk.arena_bytes - walk.start_bytes) // windows if windows else 0)


def _virtual_slots(walk: StageWalk, plan: StoragePlan, most: int) -> int:
    """The id limit of slots: what the bytes hold, so that a prefix cache may fill it with states; at most `most`.

    Every kept state belongs to another last page of a prefix, so there are never more than pages and working sets.
    """
    units = [band.geometry.unit_bytes for band in plan.bands if band.geometry.kind == "state"]
    if not units:
        return 0
    return min(most, (walk.arena_bytes - walk.start_bytes) // units[0]) if units[0] else most


def requests_at_once(
    walk: StageWalk, plan: StoragePlan, tokens: int, max_batched_tokens: int, checkpoint_interval: int = 0
) -> int:
    """How many requests of `tokens` stored tokens one stage holds at once, by memory alone.

    Each with its pages, windows, state and checkpoint; one batch of new tokens on top. On a stage that stores nothing
    for them: the most that its bytes could count.
    """
    cost = request_cost(plan.band_geometries(), plan.page_size, tokens, max_batched_tokens, checkpoint_interval)
    most = walk.arena_bytes // UNIT_ALIGN_BYTES

    def fits(n: int) -> bool:
        return walk.overlap_bytes([n * owned + tail for owned, tail in zip(cost.owned, cost.tail, strict=True)]) <= 0

    return _most(fits, most)


def _most(fits: Callable[[int], bool], high: int) -> int:
    """The largest n in [0, high] for which the monotone `fits` holds; 0 when none does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
