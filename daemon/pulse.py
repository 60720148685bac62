"""Pulse: whether a process that exists also does its work, found out by asking it.

Owns the questions and the counting of silence. Must never judge a process that has not answered once in its life and
is not stopped: it may be booting for long. Invariant: silence is counted in rounds, not read off the clock, so that a
stall of our own process is nobody else's fault.

The daemon is asked over its front socket, like a front end would; a front end over a pair of sockets that it was given
and whose bytes it sends back.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from daemon.endpoints import FrontClient
from daemon.processes import is_stopped
from ipc import codec
from ipc.errors import DecodeError
from ipc.messages import Answer, Ask
from ipc.sockets import Socket, SocketOptions, connect_dealer

ROUND_S = 1.0
QUESTIONS_MAX = 16  # unread by the daemon, before none is added


class Pulse(Protocol):
    """A question to one process."""

    async def beats(self) -> bool:
        """True when it answers; waits for as long as it takes."""

    def close(self) -> None:
        """No more questions."""


class DaemonPulse:
    """Asks the daemon's door whether it is alive."""

    def __init__(self, front: FrontClient) -> None:
        options = SocketOptions(QUESTIONS_MAX, QUESTIONS_MAX, codec.TRUSTED_LIMITS.message_bytes_max)
        self._socket: Socket = connect_dealer(front.endpoint, options, front.keys, front.insecure)
        self._ticket = 0

    async def beats(self) -> bool:
        """As `Pulse`; answers to earlier questions count as well: they come from the same loop, now."""
        self._ticket += 1
        self._socket.try_send([codec.encode(Ask("alive", self._ticket))])
        while True:
            frames = await self._socket.recv()
            try:
                if isinstance(codec.to_frontend(frames[-1]), Answer):
                    return True
            except DecodeError:
                return False

    def close(self) -> None:
        """As `Pulse`."""
        self._socket.close()


class PairPulse:
    """Sends a byte to a process that sends it back; `theirs` is the descriptor that the process gets."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._ours = trio.socket.from_stdlib_socket(ours)
        self._theirs = theirs

    @property
    def theirs(self) -> int:
        """The descriptor to hand on."""
        return self._theirs.fileno()

    def handed_on(self) -> None:
        """The process has its own copy."""
        self._theirs.close()

    async def beats(self) -> bool:
        """As `Pulse`."""
        try:
            await self._ours.send(b"?")
            return bool(await self._ours.recv(64))
        except OSError:
            return False

    def close(self) -> None:
        """As `Pulse`."""
        self._ours.close()
        self._theirs.close()


async def send_back(pair: socket.socket) -> None:
    """The other end of a `PairPulse`: what comes goes back, until our launcher is gone."""
    pair.setblocking(False)
    ours = trio.socket.from_stdlib_socket(pair)
    try:
        while data := await ours.recv(64):
            await ours.send(data)
    except OSError:
        return  # nobody asks any more; how we end is told by our parent's death
    finally:
        ours.close()


class Watch:
    """Asks in rounds until it is silent for `silence_s`; `answered` says whether it ever was not.

    Once it is `leaving`, its door may be shut before it has closed everything: only a stopped one is judged then.
    """

    def __init__(self, pulse: Pulse, pid: int, silence_s: float) -> None:
        self.answered = False
        self.leaving = False
        self._pulse = pulse
        self._pid = pid
        self._rounds_max = max(1, math.ceil(silence_s / ROUND_S))

    async def silence(self) -> int:
        """Return when it has been silent for too long: how many rounds."""
        return await count_silence(self._asked, self._judged, self._rounds_max)

    async def _asked(self) -> bool:
        beats = await self._pulse.beats()
        self.answered = self.answered or beats
        return beats

    def _judged(self) -> bool:
        return (self.answered and not self.leaving) or is_stopped(self._pid)


async def count_silence(asked: Callable[[], Awaitable[bool]], judged: Callable[[], bool], rounds_max: int) -> int:
    """Rounds of `ROUND_S` without an answer in a row, once there are `rounds_max` that may be judged."""
    silent = 0
    while True:
        until_s = trio.current_time() + ROUND_S
        with trio.move_on_after(ROUND_S):
            if await asked():
                silent = -1
        silent = silent + 1 if judged() else 0
        if silent >= rounds_max:
            return silent
        await trio.sleep_until(until_s)
