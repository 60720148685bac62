"""Tables that no terminal spoils.

Owns how a table is printed that is wider than the terminal: turned over, a column for each row, as many beside each
other as fit; where not even one does, each row as lines. Columns that fold (`overflow="fold"`) hold prose, which may be
wrapped; what the others hold never is. Must never cut anything off. What is no terminal and has no COLUMNS is as wide
as the table.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

WIDTH = 1000  # wider than any table
PROSE = 24  # characters at which prose can be read
GAP = 2  # between a name and its cell


def print_table(console: Console, table: Table) -> None:
    """Print a table, its title above it."""
    if table.title:
        console.print(f"\n{table.title}", soft_wrap=True, markup=False, highlight=False)
        table.title = None
    prose = [column for column in table.columns if column.overflow == "fold" and not column.no_wrap]
    for column in table.columns:
        column.no_wrap = column not in prose
    needed = wide(console, table)
    if not (console.is_terminal or "COLUMNS" in os.environ) or needed <= console.width:
        _print(console, table, needed)
    elif prose and needed - sum(map(_spare, prose)) <= console.width:
        console.print(table)
    elif prose or not all(wide(console, _over(table, [row])) <= console.width for row in _rows(table)):
        for line in stacked(table, console.width):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    else:
        for part in turned(console, table):
            _print(console, part)


def wide(console: Console, table: Table) -> int:
    """Characters that a table needs."""
    return Measurement.get(console, console.options.update(width=WIDTH, max_width=WIDTH), table).maximum


def turned(console: Console, table: Table) -> Iterator[Table]:
    """The table's rows as columns of tables that fit, if one row does."""
    rows = _rows(table)
    while rows:
        count = len(rows)
        while count > 1 and wide(console, _over(table, rows[:count])) > console.width:
            count -= 1
        yield _over(table, rows[:count])
        rows = rows[count:]


def stacked(table: Table, width: int) -> Iterator[str]:
    """Every row as lines of a name and a cell, wrapped between words; no line of an empty cell.

    A table of two columns is one line a row, with the first cell as the name.
    """
    if len(table.columns) == 2:
        for name, cell in _rows(table):
            yield from textwrap.wrap(f"{name}: {cell}", width, subsequent_indent=" " * GAP, break_on_hyphens=False)
        return
    names = _names(table)
    longest = max(map(len, names)) + GAP
    beside = longest + PROSE <= width
    for number, row in enumerate(_rows(table)):
        if number:
            yield ""
        for name, cell in zip(names, row, strict=True):
            head = f"{name:<{longest}}" if beside else f"{name}: " if name else ""
            indent = " " * (longest if beside else GAP)
            if cell.strip():
                yield from textwrap.wrap(head + cell, width, subsequent_indent=indent, break_on_hyphens=False)


def _names(table: Table) -> list[str]:
    """Heads, which may be on several lines, in one."""
    return [" ".join(_plain(column.header).replace("-\n", "").split()) for column in table.columns]


def _rows(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*([_plain(cell) for cell in column.cells] for column in table.columns), strict=True))


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def _spare(column: Column) -> int:
    """Characters that prose can do without."""
    return max(0, max(len(_plain(cell)) for cell in (column.header, *column.cells)) - PROSE)


def _over(table: Table, rows: Sequence[tuple[str, ...]]) -> Table:
    """Rows as columns; the first cell of each heads its own."""
    names = _names(table)
    over = Table(names[0])
    for row in rows:
        over.add_column(Text(row[0]), justify="right", no_wrap=True)
    for name, *cells in list(zip(names, *rows, strict=True))[1:]:
        over.add_row(Text(name), *map(Text, cells))
    return over


def _print(console: Console, table: Table, needed: int = 0) -> None:
    before = console.width
    console.width = max(needed or wide(console, table), before)
    console.print(table)
    console.width = before
