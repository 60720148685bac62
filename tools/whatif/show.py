"""The answer of a what-if: its document and the tables of it.

Owns how it looks. Must never compute a figure. A column is a run, and behind those that another one judges how far they
are off; `±` is a figure's bar, and `!` says that what judges it lies outside of that.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from tools.simulate.show import duration, size
from tools.tables import print_table
from tools.whatif.account import Figures
from tools.whatif.bars import bars, outside
from tools.whatif.pace import STRETCH, Pace
from tools.whatif.rows import CHANGED, PACED, RERUN, ROWS, TRUTHS, UNCHANGED, Row, compared, value_of

TITLES = {
    UNCHANGED: "replayed\nunchanged",
    CHANGED: "replayed\nchanged",
    RERUN: "run for\nreal",
    PACED: "replayed at\nits pace",
}


LEAST_SHOWN_NS = 50.0


def document(
    directory: str,
    changes: list[str],
    facts: dict[str, Any],
    paces: dict[str, Pace],
    runs: dict[str, Figures],
    notes: list[str],
) -> dict[str, Any]:
    """Everything as plain values; in `off`, by run, how far each figure of it is off the run `from`, in `bars` its bar,
    and in `outside` the figures that are off by more than that."""
    truths = {name: truth for name, truth in TRUTHS.items() if name in runs and truth in runs}
    return {
        "directory": directory,
        "changes": changes,
        **facts,
        "paces": {name: _numbers(pace) for name, pace in paces.items()},
        "runs": {name: dict(figures) for name, figures in runs.items()},
        "off": {one: {"from": truth, **compared(runs, one, truth)} for one, truth in truths.items()},
        "bars": bars(runs),
        "outside": {one: [row.name for row in ROWS if row.compared and outside(runs, one, row)] for one in truths},
        "notes": notes,
    }


def _numbers(pace: Pace) -> dict[str, Any]:
    return {name: value for name, value in pace._asdict().items() if name not in ("off_ns", "at_ns")}


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
    warm = f", an epoch's first takes {duration(pace['warm_ns'] / 1e6)} more" if pace["warm_ns"] else ""
    paused = f"; {pace['pauses']} pauses of {duration(pace['paused_ns'] / 1e6)} left out" if pace["pauses"] else ""
    return (
        f"{name}: a forward takes {' + '.join(parts)} (fitted to {pace['forwards']:,d} reports, single ones are off by "
        f"{pace['error']:.1%}, {STRETCH} in a row by {pace['stretch']:.1%}{paused}){warm}; idle ranks "
        f"begin {pace['start_ns'] / 1e6:,.2f} ms behind a tick, which comes {pace['turn_ns'] / 1e6:,.2f} ms behind "
        "what allows it"
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
        for name in runs:
            cells.append(with_bar(found, name, row))
            if name in off_by:
                cells.append(judged(found, name, row))
        table.add_row(row.name, *cells)
    return table


def with_bar(found: dict[str, Any], name: str, row: Row) -> str:
    """A figure of a run, and its bar as a part of it, where that can be seen."""
    bar, value = found["bars"].get(name, {}).get(row.name, 0.0), value_of(found["runs"][name], row)
    text = row.write(value)
    if not value or text == row.write(value + bar) == row.write(max(value - bar, 0.0)):
        return text
    return f"{text} \u00b1{bar / value:.0%}"


def judged(found: dict[str, Any], name: str, row: Row) -> str:
    """How far a figure is off the run that judges it, with a mark where that is outside of its bar."""
    if not row.compared:
        return ""
    part = found["off"][name].get(row.name)
    mark = " !" if row.name in found["outside"][name] else ""
    return ("-" if part is None else f"{part:+.1%}") + mark
