"""replay: runs a journal again through a fresh core and fresh chains.

    bandmaster replay check DIR [--json]             every decision, step and digest must come out as recorded
    bandmaster replay until SEQUENCE DIR [--json]    stop behind that record and show the state
    bandmaster replay why DIR --request N            the life of one request: why it waited, who retracted it, its end

Owns the wiring of the core and the chains into `journal.replay`. Must never write into the journal's directory. Exit
code 0: reproduced, or told; 1: it diverged, the first difference is printed with both sides, or what is told cannot be
printed; 2: usage, or a request
that the journal does not have; 4: a journal that is damaged or has no record.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from journal.errors import JournalError
from journal.reader import Walk, readable_segments
from journal.replay import Divergence, Replay, Verdict, check
from journal.segment import load_header, segment_behind
from journal.snapshots import Body, Header, SnapshotUnusable, decode_body, load, snapshot_names
from journal.storage import DiskStorage
from tools.journal_files import Foreign, NoJournal, ReadingProgress, open_directory, refuse_foreign
from tools.output import OutputLost, printing
from tools.replica import factories
from tools.why.show import lines, plain
from tools.why.story import Asked, follow

REPRODUCED = 0
DIVERGED = 1
USAGE = 2
DAMAGED = 4
DIGITS_MAX = 19  # of a number of a record or a request


def replay_directory(directory: str, until: int | None = None, from_snapshot: bool = False) -> Verdict:
    """Replay the journal in a directory, from its start, or from the oldest snapshot where that was trimmed.

    `from_snapshot`: from the newest that can be used. Raises NoJournal, Foreign and JournalError.
    """
    storage = open_directory(directory)
    start, notes = start_of(storage, until, from_snapshot)
    walk = Walk(storage, first=segment_behind(storage, start[0].sequence) if start else 0)
    with ReadingProgress(storage, "replaying") as seen:
        verdict = check(walk.records(), factories(), until, seen, start)
    refuse_foreign(walk)
    verdict.notes[:0] = notes
    return verdict


def start_of(
    storage: DiskStorage, until: int | None, from_snapshot: bool
) -> tuple[tuple[Header, Body] | None, list[str]]:
    """The snapshot at which replay begins, None: the start, and notes about those that cannot be used."""
    row, notes = readable_segments(storage), list[str]()
    oldest = load_header(storage, next(iter(row.values())))
    trimmed = next(iter(row)) > 1 and oldest is not None and bool(snapshot_names(storage.names()))
    if not trimmed and not from_snapshot:
        return None, notes
    least = oldest.first_sequence - 1 if trimmed and oldest is not None else 0
    names = [
        (at, name) for at, name in snapshot_names(storage.names()).items() if at >= least and at < (until or at + 1)
    ]
    for sequence, name in reversed(names) if from_snapshot else names:
        try:
            header, body = load(storage, name)
        except SnapshotUnusable as error:
            notes.append(f"not used: {error}")
            continue
        what = "what is older was trimmed" if trimmed and not from_snapshot else "as asked"
        notes.append(f"replay begins at the snapshot behind record {sequence}: {what}")
        return (header, decode_body(body)), notes
    if trimmed:
        sought = f" behind a record below {until}" if until else ""
        raise JournalError("; ".join([f"what is older was trimmed, and no snapshot{sought} can be used", *notes]))
    return None, [*notes, "no snapshot can be used: replay begins at the start"]


def state_of(replay: Replay) -> dict[str, Any]:
    """The state behind the last record: sequence, epoch, step, the core's view, and per stage the bands' units."""
    stages = [] if replay.epoch is None else [stage.counts() for stage in replay.epoch.stages]
    return {
        "sequence": replay.counts.last_sequence,
        "life": replay.counts.lives,
        "epoch": replay.epoch.number if replay.epoch is not None else 0,
        "step": replay.epoch.seq if replay.epoch is not None else 0,
        "core": replay.core.view() if replay.core is not None else {},
        "stages": stages,
    }


def tell(directory: str, asked: Asked, options: argparse.Namespace) -> int:
    """Print the stories of the requests that are asked for; raises NoJournal and JournalError."""
    storage = open_directory(directory)
    walk = Walk(storage)
    with ReadingProgress(storage, "reading") as seen:
        follower = follow(walk.records(), asked, seen)
    damage = [finding.text() for finding in walk.cuts()]
    if not follower.records:
        print(f"bandmaster replay: {directory}: no record can be read: {'; '.join(damage)}", file=sys.stderr)
        return DAMAGED
    notes = follower.notes + damage
    with printing():
        if options.json:
            print(json.dumps({"requests": [plain(story) for story in follower.stories], "notes": notes}))
        for note in [] if options.json else notes:
            print(f"note: {note}")
        for story in [] if options.json else follower.stories:
            print("\n".join(lines(story, options.every_pass)))
    if follower.stories:
        return REPRODUCED
    print(f"bandmaster replay: the journal has no {_missing(asked, follower.requests)}", file=sys.stderr)
    return USAGE


def _missing(asked: Asked, requests: int) -> str:
    """What was asked for, and what there is."""
    there = f"it numbers them 1 to {requests}" if requests else "it has accepted none"
    if asked.request:
        return f"request {asked.request}; {there}"
    ids = "an answer's id, or the front end's, which ends in the number of the prompt; the log line HttpRequest has the"
    return f"request with the id {asked.id!r}; {there}. --id takes {ids} answer's id beside X-Request-Id"


def in_words(found: Divergence) -> str:
    """A divergence in one line."""
    path = f", {found.path}" if found.path else ""
    return f"{found.what}, at sequence {found.sequence} ({found.file} at byte {found.offset}{path})"


# --- text ------------------------------------------------------------------------------------------------------------


def show_divergence(console: Console, found: Divergence, replay: Replay) -> None:
    """The first difference: where, what, both sides."""
    where = [f"sequence {found.sequence}", f"{found.file} at byte {found.offset}"]
    where += [f"epoch {found.epoch}, step {found.step}"] if found.step else []
    where += [f"op {found.op}"] if found.op >= 0 else []
    request = found.request or _request_on_row(replay, found.row)
    where += [f"request {request}"] if request else []
    console.print(f"[bold red]DIVERGED[/] {found.what}", soft_wrap=True, highlight=False)
    for title, text in (("at", ", ".join(where)), ("first difference", found.path)):
        if text:
            console.print(f"  {title}: {text}", soft_wrap=True, highlight=False, markup=False)
    for title, text in (("recorded", found.recorded), ("replayed", found.replayed)):
        console.print(f"  {title}: {text}", soft_wrap=True, highlight=False, markup=False)


def _request_on_row(replay: Replay, row: int) -> int:
    """The request that the replayed core has on a row, or 0."""
    if row < 0 or replay.core is None:
        return 0
    on_row = [request["request"] for request in replay.core.view()["requests"] if request["row"] == row]
    return int(on_row[0]) if on_row else 0


def show_state(console: Console, state: dict[str, Any]) -> None:
    """The state as aligned tables: the core's numbers, its requests, and the arena."""
    console.print(
        f"behind sequence {state['sequence']}: life {state['life']}, epoch {state['epoch']}, step {state['step']}"
    )
    core = dict(state["core"])
    requests = core.pop("requests", [])
    numbers = {**{name: value for name, value in core.items() if name != "gauges"}, **core.get("gauges", {})}
    console.print(_table("core", [{"name": name, "value": value} for name, value in numbers.items()]))
    if requests:
        console.print(_table("requests (ids and front ends: --json)", [_line(request) for request in requests]))
    for place, bands in enumerate(state["stages"]):
        console.print(_table(f"arena of stage {place}, units", bands))


