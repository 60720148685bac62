"""Ranks that somebody else starts: they join over tcp with keys, and again after each loss."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trio

from daemon.exits import Exit
from ipc.client import DaemonClient
from ipc.keys import load_client_keys, make_keys
from tests.daemon.daemon_process import PATIENCE_S, ROOT, DaemonProcess, running, under_load
from tests.daemon.test_recovery import Told, follow, health
from tests.rank.places import free_port
from tools.replay import replay_directory

pytestmark = pytest.mark.e2e
TOKEN = {"BANDMASTER_RANK_TOKEN": "a token of the cluster's own"}


@contextlib.contextmanager
def placed(endpoint: str, keys: Path, output: Path, meet: bool = True) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two tensor ranks by the variables of torchrun, `meet`: with those of a place to meet. What is left is killed."""
    started = []
    meeting = {"WORLD_SIZE": "2"}
    if meet:
        meeting |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    try:
        for rank in range(2):
            environ = {**os.environ, **TOKEN, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [
                sys.executable,
                "-m",
                "tools.cli",
                "rank",
                "--endpoint",
                endpoint,
                "--keys",
                str(keys),
                "--tp",
                "2",
            ]
            with output.open("ab") as log:
                started.append(subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log))
        yield started
    finally:
        for process in started:
            children = psutil.Process(process.pid).children() if process.poll() is None else []
            process.kill()
            for child in children:
                child.kill()
            process.wait()


async def codes_of(ranks: list[subprocess.Popen[bytes]]) -> list[int]:
    """The exit code of each, once all have ended."""
    codes = []
    with trio.fail_after(PATIENCE_S):
        for rank in ranks:
            codes.append(await trio.to_thread.run_sync(rank.wait, abandon_on_cancel=True))
    return codes


async def test_a_first_boot_without_its_ranks_names_them_at_the_door(tmp_path: Path) -> None:
    """Nobody was welcomed yet, so that nobody can ask: the answer to who knocks says which ranks have not joined."""
    run_dir = tmp_path / "run"
    flags = ["--tp", "2", "--rank-launch", "wait", "--ranks-endpoint", f"ipc://{run_dir}/ranks.sock"]
    daemon = DaemonProcess(run_dir, *flags, environ=TOKEN)
    try:
        async with DaemonClient(f"ipc://{run_dir}/front.sock", "fe") as client:
            with trio.fail_after(PATIENCE_S):
                while "not joined: 0.0, 0.1" not in client.lost_reason:
                    await trio.sleep(0.05)
    finally:
        daemon.kill()


