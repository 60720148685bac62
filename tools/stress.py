"""`bandmaster stress`: random programs on every rank's allocator, every byte checked; and the faults it must catch.

Owns the command line. Exit codes: 0 clean (or every mutant caught within its seeds); 1 not; 2 usage; 3 a process of the
command was lost; 130, 143: ended by a signal, with what was seen so far. Needs no model and no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tools.pagesafety import cases, report, sweep
from tools.pagesafety.mutants import MUTANTS
from tools.pagesafety.shapes import FIVE, SHAPES
from tools.pagesafety.workers import WorkerLost, over_processes
from tools.result_files import probe_folder

CLEAN, FOUND, USAGE, LOST = 0, 1, 2, 3
RANGES = {"ops": (1, 1_000_000), "ranks": (1, cases.RANKS_MAX), "jobs": (1, 256), "failures_max": (1, 10_000)}
SWEEP_ONLY = ("seeds", "shapes", "page_sizes", "failures_max")


class _Ended(BaseException):
    """SIGTERM."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; exits with 2 where they make no sense."""
    parser = argparse.ArgumentParser(prog="bandmaster stress", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--seeds", metavar="A:B", help="seeds A to B-1 (default: 0:20)")
    add("--ops", type=int, default=400, metavar="N", help="operations of a program (default: 400)")
    add("--ranks", type=int, default=2, metavar="R", help="ranks of every stage (default: 2)")
    add("--jobs", type=int, default=1, metavar="J", help="processes (default: 1)")
    add(
        "--device",
        choices=("modeled", "cuda"),
        default="modeled",
        help="cuda: on a GPU's streams too (default: modeled)",
    )
    add("--shapes", metavar="NAMES", help=f"all, or some of {', '.join(SHAPES)} (default: {','.join(FIVE)})")
    add("--page-sizes", metavar="SIZES", help="tokens of a page, comma-separated (default: 1,16,64)")
    add("--failures-max", type=int, metavar="N", help="stop after so many programs that fail (default: 20)")
    add(
        "--minimize",
        action="store_true",
        help="shrink one failing program of each check and shape; with --mutants, all",
    )
    add("--out", type=Path, metavar="DIR", help="write cases that fail (with --mutants: that catch), one file each")
    add("--replay", type=Path, metavar="FILE", help="run one saved case and print every step")
    add("--without-mutant", action="store_true", help="with --replay: without the case's deliberate fault")
    add(
        "--mutants", nargs="?", const="all", metavar="NAMES", help="hunt the deliberate faults, or those named, each on"
    )
    add("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(argv)
    if options.mutants is not None:
        for name in SWEEP_ONLY:
            if getattr(options, name) is not None:
                parser.error(
                    f"--{name.replace('_', '-')} does not go with --mutants: each has its own seeds and shapes"
                )
        options.mutants = _names(parser, "--mutants", options.mutants, MUTANTS)
    if options.without_mutant and options.replay is None:
        parser.error("--without-mutant goes with --replay only")
    _sweep_options(parser, options)
    for name, (least, most) in RANGES.items():
        if not least <= getattr(options, name) <= most:
            value = getattr(options, name)
            parser.error(f"--{name.replace('_', '-')} {value}: it must be at least {least} and at most {most}")
    if options.device == "cuda":
        _require_gpu(parser, options)
    return options


def _sweep_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.seeds = options.seeds if options.seeds is not None else "0:20"
    options.failures_max = 20 if options.failures_max is None else options.failures_max
    first, colon, end = options.seeds.partition(":")
    digits = all(text.isascii() and text.isdigit() and len(text) < 10 for text in (first, end))
    if not (colon and digits and int(first) < int(end)):
        parser.error(f"--seeds {options.seeds}: give A:B, whole numbers from 0, A below B, for example 0:20")
    options.first, options.end = int(first), int(end)
    options.shapes = _names(parser, "--shapes", options.shapes or ",".join(FIVE), SHAPES)
    sizes = (options.page_sizes if options.page_sizes is not None else "1,16,64").split(",")
    if not all(size.isascii() and size.isdigit() and 1 <= int(size) <= 4096 for size in sizes):
        parser.error(f"--page-sizes {options.page_sizes}: give numbers of tokens from 1 to 4096, comma-separated")
    options.page_sizes = [int(size) for size in sizes]


def _names(parser: argparse.ArgumentParser, option: str, text: str, known: dict[str, Any]) -> list[str]:
    """The names of a comma-separated list, `all` for every one."""
    names = text.split(",")
    if unknown := [name for name in names if name != "all" and name not in known]:
        parser.error(f"{option} {', '.join(unknown)}: unknown; they are all, {', '.join(known)}")
    return list(known) if "all" in names else names


def _require_gpu(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    import torch  # not needed, and slow to load, for modeled devices

    if not torch.cuda.is_available():
        parser.error("--device cuda: this torch finds no CUDA GPU")
    if options.jobs > 1 or options.mutants is not None:
        parser.error("--device cuda runs in one process (--jobs 1), and hunts no mutants")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    options = parse(sys.argv[1:] if argv is None else list(argv))
    try:
        if options.replay is not None:
            return _replay(options)
        if options.out is not None and not _probed(options.out):
            return USAGE
        return (_Hunt if options.mutants is not None else _Sweep)(options).run()
    except BrokenPipeError:  # whoever read has enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return FOUND


def _probed(directory: Path) -> bool:
    """Whether cases can be written there; says why not."""
    try:
        probe_folder(directory)
    except OSError as error:
        _say(f"--out {directory}: {error}")
        return False
    return True


def _say(text: str) -> None:
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"bandmaster stress: {text}\n")


def _replay(options: argparse.Namespace) -> int:
    try:
        saved = cases.load(options.replay)
    except cases.BadCase as error:
        _say(f"{options.replay} is no case: {error}")
        return USAGE
    lines: list[str] = []
    fault = report.replay(lines.append if options.json else print, saved, not options.without_mutant)
    if options.json:
        print(json.dumps({"fault": fault._asdict() if fault else None, "lines": lines}))
    return FOUND if fault else CLEAN


# --- running -------------------------------------------------------------------------------------------------------


def _run(
    options: argparse.Namespace,
    what: str,
    tasks: Sequence[Any],
    work: Callable[[Any], Any],
    hear: Callable[[int, Any], bool],
) -> int:
    """Does tasks; `hear` gets number and answer of each, and says whether to go on. CLEAN, LOST, 130 or 143."""
    before = signal.signal(signal.SIGTERM, _end)
    answers = over_processes(work, tasks, options.jobs)
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(what, total=len(tasks))
            for number, answer in answers:
                progress.update(task, advance=1)
                if not hear(number, answer):
                    break
    except WorkerLost as error:
        _say(f"{error}, at work on {error.task}")
        return LOST
    except KeyboardInterrupt:
        return 130
    except _Ended:
        return 143
    finally:
        answers.close()
        signal.signal(signal.SIGTERM, before)
    return CLEAN


def _end(number: int, frame: object) -> None:
    raise _Ended


class _Sweep:
    """Programs of every seed, shape and page size."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.specs = [
            sweep.RunSpec(shape, page_size, seed, options.ops, options.ranks, options.device)
            for shape in options.shapes
            for page_size in options.page_sizes
            for seed in range(options.first, options.end)
        ]
        self.done: dict[int, sweep.RunDone] = {}
        self.failed: dict[int, cases.Found] = {}
        self.files: dict[int, Path | None] = {}

    def run(self) -> int:
        """Runs, shrinks where that was asked for, prints; the exit code."""
        options, began = self.options, time.perf_counter()
        code = _run(options, "programs", self.specs, sweep.run_one, self._hear)
        if code != CLEAN:
            _say(f"ended after {len(self.done)} of {len(self.specs)} programs, {len(self.failed)} failed")
        elif options.minimize and self.failed:
            code = self._shrink()
        rows = report.sweep_rows([self.done[number] for number in sorted(self.done)], options.ops)
        seconds = round(time.perf_counter() - began, 1)
        if options.json:
            faults = [self._fault(number) for number in sorted(self.failed)]
            print(json.dumps({"rows": rows, "faults": faults, "seconds": seconds, "ended": code}))
        else:
            print(report.sweep_text(rows, shutil.get_terminal_size().columns))
            print(f"{len(self.done)} programs in {seconds} s, {len(self.failed)} failed")
        return code or (FOUND if self.failed else CLEAN)

    def _hear(self, number: int, one: sweep.RunDone) -> bool:
        self.done[number] = one
        if one.found is not None:
            self._keep(number, one.found, "")
        if len(self.failed) < self.options.failures_max:
            return True
        _say(f"--failures-max {self.options.failures_max}: stopped after {len(self.done)} programs")
        return False

    def _keep(self, number: int, found: cases.Found, note: str) -> None:
        self.failed[number] = found
        case = found.case
        name = f"{found.fault.check}_{case.shape}_{case.page_size}_{case.seed}"
        self.files[number] = _saved(self.options.out, name, found)
        text = report.found_text(found, self.files[number]) + note
        print(text, file=sys.stderr if self.options.json else sys.stdout)

    def _shrink(self) -> int:
        """One failing program of each check and shape."""
        first: dict[tuple[str, str], int] = {}
        for number, found in sorted(self.failed.items()):
            first.setdefault((found.fault.check, found.case.shape), number)
        numbers = list(first.values())

        def hear(place: int, small: cases.Found) -> bool:
            self._keep(numbers[place], small, f", shrunk to {len(small.case.program)} operations")
            return True

        return _run(self.options, "shrinking", [self.done[n] for n in numbers], sweep.shrink_one, hear)

    def _fault(self, number: int) -> dict[str, Any]:
        found, spec, file = self.failed[number], self.specs[number], self.files[number]
        where = {"shape": spec.shape, "page_size": spec.page_size, "seed": spec.seed}
        return (
            where | found.fault._asdict() | {"operations": len(found.case.program), "file": str(file) if file else None}
        )


class _Hunt:
    """Deliberate faults, each on its own seeds and shapes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.specs = [
            sweep.HuntSpec(name, MUTANTS[name].seeds, options.ops, options.ranks, options.minimize)
            for name in options.mutants
        ]
        self.done: dict[int, sweep.HuntDone] = {}

    def run(self) -> int:
        """Hunts, prints; the exit code."""
        options, began = self.options, time.perf_counter()
        code = _run(options, "mutants", self.specs, sweep.hunt_one, self._hear)
        if code != CLEAN:
            _say(f"ended after {len(self.done)} of {len(self.specs)} mutants")
        rows = report.hunt_rows([self.done[number] for number in sorted(self.done)])
        missed = sum(row["caught by"] is None for row in rows)
        seconds = round(time.perf_counter() - began, 1)
        if options.json:
            print(json.dumps({"rows": rows, "missed": missed, "seconds": seconds, "ended": code}))
        else:
            print(report.hunt_text(rows, shutil.get_terminal_size().columns))
            print(f"{len(rows) - missed} of {len(rows)} mutants caught in {seconds} s")
        return code or (FOUND if missed else CLEAN)

    def _hear(self, number: int, one: sweep.HuntDone) -> bool:
        self.done[number] = one
        if one.found is not None:
            _saved(self.options.out, one.spec.mutant, one.found)
        return True


def _saved(directory: Path | None, name: str, found: cases.Found) -> Path | None:
    """Where a case was written; None where nobody asked, or it could not be."""
    if directory is None:
        return None
    path = directory / f"{name}.json"
    try:
        cases.save(path, found)
    except OSError as error:
        _say(f"{path} was not written: {error}")
        return None
    return path


if __name__ == "__main__":
    sys.exit(main())
