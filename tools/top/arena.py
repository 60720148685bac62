"""Arena: the memory of each stage as strips, one over all bands and one for each band, on one scale of bytes.

Owns how units become cells. Must never draw places: a strip shows how much there is of a kind, not where it lies.
Invariants: the parts of a stage add up to its arena; a strip has exactly as many cells as it is wide; what is held
or cached at all has at least one cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from daemon.watch import WatchedBand, WatchedStage
from tools.top.palette import BAD, DIM, FAINT, TEXT, WARN, band_colour, blend, fit, heading, share, short, size

LIVE, CACHED, HOLE, PENDING, FREE, FIXED = "█", "▓", "░", "▒", "·", "▐"
LEGEND = (
    (LIVE, "held by requests", TEXT),
    (CACHED, "cached, reclaimable", blend(TEXT, 0.55)),
    (PENDING, "pending", WARN),
    (HOLE, "hole", BAD),
    (FREE, "free", DIM),
)
SHORT_LEGEND = tuple((sign, word.split(",")[0].split(" ")[0], style) for sign, word, style in LEGEND)
LABEL_CELLS = 13
ALL_COLUMNS_FROM = 104  # cells of a line


@dataclass(frozen=True, slots=True)
class Units:
    """The units of one band on one stage by what they are now; every unit is exactly one of these."""

    held: int
    cached: int
    hole: int
    pending: int
    beyond: int

    @property
    def used(self) -> int:
        """Units inside the band's span that hold something or will soon be free."""
        return self.held + self.cached + self.hole + self.pending


def units_of(band: WatchedBand) -> Units:
    """The counts of a band; what requests and the cache share counts as held.

    The ranks' counts are a step behind the books of the cache, so the cached share is cut to what is live.
    """
    cached = min(band.reclaimable, band.live)
    return Units(band.live - cached, cached, band.hole, band.pending, band.beyond)


def cells(amounts: Sequence[float], width: int) -> list[int]:
    """Shares of `width` by largest remainder; everything above zero gets a cell, as long as there are enough."""
    whole = sum(amounts)
    if not whole or width <= 0:
        return [0] * len(amounts)
    exact = [amount / whole * width for amount in amounts]
    given = [max(int(value), 1) if amount > 0 else 0 for value, amount in zip(exact, amounts, strict=True)]
    while sum(given) > width:
        most = max(range(len(given)), key=lambda at: (given[at] - exact[at], given[at]) if given[at] > 1 else (-9e9, 0))
        if given[most] <= 1:
            break
        given[most] -= 1
    while sum(given) < width:
        least = max(range(len(given)), key=lambda at: exact[at] - given[at] if amounts[at] > 0 else -9e9)
        given[least] += 1
    while sum(given) > width:  # more kinds than cells
        given[max(at for at, count in enumerate(given) if count)] -= 1
    return given


def _strip(parts: Sequence[tuple[float, str, str]], width: int) -> Text:
    """Parts (amount, sign, style) as a line of cells; pending units and holes only where they fill half a cell."""
    text, whole = Text(no_wrap=True), sum(part[0] for part in parts)
    amounts = [0.0 if sign in (HOLE, PENDING) and 2 * width * part < whole else part for part, sign, _ in parts]
    for (_, sign, style), count in zip(parts, cells(amounts, width), strict=True):
        text.append(sign * count, style)
    return text


def _band_parts(band: WatchedBand, place: int) -> list[tuple[float, str, str]]:
    units, colour = units_of(band), band_colour(band.name, place)
    return [
        (units.held * band.unit_bytes, LIVE, colour),
        (units.cached * band.unit_bytes, CACHED, blend(colour, 0.55)),
        (units.pending * band.unit_bytes, PENDING, WARN),
        (units.hole * band.unit_bytes, HOLE, BAD),
    ]


def used_bytes(stage: WatchedStage) -> int:
    """Bytes of an arena inside the spans of its bands, and fixed ones."""
    return stage.fixed_bytes + sum(units_of(band).used * band.unit_bytes for band in stage.bands)


def stage_strip(stage: WatchedStage, width: int) -> Text:
    """Everything of one stage, band after band, then what is free."""
    fixed = stage.fixed_bytes if stage.fixed_bytes * width >= stage.arena_bytes else 0  # a sink needs no cell
    parts: list[tuple[float, str, str]] = [(fixed, FIXED, FAINT)]
    for place, band in enumerate(stage.bands):
        parts += _band_parts(band, place)
    parts.append((max(0, stage.arena_bytes - used_bytes(stage)), FREE, FAINT))
    return _strip(parts, width)


def band_strip(stage: WatchedStage, place: int, width: int) -> Text:
    """One band on the scale of its stage's arena: the rest of the line is what other bands have, or what is free."""
    parts = _band_parts(stage.bands[place], place)
    parts.append((max(0, stage.arena_bytes - sum(part[0] for part in parts)), FREE, FAINT))
    return _strip(parts, width)


