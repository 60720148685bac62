"""App: whichever actor fails, the failure is on disk, the exit code says so, and requests go on in the next life."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from daemon.app import Daemon, root_cause
from daemon.clock import SystemClock
from daemon.core.inputs import Aborted, Reported
from daemon.endpoints import front_server
from daemon.exits import DaemonError, Exit
from daemon.mailbox import ITERATION_INPUTS_MAX, Collated
from daemon.recovery import recover
from daemon.run_dir import RunDir
from daemon.settings_table import Settings
from ipc.client import DaemonClient
from journal import segment
from journal.frame import Frame
from journal.opening import open_journal
from journal.reader import read_records
from journal.records import Kind
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.daemon.daemon_process import PATIENCE_S, Outcome, under_load
from tests.daemon.test_observe import NotedLog

LONG = 5000


class Broken(RuntimeError):
    """What the test makes an actor raise."""


class Scene:
    """A daemon in this process, with a modeled rank as its child."""

    def __init__(self, tmp_path: Path) -> None:
        settings = Settings(run_dir=str(tmp_path / "run"), rank_runner="modeled", rank_option={"delay_us": "3000"})
        self.run_dir = RunDir(tmp_path / "run")
        self.run_dir.prepare()
        self.storage = DiskStorage(self.run_dir.journal)
        writer, self.recovered = open_journal(self.storage, JournalSettings(), b"j" * 16)
        self.log = NotedLog()
        front = front_server(settings, self.run_dir)
        self.daemon = Daemon(settings, self.run_dir, front, writer, SystemClock(), self.log)
        self.breaking = trio.Event()

    async def run_until_broken(self) -> tuple[Exit, list[Outcome]]:
        """Serve four requests; once all of them decode, let the actor break."""
        code: list[Exit] = []
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery, connected_client(self) as client:

                async def serve() -> None:
                    code.append(await self.daemon.run(self.recovered))

                nursery.start_soon(serve)
                await client.wait_connected(PATIENCE_S)

                async def act() -> None:
                    self.breaking.set()

                outcomes = await under_load(client, 4, LONG, act)
        return code[0], outcomes

    def kinds(self) -> list[Kind]:
        return [Kind(record.kind) for record in read_records(self.storage)]


def next_life(scene: Scene) -> int:
    """How many requests a life behind this one would go on with."""
    _, found = open_journal(scene.storage, JournalSettings(), b"j" * 16)
    recovery = recover(scene.storage, found)
    return sum(1 for group in recovery.groups for choice in group.choices if choice.ended is None)


def breaks(scene: Scene, run: Callable[..., Any]) -> Callable[..., Any]:
    """The actor, and beside it what makes it fail once the test says so."""

    async def run_and_break(*arguments: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, *arguments)
            await scene.breaking.wait()
            raise Broken("on purpose")

    return run_and_break


async def test_reports_go_round_the_mailbox(tmp_path: Path) -> None:
    """What ranks report is taken before what clients asked earlier, by the daemon's own wiring."""
    daemon = Scene(tmp_path).daemon
    for number in range(ITERATION_INPUTS_MAX + 5):
        daemon.gateway._mailbox.send_nowait(Aborted(1, "fe", f"r{number}", "client"))
    daemon.results._deliver(Collated([], Reported(2, 1, 1, b"", b"", b"")))
    first, second = await daemon.engine._gather(), await daemon.engine._gather()
    assert isinstance(first[0], Collated)
    assert len(first) == ITERATION_INPUTS_MAX
    assert len(second) == 6


@pytest.mark.e2e
@pytest.mark.parametrize("actor", ["journal", "results", "compaction", "observer", "health", "ranks"])
async def test_an_actor_that_raises_brings_the_daemon_down_loudly(tmp_path: Path, actor: str) -> None:
    """No request is ended, the trace is in a crash file, the exit code is not 0; the next life has all of them."""
    scene = Scene(tmp_path)
    part = scene.daemon.epochs if actor == "ranks" else getattr(scene.daemon, actor)
    part.run = breaks(scene, part.run)
    code, outcomes = await scene.run_until_broken()
    assert code == Exit.INTERNAL
    assert {outcome.end for outcome in outcomes} == {"lost"}
    crash = (scene.run_dir.logs / f"crash-{actor}.txt").read_text()
    assert "Broken: on purpose" in crash
    assert '"running"' in crash, "the core's view is in the crash file"
    assert not {Kind.EPOCH_ENDED, Kind.CLOSED} & set(scene.kinds())
    assert next_life(scene) == 4


