"""A copy of the process works on what it remembers; whatever becomes of it, the process has an answer or one error."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trio
import zstandard

from daemon import forked
from daemon.forked import Forked, ForkedFailed, Receive
from daemon.processes import SOURCE_ROOT

LONG_S = 60.0


def forever(receive: Receive) -> bytes:
    """Wait for a part that never comes."""
    while True:
        receive()


def ended_by_itself(receive: Receive) -> bytes:
    os._exit(7)


def killed(receive: Receive) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b"never said"


def raising(receive: Receive) -> bytes:
    raise ValueError("what it was")


async def test_it_knows_what_the_process_knew_at_the_fork() -> None:
    """What the process changes later, it does not see; parts of any size come in order, and its answer back."""
    state = [1, 2, 3]
    big = os.urandom(3_000_000)

    def work(receive: Receive) -> bytes:
        first, second, third = receive(), receive(), receive()
        return repr(state).encode() + first + third + second

    one = Forked(work)
    state.append(4)
    assert await one.answer([b"first", big, b""], LONG_S) == b"[1, 2, 3]first" + big
    assert one.gone()


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (raising, "ValueError: what it was"),
        (killed, "without an answer, by signal 9"),
        (ended_by_itself, "without an answer, with code 7"),
    ],
)
async def test_one_that_fails_is_one_error(work: forked.Work, words: str) -> None:
    """It says why, or its end does; more parts than it reads change nothing; nothing of it is left."""
    one = Forked(work)
    with pytest.raises(ForkedFailed, match=words):
        await one.answer([bytes(1 << 20)] * 4, LONG_S)
    assert one.gone()


async def test_one_that_takes_too_long_is_ended() -> None:
    """In its time, and it is reaped."""
    one = Forked(forever)
    with pytest.raises(ForkedFailed, match=r"more than 0\.05 s"):
        await one.answer([], 0.05)
    assert one.gone()


async def test_one_that_is_not_waited_for_is_ended() -> None:
    """The task that waits is cancelled: the copy goes with it."""
    one = Forked(forever)
    with trio.CancelScope() as scope:
        scope.cancel()
        await one.answer([], LONG_S)
    assert scope.cancelled_caught
    assert one.gone()


async def test_one_that_nobody_wants_is_ended() -> None:
    """Killed before anybody asked it."""
    one = Forked(forever)
    assert not one.gone()
    one.kill()
    await one.reap()
    assert one.gone()
    one.kill()


async def test_it_holds_no_file_of_the_process(tmp_path: Path) -> None:
    """Not the journal's lock, which another process may take as soon as this one gave it up, and no socket."""
    handle = os.open(tmp_path / "LOCK", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)

    def work(receive: Receive) -> bytes:
        receive()
        return b"%d" % sum(int(name) > 2 for name in os.listdir("/proc/self/fd"))

    one = Forked(work)
    os.close(handle)
    other = os.open(tmp_path / "LOCK", os.O_RDWR)
    with trio.fail_after(LONG_S):
        while True:  # until the copy has closed its own
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await trio.sleep(0)
    os.close(other)
    assert await one.answer([b""], LONG_S) == b"2"  # its socket, and the directory that is being listed


async def test_signals_and_collector_are_the_process_s() -> None:
    """A copy is not told to stop, and collects nothing; in the process both are as they were."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def work(receive: Receive) -> bytes:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        return repr(gc.isenabled()).encode()

    assert await Forked(work).answer([], LONG_S) == b"False"
    assert gc.isenabled()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


async def test_threads_that_hold_locks_do_not_hang_it() -> None:
    """Memory is taken, compressed and hashed beside threads that do the same and log without end, fork after fork."""
    over = threading.Event()

    def busy() -> None:
        logger = logging.Logger("busy")
        logger.addHandler(logging.NullHandler())
        while not over.is_set():
            logger.error("%s", len(zstandard.ZstdCompressor().compress(bytes(300_000))))

    def work(receive: Receive) -> bytes:
        return b"%d" % len(zstandard.ZstdDecompressor().decompress(zstandard.ZstdCompressor().compress(receive())))

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for size in range(1, 9):
            assert await Forked(work).answer([bytes(100_000 * size)], LONG_S) == b"%d" % (100_000 * size)
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_it_dies_with_the_process() -> None:
    """However the process ends: killed, it leaves no copy behind."""
    script = (
        "import os, signal\nfrom daemon.forked import Forked\n"
        "one = Forked(lambda receive: receive())\nprint(one._pid, flush=True)\nsignal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=SOURCE_ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    copy = os.pidfd_open(int(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()

    async def ended() -> None:
        with trio.fail_after(LONG_S):
            await trio.lowlevel.wait_readable(copy)

    trio.run(ended)
    os.close(copy)
