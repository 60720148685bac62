"""Standby: the connection of whoever starts the processes of one rank, over which it hears the daemon's last word.

Owns that connection. Must never take part in an epoch. A process of the rank may be dead, frozen or not there
yet when the daemon ends; this one is there all the time. Invariant: the daemon knows of it a moment after either of
them came, since it says again and again that it stands by.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import zmq

from ipc import codec
from ipc.errors import DecodeError
from ipc.keys import ClientKeys
from ipc.messages import Left, StandsBy, Stop
from ipc.sockets import SocketOptions, open_dealer

SAY_EVERY_S = 1.0
OPTIONS = SocketOptions(send_hwm=2, recv_hwm=16, max_message_bytes=codec.TRUSTED_LIMITS.message_bytes_max)
LINGER_MS = 500


class Standby:
    """A plain socket that is looked at; for a process without a trio loop."""

    def __init__(
        self,
        endpoint: str,
        *,
        stage: int,
        rank: int,
        token: str,
        keys: ClientKeys | None = None,
        insecure: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises EndpointError for an endpoint that cannot be connected to."""
        self._socket = open_dealer(endpoint, OPTIONS, keys, insecure)
        self._message = codec.encode(StandsBy(stage, rank, token))
        self._left = codec.encode(Left(stage, rank, False))
        self._clock = clock
        self._say_at = clock()
        self._over = False

    def over(self) -> bool:
        """Whether the daemon has said that it is over; the daemon is told that this was read. Never waits."""
        if self._over:
            return True
        with contextlib.suppress(zmq.Again):  # nobody is there to hear it, or to be heard
            if self._clock() >= self._say_at:
                self._say_at = self._clock() + SAY_EVERY_S
                self._socket.send(self._message, zmq.NOBLOCK)
        with contextlib.suppress(zmq.Again):
            while not self._over:
                self._over = _is_last_word(self._socket.recv_multipart(zmq.NOBLOCK))
            self._socket.send(self._left, zmq.NOBLOCK)
        return self._over

    def pause(self, seconds: float) -> None:
        """Wait so long, or until it is over."""
        until = self._clock() + seconds
        while not self.over() and (left_s := until - self._clock()) > 0:
            self._socket.poll(int(1000 * min(left_s, SAY_EVERY_S)) + 1, zmq.POLLIN)

    def close(self) -> None:
        """Close; what was said last still goes out."""
        self._socket.close(LINGER_MS)


def _is_last_word(frames: list[bytes]) -> bool:
    try:
        message = codec.to_rank(frames[-1])
    except DecodeError:
        return False  # of a daemon of another release: the rank's own process names it
    return isinstance(message, Stop) and not message.again
