"""`bandmaster rank`: which rank this is by its launcher's words, and one process after the other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemon.processes import is_stopped
from daemon.rank import remote
from daemon.rank.command_line import EXIT_AGAIN, EXIT_FAULT, EXIT_NOT_JOINED, EXIT_ORPHANED, EXIT_STOPPED, EXIT_USAGE
from daemon.rank.errors import BadOption
from daemon.rank.layout import Layout, layout_of, local_number, local_ranks
from daemon.rank.remote import FROZEN_S, PAUSE_FIRST_S, PAUSE_MOST_S, Epochs, place_of
from tests.e2e.harness import eventually
from tools.own_server import ROOT
from tools.rank_driver import settings

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize("environ", [TORCHRUN, SLURM, OPEN_MPI], ids=["torchrun", "slurm", "mpi"])
def test_a_launchers_words_say_which_rank_this_is(environ: dict[str, str]) -> None:
    """Number 5 of 8 with 2 tensor ranks is stage 2, rank 1; where it stands on its machine is passed on."""
    place = place_of(None, None, 2, environ)
    assert (place.stage, place.rank) == (2, 1)
    assert place.environ == {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_flags_say_it_without_a_launcher() -> None:
    """By hand: nothing is read but what a machine has."""
    assert place_of(1, 0, 1, {"RANK": "7"}) == (1, 0, {})


BAD: list[tuple[tuple[Any, ...], dict[str, str], str]] = [
    ((None, None, 1), {}, "which rank is this"),
    ((1, None, 1), {}, "belong together"),
    ((None, None, 3), TORCHRUN, "WORLD_SIZE 8 is no multiple of --tensor-parallel-size 3"),
    ((None, None, 1), {"RANK": "first"}, "RANK='first' in the environment is no whole number"),
    ((0, 5, 2), {}, "--rank 5: --tp 2 has tensor ranks 0 to 1"),
    ((0, -1, 2), {}, "--rank -1: --tp 2 has"),
    ((-1, 0, 2), {}, "--stage -1: stages are counted from 0"),
    ((2, 0, 1, 2), {}, "--stage 2: stages are counted from 0 to --pp - 1 = 1"),
    ((None, None, 2), {"RANK": "8", "WORLD_SIZE": "8"}, "RANK 8: of 8 ranks the last one is 7"),
    ((None, None, 2, 2), {"RANK": "4"}, "RANK 4: of 4 ranks the last one is 3"),
    ((None, None, 2, 2), TORCHRUN, "WORLD_SIZE 8: --pp 2 stages of --tp 2 ranks are 4"),
]


@pytest.mark.parametrize(("given", "environ", "said"), BAD, ids=[said[:20] for _, _, said in BAD])
def test_a_place_that_nothing_says_is_refused(given: tuple[Any, ...], environ: dict[str, str], said: str) -> None:
    """With what is missing or contradicts."""
    with pytest.raises(BadOption, match=said):
        place_of(given[0], given[1], given[2], environ, *given[3:])


def test_a_rank_that_the_daemon_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined as a stage that is not there, or among several without a place to meet."""
    two = settings(stage_layers=[0, 0], tensor_ranks=2, rendezvous="file:///x")
    assert layout_of(two, 1, 1) == Layout(1, 2, 1, 2)
    assert layout_of(settings(), 0, 0) == Layout(0, 1, 0, 1)
    with pytest.raises(BadOption, match=r"stage 2 rank 0: this daemon has 2 stages \(--pp\) of 2 tensor ranks"):
        layout_of(two, 2, 0)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    placed = settings(tensor_ranks=2, rendezvous="env:///name")
    with pytest.raises(BadOption, match=r"pass --rendezvous HOST:PORT.* or set MASTER_ADDR and MASTER_PORT"):
        layout_of(placed, 0, 1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert layout_of(placed, 0, 1) == Layout(0, 1, 1, 2)
    with pytest.raises(BadOption, match="2 ranks without a place where they find each other"):
        layout_of(settings(tensor_ranks=2), 0, 1)


def test_cores_and_gpus_are_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher's LOCAL_ variables; without them every rank is taken to be here."""
    layout = Layout(1, 2, 1, 4)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (local_number(layout), local_ranks(layout)) == (5, 8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (local_number(layout), local_ranks(layout)) == (1, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    with pytest.raises(BadOption, match="LOCAL_WORLD_SIZE='0'"):
        local_ranks(layout)


class Script:
    """A clock that stands still but for what is waited, and processes that end as told."""

    def __init__(self, codes: list[tuple[int, float]]) -> None:
        self.codes = codes  # exit code, and how long the process lived
        self.now = 0.0
        self.pauses: list[float] = []
        self.allowed: list[float] = []  # seconds that each process may take to join
        self.on_start: Callable[[], None] = lambda: None

    def start(self, join_within_s: float) -> Any:
        self.allowed.append(join_within_s)
        self.on_start()
        return self

    def wait(self, _: float) -> int:
        code, lived = self.codes.pop(0)
        self.now += lived
        return code

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def terminate(self) -> None:
        self.codes.insert(0, (-signal.SIGTERM, 0.0))

    def kill(self) -> None:
        self.codes.insert(0, (-signal.SIGKILL, 0.0))

    def epochs(self, join_timeout_s: float, over: Callable[[], bool] = bool) -> Epochs:
        return Epochs(self.start, join_timeout_s, lambda: self.now, self.pause, over)


def test_a_rank_comes_back_for_each_epoch_until_it_is_over() -> None:
    """After a loss, a kill, a fault and another life of the daemon; pauses grow while nothing lasts."""
    ends = [(EXIT_AGAIN, 900.0), (-9, 5.0), (EXIT_FAULT, 5.0), (EXIT_ORPHANED, 5.0), (-9, 5.0), (EXIT_STOPPED, 5.0)]
    script = Script(ends)
    assert script.epochs(600).run() == EXIT_STOPPED
    assert script.codes == []
    first = PAUSE_FIRST_S
    assert script.pauses == [first, 2 * first, 4 * first, first, 2 * first]


def test_a_rank_whose_daemon_stays_away_gives_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten minutes after it was last taken in, with what to look at; pauses do not grow without end."""
    script = Script([(EXIT_ORPHANED, 5000.0), *[(EXIT_NOT_JOINED, 60.0)] * 20])
    assert script.epochs(600).run() == EXIT_NOT_JOINED
    assert 600 <= script.now - 5000 < 680
    assert max(script.pauses) == PAUSE_MOST_S
    assert "no daemon took this rank in" in capsys.readouterr().err


def test_a_process_may_take_no_longer_to_join_than_is_left() -> None:
    """--join-timeout 8 is no 60 s; of 90 s the second process has what the first left."""
    for join_timeout_s, lives, allowed in ((8, [8.5], [8]), (90, [60.0, 29.9], [60, 29.9])):
        script = Script([(EXIT_NOT_JOINED, life) for life in lives])
        assert script.epochs(join_timeout_s).run() == EXIT_NOT_JOINED
        assert script.allowed == pytest.approx(allowed)


def test_a_rank_that_is_between_two_processes_when_it_is_over_starts_no_other() -> None:
    """The daemon ended while one crashed and the next was waited for: code 0, not ten minutes of looking for it."""
    for over_at in (5.0, 5.2):  # in the last moment of a process, or in the pause behind it
        script = Script([(EXIT_FAULT, 1.0), (EXIT_FAULT, 3.9)])
        assert script.epochs(600, lambda at=over_at, script=script: script.now >= at).run() == EXIT_STOPPED
        assert script.codes == []


def test_a_process_that_does_not_end_when_it_is_over_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen, or in something that takes its time: its starter heard the last word for it."""
    monkeypatch.setattr(remote, "LOOK_S", 0.001)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    looks = iter(range(10_000))
    epochs = Epochs(lambda _: child, 600, lambda: next(looks) / 4, lambda _: None, over=lambda: True)
    assert epochs.run() == EXIT_STOPPED
    assert child.returncode == -signal.SIGKILL
    assert next(looks) / 4 > remote.OVER_WITHIN_S, "it had the time to end by itself"
    assert child.stdin is not None
    child.stdin.close()


@pytest.mark.e2e
def test_a_rank_without_a_daemon_ends_when_it_was_told_to(tmp_path: Path) -> None:
    """Nobody listens: code 5 after --join-timeout, not after the minute that a join may take else."""
    command = [sys.executable, "-m", "tools.cli", "rank", "--stage", "0", "--rank", "0", "--join-timeout", "1"]
    command += ["--endpoint", f"ipc://{tmp_path}/nobody.sock"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=45, check=False)
    assert ended.returncode == EXIT_NOT_JOINED
    assert "(--join-timeout 1)" in ended.stderr


def test_a_signal_ends_the_process_and_starts_no_other() -> None:
    """SIGTERM of a launcher: exit code 143."""
    script = Script([(EXIT_AGAIN, 1.0)])
    epochs = script.epochs(600)
    script.on_start = lambda: epochs.end(signal.SIGTERM, None)
    assert epochs.run() == 128 + signal.SIGTERM


def test_a_signal_that_comes_while_the_next_process_starts_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler knew the process before only; the new one must not run on with nobody to end it."""
    monkeypatch.setattr(remote, "LOOK_S", 0.001)
    made: list[subprocess.Popen[bytes]] = []

    def start(_: float) -> subprocess.Popen[bytes]:
        epochs.end(signal.SIGTERM, None)
        made.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return made[0]

    looks = iter(range(10_000))  # of a clock that fails the test instead of waiting for ever
    epochs = Epochs(start, 600, lambda: next(looks), lambda _: None)
    assert epochs.run() == 128 + signal.SIGTERM
    assert made[0].returncode == -signal.SIGTERM
    assert made[0].stdin is not None
    made[0].stdin.close()


@pytest.mark.parametrize("more", [["--endpoint", "nonsense"], ["--endpoint", "tcp://127.0.0.1:9", "--keys", "/no"]])
def test_a_rank_that_no_daemon_could_hear_ends_at_once(more: list[str]) -> None:
    """An endpoint that is none, keys that are not there: said once, not tried for ten minutes."""
    command = [sys.executable, "-m", "tools.cli", "rank", "--stage", "0", "--rank", "0", *more]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_USAGE
    assert ended.stderr.count("cannot connect") == 1
    assert "is neither ipc:// nor tcp://" in ended.stderr or "run `bandmaster keys /no`" in ended.stderr


def test_a_stopped_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP: the daemon has given it up long before, and nobody but its starter can end it."""
    now = [0.0]
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert is_stopped(child.pid)
    monkeypatch.setattr(remote, "LOOK_S", 0.001)

    def clock() -> float:
        now[0] += FROZEN_S / 4
        return now[0]

    epochs = Epochs(lambda _: child, 600, clock, lambda _: None)
    assert epochs._wait(child) == -signal.SIGKILL
    assert not is_stopped(child.pid)
    assert child.stdin is not None
    child.stdin.close()


def joining(parent: int) -> psutil.Process | None:
    """The rank process of a command once it has a socket of ZeroMQ, long after it asked to die with its parent."""
    for process in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "daemon.rank" in process.cmdline() and "ZMQbg/IO/0" in thread_names(process.pid):
                return process
    return None


def thread_names(pid: int) -> list[str]:
    """What the threads of a process call themselves."""
    return [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]


@pytest.mark.e2e
def test_a_stopped_rank_dies_with_the_command_that_started_it(tmp_path: Path) -> None:
    """kill -9 of `bandmaster rank` while its process cannot notice anything (X4): nothing is left."""
    command = [sys.executable, "-m", "tools.cli", "rank", "--stage", "0", "--rank", "0"]
    command += ["--endpoint", f"ipc://{tmp_path}/nobody.sock"]
    parent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        child = eventually(lambda: joining(parent.pid), "a process tries to join")
        child.send_signal(signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()
