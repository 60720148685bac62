"""`bandmaster rank`: a rank that torchrun, Slurm, Ray or a person starts, for as long as its daemon wants one.

Owns the place of this rank by the launcher's environment, and one `python -m daemon.rank` after the other, one for each
epoch. Must never compute, nor say more to the daemon than that it stands by. It starts the next one when an epoch was
lost or the daemon came back in another life, with growing pauses, and ends when the daemon says that it is over, to a
process of the rank or to this one, or has not been there for `--join-timeout`. A rank that is stopped (SIGSTOP) for
`FROZEN_S` is killed: the daemon has given it up by then.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE       torchrun, and what Ray's workers are given
    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID            srun
    stage = RANK // tensor ranks, tensor rank = RANK % tensor ranks
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from daemon.processes import TOKEN_VARIABLE, child_environment, die_with_parent, is_stopped, module_command
from daemon.rank.command_line import (
    EXIT_AGAIN,
    EXIT_NOT_JOINED,
    EXIT_ORPHANED,
    EXIT_STOPPED,
    EXIT_USAGE,
    JOIN_TIMEOUT_S,
    add_connection,
)
from daemon.rank.errors import BadOption
from ipc.errors import IpcError
from ipc.keys import load_client_keys
from ipc.standby import Standby

WITHOUT_DAEMON_S = 600.0
SURELY_JOINED_S = JOIN_TIMEOUT_S + 10  # a process that lived so long had joined
JOIN_LEAST_S = 1.0
PAUSE_FIRST_S, PAUSE_MOST_S = 0.1, 5.0
FROZEN_S = 15.0
LOOK_S = 0.2
OVER_WITHIN_S = 5.0  # for a process to end by itself, once it is over
# Names of one number under each launcher; the first that is set counts.
RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
LOCAL_WORLD = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")


class RemotePlace(NamedTuple):
    """Which rank this is, and the environment that tells it where on its machine it stands."""

    stage: int
    rank: int
    environ: dict[str, str]


def place_of(
    stage: int | None, rank: int | None, tensor_ranks: int, environ: Mapping[str, str], stages: int | None = None
) -> RemotePlace:
    """By flags, else by the launcher's environment; raises BadOption naming what is missing or contradicts."""
    local = {"LOCAL_RANK": _find(LOCAL_RANK, environ), "LOCAL_WORLD_SIZE": _find(LOCAL_WORLD, environ)}
    told = {name: str(value) for name, value in local.items() if value is not None}
    if (stage is None) != (rank is None):
        raise BadOption("--stage and --rank belong together; leave both out where the launcher sets RANK")
    if stage is not None and rank is not None:
        if not 0 <= rank < tensor_ranks:
            raise BadOption(
                f"--rank {rank}: --tp {tensor_ranks} has tensor ranks 0 to {tensor_ranks - 1} in each stage"
            )
        if stage < 0 or stage >= (stages or stage + 1):
            raise BadOption(
                f"--stage {stage}: stages are counted from 0 to --pp - 1{f' = {stages - 1}' if stages else ''}"
            )
        return RemotePlace(stage, rank, told)
    number, world = _find(RANK, environ), _find(WORLD, environ)
    if number is None:
        raise BadOption(
            f"which rank is this? None of {', '.join(RANK)} is set, as torchrun, srun and mpirun do; pass --stage and "
            "--rank, or set RANK"
        )
    if world is not None and world % tensor_ranks:
        raise BadOption(
            f"WORLD_SIZE {world} is no multiple of --tensor-parallel-size {tensor_ranks}: every stage has that many "
            "ranks; start stages x tensor ranks of them"
        )
    total = world if stages is None else stages * tensor_ranks
    if stages is not None and world is not None and world != total:
        raise BadOption(f"WORLD_SIZE {world}: --pp {stages} stages of --tp {tensor_ranks} ranks are {total}")
    if total is not None and number >= total:
        raise BadOption(f"RANK {number}: of {total} ranks the last one is {total - 1}")
    return RemotePlace(number // tensor_ranks, number % tensor_ranks, told)


def _find(names: Sequence[str], environ: Mapping[str, str]) -> int | None:
    for name in names:
        text = environ.get(name, "")
        if text:
            if not text.isdecimal():
                raise BadOption(f"{name}={text!r} in the environment is no whole number")
            return int(text)
    return None


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bandmaster rank",
        description="One rank of a daemon that runs with --rank-launch wait, here or on another host.",
    )
    add = parser.add_argument
    add("--endpoint", required=True, help="the daemon's --ranks-endpoint, tcp://HOST:PORT or ipc://PATH")
    add("--tensor-parallel-size", "--tp", type=_count, default=1, metavar="N", help="as of the daemon [1]")
    add("--pipeline-parallel-size", "--pp", type=_count, metavar="N", help="as of the daemon [by WORLD_SIZE]")
    add("--stage", type=int, help="pipeline stage [by RANK of the environment]")
    add("--rank", type=int, help="tensor rank within the stage [by RANK of the environment]")
    add("--join-timeout", type=float, default=WITHOUT_DAEMON_S, metavar="S", help="seconds without a daemon [600]")
    add_connection(parser)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


