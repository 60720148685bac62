"""The results of campaigns and cases, as tables for a person.

Owns headings and wording. Must never leave out a problem: each is printed whole below the table.
"""

from __future__ import annotations

import statistics
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from daemon.faults import ACTIONS, POINTS
from tools.faults.campaign import Result
from tools.faults.judge import Verdict
from tools.faults.strikes import EXPECTED
from tools.tables import print_table

COLUMNS = (
    ("round", "round"), ("kind", "strike"), ("at_s", "at s"), ("red_s", "red s"), ("green_s", "green s"),
    ("tokens_s", "tokens s"), ("silence_s", "silence s"), ("gone_s", "gone s"), ("equal", "equal"),
    ("near_ties", "ties"), ("parted", "parted"), ("lost", "lost"), ("missing", "missing"), ("doubled", "doubled"),
    ("broken", "broken"), ("resumes", "resumed"), ("took_s", "round s"), ("victim", "victim"),
)  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A row while the campaign runs."""
    counts = ", ".join(f"{row[verdict.value]} {verdict.value}" for verdict in Verdict if row[verdict.value])
    times = ", ".join(
        f"{text} {row[key]:.2f} s"
        for key, text in (("at_s", "at"), ("red_s", "red after"), ("green_s", "green after"), ("silence_s", "silent"))
        if row[key] is not None
    )
    return f"round {row['round']}: {row['kind']}: {counts} ({times or 'took ' + str(row['took_s']) + ' s'})"


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def print_result(console: Console, result: Result, title: str) -> None:
    """Rounds, medians of each kind, near-ties, problems, and the verdict on the journal."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for _, heading in COLUMNS:
        table.add_column(heading, justify="right")
    for row in result.rounds:
        table.add_row(*[_cell(row[key]) for key, _ in COLUMNS])
    print_table(console, table)
    print_table(console, _kinds(result))
    for tie in result.ties:
        word = "near-tie" if tie["near"] else "NO near-tie"
        console.print(
            f"{word}: round {tie['round']}, request {tie['request']}, token {tie['at']}: {tie['got']} for "
            f"{tie['expected']}, {tie['text']}",
            markup=False, highlight=False,
        )  # fmt: skip
    for text in [text for row in result.rounds for text in row["bad"]] + result.problems:
        console.print(f"PROBLEM: {text}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"units held after the cache was flushed: {result.units_after_flush}", markup=False)
    console.print(result.replay, markup=False, highlight=False, soft_wrap=True)
    console.print("clean" if result.clean else "NOT CLEAN", markup=False)


def _kinds(result: Result) -> Table:
    table = Table(title="by kind: median (worst)", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("strike", "rounds", "red after s", "green after s", "tokens after s", "silence s"):
        table.add_column(heading, justify="right")
    kinds = dict.fromkeys(row["kind"] for row in result.rounds if row["at_s"] is not None)
    for kind in kinds:
        rows = [row for row in result.rounds if row["kind"] == kind]
        cells = []
        for key in ("red_s", "green_s", "tokens_s", "silence_s"):
            values = [row[key] for row in rows if row[key] is not None]
            cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})" if values else "never")
        table.add_row(kind, str(len(rows)), *cells)
    return table


def print_catalogue(console: Console) -> None:
    """What `bandmaster faults list` prints: strikes, points and actions."""
    strikes = Table("strike", "what must come of it", title="strikes of `bandmaster faults campaign`", box=SIMPLE_HEAD)
    for kind, text in EXPECTED.items():
        strikes.add_row(kind, text)
    points = Table("point", "process", "when", title="points of BANDMASTER_FAULTS", box=SIMPLE_HEAD)
    for name, point in POINTS.items():
        points.add_row(name, point.kind, point.about)
    actions = Table("action", "at", "what it does", "what must come of it", title="actions", box=SIMPLE_HEAD)
    for name, action in ACTIONS.items():
        actions.add_row(name, " ".join(action.points), action.about, action.then)
    for table in (strikes, points, actions):
        print_table(console, table)
