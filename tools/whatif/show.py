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
from tools.whatif.pace import Pace

RECORDED, UNCHANGED, CHANGED, RERUN = "recorded", "unchanged", "changed", "rerun"
PACED = "at the rerun's pace"
TITLES = {
    UNCHANGED: "replayed\nunchanged",
    CHANGED: "replayed\nchanged",
    RERUN: "run for\nreal",
    PACED: "replayed at\nits pace",
}


LEAST_SHOWN_NS = 50.0


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
    directory: str,
    changes: list[str],
    facts: dict[str, Any],
    paces: dict[str, Pace],
    runs: dict[str, Figures],
    notes: list[str],
) -> dict[str, Any]:
    """Everything as plain values; in `off`, by run, how far each figure of it is off the run `from`."""
    truths = {UNCHANGED: RECORDED}
    if RERUN in runs:
        truths |= {name: RERUN for name in (CHANGED, PACED) if name in runs}
    return {
        "directory": directory,
        "changes": changes,
        **facts,
        "paces": {name: pace._asdict() for name, pace in paces.items()},
        "runs": {name: dict(figures) for name, figures in runs.items()},
        "off": {one: {"from": truth, **compared(runs, one, truth)} for one, truth in truths.items()},
        "notes": notes,
    }


def show(found: dict[str, Any]) -> None:
    """Print the document."""
    console = Console(highlight=False)
    for line in _headline(found):
        console.print(line, soft_wrap=True, markup=False)
    print_table(console, _table(found))
    for name in sorted({name for run in found["runs"].values() for name in ("refusals", "ends") if run[name]}):
        for run, figures in found["runs"].items():
            if figures[name]:
                told = ", ".join(f"{count:,.10g} {code}" for code, count in figures[name].items())
                console.print(f"{name}, {run}: {told}", soft_wrap=True, markup=False)
    for note in found["notes"]:
        console.print(f"note: {note}", soft_wrap=True, markup=False)


def _headline(found: dict[str, Any]) -> list[str]:
    arena = found["arena_bytes"]
    changed = f" -> {size(arena['changed'])}" if arena["changed"] != arena["recorded"] else ""
    lines = [
        f"{found['directory']}: {_many(found['lives'], 'life', 'lives')}, {_many(found['epochs'], 'epoch', 'epochs')}; "
        f"an arena of {size(arena['recorded'])}{changed} a rank; changed: {', '.join(found['changes']) or 'nothing'}",
    ]
    return lines + [_pace(name, pace) for name, pace in found["paces"].items()]


def _many(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def _pace(name: str, pace: dict[str, Any]) -> str:
    parts = [f"{pace['fixed_ns'] / 1e6:,.2f} ms"]
    for part, what in (
        ("prompt_token_ns", "a prompt token"),
        ("decoding_row_ns", "a decoding request"),
        ("context_ns", "1,000 positions read"),
    ):
        if pace[part] >= LEAST_SHOWN_NS:
            parts.append(f"{pace[part] / 1e3:,.1f} us for {what}")
    paused = f"; {pace['pauses']} pauses of {duration(pace['paused_ns'] / 1e6)} left out" if pace["pauses"] else ""
    return (
        f"{name}: a forward takes {' + '.join(parts)} (fitted to {pace['forwards']:,d} reports, single ones are off by "
        f"{pace['error']:.1%}{paused}); idle ranks begin {pace['start_ns'] / 1e6:,.2f} ms behind a tick, which comes "
        f"{pace['turn_ns'] / 1e6:,.2f} ms behind what allows it"
    )


def _table(found: dict[str, Any]) -> Table:
    """A column for each run, and behind those that are compared how far they are off."""
    runs, off_by = found["runs"], found["off"]
    table = Table(title="the same arrivals")
    table.add_column("", no_wrap=True)
    for name in runs:
        table.add_column(TITLES.get(name, name), justify="right", no_wrap=True)
        if name in off_by:
            table.add_column(
                f"off\n{'real' if off_by[name]['from'] == RERUN else 'recorded'}", justify="right", no_wrap=True
            )
    for row in ROWS:
        cells = []
        for name, figures in runs.items():
            cells.append(row.write(value_of(figures, row)) + _apart(figures, row))
            if name in off_by:
                cells.append(_signed(off_by[name].get(row.name), row))
        table.add_row(row.name, *cells)
    return table


def _apart(figures: dict[str, Any], row: Row) -> str:
    """How far several replays lie apart, where that can be seen: half of it, as a part of their mean."""
    found: Any = figures.get("spread")
    for name in row.path if found is not None else ():
        found = found[name]
    if not found or row.write(found[0]) == row.write(found[1]):
        return ""
    return f" \u00b1{(found[1] - found[0]) / (found[1] + found[0]):.0%}"


def _signed(part: float | None, row: Row) -> str:
    if not row.compared:
        return ""
    return "-" if part is None else f"{part:+.1%}"
