"""Health: green only with an epoch, a durable journal, an open door and scheduled tokens while work waits."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from daemon.health import Health, Vitals
from tests.daemon.doubles import TrioClock

ROOT = Path(__file__).resolve().parents[2]
WELL = Vitals(epoch=1, ending="", degraded="", live_requests=0, scheduled_tokens=0)


class NotedLog:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def error(self, event: str, **values: Any) -> None:
        self.lines.append(("error", event, values))

    def info(self, event: str, **values: Any) -> None:
        self.lines.append(("info", event, values))


class Scene:
    """Health over vitals that the test sets."""

    def __init__(self) -> None:
        self.vitals = WELL
        self.log = NotedLog()
        self.health = Health(TrioClock(), lambda: self.vitals, 15, self.log)

    def set(self, **changes: Any) -> None:
        self.vitals = dataclasses.replace(self.vitals, **changes)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"epoch": 0}, "booting"),
        ({"ending": "drain"}, "drain"),
        ({"degraded": "no space left"}, "no space left"),
        ({"faults": ("rank 0.0 is gone",)}, "rank 0.0 is gone"),
    ],
)
async def test_what_makes_it_not_ready(change: dict[str, Any], word: str) -> None:
    """Each single reason makes ready false and is said in words."""
    scene = Scene()
    assert scene.health.report()["ready"]
    scene.set(**change)
    report = scene.health.report()
    assert not report["ready"]
    assert report["live"]
    assert word in " ".join(report["reasons"])


async def test_H3_work_without_progress_turns_red(autojump_clock: trio.testing.MockClock) -> None:
    """Waiting work and no scheduled token for the stall time: red with the numbers; a token makes it green again."""
    scene = Scene()
    scene.set(live_requests=5, scheduled_tokens=10)
    assert scene.health.report()["progress"]
    await trio.sleep(14)
    assert scene.health.report()["progress"]
    await trio.sleep(2)
    report = scene.health.report()
    assert not report["progress"]
    assert "16.0 s with 5 requests" in " ".join(report["reasons"])
    scene.set(scheduled_tokens=11)
    assert scene.health.report()["progress"]


async def test_idleness_is_no_stall(autojump_clock: trio.testing.MockClock) -> None:
    """Hours without work are progress enough, and the first request after them starts the count afresh."""
    scene = Scene()
    scene.health.report()
    await trio.sleep(7200)
    assert scene.health.report()["progress"]
    await trio.sleep(20)
    scene.set(live_requests=1)
    assert scene.health.report()["progress"], "the 20 s before it came do not count"
    await trio.sleep(14)
    assert scene.health.report()["progress"]


async def test_a_stall_is_logged_once_when_nobody_asks(autojump_clock: trio.testing.MockClock, tmp_path: Path) -> None:
    """The task notices a stall and its end by itself, one line each, and leaves no empty dump behind."""
    scene = Scene()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.health.run, tmp_path / "hang.txt")
        await trio.sleep(60)
        scene.set(live_requests=2)
        await trio.sleep(60)
        scene.set(scheduled_tokens=1)
        await trio.sleep(3)
        nursery.cancel_scope.cancel()
    assert [(level, event) for level, event, _ in scene.log.lines] == [("error", "Stalled"), ("info", "Progressing")]
    assert not (tmp_path / "hang.txt").exists()


def test_M7_a_hung_loop_ends_with_its_stacks_on_disk(tmp_path: Path) -> None:
    """A loop that turns no round ends its process with a code, and the file shows where it hung; no tool is needed."""
    script = f"""
import time, trio, trio.testing
from pathlib import Path
import daemon.health
from daemon.clock import SystemClock
from daemon.health import Health, Vitals
daemon.health.LOOP_TIMEOUT_S = 0.2
health = Health(SystemClock(), lambda: Vitals(1, "", "", 0, 0), 15, None)
async def hang():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(health.run, Path({str(tmp_path / "hang.txt")!r}))
        await trio.testing.wait_all_tasks_blocked()
        where_it_hangs()
def where_it_hangs():
    time.sleep(30)
trio.run(hang)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=20, check=False)
    assert done.returncode == 1
    assert "where_it_hangs" in (tmp_path / "hang.txt").read_text()


async def test_no_stall_while_no_epoch_runs(autojump_clock: trio.testing.MockClock) -> None:
    """Ranks that load schedule nothing: not ready, for that reason alone; the count begins with the epoch."""
    scene = Scene()
    scene.set(live_requests=5, scheduled_tokens=10)
    scene.health.report()
    await trio.sleep(10)
    scene.set(trouble="recovering: rank 0.0 was killed by SIGKILL")
    for _ in range(60):
        await trio.sleep(1)
        report = scene.health.report()
        assert report["progress"]
        assert not report["ready"]
        assert report["reasons"] == ["recovering: rank 0.0 was killed by SIGKILL"]
    scene.set(trouble="")
    assert scene.health.report()["progress"]
    await trio.sleep(14)
    assert scene.health.report()["progress"]
    await trio.sleep(2)
    assert not scene.health.report()["progress"]
