"""Keepers: who is replaced after its end, who is not, and how soon a frozen process is found."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from daemon import pulse
from daemon.endpoints import FrontClient
from daemon.exits import DaemonError, Exit
from daemon.keeper import FINAL, FINAL_AT_BOOT, STEADY_S, Keeper, Life, end_silent, may_return
from daemon.listening import handed_on, listen, url_of
from daemon.processes import Child, is_stopped
from daemon.pulse import ROUND_S, DaemonPulse, PairPulse, Watch, count_silence, send_back
from daemon.restarts import Restarts
from tests.daemon.test_observe import NotedLog
from tests.gateway.harness import gateway


@pytest.fixture
def endpoint() -> Iterator[str]:
    """In a private directory whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="bm-") as folder:
        yield f"ipc://{folder}/front.sock"


@pytest.mark.parametrize("kind", ["daemon", "frontend"])
@pytest.mark.parametrize("code", [-9, -6, 77, *Exit])
def test_who_is_replaced(kind: str, code: int) -> None:
    """Nobody before the server was ready; then whoever died of a signal or a failure, not of what would come again."""
    assert not may_return(kind, code, served=False, answered=True)
    again = kind == "frontend" or code not in (Exit.CLEAN, Exit.RANK)
    again = again and code not in (Exit.USAGE, Exit.MODEL)
    assert may_return(kind, code, served=True, answered=True) is again
    at_boot = again and not (kind == "daemon" and code == Exit.JOURNAL)
    assert may_return(kind, code, served=True, answered=False) is at_boot


def test_both_tables_have_every_kind() -> None:
    """A kind without a row would be replaced for ever."""
    assert set(FINAL) == set(FINAL_AT_BOOT) == {"daemon", "frontend"}


def test_deaths_in_a_row_are_paused_and_bounded() -> None:
    """The pause doubles with every early death, starts afresh after a steady life, and ends at the bound."""

    async def pauses() -> list[float | None]:
        keeper = Keeper("d", "daemon", lambda: pytest.fail("not started here"), Restarts(4, 600.0), 10.0)
        lives = [0.5, 0.5, STEADY_S, 0.5, 0.5]
        return [keeper.pause_s(Life(-9, lived_s, True), True) for lived_s in lives]

    assert trio.run(pauses) == [0.2, 0.4, 0.1, 0.2, None]


def rounds(answers: str) -> tuple[Callable[[], bool], Callable[[], bool]]:
    """Asked and judged, by round: `.` answers, `x` does not, `b` does not and may not be judged (booting)."""
    queue = list(answers)

    async def asked() -> bool:
        if queue[0] == ".":
            return True
        await trio.sleep_forever()
        raise AssertionError("not reached")

    return asked, lambda: queue.pop(0) != "b"  # type: ignore[return-value]


@pytest.mark.parametrize(("answers", "at"), [("xxx", 3), ("..xxx", 5), (".xx.xxx", 7), ("bbbbbbxxx", 9), ("xxbxxx", 6)])
def test_silence_is_counted_in_rounds(answers: str, at: int) -> None:
    """Three in a row, each of them one in which the process may be judged; an answer begins anew."""

    async def run() -> float:
        asked, judged = rounds(answers)
        begun = trio.current_time()
        assert await count_silence(asked, judged, 3) == 3  # type: ignore[arg-type]
        return trio.current_time() - begun

    assert trio.run(run, clock=MockClock(autojump_threshold=0)) == pytest.approx(at * ROUND_S)


def test_our_own_stall_is_nobodys_silence() -> None:
    """After a stall as long as many rounds, one question is asked and answered: that is one round."""
    clock = MockClock(autojump_threshold=0)

    async def run() -> int:
        asks = 0

        async def asked() -> bool:
            nonlocal asks
            asks += 1
            if asks == 3:
                clock.jump(100.0)  # this process was stopped
            if asks < 7:
                return True
            await trio.sleep_forever()
            return False

        await count_silence(asked, lambda: True, 3)
        return asks

    assert trio.run(run, clock=clock) == 9


async def test_a_daemon_is_asked_at_its_door(endpoint: str) -> None:
    """Introduced to nobody, booting or not; without a daemon there is no answer."""
    asks = DaemonPulse(FrontClient(endpoint, None, False))
    try:
        with trio.move_on_after(0.2):
            raise AssertionError(f"answered: {await asks.beats()}")
        async with gateway(endpoint, opened=False):
            with trio.fail_after(5):
                assert await asks.beats()
    finally:
        asks.close()


async def test_a_front_end_sends_back_what_it_is_asked() -> None:
    """Over the pair that it was given; when it is gone the question is answered with no."""
    asks = PairPulse()
    theirs = socket.socket(fileno=os.dup(asks.theirs))
    asks.handed_on()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_back, theirs)
        with trio.fail_after(5):
            assert await asks.beats()
            assert await asks.beats()
        nursery.cancel_scope.cancel()
    assert not await asks.beats()
    asks.close()


