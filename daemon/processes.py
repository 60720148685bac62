"""Processes: how a child is started, watched and ended, and how it learns that its parent is gone.

Owns the handles of our own children. Must never signal a process that this process did not start, nor a process group.
Invariant: a child is waited for through its pidfd, so a pid that was reused is never mistaken for it.

Children are started on the main thread: the death signal of a child follows the thread that forked it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import trio

PARENT_VARIABLE = "BANDMASTER_PARENT"
TOKEN_VARIABLE = "BANDMASTER_RANK_TOKEN"  # proves to the daemon who started a rank
PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl  # found now: a forked copy looks nothing up
HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SOURCE_ROOT = Path(__file__).resolve().parent.parent

COLLECT_THRESHOLDS = (20_000, 20, 500)  # new containers before the youngest are looked at; passes before older ones are


def die_with_parent(death_signal: signal.Signals = signal.SIGINT) -> None:
    """A child's first call: when our parent dies, however it does, `death_signal` is raised here; now if it is dead.

    The kernel sends SIGCONT, which wakes a stopped process too; its handler looks whether the parent is gone. Only
    SIGKILL needs no such detour.
    """
    expected = os.environ.pop(PARENT_VARIABLE, "")
    if not expected:
        return  # started by hand: nobody to follow
    parent, by_kernel = int(expected), death_signal

    def look(number: int, frame: object) -> None:
        if os.getppid() != parent:
            signal.raise_signal(death_signal)

    if death_signal != signal.SIGKILL:
        by_kernel = signal.SIGCONT
        signal.signal(signal.SIGCONT, look)
    signal_at_parents_death(by_kernel)
    look(0, None)


def signal_at_parents_death(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send us a signal when the thread that started this process ends; look whether it has, next.

    Raises OSError where the kernel refuses.
    """
    if _prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def hold_signals() -> None:
    """Signals wait until `take_signals`; after their receiver has closed they do nothing, so the exit code stands."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    for number in HELD_SIGNALS:
        signal.signal(number, _too_late)


def _too_late(number: int, frame: object) -> None:
    """The life is over; a handler, not SIG_IGN, which would throw away what is held."""


def ignore_signals() -> None:
    """The process ends now, whatever is sent: an interpreter that shuts down resets handlers, but not this."""
    for number in HELD_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def take_signals() -> None:
    """A child's handlers stand: what was sent to it since it was started is delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)


def collect_seldom() -> None:
    """Let the collector leave alone what is here for good, and look through everything else only now and then.

    A pass over a large prefix cache stops the loop for tens of milliseconds, and finds next to nothing: what the core
    lets go has no cycles. Young objects, where tracebacks and tasks make some, are looked at as ever.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_THRESHOLDS)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child of ours: it finds our packages from any directory and knows its parent."""
    path = environ.get("PYTHONPATH", "")
    entries = [str(SOURCE_ROOT), *filter(None, path.split(os.pathsep))]
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(entries)),
        "PYTHONUNBUFFERED": "1",
        PARENT_VARIABLE: str(os.getpid()),
    }


class Child:
    """One process of ours, in a session of its own: a terminal's Ctrl-C reaches only the parent, which passes it on.

    With `hold_signals` it starts with SIGINT and SIGTERM blocked until it calls `take_signals`: an order that comes
    while its interpreter still starts is then obeyed in order, instead of ending it with a trace.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: IO[bytes] | None = None,
        hold_signals: bool = False,
        files: Sequence[int] = (),
    ) -> None:
        """`files` are descriptors that it inherits under their own numbers."""
        self.name = name
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS if hold_signals else ())
        try:
            self._process = self._start(command, environ, output, files)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._one_waiter = trio.Lock()  # trio lets one task wait for a descriptor

    @staticmethod
    def _start(
        command: Sequence[str], environ: Mapping[str, str], output: IO[bytes] | None, files: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(command),
            env=child_environment(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
            pass_fds=files,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        return self._process.poll()

    async def wait(self) -> int:
        """Until it has ended; returns its exit code. Any number of tasks may wait."""
        async with self._one_waiter:
            while self._process.poll() is None:
                await trio.lowlevel.wait_readable(self._pidfd)
        return int(self._process.returncode)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    async def end(self, patience_s: float, number: int | None = signal.SIGTERM) -> int:
        """Signal it (None: it was told already), wait, kill it when the patience is over; returns the exit code."""
        if number is not None:
            self.send_signal(number)
        with trio.move_on_after(patience_s):
            return await self.wait()
        self.send_signal(signal.SIGKILL)
        return await self.wait()

    def close(self) -> None:
        """Kill it if it lives, reap it, and give the handle back; never waits for long."""
        if self._pidfd >= 0:
            self.send_signal(signal.SIGKILL)
            self._process.wait()
            os.close(self._pidfd)
            self._pidfd = -1


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; one that is gone is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def exit_text(code: int) -> str:
    """An exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