async def test_ranks_placed_elsewhere_come_back_after_a_loss(tmp_path: Path) -> None:
    """kill -9 of one of them under load: its own supervisor starts it again, it joins the next epoch, no token is lost.
    When the daemon ends in order they all do, with code 0.
    """
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    async with running(tmp_path / "alone", delay_us=2000) as (_, client):
        alone = Told()
        await follow(client, "alone", alone, 200)
    keys, run_dir = tmp_path / "keys", tmp_path / "run"
    make_keys(keys, ["rank", "frontend"])
    flags = ["--tp", "2", "--rank-launch", "wait", "--ranks-endpoint", endpoint, "--keys", str(keys)]
    told = [Told() for _ in range(3)]
    with placed(endpoint, keys, tmp_path / "ranks.out") as ranks:
        own = load_client_keys(keys, "frontend")
        async with running(run_dir, *flags, delay_us=2000, environ=TOKEN, keys=own) as (daemon, client):
            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    for index, one in enumerate(told):
                        nursery.start_soon(follow, client, f"r{index}", one, 200)
                    for one in told:
                        await one.decoding.wait()
                    psutil.Process(ranks[1].pid).children()[0].kill()
                    while not daemon.lines("EpochLost"):
                        await trio.sleep(0.02)
                assert (await health(client))["ready"]
                daemon.send(signal.SIGTERM)
                assert await daemon.code() == Exit.CLEAN
                codes = await codes_of(ranks)
    assert codes == [0, 0]
    assert all(one.said == alone.said for one in told)
    assert len(daemon.lines("EpochBegan")) == 2
    lost = daemon.lines("EpochLost")[0]["error"]  # by its peer, which waits for it; or, if that had all it needs, anew
    assert "rank 0.1 is not connected any more (" in lost or "stage 0 rank 1 joins anew" in lost
    assert replay_directory(str(run_dir)).divergence is None


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGHUP, Exit.CHILD)], ids=["killed", "orphaned"]
)
async def test_ranks_placed_elsewhere_join_the_next_life(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """kill -9 of the daemon, or of its launcher: the ranks join the one that comes in its place; no request is lost.

    A daemon that leaves without ending its requests tells its ranks to come again; told that it is over, they end.
    """
    endpoint, keys, run_dir = f"tcp://127.0.0.1:{free_port()}", tmp_path / "keys", tmp_path / "run"
    make_keys(keys, ["rank", "frontend"])
    flags = ["--tp", "2", "--rank-launch", "wait", "--ranks-endpoint", endpoint, "--keys", str(keys)]
    own = load_client_keys(keys, "frontend")
    lives: list[DaemonProcess] = []
    with placed(endpoint, keys, tmp_path / "ranks.out") as ranks:
        scene = running(run_dir, *flags, delay_us=2000, environ=TOKEN, keys=own, return_within_s=PATIENCE_S)
        async with scene as (daemon, client):

            async def act() -> None:
                daemon.send(number)
                assert await daemon.code() == code
                lives.append(DaemonProcess(run_dir, *flags, environ=TOKEN))

            outcomes = await under_load(client, 3, 200, act)
            lives[0].send(signal.SIGTERM)
            assert await lives[0].code() == Exit.CLEAN
            codes = await codes_of(ranks)
    assert codes == [0, 0]
    assert {(outcome.end, outcome.tokens) for outcome in outcomes} == {("length", 200)}
    assert len(daemon.lines("EpochBegan")) == 2
    assert replay_directory(str(run_dir)).divergence is None


async def test_ranks_between_two_epochs_end_with_the_daemon(tmp_path: Path) -> None:
    """Both are lost, and SIGTERM comes before they have joined again: they are told that it is over all the same."""
    endpoint, keys, run_dir = f"tcp://127.0.0.1:{free_port()}", tmp_path / "keys", tmp_path / "run"
    make_keys(keys, ["rank", "frontend"])
    flags = ["--tp", "2", "--rank-launch", "wait", "--ranks-endpoint", endpoint, "--keys", str(keys)]
    own = load_client_keys(keys, "frontend")
    with placed(endpoint, keys, tmp_path / "ranks.out") as ranks:
        async with running(run_dir, *flags, environ=TOKEN, keys=own) as (daemon, _):
            with trio.fail_after(PATIENCE_S):
                for rank in ranks:
                    psutil.Process(rank.pid).children()[0].kill()
                while not daemon.lines("EpochLost"):  # the first of them is back, the other on its way
                    await trio.sleep(0.02)
                daemon.send(signal.SIGTERM)
                assert await daemon.code() == Exit.CLEAN
                assert await codes_of(ranks) == [0, 0]


async def test_a_rank_whose_process_cannot_hear_ends_with_the_daemon(tmp_path: Path) -> None:
    """SIGSTOP, then the daemon ends in order: who started the process is told, within the time that everybody has."""
    endpoint, keys, run_dir = f"tcp://127.0.0.1:{free_port()}", tmp_path / "keys", tmp_path / "run"
    make_keys(keys, ["rank", "frontend"])
    flags = ["--tp", "2", "--rank-launch", "wait", "--ranks-endpoint", endpoint, "--keys", str(keys)]
    own = load_client_keys(keys, "frontend")
    with placed(endpoint, keys, tmp_path / "ranks.out") as ranks:
        async with running(run_dir, *flags, environ=TOKEN, keys=own) as (daemon, _):
            with trio.fail_after(PATIENCE_S):
                psutil.Process(ranks[1].pid).children()[0].suspend()
                daemon.send(signal.SIGTERM)
                assert await daemon.code() == Exit.CLEAN
                assert await codes_of(ranks) == [0, 0]
    assert not daemon.lines("RanksNotTold")


async def test_ranks_are_told_of_an_end_that_is_hurried_too(tmp_path: Path) -> None:
    """SIGTERM three times: nobody waits for what runs, but every rank hears that no other life follows."""
    endpoint, keys, run_dir = f"tcp://127.0.0.1:{free_port()}", tmp_path / "keys", tmp_path / "run"
    make_keys(keys, ["rank", "frontend"])
    flags = ["--tp", "2", "--rank-launch", "wait", "--ranks-endpoint", endpoint, "--keys", str(keys)]
    own = load_client_keys(keys, "frontend")
    with placed(endpoint, keys, tmp_path / "ranks.out") as ranks:
        async with running(run_dir, *flags, delay_us=2000, environ=TOKEN, keys=own) as (daemon, client):

            async def act() -> None:
                for _ in range(3):
                    before = len(daemon.lines("Signal"))
                    daemon.send(signal.SIGTERM)
                    while len(daemon.lines("Signal")) == before and daemon.alive():
                        await trio.sleep(0.001)
                assert await daemon.code() == Exit.CLEAN

            await under_load(client, 2, 5_000, act)
            assert await codes_of(ranks) == [0, 0]


async def test_ranks_that_are_not_told_where_to_meet_say_so_at_once(tmp_path: Path) -> None:
    """By hand without --rendezvous or MASTER_ADDR: code 2, the daemon's and that of who had joined."""
    endpoint, keys, run_dir = f"tcp://127.0.0.1:{free_port()}", tmp_path / "keys", tmp_path / "run"
    make_keys(keys, ["rank", "frontend"])
    flags = ["--tp", "2", "--rank-launch", "wait", "--ranks-endpoint", endpoint, "--keys", str(keys)]
    daemon = DaemonProcess(run_dir, *flags, environ=TOKEN)
    with placed(endpoint, keys, tmp_path / "ranks.out", meet=False) as ranks:
        try:
            with trio.fail_after(PATIENCE_S):
                assert await daemon.code() == Exit.USAGE
                codes = await codes_of(ranks)
        finally:
            daemon.kill()
    assert 2 in codes
    assert set(codes) <= {0, 2}
    assert not daemon.lines("EpochBegan")
    assert len(daemon.lines("EpochLost")) == 1
    assert "pass --rendezvous HOST:PORT" in daemon.lines("EpochLost")[0]["error"]
