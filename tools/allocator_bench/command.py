"""`bandmaster bench allocator`: microseconds of the logical and of the physical chain, bytes moved, memory of books.

Owns the command: which pools are measured, the table and the JSON rows. Must never measure anything itself. The two
chains are timed apart: the logical one runs in the daemon, a physical one in every rank. Figures are of one thread and
include the clock's own cost, which is printed; CPU time is the figure to compare on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tools.allocator_bench.cases import capacity_rows, extend_rows
from tools.allocator_bench.memory import memory_rows
from tools.allocator_bench.relief import relief_rows
from tools.allocator_bench.serving import Trace, timer_cost_us
from tools.allocator_bench.table import show
from tools.allocator_bench.uses import uses_rows
from tools.allocator_bench.world import NAMES, SLOTS_PER_REQUEST, Shape

ISOLATED_RUNNING = 32
SECONDS_MIN, SECONDS_MAX = 0.01, 3600.0

# What a row's `op` counts: one call of the side named beside it.
COUNTS: dict[str, str] = {
    "decode_take": "pages for one decode step of all running requests, every token band jointly",
    "admit_take": "a whole prompt of a new request, every band jointly (serving trace)",
    "finish_free": "all units of one request (serving trace)",
    "retire_free": "window units of one step that fell behind their windows",
    "flush": "opportunistic compaction, at most 64 moves a band, between two forwards",
    "iteration": "all ops of one scheduler iteration in one step: frees, takes, retirement, flush",
    "step_digest": "the chained logical digest of a step",
    "step_frame": "opening a step, its layout digest",
    "step_frame_with_launch": "opening a step, its layout digest, recording its forward's writes",
    "extend": "a prompt of so many tokens, on an untouched arena (clean) or into holes (reuse)",
    "finish": "all units of a request of so many tokens",
    "capacity_fits": "one question not asked since counts changed, answered yes (batch of 64)",
    "capacity_refused": "one question not asked since counts changed, answered no with its reason (batch of 64)",
    "capacity_memo": "one question asked before at the same counts (batch of 64)",
    "capacity_predicate": "whether a demand fits, without a reason, as reclaim asks per victim (batch of 64)",
    "max_extra": "the most pages that still fit",
    "relief_take": "a take of tokens that fits only after window holes are closed; least: of any layout, found apart",
    "relief_take_large": "the same for a 64th of the pool at once",
    "relief_take_in_flight": "the same while the freed units pend behind two forwards that write what stays",
    "relief_state_take": "a take of state slots that fits only after the float has moved; least: as above",
    "relief_state_take_large": "the same for all slots of the pool at once",
    "take_of_pending": "a take of at most 16 pages out of half a pool that pends behind two forwards",
    "take_of_pending_beside_backup": "the same while a host backup of 2,048 tokens is open",
    "backup_2048": "a host backup of 2,048 tokens begins",
    "send_2048": "a network send of 2,048 tokens begins",
    "publish_2048": "2,048 tokens are published to a peer",
    "release_2048": "backup, send and publication of the same 2,048 tokens end in one step, its opening included",
    "memory": "bytes of the chains' own columns and objects; layers of KV heads x dimension",
}
SUFFIXES = {"_refused": "refused", "_no_move": "where giving back holes at a span's boundary was enough"}


class Job(NamedTuple):
    """One measurement of a pool: the fields its rows share, and what yields them."""

    text: str
    common: dict[str, Any]
    rows: Callable[[], Iterator[dict[str, Any]]]


def trace_rows(shape: Shape, running: int, options: argparse.Namespace, together: bool) -> Iterator[dict[str, Any]]:
    """Rows of a serving trace: each op in a step of its own, or (together) whole iterations only."""
    trace = Trace(shape, running, options.seed, together, options.mirror)
    common = trace.run(options.steps, options.budget)
    for row in trace.world.times.rows():
        whole = row["side"] != "logical" and row["op"] in ("iteration", "step_frame_with_launch")
        if whole if together else row["op"] != "iteration":
            yield {**common, **row}


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Every measurement asked for, in order."""
    for bands in options.bands:
        for slots in options.slots:
            for page in options.page_sizes:
                yield from _pool_jobs(options, bands, slots, page)
    if "memory" in options.only:
        yield Job("memory", {"part": "memory"}, memory_rows)


