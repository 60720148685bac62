"""App: the page as a terminal application.

Owns keys, the cursor and when the panels are drawn. Must never ask the daemon or wait for it: the feed, in a thread of
its own, posts what came, and a key that needs an answer leaves a wish there. Invariant: a paused picture stands still
whatever comes, and what came meanwhile is there when it goes on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Footer, Input, Static

from daemon.watch import Watched, WatchedLife
from tools.output import because
from tools.top.feed import Feed, Place
from tools.top.history import History
from tools.top.page import Page, Wishes, divide, too_small
from tools.top.palette import CURSOR, GROUND, LINE, SURFACE, TEXT, TITLE
from tools.top.requests import ORDERS
from tools.top.screens import HelpScreen, LifeScreen

FONTS = "Menlo, Consolas, DejaVu Sans Mono, Liberation Mono"
INTERVALS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)


class Seen(Message):
    """The daemon answered."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.watched = watched


class Gone(Message):
    """There is no daemon at the moment."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class Lived(Message):
    """What is known of one request."""

    def __init__(self, request: int, told: WatchedLife | None) -> None:
        super().__init__()
        self.request, self.told = request, told


class Panel(Widget):
    """A part of the page that is drawn as lines for its size."""

    def __init__(self, name: str, draw: Callable[[str, int, int], list[Text]]) -> None:
        super().__init__(id=name)
        self._draw = draw

    def render(self) -> Group:
        """The lines for the room that it has."""
        return Group(*self._draw(str(self.id), self.size.width, self.size.height))


class Table(Panel, can_focus=True):
    """The requests, with a cursor that follows its request through every order."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    class Moved(Message):
        """The cursor goes so many rows down."""

        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows = rows

    class Chosen(Message):
        """A row was clicked: its place below the titles."""

        def __init__(self, place: int, twice: bool) -> None:
            super().__init__()
            self.place, self.twice = place, twice

    def action_move(self, rows: int) -> None:
        """Up or down."""
        self.post_message(self.Moved(rows))

    def action_page(self, pages: int) -> None:
        """By what is seen at once."""
        self.post_message(self.Moved(pages * max(1, self.size.height - 3)))

    def on_click(self, event: events.Click) -> None:
        """Choose by mouse."""
        self.post_message(self.Chosen(event.y - 2, event.chain > 1))

    def on_mouse_scroll_down(self) -> None:
        """The wheel moves the cursor."""
        self.post_message(self.Moved(3))

    def on_mouse_scroll_up(self) -> None:
        """The wheel moves the cursor."""
        self.post_message(self.Moved(-3))


