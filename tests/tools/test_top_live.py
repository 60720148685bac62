"""top on a real daemon: what it is told agrees with what happens, over deaths, and the daemon does not notice it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path

import pytest
import trio

from daemon.core.inputs import FrontEndLost
from daemon.watch import Watched, WatchedLife
from ipc.client import DaemonClient
from ipc.messages import Answer
from journal.reader import read_records
from journal.records import Kind
from journal.storage import DiskStorage
from tests.daemon.daemon_process import PATIENCE_S, DaemonProcess, Outcome, request, running
from tests.tools.top_scenes import watched
from tools.top.command import endpoint_of, main
from tools.top.feed import Feed, NoAnswer, Place, ask, ask_life
from tools.top.history import History

BANDS = ("--rank-option", "windows=16", "--rank-option", "state=1", "--arena-bytes", "1MiB")


def place_of(run_dir: Path) -> Place:
    """The daemon of a run directory."""
    return Place(f"ipc://{run_dir}/front.sock", str(run_dir))


@pytest.mark.e2e
async def test_what_is_told_is_what_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests, bands, decisions and lives under load; the commands that print; the journal knows nothing of it."""
    run_dir = tmp_path / "run"
    found: dict[str, object] = {}
    async with running(run_dir, *BANDS, "--max-running-requests", "2", "--frontend-timeout", "2", delay_us=4000) as (
        _,
        client,
    ):

        async def act() -> None:
            async with place_of(run_dir).client() as watcher:
                await watcher.wait_connected(PATIENCE_S)
                answer = await ask(watcher, 0)
                while sum(row.output_tokens > 2 for row in answer.requests) < 2 or len(answer.requests) < 5:
                    answer = await ask(watcher, 0)
                found["answer"] = answer
                found["more"] = await ask(watcher, answer.serial)
                found["one"] = await ask(watcher, 0, rows=1)
                numbers = {row.request for row in answer.requests}
                found["lives"] = [await ask_life(watcher, number) for number in sorted(numbers)]
                found["nobody"] = await ask_life(watcher, 10**9)
            for form in ("--once", "--json"):
                argv = [str(run_dir), form, "--interval", "0.2", "--size", "110x32"]
                assert await trio.to_thread.run_sync(main, argv) == 0
                found[form] = capsys.readouterr().out

        outcomes = [Outcome() for _ in range(5)]
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for index, outcome in enumerate(outcomes):
                    nursery.start_soon(request, client, f"r{index}", outcome, 400)
                await act()
        assert {outcome.end for outcome in outcomes} == {"length"}
        status = json.loads((await client.ask("status")).body)
        assert status["core"]["gauges"]["live"] == 0
    answer = found["answer"]
    assert isinstance(answer, Watched)
    assert answer.gauges["live"] == len(answer.requests) == 5
    assert sorted(row.row for row in answer.requests) == [-1, -1, -1, 0, 1]
    assert [row.ahead for row in answer.requests if row.row < 0] == [0, 1, 2]
    assert {row.waits_for for row in answer.requests if row.row < 0} <= {"rows", "queue"}
    (stage,) = answer.stages
    assert [band.name for band in stage.bands] == ["state", "window:16", "full"]
    assert all(band.live > 0 and band.unit_bytes > 0 for band in stage.bands)
    assert [told.decided.verdict for told in answer.decisions].count("accepted") == 5
    more = found["more"]
    assert isinstance(more, Watched)
    assert all(told.serial > answer.serial for told in more.decisions)
    assert isinstance(found["one"], Watched)
    assert len(found["one"].requests) == 1
    lives = found["lives"]
    assert isinstance(lives, list)
    for row, life in zip(sorted(answer.requests, key=lambda row: row.request), lives, strict=True):
        assert isinstance(life, WatchedLife)
        assert (life.request, life.id, life.frontend) == (row.request, row.id, "fe")
        assert life.events[0].decided.verdict == "accepted"
    assert found["nobody"] is None
    _check_printed(str(found["--once"]), json.loads(str(found["--json"])))
    for record in read_records(DiskStorage(run_dir / "journal")):
        if record.kind == Kind.FRONT_END_LOST:
            item = record.decode()
            assert isinstance(item, FrontEndLost)
            assert item.frontend == "fe"


def _check_printed(once: str, document: dict[str, object]) -> None:
    """A frame of text, and the same as JSON with names."""
    lines = once.splitlines()
    assert len(lines) <= 32
    assert all(len(line) <= 110 for line in lines)
    for words in ("● ready", "stage 0", "window:16", "5 live", "a place in the batch", "decisions"):
        assert words in once, words
    assert {"rates", "requests", "stages", "gauges", "health", "epoch"} <= set(document)
    requests = document["requests"]
    assert isinstance(requests, list)
    assert {row["stage"] for row in requests} == {"running", "waiting"}
    rates = document["rates"]
    assert isinstance(rates, dict)
    assert rates["output_tokens"] > 0