def _line(request: dict[str, Any]) -> dict[str, Any]:
    """One request in as much as fits a terminal of 80 columns."""
    scheduled, target = request["extent"]
    return {
        "request": request["request"],
        "stage": request["stage"],
        "row.gen": f"{request['row']}.{request['generation']}" if request["row"] >= 0 else "-",
        "prompt": request["prompt_tokens"],
        "output": f"{request['output_tokens']}/{request['max_output']}",
        "extent": f"{scheduled}/{target}",
        "pages": request["pages"],
        "retr.": request["retractions"],
        "waits for": request["waits_for"],
    }


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Rows of one shape as a table; numbers to the right."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name, value in rows[0].items():
        table.add_column(name, justify="right" if isinstance(value, int) else "left")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    return table


def _summary(verdict: Verdict, elapsed_s: float) -> str:
    counts = verdict.counts
    lives = f"{counts.lives} {'life' if counts.lives == 1 else 'lives'}"
    stood = f", {counts.snapshots:,} snapshots" if counts.snapshots else ""
    cut = f"; {counts.unfinished} outputs of a cut-off iteration were never written" if counts.unfinished else ""
    rate = f"{counts.steps / elapsed_s * 60:,.0f} steps/min" if elapsed_s > 0 else ""
    return (
        f"reproduced: {counts.records:,} records of {lives}, {counts.inputs:,} inputs, {counts.steps:,} steps, "
        f"{counts.decisions:,} decisions, {counts.digests:,} rank digests{stood}, up to sequence "
        f"{counts.last_sequence:,}{cut} ({elapsed_s:.1f} s, {rate})"
    )


