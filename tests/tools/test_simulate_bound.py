"""The offline bound: never below what the best cache could do, and close to it."""

from __future__ import annotations

from itertools import chain, combinations, pairwise
from pathlib import Path

import pytest

from allocator.geometry import BandGeometry
from tests.tools.simulate_world import conversations, trace_of
from tools.simulate.bound import OfflineBound
from tools.simulate.paths import Reuse, find_reuse
from tools.simulate.traffic import Trace

PAGE = 512
FULL = BandGeometry("full", "full", 8)
WINDOW = BandGeometry("window:600", "window", 3, 600)
STATE = BandGeometry("state", "state", 5)
FAMILIES = {"full": [FULL], "window": [WINDOW, FULL], "state": [STATE, FULL], "all": [STATE, WINDOW, FULL]}

Item = tuple[str, int]  # band and page, numbered over all prompts


def paths_of(trace: Trace) -> list[list[int]]:
    """Every prompt as numbers of its pages, equal where all tokens before are."""
    numbers: dict[tuple[int, ...], int] = {}
    found = []
    for index in range(len(trace.lines)):
        tokens = trace.prompt(index).tolist()
        ends = range(PAGE, len(tokens) + 1, PAGE)
        found.append([numbers.setdefault(tuple(tokens[:end]), len(numbers)) for end in ends])
    return found


def needs(path: list[int], pages: int, bands: list[BandGeometry], grid: int) -> frozenset[Item]:
    """What must be there for a hit of so many pages."""
    items: set[Item] = {("full", page) for page in path[:pages]}
    for band in bands:
        if band.kind == "window":
            reach = -(-(band.window_tokens - 1) // PAGE)
            items |= {(band.name, page) for page in path[max(0, pages - reach) : pages]}
        if band.kind == "state" and pages:
            items.add(("state", path[pages - 1]))
    return frozenset(items)


def best(trace: Trace, bands: list[BandGeometry], size: int, grid: int) -> int:
    """The most tokens that any cache finds, by trying everything that it could hold after each request."""
    cost = {band.name: band.unit_bytes for band in bands}
    paths = paths_of(trace)
    reach = [(trace.lines[index].prompt_tokens - 1) // PAGE for index in range(len(paths))]
    ends = [[pages for pages in range(most + 1) if pages * PAGE % grid == 0] for most in reach]
    wanted = [
        frozenset().union(*(needs(path, pages, bands, grid) for pages in some))
        for path, some in zip(paths, ends, strict=True)
    ]
    value: dict[frozenset[Item], int] = {frozenset(): 0}
    for index, path in enumerate(paths):
        fresh = {(band.name, page) for band in bands for page in path}
        later = frozenset().union(*wanted[index + 1 :])  # nothing else is worth a byte
        after: dict[frozenset[Item], int] = {}
        for held, tokens in value.items():
            hit = max(pages for pages in ends[index] if needs(path, pages, bands, grid) <= held) * PAGE
            there = sorted((held | fresh) & later)
            for kept in chain.from_iterable(combinations(there, count) for count in range(len(there) + 1)):
                if sum(cost[name] for name, _ in kept) <= size:
                    key = frozenset(kept)
                    after[key] = max(after.get(key, 0), tokens + hit)
        value = after
    return max(value.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_no_cache_finds_more(family: str, seed: int, tmp_path: Path) -> None:
    """Against every choice that a cache could make on tiny traces, at every size."""
    bands = FAMILIES[family]
    rows = [
        row | {"hash_ids": row["hash_ids"][:2], "input_length": min(row["input_length"], 1024)}
        for row in conversations(seed, 5, 10, talks=2)
    ]
    trace = trace_of(tmp_path, rows)
    grid = PAGE
    reuse = find_reuse(trace, PAGE, grid)
    bound = OfflineBound(reuse, bands)
    for size in (0, 8, 13, 19, 27, 40):
        exact, said = best(trace, bands, size, grid), bound.solve(size).tokens
        assert exact <= said <= reuse.hit_tokens(grid)


def furthest_first(reuse: Reuse, capacity: int) -> int:
    """Belady's rule over single pages, which is optimal for them: of what is there, keep what is used again soonest."""
    begins: list[list[int]] = [[] for _ in reuse.hit_pages]
    requests = [r for r, pages in enumerate(reuse.hit_pages.tolist()) for _ in range(pages)]
    for until, since in zip(requests, reuse.previous.tolist(), strict=True):
        begins[since].append(until)
    held: list[int] = []
    found = 0
    for now in range(len(begins)):
        found += sum(until == now for until in held)
        held = sorted([until for until in held if until > now] + begins[now])[:capacity]
    return found * reuse.page_size


@pytest.mark.parametrize("part", [0.03, 0.1, 0.2, 0.4, 1.0])
def test_with_pages_alone_it_is_close_to_the_optimum(part: float, tmp_path: Path) -> None:
    """Where the optimum is known exactly the bound is at least that, and at most a twentieth above."""
    trace = trace_of(tmp_path, conversations(7, 400, 10, talks=40))
    reuse = find_reuse(trace, PAGE)
    pages = int(part * reuse.pages)
    exact = furthest_first(reuse, pages)
    said = OfflineBound(reuse, [FULL]).solve(pages * FULL.unit_bytes).tokens
    assert exact <= said <= exact * 1.05
    if part == 1.0:
        assert exact == said == reuse.hit_tokens()


def test_more_bytes_never_bound_less_and_dearer_bands_never_more(tmp_path: Path) -> None:
    """Monotone in the arena, and in what a hit needs."""
    trace = trace_of(tmp_path, conversations(3, 200, 10, talks=30))
    reuse = find_reuse(trace, PAGE, PAGE)
    sizes = [200, 400, 800, 1600, 100_000]
    told = {name: [OfflineBound(reuse, bands).solve(size).tokens for size in sizes] for name, bands in FAMILIES.items()}
    for name, row in told.items():
        assert all(low <= high * 1.02 for low, high in pairwise(row)), name
        assert all(low <= high * 1.02 for low, high in zip(row, told["full"], strict=True)), name
        assert row[-1] == reuse.hit_tokens(PAGE)
