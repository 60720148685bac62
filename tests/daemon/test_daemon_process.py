"""The daemon as a process, with a modeled rank: its ends by signal, by fault and by refusal, and what they leave."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from daemon.exits import Exit
from ipc.client import DaemonClient
from ipc.sockets import connect_dealer
from journal.reader import read_records
from journal.records import Closed, Kind, Readied
from journal.storage import DiskStorage
from tests.daemon.daemon_process import PATIENCE_S, DaemonProcess, Outcome, kinds, request, running, under_load
from tools.replay import replay_directory

pytestmark = pytest.mark.e2e
LONG = 5000  # tokens that nobody waits for


def leftovers(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


async def do(action: Any, *arguments: Any) -> None:
    action(*arguments)


async def test_X7_terminate_lets_running_requests_finish(tmp_path: Path) -> None:
    """SIGTERM under load: new calls are refused as draining, running ones finish in full, journal closed, exit 0."""
    late = Outcome()
    async with running(tmp_path / "run", delay_us=5000) as (daemon, client):

        async def act() -> None:
            daemon.send(signal.SIGTERM)
            while not (await client.ask("status")).body.count('"ending: drain"'):
                await trio.sleep(0.01)
            await request(client, "late", late)

        outcomes = await under_load(client, 6, 100, act)
        assert await daemon.code() == Exit.CLEAN
    assert late.end == "refused draining"
    assert {(outcome.end, outcome.tokens) for outcome in outcomes} == {("length", 100)}
    assert kinds(tmp_path / "run")[-1] == Kind.CLOSED
    assert leftovers(tmp_path / "run") == ["journal", "logs"]
    assert len(daemon.lines("Finished")) == 6
    assert replay_directory(str(tmp_path / "run")).divergence is None


async def test_strange_bytes_at_the_ranks_socket_are_counted_and_said_once(tmp_path: Path) -> None:
    """A hundred of them move one counter in the metrics by a hundred and make one log line; serving goes on."""
    async with running(tmp_path / "run") as (daemon, client):
        stranger = connect_dealer(f"ipc://{tmp_path}/run/ranks.sock")
        for _ in range(100):
            await stranger.send([b"\xc1 no message"])
        counted = 'bandmaster:rank_stream_events{event="undecodable"} 100.0'
        while counted not in (await client.ask("metrics")).body:
            await trio.sleep(0.05)
        stranger.close()
        outcomes = await under_load(client, 1, 5, lambda: do(daemon.send, signal.SIGTERM))
        assert await daemon.code() == Exit.CLEAN
    assert [line["code"] for line in daemon.lines("StrangeRankMessage")] == ["undecodable"]
    assert outcomes[0].end == "length"


async def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The daemon's own error line and the crash file repeat the rank's last error, of this life."""
    for window in (4000, 5000):
        shape = ("--rank-option", f"windows={window}", "--rank-option", "depth=50")
        daemon = DaemonProcess(tmp_path / "run", *shape, "--arena-bytes", "1MiB")
        assert await daemon.code() == Exit.BOOT
        failed = daemon.lines("Failed")[-1]["error"]
        for text in (failed, (tmp_path / "run" / "logs" / "crash-ranks.txt").read_text()):
            assert "the memory budget of 1,048,576 bytes" in text
            assert f"floor: window:{window} " in text


async def test_an_option_that_a_rank_refuses_is_usage(tmp_path: Path) -> None:
    """Code 2 with one clear error, and no traceback anywhere: not in the logs, and there is no crash file."""
    for option, said in (("zork=1", "unknown option 'zork'"), ("full=2", "full=2, state=0 and blind=0 are 0 or 1")):
        run_dir = tmp_path / option
        daemon = DaemonProcess(run_dir, "--rank-option", option)
        assert await daemon.code() == Exit.USAGE
        (failed,) = daemon.lines("Failed")
        assert failed["error"].startswith("rank 0.0 BadOption: ")
        assert said in failed["error"]
        written = [daemon.output.read_text(), *(path.read_text() for path in (run_dir / "logs").iterdir())]
        assert not any("Traceback" in text for text in written)
        assert not (run_dir / "logs" / "crash-ranks.txt").exists()


