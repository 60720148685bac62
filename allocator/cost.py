"""Cost: what one request holds at a length, split by the reason for which it holds it.

Owns the split only; every number comes from the demand table. Must never price anything that `demand` does not.
Invariant: `rest` + `checkpoint` + `tail` of a request is its ceiling at that length.

    rest        between two forwards: pages of all tokens, pages that a window still sees, the working state
    checkpoint  with a checkpoint slot: the slot, and window pages held back to where the last checkpoint lies
    tail        while a forward runs: window pages of the tokens that it writes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from allocator.capacity import Demand
from allocator.demand import Purpose, RequestSizes, pages_for, request_demand
from allocator.geometry import BandGeometry


class Cost(NamedTuple):
    """Units per band, in chain order."""

    rest: Demand
    checkpoint: Demand
    tail: Demand

    @property
    def owned(self) -> Demand:
        """What each of many requests holds at once; only those in the forward that runs have a tail."""
        return tuple(a + b for a, b in zip(self.rest, self.checkpoint, strict=True))


def request_cost(
    bands: Sequence[BandGeometry], page_size: int, tokens: int, chunk_tokens: int, checkpoint_interval: int = 0
) -> Cost:
    """Cost of a request with `tokens` stored tokens.

    `chunk_tokens` is the most that a forward writes for it, `checkpoint_interval` 0: it owns no checkpoint slot.
    Windows are priced as they lie worst on the page grid.
    """
    chunk = min(tokens, chunk_tokens)
    without = RequestSizes(tokens, 0)
    having = RequestSizes(tokens, 0, chunk_tokens=chunk, checkpoint_interval=checkpoint_interval)
    rest = request_demand(bands, page_size, without, Purpose.STEADY)
    owned = request_demand(bands, page_size, having, Purpose.STEADY)
    most = request_demand(bands, page_size, having, Purpose.CEILING)
    return Cost(rest, _minus(owned, rest), _minus(most, owned))


def held_at(bands: Sequence[BandGeometry], page_size: int, tokens: int) -> Demand:
    """Units held between two forwards by a request that has stored exactly `tokens` and owns no checkpoint slot.

    A window keeps the pages that the next position may attend to: those from position tokens - W + 1 on.
    """
    assert tokens >= 1
    pages = pages_for(tokens, page_size)
    units = []
    for band in bands:
        gone = max(0, tokens - band.window_tokens + 1) // page_size if band.kind == "window" else 0
        units.append(1 if band.kind == "state" else pages - gone)
    return tuple(units)


def _minus(more: Demand, less: Demand) -> Demand:
    out = tuple(a - b for a, b in zip(more, less, strict=True))
    assert min(out) >= 0, (more, less)
    return out
