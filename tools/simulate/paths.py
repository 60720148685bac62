"""Paths: which pages of which prompts are the same, when each was computed last, and what holding everything takes.

Owns the page numbers of a trace at one page size, without a core and without a limit of memory. Must never know a
policy. Invariants: two prompts share a page number exactly where all their tokens up to that page's end are equal and
they are of one namespace; requests count as served one after the other, each at once, in the order of the trace.

    request r    page 0 ... hit_pages[r]     known: an earlier request had them (`previous` says which, the newest)
                      hit_pages[r] ...       new, or behind the prompt's last token but one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from allocator.capacity import Demand
from allocator.columns import Int32s, Int64s
from allocator.demand import stored_tokens
from allocator.geometry import BandGeometry
from tools.simulate.traffic import Line, Trace

NEVER = -1
GROW = 1 << 16


@dataclass(slots=True)
class Reuse:
    """What a cache of any size could find: every earlier prompt is there at once.

    `hit_pages[r]` (int32) whole pages of request r's prompt that an earlier prompt had, its last token excluded.
    `previous` (int32) has the index of the newest earlier request with that page, for each of those pages, request by
    request, in the order of the path. `pages` and `grid_points` count distinct ones of prompts and outputs;
    `ends` (int32) are the pages before each distinct end of a prompt or of an output.
    """

    page_size: int
    interval: int
    hit_pages: Int32s
    previous: Int32s
    pages: int
    grid_points: int
    ends: Int32s

    def hit_tokens(self, grid_tokens: int = 0) -> int:
        """Tokens that are found by all requests together, rounded down to pages, or to a grid."""
        tokens = self.hit_pages.astype(np.int64) * self.page_size
        return int((tokens // grid_tokens * grid_tokens).sum() if grid_tokens else tokens.sum())


class Everything(NamedTuple):
    """What holds all that was ever computed: units per band (chain order), and their bytes."""

    units: Demand
    total_bytes: int


def everything(reuse: Reuse, bands: list[BandGeometry]) -> Everything:
    """Distinct pages, one state per grid point, and one window per end of a prompt or of an output."""
    units = []
    for band in bands:
        if band.kind == "state":
            units.append(reuse.grid_points)
        elif band.kind == "window":
            window = -(-(band.window_tokens - 1) // reuse.page_size)
            units.append(min(reuse.pages, int(np.minimum(reuse.ends, window).sum(dtype=np.int64))))
        else:
            units.append(reuse.pages)
    return Everything(tuple(units), sum(count * band.unit_bytes for count, band in zip(units, bands, strict=True)))


def find_reuse(trace: Trace, page_size: int, interval: int = 0) -> Reuse:
    """Walk all prompts once; `interval` is the checkpoint grid in tokens, a multiple of `page_size`, or 0."""
    numbers = _PageNumbers(trace, page_size)
    newest = np.full(GROW, NEVER, np.int32)  # by page number, the newest request that had it
    hit_pages = np.zeros(len(trace.lines), np.int32)
    previous: list[Int32s] = []
    ends: list[int] = []
    seen_ends: set[int] = set()
    pages = grid_points = 0
    for index, line in enumerate(trace.lines):
        path = numbers.path(index)
        if numbers.count > len(newest):
            newest = np.concatenate([newest, np.full(max(GROW, numbers.count), NEVER, np.int32)])
        before = newest[path]
        known = int(np.argmax(before == NEVER)) if (before == NEVER).any() else len(path)
        hit = min(known, (line.prompt_tokens - 1) // page_size)
        hit_pages[index] = hit
        previous.append(before[:hit])
        if not line.store:
            newest[path[:known]] = index  # what is there was used; nothing new stays
            continue
        newest[path] = index
        if len(path) and int(path[-1]) not in seen_ends:
            seen_ends.add(int(path[-1]))
            ends.append(len(path))
        stored = stored_tokens(line.prompt_tokens, line.output_tokens)
        own = stored // page_size - len(path)  # whole pages that end in the output: nobody else's
        if own:
            ends.append(stored // page_size)
        pages += len(path) - known + own
        if interval:
            grid_points += stored // interval - known * page_size // interval
    joined = np.concatenate(previous) if previous else np.zeros(0, np.int32)
    return Reuse(page_size, interval, hit_pages, joined, pages, grid_points, np.array(ends, np.int32))


class _PageNumbers:
    """Numbers of pages by all the tokens before their end; `count` were given so far."""

    def __init__(self, trace: Trace, page_size: int) -> None:
        self.count = 0
        self._trace, self._page_size = trace, page_size
        self._by_blocks = trace.block_tokens % page_size == 0
        self._per_block = trace.block_tokens // page_size
        self._roots: dict[str, int] = {}
        self._numbers: dict[tuple[int, int | bytes], int] = {}

    def path(self, index: int) -> Int64s:
        """The numbers (int64) of a prompt's whole pages, in order."""
        line = self._trace.lines[index]
        # Below every number of a page, and another for each namespace.
        at = self._roots.setdefault(line.namespace, -1 - len(self._roots))
        if line.hashed and self._by_blocks:
            return self._path_of_blocks(line, at)
        return self._path_of_tokens(self._trace.prompt(index), at)

    def _path_of_blocks(self, line: Line, at: int) -> Int64s:
        """A block has as many numbers as it has pages, one after the other; a prompt's last block may use fewer."""
        firsts = np.empty(len(line.units), np.int64)
        for place, block in enumerate(line.units.tolist()):
            key = (at, block)
            found = self._numbers.get(key)
            if found is None:
                found = self._numbers[key] = self.count
                self.count += self._per_block
            firsts[place] = at = found
        pages = np.repeat(firsts, self._per_block) + np.tile(np.arange(self._per_block), len(firsts))
        return pages[: line.prompt_tokens // self._page_size]

    def _path_of_tokens(self, tokens: Int64s, at: int) -> Int64s:
        count = len(tokens) // self._page_size
        path = np.empty(count, np.int64)
        data, width = tokens.tobytes(), self._page_size * tokens.itemsize
        for place in range(count):
            key = (at, data[place * width : (place + 1) * width])
            found = self._numbers.get(key)
            if found is None:
                found = self._numbers[key] = self.count
                self.count += 1
            path[place] = at = found
        return path
