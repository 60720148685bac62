"""top as an application: keys, the cursor, pause, filter, lives and help, driven key by key without a daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Footer, Static

from daemon.watch import WatchedLife
from tests.tools.top_scenes import S, row, told, waiting, watched
from tools.top.app import Gone, Lived, Panel, Seen, Table, Top
from tools.top.feed import Place
from tools.top.page import Wishes
from tools.top.screens import HelpScreen, LifeScreen

ROWS = [row(1, age_ms=5000), row(2, age_ms=9000, output_tokens=40), waiting(3, 0), *(row(k) for k in range(10, 40))]


class StillFeed:
    """A feed whose daemon is the test."""

    def __init__(self) -> None:
        self.interval_s = 1.0
        self.lives: list[int] = []
        self.running = False

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def want_life(self, request: int) -> None:
        self.lives.append(request)


class Scene:
    """An application on a screen of its own, and what it shows."""

    def __init__(self, app: Top, feed: StillFeed, pilot: Pilot[None]) -> None:
        self.app, self.feed, self.pilot = app, feed, pilot

    async def see(self, now_s: float = 10.0, **more: object) -> None:
        """The daemon answers."""
        self.app.post_message(Seen(watched(now_s, **({"requests": ROWS} | more))))  # type: ignore[arg-type]
        await self.pilot.pause()

    def text(self, panel: str) -> str:
        """What a panel shows."""
        found = self.app.query_one(f"#{panel}", Panel)
        return "\n".join(line.plain for line in self.app._draw(panel, found.size.width, found.size.height))


def play(script: Callable[[Scene], Awaitable[None]], size: tuple[int, int] = (118, 36)) -> None:
    """Run a script on an application."""

    async def run() -> None:
        app, feed = Top(Place("ipc:///nowhere", "/run/here"), 1.0, Wishes()), StillFeed()
        app.feed = feed  # type: ignore[assignment]
        async with app.run_test(size=size) as pilot:
            await script(Scene(app, feed, pilot))
            assert feed.running
        assert not feed.running

    asyncio.run(run())


def test_every_key_has_its_action_and_every_action_its_key() -> None:
    """Of the page, the table and both screens: no key that does nothing, nothing that no key does."""
    for owner in (Top, Table, LifeScreen, HelpScreen):
        bound = {action.partition("(")[0] for binding in owner.BINDINGS for action in [binding.action]}  # type: ignore[union-attr]
        written = {name.removeprefix("action_") for name in vars(owner) if name.startswith("action_")}
        assert written <= bound, owner
        assert all(hasattr(owner, f"action_{name}") for name in bound), owner


@pytest.mark.parametrize(
    "keys",
    [(), ("slash", *"ab"), ("question_mark",), ("enter",), ("p",)],
    ids=["page", "filter", "help", "life", "paused"],
)
def test_ctrl_c_leaves_at_once_from_every_screen(keys: tuple[str, ...]) -> None:
    """Whatever is open, and also while letters go to the filter; the exit is as good as that of `q`."""

    async def script(scene: Scene) -> None:
        await scene.see()
        scene.text("requests")
        await scene.pilot.press(*keys)
        assert scene.app.is_running
        await scene.pilot.press("ctrl+c")
        assert not scene.app.is_running
        assert scene.app.return_code == 0

    play(script)


def test_every_panel_is_on_the_screen_at_its_size() -> None:
    """The panels fill the screen but for the footer, without overlap, at 80x24 and 160x50; figures are there."""

    async def script(scene: Scene) -> None:
        assert "connecting" in scene.text("head")
        await scene.see()
        await scene.see(11.0, gauges={"output_tokens_total": 1500})
        assert "ready" in scene.text("head")
        assert " 500 tok/s" in scene.text("rates")
        assert "stage 0" in scene.text("arena")
        assert "33 live" in scene.text("requests")
        regions = [panel.region for panel in scene.app.query(Panel)]
        bottoms = [region.bottom for region in regions]
        assert bottoms == sorted(bottoms)
        assert bottoms[-1] == scene.app.size.height - 1
        assert all(region.width == scene.app.size.width and region.height > 0 for region in regions)
        assert scene.app.query_one("#requests").region.height >= 6

    for size in ((80, 24), (160, 50)):
        play(script, size)


def test_the_cursor_stays_at_the_top_until_it_is_moved_and_then_with_its_request() -> None:
    """Through another order and other ages; when its request ends the cursor stays at its place."""

    async def script(scene: Scene) -> None:
        app = scene.app
        await scene.see()
        scene.text("requests")
        assert app.page.selected == 2
        await scene.see(11.0, requests=[row(7, age_ms=99_000), *ROWS])
        scene.text("requests")
        assert app.page.selected == 7
        await scene.pilot.press("down")
        assert app.page.selected == 2
        await scene.pilot.press("s")
        assert app.wishes.order == "tokens"
        scene.text("requests")
        assert app.page.selected == 2
        await scene.see(12.0, requests=[entry for entry in ROWS if entry.request != 2])
        scene.text("requests")
        assert app.page.selected not in (0, 2)
        await scene.pilot.press("end")
        last = app.page.rows()[-1].request
        shown = scene.text("requests")
        assert app.page.selected == last
        assert f" {last} " in shown.splitlines()[-1]
        await scene.pilot.press("home")
        assert app.page.selected == app.page.rows()[0].request

    play(script)


def test_orders_go_round_and_turn_round() -> None:
    """`s` goes through all orders, `S` reverses the present one."""

    async def script(scene: Scene) -> None:
        await scene.see()
        seen = []
        for _ in range(7):
            await scene.pilot.press("s")
            seen.append(scene.app.wishes.order)
        assert len(set(seen)) == 7
        assert seen[-1] == "age"
        oldest = scene.app.page.rows()[0].request
        await scene.pilot.press("S")
        assert scene.app.page.rows()[-1].request == oldest
        assert "▲" in scene.text("requests")

    play(script)


def test_a_paused_picture_stands_still() -> None:
    """What comes meanwhile is there when it goes on."""

    async def script(scene: Scene) -> None:
        await scene.see(decisions=[told(1, "parked", 1, "rows")])
        await scene.pilot.press("p")
        assert "PAUSED" in scene.text("head")
        before = [scene.text(name) for name in ("rates", "arena", "requests", "decisions")]
        await scene.see(
            20.0, requests=[], decisions=[told(2, "stalled", 0, "so")], gauges={"output_tokens_total": 9999}
        )
        assert [scene.text(name) for name in ("rates", "arena", "requests", "decisions")] == before
        await scene.pilot.press("p")
        assert "PAUSED" not in scene.text("head")
        assert "stalled" in scene.text("decisions")
        assert "0 live" in scene.text("requests")

    play(script)


def test_the_filter_follows_every_letter_and_escape_clears_it() -> None:
    """Letters go to the filter, not to the keys of the page; Enter keeps it and gives the keys back."""

    async def script(scene: Scene) -> None:
        await scene.see()
        await scene.pilot.press("slash", *"batch")
        assert [entry.request for entry in scene.app.page.rows()] == [3]
        assert "/ batch" in scene.text("requests")
        await scene.pilot.press("enter")
        assert not isinstance(scene.app.screen, LifeScreen)
        await scene.pilot.press("s")
        assert scene.app.wishes.order == "tokens"
        assert scene.app.wishes.wanted == "batch"
        await scene.pilot.press("escape")
        assert len(scene.app.page.rows()) == len(ROWS)

    play(script)


def test_the_life_of_the_selected_request() -> None:
    """It is asked for, shown, asked for again while it is open, and kept when the daemon forgets it."""

    async def script(scene: Scene) -> None:
        await scene.see()
        await scene.pilot.press("down", "down", "enter")
        screen = scene.app.screen
        assert isinstance(screen, LifeScreen)
        assert scene.feed.lives == [screen.request]
        events = [told(1, "accepted", screen.request, at_s=1, n=1, prompt_tokens=4, max_tokens=5)]
        events += [told(2, "waits", screen.request, "rows", 2, limit=4)]
        life = WatchedLife(screen.request, "cmpl-x", "fe", 4, 4 * S, None, events, 2, 0)
        scene.app.post_message(Lived(screen.request, life))
        scene.app.post_message(Lived(screen.request + 1, None))  # of another one, too late
        await scene.see(11.0)
        assert scene.feed.lives == [screen.request] * 2
        scene.app.post_message(Lived(screen.request, None))
        await scene.pilot.pause()
        picture = scene.app.export_screenshot()
        assert "cmpl-x" in picture
        assert "waits" in picture
        await scene.pilot.press("escape")
        assert not isinstance(scene.app.screen, LifeScreen)
        await scene.see(12.0)
        assert len(scene.feed.lives) == 2

    play(script)


def test_help_has_every_key() -> None:
    """Each binding that is shown below has its line; Esc goes back."""

    async def script(scene: Scene) -> None:
        await scene.see()
        await scene.pilot.press("question_mark")
        assert isinstance(scene.app.screen, HelpScreen)
        picture = scene.app.export_screenshot().replace("&#160;", " ")
        for words in ("choose a request", "filter:", "pause the picture", "0.25 ms of the daemon", "retractions"):
            assert words in picture, words
        await scene.pilot.press("escape")
        assert not isinstance(scene.app.screen, HelpScreen)

    play(script, (140, 60))


def test_a_lost_daemon_is_said_and_what_was_seen_last_stays() -> None:
    """The head turns red with the reason, the table stays, and a new life is greeted."""

    async def script(scene: Scene) -> None:
        await scene.see()
        scene.app.post_message(Gone("its process ended"))
        await scene.pilot.pause()
        assert "lost" in scene.text("head")
        assert "its process ended" in scene.text("head")
        assert "33 live" in scene.text("requests")
        await scene.see(1.0, life="b" * 32)
        assert "2 lives seen" in scene.text("head")
        assert "life bbbbbbbb goes on" in scene.text("decisions")

    play(script)


def test_decisions_of_routine_can_be_hidden_and_the_interval_changed() -> None:
    """`d`, `+` and `-`; the interval stays within its list."""

    async def script(scene: Scene) -> None:
        await scene.see(decisions=[told(1, "idle"), told(2, "parked", 1, "rows")])
        assert "idle" in scene.text("decisions")
        await scene.pilot.press("d")
        assert "idle" not in scene.text("decisions")
        assert "parked" in scene.text("decisions")
        await scene.pilot.press("plus")
        assert scene.feed.interval_s == 0.5
        for _ in range(9):
            await scene.pilot.press("minus")
        assert scene.feed.interval_s == 10.0

    play(script)


def test_a_click_chooses_and_a_second_one_opens() -> None:
    """The row below the pointer; titles choose nothing."""

    async def script(scene: Scene) -> None:
        await scene.see()
        scene.text("requests")
        await scene.pilot.click("#requests", offset=(5, 4))
        assert scene.app.page.selected == scene.app.page.rows()[2].request
        await scene.pilot.click("#requests", offset=(5, 0))
        assert scene.app.page.selected == scene.app.page.rows()[2].request
        await scene.pilot.click("#requests", offset=(5, 3), times=2)
        assert isinstance(scene.app.screen, LifeScreen)
        assert scene.feed.lives == [scene.app.page.rows()[1].request]

    play(script)


def test_the_picture_reaches_for_nothing_outside(tmp_path: Path) -> None:
    """The SVG has no address in it, and its text."""
    path = tmp_path / "top.svg"

    async def script(scene: Scene) -> None:
        await scene.see()
        scene.app.write_picture(path)

    play(script)
    picture = path.read_text()
    assert "stage&#160;0" in picture
    assert "url(" not in picture.replace("url(#", "")
    assert picture.count("http") == picture.count("http://www.w3.org") + picture.count("https://www.textualize.io")


@pytest.mark.parametrize("size", [(40, 12), (60, 15)])
def test_a_small_screen_is_no_error(size: tuple[int, int]) -> None:
    """Where there is no room for everything, what there is has its place."""

    async def script(scene: Scene) -> None:
        await scene.see()
        await scene.pilot.press("down", "question_mark", "escape")
        assert scene.app.query_one("#requests").region.height >= 0

    play(script, size)


def test_a_screen_that_is_too_small_says_what_it_lacks_and_nothing_else() -> None:
    """Narrow or low, in one line; made larger, the panels are there, and their cursor works."""

    async def script(scene: Scene) -> None:
        lack = scene.app.query_one("#lack", Static)
        await scene.see()
        for size, words in (((20, 30), "too narrow: 20 columns, needs 40"), ((90, 9), "too low: 9 lines, needs 12")):
            await scene.pilot.resize_terminal(*size)
            await scene.see(11.0)
            assert str(lack.render()) == words
            assert lack.display
            assert not any(panel.display for panel in (*scene.app.query(Panel), scene.app.query_one(Footer)))
        await scene.pilot.resize_terminal(40, 12)
        await scene.see(12.0)
        assert not lack.display
        assert "33 live" in scene.text("requests")
        before = scene.app.page.selected
        await scene.pilot.press("down")
        assert scene.app.page.selected not in (0, before)

    play(script, (20, 30))
