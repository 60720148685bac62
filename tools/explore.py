"""`bandmaster explore`: small-scope exhaustion of the allocator, every sequence of actions on tiny arenas.

    bandmaster explore [--bands 2] [--bands 3] [--units N] [--depth D] [--uses U] [--ops SET] [--jobs J] [--json]
    bandmaster explore --feasibility [--help] [...]     the closed form of capacity against brute force

Every world (a shape of bands with its unit bytes) starts empty; a step is one action: a take, a free, a retirement, a
launch, a result, a flush, a rebind, a state copy, the begin or the release of a host copy or transfer, a publication, a
report of extents. Reported are distinct states (up to the names of ids), steps taken, bytes that reliefs moved against
the exact least, and findings, each with a shortest sequence. Owns the command only. Exit code 0: nothing found; 1:
findings; 2: usage; 3: a process of the command was lost; 130, 143: ended by a signal, with what was seen so far.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from tools import feasibility
from tools.smallscope.search import Walk
from tools.smallscope.words import grouped
from tools.smallscope.workers import Job, Progress, WorkerLost, explore_all
from tools.smallscope.world import SHAPES, Limits

CLEAN, FOUND, USAGE, LOST = 0, 1, 2, 3
CAUSES_MAX = 10  # findings of different causes per world, after which it is left
MEMORY = frozenset({"take", "free", "free_slot", "retire", "flush", "rebind"})
FORWARDS = MEMORY | {"launch", "process", "copy_state"}
OP_SETS: dict[str, frozenset[str] | None] = {"memory": MEMORY, "forwards": FORWARDS, "all": None}
"""Which actions there are: on memory alone, with forwards, and with host copies and transfers too."""

RANGES = {"units": (1, 40), "depth": (1, 1000), "uses": (0, 8), "jobs": (1, 256)}
WIDE = 80


class _Ended(BaseException):
    """SIGTERM."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--feasibility" in arguments:
        rest = [word for word in arguments if word != "--feasibility"]
        return feasibility.main(rest, "bandmaster explore --feasibility")
    options = _parse(arguments)
    shapes = [shape for bands in options.bands or [2, 3] for shape in SHAPES[bands]]
    chosen = [shape for shape in shapes if options.shape in shape.name]
    if not chosen:
        names = "; ".join(shape.name for shape in shapes)
        sys.stderr.write(f"bandmaster explore: --shape {options.shape!r} is in no name; the shapes are {names}\n")
        return USAGE
    limits = Limits(options.units, options.uses)
    jobs = [Job(shape, limits, options.depth, OP_SETS[options.ops], CAUSES_MAX) for shape in chosen]
    return _Command(jobs, options).run()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bandmaster explore", description="every sequence of actions on tiny arenas")
    add = parser.add_argument
    add("--bands", type=int, choices=sorted(SHAPES), action="append", help="shapes of so many bands (default: 2 and 3)")
    add("--shape", default="", metavar="TEXT", help="only shapes with this in their name")
    add("--units", type=int, default=3, metavar="N", help="arenas of so many of the largest unit (default: 3)")
    add("--depth", type=int, default=4, metavar="D", help="actions from the empty arena (default: 4)")
    add("--uses", type=int, default=1, metavar="U", help="host copies and transfers open at a time (default: 1)")
    add("--ops", choices=OP_SETS, default="all", help="which actions there are (default: all)")
    add("--jobs", type=int, default=1, metavar="J", help="worlds explored at a time, a process each (default: 1)")
    add("--json", action="store_true", help="the report as JSON")
    add("--feasibility", action="store_true", help="instead: capacity against brute force; --help there says more")
    options = parser.parse_args(arguments)
    for name, (least, most) in RANGES.items():
        value = getattr(options, name)
        if not least <= value <= most:
            parser.error(f"--{name} {value}: it must be at least {least} and at most {most}")
    return options


