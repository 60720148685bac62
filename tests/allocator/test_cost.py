"""Cost: a request's ceiling, split by the reason for what it holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.cost import held_at, request_cost
from allocator.demand import Purpose, RequestSizes, request_demand
from allocator.geometry import BandGeometry

BANDS = [
    BandGeometry("state", "state", 512),
    BandGeometry("window:100", "window", 256, 100),
    BandGeometry("window:32", "window", 256, 32),
    BandGeometry("full", "full", 256),
]


def test_the_parts_of_one_request() -> None:
    """1,000 tokens at page 16, chunks of 48, checkpoints every 64: by hand."""
    cost = request_cost(BANDS, 16, 1000, 48, 64)
    assert cost.rest == (1, 8, 3, 63)  # 99 + 1 tokens touch 8 pages at worst, 31 + 1 touch 3
    assert cost.checkpoint == (1, 4, 4, 0)  # 64 tokens back to the last checkpoint
    assert cost.tail == (0, 3, 3, 0)  # 48 tokens being written, the newest of them priced already
    assert cost.owned == (2, 12, 7, 63)


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.integers(1, 3000),
    chunk=st.integers(1, 600),
    interval=st.sampled_from([0, 64, 256]),
    page=st.integers(1, 64),
)
def test_the_parts_add_up_to_the_ceiling(tokens: int, chunk: int, interval: int, page: int) -> None:
    """Rest, checkpoint and tail are never negative; together they are the ceiling, and full attention is all rest."""
    cost = request_cost(BANDS, page, tokens, chunk, interval)
    sizes = RequestSizes(tokens, 0, chunk_tokens=min(chunk, tokens), checkpoint_interval=interval)
    total = tuple(a + b for a, b in zip(cost.owned, cost.tail, strict=True))
    assert total == request_demand(BANDS, page, sizes, Purpose.CEILING)
    assert min(cost.rest + cost.checkpoint + cost.tail) >= 0
    assert cost.rest[-1] == -(-tokens // page)
    assert cost.checkpoint[-1] == cost.tail[-1] == cost.tail[0] == 0
    assert cost.checkpoint[0] == (1 if interval else 0)


@settings(max_examples=200, deadline=None)
@given(tokens=st.integers(1, 3000), page=st.integers(1, 64))
def test_what_is_held_at_a_length(tokens: int, page: int) -> None:
    """Page by page: a window's page stays while the next position may attend to it; never more than is priced."""
    held = held_at(BANDS, page, tokens)
    pages = range(-(-tokens // page))
    for band, units in zip(BANDS, held, strict=True):
        if band.kind != "state":
            first = tokens - band.window_tokens + 1 if band.kind == "window" else 0
            assert units == sum(1 for k in pages if (k + 1) * page > first)
    priced = request_cost(BANDS, page, tokens, 1).rest
    assert all(a <= b for a, b in zip(held, priced, strict=True))
    assert held[0] == 1
