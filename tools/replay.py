"""replay: runs a journal again through a fresh core and fresh chains.

    bandmaster replay check DIR [--json]             every decision, step and digest must come out as recorded
    bandmaster replay until SEQUENCE DIR [--json]    stop behind that record and show the state
    bandmaster replay diff A B                       two journals side by side: the first thing that differs
    bandmaster replay plant [--only NAME] [--json]   journals with one thing false: what replay must name of each

Owns the wiring of the core and the chains into `journal.replay`. Must never write into the journal's directory. Damage
is told behind what was reproduced up to there. Exit codes: `tools.ends`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from daemon.processes import collect_seldom
from journal.divergence import Divergence, requests_in_words
from journal.reader import Walk
from journal.replay import Verdict, check
from journal.segment import segment_behind
from journal.snapshots import snapshot_names
from tools.beginnings import start_of
from tools.ends import DAMAGED, DONE, NO, codes, ended
from tools.journal_files import ReadingProgress, open_directory, refuse_foreign
from tools.output import tell
from tools.reading_flags import add_directory, add_json, number
from tools.replay_processes import RemoteRanks, Usage, usage
from tools.replica import factories
from tools.tables import print_table

ELSEWHERE = {"diff": "tools.replay_diff", "plant": "tools.planted.command"}  # commands with modules of their own


def replay_directory(
    directory: str, until: int | None = None, from_snapshot: bool = False, processes: int = 1
) -> Verdict:
    """Replay the journal in a directory, from its start, or from the oldest snapshot where that was trimmed.

    `from_snapshot`: from the newest that can be used. With two `processes` the ranks' half runs in one of its own.
    Raises NoJournal, Foreign and JournalError; damage behind what was replayed is the verdict's.
    """
    storage = open_directory(directory)
    start, notes = start_of(storage, until, from_snapshot, "replay")
    if from_snapshot and start is None:
        before = f" behind a record before {until}" if until and snapshot_names(storage.names()) else ""
        notes.append(f"there is no {'other ' if notes else ''}snapshot{before}: replay begins at the start")
    walk = Walk(storage, first=segment_behind(storage, start[0].sequence) if start else 0)
    elsewhere = RemoteRanks if processes > 1 else None
    collect_seldom()
    with ReadingProgress(storage, "replaying") as seen:
        verdict = check(walk.records(), factories(), until, seen, start, elsewhere)
    if verdict.damage is None:
        refuse_foreign(walk)
        if until is not None and verdict.divergence is None and verdict.counts.last_sequence < until:
            notes.append(f"the journal ends at record {verdict.counts.last_sequence}, before {until}")
    verdict.notes[:0] = notes
    verdict.notes.extend(f"the end is torn, replayed up to there: {cut.text()}" for cut in walk.cuts())
    return verdict


def state_of(verdict: Verdict) -> dict[str, Any]:
    """The state behind the last record: sequence, epoch, step, the core's view, and per stage the bands' units."""
    core, overview = verdict.replay.core, verdict.overview
    return {
        "sequence": verdict.counts.last_sequence,
        "life": verdict.counts.lives,
        "epoch": overview.epoch,
        "step": overview.step,
        "core": core.view() if core is not None else {},
        "stages": overview.stages,
    }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def divergence_in_words(found: Divergence) -> str:
    """A divergence in one line."""
    path = f", {found.path}" if found.path else ""
    return f"{found.what}, at sequence {found.sequence} ({found.file} at byte {found.offset}{path})"


# --- text ------------------------------------------------------------------------------------------------------------


def show_divergence(console: Console, found: Divergence) -> None:
    """The first difference: where, what, both sides."""
    where = [f"sequence {found.sequence}", f"{found.file} at byte {found.offset}"]
    where += [f"epoch {found.epoch}, step {found.step}"] if found.step else []
    where += [f"op {found.op}"] if found.op >= 0 else []
    where += [requests_in_words(found.requests)] if found.requests else []
    console.print(f"[bold red]DIVERGED[/] {found.what}", soft_wrap=True, highlight=False)
    lines = [("at", ", ".join(where)), ("first difference", found.path), ("that means", found.means)]
    for title, text in [*((title, text) for title, text in lines if text), *sides(found)]:
        console.print(f"  {title}: {text}", soft_wrap=True, highlight=False, markup=False)


def sides(found: Divergence) -> list[tuple[str, str]]:
    """Both sides by their names."""
    return [("recorded", found.recorded), ("replayed", found.replayed or "nothing")]


def show_state(console: Console, state: dict[str, Any]) -> None:
    """The state as aligned tables: the core's numbers, its requests, and the arena."""
    console.print(
        f"behind sequence {state['sequence']}: life {state['life']}, epoch {state['epoch']}, step {state['step']}"
    )
    core = dict(state["core"])
    requests = core.pop("requests", [])
    numbers = {**{name: value for name, value in core.items() if name != "gauges"}, **core.get("gauges", {})}
    if numbers:  # none before the first life
        print_table(console, _table("core", [{"name": name, "value": value} for name, value in numbers.items()]))
    if requests:
        print_table(console, _table("requests (ids and front ends: --json)", [_line(request) for request in requests]))
    for place, bands in enumerate(state["stages"]):
        print_table(console, _table(f"arena of stage {place}, units", bands))


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
    """Rows of one shape as a table; numbers to the right, all else may be wrapped."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name, value in rows[0].items():
        numbers = all(isinstance(row[name], int) for row in rows)
        table.add_column(
            name, justify="right" if isinstance(value, int) else "left", overflow="ellipsis" if numbers else "fold"
        )
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


def as_json(verdict: Verdict, until: int | None, elapsed_s: float) -> dict[str, Any]:
    """The verdict as plain values; with `until` the state too."""
    found = verdict.divergence
    result: dict[str, Any] = {
        "reproduced": found is None and verdict.damage is None,
        **asdict(verdict.counts),
        "epoch": verdict.overview.epoch,
        "step": verdict.overview.step,
        "notes": verdict.notes,
        "divergence": asdict(found) if found is not None else None,
        "damage": damage_of(verdict),
        "elapsed_s": round(elapsed_s, 3),
        "usage": {name: one._asdict() for name, one in usages(verdict).items()},
    }
    if until is not None:
        result["state"] = state_of(verdict)
    return result


def damage_of(verdict: Verdict) -> dict[str, Any] | None:
    """Where the journal could not be read on: rule of the recovery table, file, offset, sequence, and what is sound."""
    damage = verdict.damage
    if damage is None:
        return None
    return {
        "rule": damage.rule,
        "file": damage.file,
        "offset": damage.offset,
        "sequence": damage.sequence,
        "what": str(damage),
        "reproduced_through": verdict.counts.last_sequence,
    }


def usages(verdict: Verdict) -> dict[str, Usage]:
    """What each process of the replay took: `core`, and `ranks` where they had their own."""
    ranks = verdict.replay.ranks
    theirs = {"ranks": ranks.usage} if isinstance(ranks, RemoteRanks) and ranks.usage is not None else {}
    return {"core": usage()} | theirs


def code_of(verdict: Verdict) -> int:
    """The exit code."""
    if verdict.divergence is not None:
        return NO
    return DONE if verdict.damage is None else DAMAGED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bandmaster replay", description="Run a journal again and compare.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="check|until|diff|plant")
    commands.add_parser("diff", help="two journals side by side: the first thing that differs", add_help=False)
    commands.add_parser("plant", help="journals with one thing false: what replay must name of each", add_help=False)
    about = "every decision, step and digest must come out as recorded"
    checking = commands.add_parser("check", help=about, epilog=codes("replay check"))
    until = commands.add_parser("until", help="stop behind a record and show the state", epilog=codes("replay until"))
    until.add_argument("sequence", type=number, metavar="SEQUENCE", help="the last record to replay, from 1")
    for command in (checking, until):
        command.add_argument("--from-snapshot", action="store_true", help="begin at the newest snapshot, not the start")
        command.add_argument(
            "--processes",
            type=int,
            choices=(1, 2),
            default=min(2, cores()),
            help="2: the ranks' half in a process of its own [as many as there are cores]",
        )
        add_directory(command)
        add_json(command)
    return parser


def main(argv: list[str] | None = None) -> int:
    """`bandmaster replay`."""
    arguments = sys.argv[1:] if argv is None else argv
    module = ELSEWHERE.get(arguments[0]) if arguments else None
    if module is not None:
        return int(importlib.import_module(module).main(arguments[1:]))
    options = _parser().parse_args(arguments)
    return ended("replay", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    until = options.sequence if options.command == "until" else None
    started = time.perf_counter()
    verdict = replay_directory(options.directory, until, options.from_snapshot, options.processes)
    elapsed_s = time.perf_counter() - started
    tell(options.json, lambda: as_json(verdict, until, elapsed_s), lambda: _show(verdict, until, elapsed_s))
    if verdict.damage is not None and not options.json:
        print(f"bandmaster replay: DAMAGED {verdict.damage}", file=sys.stderr)
    return code_of(verdict)


def _show(verdict: Verdict, until: int | None, elapsed_s: float) -> None:
    console = Console()
    for note in verdict.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    if verdict.divergence is not None:
        show_divergence(console, verdict.divergence)
    elif until is not None:
        show_state(console, state_of(verdict))
    if verdict.divergence is None and verdict.counts.records:
        console.print(_summary(verdict, elapsed_s), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
