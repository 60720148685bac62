"""Budget: what an admission costs beside everything that was promised before, in units per band.

Owns the price. Must never take memory or change anything. Invariant: a price is what must fit now for the request's
whole prompt, its expected output and everything promised to the others to fit together, in all bands jointly.

    promised = what the resident chunk needs for the rest of its prompt, in full
             + share x (what all requests with a row may still grow by)

State slots are no estimate: they are taken at admission, all of a request's or none. A window costs what it holds at
once: while a chunk is prefilled that chunk and the window before it, later the window alone. Shares are those of
`daemon.core.expected`: the rows' mean, and the candidate's own for what it may grow by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from allocator.capacity import CapacityRefusal, Demand
from allocator.demand import joint
from daemon.core.expected import SHARE_ONE_PPM
from daemon.core.memory import larger, minus, plus, smaller
from daemon.core.requests import Request
from daemon.core.state import CoreState
from daemon.core.step_plan import Chunk, StepPlan


class Refusal(NamedTuple):
    """Why a request is not admitted now: the verdict's reason and numbers, and the sentence."""

    reason: str
    numbers: dict[str, int]
    text: str


@dataclass(slots=True)
class PrefillBudget:
    """What is promised while the pass admits, in units per band.

    `longest` is what all rows together hold at their longest, the partly prefilled one as long as it is; `rest` what
    that one still needs for its prompt, beside what it has and this step takes. `named` is what of `longest` is there
    already: pages in the rows' tables, the cache's among them, which stay shared for good, and slots; of a window what
    is held against eviction, each unit once, because every reader replaces what it shares by units of its own.
    `share_ppm` is expected of what the others may grow by. `coming` are units that running requests would give back
    which are asked to give way; nothing outside the question whether they should.
    """

    named: Demand
    longest: Demand
    rest: Demand
    share_ppm: int
    coming: Demand | None = None

    def price(self, planned: Demand, need: Demand, covered: Demand, longest: Demand, own_share_ppm: int) -> Demand:
        """Units that must fit now for a request to be admitted.

        `need` it takes until its prompt is covered, `covered` it has then, and `longest` at its longest; `planned` were
        promised to this step.
        """
        units: list[int] = []
        columns = zip(planned, need, covered, longest, self.named, self.longest, self.rest, strict=True)
        for taken, needs, has, most, named, others, rest in columns:
            growth = max(others + most - has - named - taken - rest, 0)
            own = min(max(most - has, 0), growth)
            expected = -(-((growth - own) * self.share_ppm + own * own_share_ppm) // SHARE_ONE_PPM)
            units.append(taken + needs + rest + expected)
        return tuple(units)

    def refusal(self, core: CoreState, chunk: Chunk, plan: StepPlan, chunk_tokens: int = 0) -> Refusal | None:
        """Why a request that begins with this chunk cannot be admitted, or None. Changes nothing.

        `chunk_tokens` is the longest chunk of its prompt, 0 as configured.
        """
        memory, request = core.memory, chunk.request
        assert memory is not None, "only an epoch admits"
        if request.retractions >= core.config.retracts_max:
            refused = memory.never_fits(plus(protected(core, plan), request.ceiling))
            if refused is not None:
                return Refusal("protected", shortage(refused), refused.text())
        prompt = memory.ceiling(chunk.target, chunk_tokens)
        beside = memory.demand(memory.pages_of(chunk.target) - memory.pages_of(chunk.start), memory.slots_each)
        had = found(core, chunk)
        need = smaller(minus(prompt, had), beside)
        longest = larger(request.steady, prompt)
        share_ppm = core.expected.share_ppm(request.group.namespace)
        price = self.price(memory.demand(plan.pages, plan.slots), need, plus(had, need), longest, share_ppm)
        refused = memory.refusal(price) if self.coming is None else memory.refusal(price, self.coming)
        if refused is None:
            return None
        return Refusal("memory", {"units": price[refused.band]} | shortage(refused), refused.text())

    def promise(self, core: CoreState, chunk: Chunk, chunk_tokens: int = 0) -> None:
        """The request that begins with this chunk is admitted: the next ones are priced beside it."""
        memory, request = core.memory, chunk.request
        assert memory is not None, "only an epoch admits"
        had = found(core, chunk)
        self.named = plus(self.named, had)
        if chunk.last:
            self.longest = plus(self.longest, request.steady)
            return
        prompt = memory.ceiling(chunk.target, chunk_tokens)
        after = plus(had, memory.demand(chunk.pages, chunk.slots))
        self.longest = plus(self.longest, larger(request.steady, prompt))
        self.rest = minus(larger(prompt, after), after)


def open_budget(core: CoreState, plan: StepPlan) -> PrefillBudget:
    """What is promised before the pass admits anybody."""
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
    return PrefillBudget(tuple(named), longest, rest, core.expected.mean_ppm())


def without(core: CoreState, budget: PrefillBudget, rows: Sequence[Request], freed: Demand) -> PrefillBudget:
    """The budget as if these requests had given their rows back, which would free so many units."""
    memory = core.memory
    assert memory is not None, "only an epoch admits"
    longest = minus(budget.longest, joint([request.steady for request in rows])) if rows else budget.longest
    theirs = core.rows.named_units(np.array([request.row for request in rows], np.intp))
    named = list(minus(budget.named, theirs))
    for band, _ in memory.windows:
        named[band] = budget.named[band] - freed[band]
    weights = [(request.group.namespace, request.max_output - request.began_output) for request in rows]
    return PrefillBudget(tuple(named), longest, budget.rest, core.expected.mean_ppm(weights), freed)


def found(core: CoreState, chunk: Chunk) -> Demand:
    """What a new request has from the start of what it holds at its longest: cached pages, and window units that it
    alone reads; those that others read too each of them will replace."""
    memory = core.memory
    assert memory is not None, "only an epoch has a cache"
    if chunk.hit is None:
        return memory.none
    units = [0] * len(memory.none)
    units[memory.owner] = len(chunk.hit.match.pages)
    for band, _ in memory.windows:
        units[band] = chunk.hit.pinned[band]
    return tuple(units)


def shortage(refusal: CapacityRefusal) -> dict[str, int]:
    """The numbers of a verdict about memory: where it lacks and how much."""
    return {"units_short": refusal.units_short, "stage": refusal.stage, "band": refusal.band}


def protected(core: CoreState, plan: StepPlan) -> Demand:
    """Units at their longest of all protected requests that have a row or get one in this step.

    A request that was retracted `retracts_max` times is protected: such requests are admitted only when all of them fit
    the empty arena at their longest, so the ladder always finds somebody else to ask.
    """
    assert core.memory is not None, "only an epoch admits"
    starting = [chunk.request for chunk in plan.chunks if chunk.request.row < 0]
    holders = [owner for owner in core.rows.owners if owner is not None]
    ceilings = [one.ceiling for one in holders + starting if one.retractions >= core.config.retracts_max]
    return joint(ceilings) if ceilings else core.memory.none


def _had(core: CoreState, row: int) -> Demand:
    """What a row has of what it holds at its longest: pages in its table; slots and window units of its own."""
    own = [len(ids) for ids in core.rows.held(row)]
    return (*own[:-1], int(core.rows.pages[row]))