async def test_X7_the_drain_timeout_ends_what_is_left(tmp_path: Path) -> None:
    """Requests that outlast the drain timeout end as drained, near that time, each with one terminal message."""
    async with running(tmp_path / "run", "--drain-timeout", "700ms", delay_us=5000) as (daemon, client):
        started = trio.current_time()
        outcomes = await under_load(client, 4, LONG, lambda: do(daemon.send, signal.SIGTERM))
        took = trio.current_time() - started
        assert await daemon.code() == Exit.CLEAN
    assert {(outcome.end, outcome.detail) for outcome in outcomes} == {("drained", "the drain timeout passed")}
    assert 0.6 < took < 5
    written = list(read_records(DiskStorage(tmp_path / "run" / "journal")))
    readied = next(record for record in written if record.kind == Kind.READIED)
    said = readied.decode()
    assert isinstance(said, Readied)
    assert said.versions["numpy"], "what the rank runs on is on record"
    assert readied.sequence < next(record.sequence for record in written if record.kind == Kind.EPOCH_BEGAN)
    closed = written[-1].decode()
    assert isinstance(closed, Closed)
    assert closed.totals["failed_total"] + closed.totals["aborted_total"] + closed.totals["finished_total"] == 4


async def test_27_interrupt_ends_requests_at_once(tmp_path: Path) -> None:
    """SIGINT: every request ends now, with a detail of its own, and the exit is clean."""
    async with running(tmp_path / "run", delay_us=5000) as (daemon, client):
        outcomes = await under_load(client, 4, LONG, lambda: do(daemon.send, signal.SIGINT))
        assert await daemon.code() == Exit.CLEAN
    assert {(outcome.end, outcome.detail) for outcome in outcomes} == {("drained", "the daemon was told to stop")}
    assert replay_directory(str(tmp_path / "run")).divergence is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_X1_without_restarts_a_lost_rank_ends_everything_with_fault(tmp_path: Path, number: int) -> None:
    """Each request ends with reason fault within the stated time, the exit code says rank, no rank is left."""
    run_dir = tmp_path / "run"
    flags = ("--rank-timeout", "2", "--epoch-restarts-max", "0")
    async with running(run_dir, *flags, delay_us=5000) as (daemon, client):
        ranks = daemon.ranks()
        started = trio.current_time()
        outcomes = await under_load(client, 4, LONG, lambda: do(ranks[0].send_signal, number))
        took = trio.current_time() - started
        assert await daemon.code() == Exit.RANK
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    assert {outcome.end for outcome in outcomes} == {"fault"}
    assert took < 5
    assert "rank 0.0" in outcomes[0].detail
    assert (run_dir / "logs" / "crash-ranks.txt").exists()
    assert kinds(run_dir).count(Kind.EPOCH_ENDED) == 1
    assert Kind.CLOSED not in kinds(run_dir)
    assert replay_directory(str(run_dir)).divergence is None


async def test_X2_a_signal_after_a_fault_does_not_clean_the_exit(tmp_path: Path) -> None:
    """The last rank dies, SIGTERM follows at once: still the rank's exit code."""

    async with running(tmp_path / "run", "--epoch-restarts-max", "0", delay_us=5000) as (daemon, client):

        async def act() -> None:
            daemon.ranks()[0].kill()
            while daemon.alive() and not daemon.lines("Failed"):
                await trio.sleep(0.005)
            if daemon.alive():
                daemon.send(signal.SIGTERM)

        await under_load(client, 2, LONG, act)
        assert await daemon.code() == Exit.RANK