class _Command:
    """One call of the command: what is known so far of every world."""

    def __init__(self, jobs: list[Job], options: argparse.Namespace) -> None:
        self.jobs, self.options = jobs, options
        self.walks: dict[int, Walk] = {}
        self.progress: dict[int, Progress] = {}

    def run(self) -> int:
        """Explores, prints, and returns the exit code."""
        began = time.monotonic()
        before = signal.signal(signal.SIGTERM, _end)
        try:
            self._explore()
        except WorkerLost as error:
            self._say(f"{error}; {self._so_far()}")
            return LOST
        except (KeyboardInterrupt, _Ended) as ended:
            self._say(f"interrupted; {self._so_far()}")
            return 143 if isinstance(ended, _Ended) else 130
        finally:
            signal.signal(signal.SIGTERM, before)
        report = self._report(time.monotonic() - began)
        sys.stdout.write(json.dumps(report, indent=1) + "\n" if self.options.json else _text(report))
        return FOUND if report["findings"] else CLEAN

    def _explore(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), TimeElapsedColumn())
        with Bars(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
            tasks = [bars.add_task(job.shape.name, total=job.depth * 100, start=False) for job in self.jobs]

            def watch(number: int, news: Progress) -> None:
                self.progress[number] = news
                bars.start_task(tasks[number])
                text = f"{self.jobs[number].shape.name}: {news.states:,d}"
                bars.update(tasks[number], completed=(news.depth - 1) * 100 + news.percent, description=text)

            def done(number: int, walk: Walk) -> None:
                self.walks[number] = walk
                bars.update(tasks[number], completed=self.jobs[number].depth * 100)

            explore_all(self.jobs, self.options.jobs, watch, done)

    def _so_far(self) -> str:
        done = [(walk.states, walk.transitions) for walk in self.walks.values()]
        begun = [(p.states, p.transitions) for number, p in self.progress.items() if number not in self.walks]
        states, steps = (sum(column) for column in zip((0, 0), *done, *begun, strict=True))
        findings = sum(len(walk.findings) for walk in self.walks.values())
        worlds = f"{len(self.walks)} of {len(self.jobs)} worlds were done"
        return f"{worlds}: {states:,d} states, {steps:,d} steps, {findings} causes of findings in those done"

    def _say(self, text: str) -> None:
        sys.stderr.write(f"bandmaster explore: {text}\n")

    def _report(self, seconds: float) -> dict[str, Any]:
        walks = [self.walks[number] for number in range(len(self.jobs))]
        findings = grouped([asdict(finding) for walk in walks for finding in walk.findings])
        unrealizable = ("unrealizable", "chain.realizable")
        return {
            **{name: getattr(self.options, name) for name in ("depth", "units", "uses", "ops")},
            **{name: sum(getattr(walk, name) for walk in walks) for name in ("states", "transitions", "reliefs")},
            **{name: sum(getattr(walk, name) for walk in walks) for name in ("moved_bytes", "least_bytes")},
            "max_ratio": max(walk.max_ratio for walk in walks),
            "unrealizable": sum(finding["count"] for finding in findings if finding["name"] in unrealizable),
            "seconds": round(seconds, 1),
            "worlds": [{name: value for name, value in asdict(w).items() if name != "findings"} for w in walks],
            "findings": findings,
        }


def _end(number: int, frame: object) -> None:
    raise _Ended


# --- text ----------------------------------------------------------------------------------------------------------


def _text(report: dict[str, Any]) -> str:
    """The report for people: a row per world, two where the terminal is narrow; then what was found."""
    lines = _rows(report["worlds"], Console().width >= WIDE)
    lines.append("")
    for finding in report["findings"]:
        often = f", met {finding['count']} times" if finding["count"] > 1 else ""
        lines.append(f"{finding['world']}: {finding['detail']}{often}")
        lines += [f"  {number}. {words}" for number, words in enumerate(finding["words"], 1)]
        lines.append("")
    lines += [
        f"{report['states']:,d} distinct states, {report['transitions']:,d} steps, {len(report['findings'])} findings",
        f"{report['reliefs']:,d} reliefs moved at most {report['max_ratio']:.3f} of the exact least bytes",
        f"{report['seconds']} s",
    ]
    if any(row["closed"] for row in report["worlds"]):
        lines.append("all: these are all states that these actions reach, at any depth")
    return "\n".join(lines) + "\n"


def _rows(worlds: list[dict[str, Any]], wide: bool) -> list[str]:
    lines = [f"{'world':<29}{'depth':>6}{'states':>11}{'steps':>12}{'reliefs':>10}{'moved':>7}"] if wide else []
    for row in worlds:
        states, steps, reliefs = row["states"], row["transitions"], row["reliefs"]
        closed = "  all" if row["closed"] else ""
        if wide:
            numbers = f"{row['depth']:>6}{states:>11,d}{steps:>12,d}{reliefs:>10,d}{row['max_ratio']:>7.3f}"
            lines.append(f"{row['world']:<29}{numbers}{closed}")
        else:
            lines.append(f"{row['world']}  depth {row['depth']}{closed}")
            lines.append(f"  {states:,d} states, {steps:,d} steps, {reliefs:,d} reliefs, moved {row['max_ratio']:.3f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
