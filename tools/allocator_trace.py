"""`bandmaster trace`: what the allocator decided in one version, asked again of another.

    bandmaster trace record --out FILE [--seeds A:B] [--ops N] [--shapes NAMES] [--page-sizes NUMBERS] [--json]
    bandmaster trace compare FILE [--json]

`record` runs programs of the page-safety harness and writes every call of the logical chain and every step of every
stage's physical chain with its answer: refusals, ops, effects, digests. `compare` asks the same of the present code and
prints the first divergence of each run. Owns the command only. Exit code 0: equal (or recorded); 1: something differs,
or a program failed while it was recorded; 2: usage, or a file that is no complete trace; 130, 143: ended by a signal.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import Progress

from tools.pagesafety.shapes import FIVE, SHAPES
from tools.tracing.compare import Divergence, RunReplay
from tools.tracing.record import record
from tools.tracing.rows import BadTrace, End, Row, Run, encode, read

EQUAL, DIFFERENT, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = _parse(sys.argv[1:] if argv is None else list(argv))
    return _record(options) if options.command == "record" else _compare(options)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bandmaster trace", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("record", help="run programs and write what was decided")
    first.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the trace goes")
    first.add_argument("--seeds", default="0:4", metavar="A:B", help="seeds A to B-1 (default: 0:4)")
    first.add_argument("--ops", type=int, default=400, metavar="N", help="operations of a program (default: 400)")
    first.add_argument("--shapes", default=",".join(FIVE), help=f"'all', or some of {', '.join(SHAPES)}")
    first.add_argument("--page-sizes", default="16", help="tokens of a page, comma-separated (default: 16)")
    second = commands.add_parser("compare", help="ask the present code the same")
    second.add_argument("file", type=Path, metavar="FILE", help="a recorded trace")
    for command in (first, second):
        command.add_argument("--json", action="store_true", help="the report as JSON")
    options = parser.parse_args(argv)
    if options.command == "record":
        start, colon, end = options.seeds.partition(":")
        if not (colon and start.isdigit() and end.isdigit() and int(start) < int(end)):
            parser.error(f"--seeds {options.seeds}: give A:B with A below B")
        options.seeds = range(int(start), int(end))
        options.shapes = list(SHAPES) if options.shapes == "all" else options.shapes.split(",")
        if unknown := [shape for shape in options.shapes if shape not in SHAPES]:
            parser.error(f"--shapes {unknown[0]}: the shapes are {', '.join(SHAPES)}")
        sizes = options.page_sizes.split(",")
        if not all(size.isdigit() and int(size) > 0 for size in sizes):
            parser.error(f"--page-sizes {options.page_sizes}: give positive numbers of tokens")
        if options.ops < 1:
            parser.error(f"--ops {options.ops}: it must be at least 1")
        options.page_sizes = [int(size) for size in sizes]
    return options


def _record(options: argparse.Namespace) -> int:
    """Writes beside the file, which is there only once it is complete."""
    part = options.out.with_name(options.out.name + ".part")
    try:
        file = part.open("wb")
    except OSError as error:
        return _fail(f"--out {options.out}: {error.strerror}; name a file in a directory that can be written")
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with file:
            runs, rows = _record_runs(options, file)
        size = part.stat().st_size
        part.replace(options.out)
    except RunFailed as failed:
        return _fail(f"{failed}; nothing was recorded: `bandmaster stress` finds and shrinks this", DIFFERENT)
    except OSError as error:
        return _fail(f"--out {options.out}: {error.strerror}; nothing was recorded")
    except (KeyboardInterrupt, _Ended) as ended:
        return _fail("interrupted; nothing was recorded", 143 if isinstance(ended, _Ended) else 130)
    finally:
        signal.signal(signal.SIGTERM, before)
        part.unlink(missing_ok=True)
    if options.json:
        sys.stdout.write(json.dumps({"file": str(options.out), "runs": runs, "rows": rows, "bytes": size}) + "\n")
    else:
        sys.stdout.write(f"{runs} runs, {rows:,d} rows, {size:,d} bytes in {options.out}\n")
    return EQUAL


def _record_runs(options: argparse.Namespace, file: BinaryIO) -> tuple[int, int]:
    """All runs and the end row; their numbers."""
    runs = list(product(options.shapes, options.page_sizes, options.seeds))
    rows = 0

    def put(row: Row) -> None:
        nonlocal rows
        rows += 1
        file.write(encode(row))

    with _bar() as bar:
        for shape, page_size, seed in bar.track(runs, description="recording"):
            try:
                record(shape, page_size, seed, options.ops, put)
            except Exception as error:
                where = f"shape {shape}, page size {page_size}, seed {seed}"
                raise RunFailed(f"{where}: {type(error).__name__}: {error}") from error
    put(End(len(runs), rows))
    return len(runs), rows


def _compare(options: argparse.Namespace) -> int:
    runs, steps, rows = 0, 0, 0
    found: list[Divergence] = []
    replay: RunReplay | None = None
    try:
        with _bar() as bar:
            for line, row in bar.track(read(options.file), description="comparing"):
                rows += 1
                if isinstance(row, Run):
                    steps += replay.steps if replay is not None else 0
                    replay = RunReplay(row)
                    runs += 1
                elif replay is not None:
                    divergence = replay.feed(line, row)
                    if divergence is not None:
                        found.append(divergence)
                        steps += replay.steps
                        replay = None  # what follows in this run may differ because of it
    except OSError as error:
        return _fail(f"{options.file}: {error.strerror}; give a file that `bandmaster trace record` wrote")
    except BadTrace as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail(f"interrupted after {runs} runs and {rows:,d} rows; {len(found)} runs differ so far", 130)
    steps += replay.steps if replay is not None else 0
    report = {"runs": runs, "steps": steps, "rows": rows, "divergences": [asdict(each) for each in found]}
    if options.json:
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        _print(report)
    return DIFFERENT if found else EQUAL


class RunFailed(Exception):
    """A program found a fault while it was recorded."""


class _Ended(BaseException):
    """SIGTERM."""


def _end(number: int, frame: object) -> None:
    raise _Ended


def _bar() -> Progress:
    """A bar where there is a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _fail(text: str, code: int = USAGE) -> int:
    sys.stderr.write(f"bandmaster trace: {text}\n")
    return code


def _print(report: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for each in report["divergences"]:
        where = f"{each['where']}{', band ' + each['band'] if each['band'] else ''}"
        console.print(f"{each['run']}: step {each['step']} (line {each['line']}), {where}", style="red", markup=False)
        for title, lines in (
            ("op", [each["op"]]),
            ("state before", each["state_before"]),
            ("recorded", each["recorded"]),
            ("present", each["present"]),
            ("recorded state after", each["recorded_state"]),
            ("present state after", each["present_state"]),
        ):
            for line in lines:
                console.print(f"  {title}: {line}", markup=False)
    console.print(
        f"{len(report['divergences'])} of {report['runs']} runs differ; {report['steps']:,d} steps and "
        f"{report['rows']:,d} rows were compared"
    )


if __name__ == "__main__":
    sys.exit(main())
