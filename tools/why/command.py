"""why: the life of a request from a journal, in sentences with numbers.

    bandmaster why REQUEST... DIR [--every-pass | --quick] [--legend] [--json]   by number, or by the id of its answer
    bandmaster why DIR [--most N] [--json]                               which requests are worth asking for

Owns the command line. Must never write into the journal's directory. Exit codes: `tools.ends`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from allocator.graph import GraphError
from daemon.snapshots import restore_core
from journal.errors import JournalDamaged
from journal.reader import Record, Walk
from journal.segment import segment_behind
from journal.snapshots import SnapshotUnusable, decode_body, load, snapshot_names
from journal.storage import DiskStorage
from tools.beginnings import Start, start_of
from tools.ends import DAMAGED, DONE, USAGE, Unreadable, ended
from tools.journal_files import NoJournal, ReadingProgress, open_directory, refuse_foreign
from tools.output import tell
from tools.reading_flags import DIGITS_MAX, DIRECTORY, add_json, reading_parser
from tools.tables import print_table
from tools.why.legend import legend
from tools.why.listing import KINDS, Entry, Listing, as_plain, refusal, row, totals
from tools.why.show import lines, plain
from tools.why.story import Asked, Beginning, Follower, follow

MOST = 10
WIDE = 150  # columns of a table with everything
NARROW = ("came (UTC)", "prompt", "cached", "output")  # what a narrower one leaves out


class Sound:
    """The records of a journal up to where it is damaged, which is no reason to tell nothing; `damage` says where."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self.damage: JournalDamaged | None = None

    def records(self) -> Iterator[Record]:
        """One after the other."""
        try:
            yield from self._walk.records()
        except JournalDamaged as error:
            self.damage = error

    def notes(self) -> list[str]:
        """What was not read, and why."""
        damage = [f"DAMAGED: {self.damage}; what stands before that is told"] if self.damage is not None else []
        return [finding.text() for finding in self._walk.cuts()] + damage


def asked_for(words: Sequence[str]) -> list[Asked]:
    """What words ask for: a number means that request, and an id too, should one be all digits."""
    numbered = [word.isdecimal() and len(word) <= DIGITS_MAX for word in words]
    return [Asked(int(word) if number else 0, word) for word, number in zip(words, numbered, strict=True)]


def tell_of(directory: str, asked: Sequence[Asked], console_width: int, options: argparse.Namespace) -> int:
    """Print the stories of the requests that are asked for; raises NoJournal, Foreign and JournalError."""
    storage = open_directory(directory)
    start, notes = _start(storage, asked)
    walk = _walk(storage, start)
    beginning, sound = _beginning(start, notes, options.quick), Sound(walk)
    with ReadingProgress(storage, "reading") as seen:
        follower = follow(sound.records(), asked, seen, beginning, not options.quick)
    _refuse_empty(walk, follower.records, directory, sound)
    notes += follower.notes + sound.notes()

    def show() -> None:
        stories = ["\n".join(lines(story, options.every_pass, console_width)) for story in follower.stories]
        print("\n\n".join(stories), end="\n" if stories else "")

    def document() -> dict[str, Any]:
        return {"requests": [plain(story) for story in follower.stories], "notes": notes}

    missing = [one for one in asked if not _found(one, follower)]
    trimmed = f"; {'; '.join(trimming)}" if (trimming := [note for note in notes if "trimmed" in note]) else ""
    if follower.stories or sound.damage is not None or not options.json:  # else standard error alone has the answer
        tell(options.json, document, lambda: _show(notes, show, options.legend))
    for one in missing:
        print(f"bandmaster why: {_missing(one, follower.requests)}{trimmed}", file=sys.stderr)
    return DAMAGED if sound.damage is not None else USAGE if missing else DONE


def list_worst(directory: str, options: argparse.Namespace) -> int:
    """Print which requests are worth asking for; raises NoJournal, Foreign and JournalError."""
    storage = open_directory(directory)
    start, notes = start_of(storage)
    found = Listing(options.most)
    if start is not None:
        found.begin_at(start[1].groups)
    walk = _walk(storage, start)
    sound = Sound(walk)
    with ReadingProgress(storage, "reading") as seen:
        for record in sound.records():
            if start is None or record.sequence > start[0].sequence:
                seen(record)
                found.take(record)
    found.end()
    _refuse_empty(walk, found.records, directory, sound)
    notes += sound.notes()
    tell(
        options.json,
        lambda: {**as_plain(found), "notes": notes},
        lambda: _show(notes, lambda: _show_lists(found, directory), options.legend),
    )
    return DAMAGED if sound.damage is not None else DONE


def _start(storage: DiskStorage, asked: Sequence[Asked]) -> tuple[Start | None, list[str]]:
    """Where to begin: the newest snapshot behind which all that are asked for came, else the start of what is there."""
    if all(one.request for one in asked):
        first = min(one.request for one in asked)
        for name in reversed(snapshot_names(storage.names()).values()):
            try:
                header, data = load(storage, name)
            except SnapshotUnusable:
                continue  # an older one or the start tells the same
            body = decode_body(data)
            if body.next_request <= first:
                return (header, body), []
    return start_of(storage)


