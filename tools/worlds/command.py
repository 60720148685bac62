"""`bandmaster worlds`: random workloads on tiny simulated worlds, judged by every check; and the faults they must find.

Owns the command line, what it prints and the files of failing cases. Exit codes: 0 clean (or every canary found within
its seeds); 1 not; 2 usage, a file that is no world, or a directory that cannot be written; 3 a process of the command
was lost; 130 interrupted, with what was seen so far. Needs no model and no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tools import result_files
from tools.pagesafety.workers import WorkerLost, over_processes
from tools.result_files import probe_folder
from tools.tables import print_table
from tools.worlds.canaries import CANARIES, applied
from tools.worlds.cases import BadCase, Case, draw, load, save
from tools.worlds.run import Failure, Player, Ran, run
from tools.worlds.shrink import shrink
from tools.worlds.story import told

CLEAN, FOUND, USAGE, LOST, INTERRUPTED = 0, 1, 2, 3, 130
HUNT_SEEDS = 200  # cases in which a canary must be found, counting those in which it can show
JOBS_MAX = 256


class Done(NamedTuple):
    """A seed's run."""

    seed: int
    world: str
    ran: Ran


class Hunted(NamedTuple):
    """The hunt for one canary: the case that found it (None: none did), after how many, and what else failed."""

    canary: str
    seed: int | None
    cases: int
    failure: Failure | None
    others: dict[str, int]


def run_seed(seed: int) -> Done:
    """Run the case of a seed."""
    case = draw(seed)
    stages = "1 stage" if case.stages == 1 else f"{case.stages} stages"
    return Done(seed, f"{case.family}, {stages}, page {case.config.page_size}", run(case))


def hunt(name: str) -> Hunted:
    """Run cases with a deliberate fault until its check fails one."""
    canary, others, cases = CANARIES[name], Counter[str](), 0
    seed = -1
    with applied(name):
        while cases < HUNT_SEEDS:
            seed += 1
            case = draw(seed)
            if not canary.shows(case):
                continue
            cases += 1
            failure = run(case).failure
            if failure is not None and failure.check == canary.check:
                return Hunted(name, seed, cases, failure, dict(others))
            if failure is not None:
                others[failure.check] += 1
    return Hunted(name, None, cases, None, dict(others))