class Column:
    """A figure behind a band's strip: its title, its width, and its text and style for the units of a band."""

    def __init__(self, title: str, width: int, of_band: Callable[[Units, int], tuple[str, str]]) -> None:
        self.title, self.width, self.of_band = title, width, of_band


def _count(of: Callable[[Units], int], style: str, zero: str = DIM) -> Callable[[Units, int], tuple[str, str]]:
    return lambda units, unit_bytes: (short(of(units)), style if of(units) else zero)


COLUMNS = (
    Column("bytes", 9, lambda units, unit_bytes: (size(units.used * unit_bytes), TEXT)),
    Column("held", 7, _count(lambda units: units.held, TEXT)),
    Column("cached", 7, _count(lambda units: units.cached, blend(TEXT, 0.75))),
    Column("pending", 8, _count(lambda units: units.pending, WARN)),
    Column("holes", 7, _count(lambda units: units.hole, BAD)),
    Column("beyond", 7, _count(lambda units: units.beyond, DIM)),
)
NARROW_COLUMNS = 3


def lines(stages: Sequence[WatchedStage], width: int, height: int) -> list[Text]:
    """The panel: each stage with its bands where there is room, else one line for each stage."""
    columns = COLUMNS if width >= ALL_COLUMNS_FROM else COLUMNS[:NARROW_COLUMNS]
    titles = "".join(column.title.rjust(column.width) for column in columns)
    sizes, figures = _sizes(stages), "used".rjust(5) + titles
    legend = _legend(width - len("arena") - 3 - sizes.cell_len - len(figures) - 1)
    found = [heading("arena", Text.assemble(sizes, legend), figures, width)]
    if not stages:
        return [*found, Text("no memory yet: the ranks are not ready", DIM)]
    whole = 1 + sum(1 + sum(band.unit_bytes > 0 for band in stage.bands) for stage in stages) <= height
    for at, stage in enumerate(stages):
        found.append(_stage_line(stage, at, columns, width))
        for place, band in enumerate(stage.bands if whole else ()):
            if band.unit_bytes:
                found.append(_band_line(stage, place, columns, width))
    return found[:height]


def _sizes(stages: Sequence[WatchedStage]) -> Text:
    """How large the arenas are."""
    sizes = sorted({stage.arena_bytes for stage in stages})
    if not sizes:
        return Text()
    words = size(sizes[0]) if len(sizes) == 1 else f"{size(sizes[0])} to {size(sizes[-1])}"
    return Text(words + (" each   " if len(stages) > 1 else "   "), TEXT)


def _legend(room: int) -> Text:
    """The signs and what they mean, in as many words as there is room for."""
    for said in (LEGEND, SHORT_LEGEND, SHORT_LEGEND[:4], SHORT_LEGEND[:3], SHORT_LEGEND[:2]):
        text = Text(no_wrap=True)
        for sign, word, style in said:
            text.append(sign, style)
            text.append(f" {word}  ", DIM)
        text.right_crop(2)
        if text.cell_len <= room:
            break
    return text


def _stage_line(stage: WatchedStage, at: int, columns: Sequence[Column], width: int) -> Text:
    """A stage: what is used, in bytes, and the share of each kind in the columns of the bands' units."""
    used, whole = used_bytes(stage), stage.arena_bytes
    told = Text(f"{share(used, whole):>5}{size(used):>{columns[0].width}}", TEXT)
    for column, amount in zip(columns[1:], shares_bytes(stage), strict=False):
        told.append(share(amount, whole).rjust(column.width), TEXT if amount else DIM)
    return _joined(f"stage {at}", TEXT, lambda cells: stage_strip(stage, cells), told, width)


def shares_bytes(stage: WatchedStage) -> tuple[int, int, int, int, int]:
    """Bytes of a stage that are held, cached, pending, in holes and free, over all bands."""
    rows = [(units_of(band), band.unit_bytes) for band in stage.bands]
    held, cached, pending, holes = (
        sum(getattr(units, name) * unit_bytes for units, unit_bytes in rows)
        for name in ("held", "cached", "pending", "hole")
    )
    return held, cached, pending, holes, max(0, stage.arena_bytes - used_bytes(stage))


def _band_line(stage: WatchedStage, place: int, columns: Sequence[Column], width: int) -> Text:
    band = stage.bands[place]
    units = units_of(band)
    told = Text(f"{share(units.used * band.unit_bytes, stage.arena_bytes):>5}", TEXT)
    for column in columns:
        text, style = column.of_band(units, band.unit_bytes)
        told.append(text.rjust(column.width), style)
    name = fit(f" {band.name}", LABEL_CELLS - 1)
    return _joined(name, band_colour(band.name, place), lambda cells: band_strip(stage, place, cells), told, width)


def _joined(label: str, style: str, strip: Callable[[int], Text], told: Text, width: int) -> Text:
    return Text.assemble(
        (label.ljust(LABEL_CELLS), style),
        strip(max(4, width - LABEL_CELLS - told.cell_len - 1)),
        " ",
        told,
        no_wrap=True,
    )
