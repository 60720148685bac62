"""Screens: what lies over the page for a while: the life of one request, and the keys and words.

Owns both. Must never ask the daemon by themselves: a life is asked for by the application, and handed in.
"""

from __future__ import annotations

from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from daemon.watch import WatchedLife
from tools.top import decisions
from tools.top.palette import DIM, TEXT, TITLE, WARN, band_colour, blend
from tools.top.requests import ORDERS
from tools.why.nouns import Bands

BOX_SHARE, BOX_CELLS_MAX, WORD_CELLS = 0.9, 130, 13
KEYS = (
    ("↑ ↓ j k", "choose a request; also PgUp, PgDn, Home, End and the mouse"),
    ("Enter", "the life of that request: every decision about it, in sentences"),
    ("/", "filter: a part of its number, id, front end, state or of what it waits for; Esc clears it"),
    ("s S", f"the next order of the table, the other way round ({', '.join(ORDERS)})"),
    ("d", "all decisions, or only those that tell of scarcity, refusal or failure"),
    ("p Space", "pause the picture; the daemon goes on"),
    ("+ -", "ask more or less often"),
    ("q Ctrl-C", "leave; the daemon does not notice"),
)
WORDS = (
    ("arena", "the memory that every kind of request state shares, one for each pipeline stage"),
    ("band", "one kind's part of it: pages of full attention, pages of a window of N tokens, slots of recurrent state"),
    ("held", "units that requests own or read at the moment"),
    ("cached", "units of the prefix cache that nobody reads: given up when somebody needs room"),
    ("pending", "freed, and reusable as soon as no forward in flight can touch it"),
    ("holes", "free units between used ones"),
    ("beyond", "units outside the band's span: room that it can take as long as no other band does"),
    ("step", "from the launch of a forward to its tokens on the host, on the slowest rank"),
    ("cache hits", "of the tokens looked up when requests started, those that were not computed again"),
    ("retr", "retractions: the request gave all its memory back, keeps its output and waits again"),
    ("parked", "it keeps its memory and makes no progress until there is room"),
    ("epoch", "one life of the device memory; a new one begins when ranks were lost"),
    (
        "life",
        "one run of the daemon's process; requests go on over lives. Totals are of this life alone, and the lives "
        "seen are those that this view met; `bandmaster replay check` tells all that the journal has",
    ),
    ("recovered", "requests of earlier lives that go on in this one; they were accepted then"),
    (
        "requeued",
        "it lost its place with its ranks, or made way for a trial after that, keeps its output and waits again",
    ),
)


class LifeScreen(ModalScreen[None]):
    """The life of one request; it is drawn anew whenever more is known."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "back"),
        Binding("home", "home", show=False),
        Binding("end", "end", show=False),
    ]

    def __init__(self, request: int, where: str) -> None:
        super().__init__()
        self.request = request
        self._where = where
        self._told: WatchedLife | None = None
        self._known = False
        self._bands: Bands = ()

    def compose(self) -> ComposeResult:
        """A box that scrolls."""
        with VerticalScroll(id="box"):
            yield Static("asking the daemon", id="told")

    def on_mount(self) -> None:
        """Name the box."""
        box = self.query_one("#box")
        box.border_title = f"request {self.request}"
        box.border_subtitle = "Esc back"

    def show(self, told: WatchedLife | None, bands: Bands) -> None:
        """What is known now; nothing any more leaves what was shown."""
        if told is None and self._known:
            return
        self._known, self._told, self._bands = True, told, bands
        self._draw()

    def on_resize(self) -> None:
        """Lines are cut to the width."""
        if self._known:
            self._draw()

    def _draw(self) -> None:
        width = max(40, self.query_one("#box").content_size.width - 1)
        lines = decisions.life(self._told, self.request, self._bands, width, self._where)
        self.query_one("#told", Static).update(Group(*lines))

    def action_home(self) -> None:
        """To the beginning."""
        self.query_one("#box").scroll_home(animate=False)

    def action_end(self) -> None:
        """To the newest."""
        self.query_one("#box").scroll_end(animate=False)


class HelpScreen(ModalScreen[None]):
    """Keys, words and signs."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter,h", "dismiss", "back")]

    def __init__(self, bands: Bands, answer_us: int, interval_s: float) -> None:
        super().__init__()
        self._bands, self._answer_us, self._interval_s = bands, answer_us, interval_s

    def compose(self) -> ComposeResult:
        """A box that scrolls."""
        with VerticalScroll(id="box"):
            yield Static(self._text())

    def on_mount(self) -> None:
        """Name the box."""
        box = self.query_one("#box")
        box.border_title, box.border_subtitle = "keys and words", "Esc back"

    def _text(self) -> Group:
        width = max(40, min(BOX_CELLS_MAX, round(self.app.size.width * BOX_SHARE)) - 8)
        lines = [line for key, text in KEYS for line in _explained(key, f"bold {TITLE}", text, width)]
        lines.append(Text(""))
        lines += [line for word, text in WORDS for line in _explained(word, f"bold {WARN}", text, width)]
        lines.append(Text(""))
        for place, name in enumerate(self._bands[0] if self._bands else ()):
            colour = band_colour(name, place)
            signs = Text.assemble(("████", colour), ("▓▓▓▓", blend(colour, 0.55)), "  ")
            lines.append(Text.assemble(signs, (f"{name}: held, cached", DIM)))
        took = f"the last answer took {self._answer_us / 1000:.2f} ms of the daemon's loop"
        cost = f"{took}; asked every {self._interval_s:g} s"
        lines += [Text(""), Text(cost, DIM)]
        return Group(*lines)


def _explained(word: str, style: str, text: str, width: int) -> list[Text]:
    """A word, and behind it what it means, in lines of its own column."""
    first, *more = decisions.wrapped(Text(text, TEXT), width - WORD_CELLS)
    return [Text.assemble((f"{word:<{WORD_CELLS}}", style), first), *(Text(" " * WORD_CELLS) + line for line in more)]
