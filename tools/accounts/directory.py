"""Directories: the account of a real run, by its journal, its log and, while the daemon lives, its metrics.

Owns where these three are and in which order they are read: scrapes first, then the journal, which has every record
that a scrape names, then the log, whose lines may come a moment later. Must never write into a run directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import trio

from daemon.run_dir import RunDir
from daemon.snapshots import restore_core
from ipc.client import DaemonClient
from ipc.errors import DaemonLost
from journal.reader import Walk
from journal.segment import segment_behind
from journal.storage import DiskStorage
from tools.accounts.check import Checker, Result
from tools.accounts.log_side import LogLines
from tools.accounts.metrics_side import NoScrape, Scrape, read_scrape
from tools.beginnings import start_of
from tools.ends import Refused
from tools.journal_files import ReadingProgress, open_directory, refuse_foreign
from tools.own_server import http_get

CONNECT_WITHIN_S = 5.0
LINES_WITHIN_S = 1.0  # a line is written a moment after what it is about
OK = 200


class NoMetrics(Refused):
    """Nobody answered with metrics; the message says why."""


def check_directory(
    directory: str, log_file: str = "", scrapes: list[Scrape] | None = None, alive: bool = False
) -> Result:
    """Hold everything against each other. `alive`: the newest life goes on, its last lines may not be there yet.

    Raises NoJournal, Foreign, JournalError and OSError.
    """
    storage = open_directory(directory)
    result = _checked(storage, _log_of(storage, log_file), scrapes or [], alive)
    if alive and any(one.between == "log" for one in result.findings.kept):
        time.sleep(LINES_WITHIN_S)
        result = _checked(storage, _log_of(storage, log_file), scrapes or [], alive)
    return result


def _log_of(storage: DiskStorage, log_file: str) -> Path | None:
    """The daemon's log: the named one, else the one of the run directory around the journal."""
    if log_file:
        return Path(log_file)
    found = storage.directory.parent / "logs" / "daemon.log"
    return found if storage.directory.name == "journal" and found.exists() else None


def _checked(storage: DiskStorage, log: Path | None, scrapes: list[Scrape], alive: bool) -> Result:
    lines = LogLines(lambda: _lines_of(log)) if log is not None else None
    checker = Checker(lines, scrapes, alive)
    first = _begin(storage, checker)
    walk = Walk(storage, first=segment_behind(storage, first) if first else 0)
    with ReadingProgress(storage, "counting") as seen:
        records = (record for record in walk.records() if record.sequence > first)
        result = checker.run(records, seen)
    refuse_foreign(walk)
    if lines is None:
        result.findings.note("there is no log: RUN_DIR/logs/daemon.log, or name one with --log")
    elif not lines.lives:
        result.findings.note(f"{log} has no life's beginning: written below level info, or by an older version")
    for cut in walk.cuts():
        result.findings.note(cut.text())
    return result


def _lines_of(log: Path) -> Iterator[bytes]:
    with log.open("rb") as file:
        yield from file


def _begin(storage: DiskStorage, checker: Checker) -> int:
    """Where the journal's beginning was trimmed: go on from the oldest snapshot; the record that it covers, else 0."""
    start, notes = start_of(storage, what="counting")
    if start is None:
        return 0
    header, body = start
    checker.begin_at(header.sequence, header.life, restore_core(body.core).state)
    for note in notes:
        checker.findings.note(note)
    return header.sequence


# --- metrics of a daemon that lives


def alive(directory: str) -> bool:
    """Whether a daemon owns the run directory now."""
    return bool(RunDir(Path(directory)).owner())


def scrape_url(url: str) -> Scrape:
    """One scrape of a front end's `/metrics`; raises NoMetrics."""
    address = url if url.endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    status, body = http_get(address)
    if not status:
        raise NoMetrics(f"nobody answers at {address}: {body}")
    if status != OK:
        raise NoMetrics(f"{address} answered {status}: {body[:200]}")
    try:
        return read_scrape(body)
    except NoScrape as error:
        raise NoMetrics(f"{address}: {error}") from error


def scrape_for(url: str, seconds: float, every_s: float, seen: Callable[[Scrape], None]) -> list[Scrape]:
    """Scrapes over so many seconds, at least one; raises NoMetrics where the first one fails."""
    until, scrapes = time.monotonic() + seconds, [scrape_url(url)]
    seen(scrapes[0])
    while time.monotonic() < until:
        time.sleep(every_s)
        try:
            scrapes.append(scrape_url(url))
        except NoMetrics:  # it is being started again, or has ended; what follows is another life's
            continue
        seen(scrapes[-1])
    return scrapes


def scrape_socket(directory: str) -> Scrape:
    """One scrape through the run directory's own socket; raises NoMetrics."""
    return trio.run(_ask, RunDir(Path(directory).absolute()).front_endpoint)


async def _ask(endpoint: str) -> Scrape:
    try:
        async with DaemonClient(endpoint, f"accounts-{os.getpid()}", watches=True, return_within_s=0.0) as client:
            await client.wait_connected(CONNECT_WITHIN_S)
            answer: Any = await client.ask("metrics")
    except (DaemonLost, trio.TooSlowError) as error:
        raise NoMetrics(f"{endpoint}: {error}") from error
    if not answer.ok:
        raise NoMetrics(f"{endpoint}: {answer.body}")
    try:
        return read_scrape(answer.body)
    except NoScrape as error:
        raise NoMetrics(f"{endpoint}: {error}") from error
