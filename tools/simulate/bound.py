"""Bound: more cached tokens than this no policy can find in an arena of so many bytes, knowing the whole trace.

Owns the bound and its proof. Must never be a heuristic: whatever the prices are, the result bounds from above; they
only say how closely. What it bounds: requests start in the order of the trace and each is done before the next begins,
their own memory costs nothing, and the cache chooses with knowledge of the future what to hold, page by page, window
unit by window unit and state by state, joint in bytes.

A request that finds e tokens needs every page before e, the window units before e and the state at e, each held since a
request last had it. These spans of time are each request's own: the next one's begin where its end. So with a price
L(t) >= 0 for holding a byte at time t, every request may choose its e alone, and by weak duality

    hits  <=  sum over requests of max over e of (e - price of the spans that e needs)  +  bytes x sum of L

Prices are constant over segments of the trace, found by a line search, then by subgradient steps; the least sum wins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.geometry import BandGeometry
from tools.simulate.paths import Reuse

Floats = NDArray[np.float64]
Indexes = NDArray[np.int64]

SEGMENTS = 1024
SEARCH_STEPS = 24
DESCENT_STEPS = 120
STALE_STEPS = 5  # steps without a better sum, after which the aim comes nearer
AIM_FIRST = 0.02  # how far below the best sum a step aims, as a part of it


class Offline(NamedTuple):
    """The bound in tokens over all requests, for so many bytes beside the sink."""

    tokens: int
    chain_bytes: int


class _Answer(NamedTuple):
    """The dual sum at some prices, and the bytes that all chosen spans hold over each gap between two requests."""

    total: float
    held: Floats


class OfflineBound:
    """The reuse of a trace in a form that is priced quickly; `bands` in chain order, `interval` the grid or 0."""

    def __init__(self, reuse: Reuse, bands: list[BandGeometry]) -> None:
        counts = reuse.hit_pages.astype(np.int64)
        ends = np.cumsum(counts)
        self._requests = len(counts)
        self._page = reuse.page_size
        self._request = np.repeat(np.arange(len(counts)), counts)  # by page of a hit: whose
        self._place = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)  # which of its
        self._previous = reuse.previous.astype(np.int64)
        self._some = np.flatnonzero(counts)  # requests with a hit
        self._starts = (ends - counts)[self._some]
        self._full = sum(band.unit_bytes for band in bands if band.kind == "full")
        self._state = sum(band.unit_bytes for band in bands if band.kind == "state")
        windows = [
            (band.unit_bytes, -(-(band.window_tokens - 1) // self._page)) for band in bands if band.window_tokens
        ]
        self._windows = [(unit, np.minimum(self._place + 1, pages), pages) for unit, pages in windows if unit and pages]
        grid = reuse.interval if any(band.kind == "state" for band in bands) else 0
        tokens = (self._place + 1) * self._page
        self._tokens = np.where(tokens % grid == 0, tokens, -np.inf) if grid else tokens.astype(np.float64)
        self.most = int(reuse.hit_tokens(grid))

    def solve(self, chain_bytes: int) -> Offline:
        """The bound for an arena with so many bytes for the chain."""
        gaps = max(self._requests - 1, 1)
        segment = np.arange(gaps) * SEGMENTS // gaps
        one = np.ones(gaps)
        free = self._price(np.zeros(gaps), chain_bytes)
        if not len(self._some) or (free.held <= chain_bytes).all():
            return Offline(self.most, chain_bytes)
        level, best = self._line_search(one, chain_bytes)
        prices = one * level
        aim = AIM_FIRST
        stale = 0
        answer = self._price(prices, chain_bytes)
        for _ in range(DESCENT_STEPS):
            slack = np.bincount(segment, chain_bytes - answer.held, SEGMENTS)
            norm = float(slack @ slack)
            if norm == 0 or aim < 1e-5:
                break
            step = (answer.total - best * (1 - aim)) / norm
            prices = np.maximum(prices - step * slack[segment], 0)
            answer = self._price(prices, chain_bytes)
            stale = 0 if answer.total < best else stale + 1
            best = min(best, answer.total)
            if stale == STALE_STEPS:
                stale, aim = 0, aim / 2
        return Offline(min(self.most, int(np.ceil(best))), chain_bytes)

    def _line_search(self, one: Floats, chain_bytes: int) -> tuple[float, float]:
        """The best price that is the same at all times, and its sum: the sum is convex in it."""
        low, high = 0.0, 1.0 / max(chain_bytes, 1)
        while (self._price(one * high, chain_bytes).held.sum()) > chain_bytes * len(one):
            high *= 4
        best = (0.0, float(self.most))
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2
            answer = self._price(one * middle, chain_bytes)
            if answer.total < best[1]:
                best = (middle, answer.total)
            if answer.held.sum() > chain_bytes * len(one):
                low = middle
            else:
                high = middle
        return best

    def _price(self, prices: Floats, chain_bytes: int) -> _Answer:
        """Every request chooses what it finds at these prices a byte over each gap."""
        until = np.concatenate([np.zeros(1), np.cumsum(prices)])
        span = until[self._request] - until[self._previous]
        sums = np.concatenate([np.zeros(1), np.cumsum(span)])
        after = sums[1:]
        cost = self._full * (after - sums[np.arange(len(span)) - self._place])
        for unit, reach, _ in self._windows:
            cost += unit * (after - sums[np.arange(1, len(span) + 1) - reach])
        gain = self._tokens - cost - self._state * span
        best = np.maximum(np.maximum.reduceat(gain, self._starts), 0) if len(self._some) else np.zeros(0)
        return _Answer(float(best.sum() + chain_bytes * prices.sum()), self._held(gain, best))

    def _held(self, gain: Floats, best: Floats) -> Floats:
        """Bytes over each gap of all spans that the best choices need."""
        gaps = max(self._requests - 1, 1)
        if not len(best):
            return np.zeros(gaps)
        chosen = np.zeros(self._requests, np.int64)  # pages that each request finds
        by_page = np.zeros(self._requests)
        by_page[self._some] = best
        at = np.flatnonzero((gain == by_page[self._request]) & (gain > 0))
        chosen[self._request[at]] = self._place[at] + 1
        left = chosen[self._request] - self._place  # 1 for the last page that is found, 0 and less behind it
        held = np.where(left > 0, float(self._full), 0.0)
        for unit, _, pages in self._windows:
            held += np.where((left > 0) & (left <= pages), float(unit), 0.0)
        held += np.where(left == 1, float(self._state), 0.0)
        begins = np.bincount(self._previous, held, self._requests)
        ends = np.bincount(self._request, held, self._requests)
        return np.asarray(np.cumsum(begins - ends)[:gaps], np.float64)