class Top(App[None]):
    """The application."""

    CSS = f"""
    Screen {{ background: {GROUND}; color: {TEXT}; layout: vertical; }}
    Panel {{ width: 100%; }}
    #requests {{ height: 1fr; }}
    #filter {{ height: 1; border: none; padding: 0 1; background: {CURSOR}; color: {TEXT}; display: none; }}
    #filter.asked {{ display: block; }}
    #lack {{ display: none; }}
    Screen.small Panel, Screen.small #filter, Screen.small Footer {{ display: none; }}
    Screen.small #lack {{ display: block; }}
    Footer {{ background: {SURFACE}; }}
    FooterKey .footer-key--key {{ color: {TITLE}; background: {SURFACE}; }}
    FooterKey .footer-key--description {{ color: {TEXT}; background: {SURFACE}; }}
    ModalScreen {{ align: center middle; background: {GROUND} 60%; }}
    #box {{ width: 90%; max-width: 130; height: auto; max-height: 90%; padding: 0 2; background: {SURFACE};
            border: round {LINE}; border-title-color: {TITLE}; scrollbar-size-vertical: 1;
            scrollbar-color: {LINE}; scrollbar-color-hover: {TITLE}; scrollbar-color-active: {TITLE};
            scrollbar-background: {SURFACE}; scrollbar-background-hover: {SURFACE};
            scrollbar-background-active: {SURFACE}; }}
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),  # before whatever lies above, and its letters
        Binding("p,space", "pause", "pause"),
        Binding("s", "order(1)", "sort"),
        Binding("S", "reverse", show=False),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("enter", "life", "life of a request"),
        Binding("d", "scarce", "decisions"),
        Binding("plus,equals_sign", "faster(-1)", show=False),
        Binding("minus", "faster(1)", show=False),
        Binding("question_mark,h", "help", "help", key_display="?"),
        Binding("escape", "clear", show=False),
    ]

    def __init__(self, place: Place, interval_s: float, wishes: Wishes) -> None:
        super().__init__()
        self.title = "bandmaster top"
        self.history = History(place.name)
        self.wishes = wishes
        self.page = Page(self.history, wishes)  # of the history, or of a copy while the picture is paused
        self._row = 0  # where the selected request was last
        self._stays = False  # the cursor was moved: it follows its request, else it stays at the top
        self.failed = ""  # what the caller is to say once the screen is given back
        self._picture: tuple[Path, float] | None = None
        self.feed = Feed(place, self._on_watched, self._on_lost, self._on_life, interval_s)

    # --- the page

    def compose(self) -> ComposeResult:
        """Panel by panel; `lack` is all that a screen shows which is too small for them."""
        yield Static(id="lack")
        for name in ("head", "rates", "arena"):
            yield Panel(name, self._draw)
        yield Table("requests", self._draw)
        yield Input(placeholder="a part of a number, id, front end, state or reason", id="filter")
        yield Panel("decisions", self._draw)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to ask."""
        self.query_one("#requests").focus()
        self._divide()
        self.feed.start()
        self.set_interval(1.0, self._while_lost)
        if self._picture is not None:
            path, after_s = self._picture
            self.set_timer(after_s, lambda: self._take_picture(path))

    def picture(self, path: Path, after_s: float) -> None:
        """Once it runs: write the picture as SVG after so many seconds, and end."""
        self._picture = (path, after_s)

    def _take_picture(self, path: Path) -> None:
        try:
            self.write_picture(path)
        except OSError as error:
            self.failed = f"{path} cannot be written: {because(error)}"
        self.exit(return_code=1 if self.failed else 0)

    def write_picture(self, path: Path) -> None:
        """The screen as SVG, in whatever monospaced font the reader has: a picture fetches nothing."""
        picture = re.sub(r"@font-face \{.*?\}\s*", "", self.export_screenshot(title=self.title), flags=re.DOTALL)
        path.write_text(picture.replace("font-family: Fira Code", f"font-family: {FONTS}"), encoding="utf-8")

    def on_unmount(self) -> None:
        """Stop asking."""
        self.feed.stop()

    def on_resize(self) -> None:
        """Another size is another division."""
        self._divide()

    def _divide(self) -> None:
        """Give each panel its lines, and draw; where there is no room for them, say so instead."""
        lack, page, footer = too_small(self.size.width, self.size.height), self.screen_stack[0], 1
        page.set_class(bool(lack), "small")
        page.query_one("#lack", Static).update(lack)
        if lack:
            return
        part = divide(self.page.history, self.size.width - 2, self.size.height - footer)
        for name, lines in (("head", part.head), ("rates", part.rates), ("arena", part.arena)):
            panel = self.query_one(f"#{name}")
            panel.styles.height, panel.styles.margin = lines, (0, 0, part.gap, 0)
        self.query_one("#requests").styles.margin = (0, 0, part.gap, 0)
        self.query_one("#decisions").styles.height = part.decisions
        self._redraw()

    def _redraw(self) -> None:
        for panel in self.query(Panel):
            panel.refresh()

    def _draw(self, name: str, width: int, height: int) -> list[Text]:
        if name == "requests":
            self._follow(height)
        return self.page.panel(name, width, height)

    # --- the cursor

    def _follow(self, height: int) -> None:
        """Keep the selected request in sight; one that has ended hands the cursor to who stands at its place."""
        rows, room = [row.request for row in self.page.rows()], max(1, height - 2)
        if not rows:
            self.page.selected, self._row, self.page.top_row = 0, 0, 0
            return
        if not self._stays:
            self._row, self.page.selected = 0, rows[0]
        elif self.page.selected in rows:
            self._row = rows.index(self.page.selected)
        else:
            self._row = min(self._row, len(rows) - 1)
            self.page.selected = rows[self._row]
        self.page.top_row = max(0, min(self.page.top_row, len(rows) - room))
        self.page.top_row = min(self.page.top_row, self._row)
        self.page.top_row = max(self.page.top_row, self._row - room + 1)

    def _select(self, row: int) -> None:
        rows = [row.request for row in self.page.rows()]
        if rows:
            self._row = max(0, min(len(rows) - 1, row))
            self._stays = row > 0
            self.page.selected = rows[self._row]
            self.query_one("#requests").refresh()

    def on_table_moved(self, message: Table.Moved) -> None:
        """A key or the wheel moved the cursor."""
        self._select(self._row + message.rows)

    def on_table_chosen(self, message: Table.Chosen) -> None:
        """A click chose a row, a second one its life."""
        if message.place >= 0:
            self._select(self.page.top_row + message.place)
            if message.twice:
                self.action_life()

    # --- what comes; called in the feed's thread

    def _on_watched(self, watched: Watched) -> None:
        self.post_message(Seen(watched))

    def _on_lost(self, reason: str) -> None:
        self.post_message(Gone(reason))

    def _on_life(self, request: int, told: WatchedLife | None) -> None:
        self.post_message(Lived(request, told))

    # --- what came

    def on_seen(self, message: Seen) -> None:
        """Draw what is new, and ask for what an open life needs."""
        self.history.take(message.watched)
        if isinstance(self.screen, LifeScreen):
            self.feed.want_life(self.screen.request)
        if not self.wishes.paused:
            self._divide()

    def on_gone(self, message: Gone) -> None:
        """Say so, and keep showing what was seen last."""
        if message.reason != self.history.lost:
            self.history.lose(message.reason, time.time_ns())
            if not self.wishes.paused:
                self._divide()

    def on_lived(self, message: Lived) -> None:
        """Hand it to the screen that asked."""
        if isinstance(self.screen, LifeScreen) and self.screen.request == message.request:
            self.screen.show(message.told, self.history.bands)

    def _while_lost(self) -> None:
        if self.history.lost and not self.wishes.paused:
            self._redraw()

    # --- keys

    def action_pause(self) -> None:
        """The picture stands still, or goes on with what came meanwhile."""
        self.wishes.paused = not self.wishes.paused
        self.page.history = self.history.copy() if self.wishes.paused else self.history
        self._divide()

    def action_order(self, steps: int) -> None:
        """The next order."""
        names = list(ORDERS)
        self.wishes.order = names[(names.index(self.wishes.order) + steps) % len(names)]
        self.wishes.reverse = False
        self.query_one("#requests").refresh()

    def action_reverse(self) -> None:
        """The other way round."""
        self.wishes.reverse = not self.wishes.reverse
        self.query_one("#requests").refresh()

    def action_scarce(self) -> None:
        """All decisions, or those of scarcity."""
        self.wishes.scarce_only = not self.wishes.scarce_only
        self.query_one("#decisions").refresh()

    def action_faster(self, steps: int) -> None:
        """Another interval."""
        nearest = min(range(len(INTERVALS_S)), key=lambda at: abs(INTERVALS_S[at] - self.feed.interval_s))
        self.feed.interval_s = INTERVALS_S[max(0, min(len(INTERVALS_S) - 1, nearest + steps))]
        self.notify(f"asked every {self.feed.interval_s:g} s", timeout=2)

    def action_filter(self) -> None:
        """Ask for a filter."""
        field = self.query_one("#filter", Input)
        field.add_class("asked")
        field.value = self.wishes.wanted
        field.focus()

    def on_input_changed(self, message: Input.Changed) -> None:
        """The table follows every letter."""
        self.wishes.wanted = message.value
        self.query_one("#requests").refresh()

    def on_input_submitted(self) -> None:
        """Back to the table, with the filter."""
        self.query_one("#filter").remove_class("asked")
        self.query_one("#requests").focus()

    def action_clear(self) -> None:
        """Back to the table, without a filter."""
        self.query_one("#filter", Input).value = ""
        self.wishes.wanted = ""
        self.on_input_submitted()
        self.query_one("#requests").refresh()

    def action_life(self) -> None:
        """The life of the selected request."""
        if self.page.selected:
            self.push_screen(LifeScreen(self.page.selected, self.history.where))
            self.feed.want_life(self.page.selected)

    def action_help(self) -> None:
        """Keys and words."""
        answer_us = self.history.watched.answer_us if self.history.watched is not None else 0
        self.push_screen(HelpScreen(self.history.bands, answer_us, self.feed.interval_s))
