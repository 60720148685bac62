"""Lives of a real daemon with real ranks: killed again and again, with snapshots, on every layout; nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from ipc.client import DaemonClient
from tests.daemon.daemon_process import PATIENCE_S, DaemonProcess
from tests.daemon.test_recovery import Told, follow
from tools import trim
from tools.ends import DONE
from tools.replay import replay_directory
from tools.toy_reference import Toy, mismatches

pytestmark = pytest.mark.e2e

COUNT = 8
MAX_TOKENS = 600
PROMPT = [5, 6, 7]  # of `greedy`


@contextlib.asynccontextmanager
async def followed(run_dir: Path, within_s: float) -> AsyncIterator[list[Told]]:
    """What clients that wait for their daemon to come back are told; each has its end when this is left."""
    told = [Told() for _ in range(COUNT)]
    with trio.fail_after(within_s):
        async with DaemonClient(f"ipc://{run_dir}/front.sock", "fe", return_within_s=PATIENCE_S) as client:
            await client.wait_connected(PATIENCE_S)
            async with trio.open_nursery() as nursery:
                for index, one in enumerate(told):
                    nursery.start_soon(follow, client, f"r{index}", one, MAX_TOKENS)
                yield told


async def served(run_dir: Path, *flags: str, kills: int) -> list[list[int]]:
    """What clients of a daemon get that is killed so often, each time once a snapshot more is there."""

    def start() -> DaemonProcess:
        return DaemonProcess(run_dir, "--snapshot", "64KiB", *flags, delay_us=3000)  # streams outlast two snapshots

    daemon = start()
    try:
        async with followed(run_dir, 4 * PATIENCE_S) as told:
            for kill in range(kills):
                while len(daemon.lines("Snapshotted")) <= kill and daemon.alive():
                    await trio.sleep(0.01)
                daemon.send(signal.SIGKILL)
                daemon.process.wait()
                daemon = start()
        daemon.send(signal.SIGTERM)
        assert await daemon.code() == 0
    finally:
        daemon.kill()
    assert [one.end for one in told] == ["length"] * COUNT
    recovered = daemon.lines("Recovered")
    assert len(recovered) == kills
    assert [line["how"] for line in recovered] == ["replayed"] * kills
    assert not daemon.lines("RecoveryNote")
    return [one.said for one in told]


@pytest.mark.parametrize(("layout", "toy"), [("1x1", Toy()), ("2x2", Toy(windows=(32,), state=True, depth=2))])
async def test_killed_behind_a_snapshot_it_goes_on_from_there(tmp_path: Path, layout: str, toy: Toy) -> None:
    """Two kills, each behind another snapshot: the tokens are those without, replay reproduces every snapshot of every
    life for every stage, from the start and from the newest, and what is older can be trimmed."""
    ranks, stages = layout.split("x")
    run_dir = tmp_path / "run"
    flags = ["--tp", ranks, "--pp", stages]
    for name, text in toy.options().items():
        flags += ["--rank-option", f"{name}={text}"]
    for said in await served(run_dir, *flags, kills=2):
        assert len(said) == MAX_TOKENS
        assert not mismatches(toy, PROMPT, said)
    lines = (run_dir / "logs" / "daemon.log").read_text()
    assert '"snapshot": 0' not in "".join(line for line in lines.splitlines() if '"Recovered"' in line)
    whole = replay_directory(str(run_dir))
    assert whole.divergence is None, whole.divergence
    assert whole.counts.lives == 3
    assert whole.counts.snapshots >= 2
    part = replay_directory(str(run_dir), from_snapshot=True)
    assert part.divergence is None, part.divergence
    assert part.counts.steps < whole.counts.steps
    before = len(os.listdir(run_dir / "journal"))
    assert trim.main([str(run_dir)]) == DONE
    assert len(os.listdir(run_dir / "journal")) < before
    trimmed = replay_directory(str(run_dir))
    assert trimmed.divergence is None, trimmed.divergence


@pytest.mark.parametrize("point", ["write=60", "written=90", "fsync=2"])
async def test_killed_at_a_write(tmp_path: Path, point: str) -> None:
    """A daemon that its own disk kills: before the Nth write of the journal, behind it, or at an fsync."""
    run_dir = tmp_path / "run"
    environ = {"BANDMASTER_FAULTS": f"daemon:journal.{point}:kill", "BANDMASTER_FAULTS_DIR": str(tmp_path)}
    lives = [DaemonProcess(run_dir, delay_us=1000, environ=environ)]

    async def replace() -> None:
        """Whenever it dies: where booting takes long, the second fsync comes before anybody was welcomed."""
        while lives[0].alive():
            await trio.sleep(0.01)
        assert lives[0].process.returncode == -signal.SIGKILL
        lives.append(DaemonProcess(run_dir, delay_us=1000, environ=environ))

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(replace)
            async with followed(run_dir, 2 * PATIENCE_S) as told:
                pass
    finally:
        lives[-1].kill()
    for one in told:
        assert len(one.said) == MAX_TOKENS
        assert not mismatches(Toy(), PROMPT, one.said)
    verdict = replay_directory(str(run_dir))
    assert verdict.divergence is None, verdict.divergence
    assert verdict.counts.lives == 2