def _beginning(start: Start | None, notes: list[str], quick: bool) -> Beginning | None:
    """What a snapshot says; a state that this version cannot read is a note, and then no passes are told."""
    if start is None:
        return None
    header, body = start
    core = None
    if not quick:
        try:
            core = restore_core(body.core)
        except GraphError as error:
            notes.append(
                f"the state in the snapshot behind record {header.sequence} cannot be read ({error}): passes are"
            )
            notes[-1] += " not told"
    return Beginning(header.sequence, body.groups, body.next_request, core)


def _walk(storage: DiskStorage, start: Start | None) -> Walk:
    return Walk(storage, first=segment_behind(storage, start[0].sequence) if start is not None else 0)


def _refuse_empty(walk: Walk, records: int, directory: str, sound: Sound) -> None:
    refuse_foreign(walk)
    if not records and sound.damage is not None:
        raise sound.damage
    if not records:
        raise Unreadable(f"{directory}: no record can be read: {'; '.join(one.text() for one in walk.cuts())}")


def _found(asked: Asked, follower: Follower) -> bool:
    return any(asked.request == story.request > 0 or asked.means(story.arrived) for story in follower.stories)


def _missing(asked: Asked, requests: int) -> str:
    """What was asked for, and what there is."""
    there = f"it numbers them 1 to {requests}" if requests else "it has accepted none"
    if asked.request:
        return f"the journal has no request {asked.request}; {there}"
    ids = "an answer's id, or the front end's, which ends in the number of the prompt; the log line HttpRequest has the"
    return (
        f"the journal has no request with the id {asked.id!r}; {there}. An id is {ids} answer's id beside X-Request-Id"
    )


# --- text ------------------------------------------------------------------------------------------------------------


def _show(notes: Sequence[str], show: Callable[[], None], with_legend: bool) -> None:
    for note in notes:
        print(f"note: {note}")
    show()
    if with_legend:
        print("\n".join(["", *legend()]))


def _show_lists(found: Listing, directory: str) -> None:
    console = Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=WIDE)
    for line in totals(found):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if found.refused:
        print_table(console, _table("refused, newest last", [refusal(one) for one in found.refused]))
    for name, (title, _) in KINDS.items():
        left_out = [one for one in NARROW if (name, one) != ("cut", "cached")] if console.width < WIDE else ()
        entries = found.worst[name].entries()
        if entries:
            print_table(console, _table(title, [row(entry) for entry in entries], left_out))
    asked = _first(found)
    if asked is not None:
        console.print(
            f"The life of one of them: bandmaster why {asked.request} {directory}", soft_wrap=True, highlight=False
        )


def _first(found: Listing) -> Entry | None:
    """The first request of the first list that has one."""
    return next((entry for worst in found.worst.values() for entry in worst.entries()), None)


def _table(title: str, rows: Sequence[dict[str, str]], left_out: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    numbers = {"request", "prompt", "cached", "output", "waited", "retracted", "took"}
    for name in rows[0]:
        if name not in left_out:
            table.add_column(
                name, justify="right" if name in numbers else "left", no_wrap=name in numbers, overflow="fold"
            )
    for one in rows:
        table.add_row(*(text for name, text in one.items() if name not in left_out))
    return table


def _parser() -> argparse.ArgumentParser:
    about = "Why a request waited, was retracted or refused, and how it ended; without one, which are worth asking for."
    usage = "bandmaster why [REQUEST...] DIR [--every-pass | --quick] [--legend] [--most N] [--json]"
    parser = reading_parser("why", about, usage=usage)
    parser.add_argument(
        "words",
        nargs="+",
        metavar="REQUEST... DIR",
        help=f"numbers of requests, as in log lines and metrics, or ids of answers; last, {DIRECTORY}",
    )
    parser.add_argument("--every-pass", action="store_true", help="each pass of the scheduler on a line of its own")
    parser.add_argument("--quick", action="store_true", help="from the recorded decisions alone: no passes, but faster")
    parser.add_argument("--legend", action="store_true", help="add what the words mean")
    parser.add_argument("--most", type=_most, default=MOST, metavar="N", help=f"how many of each list [{MOST}]")
    add_json(parser)
    return parser


def _most(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of requests, from 1 to 100000")
    return int(text)


def _width() -> int:
    """Columns of the terminal that is written to; 0 where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def main(argv: list[str] | None = None) -> int:
    """`bandmaster why`."""
    options = _parser().parse_intermixed_args(argv)
    *words, directory = options.words

    def run() -> int:
        try:
            return tell_of(directory, asked_for(words), _width(), options) if words else list_worst(directory, options)
        except NoJournal as error:
            raise NoJournal(f"{error}; the directory stands behind the requests") from error

    return ended("why", run)


if __name__ == "__main__":
    raise SystemExit(main())
