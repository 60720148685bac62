"""view: an incident's memory and requests as one HTML file that opens without a network.

    bandmaster view DIR [-o FILE.html]                     all of a journal
    bandmaster view DIR --from SEQUENCE --to SEQUENCE      a part of it
    bandmaster view DIR --request N                        the life of one request, and what was beside it
    bandmaster view DIR --check-browser                    open it in a browser here and compare what it shows

Owns the command. Must never write into the journal's directory. Exit codes: `tools.ends`.
"""

from __future__ import annotations

import argparse
import io
import time
from pathlib import Path
from typing import Any, NamedTuple

from daemon.core.reasons import Verdict
from daemon.processes import collect_seldom
from journal.reader import Walk
from journal.records import Kind
from journal.segment import segment_behind
from journal.snapshots import snapshot_names
from journal.storage import DiskStorage
from tools.beginnings import start_of
from tools.ends import DONE, NO, Refused, ended
from tools.journal_files import BadPlace, ReadingProgress, open_directory, refuse_foreign, refuse_place
from tools.output import counted, tell, to_file
from tools.reading_flags import add_directory, add_json, number, reading_parser
from tools.view.browser import check_page
from tools.view.film import Film
from tools.view.page import write_page

MARGIN_RECORDS = 400  # shown before and behind the life of a request
BIG_BYTES = 64 << 20


class Missing(Refused):
    """The journal does not have what was asked for."""


class Range(NamedTuple):
    """Records that are shown: from `first`, 0: the start, to `last`, 0: the end."""

    first: int = 0
    last: int = 0


def follow(storage: DiskStorage, shown: Range) -> tuple[Film, list[str]]:
    """The film of a journal's records, and notes; raises Missing, Foreign and JournalError."""
    stood = bool(shown.first) and bool(snapshot_names(storage.names()))
    start, notes = start_of(storage, shown.first or None, stood)
    walk = Walk(storage, first=segment_behind(storage, start[0].sequence) if start else 0)
    film, behind = Film(max(shown.first, start[0].sequence + 1 if start else 0)), 0
    if start is not None:
        film.resumed(*start)
        behind = start[0].sequence
    sequence = 0
    collect_seldom()
    with ReadingProgress(storage, "reading") as seen:
        for record in walk.records():
            sequence = record.sequence
            if sequence <= behind:
                continue
            if shown.last and sequence > shown.last:
                break
            film.take(record)
            seen(record)
    refuse_foreign(walk)
    damage = [finding.text() for finding in walk.cuts()]
    if not film.records or film.last_sequence < shown.first:
        trimmed = f"what is older than record {behind + 1} cannot be shown: it was trimmed"
        why = trimmed if shown.last and sequence > shown.last else f"the journal ends at {sequence}"
        raise Missing(f"no record to show; {'; '.join(damage) or why}")
    film.end(damage)
    return film, [*notes, *damage]


def range_of(storage: DiskStorage, request: int) -> Range:
    """The records of a request's life, from its acceptance to its end, with some beside."""
    first = last = highest = 0
    for record in Walk(storage).records():
        if record.kind != Kind.DECIDED:
            continue
        said: Any = record.decode()
        if said.verdict == Verdict.ACCEPTED:
            highest = max(highest, said.request + said.numbers.get("n", 1) - 1)
        mine = said.request == request
        if said.verdict == Verdict.ACCEPTED:
            mine = said.request <= request < said.request + said.numbers.get("n", 1)
        if mine:
            first, last = first or record.sequence, record.sequence
            if said.verdict == Verdict.ENDED:
                return Range(max(1, first - MARGIN_RECORDS), last + MARGIN_RECORDS)
    if not first:
        there = f"it numbers them 1 to {highest}" if highest else "it has accepted none"
        raise Missing(f"the journal has no request {request}; {there}")
    return Range(max(1, first - MARGIN_RECORDS))


def make(options: argparse.Namespace) -> dict[str, Any]:
    """Write the page; what was made, as plain values."""
    storage = open_directory(options.directory)
    title = Path(options.directory).resolve().name
    path = Path(options.out or f"{title}.html")
    if path.resolve().is_relative_to(storage.directory.resolve()):
        raise BadPlace(f"{path} is inside the journal's directory, where nothing may be written; name another with -o")
    refuse_place(str(path))
    began = time.perf_counter()
    shown = Range(options.first or 0, options.last or 0)
    if options.request:
        shown = range_of(storage, options.request)
    film, notes = follow(storage, shown)
    with to_file(path) as raw:
        file = io.TextIOWrapper(raw, encoding="utf-8")
        write_page(film, title, notes, options.request or 0, file)
        file.detach()  # flushed; it is closed where it was opened
    result: dict[str, Any] = {
        "file": str(path),
        "bytes": path.stat().st_size,
        "records": film.records,
        "steps": film.position,
        "requests": len(film.requests.lives),
        "arrivals": film.requests.arrivals(),
        "decisions": len(film.decisions.at),
        "lives": film.lives,
        "epochs": len(film.stretches),
        "marks": len(film.marks),
        "took_s": round(time.perf_counter() - began, 3),
        "notes": notes,
    }
    if options.check_browser:
        result["browser"] = check_page(path, film, options.browser)
    return result


def main(argv: list[str] | None = None) -> int:
    """`bandmaster view`."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.first and options.last and options.first > options.last:
        parser.error(f"--from {options.first} is behind --to {options.last}: there is no record between them")

    def run() -> int:
        result = make(options)
        tell(options.json, lambda: result, lambda: _show(result))
        browser = result.get("browser")
        return NO if browser is not None and browser["wrong"] else DONE

    return ended("view", run)


def _show(result: dict[str, Any]) -> None:
    for note in result["notes"]:
        print(f"note: {note}")
    megabytes, requests = result["bytes"] / 1e6, counted(result["requests"], "request")
    if result["arrivals"] != result["requests"]:
        requests += f" (choices of {counted(result['arrivals'], 'arrival')})"
    print(
        f"{result['file']}: {megabytes:.1f} MB, {counted(result['steps'], 'step')}, {requests}, "
        f"{counted(result['decisions'], 'decision')}, {counted(result['lives'], 'life', 'lives')}, "
        f"{counted(result['epochs'], 'epoch')} "
        f"({result['took_s']:.1f} s)"
    )
    if result["bytes"] > BIG_BYTES:
        print("note: a browser needs a while for so large a page; --from, --to and --request choose a part of it")
    browser = result.get("browser")
    if browser is not None:
        compared = f"{browser['compared']} bands at {browser['steps']} steps compared, {len(browser['wrong'])} wrong"
        times = f"open in {browser['open_ms']:.0f} ms, slowest frame {browser['frame_ms_max']:.1f} ms"
        print(f"browser: {compared}; {times}")
        for wrong in browser["wrong"]:
            print(f"  WRONG: {wrong}")


def _parser() -> argparse.ArgumentParser:
    parser = reading_parser("view", "An incident's memory and requests as one HTML file.")
    add_directory(parser)
    parser.add_argument("-o", dest="out", metavar="FILE", help="the file; without it, DIR's name with .html, here")
    parser.add_argument("--from", dest="first", type=number, metavar="SEQUENCE", help="the first record shown")
    parser.add_argument("--to", dest="last", type=number, metavar="SEQUENCE", help="the last record shown")
    parser.add_argument("--request", type=number, metavar="N", help="only the records of this request's life")
    add_json(parser, "print one JSON object about what was made")
    parser.add_argument("--check-browser", action="store_true", help="open it in a browser and compare what it shows")
    parser.add_argument("--browser", metavar="PROGRAM", help="the browser for it; without it, Chromium where found")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
