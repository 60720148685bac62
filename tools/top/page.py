"""Page: how much room each panel gets, and one frame of the whole as lines.

Owns the division of the screen. Must never draw more lines than there are. Invariant: the same history in the same room
gives the same frame, on a terminal, in a picture and as text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from daemon.core.overview import LiveRow
from tools.top import arena, decisions, figures, requests
from tools.top.history import History
from tools.top.palette import framed

Draw = Callable[[int, int], list[Text]]

RATES_LINES = 5
DECISIONS_SHARE = 4  # one line in so many of what arena, rates and head leave
DECISIONS_LEAST = 3  # heading included
TABLE_LEAST = 6
SPACIOUS_FROM = 36  # lines from which panels stand apart
WIDTH_LEAST, LINES_LEAST = 40, 12  # of a frame in which every panel says something


@dataclass(slots=True)
class Wishes:
    """What the reader chose."""

    order: str = next(iter(requests.ORDERS))
    reverse: bool = False
    wanted: str = ""
    scarce_only: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Division:
    """Lines of each panel; `gap` lines stand between two of them."""

    head: int
    rates: int
    arena: int
    requests: int
    decisions: int
    gap: int


def too_small(width: int, height: int) -> str:
    """What a terminal of this size lacks for a frame; nothing where it is large enough."""
    if width < WIDTH_LEAST:
        return f"too narrow: {width} columns, needs {WIDTH_LEAST}"
    return f"too low: {height} lines, needs {LINES_LEAST}" if height < LINES_LEAST else ""


def divide(history: History, width: int, height: int) -> Division:
    """The division of a screen."""
    gap = 1 if height >= SPACIOUS_FROM else 0
    head = len(figures.head(history, width, paused=False))
    stages = history.watched.stages if history.watched is not None else []
    left = height - head - RATES_LINES - 4 * gap
    room = max(2, left - TABLE_LEAST - DECISIONS_LEAST)
    memory = len(arena.lines(stages, width, room))
    left -= memory
    told = max(DECISIONS_LEAST, left // DECISIONS_SHARE)
    return Division(head, RATES_LINES, memory, max(0, left - told), told, gap)


class Page:
    """The panels by name, each as a function of the room that it has; what is drawn is set from outside."""

    def __init__(self, history: History, wishes: Wishes) -> None:
        self.history = history
        self.wishes = wishes
        self.selected = 0  # a request's number
        self.top_row = 0
        self.panels: dict[str, Draw] = {
            "head": lambda width, height: figures.head(self.history, width, self.wishes.paused),
            "rates": lambda width, height: figures.rates(self.history, width),
            "arena": self._arena,
            "requests": self._table,
            "decisions": self._decisions,
        }

    def panel(self, name: str, width: int, height: int) -> list[Text]:
        """One panel in its room."""
        return framed(self.panels[name](width - 2, height), width)[:height]

    def frame(self, width: int, height: int) -> list[Text]:
        """One frame, every panel of it; where there is no room for them, one line that says so."""
        lack = too_small(width, height)
        if lack:
            return [Text(lack)]
        part, found = divide(self.history, width - 2, height), list[Text]()
        for name in self.panels:
            found += self.panel(name, width, getattr(part, name)) + [Text("")] * part.gap
        return found[:height]

    def rows(self) -> list[LiveRow]:
        """The requests of the table, in order."""
        watched, wishes = self.history.watched, self.wishes
        rows = watched.requests if watched is not None else []
        return requests.arrange(rows, wishes.order, wishes.wanted, self.history.bands, wishes.reverse)

    def _arena(self, width: int, height: int) -> list[Text]:
        watched = self.history.watched
        return arena.lines(watched.stages if watched is not None else [], width, height)

    def _table(self, width: int, height: int) -> list[Text]:
        watched, wishes, shown = self.history.watched, self.wishes, self.rows()
        told = len(watched.requests) if watched is not None else 0
        live = watched.gauges.get("live", 0) if watched is not None else 0
        found = requests.head(live, told, len(shown), wishes.order, wishes.reverse, wishes.wanted, width)
        for row in shown[self.top_row : self.top_row + max(0, height - len(found))]:
            found.append(requests.line(row, self.history.bands, width, row.request == self.selected))
        return (found + [Text("")] * height)[:height]

    def _decisions(self, width: int, height: int) -> list[Text]:
        history = self.history
        now_ns = history.watched.now_ns if history.watched is not None else 0
        return decisions.newest(history.told, history.bands, now_ns, width, height, self.wishes.scarce_only)
