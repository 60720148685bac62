"""Forked: a copy of this process as it is at one moment, which works on what it remembers while the process goes on.

Owns such a copy from its fork until it is reaped. Must never let it act for the process, nor block the loop for it: the
copy closes every file that it inherited but stdio, blocks all signals, collects no garbage, runs no exit handler, and
ends by `os._exit`; the parent waits for it through trio. Invariants: the kernel ends it with the thread that forked it;
it is killed when its time is up; whatever happens to it is one ForkedFailed; it is the first that a full memory takes.

Sound beside threads as long as the work takes no lock that one of them may have held at the fork: no logging, imports,
sockets or threads. (The allocator's locks are held by the C library over a fork, the interpreter's by itself.) A work
that hangs all the same costs its time, in its own process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NoReturn

import trio

from daemon.processes import signal_at_parents_death

NICENESS = 10  # a step that is due goes first
OOM_SCORE = 1000  # with no memory left, this process goes and nobody else
REAP_S = 1.0  # a killed process is gone within; unless the disk holds it, and then it is looked at again later
READ_BYTES = 1 << 20
DONE, FAILED = b"+", b"-"
_LENGTH = struct.Struct("<Q")

Receive = Callable[[], bytes]
"""The next part that the parent sent; waits for it. Raises EOFError when there will be none."""

Work = Callable[[Receive], bytes]
"""What a copy does; what it returns is the answer."""


class ForkedFailed(Exception):
    """A copy that did not answer: it raised, was killed, or took too long."""


class Forked:
    """One copy; it works from the moment that this was made."""

    def __init__(self, work: Work) -> None:
        """Fork, on the main thread. Raises OSError when the system has no room for one more process."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with contextlib.closing(theirs):
                self._pid = _fork(work, theirs.fileno())
            try:
                self._pidfd = os.pidfd_open(self._pid)
            except OSError:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                raise
            undo.pop_all()
        self._socket = ours
        self._status: int | None = None

    async def answer(self, parts: Sequence[bytes], timeout_s: float) -> bytes:
        """Send the parts; what the work returned. Raises ForkedFailed, at the latest after `timeout_s`.

        When this returns, raises or is cancelled the copy is gone, or `gone` says that it is not.
        """
        said: bytes | None = None
        try:
            with trio.move_on_after(timeout_s):
                said = await self._converse(parts)
                await trio.lowlevel.wait_readable(self._pidfd)
        finally:
            self.kill()
            with trio.CancelScope(shield=True):
                await self.reap()
        if said is None:
            raise ForkedFailed(f"it took more than {timeout_s:g} s")
        if said[:1] == FAILED:
            raise ForkedFailed(said[1:].decode(errors="replace"))
        if said[:1] != DONE or self._status != 0:
            raise ForkedFailed(f"it ended without an answer, {self._ended()}")
        return said[1:]

    def kill(self) -> None:
        """End it now; it still has to be reaped."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):  # ended by itself, and not reaped yet
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def reap(self) -> None:
        """Wait for the end of a killed one, not for long."""
        with trio.move_on_after(REAP_S):
            if self._status is None:
                await trio.lowlevel.wait_readable(self._pidfd)
        self.gone()

    def gone(self) -> bool:
        """Whether it has ended; reaps it then."""
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid == 0:
                return False
            self._status = status
            os.close(self._pidfd)
            self._socket.close()
        return True

    def _ended(self) -> str:
        if self._status is None:
            return "and does not end"
        code = os.waitstatus_to_exitcode(self._status)
        return f"by signal {-code}" if code < 0 else f"with code {code}"

    async def _converse(self, parts: Sequence[bytes]) -> bytes:
        """Send everything, then read until it closes its end; nothing of it if there was nothing."""
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(self._socket))
        said = bytearray()
        try:
            with contextlib.suppress(trio.BrokenResourceError):  # what it said before it went is read all the same
                for part in parts:
                    await stream.send_all(_LENGTH.pack(len(part)))
                    await stream.send_all(part)
            while data := await stream.receive_some(READ_BYTES):
                said += data
        except trio.BrokenResourceError:
            pass  # it went without having read everything: what it said stands
        return bytes(said)


def _fork(work: Work, file: int) -> int:
    """The number of the new process, which never returns from here."""
    parent, collects = os.getpid(), gc.isenabled()
    gc.disable()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _live(work, file, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if collects:
            gc.enable()
    return pid


def _live(work: Work, file: int, parent: int) -> NoReturn:
    """The copy's whole life."""
    code = 1
    try:
        signal_at_parents_death()
        if os.getppid() == parent:
            _close_all_but(file)
            _stand_back()
            _send(file, _said(work, file))
            code = 0
    finally:
        os._exit(code)


def _close_all_but(file: int) -> None:
    """Neither the journal's lock nor any peer may take the copy for the process."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != file:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))


def _stand_back() -> None:
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a system that does not have it
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"%d" % OOM_SCORE)
        os.close(score)


def _said(work: Work, file: int) -> bytes:
    try:
        return DONE + work(lambda: _receive(file))
    except Exception as error:
        return FAILED + f"{type(error).__name__}: {error}".encode(errors="replace")


def _receive(file: int) -> bytes:
    (length,) = _LENGTH.unpack(_read(file, _LENGTH.size))
    return _read(file, length)


def _read(file: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = os.read(file, min(READ_BYTES, length - len(data)))
        if not more:
            raise EOFError("the parent said no more")
        data += more
    return bytes(data)


def _send(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
