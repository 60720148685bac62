"""`bandmaster explore`: small-scope exhaustion of the allocator, every sequence of actions on tiny arenas.

    bandmaster explore [--bands 2] [--bands 3] [--units N] [--depth D] [--uses U] [--ops SET] [--jobs J] [--json]
    bandmaster explore --feasibility [...]      the closed form of capacity against brute force (see its own --help)

Every world (a shape of bands with its unit bytes) starts empty; a step is one action: a take, a free, a retirement, a
launch, a result, a flush, a rebind, a state copy, the begin or the release of a host copy or transfer, a publication, a
report of extents. Reported are distinct states (up to the names of ids), steps taken, bytes that reliefs moved against
the exact least, and findings, each with a shortest sequence. Owns the command only. Exit code 0: nothing found; 1:
findings; 2: usage.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools import feasibility
from tools.smallscope.search import Walk, explore
from tools.smallscope.world import SHAPES, Limits, Shape

FINDINGS_MAX = 10
MEMORY = frozenset({"take", "free", "free_slot", "retire", "flush", "rebind"})
FORWARDS = MEMORY | {"launch", "process", "copy_state"}
OP_SETS: dict[str, frozenset[str] | None] = {"memory": MEMORY, "forwards": FORWARDS, "all": None}
"""Which actions there are: on memory alone, with forwards, and with host copies and transfers too."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--feasibility" in arguments:
        return feasibility.main([word for word in arguments if word != "--feasibility"])
    options = _parser().parse_args(arguments)
    shapes = [shape for bands in options.bands or [2, 3] for shape in SHAPES[bands]]
    if options.shape:
        shapes = [shape for shape in shapes if options.shape in shape.name]
        if not shapes:
            sys.stderr.write(f"bandmaster explore: no shape of these bands has {options.shape!r} in its name\n")
            return 2
    began = time.monotonic()
    walks = _run(shapes, options)
    report = _report(walks, time.monotonic() - began, options)
    if options.json:
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        _print(report)
    return 1 if report["findings"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bandmaster explore", description="every sequence of actions on tiny arenas")
    add = parser.add_argument
    add("--bands", type=int, choices=sorted(SHAPES), action="append", help="shapes of so many bands (default: 2 and 3)")
    add("--shape", default="", metavar="TEXT", help="only shapes with this in their name")
    add("--units", type=int, default=3, metavar="N", help="arenas of so many of the largest unit (default: 3)")
    add("--depth", type=int, default=4, metavar="D", help="actions from the empty arena (default: 4)")
    add("--uses", type=int, default=1, metavar="U", help="host copies and transfers open at a time (default: 1)")
    add("--ops", choices=OP_SETS, default="all", help="which actions there are (default: all)")
    add("--jobs", type=int, default=1, metavar="J", help="worlds explored at a time, a process each")
    add("--json", action="store_true", help="the report as JSON")
    add("--feasibility", action="store_true", help="instead: the closed form of capacity against brute force")
    return parser


# --- worlds in processes -------------------------------------------------------------------------------------------


def _run(shapes: list[Shape], options: argparse.Namespace) -> list[Walk]:
    """Explores every shape, `jobs` at a time, with a bar per shape; in the order of `shapes`."""
    context = multiprocessing.get_context("spawn")
    news: Any = context.Queue()
    waiting = list(enumerate(shapes))
    running: dict[int, Any] = {}
    walks: dict[int, Walk] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[states]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        bars = [bar.add_task(shape.name, total=options.depth * 100, states="", start=False) for shape in shapes]
        while waiting or running:
            while waiting and len(running) < max(1, options.jobs):
                number, shape = waiting.pop(0)
                work = (number, shape, Limits(options.units, options.uses), options.depth, options.ops, news)
                running[number] = context.Process(target=_explore_one, args=work, daemon=True)
                running[number].start()
                bar.start_task(bars[number])
            try:
                number, item = news.get(timeout=1.0)
            except queue.Empty:
                for number, process in running.items():
                    if process.exitcode not in (None, 0):
                        raise RuntimeError(f"the process of {shapes[number].name} ended: {process.exitcode}") from None
                continue
            if isinstance(item, str):
                raise RuntimeError(f"{shapes[number].name}: {item}")
            if isinstance(item, Walk):
                walks[number] = item
                running.pop(number).join()
                bar.update(bars[number], completed=options.depth * 100)
            else:
                depth, states, steps, percent = item
                text = f"{states:,d} states, {steps:,d} steps"
                bar.update(bars[number], completed=(depth - 1) * 100 + percent, states=text)
    return [walks[number] for number in range(len(shapes))]


def _explore_one(number: int, shape: Shape, limits: Limits, depth: int, ops: str, news: Any) -> None:
    """A process: one world."""

    def tell(*progress: int) -> None:
        news.put((number, progress))

    try:
        news.put((number, explore(shape, limits, depth, OP_SETS[ops], FINDINGS_MAX, tell)))
    except Exception as error:  # the command's own: it ends the command, with its name
        news.put((number, f"{type(error).__name__}: {error}"))


# --- the report ----------------------------------------------------------------------------------------------------


def _report(walks: list[Walk], seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    findings = [asdict(finding) for walk in walks for finding in walk.findings]
    worlds = [{name: value for name, value in asdict(walk).items() if name != "findings"} for walk in walks]
    return {
        "depth": options.depth,
        "units": options.units,
        "uses": options.uses,
        "ops": options.ops,
        "states": sum(walk.states for walk in walks),
        "transitions": sum(walk.transitions for walk in walks),
        "reliefs": sum(walk.reliefs for walk in walks),
        "moved_bytes": sum(walk.moved_bytes for walk in walks),
        "least_bytes": sum(walk.least_bytes for walk in walks),
        "max_ratio": max(walk.max_ratio for walk in walks),
        "unrealizable": sum(finding["name"] in ("unrealizable", "chain.realizable") for finding in findings),
        "seconds": round(seconds, 1),
        "worlds": worlds,
        "findings": findings,
    }


def _print(report: dict[str, Any]) -> None:
    console = Console()
    table = Table(box=SIMPLE_HEAD)
    for name in ("world", "depth", "states", "steps", "reliefs", "moved / least", "all states"):
        table.add_column(name, justify="left" if name == "world" else "right")
    for row in report["worlds"]:
        counts = [f"{row[name]:,d}" for name in ("depth", "states", "transitions", "reliefs")]
        table.add_row(row["world"], *counts, f"{row['max_ratio']:.3f}", "yes" if row["closed"] else "")
    console.print(table)
    for finding in report["findings"]:
        console.print(f"{finding['world']}: {finding['name']}: {finding['detail']}", style="red", markup=False)
        for number, action in enumerate(finding["actions"], 1):
            console.print(f"  {number}. {action}", markup=False, highlight=False)
    console.print(
        f"{report['states']:,d} distinct states, {report['transitions']:,d} steps, {report['reliefs']:,d} reliefs, "
        f"bytes moved at most {report['max_ratio']:.3f} of the exact least, {len(report['findings'])} findings, "
        f"{report['seconds']} s"
    )


if __name__ == "__main__":
    sys.exit(main())