class Epochs:
    """One process after the other, until it is over; `run` returns the exit code."""

    def __init__(
        self,
        start: Callable[[float], subprocess.Popen[bytes]],
        join_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        over: Callable[[], bool] = bool,
    ) -> None:
        """`start` is given the seconds within which the process must be taken in. `over`: the daemon said so to us."""
        self._start = start
        self._join_timeout_s = join_timeout_s
        self._clock, self._pause, self._over = clock, pause, over
        self._child: subprocess.Popen[bytes] | None = None
        self._signal = 0

    def run(self) -> int:
        """0 when the daemon said that it is over, 2 for a place or keys that cannot be, 5 when there was no daemon for
        too long, 128 + the signal after one."""
        pause_s, heard = PAUSE_FIRST_S, self._clock()
        while not self._signal:
            started = self._clock()
            left_s = heard + self._join_timeout_s - started
            self._child = self._start(min(JOIN_TIMEOUT_S, max(left_s, JOIN_LEAST_S)))
            code = self._wait(self._child)
            if code in (EXIT_STOPPED, EXIT_USAGE):
                return code
            if self._over():
                return EXIT_STOPPED
            now = self._clock()
            if code in (EXIT_AGAIN, EXIT_ORPHANED) or now - started > SURELY_JOINED_S:
                pause_s, heard = PAUSE_FIRST_S, now
            if now - heard >= self._join_timeout_s:
                sys.stderr.write(
                    f"bandmaster rank: no daemon took this rank in for {now - heard:.0f} s (--join-timeout "
                    f"{self._join_timeout_s:g}): is it there, with --rank-launch wait, as many ranks and its key?\n"
                )
                return EXIT_NOT_JOINED
            self._pause(pause_s)
            if self._over():
                return EXIT_STOPPED
            pause_s = min(pause_s * 2, PAUSE_MOST_S)
        return 128 + self._signal

    def end(self, number: int, _: object) -> None:
        """A signal for us: the process, which ignores Ctrl-C, is told to end, and no other follows."""
        self._signal = number
        if self._child is not None:
            self._child.terminate()

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Its exit code, once it has ended; one that is frozen, or does not end when it is over, is killed."""
        stopped_since: float | None = None
        over_since: float | None = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(LOOK_S)
            if self._signal:
                child.terminate()  # the signal may have come while this one was being started
            now = self._clock()
            if self._over():
                over_since = now if over_since is None else over_since
                if now - over_since > OVER_WITHIN_S:
                    child.kill()
            if not is_stopped(child.pid):
                stopped_since = None
            elif stopped_since is None:
                stopped_since = now
            elif now - stopped_since > FROZEN_S:
                child.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve epochs; `Epochs.run` has the exit codes, 2 is for a command line or an environment that says too little."""
    die_with_parent(signal.SIGTERM)
    options = build_parser().parse_args(argv)
    try:
        tensor_ranks, stages = options.tensor_parallel_size, options.pipeline_parallel_size
        place = place_of(options.stage, options.rank, tensor_ranks, os.environ, stages)
    except BadOption as error:
        sys.stderr.write(f"bandmaster rank: {error}\n")
        return EXIT_USAGE
    given = ["--endpoint", options.endpoint, "--stage", str(place.stage), "--rank", str(place.rank)]
    given += ["--keys", options.keys, "--client", options.client] if options.keys else []
    given += ["--insecure"] if options.insecure else []
    command = module_command("daemon.rank", *given)
    environ = child_environment({**os.environ, **place.environ})

    def start(join_within_s: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*command, "--join-timeout", f"{join_within_s:g}"], env=environ, stdin=subprocess.DEVNULL
        )

    standby = _standby(options, place)
    more: dict[str, Any] = {"pause": standby.pause, "over": standby.over} if standby is not None else {}
    epochs = Epochs(start, options.join_timeout, **more)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, epochs.end)
    code = epochs.run()
    if standby is not None:
        standby.close()
    return code


def _standby(options: argparse.Namespace, place: RemotePlace) -> Standby | None:
    """None where no daemon can be reached so: the rank's own process says why, and ends with code 2."""
    try:
        keys = load_client_keys(Path(options.keys), options.client) if options.keys else None
        token = os.environ.get(TOKEN_VARIABLE, "")
        return Standby(
            options.endpoint, stage=place.stage, rank=place.rank, token=token, keys=keys, insecure=options.insecure
        )
    except IpcError:
        return None


if __name__ == "__main__":
    sys.exit(main())
