"""`bandmaster accounts`: what became of all requests, by journal, log and metrics; they must count the same.

    bandmaster accounts RUN_DIR [--url URL] [--for SECONDS] [--log FILE] [--json]    a real run, alive or not
    bandmaster accounts --simulate 36000 [--seed N] [--keep DIR] [--json]            the daemon in a simulated world
    bandmaster accounts --plants [--only NAME] [--json]                              faults that must be found

Owns the command line. Must never write into a run directory. Exit codes: `tools.ends`.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools.accounts.check import Result
from tools.accounts.directory import alive, check_directory, scrape_for, scrape_socket
from tools.accounts.metrics_side import Scrape
from tools.accounts.show import as_json, show
from tools.ends import DONE, NO, Refused, ended
from tools.journal_files import open_directory
from tools.output import because, tell
from tools.reading_flags import add_json, reading_parser
from tools.tables import print_table

EVERY_S = 0.5
LONGEST_S = 86_400  # of --for
MOST_SIMULATED = 10_000_000
LEAST_SIMULATED = 400  # a life that ends by what requests cause would wait for them for ever


class BadUsage(Refused):
    """What was asked for makes no sense; the message says why."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = reading_parser("accounts", (__doc__ or "").split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("directory", nargs="?", default="", metavar="RUN_DIR", help="a run directory, or a journal directory")
    add("--url", default="", metavar="URL", help="a front end of the daemon that runs there; its /metrics is scraped")
    text = "scrape for so long, twice a second, before all is compared; needs --url"
    add("--for", dest="seconds", type=float, metavar="SECONDS", help=text)
    add("--log", default="", metavar="FILE", help="the daemon's log, where it is not RUN_DIR/logs/daemon.log")
    text = (
        f"let so many requests, {LEAST_SIMULATED} or more, pass through the daemon in a simulated world, and check that"
    )
    add("--simulate", type=int, metavar="REQUESTS", help=text)
    add("--seed", type=int, default=1, metavar="N", help="of the simulated world [1]")
    add("--keep", default="", metavar="DIR", help="where the simulated run stays: a new directory")
    add("--plants", action="store_true", help="plant faults in small simulated worlds; each must be found")
    add("--only", default="", metavar="NAME", help="with --plants: only this one")
    add_json(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """`bandmaster accounts`."""
    options = build_parser().parse_args(argv)
    return ended("accounts", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    _check_usage(options)
    with _end_in_order():
        if options.plants:
            return _plants(options)
        return _simulate(options) if options.simulate is not None else _directory(options)


@contextmanager
def _end_in_order() -> Iterator[None]:
    """SIGTERM is Ctrl-C inside: what a world left in a temporary directory goes."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_usage(options: argparse.Namespace) -> None:
    asked = [bool(options.directory), options.simulate is not None, options.plants]
    if sum(asked) != 1:
        raise BadUsage("name one of RUN_DIR, --simulate REQUESTS and --plants")
    if (options.url or options.seconds is not None or options.log) and not options.directory:
        raise BadUsage("--url, --for and --log belong to a RUN_DIR")
    if options.url and not _is_address(options.url):
        raise BadUsage(f"--url {options.url}: write it like http://127.0.0.1:8000")
    if options.seconds is not None and not 0 < options.seconds <= LONGEST_S:
        raise BadUsage(
            f"--for {options.seconds:g}: so many seconds cannot be waited; more than 0, at most {LONGEST_S:,}"
        )
    if options.seconds is not None and not options.url:
        raise BadUsage("--for needs the --url of a front end")
    if options.keep and options.simulate is None:
        raise BadUsage("--keep belongs to --simulate")
    if options.keep and Path(options.keep).exists() and not Path(options.keep).is_dir():
        raise BadUsage(f"--keep {options.keep}: this is no directory; name a new one")
    if options.keep and Path(options.keep).exists() and any(Path(options.keep).iterdir()):
        raise BadUsage(f"--keep {options.keep}: there is something in it; name a new directory")
    if options.simulate is not None and options.simulate > MOST_SIMULATED:
        raise BadUsage(f"--simulate {options.simulate}: at most {MOST_SIMULATED:,} requests")
    if options.simulate is not None and options.simulate < LEAST_SIMULATED:
        least = f"at least {LEAST_SIMULATED} requests, so that each of its lives ends among some"
        raise BadUsage(f"--simulate {options.simulate}: {least}")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _directory(options: argparse.Namespace) -> int:
    scrapes: list[Scrape] = []
    open_directory(options.directory)  # before a daemon is looked for: what is no journal is refused as everywhere
    if options.log and not Path(options.log).is_file():
        raise BadUsage(f"--log {options.log}: there is no such file")
    living = alive(options.directory)
    if options.url:
        with _bar() as progress:
            seconds = options.seconds or 0.0
            task = progress.add_task("scraping", total=max(1, round(seconds / EVERY_S)))
            scrapes = scrape_for(options.url, seconds, EVERY_S, lambda _: progress.advance(task))
    elif living:
        scrapes = [scrape_socket(options.directory)]
    result = check_directory(options.directory, options.log, scrapes, living)
    if not scrapes:
        result.findings.note("no metrics: no daemon runs there, and no --url was named")
    return _tell(options, result, {})


def _simulate(options: argparse.Namespace) -> int:
    from tools.accounts.simulated import simulate  # the ranks' modules are not needed to read a directory

    with tempfile.TemporaryDirectory(prefix="bandmaster-accounts-") as temporary, _bar() as progress:
        directory = Path(options.keep or temporary) / "run"
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadUsage(f"--keep {options.keep} cannot be made: {because(error)}") from error
        task = progress.add_task("requests", total=options.simulate)
        run = simulate(
            directory, options.simulate, options.seed, progress=lambda sent: progress.update(task, completed=sent)
        )
    outcome = run.outcome
    world = {
        "requests": outcome.tally.sent,
        "seconds": round(outcome.seconds, 1),
        "lives": [f"{fate}: {code}" for fate, code in outcome.lives],
        "clients_were_told": dict(sorted(outcome.tally.told.items())),
    }
    return _tell(options, run.result, {"world": world})


def _plants(options: argparse.Namespace) -> int:
    from tools.accounts.plants import PLANTS, try_plant

    chosen = [planted for planted in PLANTS if options.only in ("", planted.name)]
    if not chosen:
        raise BadUsage(f"--only {options.only}: the plants are {', '.join(planted.name for planted in PLANTS)}")
    rows: list[dict[str, Any]] = []
    with _bar() as progress:
        for planted in progress.track(chosen, description="plants"):
            found = try_plant(planted, options.seed)
            one = found.expected
            first, where = (one.text, f"life {one.life}, record {one.sequence}") if one is not None else ("", "")
            rows.append(
                {"plant": planted.name, "what": planted.about, "found": found.found, "where": where, "first": first}
            )
    tell(
        options.json,
        lambda: {"plants": rows, "found": sum(row["found"] for row in rows)},
        lambda: _show_plants(rows),
    )
    return DONE if all(row["found"] for row in rows) else NO


def _show_plants(rows: list[dict[str, Any]]) -> None:
    table = Table(title="planted faults", title_justify="left")
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(("yes" if text else "NO") if isinstance(text, bool) else str(text) for text in row.values()))
    console = Console()
    print_table(console, table)
    console.print(f"{sum(row['found'] for row in rows)} of {len(rows)} found", highlight=False)


def _tell(options: argparse.Namespace, result: Result, more: dict[str, Any]) -> int:
    def shown() -> None:
        console = Console()
        for name, value in more.get("world", {}).items():
            console.print(f"{name.replace('_', ' ')}: {_plain(value)}", highlight=False, soft_wrap=True)
        show(console, result)

    tell(options.json, lambda: as_json(result) | more, shown)
    return DONE if result.agrees else NO


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count:,}" for name, count in value.items())
    return ", ".join(value) if isinstance(value, list) else f"{value:,}"


def _bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    raise SystemExit(main())
