"""Tables that no terminal spoils.

Owns how a table that is wider than the terminal is printed: turned over, a column for each row, as many beside each
other as fit. Must never cut a figure off. What is no terminal and has no COLUMNS is as wide as the table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDTH = 1000  # wider than any table


def print_table(console: Console, table: Table) -> None:
    """Print a table, its title above it."""
    if table.title:
        console.print(f"\n{table.title}", soft_wrap=True, markup=False, highlight=False)
        table.title = None
    told = console.is_terminal or "COLUMNS" in os.environ
    whole = not told or wide(console, table) <= console.width
    for part in [table] if whole else turned(console, table):
        before = console.width
        console.width = max(wide(console, part), before)
        console.print(part)
        console.width = before


def wide(console: Console, table: Table) -> int:
    """Characters that a table needs."""
    return Measurement.get(console, console.options.update(width=WIDTH, max_width=WIDTH), table).maximum


def turned(console: Console, table: Table) -> Iterator[Table]:
    """The table's rows as columns of tables that fit; one that has a single row does so or not."""
    names = [" ".join(str(column.header).split()) for column in table.columns]
    rows = list(zip(*(list(column.cells) for column in table.columns), strict=True))
    while rows:
        count = len(rows)
        while count > 1 and wide(console, _over(names, rows[:count])) > console.width:
            count -= 1
        yield _over(names, rows[:count])
        rows = rows[count:]


def _over(names: list[str], rows: list[tuple[object, ...]]) -> Table:
    """The first cell of each row heads its column."""
    table = Table(names[0])
    for row in rows:
        table.add_column(str(row[0]), justify="right", no_wrap=True)
    for name, *cells in list(zip(names, *rows, strict=True))[1:]:
        table.add_row(str(name), *(str(cell) for cell in cells))
    return table