def shrunk(seed: int, canary: str | None = None) -> tuple[Case, Failure]:
    """The smallest case found that fails as the case of this seed does."""
    with applied(canary):
        case = draw(seed)
        failure = run(case).failure
        assert failure is not None, "only what fails is made smaller"
        small = shrink(case, failure.check, lambda one: getattr(run(one).failure, "check", None))
        again = run(small).failure
        assert again is not None, "what was made smaller still fails"
        return small, again


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; exits with 2 where they make no sense."""
    parser = argparse.ArgumentParser(prog="bandmaster worlds", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--seeds", default="0:100", metavar="A:B", help="seeds A to B-1 (default: 0:100)")
    add("--jobs", type=int, default=1, metavar="J", help="processes (default: 1)")
    add("--failures-max", type=int, default=20, metavar="N", help="stop after so many worlds that fail (default: 20)")
    add("--minimize", action="store_true", help="make one failing world of each check small, and tell its story")
    add("--out", type=Path, metavar="DIR", help="write failing worlds, one file each")
    add("--replay", type=Path, metavar="FILE", help="run one saved world and tell its story")
    add(
        "--canaries",
        nargs="?",
        const="all",
        metavar="NAMES",
        help="hunt the deliberate faults, all or those named with commas between, one after the other",
    )
    add("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(_joined(argv, "--seeds"))
    first, colon, end = options.seeds.partition(":")
    if not (colon and all(text.isascii() and text.isdigit() and len(text) < 10 for text in (first, end))):
        parser.error(f"--seeds {options.seeds}: give A:B, whole numbers from 0, for example 0:100")
    options.seeds = range(int(first), int(end))
    if not options.seeds:
        parser.error(f"--seeds {first}:{end}: there is no seed in it; A must be below B")
    if not 1 <= options.jobs <= JOBS_MAX:
        parser.error(f"--jobs {options.jobs}: it must be at least 1 and at most {JOBS_MAX}")
    if options.failures_max < 1:
        parser.error(f"--failures-max {options.failures_max}: it must be at least 1")
    if options.canaries is not None:
        names = options.canaries.split(",")
        if unknown := [name for name in names if name != "all" and name not in CANARIES]:
            parser.error(f"--canaries {', '.join(unknown)}: unknown; they are all, {', '.join(CANARIES)}")
        options.canaries = list(CANARIES) if "all" in names else names
    return options


def _joined(argv: Sequence[str], flag: str) -> list[str]:
    """A flag and its value in one word, so that `-5:1` is a wrong value and no unknown flag."""
    words = list(argv)
    if flag in words[:-1]:
        at = words.index(flag)
        words[at : at + 2] = [f"{flag}={words[at + 1]}"]
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    options = parse(sys.argv[1:] if argv is None else list(argv))
    try:
        if options.out is not None and not _probed(options.out):
            return USAGE
        if options.replay is not None:
            return _replay(options.replay)
        if options.out is not None and not _writable(options.out):
            return USAGE
        return _hunts(options) if options.canaries is not None else _sweep(options)
    except WorkerLost as error:
        sys.stderr.write(f"bandmaster worlds: {error}, at work on {error.task}\n")
        return LOST
    except KeyboardInterrupt:
        return INTERRUPTED


def _writable(directory: Path) -> bool:
    """Whether files can be written there; says why not."""
    try:
        probe_folder(directory)
    except OSError as error:
        sys.stderr.write(f"bandmaster worlds: --out {directory}: {error}\n")
        return False
    return True


def _probed(directory: Path) -> bool:
    """Whether worlds can be written there, before a hunt of hours; says why not."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        result_files.probe(directory / "world.json")
    except OSError as error:
        sys.stderr.write(f"bandmaster worlds: --out {directory}: {error.strerror}; name a directory to write to\n")
        return False
    return True


def _each(work: Callable[[Any], Any], tasks: Sequence[Any], jobs: int, what: str, hear: Callable[[Any], bool]) -> bool:
    """Do all tasks, answers as they come, until `hear` has enough; False when the user had enough before."""
    console = Console(stderr=True)
    answers = over_processes(work, tasks, jobs)
    shown = track(answers, what, len(tasks), console=console, transient=True, disable=not console.is_terminal)
    try:
        for _, answer in shown:
            if not hear(answer):
                break
    except KeyboardInterrupt:
        return False
    finally:
        answers.close()
    return True


def _sweep(options: argparse.Namespace) -> int:
    began, done, failed = time.monotonic(), list[Done](), list[Done]()

    def hear(one: Done) -> bool:
        done.append(one)
        if one.ran.failure is not None:
            failed.append(one)
            sys.stderr.write(f"seed {one.seed} ({one.world}): {_failure_text(one.ran.failure)}\n")
        return len(failed) < options.failures_max

    whole = _each(run_seed, options.seeds, options.jobs, "worlds", hear)
    happened = sum((one.ran.happened for one in done), Counter[str]())
    failed.sort(key=lambda one: one.seed)
    found = {
        "worlds": len(done),
        "failed": len(failed),
        "seconds": round(time.monotonic() - began, 1),
        "happened": dict(sorted(happened.items())),
        "kinds": dict(sorted(Counter(one.world for one in done).items())),
        "failures": [
            {"seed": one.seed, "check": one.ran.failure.check, "why": one.ran.failure.text, "at": one.ran.failure.at}
            for one in failed
            if one.ran.failure is not None
        ],
        "whole": whole,
    }
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        _show(happened, found)
    if not whole:
        sys.stderr.write(f"bandmaster worlds: ended after {len(done)} of {len(options.seeds)} worlds\n")
        return INTERRUPTED
    _keep(failed, options)
    return FOUND if failed else CLEAN


