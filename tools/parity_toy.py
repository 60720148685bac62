"""`bandmaster parity --toy`: random schedules over the toy model, every output equal to a run without memory.

Owns the command: seeds, workers, the table of what happened, and how a failing schedule is shown. Must never stop at a
failure without telling how to run it again. `tools.toy_schedules` draws, runs, judges and shrinks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tools.tables import print_table
from tools.toy_schedules import Ran, Schedule, draw, run, shrink

FAILURES_SHOWN = 5


def run_seed(seed: int) -> tuple[int, str, Ran]:
    """Run the schedule of a seed; its shape comes along for the table."""
    schedule = draw(seed)
    return seed, f"{schedule.shape}, page {schedule.page_size}", run(schedule)


def run_seeds(seeds: Iterable[int], jobs: int) -> Iterator[tuple[int, str, Ran]]:
    """Run all seeds, in order, on `jobs` processes."""
    if jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(run_seed, seeds, chunksize=4)


def main(options: argparse.Namespace) -> int:
    """0 when no schedule failed, 1 otherwise."""
    if options.schedule:
        return _again(msgspec.json.decode(Path(options.schedule).read_bytes(), type=Schedule))
    seeds = range(options.seed, options.seed + options.schedules)
    began = time.monotonic()
    happened: Counter[str] = Counter()
    shapes: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    quiet = Console(stderr=True)
    for seed, shape, ran in track(run_seeds(seeds, options.jobs), "schedules", len(seeds), console=quiet):
        happened += ran.happened
        shapes[shape] += 1
        if ran.failure:
            failures.append((seed, ran.failure))
    found = {
        "schedules": len(seeds),
        "failed": len(failures),
        "seconds": round(time.monotonic() - began, 1),
        "happened": dict(sorted(happened.items())),
        "shapes": dict(sorted(shapes.items())),
        "failures": [{"seed": seed, "why": why} for seed, why in failures],
    }
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        _show(found)
    for seed, _ in failures[:FAILURES_SHOWN]:
        _tell(*shrink(draw(seed)))
    return 1 if failures else 0


def _show(found: dict[str, object]) -> None:
    happened = found["happened"]
    assert isinstance(happened, dict)
    table = Table("what happened", "times", title=f"{found['schedules']} schedules, {found['seconds']} s")
    for name, times in happened.items():
        table.add_row(name, f"{times:,d}")
    console = Console()
    print_table(console, table)
    console.print(f"{found['failed']} of {found['schedules']} schedules failed")


def _tell(schedule: Schedule, ran: Ran) -> None:
    """A failing schedule as a file's content, made small, and how to run it again."""
    path = Path(f"toy-schedule-{schedule.seed}.json")
    path.write_bytes(msgspec.json.encode(schedule))
    sys.stderr.write(
        f"seed {schedule.seed} ({schedule.shape}, page {schedule.page_size}): {ran.failure}\n"
        f"  made smaller: {len(schedule.actions)} actions, {len(schedule.asks)} requests, in {path};"
        f" run it again: bandmaster parity --toy --schedule {path}\n"
    )


def _again(schedule: Schedule) -> int:
    ran = run(schedule)
    sys.stdout.write(f"{ran.failure or 'every output is equal'}\n")
    return 1 if ran.failure else 0
