"""`bandmaster bench oversubscription`: throughput, retractions and work done twice in arenas that get too small.

Owns the command. Must never serve anything itself. The same requests are served by the real core on a simulated device
in one arena per point, once with the default reservation and once with `--reserve full`. Exit code 0; 2 for bad
arguments; with `--check` 1 where a point breaks the promise (no cliff, bounded retractions, never far below full).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from daemon.core.eviction import EVICTION_POLICIES
from tools.pressure.curve import FAMILIES, ROWS_EACH, SHAPES, SLACK_MAX, Point, load_of, point_rows, problems, run
from tools.pressure.show import curve_table
from tools.simulate.engine import Times
from tools.tables import print_table

DEFAULT_POINTS = "0.8,0.9,1,1.1,1.2,1.4,1.6,1.8,2"
POINT_MIN, POINT_MAX = 0.1, 8.0
ROWS_MAX = 1024
TIME_MAX_US = 1_000_000
RESERVES = ("estimate", "full")
DEFAULT_TIMES = Times()
HELD = (
    "the promise holds at every point: everything ends, throughput falls no faster than memory, throughput and time "
    "per token stay near those of the full reservation, retractions are bounded (numbers: docs/bench_pressure.md)"
)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bandmaster bench oversubscription", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--points", default=DEFAULT_POINTS, metavar="X,X,...", help=f"working set over arena [{DEFAULT_POINTS}]")
    add("--load", default=",".join(SHAPES), metavar="NAME,...", help=f"of {', '.join(SHAPES)} [all]")
    add("--family", default=",".join(FAMILIES), metavar="NAME,...", help=f"of {', '.join(FAMILIES)} [all]")
    add("--running", type=int, default=32, metavar="N", help=f"requests that may run; {ROWS_EACH}x as many come [32]")
    add("--slack", type=int, default=2, metavar="N", help="max_tokens is so many times the output that is made [2]")
    add("--policy", default="value", help="eviction policy [value]")
    for name, value, what in zip(
        ("step", "prefill", "decode"), DEFAULT_TIMES, ("a forward", "a prompt token", "a decoding request"), strict=True
    ):
        add(f"--{name}-us", type=int, default=value // 1000, metavar="N", help=f"what {what} takes [{value // 1000}]")
    add("--seed", type=int, default=1, help="of the lengths [1]")
    add("--check", action="store_true", help="exit 1 where a point breaks the promise")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def points_of(text: str) -> list[float]:
    """Points from text, ascending and once each; raises ValueError naming a wrong one."""
    points = set()
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            raise ValueError(f"--points {part!r} is no number") from None
        if not POINT_MIN <= value <= POINT_MAX:
            raise ValueError(f"--points {part}: from {POINT_MIN:g} to {POINT_MAX:g}")
        points.add(value)
    return sorted(points)


def names_of(flag: str, text: str, known: Iterable[str] | Mapping[str, object]) -> list[str]:
    """Names from text, once each; raises ValueError naming an unknown one."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"--{flag} {name!r} is none of {', '.join(known)}")
    return names


def check_numbers(options: argparse.Namespace) -> None:
    """Raises ValueError naming a number out of range."""
    ranges = {"running": (1, ROWS_MAX), "slack": (1, SLACK_MAX), "seed": (0, 2**32 - 1)}
    ranges |= {name: (int(name == "step_us"), TIME_MAX_US) for name in ("step_us", "prefill_us", "decode_us")}
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        if not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} {value}: from {least} to {most}")


def measure(
    options: argparse.Namespace, points: Sequence[float], loads: Sequence[str], families: Sequence[str]
) -> list[Point]:
    """Every point of every load and family with both reservations, with a progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    times = Times(*(1000 * us for us in (options.step_us, options.prefill_us, options.decode_us)))
    found: list[Point] = []
    jobs = [(load, family, reserve, x) for load in loads for family in families for reserve in RESERVES for x in points]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for name, family, reserve, x in jobs:
            progress.update(task, description=f"{name} {family} {reserve} {x:g}")
            load = load_of(name, options.running, options.slack, options.seed)
            found.append(run(family, reserve, x, load, times, options.policy))
            progress.advance(task)
    return found


def legend(options: argparse.Namespace, loads: Sequence[str]) -> str:
    """What was served and what it was said to take."""
    parts = [f"{options.running} running, {options.running * ROWS_EACH} requests waiting from the start"]
    for name in loads:
        shape = SHAPES[name]
        text = (
            f"{name}: {shape.prompt[0]}-{shape.prompt[1]} prompt and {shape.output[0]}-{shape.output[1]} output tokens"
        )
        parts.append(text + (f", {shape.shared} shared by one in {shape.groups}" if shape.shared else ""))
    parts.append(f"max_tokens {options.slack} times the output")
    took = (
        f"{options.step_us} us",
        f"{options.prefill_us} us a prompt token",
        f"{options.decode_us} us a decoding row",
    )
    return "; ".join([*parts, f"a forward takes {', '.join(took)}"])


def main(argv: list[str] | None = None) -> int:
    """Run the points, print a table per load and family, or with `--json` one object with `rows` and `problems`."""
    parser = build_parser()
    options = parser.parse_args(argv)
    try:
        points = points_of(options.points)
        loads = names_of("load", options.load, SHAPES)
        families = names_of("family", options.family, FAMILIES)
        names_of("policy", options.policy, EVICTION_POLICIES)
        check_numbers(options)
    except ValueError as error:
        parser.error(str(error))
    found = measure(options, points, loads, families)
    wrong = list(problems(found))
    if options.json:
        print(json.dumps({"rows": point_rows(found), "problems": wrong}))
        return int(options.check and bool(wrong))
    console = Console()
    for key in dict.fromkeys((one.load, one.family) for one in found):
        print_table(console, curve_table([one for one in found if (one.load, one.family) == key]))
    console.print(legend(options, loads), style="dim", highlight=False, soft_wrap=True)
    for line in wrong or [HELD]:
        console.print(line, highlight=False, soft_wrap=True)
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