def _pool_jobs(options: argparse.Namespace, bands: int, slots: int, page: int) -> Iterator[Job]:
    shape = Shape(bands, slots, page, SLOTS_PER_REQUEST * ISOLATED_RUNNING + 8)
    seed, rounds, budget = options.seed, options.rounds, options.budget
    cases: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "extend": lambda: extend_rows(shape, 2 * rounds, budget),
        "capacity": lambda: capacity_rows(shape, 10 * rounds, seed),
        "relief": lambda: relief_rows(shape, rounds, budget, seed),
        "uses": lambda: uses_rows(shape, rounds, budget),
    }
    for part, rows in cases.items():
        if part in options.only and not (part == "relief" and bands == 1):
            yield Job(_text(part, shape), {"part": part, **shape.row}, rows)
    for running in options.running:
        if running * 2 * page > slots:
            continue
        busy = Shape(bands, slots, page, SLOTS_PER_REQUEST * running + 8)
        for part, together in (("trace", False), ("iteration", True)):
            if part in options.only:
                common = {"part": part, **busy.row, "running": running}
                text = f"{_text(part, busy)}, {running} running"
                yield Job(text, common, lambda b=busy, r=running, t=together: trace_rows(b, r, options, t))  # type: ignore[misc]


def _text(part: str, shape: Shape) -> str:
    return f"{part}: {NAMES[shape.bands]}, {shape.slots:,d} slots, page {shape.page_size}"


def counts(op: str) -> str:
    """What a row with this `op` counts."""
    if op in COUNTS:
        return COUNTS[op]
    for suffix, addition in SUFFIXES.items():
        if op.endswith(suffix):
            return f"{COUNTS[op.removesuffix(suffix)]}, {addition}"
    return COUNTS.get(op.split("_")[0], "")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, with a progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: list[dict[str, Any]] = []
    todo = list(jobs(options))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(todo))
        for job in todo:
            progress.update(task, description=job.text)
            rows += [{**job.common, **row, "counts": counts(row["op"])} for row in job.rows() if counts(row["op"])]
            progress.advance(task)
    return rows


# --- the command -------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Where this ran, and what the clock adds to every figure."""
    wall, cpu = timer_cost_us()
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "clock_wall_us": wall,
        "clock_cpu_us": cpu,
    }


def _number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text) if text.strip().lstrip("-").isascii() and text.strip().lstrip("-").isdigit() else None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number in {low}..{high}")
        return value

    return parse


def _numbers(low: int, high: int) -> Callable[[str], list[int]]:
    one = _number(low, high)
    return lambda text: [one(part) for part in text.split(",")]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not SECONDS_MIN <= value <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds in {SECONDS_MIN}..{SECONDS_MAX}")
    return value


PARTS = ("extend", "capacity", "relief", "uses", "trace", "iteration", "memory")


def _parts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(PARTS)}")
    return names


def options_of(argv: list[str]) -> argparse.Namespace:
    """The options; an invalid one ends the process with 2, its name, its value and what it may be."""
    cli = argparse.ArgumentParser(prog="bandmaster bench allocator", description=(__doc__ or "").splitlines()[0])
    add = cli.add_argument
    slots, pages, running = _numbers(1024, 10**7), _numbers(1, 1024), _numbers(1, 65536)
    count = _number(1, 10**6)
    add(
        "--slots", type=slots, default=[10_000, 100_000, 1_000_000], help="token slots of a pool [10000,100000,1000000]"
    )
    add("--page-sizes", type=pages, default=[1, 16, 64], help="tokens of a page [1,16,64]")
    add("--bands", type=_numbers(1, 3), default=[2, 3], help="1: full; 2: window+full; 3: state+window+full [2,3]")
    add("--running", type=running, default=[64, 256, 1024], help="running requests of the serving traces [64,256,1024]")
    add("--only", type=_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    add("--steps", type=count, default=200, help="measured iterations of a trace [200]")
    add("--rounds", type=count, default=30, help="rounds of the other parts [30]")
    add("--budget", type=_seconds, default=4.0, help="seconds after which a measurement of a pool stops early [4]")
    add("--seed", type=_number(0, 2**32 - 1), default=1, help="of traces and layouts [1]")
    add("--mirror", action="store_true", help="also time the ranks' logical mirror in the traces")
    add("--json", action="store_true", help="one object with a list `rows`")
    return cli.parse_args(argv)


def main(argv: list[str]) -> int:
    """Measure, print tables, or with `--json` one object with `machine` and a list `rows`."""
    options = options_of(argv)
    about = machine()
    rows = measure(options)
    if options.json:
        print(json.dumps({"machine": about, "rows": rows}))
        return 0
    console = Console()
    console.print("microseconds of thread CPU; the clock itself adds its own cost to each (below)\n", highlight=False)
    show(console, rows)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