async def test_X1_a_frozen_daemon_is_noticed_by_its_front_end(tmp_path: Path) -> None:
    """SIGSTOP of the daemon: the client's streams end as lost within its time; after SIGCONT the daemon serves on."""
    async with running(tmp_path / "run", delay_us=5000, lost_after_s=2) as (daemon, client):
        outcomes = await under_load(client, 3, LONG, lambda: do(daemon.send, signal.SIGSTOP))
        assert {outcome.end for outcome in outcomes} == {"lost"}
        daemon.send(signal.SIGCONT)
        await client.wait_connected(20)
        again = Outcome()
        await request(client, "again", again)
        assert again.end == "length"
        daemon.send(signal.SIGTERM)
        assert await daemon.code() == Exit.CLEAN


async def test_a_killed_daemon_leaves_requests_that_go_on(tmp_path: Path) -> None:
    """kill -9 in mid-load: ranks leave, the next life takes every request up where its client stands, both replay."""
    run_dir = tmp_path / "run"
    lives: list[DaemonProcess] = []
    async with running(run_dir, delay_us=5000, return_within_s=PATIENCE_S) as (daemon, client):
        ranks = daemon.ranks()

        async def act() -> None:
            daemon.send(signal.SIGKILL)
            await daemon.code()
            lives.append(DaemonProcess(run_dir))

        outcomes = await under_load(client, 3, 300, act)
        again = Outcome()
        await request(client, "again", again)
        lives[0].send(signal.SIGINT)
        assert await lives[0].code() == Exit.CLEAN
    assert psutil.wait_procs(ranks, timeout=5)[1] == []
    assert {(outcome.end, outcome.tokens) for outcome in outcomes} == {("length", 300)}
    assert again.end == "length"
    assert [line["live"] for line in daemon.lines("Recovered")] == [3]
    assert daemon.lines("Finished")[-1]["request"] == 4, "request numbers go on over lives"
    assert replay_directory(str(run_dir)).divergence is None


PARENT = """
import os, subprocess, sys
from daemon.processes import child_environment
subprocess.Popen(sys.argv[1:], env=child_environment(os.environ)).wait()
"""


async def test_an_orphaned_daemon_ends_no_request(tmp_path: Path) -> None:
    """kill -9 of whoever started it: the daemon leaves by itself, and the next life goes on with every request."""
    run_dir = tmp_path / "run"
    parent = [sys.executable, "-c", PARENT]
    async with running(run_dir, delay_us=5000, return_within_s=PATIENCE_S, parent=parent) as (daemon, client):
        pid = int((run_dir / "daemon.pid").read_text())
        lives: list[DaemonProcess] = []

        async def act() -> None:
            daemon.send(signal.SIGKILL)
            while psutil.pid_exists(pid):
                await trio.sleep(0.02)
            lives.append(DaemonProcess(run_dir))

        outcomes = await under_load(client, 3, 300, act)
        lives[0].send(signal.SIGTERM)
        assert await lives[0].code() == Exit.CLEAN
    assert {(outcome.end, outcome.tokens) for outcome in outcomes} == {("length", 300)}
    assert [line["code"] for line in daemon.lines("Ended")] == [Exit.CHILD, Exit.CLEAN]
    assert Kind.CLOSED in kinds(run_dir)
    assert replay_directory(str(run_dir)).divergence is None


async def test_what_refuses_to_start_says_why(tmp_path: Path) -> None:
    """A second owner exits 5 naming the first, a bad setting 2, a damaged journal 4, a rank with a bad option 2."""
    run_dir = tmp_path / "run"
    async with running(run_dir) as (daemon, _):
        second = DaemonProcess(run_dir)
        assert await second.code() == Exit.IN_USE
        assert str(daemon.process.pid) in second.output.read_text()
        wrong = DaemonProcess(run_dir, "--page-size", "0")
        assert await wrong.code() == Exit.USAGE
        assert "--page-size" in wrong.output.read_text()
        daemon.send(signal.SIGINT)
        assert await daemon.code() == Exit.CLEAN
    unbootable = DaemonProcess(tmp_path / "other", "--rank-option", "vocab_size=none")
    assert await unbootable.code() == Exit.USAGE
    assert leftovers(tmp_path / "other") == ["journal", "logs"]
    segment = next((run_dir / "journal").glob("*.kvj"))
    data = bytearray(segment.read_bytes())
    data[200] ^= 0xFF
    segment.write_bytes(data)
    damaged = DaemonProcess(run_dir)
    assert await damaged.code() == Exit.JOURNAL
    assert segment.name in damaged.lines("CannotStart")[0]["error"]


