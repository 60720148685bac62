"""The rank process over a real socket: the life of an epoch, faults, and leaving when alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import trio

from allocator.columns import i64
from daemon.rank.command_line import EXIT_AGAIN, EXIT_FAULT, EXIT_ORPHANED, EXIT_STOPPED, EXIT_USAGE
from ipc.codec import encode
from ipc.messages import Begin, Explain, Explained, Fault, Heartbeat, Hello, Join, Ready, Report, Stop
from ipc.streams import RankServer
from tools.rank_driver import Driver, settings

TOKEN = "00112233445566778899aabbccddeeff"
pytestmark = pytest.mark.e2e


class Daemon:
    """A rank server and the rank it started; `driver` makes the steps and knows what the tokens must be."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self.endpoint = f"ipc://{directory}/ranks.sock"
        self.server = RankServer(self.endpoint, token=TOKEN, ranks=[(0, 0)])
        self.server.begin_epoch(1)
        self.config = settings()
        self.driver = Driver(self.config)
        self.beats = 0
        self.process: subprocess.Popen[bytes]

    def spawn(self, parent: str = "") -> None:
        """Start the rank; with `parent`, as the child of a process that runs that code."""
        command = [sys.executable, "-m", "daemon.rank", "--endpoint", self.endpoint]
        if parent:
            command = [sys.executable, "-c", parent, *command]
        environment = os.environ | {"BANDMASTER_RANK_TOKEN": TOKEN}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)

    async def next(self) -> Join | Ready | Report | Explained | Fault:
        """The rank's next message that is not a heartbeat."""
        while True:
            message = await self.server.recv()
            if not isinstance(message, Heartbeat):
                return message
            self.beats += 1

    async def begin(self, **changes: object) -> Ready:
        """Take the rank in, up to Begin."""
        assert isinstance(await self.next(), Join)
        await self.server.send(0, 0, Hello(1, msgspec.structs.replace(self.config, **changes)))
        ready = await self.next()
        assert isinstance(ready, Ready), ready
        self.server.broadcast(Begin(1, self.driver.geometry))
        return ready

    async def ended(self) -> int:
        """The rank's exit code."""
        return await trio.to_thread.run_sync(self.process.wait)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    """A daemon's end, closed afterwards; the rank must be gone or is ended by its pid."""
    made = Daemon(tmp_path / "run")
    with trio.fail_after(60):
        yield made
    await made.server.aclose()
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()


async def test_an_epoch_from_join_to_stop(daemon: Daemon) -> None:
    """Join, Ready, Begin, steps with reports in order and equal to a worker's here, heartbeats, Stop, exit 0."""
    daemon.spawn()
    ready = await daemon.begin()
    assert (ready.geometry, ready.virtual_pages) == (
        daemon.driver.prepared.geometry,
        daemon.driver.prepared.virtual_pages,
    )
    driver = daemon.driver
    want = driver.generate(0, [50, 51, 52], 20)
    for step in driver.steps:
        daemon.server.send_step(step.seq, encode(step))
    got: list[int] = []
    for expected in driver.reports:
        report = await daemon.next()
        assert isinstance(report, Report)
        assert msgspec.structs.replace(report, forward_us=0) == msgspec.structs.replace(expected, forward_us=0)
        got += i64(report.tokens).tolist()
    assert got == want
    daemon.server.broadcast(Stop("done"))
    assert await daemon.ended() == EXIT_STOPPED
    assert daemon.beats > 0


