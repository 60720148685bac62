"""Prices: what requests of given lengths and a mix of requests cost, how many fit at once, and what runs out first.

Owns the arithmetic over a plan. Must never price a unit by rules of its own: units come from `allocator.cost`, fits
from the capacity form that decides at run time. Bytes are those of one tensor rank of each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, prod
from typing import NamedTuple

from allocator.capacity import Demand
from allocator.cost import Cost, held_at, request_cost
from allocator.decl import dtype_bytes
from allocator.demand import stored_tokens
from tools.planning.mix import MixLine
from tools.planning.stages import Plan, Stage


class Shortage(NamedTuple):
    """What the next request would lack: the stage, and the band that asks it for most bytes."""

    stage: int
    band: str


class Price(NamedTuple):
    """A request of `tokens` stored tokens: its cost, how many of them fit at once, and what then runs out."""

    tokens: int
    cost: Cost
    at_once: int
    first: Shortage


class Held(NamedTuple):
    """Bytes of one request between two forwards, over all stages.

    `needed_bytes`: of every stored token in full attention, of those that the next token attends to in windows, and of
    the state, without page rounding and alignment. `checkpoint_bytes` and `tail_bytes` are beside `held_bytes`.
    """

    tokens: int
    needed_bytes: int
    held_bytes: int
    checkpoint_bytes: int
    tail_bytes: int

    @property
    def ratio(self) -> float:
        """Held over needed."""
        return self.held_bytes / self.needed_bytes


class Mixed(NamedTuple):
    """A mix at one moment of its requests' lives: how many at once, their units per band, those shared, the limit."""

    moment: str
    at_once: int
    units: Demand
    shared: Demand
    first: Shortage


def price(plan: Plan, tokens: int) -> Price:
    """The price of requests of `tokens` stored tokens."""
    cost = _cost(plan, tokens)
    at_once = max(0, plan.form.most(cost.tail, cost.owned))
    return Price(tokens, cost, at_once, _shortage(plan, _times(at_once, cost.owned, cost.tail), cost.owned))


def held(plan: Plan, tokens: int) -> Held:
    """Bytes held and needed by a request that has stored exactly `tokens`."""
    bands = plan.geometry.stages[0].bands
    cost = _cost(plan, tokens)
    units = held_at(bands, plan.geometry.page_size, tokens)
    needed = 0
    for stage in plan.stages:
        for band, size in zip(bands, unpadded_bytes(stage), strict=True):
            kept = tokens if band.kind == "full" else min(tokens, band.window_tokens - 1)
            needed += size if band.kind == "state" else kept * size // plan.geometry.page_size
    return Held(
        tokens, needed, total_bytes(plan, units), total_bytes(plan, cost.checkpoint), total_bytes(plan, cost.tail)
    )


def unpadded_bytes(stage: Stage) -> list[int]:
    """Bytes of the planes of one unit of each band, without alignment."""
    return [sum(prod(view.shape) * dtype_bytes(view.dtype) for view in band.planes) for band in stage.sized.plan.bands]


def total_bytes(plan: Plan, units: Demand) -> int:
    """Bytes of units over all stages."""
    return sum(
        count * band.unit_bytes
        for stage in plan.geometry.stages
        for count, band in zip(units, stage.bands, strict=True)
    )


def price_mix(plan: Plan, lines: Sequence[MixLine]) -> list[Mixed]:
    """The mix with every request at its longest, and with every request halfway through its output."""
    moments = (("longest", 1), ("midway", 2))
    return [_mixed(plan, lines, name, share) for name, share in moments]


def _cost(plan: Plan, tokens: int) -> Cost:
    settings = plan.settings
    bands = plan.geometry.stages[0].bands
    return request_cost(bands, settings.page_size, tokens, settings.max_num_batched_tokens, plan.checkpoint_interval)


def _mixed(plan: Plan, lines: Sequence[MixLine], moment: str, share: int) -> Mixed:
    """Requests in proportion to the weights of their lines; a shared prefix is held once per line."""
    bands = range(len(plan.geometry.stages[0].bands))
    total = sum(line.weight for line in lines)
    each = [Fraction(0) for _ in bands]
    shared, tail = [0 for _ in bands], [0 for _ in bands]
    for line in lines:
        tokens = stored_tokens(line.prompt_tokens, -(-line.output_tokens // share))
        cost, prefix = _cost(plan, tokens), _shared(plan, line)
        own = _own(plan, cost.owned, prefix)
        each = [have + line.weight * units / total for have, units in zip(each, own, strict=True)]
        shared = [a + b for a, b in zip(shared, prefix, strict=True)]
        tail = [max(a, b) for a, b in zip(tail, cost.tail, strict=True)]
    base = [a + b for a, b in zip(shared, tail, strict=True)]

    def counts(n: int) -> Demand:
        return tuple(ceil(n * units) + more for units, more in zip(each, base, strict=True))

    form = plan.form
    high = 1
    while form.fits(counts(high)):
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if form.fits(counts(middle)) else (low, middle)
    held_units = counts(low)
    more = tuple(b - a for a, b in zip(held_units, counts(high), strict=True))
    units = tuple(a - b for a, b in zip(held_units, tail, strict=True))
    return Mixed(moment, low, units, tuple(shared), _shortage(plan, held_units, more))


def _shared(plan: Plan, line: MixLine) -> Demand:
    """Units that the prefix cache holds once for all requests of a line."""
    page, interval = plan.geometry.page_size, plan.checkpoint_interval
    bands = plan.geometry.stages[0].bands
    grid = interval or page
    tokens = min(line.shared_prefix_tokens, line.prompt_tokens - 1) // grid * grid
    if not tokens or not plan.settings.enable_prefix_caching:
        return (0,) * len(bands)
    return held_at(bands, page, tokens)


def _own(plan: Plan, owned: Demand, prefix: Demand) -> Demand:
    """What one request holds beside the prefix that it shares."""
    own_pages = owned[-1] - prefix[-1]
    units = []
    for band, count in zip(plan.geometry.stages[0].bands, owned, strict=True):
        units.append(count if band.kind == "state" else min(count, own_pages))
    return tuple(units)


def _times(n: int, owned: Demand, more: Demand) -> Demand:
    return tuple(n * units + extra for units, extra in zip(owned, more, strict=True))


def _shortage(plan: Plan, live: Demand, wanted: Demand) -> Shortage:
    refusal = plan.form.refusal(live, wanted)
    assert refusal is not None, "the counts were the most that fit"
    return Shortage(refusal.stage, refusal.band_name)
