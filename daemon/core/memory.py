"""Memory: the core's way to the logical chain; every question and every change of units goes through here.

Owns the ops of the step being formed and the units given back since the last question. Must never answer from a
counter of its own: returned units reach the chain before any question is asked, so a freed unit is visible to the very
next one. Invariants: the ops of a step, applied in order, are exactly what the chain was told, in that order; what a
cache could give back counts as free in every question, and is taken from it only by the take that needs it.

A demand is one number of units per band, in chain order: [state][windows, longest first][full, the owner of pages].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from allocator.capacity import CapacityRefusal, Demand
from allocator.checks import STRICT, WARN, Checks
from allocator.columns import Int32s
from allocator.demand import Purpose, RequestSizes, request_demand
from allocator.errors import InvariantBroken
from allocator.geometry import Geometry
from allocator.logical.chain import LogicalChain
from allocator.ops import Flush, Op
from daemon.core.eviction import POLICIES
from daemon.core.limits import CoreConfig, state_cache_problem
from daemon.core.tree import PrefixTree

PPM = 1_000_000

Parts = Sequence[Int32s | None]
"""Ids per band, in chain order; None where a band has none."""


def plus(one: Demand, other: Demand) -> Demand:
    """Units of both, band by band."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


def minus(one: Demand, other: Demand) -> Demand:
    """Units of the first without those of the second, band by band; may be negative."""
    return tuple(a - b for a, b in zip(one, other, strict=True))


def larger(one: Demand, other: Demand) -> Demand:
    """The larger number of units, band by band."""
    return tuple(max(a, b) for a, b in zip(one, other, strict=True))


def smaller(one: Demand, other: Demand) -> Demand:
    """The smaller number of units, band by band."""
    return tuple(min(a, b) for a, b in zip(one, other, strict=True))