def _failure_text(failure: Failure) -> str:
    return f"check {failure.check} fails at action {failure.at}: {failure.text}"


def _show(happened: Counter[str], found: dict[str, Any]) -> None:
    table = Table("what happened", "times", title=f"{found['worlds']} worlds, {found['seconds']} s")
    for name, times in sorted(happened.items()):
        table.add_row(name, f"{times:,d}")
    console = Console()
    print_table(console, table)
    console.print(f"{found['failed']} of {found['worlds']} worlds failed")


def _keep(failed: Sequence[Done], options: argparse.Namespace) -> None:
    """Write failing worlds; make one of each check small where that was asked for."""
    small: set[str] = set()
    for one in failed:
        failure = one.ran.failure
        assert failure is not None, "only failing worlds are kept"
        case = draw(one.seed)
        if options.minimize and failure.check not in small:
            small.add(failure.check)
            case, failure = shrunk(one.seed)
            sys.stderr.write(f"\nseed {one.seed}, {len(case.actions)} actions: {_failure_text(failure)}\n")
            sys.stderr.write("\n".join(_story(case)) + "\n")
        if options.out is not None:
            path = options.out / f"{failure.check}-{one.seed}.json"
            save(path, case)
            sys.stderr.write(f"run it again: bandmaster worlds --replay {path}\n")


def _hunts(options: argparse.Namespace) -> int:
    hunted: list[Hunted] = []

    def hear(one: Hunted) -> bool:
        hunted.append(one)
        return True

    if not _each(hunt, options.canaries, options.jobs, "canaries", hear):
        return INTERRUPTED
    missed = [one.canary for one in hunted if one.seed is None]
    if options.json:
        rows = [one._asdict() | {"failure": one.failure and one.failure.text} for one in hunted]
        sys.stdout.write(json.dumps({"rows": rows, "missed": missed}) + "\n")
        return FOUND if missed else CLEAN
    table = Table("deliberate fault", "found by", "in seed", "cases until then", "that failed otherwise")
    for one in sorted(hunted):
        check = CANARIES[one.canary].check if one.seed is not None else "nothing"
        seed = "" if one.seed is None else str(one.seed)
        table.add_row(one.canary.replace("_", " "), check, seed, str(one.cases), str(sum(one.others.values())))
    console = Console()
    print_table(console, table)
    console.print(f"{len(hunted) - len(missed)} of {len(hunted)} deliberate faults were found")
    if options.minimize:
        for one in hunted:
            if one.seed is not None:
                case, failure = shrunk(one.seed, one.canary)
                console.print(f"\n{one.canary}: {len(case.actions)} actions, {_failure_text(failure)}", markup=False)
    return FOUND if missed else CLEAN


def _story(case: Case) -> list[str]:
    """What a case does, input by input."""
    lines = [f"{case.family}, {case.pages} pages of {case.config.page_size} tokens"]
    try:
        player = Player(case)
        player.world.watchers.insert(0, lambda world, item, out: lines.extend(told(world, item, out)))
        for name, number in case.actions:
            lines.append(f"> {name} {number}")
            player.act(name, number)
        lines.append("> rest")
        player.rest()
    except Exception as error:
        lines.append(f"! {type(error).__name__}: {error}")
    return lines


def _replay(path: Path) -> int:
    try:
        case = load(path)
    except BadCase as error:
        sys.stderr.write(f"bandmaster worlds: {path} is no world: {error}\n")
        return USAGE
    sys.stdout.write("\n".join(_story(case)) + "\n")
    failure = run(case).failure
    sys.stdout.write(f"{_failure_text(failure) if failure else 'every check holds'}\n")
    return FOUND if failure else CLEAN


if __name__ == "__main__":
    sys.exit(main())