@pytest.mark.e2e
async def test_the_feed_goes_on_over_a_daemons_death(tmp_path: Path) -> None:
    """It says that the daemon is lost, finds the next life, and hands its decisions over once, from its first on."""
    run_dir = tmp_path / "run"
    answers: list[Watched] = []
    reasons: list[str] = []
    feed = Feed(place_of(run_dir), answers.append, reasons.append, lambda number, told: None, 0.05)

    async def until(lives: int) -> None:
        with trio.fail_after(PATIENCE_S):
            while len({answer.life for answer in answers}) < lives:
                await trio.sleep(0.02)

    daemon = DaemonProcess(run_dir)
    try:
        feed.start()
        await until(1)
        daemon.kill()
        with trio.fail_after(PATIENCE_S):
            while not reasons:
                await trio.sleep(0.02)
        daemon = DaemonProcess(run_dir)
        await until(2)
        async with DaemonClient(place_of(run_dir).endpoint, "fe") as client:
            await client.wait_connected(PATIENCE_S)
            await request(client, "one", Outcome(), 8)
        with trio.fail_after(PATIENCE_S):
            while not any(told.decided.verdict == "ended" for answer in answers for told in answer.decisions):
                await trio.sleep(0.02)
    finally:
        await trio.to_thread.run_sync(feed.stop)
        daemon.kill()
    second = [answer for answer in answers if answer.life != answers[0].life]
    serials = [told.serial for answer in second for told in answer.decisions]
    assert serials == list(range(1, len(serials) + 1))
    assert any("closed the connection or its process ended" in reason for reason in reasons)


async def test_a_daemon_that_does_not_know_the_question_is_named() -> None:
    """An older one answers that it does not; that is said in its words."""

    class Older:
        """A client of such a daemon."""

        async def ask(self, what: str, options: dict[str, int], timeout_s: float) -> object:
            return Answer(1, False, f"unknown question {what!r}; known: health, ping")

    with pytest.raises(NoAnswer, match="unknown question 'watch'"):
        await ask(Older(), 0)  # type: ignore[arg-type]


def test_a_feed_ends_amid_a_question_that_nobody_answers() -> None:
    """A stopped daemon keeps nobody who wants to leave."""
    asked = threading.Event()

    class Silent:
        """A client of such a daemon."""

        welcome, connected = None, True

        async def __aenter__(self) -> Silent:
            return self

        async def __aexit__(self, *error: object) -> None:
            pass

        async def ask(self, what: str, options: dict[str, int], timeout_s: float) -> object:
            asked.set()
            return await trio.sleep_forever()

    class Nowhere:
        """Where it is."""

        def client(self) -> Silent:
            return Silent()

    feed = Feed(Nowhere(), print, print, print)  # type: ignore[arg-type]
    feed.start()
    assert asked.wait(PATIENCE_S)
    feed.stop()
    assert feed._thread is not None
    assert not feed._thread.is_alive()
    feed.stop()  # a second time is as good


@pytest.mark.parametrize("without", ["stdin", "stdout", "stderr"])
def test_the_live_view_needs_a_terminal(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output as a pipe, or the other two: refused with what prints without one; nothing is drawn."""
    for name in {"stdin", "stdout", "stderr"} - {without}:
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True, raising=False)
    assert main([str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert not out
    names = {"stdin": "standard input", "stdout": "standard output", "stderr": "standard error"}
    assert f"not one: {names[without]}." in error
    assert all(form in error for form in ("--once", "--json", "--svg"))


@pytest.mark.parametrize("form", ["--once", "--json"])
@pytest.mark.parametrize("gone", ["full", "closed"])
def test_output_that_does_not_arrive(
    form: str, gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk is said in one line, a reader who has enough is not; code 1 either way."""

    def seen(place: Place, interval_s: float) -> History:
        history = History(place.name)
        history.take(watched())
        return history

    monkeypatch.setattr("tools.top.command.observed", seen)
    if gone == "full":
        output = open("/dev/full", "w")  # noqa: SIM115  # closed below, where it may fail
    else:
        reader, writer = os.pipe()
        os.close(reader)
        output = os.fdopen(writer, "w")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", output)
        assert main([str(tmp_path), form]) == 1
    with contextlib.suppress(OSError):
        output.close()
    error = capsys.readouterr().err
    assert error.count("\n") == (gone == "full")
    assert ("No space left on device" in error) == (gone == "full")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("tcp://127.0.0.1:9", "pass --insecure"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://h:70000", "1 to 65535"),
        ("http://h:1", "neither ipc:// nor tcp://"),
        (f"ipc:///{'x' * 200}", "system's limit"),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_usage(where: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said in one line before anything is opened."""
    assert main([where, "--once"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It needs some time and a place: the first is usage, the second a failure, and neither hangs."""
    picture = str(tmp_path / "nowhere" / "top.svg")
    for after in ("0", "-1", "nan", "soon"):
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path), "--svg", picture, "--after", after])
    assert main([str(tmp_path), "--svg", picture, "--after", "0.1", "--size", "80x24"]) == 1
    assert "svg cannot be written: No such file or directory" in capsys.readouterr().err


def test_where_it_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run directory, an endpoint, or the only live one; what cannot be meant is usage, and says what to name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert endpoint_of("tcp://h:1")[0] == "tcp://h:1"
    assert endpoint_of(str(tmp_path))[0] == f"ipc://{tmp_path}/front.sock"
    assert main(["--once"]) == 2
    assert main([str(tmp_path / "nothing"), "--once"]) == 2
    assert "name the run directory" in (said := capsys.readouterr().err)
    assert "is no run directory" in said
    assert main(["", "--once"]) == 2
    assert "'' is no run directory" in capsys.readouterr().err
    for argv in (["--size", "10x10"], ["--interval", "0"], ["--sort", "beauty"]):
        with pytest.raises(SystemExit, match="2"):
            main(argv)
