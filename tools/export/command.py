"""export: a journal as JSON Lines or as a trace that Perfetto and Chrome show.

    bandmaster export DIR [--format jsonl|perfetto] [-o FILE]

Owns the command line and the walk. Must never write into the journal's directory, and never holds more than the record
at hand and what lives at it. What is sound before damage is exported (`--past-damage`: all that is sound). Exit codes:
`tools.ends`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

import msgspec

from journal.errors import JournalDamaged
from journal.reader import Record, Walk
from journal.records import Kind
from journal.recovery import Decision
from journal.segment import segment_behind
from journal.snapshots import Body, Header
from journal.storage import DiskStorage
from tools.beginnings import start_of
from tools.ends import DAMAGED, DONE, Refused, ended
from tools.export.choice import Choice, Missing, Sought, kinds_named
from tools.export.events import Events
from tools.export.output import Write, opened
from tools.export.plain import fields
from tools.export.tracks import Trace
from tools.journal_files import ReadingProgress, open_directory, refuse_foreign
from tools.packed_files import PACKERS
from tools.reading_flags import add_directory, number, reading_parser

_json = msgspec.json.Encoder()


def lines(records: Iterator[Record], choice: Choice, write: Write) -> None:
    """Write the chosen records as JSON Lines."""
    for record in records:
        if choice.beyond(record):
            break
        for chosen, payload in choice.take(record):
            line = {
                "sequence": chosen.sequence,
                "kind": Kind(chosen.kind).name.lower(),
                "file": chosen.file,
                "offset": chosen.offset,
                "record": fields(payload),
            }
            write(_json.encode(line) + b"\n")


def tracks(
    records: Iterator[Record], choice: Choice, write: Write, start: tuple[Header, Body] | None, arena: bool
) -> None:
    """Write a trace; of a range the events that end in it. It is whole also where the journal is damaged."""
    events = Events(write)
    trace = Trace(events, choice.request, arena)
    if start is not None:
        trace.begin_at(*start)
    try:
        for record in records:
            if start is not None and record.sequence <= start[0].sequence:
                continue
            if choice.beyond(record):
                break
            events.enabled = record.sequence >= choice.first
            trace.take(record)
    finally:
        events.close(trace.end())


def _read(walk: Walk, seen: Callable[[Record], None], sought: Sought) -> Iterator[Record]:
    for record in walk.records():
        seen(record)
        sought.take(record)
        yield record


def _require_range(choice: Choice, begins: int, ends: int) -> None:
    """Raise Missing where a sound journal of these records has none of the range."""
    if choice.first > ends:
        raise Missing(f"nothing was exported: the journal ends at {ends}, before --from {choice.first}")
    if 0 < choice.last < begins:
        raise Missing(f"nothing was exported: the journal begins at {begins}, behind --to {choice.last}")


def _export(storage: DiskStorage, choice: Choice, options: argparse.Namespace) -> tuple[list[str], bool]:
    """Export; notes for people, and whether the journal is damaged. Raises Missing where there is no such record."""
    trace, notes = options.format == "perfetto", list[str]()
    start = None
    if trace:  # a journal whose beginning was trimmed begins in the midst of requests: its snapshot says of which
        start, notes = start_of(storage)
    # What happened before the range decides what a request's records are, so only a plain range may skip segments.
    skip = choice.first - 1 if not trace and choice.first > 1 and not choice.request else 0
    first = segment_behind(storage, start[0].sequence if start else skip) if start or skip else 0
    walk = Walk(storage, first=first, tolerant=options.past_damage)
    sought = Sought(choice.request)
    if start is not None:
        sought.groups(start[1].groups)
    with opened(options.output, storage.directory) as write, ReadingProgress(storage, "exporting") as seen:
        try:
            if trace:
                tracks(_read(walk, seen, sought), choice, write, start, options.arena)
            else:
                lines(_read(walk, seen, sought), choice, write)
        except JournalDamaged as error:
            notes.append(f"exported up to sequence {walk.at.sequence}; what is behind is not sound: {error}")
        refuse_foreign(walk)
        damaged = any(found.row.decision is Decision.REFUSE for found in walk.findings)
        if not damaged:
            sought.require(min(walk.at.sequence, choice.last or walk.at.sequence))
            _require_range(choice, sought.begins, walk.at.sequence)
    for found in walk.findings:
        refused = found.row.decision is Decision.REFUSE
        if (refused and options.past_damage) or found.row.decision is Decision.CUT_TORN:
            notes.append(found.text())
    return notes, damaged


def _parser() -> argparse.ArgumentParser:
    parser = reading_parser("export", "Write a journal in another format.")
    add_directory(parser)
    parser.add_argument("--format", choices=("jsonl", "perfetto"), default="jsonl", help="default: jsonl")
    parser.add_argument(
        "-o",
        "--output",
        default="",
        metavar="FILE",
        help=f"default: stdout; packed by its suffix: {', '.join(PACKERS)}",
    )
    parser.add_argument("--kind", action="append", default=[], metavar="KIND", help="only these, like decided,stepped")
    parser.add_argument("--request", type=number, default=0, metavar="N", help="only what is about this request")
    parser.add_argument("--from", dest="first", type=number, default=0, metavar="SEQ", help="the first record")
    parser.add_argument("--to", dest="last", type=number, default=0, metavar="SEQ", help="the last record")
    parser.add_argument(
        "--no-arena", dest="arena", action="store_false", help="a trace without units of memory: faster"
    )
    parser.add_argument("--past-damage", action="store_true", help="go on behind damage with what is sound there")
    return parser


def main(argv: list[str] | None = None) -> int:
    """`bandmaster export`."""
    options = _parser().parse_args(argv)
    return ended("export", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.kind and options.format == "perfetto":
        raise Refused("a trace is made of all kinds; --kind goes with --format jsonl")
    if 0 < options.last < options.first:
        raise Refused(f"--from {options.first} is behind --to {options.last}: there is no record between them")
    choice = Choice(kinds_named(options.kind), options.first, options.last, options.request)
    notes, damaged = _export(open_directory(options.directory), choice, options)
    for note in notes:
        print(f"bandmaster export: {note}", file=sys.stderr)
    return DAMAGED if damaged else DONE


if __name__ == "__main__":
    raise SystemExit(main())
