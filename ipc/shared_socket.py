"""A socket that a second thread uses beside trio's: it reads and sends without a loop in between.

Owns the lock around every call of libzmq, which allows threads that take turns, and both wake-ups. Must
never let one thread read a message and another put it in its place: `sort` runs under the lock that the message was
read under. Invariants:

* an operation of one thread may swallow the change of state that the other sleeps for (see `ipc.sockets`); whoever
  operated wakes the other where there is something to read;
* the second thread sleeps on the descriptor itself and on a bell; only trio's thread uses trio.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence

import trio
import zmq

from ipc.endpoints import UnixListener
from ipc.sockets import Socket

Sort = Callable[[list[bytes]], None]
"""Puts a message where it belongs; called in the order of the messages, by whichever thread reads."""


class SharedSocket(Socket):
    """As `Socket`; from `share` on a second thread may call `read`, `post` and `hang_up`, and no other method."""

    def __init__(self, raw: zmq.Socket[bytes], endpoint: str, listener: UnixListener | None = None) -> None:
        super().__init__(raw, endpoint, listener)
        self._lock = threading.RLock()
        self._asleep = False  # the second thread sleeps, or is about to
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._token: trio.lowlevel.TrioToken | None = None

    def share(self) -> None:
        """A second thread may use this socket; called in trio's."""
        self._token = trio.lowlevel.current_trio_token()

    def ring(self) -> None:
        """The second thread's `read` returns, or its next one does at once."""
        with self._lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    async def read_here(self, sort: Sort) -> None:
        """As `read`, in trio's thread: returns after one wake-up, whatever was there then, and by `leave`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        await self._sleep_until_ready(zmq.POLLIN, 0)
        self._check_open()
        self._sort_all(sort)
        self._settle()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def leave(self) -> None:
        """Whoever is in `read_here` returns."""
        if self._lead is not None and self._lead.direction == zmq.POLLIN:
            self._lead.scope.cancel()
        for task in self._parked[zmq.POLLIN]:
            trio.lowlevel.reschedule(task)
        self._parked[zmq.POLLIN].clear()

    def close(self, linger_ms: int = 0) -> None:
        """As `Socket.close`; the second thread is told, and hangs up."""
        if self._closed:
            return
        with self._lock:
            super().close(linger_ms)
        if self._token is None:
            self.hang_up()
        else:
            self.ring()

    # --- the second thread -----------------------------------------------------------------------------------------

    def read(self, sort: Sort, timeout_s: float | None) -> bool:
        """Wait for a message, then `sort` all that are there. Nothing may have come: after the time, or a `ring`.

        False when the socket was closed: it is never to be used again.
        """
        self._asleep = timeout_s != 0  # whoever operates from now on sees that this thread is about to sleep
        try:
            if not self._sort_all(sort) and self._asleep and not self._closed:
                self._sleep(timeout_s)
                self._sort_all(sort)
        finally:
            self._asleep = False
        self._wake_trio()
        return not self._closed

    def post(self, frames: Sequence[bytes]) -> bool:
        """Send one message without waiting; False when it could not be sent."""
        try:
            with self._lock:
                if self._closed:
                    return False
                super()._send_now(frames)
        except zmq.Again:
            return False
        self._wake_trio()
        return True

    def hang_up(self) -> None:
        """Nobody sleeps here again; harmless twice."""
        with self._lock:
            if self._bell >= 0:
                os.close(self._bell)
            self._bell = -1

    def _sleep(self, timeout_s: float | None) -> None:
        # Not `poll`, which counts milliseconds: a forward may be due before. Descriptors are small enough for `select`:
        # this socket is among the first things that its process opens.
        with contextlib.suppress(OSError):  # closed by now
            if self._bell in select.select((self._fd, self._bell), (), (), timeout_s)[0]:
                os.eventfd_read(self._bell)

    def _wake_trio(self) -> None:
        """Tasks that sleep here look again: what was just done may have swallowed what they sleep for."""
        if self._token is None:  # there is no second thread
            self._settle()
        elif self._lead is not None or self._parked[zmq.POLLOUT] or self._parked[zmq.POLLIN]:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._settle_open)

    # --- under the lock --------------------------------------------------------------------------------------------

    def _sort_all(self, sort: Sort) -> bool:
        """Sort every message that is there; False where none is."""
        found = False
        with self._lock:
            # Asked before each: an attempt that fails costs ten times as much.
            while not self._closed and super()._events() & zmq.POLLIN:
                sort(self._recv_now())
                found = True
        return found

    def _send_now(self, frames: Sequence[bytes]) -> None:
        with self._lock:
            super()._send_now(frames)

    def _recv_now(self) -> list[bytes]:
        with self._lock:
            return super()._recv_now()

    def _events(self) -> int:
        """As seen by trio's thread, which by asking may have swallowed what the second thread sleeps for."""
        with self._lock:
            events = super()._events()
        if self._asleep and events & zmq.POLLIN:
            self.ring()
        return events

    def _settle(self) -> None:
        super()._settle()
        if self._asleep:
            self._events()

    def _settle_open(self) -> None:
        if not self._closed:
            self._settle()
