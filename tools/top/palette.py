"""Palette: the colours of the view, and numbers in as few characters as they need.

Owns every colour and every unit. Must never know what is shown. Invariant: a text that is made here keeps its width for
every value of its kind that can occur, so that columns stand still.
"""

from __future__ import annotations

from rich.color import Color
from rich.text import Text

GROUND = "#10151b"
SURFACE = "#161d25"
CURSOR = "#26384a"
LINE = "#31414f"
TEXT = "#ccd6e0"
DIM = "#748797"
FAINT = "#3c4b59"
TITLE = "#8fd0ff"
GOOD = "#86d996"
WARN = "#f3c46b"
BAD = "#ff7b7b"
HOT = "#ff9e64"
HIT = "#4fcfa0"
PREFILL = "#6cc7f5"
STEP = "#d58cf0"
ENDED = "#6aa8ff"

STAGE_COLOURS = {
    "running": GOOD,
    "prefilling": PREFILL,
    "waiting": WARN,
    "retracted": BAD,
    "requeued": HOT,
    "parked_row": HOT,
    "parked_chunk": HOT,
}
WINDOW_COLOURS = ("#6aa8ff", "#57c7e3", "#9d8cff", "#4f8fd0")
BAND_COLOURS = {"state": "#d58cf0", "full": "#4fcfa0"}
SPARKS = "▁▂▃▄▅▆▇"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
COUNTS = ("", "k", "M", "G", "T")


def band_colour(name: str, place: int) -> str:
    """The colour of a band: by its kind, windows by their place in the chain."""
    return BAND_COLOURS.get(name) or WINDOW_COLOURS[(place - 1) % len(WINDOW_COLOURS)]


def blend(colour: str, share: float, ground: str = GROUND) -> str:
    """A colour faded into the ground; `share` 1 leaves it as it is."""
    over, under = (Color.parse(text).get_truecolor() for text in (colour, ground))
    parts = (round(under[at] + (over[at] - under[at]) * share) for at in range(3))
    return "#" + "".join(f"{part:02x}" for part in parts)


def size(count: float) -> str:
    """Bytes in at most 8 characters: three figures and a unit."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{_figures(value) if unit else f'{value:.0f}'} {UNITS[unit]}"


def short(count: float) -> str:
    """A count in at most 6 characters: exact below ten thousand, three figures above."""
    if abs(count) < 10_000:
        return f"{count:,.0f}"
    value, unit = float(count), 0
    while abs(value) >= 999.5 and unit < len(COUNTS) - 1:
        value, unit = value / 1000, unit + 1
    return _figures(value) + COUNTS[unit]


def rate(value: float | None) -> str:
    """A rate per second in at most 6 characters; a dash where it is not known."""
    if value is None:
        return "-"
    return _figures(value) if 0 < value < 99.95 else short(value)


def _figures(value: float) -> str:
    """Three figures."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def share(part: float, whole: float) -> str:
    """A percentage in at most 4 characters; a dash of nothing."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    return f"{percent:.1f}%" if 0.05 <= percent < 9.95 else f"{percent:.0f}%"


def age(milliseconds: float) -> str:
    """A time span in at most 6 characters."""
    seconds = milliseconds / 1000
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def milliseconds(value: float | None) -> str:
    """A short time in at most 7 characters; a dash where it is not known."""
    if value is None:
        return "-"
    return f"{_figures(value)} ms" if value < 999.5 else f"{_figures(value / 1000)} s"


def fit(text: str, width: int) -> str:
    """A text cut to a width, with a sign that it was."""
    if len(text) <= width:
        return text
    return text[: max(0, width - 1)] + "…" if width > 0 else ""


def sparkline(values: list[float | None], width: int, colour: str, top: float = 0.0) -> Text:
    """The newest `width` values as a line of bars, the newest to the right; nothing where there was none."""
    newest = values[-width:]
    most = max([top, *(value for value in newest if value is not None)], default=0.0)
    text = Text(" " * (width - len(newest)), no_wrap=True)
    for value in newest:
        if value is None:
            text.append("·", FAINT)
        elif value <= 0 or not most:
            text.append(SPARKS[0], FAINT)
        else:
            text.append(SPARKS[min(len(SPARKS) - 1, int(len(SPARKS) * value / most))], colour)
    return text


def beside(left: Text, right: Text, width: int) -> Text:
    """Two texts in one line, one at each end; the left one is cut where they would meet."""
    room = max(0, width - right.cell_len - 1)
    line = left.copy()
    line.truncate(room, overflow="ellipsis", pad=True)
    return Text.assemble(line, " ", right, no_wrap=True) if right.cell_len < width else line


def heading(title: str, middle: Text | str, right: Text | str, width: int) -> Text:
    """The first line of a panel: its name, what is said of it, and what stands over its right columns."""
    left = Text.assemble((title, f"bold {TITLE}"), "   ", Text(middle, DIM) if isinstance(middle, str) else middle)
    line = beside(left, Text(right, DIM) if isinstance(right, str) else right, width)
    return bar(line, SURFACE, width)


def bar(line: Text, colour: str, width: int) -> Text:
    """A line on a ground of its own, over the whole width."""
    found = line.copy()
    found.style = f"on {colour}"
    found.pad_right(max(0, width - found.cell_len))
    return found


def framed(lines: list[Text], width: int) -> list[Text]:
    """Lines that were made two cells narrower, with a margin of one at each side, on their own ground."""
    found = []
    for line in lines:
        wider = line.copy()
        wider.truncate(width - 2)
        wider.pad_left(1)
        wider.pad_right(max(0, width - wider.cell_len))
        found.append(wider)
    return found