def as_json(verdict: Verdict, until: int | None) -> dict[str, Any]:
    """The verdict as plain values; with `until` the state too."""
    found = verdict.divergence
    result: dict[str, Any] = {
        "reproduced": found is None,
        **asdict(verdict.counts),
        "notes": verdict.notes,
        "divergence": asdict(found) if found is not None else None,
    }
    if until is not None:
        result["state"] = state_of(verdict.replay)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bandmaster replay", description="Run a journal again and compare.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="check|until|why")
    checking = commands.add_parser("check", help="every decision, step and digest must come out as recorded")
    until = commands.add_parser("until", help="stop behind a record and show the state")
    until.add_argument("sequence", type=_sequence, metavar="SEQUENCE", help="the last record to replay, from 1")
    why = commands.add_parser("why", help="the life of one request: each pass that skipped it, each decision about it")
    which = why.add_mutually_exclusive_group(required=True)
    which.add_argument("--request", type=_request, metavar="N", help="its number, as in log lines and metrics")
    which.add_argument("--id", metavar="ID", help="the id of its answer; a refused request has no number")
    why.add_argument("--every-pass", action="store_true", help="a line for each pass, where equal ones share one")
    for command in (checking, until):
        command.add_argument("--from-snapshot", action="store_true", help="begin at the newest snapshot, not the start")
    for command in (checking, until, why):
        command.add_argument("directory", metavar="DIR", help="a journal directory, or a run directory that holds one")
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _sequence(text: str) -> int:
    return _number(text, "record")


def _request(text: str) -> int:
    return _number(text, "request")


def _number(text: str, what: str) -> int:
    if not text.isdecimal() or len(text) > DIGITS_MAX or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}; they are numbered from 1")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """`bandmaster replay`."""
    options = _parser().parse_args(argv)
    until = options.sequence if options.command == "until" else None
    started = time.perf_counter()
    try:
        if options.command == "why":
            return tell(options.directory, Asked(options.request or 0, options.id or ""), options)
        verdict = replay_directory(options.directory, until, options.from_snapshot)
    except NoJournal as error:
        print(f"bandmaster replay: {error}", file=sys.stderr)
        return USAGE
    except OutputLost as error:
        if str(error):
            print(f"bandmaster replay: {error}", file=sys.stderr)
        return DIVERGED
    except (Foreign, JournalError, msgspec.ValidationError, OSError) as error:
        print(f"bandmaster replay: {error}", file=sys.stderr)
        return DAMAGED
    if options.json:
        print(json.dumps(as_json(verdict, until)))
        return REPRODUCED if verdict.divergence is None else DIVERGED
    console = Console()
    for note in verdict.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    if verdict.divergence is not None:
        show_divergence(console, verdict.divergence, verdict.replay)
        return DIVERGED
    if until is not None:
        show_state(console, state_of(verdict.replay))
    console.print(_summary(verdict, time.perf_counter() - started), soft_wrap=True, highlight=False)
    return REPRODUCED


if __name__ == "__main__":
    raise SystemExit(main())