def test_a_socket_is_handed_on_by_its_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child accepts on the launcher's port; the variable is gone afterwards; one that is no socket is refused."""
    with listen("127.0.0.1", 0) as bound:
        monkeypatch.setenv("HERE", str(os.dup(bound.fileno())))
        with handed_on("HERE") as mine:  # type: ignore[union-attr]
            assert url_of(mine) == url_of(bound)
        assert handed_on("HERE") is None
    monkeypatch.setenv("HERE", "99999")
    with pytest.raises(DaemonError, match="HERE=99999"):
        handed_on("HERE")


# --- real processes --------------------------------------------------------------------------------------------------

ANSWERS = """
import os, signal, socket, sys
pair = socket.socket(fileno={fd})
pair.setblocking(True)
{ready}
while data := pair.recv(64):
    pair.send(data)
    {then}
"""
HANGS = "import faulthandler; faulthandler.enable(open({dump!r}, 'w')); signal.pause()"


class Scripted:
    """A keeper of a child that answers its pulse and then does what a test wants."""

    def __init__(self, tmp_path: Path, then: str) -> None:
        self.log = NotedLog()
        self.keeper = Keeper("fe", "frontend", lambda: self._start(tmp_path, then), Restarts(9, 600.0), 1.0)

    @staticmethod
    def _start(tmp_path: Path, then: str) -> tuple[Child, PairPulse]:
        pair = PairPulse()
        script = ANSWERS.format(fd=pair.theirs, ready="", then=then)
        child = Child("fe", [sys.executable, "-c", script], os.environ, files=(pair.theirs,))
        pair.handed_on()
        return child, pair


@pytest.mark.e2e
async def test_X1_a_stopped_process_is_killed_and_the_next_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: silent for its time, it is killed at once; the keeper starts another one in its place."""
    monkeypatch.setattr(pulse, "ROUND_S", 0.1)
    scene = Scripted(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
    with trio.fail_after(30):
        scene.keeper.start()
        first = scene.keeper.pid
        life = await scene.keeper.life(scene.log)
        assert (life.code, life.answered, life.silent_s > 0) == (-signal.SIGKILL, True, True)
        assert "had not answered" in life.text
        assert scene.log.events("ChildSilent")[0]["stopped"] is True
        scene.keeper.start()
        assert scene.keeper.pid != first
        scene.keeper.close()


@pytest.mark.e2e
async def test_M7_a_stuck_process_leaves_all_its_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs and does not answer: SIGABRT makes it write them, with nothing but Python itself, before it dies."""
    monkeypatch.setattr(pulse, "ROUND_S", 0.1)
    dump = tmp_path / "hang.txt"
    scene = Scripted(tmp_path, HANGS.format(dump=str(dump)))
    with trio.fail_after(30):
        scene.keeper.start()
        life = await scene.keeper.life(scene.log)
    scene.keeper.close()
    assert life.code == -signal.SIGABRT
    assert 'File "<string>"' in dump.read_text()


@pytest.mark.e2e
async def test_M7_a_process_that_ignores_its_last_words_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does about SIGABRT, it is gone within seconds."""
    monkeypatch.setattr("daemon.keeper.LAST_WORDS_S", 0.2)
    ready = tmp_path / "ready"
    script = f"import signal; signal.signal(signal.SIGABRT, signal.SIG_IGN); open({str(ready)!r}, 'w'); signal.pause()"
    child = Child("deaf", [sys.executable, "-c", script], os.environ)
    try:
        with trio.fail_after(30):
            while not ready.exists():
                await trio.sleep(0.01)
            await end_silent(child, frozen=False)
            assert await child.wait() == -signal.SIGKILL
        assert not is_stopped(child.pid)
    finally:
        child.close()


@pytest.mark.parametrize("state", ["boots", "leaves"])
async def test_a_process_that_boots_or_leaves_is_not_judged_unless_it_is_stopped(state: str) -> None:
    """It has not answered once, or shut its door in order: only a stopped one is counted silent."""

    class Mute:
        async def beats(self) -> bool:
            return False

        def close(self) -> None:
            raise AssertionError("not closed here")

    child = Child("boots", [sys.executable, "-c", "import signal; signal.pause()"], os.environ)
    try:
        watch = Watch(Mute(), child.pid, 1.0)
        if state == "leaves":
            watch.answered = True
            assert watch._judged()
            watch.leaving = True
        assert not watch._judged()
        child.send_signal(signal.SIGSTOP)
        with trio.fail_after(10):
            while not watch._judged():
                await trio.sleep(0.01)
    finally:
        child.close()
