"""Cancels for a person: what is waited for, the tables of a run, and the verdict.

Owns headings and wording. Must never leave out a problem: each is printed whole, behind the word MISSED.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools.cancels.result import SPANS
from tools.cancels.run import Result, Told
from tools.tables import print_table

MISSED = "MISSED"
LEGEND = (
    "alone: the kept streams with nothing beside them; crowd: until the first cancel; cancels: until the last end; "
    "after: behind it. Pauses: between two tokens of one kept stream, as its client saw them and by the steps in the "
    "journal, each where it ends; apart: the most steps from one token to the next"
)


@contextmanager
def progress() -> Iterator[Told]:
    """A line on standard error, where that is a terminal: what is waited for, and how much of it has come."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=1)
        yield lambda what, came, of: shown.update(task, description=what, completed=came, total=of)


def print_result(console: Console, result: Result, title: str, stall_ms: float) -> None:
    """Both tables, memory, the journal, and what was missed."""
    print_table(console, _cancels(result.rows, title))
    print_table(console, _pauses(result.rows))
    console.print(LEGEND, style="dim", markup=False, highlight=False)
    lines = []
    for band, units in result.units.items():
        free, kept = units["free"], units["reclaimable"]
        sentence = f"units of {band}: {units['boot']:,} free at boot; at the end {free:,} free and {kept:,} reclaimable"
        lines.append(f"{sentence}, {units['emptied']:,} free with an empty cache")
    lines += [f"replay check: {result.replay}"]
    lines += [f"{MISSED}: {text}" for text in result.missed] or [held(result.rows, stall_ms)]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def held(rows: list[dict[str, Any]], stall_ms: float) -> str:
    """What a run without problems has shown."""
    cancels = sum(row["cancels"] for row in rows)
    longest, before = (max(row[name] for row in rows) for name in ("longest_ms", "longest_before_ms"))
    told = f"from the first cancel on no kept stream paused longer than {longest:.0f} of {stall_ms:g} ms"
    return f"held: {cancels:,} cancels, each ended once; {told}; before it {before:.0f} ms, which are not judged"


def _cancels(rows: list[dict[str, Any]], title: str) -> Table:
    table = _table(title)
    for name in (
        *("round", "cancels", "sending ms", "answered", "in ms", "ended once", "in ms", "steps"),
        *("decoding", "prefilling", "waiting", "kept", "as without"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        told = ["-", "-"] if row["answered"] is None else [f"{row['answered']:,}", f"{row['answered_s'] * 1000:.0f}"]
        cells = [row["round"], f"{row['cancels']:,}", f"{row['sending_s'] * 1000:.0f}", *told]
        cells += [f"{row['ended']:,}", f"{row['ended_s'] * 1000:.0f}", row["steps"]]
        cells += [row[f"{name}_at_cancel"] for name in ("decoding", "prefilling", "waiting")]
        table.add_row(*map(str, [*cells, row["kept"], row["kept_equal"]]))
    return table


def _pauses(rows: list[dict[str, Any]]) -> Table:
    table = _table("pauses of the kept streams, ms")
    for name in ("round", "span", "s", "steps", "seen p50", "p99", "max", "made p50", "p99", "max", "apart"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        for span in SPANS:
            told = row["pauses"][span]
            figures = [f"{told[by][name]:.1f}" for by in ("seen_ms", "made_ms") for name in ("p50", "p99", "max")]
            cells = (row["round"], span, f"{told['seconds']:.2f}", told["steps"], *figures, told["steps_between"])
            table.add_row(*map(str, cells))
    return table


def _table(title: str) -> Table:
    return Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
