"""The answer of a what-if: its document and the tables of it.

Owns the rows: which figures are compared, how they are written, and how far apart two of them are. Must never compute a
figure. A column is a run: recorded, replayed unchanged, replayed with the changes, and run for real.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tools.simulate.show import duration, size
from tools.tables import print_table
from tools.whatif.account import Figures

RECORDED, UNCHANGED, CHANGED, RERUN = "recorded", "unchanged", "changed", "rerun"


class Row(NamedTuple):
    """A figure: where it stands, how it is written, and whether two runs are compared by it."""

    name: str
    path: tuple[str, ...]
    write: Callable[[Any], str]
    compared: bool = True


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _one(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


ROWS = (
    Row("requests", ("requests",), _count, compared=False),
    Row("refused", ("refused",), _count),
    Row("prompt tokens found in the cache", ("cached_tokens",), _count),
    Row("hit rate", ("hit_rate",), _part),
    Row("prompt tokens computed", ("computed_prompt_tokens",), _count),
    Row("retractions", ("retractions",), _count),
    Row("parked for memory", ("parks",), _count),
    Row("units evicted from the cache", ("evicted_units",), _count),
    Row("waiting, mean", ("waiting_ms", "mean"), duration),
    Row("waiting, median", ("waiting_ms", "p50"), duration),
    Row("waiting, 99th percentile", ("waiting_ms", "p99"), duration),
    Row("time to first token, mean", ("first_token_ms", "mean"), duration),
    Row("time to first token, median", ("first_token_ms", "p50"), duration),
    Row("time to first token, 99th", ("first_token_ms", "p99"), duration),
    Row("whole request, mean", ("request_ms", "mean"), duration),
    Row("output tokens", ("output_tokens",), _count),
    Row("output tokens/s", ("output_tokens_per_s",), _one),
    Row("forwards and other steps", ("steps",), _count),
)


def value_of(figures: Figures | dict[str, Any], row: Row) -> float | None:
    """A figure of a run."""
    found: Any = figures
    for name in row.path:
        found = found[name]
    return None if found is None else float(found)


def off(value: float | None, truth: float | None) -> float | None:
    """How far a value is from another, as a part of it; None where that cannot be said."""
    if value is None or truth is None:
        return None
    if not truth:
        return 0.0 if not value else None
    return (value - truth) / truth


def compared(runs: dict[str, Figures], one: str, truth: str) -> dict[str, float | None]:
    """Of each compared figure how far run `one` is off run `truth`."""
    return {row.name: off(value_of(runs[one], row), value_of(runs[truth], row)) for row in ROWS if row.compared}


def document(
    directory: str, changes: list[str], facts: dict[str, Any], pace: Any, runs: dict[str, Figures], notes: list[str]
) -> dict[str, Any]:
    """Everything as plain values."""
    made: dict[str, Any] = {
        "directory": directory,
        "changes": changes,
        **facts,
        "pace": {**pace._asdict()},
        "runs": {name: dict(figures) for name, figures in runs.items()},
        "off": {"unchanged from recorded": compared(runs, UNCHANGED, RECORDED)},
        "notes": notes,
    }
    predicted = CHANGED if CHANGED in runs else UNCHANGED
    if RERUN in runs:
        made["off"][f"{predicted} from rerun"] = compared(runs, predicted, RERUN)
    return made


def show(found: dict[str, Any]) -> None:
    """Print the document."""
    console = Console(highlight=False)
    for line in _headline(found):
        console.print(line, soft_wrap=True, markup=False)
    print_table(console, _table(found))
    for name in sorted({name for run in found["runs"].values() for name in ("refusals", "ends") if run[name]}):
        for run, figures in found["runs"].items():
            if figures[name]:
                told = ", ".join(f"{count:,d} {code}" for code, count in figures[name].items())
                console.print(f"{name}, {run}: {told}", soft_wrap=True, markup=False)
    for note in found["notes"]:
        console.print(f"note: {note}", soft_wrap=True, markup=False)


def _headline(found: dict[str, Any]) -> list[str]:
    pace, arena = found["pace"], found["arena_bytes"]
    changed = f" -> {size(arena['changed'])}" if arena["changed"] != arena["recorded"] else ""
    parts = [f"{pace['fixed_ns'] / 1e6:,.2f} ms"]
    for name, what in (
        ("prompt_token_ns", "a prompt token"),
        ("decoding_row_ns", "a decoding request"),
        ("context_ns", "1,000 positions read"),
    ):
        if pace[name] > 0.5:
            parts.append(f"{pace[name] / 1e3:,.1f} us for {what}")
    paused = f", {pace['pauses']} pauses of {duration(pace['paused_ns'] / 1e6)} left out" if pace["pauses"] else ""
    return [
        f"{found['directory']}: {found['lives']} lives, {found['epochs']} epochs; an arena of "
        f"{size(arena['recorded'])}{changed} a rank; changed: {', '.join(found['changes']) or 'nothing'}",
        f"a forward takes {' + '.join(parts)} (fitted to {pace['forwards']:,d} reports, off by "
        f"{pace['error']:.1%} on the mean{paused}); idle ranks begin {pace['start_ns'] / 1e6:,.2f} ms behind a tick",
    ]


def _table(found: dict[str, Any]) -> Table:
    runs = found["runs"]
    predicted = CHANGED if CHANGED in runs else UNCHANGED
    table = Table(title="the same arrivals")
    table.add_column("", no_wrap=True)
    for name in runs:
        title = {UNCHANGED: "replayed\nunchanged", CHANGED: "replayed\nchanged", RERUN: "run for\nreal"}.get(name, name)
        table.add_column(title, justify="right", no_wrap=True)
        if name == UNCHANGED:
            table.add_column("off\nrecorded", justify="right", no_wrap=True)
        if name == RERUN:
            table.add_column(f"{predicted}\noff real", justify="right", no_wrap=True)
    errors = found["off"]
    for row in ROWS:
        cells = []
        for name, figures in runs.items():
            cells.append(row.write(value_of(figures, row)))
            if name == UNCHANGED:
                cells.append(_signed(errors["unchanged from recorded"].get(row.name), row))
            if name == RERUN:
                cells.append(_signed(errors[f"{predicted} from rerun"].get(row.name), row))
        table.add_row(row.name, *cells)
    return table


def _signed(part: float | None, row: Row) -> str:
    if not row.compared:
        return ""
    return "-" if part is None else f"{part:+.1%}"
