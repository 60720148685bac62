"""Requests: the table of live requests: its columns, orders and filter, as lines of text.

Owns the tables of columns and orders. Must never keep a place by index: who is selected is known by number, so that the
table may change under the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.text import Text

from daemon.core.overview import LiveRow
from tools.top.palette import (
    BAD,
    CURSOR,
    DIM,
    FAINT,
    HIT,
    STAGE_COLOURS,
    TEXT,
    TITLE,
    WARN,
    age,
    bar,
    fit,
    heading,
    share,
    short,
)
from tools.top.speak import stage_word, waits, waits_short
from tools.why.nouns import Bands

BAR_CELLS = 10
REASON = "progress / waits for"
Cell = tuple[str, str] | Text
Drawn = Callable[[LiveRow, Bands], Cell]


class Column(NamedTuple):
    """A column: its title, its width, a row's cell, and from which width of the table on it is shown.

    The last column takes the rest.
    """

    title: str
    width: int
    cell: Drawn
    shown_from: int = 0


def _stage(row: LiveRow, bands: Bands) -> Cell:
    return stage_word(row.stage), STAGE_COLOURS.get(row.stage, TEXT)


def _count(of: Callable[[LiveRow], int], style: str = TEXT) -> Drawn:
    return lambda row, bands: (short(of(row)), style) if of(row) else ("-", FAINT)


def _retractions(row: LiveRow, bands: Bands) -> Cell:
    return (str(row.retractions), BAD) if row.retractions else ("-", FAINT)


def _stands(row: LiveRow, bands: Bands) -> Cell:
    """What it waits for, and where in the queue; else how far it is: with its prompt, then with its longest output."""
    if row.waits_for or row.row < 0:
        place = f"{row.ahead + 1}. " if row.ahead >= 0 else ""
        return place + waits_short(row.waits_for, row.waits_numbers, bands), DIM
    if row.stage == "prefilling":
        done = f"{short(row.scheduled_tokens)} of {short(row.target_tokens)} of its prompt"
        return _progress(row.scheduled_tokens, row.target_tokens, STAGE_COLOURS["prefilling"], done)
    done = f"{share(row.output_tokens, row.max_output):>4} of {short(row.max_output)}"
    return _progress(row.output_tokens, row.max_output, STAGE_COLOURS["running"], done)


def _progress(part: int, whole: int, colour: str, told: str) -> Text:
    full = min(BAR_CELLS, round(BAR_CELLS * part / whole)) if whole else 0
    return Text.assemble(("━" * full, colour), ("─" * (BAR_CELLS - full), FAINT), (f" {told}", DIM))


COLUMNS = (
    Column("request", 9, lambda row, bands: (str(row.request), TITLE)),
    Column("state", 11, _stage),
    Column("age", 7, lambda row, bands: (age(row.age_ms), TEXT)),
    Column("prompt", 7, _count(lambda row: row.prompt_tokens)),
    Column("cached", 7, _count(lambda row: row.cached_tokens, HIT), 88),
    Column("output", 7, _count(lambda row: row.output_tokens)),
    Column("pages", 6, _count(lambda row: row.pages)),
    Column("shared", 7, _count(lambda row: row.shared_pages, DIM), 104),
    Column("prio", 5, lambda row, bands: (str(row.priority), TEXT if row.priority else FAINT), 112),
    Column("retr", 5, _retractions),
    Column("id", 30, lambda row, bands: (fit(row.id, 28), DIM), 144),
    Column(REASON, 0, _stands),
)
LEFT = ("state", "id", REASON)
BY_STATE = ("retracted", "requeued", "parked_row", "parked_chunk", "waiting", "prefilling", "running")
STAGES = {stage: place for place, stage in enumerate(BY_STATE)}

ORDERS: dict[str, tuple[str, Callable[[LiveRow], tuple[float, ...]]]] = {
    "age": ("age", lambda row: (-row.age_ms, row.request)),
    "tokens": ("output", lambda row: (-row.output_tokens, row.request)),
    "pages": ("pages", lambda row: (-row.pages, row.request)),
    "retractions": ("retr", lambda row: (-row.retractions, row.request)),
    "waiting": (REASON, lambda row: (row.row >= 0, row.ahead, row.request)),
    "state": ("state", lambda row: (STAGES.get(row.stage, 0), row.request)),
    "newest": ("request", lambda row: (-row.request,)),
}
"""Orders by name: over which column the mark stands, and the key; the first is the default."""


def arrange(rows: Sequence[LiveRow], order: str, wanted: str, bands: Bands, reverse: bool = False) -> list[LiveRow]:
    """Rows that the filter lets through, in order; the filter is a part of what is known of a row."""
    word = wanted.strip().lower()
    found = [row for row in rows if not word or word in _words(row, bands)]
    return sorted(found, key=ORDERS[order][1], reverse=reverse)


def _words(row: LiveRow, bands: Bands) -> str:
    reason = waits(row.waits_for, row.waits_numbers, bands) if row.waits_for else ""
    short_reason = waits_short(row.waits_for, row.waits_numbers, bands) if row.waits_for else ""
    words = (str(row.request), row.id, row.frontend, row.stage, stage_word(row.stage), reason, short_reason)
    return " ".join(words).lower()


def _shown(width: int) -> list[Column]:
    return [column for column in COLUMNS if width >= column.shown_from]


def head(live: int, told: int, shown: int, order: str, reverse: bool, wanted: str, width: int) -> list[Text]:
    """Two lines: the panel's heading, and the titles with a mark at the column of the order."""
    left = f"{shown:,} of {live:,} live" if shown < live else f"{live:,} live"
    if told < live:
        left += f"; {live - told:,} of the queue's end are not told"
    middle = Text(left, DIM)
    if wanted:
        middle.append(f"   / {wanted}", f"bold {WARN}")
    titles, mark = Text(no_wrap=True), ORDERS[order][0]
    for column in _shown(width):
        title = column.title + (("▲" if reverse else "▼") if column.title == mark else "")
        style = TEXT if column.title == mark else DIM
        titles.append(_aligned(title, column, width - titles.cell_len), style)
    return [heading("requests", middle, f"by {order}", width), titles]


def line(row: LiveRow, bands: Bands, width: int, selected: bool) -> Text:
    """One request."""
    text = Text(no_wrap=True)
    for column in _shown(width):
        cell = column.cell(row, bands)
        if isinstance(cell, Text):
            text.append_text(cell)
        else:
            text.append(_aligned(cell[0], column, width - text.cell_len), cell[1])
    text.truncate(width, overflow="ellipsis")
    return bar(text, CURSOR, width) if selected else text


def _aligned(text: str, column: Column, room: int) -> str:
    """A cell in its place: numbers to the right with a space behind them, words to the left."""
    if not column.width:
        return fit(text, room)
    if column.title in LEFT:
        return fit(text, column.width - 1).ljust(column.width)
    return text.rjust(column.width - 1) + " "