async def test_X5_siblings_of_the_daemon_are_not_ours(tmp_path: Path) -> None:
    """Stopping, by signal or by fault, touches no process beside the daemon in the same session."""
    sibling = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for number in (signal.SIGINT, signal.SIGKILL):
            async with running(tmp_path / "run", "--epoch-restarts-max", "0") as (daemon, _):
                (daemon.ranks()[0].kill if number == signal.SIGKILL else lambda: daemon.send(signal.SIGINT))()
                await daemon.code()
        assert sibling.poll() is None
    finally:
        sibling.communicate(b"\n")


async def test_questions_are_answered(tmp_path: Path) -> None:
    """health, status, metrics and flush have bodies that agree; an unknown question is refused by name."""
    async with running(tmp_path / "run", delay_us=2000) as (_, client):
        seen: dict[str, Any] = {}

        async def act() -> None:
            for what in ("health", "status", "metrics", "flush", "sing"):
                seen[what] = await client.ask(what)

        await under_load(client, 3, 200, act)
        assert seen["health"].ok
        assert '"progress":true' in seen["health"].body
        assert seen["status"].body.count('"stage":"running"') == 3
        assert "bandmaster:num_requests_running 3.0" in seen["metrics"].body
        assert seen["flush"].ok
        assert '"after"' in seen["flush"].body
        assert not seen["sing"].ok
        assert await idle_metrics(client) == {"num_requests_running": "0.0", "request_success_total": "3.0"}


async def test_who_only_watches_orders_nothing(tmp_path: Path) -> None:
    """Every question of a watcher is answered, every order is refused by name, and the daemon goes on as it was."""
    async with running(tmp_path / "run") as (daemon, client):
        async with DaemonClient(f"ipc://{tmp_path}/run/front.sock", "top", watches=True) as watcher:
            await watcher.wait_connected(PATIENCE_S)
            for question in ("health", "status", "watch", "metrics"):
                assert (await watcher.ask(question)).ok
            for order in ("drain", "flush", "flush_cache"):
                refused = await watcher.ask(order)
                assert not refused.ok
                assert refused.body.startswith(f"{order} is an order, and top only watches")
            assert "bandmaster:cache_flushes_total 0.0" in (await watcher.ask("metrics")).body
        outcomes = await under_load(client, 1, 5, lambda: do(daemon.send, signal.SIGTERM))
        assert await daemon.code() == Exit.CLEAN
    assert outcomes[0].end == "length"


async def idle_metrics(client: DaemonClient) -> dict[str, str]:
    """Two metrics once the last iteration was observed."""
    wanted = {"bandmaster:num_requests_running ": "num_requests_running"}
    wanted['bandmaster:request_success_total{finished_reason="length"} '] = "request_success_total"
    for _ in range(100):
        lines = (await client.ask("metrics")).body.splitlines()
        found = {
            name: line.removeprefix(start) for line in lines for start, name in wanted.items() if line.startswith(start)
        }
        if found["request_success_total"] == "3.0":
            return found
    return found


async def test_faults_that_are_planted_anywhere_are_told_at_the_start(tmp_path: Path) -> None:
    """Those of ranks too, long before they strike: a variable that was left behind does not stay unseen."""
    planted = "rank-*:step=1000000:kill"
    async with running(tmp_path / "run", environ={"BANDMASTER_FAULTS": planted}) as (daemon, _):
        assert [line["faults"] for line in daemon.lines("FaultsPlanted")] == [[planted]]
