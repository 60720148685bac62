"""`bandmaster bench cache`: what the prefix cache costs the scheduler, whatever it holds.

Owns the measurement of look-ups, of giving memory back and of steady decode steps beside a cache of many nodes. Must
never measure how well it hits; `bandmaster simulate` does. No model. Three parts: `match`, a prompt that the tree knows
in few long or in many short nodes; `reclaim`, one page and many from a tree of many leaves, under each eviction policy;
`step`, the core's iteration beside an empty cache, beside a full one, and with the arena full, so that every new page
is taken from the cache. Exit code 0; with `--check` 1 where a promised cost is passed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from allocator.capacity import Demand
from allocator.columns import Int64s
from allocator.geometry import BandGeometry
from daemon.core.eviction import EVICTION_POLICIES, POLICIES
from daemon.core.tree import PrefixTree
from daemon.core.tree_nodes import NO_PAGES, Reader
from journal.opening import open_journal
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tools.bench_core import PAGE_SIZE, BenchWorld, bands_of
from tools.tables import print_table

MATCH_PAGE_TOKENS = 64
CUT_TOKENS = 256
MATCH_MS_MAX = 1.0
ONE_PAGE_US_MAX = 20.0
STEP_RATIO_MAX = 2.0
FAMILIES = ("full", "full,window:1024", "full,window:1024,state")

Row = dict[str, Any]


class Forest:
    """A tree filled without a core: paths of pages that nobody reads; ids are given out in order."""

    def __init__(self, page_size: int, bands: list[BandGeometry], policy: str) -> None:
        self.tree = PrefixTree(page_size, bands, POLICIES[policy])
        self.state = self.tree.shape.state
        self._page = self._slot = 1
        self._now_ms = 0

    def grow(self, tokens: Int64s, nodes_pages: int) -> None:
        """A request whose pages the tree keeps, given so many at a time, each time with a state if there are any."""
        tree, size = self.tree, self.tree.page_size
        self._now_ms += 7
        tree.at(self._now_ms * 1_000_000)
        lock = tree.lock(tree.match("", tokens, 0), Reader(0, len(tokens)))
        pages = np.arange(self._page, self._page + len(tokens) // size, dtype=np.int32)
        self._page += len(pages)
        for end in range(nodes_pages, len(pages) + 1, nodes_pages):
            slot = self._slot if self.state >= 0 else 0
            self._slot += slot > 0
            tree.insert("", tokens[: end * size], pages, (0,) * tree.shape.count, slot, lock)
        tree.unlock(lock)


@contextmanager
def no_collection() -> Iterator[None]:
    """What is timed is not interrupted by a collection; nothing is looked through for it, however large the process."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def quantiles(times_ns: list[int], unit: float) -> tuple[float, float]:
    """Median and 99th percentile in units of so many nanoseconds."""
    return round(float(np.percentile(times_ns, 50)) / unit, 3), round(float(np.percentile(times_ns, 99)) / unit, 3)


def timed(call: Callable[[], object]) -> int:
    """Nanoseconds of processor time of one call."""
    begin = time.thread_time_ns()
    call()
    return time.thread_time_ns() - begin


def match_rows(tokens: int, repeats: int) -> list[Row]:
    """A prompt of so many tokens, found as a whole: in nodes as long as they grow, and in nodes of 256 tokens."""
    rows = []
    prompt = np.arange(tokens, dtype=np.int64) * 7 + 1
    for family in FAMILIES:
        for cut in (False, True):
            if "state" in family and not cut:
                continue  # its states cut every path
            tree = known_prompt(prompt, family, cut).tree
            found = tree.match("", prompt, tokens)
            with no_collection():
                times = [timed(lambda: tree.match("", prompt, tokens)) for _ in range(repeats)]  # noqa: B023
            p50, p99 = quantiles(times, 1e6)
            row = {"bands": family, "tokens": tokens, "node_tokens": CUT_TOKENS if cut else "long"}
            rows.append(row | {"found": found.tokens, "match_ms_p50": p50, "match_ms_p99": p99})
    return rows


