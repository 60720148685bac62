"""`bandmaster stress`: random programs on every rank's allocator, every byte checked; and the faults it must catch.

Owns the command line. Exit codes: 0 clean (or every mutant caught within its seeds), 1 not, 2 for arguments that make
no sense. Needs no model and no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tools.pagesafety import cases, report, sweep
from tools.pagesafety.mutants import MUTANTS
from tools.pagesafety.shapes import FIVE, SHAPES

Done = TypeVar("Done", sweep.RunDone, sweep.HuntDone)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; exits with 2 where they make no sense."""
    parser = argparse.ArgumentParser(prog="bandmaster stress", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0:20", metavar="A:B", help="seeds A to B-1 (default: 0:20)")
    parser.add_argument("--ops", type=int, default=400, help="operations of a program")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of every stage")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--device", choices=("modeled", "cuda"), default="modeled", help="cuda: the same on real streams of a GPU too"
    )
    parser.add_argument("--shapes", default=",".join(FIVE), help=f"'all', or some of {', '.join(SHAPES)}")
    parser.add_argument("--page-sizes", default="1,16,64", help="tokens of a page, comma-separated")
    parser.add_argument("--minimize", action="store_true", help="shrink every program that fails")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write failing cases (with --mutants: catching ones)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one saved case and print every step")
    parser.add_argument("--without-mutant", action="store_true", help="replay without the case's deliberate fault")
    parser.add_argument(
        "--mutants", nargs="?", const="all", metavar="NAMES", help="hunt the deliberate faults, or those named"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(argv)
    first, colon, end = options.seeds.partition(":")
    if not (colon and first.isdigit() and end.isdigit() and int(first) < int(end)):
        parser.error(f"--seeds {options.seeds}: give A:B with A below B")
    options.first, options.end = int(first), int(end)
    options.shapes = list(SHAPES) if options.shapes == "all" else options.shapes.split(",")
    if unknown := [shape for shape in options.shapes if shape not in SHAPES]:
        parser.error(f"--shapes {unknown[0]}: the shapes are {', '.join(SHAPES)}")
    sizes = options.page_sizes.split(",")
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        parser.error(f"--page-sizes {options.page_sizes}: give positive numbers of tokens")
    options.page_sizes = [int(size) for size in sizes]
    if min(options.ops, options.ranks, options.jobs) < 1 or options.ranks > 8:
        parser.error("--ops and --jobs are at least 1, --ranks is 1 to 8")
    if options.device == "cuda":
        _require_gpu(parser, options)
    if options.mutants is not None:
        options.mutants = list(MUTANTS) if options.mutants == "all" else options.mutants.split(",")
        if unknown := [name for name in options.mutants if name not in MUTANTS]:
            parser.error(f"--mutants {unknown[0]}: the mutants are {', '.join(MUTANTS)}")
    return options


def _require_gpu(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    import torch  # not needed, and slow to load, for modeled devices

    if not torch.cuda.is_available():
        parser.error("--device cuda: this torch finds no CUDA GPU")
    if options.jobs > 1 or options.mutants is not None:
        parser.error("--device cuda runs in one process, and hunts no mutants")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    options = parse(sys.argv[1:] if argv is None else list(argv))
    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else 200)
    if options.replay is not None:
        return _replay(console, options)
    if options.mutants is not None:
        return _hunt(console, options)
    return _sweep(console, options)


def _replay(console: Console, options: argparse.Namespace) -> int:
    try:
        saved = cases.load(options.replay)
    except (OSError, msgspec.DecodeError) as error:
        sys.stderr.write(f"bandmaster stress: {options.replay} is no case: {error}\n")
        return 2
    fault = report.replay(console, saved, not options.without_mutant)
    if options.json:
        print(json.dumps({"fault": fault._asdict() if fault else None}))
    return int(fault is not None)


def _sweep(console: Console, options: argparse.Namespace) -> int:
    specs = [
        sweep.RunSpec(shape, page_size, seed, options.ops, options.ranks, options.minimize, options.device)
        for shape in options.shapes
        for page_size in options.page_sizes
        for seed in range(options.first, options.end)
    ]
    began = time.perf_counter()
    done = list(_watched(console, "programs", len(specs), sweep.over_processes(sweep.run_one, specs, options.jobs)))
    elapsed = time.perf_counter() - began
    failed = [run.found for run in done if run.found is not None]
    rows = report.sweep_rows(done, options.ops)
    files = _save(options.out, [(_name(found), found) for found in failed])
    if options.json:
        faults = [found.fault._asdict() | {"file": str(file)} for found, file in zip(failed, files, strict=True)]
        print(json.dumps({"rows": rows, "faults": faults, "seconds": round(elapsed, 1)}))
        return int(bool(failed))
    columns = ("shape", "page size", "runs", "ops", *report.COLUMNS, "faults", "seconds")
    report.print_rows(console, f"{len(done)} programs in {elapsed:.1f} s", rows, columns)
    for found, file in zip(failed, files, strict=True):
        where = f"{found.case.shape}, page size {found.case.page_size}, seed {found.case.seed}"
        console.print(f"{where}: {found.fault.check}: {found.fault.text} {file or ''}", highlight=False, soft_wrap=True)
    return int(bool(failed))


def _hunt(console: Console, options: argparse.Namespace) -> int:
    specs = [
        sweep.HuntSpec(name, MUTANTS[name].seeds, options.ops, options.ranks, options.minimize)
        for name in options.mutants
    ]
    began = time.perf_counter()
    done = list(_watched(console, "mutants", len(specs), sweep.over_processes(sweep.hunt_one, specs, options.jobs, 1)))
    rows = report.hunt_rows(done)
    _save(options.out, [(hunt.spec.mutant, hunt.found) for hunt in done if hunt.found is not None])
    missed = sum(hunt.found is None for hunt in done)
    if options.json:
        print(json.dumps({"rows": rows, "missed": missed, "seconds": round(time.perf_counter() - began, 1)}))
        return int(bool(missed))
    title = f"{len(done) - missed} of {len(done)} mutants caught in {time.perf_counter() - began:.1f} s"
    report.print_rows(console, title, rows, list(rows[0]))
    return int(bool(missed))


def _watched(console: Console, what: str, total: int, done: Iterator[Done]) -> Iterator[Done]:
    """A progress bar beside the work, where someone watches."""
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[faults]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total, faults="")
        found = 0
        for one in done:
            found += one.found is not None
            progress.update(task, advance=1, faults=f"{found} failed" if what == "programs" else f"{found} caught")
            yield one


def _name(found: cases.Found) -> str:
    case = found.case
    return f"{found.fault.check}_{case.shape}_{case.page_size}_{case.seed}"


def _save(directory: Path | None, found: list[tuple[str, cases.Found]]) -> list[Path | None]:
    if directory is None:
        return [None] * len(found)
    for name, one in found:
        cases.save(directory / f"{name}.json", one)
    return [directory / f"{name}.json" for name, _ in found]


if __name__ == "__main__":
    sys.exit(main())
