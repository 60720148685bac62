"""Demand: each rule of the table, and that the ceiling really is one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.demand import (
    RULES,
    Purpose,
    RequestSizes,
    pages_for,
    request_demand,
    stored_tokens,
    window_pages,
)
from allocator.geometry import BandGeometry

FULL = BandGeometry("full", "full", 256)
WINDOW = BandGeometry("window:32", "window", 256, 32)
STATE = BandGeometry("state", "state", 256)
BANDS = [STATE, WINDOW, FULL]


def full(sizes: RequestSizes, purpose: Purpose) -> int:
    """Owner pages of a request at page size 16."""
    return request_demand([FULL], 16, sizes, purpose)[0]


@pytest.mark.parametrize(
    ("purpose", "pages"),
    [
        (Purpose.CEILING, 5),  # 40 + 41 - 1 = 80 positions
        (Purpose.STEADY, 5),
        (Purpose.ADMIT, 6 - 2),  # one surplus position opens a page, two are held
        (Purpose.LOAD_BACK, 3 - 2),  # the prompt's 40 tokens only
        (Purpose.DECODE_PREALLOC, 5 - 2),
    ],
)
def test_each_purpose_prices_full_attention_by_its_row(purpose: Purpose, pages: int) -> None:
    """One request, the row of each purpose: output, surplus and held units counted as the row says."""
    sizes = RequestSizes(40, 41, output_most=60, held=(2,), surplus_tokens=1)
    assert full(sizes, purpose) == pages
    assert set(RULES) == set(Purpose)


def test_between_chunks_a_window_costs_itself_and_one_token() -> None:
    """The steady price of a window leaves the chunk out; the ceiling holds it beside the window."""
    sizes = RequestSizes(400, 1, chunk_tokens=64)
    assert request_demand(BANDS, 16, sizes, Purpose.STEADY) == (1, window_pages(32, 1, 16), 25)
    assert request_demand(BANDS, 16, sizes, Purpose.CEILING) == (1, window_pages(32, 64, 16), 25)
    held_back = RequestSizes(400, 1, chunk_tokens=64, checkpoint_interval=128)
    assert request_demand(BANDS, 16, held_back, Purpose.STEADY) == (2, window_pages(32, 129, 16), 25)


def test_the_last_sampled_token_is_never_stored() -> None:
    """A prompt of a page and one output token fill exactly one page; two output tokens need the next."""
    assert stored_tokens(16, 0) == stored_tokens(16, 1) == 16
    assert full(RequestSizes(16, 1), Purpose.CEILING) == 1
    assert full(RequestSizes(16, 2), Purpose.CEILING) == 2


def test_the_surplus_stops_at_the_ceiling() -> None:
    """Where the end is foreseen nothing is launched too late: the surplus never exceeds what the ceiling prices."""
    tight = RequestSizes(16, 1, output_most=1, surplus_tokens=1)
    assert full(tight, Purpose.ADMIT) == 1
    open_end = RequestSizes(16, 1, output_most=9, surplus_tokens=1)
    assert full(open_end, Purpose.ADMIT) == 2


def test_B2_a_window_costs_the_same_above_its_length() -> None:
    """Window pages grow with the prompt up to the window and the chunk, then stay flat; full pages go on."""
    costs = [
        request_demand(BANDS, 16, RequestSizes(n, 1, chunk_tokens=16), Purpose.CEILING) for n in range(16, 400, 16)
    ]
    windows = [cost[1] for cost in costs]
    assert windows == [min(n // 16, 4) for n in range(16, 400, 16)]
    assert [cost[2] for cost in costs] == [n // 16 for n in range(16, 400, 16)]


def test_state_is_priced_in_full() -> None:
    """One working slot, and one more for a request that owns a checkpoint; held slots are subtracted at admission."""
    assert request_demand(BANDS, 16, RequestSizes(5, 1), Purpose.CEILING)[0] == 1
    assert request_demand(BANDS, 16, RequestSizes(5, 1, checkpoint_slot=True), Purpose.CEILING)[0] == 2
    held = RequestSizes(5, 1, held=(1, 0, 0), checkpoint_slot=True)
    assert request_demand(BANDS, 16, held, Purpose.ADMIT) == (1, 1, 1)
    more_than_needed = RequestSizes(5, 1, held=(9, 9, 9))
    assert request_demand(BANDS, 16, more_than_needed, Purpose.ADMIT) == (0, 0, 0)


@settings(max_examples=150, deadline=None)
@given(
    window=st.integers(1, 40),
    page=st.sampled_from([1, 2, 3, 8, 16]),
    prompt=st.integers(1, 80),
    output=st.integers(1, 30),
    chunk=st.integers(1, 40),
    lag=st.integers(0, 2),
)
def test_the_ceiling_is_never_exceeded(window: int, page: int, prompt: int, output: int, chunk: int, lag: int) -> None:
    """A request that runs chunk by chunk, then token by token, with retirement `lag` positions late, stays below it."""
    bands = [BandGeometry("window", "window", 1, window), FULL]
    sizes = RequestSizes(prompt, output, chunk_tokens=min(chunk, prompt), lag_tokens=lag)
    ceiling = request_demand(bands, page, sizes, Purpose.CEILING)
    most_window = most_full = 0
    written = 0
    while written < prompt + output - 1:
        first = written
        written += min(chunk, prompt - written) if written < prompt else 1
        # The first position of this forward still sees window - 1 before it; retirement is `lag` positions behind.
        oldest = max(0, first - (window - 1) - lag)
        most_window = max(most_window, (written - 1) // page - oldest // page + 1)
        most_full = pages_for(written, page)
    assert most_window <= ceiling[0]
    assert most_full == ceiling[1]


def test_window_pages_is_the_least_bound() -> None:
    """For every window, span and alignment the bound holds, and some alignment reaches it."""
    for page in (1, 2, 5, 16):
        for window in range(1, 40):
            for span in range(1, 20):
                tokens = window - 1 + span
                touched = [(start + tokens - 1) // page - start // page + 1 for start in range(page)]
                assert max(touched) == window_pages(window, span, page)