class Memory:
    """Units of one epoch. Raises InvariantBroken when the model has state that cannot be cached as configured.

    `windows` are the bands of sliding windows with their tokens; `state` is the band of state slots or -1, `slots_each`
    how many a request with a row owns (0 without such a band, 2 with a checkpoint slot beside the working one), and
    `checkpoint_interval` how far apart checkpoints lie (0: requests take none). `cache` is the prefix cache, None when
    it is off.
    """

    def __init__(self, geometry: Geometry, checks: Checks, config: CoreConfig) -> None:
        self.geometry = geometry
        self.page_size = geometry.page_size
        self.chain = LogicalChain(geometry, checks)
        self.owner = self.chain.owner
        bands = self.chain.bands
        self.windows = tuple((index, band.window_tokens) for index, band in enumerate(bands) if band.kind == "window")
        self.state = next((index for index, band in enumerate(bands) if band.kind == "state"), -1)
        problem = state_cache_problem(config) if self.state >= 0 else ""
        if problem:
            raise InvariantBroken("core.state_cache", problem)
        keeps = self.state >= 0 and config.enable_prefix_caching and config.state_cache == "extra_buffer"
        self.checkpoint_interval = config.checkpoint_interval if keeps else 0
        self.slots_each = 0 if self.state < 0 else 2 if keeps else 1
        self._config = config
        self.cache = self._tree(config) if config.enable_prefix_caching else None
        # A gift to the cache ends on a page: its window reaches back further than that of the row's own next token.
        self.retires_by_page = self.cache is not None and self.state < 0
        self._quotas = bool(config.cache_quotas) or config.cache_quota_ppm < PPM
        self.evicted = {band.name: 0 for band in bands}  # units that were taken from the cache, for metrics
        self.evictions = 0  # how often `evicted` or `quota_evicted` may have changed
        self.quota_evicted = dict(self.evicted)  # of those, units beyond the quota of their namespace
        self.none: Demand = (0,) * len(bands)
        self._chunk_tokens = max(1, min(config.chunked_prefill_size, config.max_batched_tokens))
        self._per_page = self.demand(1)
        self._ops: list[Op] = []
        self._returned: list[list[Int32s]] = [[] for _ in bands]
        self._owed = False
        self.capacity_pages = self.chain.most_ever()
        self.capacity_tokens = self._most_tokens()

    @property
    def has_ops(self) -> bool:
        """Something was taken or given back that no step has carried yet."""
        return bool(self._ops or self._owed)

    def pages_of(self, tokens: int) -> int:
        """Pages that cover `tokens` positions."""
        return -(-tokens // self.page_size)

    def demand(self, pages: int, slots: int = 0) -> Demand:
        """Units of a take: every page with a unit in each window, and state slots."""
        if self.state < 0:
            assert slots == 0, "slots are taken of a state band"
            return (pages,) * (self.owner + 1)
        return (slots, *(pages,) * self.owner)

    def ceiling(self, tokens: int, chunk_tokens: int = 0) -> Demand:
        """The most that a request can ever hold that stores at most `tokens` positions, however it is cut in chunks.

        `chunk_tokens` is the longest of them, 0 as configured.
        """
        return self._price(tokens, Purpose.CEILING, chunk_tokens)

    def steady(self, tokens: int) -> Demand:
        """The most that it holds while no chunk of it is being prefilled."""
        return self._price(tokens, Purpose.STEADY)

    def deciding(self) -> AbstractContextManager[None]:
        """Marks the planning of a step: nothing in it may read an estimate."""
        return self.chain.decision()

    def never_fits(self, demand: Demand) -> CapacityRefusal | None:
        """Why not even an empty arena holds so many units, or None."""
        return self.chain.never_fits(demand)

    def refusal(self, demand: Demand, coming: Demand | None = None) -> CapacityRefusal | None:
        """Why `demand` more does not fit now, or None. Changes nothing that can be seen.

        What the cache can give back counts as free: `take` gets it from there when it must. `coming` units count as
        free too, in a question about what would be.
        """
        self.settle()
        refused = self.chain.refusal(demand, coming)
        if refused is None or self.cache is None:
            return refused
        free = self.cache.reclaimable()
        return self.chain.refusal(demand, free if coming is None else plus(free, coming))

    def room_pages(self, planned: Demand) -> int:
        """The most pages that still fit beside `planned` units that are not taken yet; 0 when those do not fit."""
        self.settle()
        if self.cache is not None:
            planned = minus(planned, self.cache.reclaimable())
        return max(0, self.chain.max_extra(planned, self._per_page))

    def take(self, demand: Demand) -> tuple[Int32s, ...]:
        """Take units jointly, lowest ids first, ids per band; the caller has asked `refusal` with the same numbers.

        Evicts from the cache what that needs, and not a unit more.
        """
        self.settle()
        if self.cache is not None and self.chain.refusal(demand) is not None:
            self._evict(self.cache, demand)
        taken = self.chain.take(demand)
        self._ops.append(taken.op)
        return taken.ids

    def take_slot(self) -> int | None:
        """One more state slot, if need be at the cost of what the cache holds of any band; None: no room."""
        one = self.demand(0, 1)
        return int(self.take(one)[self.state][0]) if self.refusal(one) is None else None

    def keep_quota(self, namespace: str) -> None:
        """What a namespace holds in the cache beyond its quota goes, as far as nobody reads it."""
        if self.cache is not None and self._quotas:
            parts = self.cache.shrink(namespace)
            self._freed(parts)
            for band, ids in zip(self.chain.bands, parts, strict=True):
                self.quota_evicted[band.name] += len(ids)

    def at(self, now_ns: int) -> None:
        """The time of an input: pins of the cache end, and what it holds is that much older."""
        if self.cache is not None:
            self.cache.at(now_ns)

    def give_back(self, parts: Parts) -> None:
        """Units that their owner holds no longer; one `Free` carries all that come back before the next question."""
        for returned, ids in zip(self._returned, parts, strict=True):
            if ids is not None and len(ids):
                assert ids.min() > 0, "the sink and the padding slot are nobody's"
                returned.append(ids)
                self._owed = True

    def copy_state(self, sources: Int32s, targets: Int32s) -> None:
        """Copy states between slots, pair by pair; targets ascend."""
        self.settle()
        self._ops.append(self.chain.copy_state(sources, targets))

    def rebind(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Give the window units of pages `sources` (ascending) to the pages `targets`, pair by pair."""
        self.settle()
        self._ops.append(self.chain.rebind(band, sources, targets))

    def flush(self, moves_max: int) -> None:
        """Ask every physical chain for an opportunistic flush in the step being formed."""
        self.settle()
        self._ops.append(Flush(moves_max))

    def pending_ops(self) -> list[Op]:
        """The ops of the step being formed, so far."""
        return list(self._ops)

    def seal(self, seq: int) -> tuple[list[Op], bytes]:
        """The ops of step `seq` and the chained logical digest after them; the next step starts empty."""
        self.settle()
        ops, self._ops = self._ops, []
        return ops, self.chain.step_digest(seq, ops)

    def live_units(self) -> Demand:
        """Live units per band, in chain order, with everything given back."""
        self.settle()
        return self.chain.live_units()

    def cached_units(self) -> int:
        """Units of all bands that the cache holds."""
        return sum(self.cache.held()) if self.cache is not None else 0

    def check_idle(self) -> None:
        """With nothing live: a recount, and nothing is held but by the cache, which nobody reads.

        Raises InvariantBroken. Not at invariant level 0.
        """
        self.settle()
        if self.chain.checks.level < WARN:
            return
        self.chain.check()
        cache = self.cache
        if cache is None or not any(cache.held()):
            self.chain.check_idle()
        if cache is None:
            return
        if self.chain.checks.level >= STRICT:
            cache.check([])
        live, held, locked = self.chain.live_units(), cache.held(), cache.locked()
        if live != held or any(locked) or cache.open_locks:
            detail = f"{live} units are live, the cache holds {held}, of which {cache.open_locks} locks hold {locked}"
            raise InvariantBroken("core.leak_at_idle", detail)

    def settle(self) -> None:
        """Tell the chain what was given back; every input ends with it, so that no later look can change the ops."""
        if not self._owed:
            return
        parts = [None if not ids else ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in self._returned]
        self._returned = [[] for _ in parts]
        self._owed = False
        self._ops.append(self.chain.free(parts))

    def _evict(self, cache: PrefixTree, demand: Demand) -> None:
        """Evict what a take needs. Where ids run out, nothing but their own band helps: it pays them first."""
        for band, (live, wanted, limit) in enumerate(
            zip(self.chain.counts, demand, self.chain.form.id_limits, strict=True)
        ):
            if live + wanted > limit:
                self._freed(cache.evict(_at_least(live + wanted - limit, band), band))
        self.settle()
        self._freed(cache.evict(lambda units: self.chain.fits(demand, units)))
        self.settle()

    def _freed(self, parts: tuple[Int32s, ...]) -> None:
        self.evictions += 1
        for band, ids in zip(self.chain.bands, parts, strict=True):
            self.evicted[band.name] += len(ids)
        self.give_back(parts)

    def _tree(self, config: CoreConfig) -> PrefixTree:
        stages = self.geometry.stages
        units = [sum(stage.bands[band].unit_bytes for stage in stages) for band in range(len(self.chain.bands))]
        policy, pinned_max = POLICIES[config.eviction_policy], self._arena_bytes() * config.pinned_max_ppm // PPM
        return PrefixTree(self.page_size, self.chain.bands, policy, units, self._quota_of, pinned_max)

    def _arena_bytes(self) -> int:
        """What a chain can use, on all stages together."""
        return sum(stage.arena_bytes - stage.chain_start_bytes for stage in self.geometry.stages)

    def _quota_of(self, namespace: str) -> int:
        """How many bytes of the cache a namespace may hold; -1: no limit."""
        ppm = self._config.cache_quotas.get(namespace, self._config.cache_quota_ppm)
        return self._arena_bytes() * ppm // PPM if ppm < PPM else -1

    def _price(self, tokens: int, purpose: Purpose, chunk_tokens: int = 0) -> Demand:
        sizes = RequestSizes(
            prompt_tokens=tokens,
            output_tokens=0,
            chunk_tokens=chunk_tokens or self._chunk_tokens,
            lag_tokens=self.page_size - 1 if self.retires_by_page else 0,
            checkpoint_interval=self.checkpoint_interval,
        )
        return request_demand(self.chain.bands, self.page_size, sizes, purpose)

    def _most_tokens(self) -> int:
        """The most positions that one request can store in the empty arena; 0 when not even one."""
        low, high = 0, self.geometry.virtual_pages * self.page_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.never_fits(self.ceiling(middle)) is None:
                low = middle
            else:
                high = middle - 1
        return low


def _at_least(units: int, band: int) -> Callable[[Demand], bool]:
    return lambda freed: freed[band] >= units