@pytest.mark.e2e
async def test_a_gateway_that_raises_is_seen_as_loss(tmp_path: Path) -> None:
    """Without the gateway nothing can be told: streams wait, the next life has every request, the code is not 0."""
    scene = Scene(tmp_path)
    run = scene.daemon.gateway.run

    async def run_and_break(task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(run)
            task_status.started()
            await scene.breaking.wait()
            raise Broken("on purpose")

    scene.daemon.gateway.run = run_and_break  # type: ignore[method-assign]
    code, outcomes = await scene.run_until_broken()
    assert code == Exit.INTERNAL
    assert {outcome.end for outcome in outcomes} == {"lost"}
    assert next_life(scene) == 4


@pytest.mark.e2e
async def test_a_core_that_raises_loses_nothing(tmp_path: Path) -> None:
    """The core fails on an input: it is on disk, the code is not 0, and the next life passes over that input."""
    scene = Scene(tmp_path)
    feed = scene.daemon.core.feed

    def feed_until_broken(item: Any) -> Any:
        if scene.breaking.is_set() and type(item).__name__ == "Reported":
            raise Broken("on purpose")
        return feed(item)

    scene.daemon.core.feed = feed_until_broken  # type: ignore[method-assign]
    code, outcomes = await scene.run_until_broken()
    assert code == Exit.INTERNAL
    assert {outcome.end for outcome in outcomes} == {"lost"}
    assert (scene.run_dir.logs / "crash-engine.txt").exists()
    assert next_life(scene) == 4


@pytest.mark.e2e
async def test_a_socket_that_cannot_be_bound_is_a_failed_start(tmp_path: Path) -> None:
    """With something else in the socket's place the daemon ends with a code and names the path."""
    scene = Scene(tmp_path)
    (scene.run_dir.path / "front.sock").mkdir()
    with trio.fail_after(PATIENCE_S):
        code = await scene.daemon.run(scene.recovered)
    assert code == Exit.USAGE
    assert "front.sock" in scene.log.events("Failed")[0]["error"]


def test_the_cause_of_a_group_is_the_error_with_a_code() -> None:
    """Of nested groups the first error that carries an exit code counts, else the first of all."""
    lost = DaemonError(Exit.RANK, "lost")
    assert root_cause(ExceptionGroup("a", [ValueError("x"), ExceptionGroup("b", [OSError(), lost])])) is lost
    first = ValueError("x")
    assert root_cause(ExceptionGroup("a", [ExceptionGroup("b", [first]), OSError()])) is first
    assert root_cause(first) is first


@pytest.mark.e2e
@pytest.mark.parametrize("signals", [1, 3])
async def test_closed_is_written_when_all_before_it_is_on_disk(tmp_path: Path, signals: int) -> None:
    """The frame of `Closed` itself says that the record before was synced, also at an end that was hurried."""
    scene = Scene(tmp_path)
    code: list[Exit] = []
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery, connected_client(scene) as client:

            async def serve() -> None:
                code.append(await scene.daemon.run(scene.recovered))

            nursery.start_soon(serve)
            await client.wait_connected(PATIENCE_S)
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
    assert code == [Exit.CLEAN]
    (name,) = (name for name in scene.storage.names() if name.endswith(".kvj"))
    found = list(segment.frames(scene.storage.read(name), 0))
    assert isinstance(found[-1], Frame)
    assert found[-1].kind == Kind.CLOSED
    assert found[-1].synced_through == found[-1].sequence - 1


def connected_client(scene: Scene) -> DaemonClient:
    return DaemonClient(f"ipc://{scene.run_dir.path}/front.sock", "fe", lost_after_s=2, return_within_s=2)
