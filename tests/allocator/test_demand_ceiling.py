"""The ceiling, exhaustively: whatever a request does, it never holds more than its ceiling demand."""

from __future__ import annotations

from itertools import product

import pytest

from allocator.checks import OFF, Checks
from allocator.columns import Int32s
from allocator.demand import (
    Purpose,
    RequestSizes,
    pages_for,
    request_demand,
    retirement_lag_tokens,
    stored_tokens,
    window_pages,
)
from allocator.errors import CapacityRefused
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.logical.chain import LogicalChain
from tests.allocator.shapes import ids

WINDOWS, PAGES, PROMPTS, OUTPUTS = (1, 2, 4, 5), (1, 2, 3), range(1, 7), range(1, 5)
CHUNKS, FLIGHTS, INTERVALS = (1, 2, 7), (0, 1, 2), (0, 2, 3)


def bands_of(window: int) -> list[BandGeometry]:
    """State, a window and full attention, one byte a unit."""
    return [
        BandGeometry("state", "state", 1),
        BandGeometry("window", "window", 1, window),
        BandGeometry("full", "full", 1),
    ]


class Life:
    """One request in an arena that holds exactly its ceiling, launched up to `flight` forwards ahead of its results."""

    def __init__(
        self, window: int, page: int, prompt: int, output: int, chunk: int, flight: int, interval: int
    ) -> None:
        self.window, self.page, self.chunk, self.flight, self.interval = window, page, chunk, flight, interval
        self.prompt, self.last = prompt, stored_tokens(prompt, output)
        most = min(chunk, prompt)
        lag = retirement_lag_tokens(flight, most)
        sizes = RequestSizes(prompt, output, chunk_tokens=most, lag_tokens=lag, checkpoint_interval=interval)
        bands = bands_of(window)
        self.ceiling = request_demand(bands, page, sizes, Purpose.CEILING)
        stage = StageGeometry(sum(self.ceiling), 0, bands)
        self.chain = LogicalChain(Geometry(page, 99, 9, [stage]), Checks(OFF))
        self.peak = [0, 0, 0]
        self.written = self.processed = self.checkpoint = self.retired_pages = self.pages = 0
        self.running: list[int] = []

    def run(self) -> None:
        """From admission to the last position; a take that is refused raises."""
        self._take((2 if self.interval else 1, 0, 0))
        while self.written < self.last or self.running:
            if len(self.running) > self.flight or self.written == self.last:
                self._process()
            if self.written < self.last:
                self._launch()
        held = self.chain.live_ids
        self.chain.free([held(0), held(1), held(2)])
        self.chain.check_idle()

    def _launch(self) -> None:
        """A chunk or a token; a chunk that crosses the checkpoint grid ends at its last point inside."""
        end = min(self.written + self.chunk, self.prompt) if self.written < self.prompt else self.written + 1
        if self.interval:
            point = end // self.interval * self.interval
            end = point if point > self.written else end
        pages = pages_for(end, self.page) - self.pages
        if pages:
            self._take((0, pages, pages))
            self.pages += pages
        self.written = end
        self.running.append(end)

    def _process(self) -> None:
        """The oldest forward's result: its checkpoint exists, and rows that left the window retire."""
        self.processed = self.running.pop(0)
        if self.interval and self.processed % self.interval == 0:
            self.checkpoint = self.processed
        needed = self.checkpoint if self.interval else self.processed
        gone = max(0, needed - (self.window - 1)) // self.page
        if gone > self.retired_pages:
            self.chain.free([None, self._pages(self.retired_pages, gone), None])
            self.retired_pages = gone

    def _take(self, demand: tuple[int, int, int]) -> None:
        self.chain.take(demand)
        self.peak = [max(a, b) for a, b in zip(self.peak, self.chain.live_units(), strict=True)]

    def _pages(self, first: int, last: int) -> Int32s:
        return ids(*range(first + 1, last + 1))


@pytest.mark.slow
def test_the_ceiling_is_never_exceeded_and_always_enough() -> None:
    """Every small request, page, window, chunk, flight and checkpoint grid: it lives within its ceiling, per band."""
    lives = reached = 0
    for window, page, prompt, output, chunk, flight, interval in product(
        WINDOWS, PAGES, PROMPTS, OUTPUTS, CHUNKS, FLIGHTS, INTERVALS
    ):
        life = Life(window, page, prompt, output, chunk, flight, interval)
        life.run()
        assert all(held <= most for held, most in zip(life.peak, life.ceiling, strict=True)), vars(life)
        assert (life.peak[0], life.peak[2]) == (life.ceiling[0], life.ceiling[2]), "state and full are exact"
        lives += 1
        reached += life.peak[1] == life.ceiling[1]
    assert lives == 7_776
    assert reached > lives * 2 // 3, "the bound on windows is no idle one"


def test_no_purpose_asks_for_more_than_the_ceiling() -> None:
    """Expected outputs, loads and preallocations of every small request stay below what it can ever hold."""
    for window, page, prompt, output, chunk, flight, interval in product(
        WINDOWS, PAGES, PROMPTS, OUTPUTS, CHUNKS, FLIGHTS, INTERVALS
    ):
        bands = bands_of(window)
        most = min(chunk, prompt)
        lag = retirement_lag_tokens(flight, most)
        ceiling = request_demand(
            bands,
            page,
            RequestSizes(prompt, output, chunk_tokens=most, lag_tokens=lag, checkpoint_interval=interval),
            Purpose.CEILING,
        )
        for expected in range(output + 1):
            sizes = RequestSizes(prompt, expected, output, (), flight, most, lag, interval)
            for purpose in (Purpose.ADMIT, Purpose.LOAD_BACK, Purpose.DECODE_PREALLOC):
                demand = request_demand(bands, page, sizes, purpose)
                assert all(a <= b for a, b in zip(demand, ceiling, strict=True)), (purpose, sizes)


def test_a_window_without_its_checkpoint_slot_would_exceed_every_bound() -> None:
    """The guarantee is needed: with no slot to keep a state in, nothing retires and the window grows with the text."""
    window, page, interval = 4, 1, 2
    bound = window_pages(window, interval + 1, page)
    for output in (16, 32):
        life = Life(window, page, 1, output, 1, 0, interval)
        life.run()
        assert life.peak[1] <= bound
        starved = Life(window, page, 1, output, 1, 0, interval)
        starved.interval = 1 << 30  # no grid point is ever kept
        with pytest.raises(CapacityRefused):
            starved.run()
        assert starved.peak[1] > bound
