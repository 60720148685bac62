"""Benchmark rows as tables for people: one small table a pool, both sides beside each other, nothing cut off.

Owns the layout. Must never shorten a number: where a terminal is narrower than a table, its lines wrap. Figures are
thread CPU microseconds; wall times, calls and bytes are in the JSON rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tools.tables import print_table

Row = dict[str, Any]
POOL = ("pool", "slots", "page_size", "running")
TIMES = ("cpu_us_p50", "cpu_us_p99")
RELIEF = {
    "moved_units_p50": "moved\nunits",
    "cpu_us_per_unit_moved": "us per\nunit",
    "bytes_over_least": "bytes/\nleast",
}


def show(console: Console, rows: list[Row]) -> None:
    """Every row, part by part and pool by pool, and below each part what its ops count."""
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        for pool in dict.fromkeys(tuple(row.get(name) for name in POOL) for row in mine):
            here = [row for row in mine if tuple(row.get(name) for name in POOL) == pool]
            print_table(console, memory_table(here) if part == "memory" else times_table(part, here))
        for line in dict.fromkeys(f"{row['op'].removeprefix('relief_')}: {row['counts']}" for row in mine):
            console.print(line, style="dim", highlight=False)
        console.print()


def times_table(part: str, rows: list[Row]) -> Table:
    """One line per op: units of a call, and median and p99 of each side."""
    first = rows[0]
    title = f"{part}: {first['pool']}, {first['slots']:,d} slots, page {first['page_size']}"
    title += f", {first['running']:,d} running" if "running" in first else ""
    sides = [side for side in ("logical", "mirror", "physical") if any(row["side"] == side for row in rows)]
    relief = part == "relief"
    shown = [(side, name) for side in sides for name in TIMES if not relief or side == "physical" or name == TIMES[0]]
    heads = [f"{side}\n{name[-3:]}" for side, name in shown]
    table = _table(title, ["op", "units", *heads, *(RELIEF.values() if relief else ())])
    for op in dict.fromkeys(row["op"] for row in rows):
        found = {row["side"]: row for row in rows if row["op"] == op}
        cells = [op.removeprefix("relief_"), _cell(max(row["units_p50"] for row in found.values()))]
        cells += [_cell(found.get(side, {}).get(name)) for side, name in shown]
        cells += [_cell(found.get("physical", {}).get(name)) for name in RELIEF if relief]
        table.add_row(*cells)
    return table


def memory_table(rows: list[Row]) -> Table:
    """One line per model and arena: bytes of both chains and their share."""
    heads = ["model", "arena\nGiB", "logical\nKiB", "physical\nKiB", "share\n%"]
    table = _table("memory of the books, page 16", heads)
    for key in dict.fromkeys((row["model"], row["arena_gib"]) for row in rows):
        found = {row["side"]: row for row in rows if (row["model"], row["arena_gib"]) == key}
        sizes = [found[side]["columns_bytes"] + found[side]["other_bytes"] for side in ("logical", "physical")]
        table.add_row(
            key[0], str(key[1]), *(_cell(-(-size // 1024)) for size in sizes), _cell(found["both"]["share_percent"])
        )
    return table


def _table(title: str, heads: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,d}" if isinstance(value, int) else str(value)