def known_prompt(prompt: Int64s, family: str, cut: bool) -> Forest:
    """A tree that knows the prompt; `cut`: other requests left its path every 256 tokens, or states stand there."""
    forest = Forest(MATCH_PAGE_TOKENS, bands_of(family), "value")
    pages = CUT_TOKENS // MATCH_PAGE_TOKENS
    forest.grow(prompt, pages if "state" in family else len(prompt) // MATCH_PAGE_TOKENS)
    if cut and "state" not in family:
        for end in range(CUT_TOKENS, len(prompt), CUT_TOKENS):
            forest.grow(np.append(prompt[:end], np.full(MATCH_PAGE_TOKENS, -end)), end // MATCH_PAGE_TOKENS + 1)
    return forest


def reclaim_rows(leaves: int, counts: list[int], repeats: int, policies: list[str]) -> list[Row]:
    """Pages given up of a tree of so many leaves, a page each, under every policy: time of a call, and per page."""
    rows = []
    for family in FAMILIES:
        for policy in policies:
            forest = Forest(PAGE_SIZE, bands_of(family), policy)
            for leaf in range(leaves):
                forest.grow(np.arange(leaf * PAGE_SIZE, (leaf + 1) * PAGE_SIZE, dtype=np.int64), 1)
            for count in counts:
                calls = max(3, min(repeats, leaves // (4 * count)))
                with no_collection():
                    times = [timed(lambda: forest.tree.evict(_pages(count))) for _ in range(calls)]  # noqa: B023
                p50, p99 = quantiles(times, 1e3)
                row = {"bands": family, "policy": policy, "leaves": leaves, "pages": count, "calls": calls}
                rows.append(row | {"us_p50": p50, "us_p99": p99, "us_per_page": round(p50 / count, 3)})
    return rows


def _pages(count: int) -> Callable[[Demand], bool]:
    return lambda freed: freed[-1] >= count


def step_rows(nodes: int, running: int, steps: int) -> list[Row]:
    """Steady decode beside an empty cache, beside one of so many nodes, and with every new page taken from it."""
    rows = []
    for family in FAMILIES:
        for kind, held in (("empty", 0), ("cached", nodes), ("pressed", nodes)):
            with tempfile.TemporaryDirectory(prefix="bandmaster-bench-") as directory:
                journal, _ = open_journal(DiskStorage(Path(directory)), JournalSettings(policy="os"), bytes(16))
                world = BenchWorld(running, steps, journal, bands_of(family), spare_pages=held)
                filled = fill(world, held, kind == "pressed")
                for _ in range(16):
                    world.measure()
                with no_collection():
                    times = [world.measure()[0] for _ in range(steps)]
                journal.close()
            p50, p99 = quantiles(times, 1e6)
            evicted = sum(value for name, value in world.core.gauges().items() if name.startswith("evicted_units"))
            row = {"bands": family, "running": running, "cache": kind, "nodes": filled, "evicted_units": evicted}
            rows.append(row | {"step_ms_p50": p50, "step_ms_p99": p99})
    return rows


def fill(world: BenchWorld, nodes: int, to_the_brim: bool) -> int:
    """Leaves of a page each in the cache of a bench's core, so many or until no page is left; how many there are."""
    memory = world.core._state.memory
    assert memory is not None, "a bench runs in an epoch"
    assert memory.cache is not None, "a bench has a prefix cache"
    tree, one = memory.cache, memory.demand(1)
    room = memory.chain.max_extra(memory.none, one) if nodes else 0
    count = room if to_the_brim else min(nodes, room)
    pages = memory.take(tuple(count * units for units in one))[memory.owner] if count else NO_PAGES
    for made in range(count):
        tokens = -1 - np.arange(made * PAGE_SIZE, (made + 1) * PAGE_SIZE, dtype=np.int64)
        lock = tree.lock(tree.match("", tokens, 0), Reader(0, PAGE_SIZE))
        tree.insert("", tokens, pages[made : made + 1], (0,) * tree.shape.count, 0, lock)
        tree.unlock(lock)
    return count


def failures(rows: dict[str, list[Row]]) -> list[str]:
    """What costs more than was promised, in one line each."""
    found = [
        f"match {row['bands']} node_tokens {row['node_tokens']}: {row['match_ms_p50']} ms > {MATCH_MS_MAX}"
        for row in rows.get("match", [])
        if row["match_ms_p50"] > MATCH_MS_MAX
    ]
    found += [
        f"reclaim {row['bands']} {row['policy']}: one page in {row['us_p50']} us > {ONE_PAGE_US_MAX}"
        for row in rows.get("reclaim", [])
        if row["pages"] == 1 and row["bands"] == "full" and row["us_p50"] > ONE_PAGE_US_MAX
    ]
    empty = {row["bands"]: row["step_ms_p99"] for row in rows.get("step", []) if row["cache"] == "empty"}
    for row in rows.get("step", []):
        limit = STEP_RATIO_MAX * empty[row["bands"]]
        if row["cache"] == "cached" and row["step_ms_p99"] > limit:
            found.append(f"step {row['bands']}: p99 {row['step_ms_p99']} ms > {limit:.3f} beside {row['nodes']} nodes")
    return found


def show(title: str, rows: list[Row]) -> None:
    """A table for people."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    print_table(Console(), table)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bandmaster bench cache", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--part", choices=("all", "match", "reclaim", "step"), default="all", help="what to measure [all]")
    add("--tokens", type=int, default=100_000, help="of the prompt that is looked up [100000]")
    add("--leaves", type=int, default=50_000, help="of the tree that memory is taken from [50000]")
    add("--pages", default="1,10,100,1000", help="pages taken at once, comma-separated [1,10,100,1000]")
    add("--nodes", type=int, default=100_000, help="of the cache beside which steps are measured [100000]")
    add("--policies", default=",".join(EVICTION_POLICIES), help="of eviction, comma-separated [all]")
    add("--running", type=int, default=64, help="decoding requests of a step [64]")
    add("--steps", type=int, default=1000, help="measured steps [1000]")
    add("--repeats", type=int, default=200, help="measured calls, at most [200]")
    add("--check", action="store_true", help="exit 1 where a promised cost is passed")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure, print tables, or with `--json` one object with a list per part."""
    parser = build_parser()
    options = parser.parse_args(argv)
    counts = options.pages.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in counts):
        parser.error(f"--pages {options.pages!r}: whole numbers above 0, comma-separated")
    policies = options.policies.split(",")
    if not all(policy in POLICIES for policy in policies):
        parser.error(f"--policies {options.policies!r}: of {', '.join(POLICIES)}, comma-separated")
    for name in ("tokens", "leaves", "nodes", "running", "steps", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} must be at least 1")
    parts: dict[str, Callable[[], list[Row]]] = {
        "match": lambda: match_rows(options.tokens, options.repeats),
        "reclaim": lambda: reclaim_rows(options.leaves, [int(part) for part in counts], options.repeats, policies),
        "step": lambda: step_rows(options.nodes, options.running, options.steps),
    }
    rows = {name: measure() for name, measure in parts.items() if options.part in ("all", name)}
    broken = failures(rows) if options.check else []
    if options.json:
        print(json.dumps(rows | {"failures": broken}))
    else:
        titles = {
            "match": f"a prompt looked up, pages of {MATCH_PAGE_TOKENS} tokens",
            "reclaim": "pages taken from the cache",
            "step": "core + logical chain + step + encoding, per iteration of steady decode",
        }
        for name, part in rows.items():
            show(titles[name], part)
        for line in broken:
            print(f"above what is promised: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