async def test_a_rank_says_what_its_newest_steps_did_and_joins_again(daemon: Daemon) -> None:
    """Explain gets digests and effects of every step, op by op; a Stop with another epoch behind it exits 4."""
    daemon.spawn()
    await daemon.begin()
    daemon.driver.generate(0, [50, 51, 52], 5)
    for step in daemon.driver.steps:
        daemon.server.send_step(step.seq, encode(step))
    for _ in daemon.driver.steps:
        assert isinstance(await daemon.next(), Report)
    daemon.server.broadcast(Explain(1))
    told = await daemon.next()
    assert isinstance(told, Explained)
    assert told.steps == daemon.driver.worker.traces.explain()
    assert [(step.seq, step.logical, step.layout) for step in told.steps] == [
        (report.seq, report.logical, report.layout) for report in daemon.driver.reports
    ]
    daemon.server.broadcast(Stop("a peer was lost", again=True))
    assert await daemon.ended() == EXIT_AGAIN


async def test_a_fault_names_the_step_and_ends_the_process(daemon: Daemon) -> None:
    """A step that cannot be: Fault with seq and trace, exit 1, nothing reported after it."""
    daemon.spawn()
    await daemon.begin()
    driver = daemon.driver
    driver.start(0)
    good = driver.make([(0, [50], True)])
    bad = msgspec.structs.replace(driver.make([]), ops=good.ops)
    for step in (good, bad):
        daemon.server.send_step(step.seq, encode(step))
    assert isinstance(await daemon.next(), Report)
    fault = await daemon.next()
    assert isinstance(fault, Fault)
    assert (fault.seq, "InvariantBroken" in fault.what, "launch" in fault.trace) == (2, True, True)
    assert await daemon.ended() == EXIT_FAULT


async def test_a_model_that_cannot_be_loaded_is_a_fault(daemon: Daemon) -> None:
    """What is wrong with the settings reaches the daemon in words."""
    daemon.spawn()
    assert isinstance(await daemon.next(), Join)
    await daemon.server.send(0, 0, Hello(1, msgspec.structs.replace(daemon.config, arena_bytes=256)))
    fault = await daemon.next()
    assert isinstance(fault, Fault)
    assert "floor" in fault.what
    assert await daemon.ended() == EXIT_FAULT


async def test_settings_that_no_runner_takes_are_a_fault(daemon: Daemon) -> None:
    """So that the daemon can say it where it does not see the rank's log."""
    daemon.spawn()
    assert isinstance(await daemon.next(), Join)
    await daemon.server.send(0, 0, Hello(1, msgspec.structs.replace(daemon.config, options={"nonsense": "1"})))
    fault = await daemon.next()
    assert isinstance(fault, Fault)
    assert fault.what.startswith("BadOption: unknown option 'nonsense'")
    assert await daemon.ended() == EXIT_USAGE


async def test_the_rank_leaves_when_the_daemon_is_gone(daemon: Daemon) -> None:
    """The socket closes: the rank ends by itself, also without a Stop."""
    daemon.spawn()
    await daemon.begin()
    await daemon.server.aclose()
    assert await daemon.ended() == EXIT_ORPHANED


async def test_a_stop_that_was_the_last_word_counts(daemon: Daemon) -> None:
    """The rank is stopped while its daemon says Stop and goes: when it wakes, both are there, and the word counts."""
    daemon.spawn()
    await daemon.begin()
    daemon.process.send_signal(signal.SIGSTOP)
    daemon.server.broadcast(Stop("over"))
    await daemon.server.aclose(200)
    await trio.sleep(0.2)
    daemon.process.send_signal(signal.SIGCONT)
    assert await daemon.ended() == EXIT_STOPPED


async def test_the_rank_leaves_when_its_parent_is_killed(daemon: Daemon) -> None:
    """kill -9 of the parent while the socket still stands: the rank ends all the same."""
    daemon.spawn("import subprocess, sys; subprocess.run(sys.argv[1:])")
    await daemon.begin()
    daemon.process.send_signal(signal.SIGKILL)
    await trio.to_thread.run_sync(daemon.process.wait)
    assert daemon.process.stderr is not None
    # The rank holds the other end of stderr: end of file comes when it is gone.
    log = await trio.to_thread.run_sync(daemon.process.stderr.read)
    assert b'"gone": "parent"' in log
