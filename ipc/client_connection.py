"""Client connection: one socket to the daemon, from the handshake to the reason why it ended.

Owns the socket, the messages that it has no room for yet, and the watch over the daemon's silence. Must never know a
request. Invariants: messages leave in the order in which they were posted; the first reason for an end counts; pings
are counted, not timed: a stall of our own process must not pass for the daemon's silence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import trio

from ipc import codec
from ipc.errors import DecodeError
from ipc.handshake import Limits, version_problem
from ipc.messages import Ask, Connect, FromFrontEnd, Rejected, ToFrontEnd, Welcome
from ipc.sockets import Socket

PING_S = 1.0
PING_TICKET = 0
ATTEMPT_S = 2.0  # how long one socket may take for the handshake before a fresh one is tried
BOOTING_RETRY_S = 0.2
REFUSED_RETRY_S = 2.0
READ_BATCH = 256
GONE = "the daemon closed the connection or its process ended"


@dataclass(frozen=True, slots=True)
class NoWelcome:
    """A handshake that led to nothing: why, how long to pause before the next one, and whether waiting is useless."""

    reason: str
    pause_s: float = 0.0
    final: bool = False


async def shake_hands(socket: Socket, connect: Connect, booting: Callable[[str], None]) -> Welcome | NoWelcome:
    """Introduce ourselves and wait to be welcomed; `booting` is told, with the reason, when we are to ask again."""
    await socket.send([codec.encode(connect)])
    while True:
        with trio.move_on_after(ATTEMPT_S) as scope:
            frames = await socket.recv()
        if scope.cancelled_caught:
            return NoWelcome("nobody answers there")
        try:
            message = codec.to_frontend(frames[-1])
        except DecodeError as error:
            return NoWelcome(f"it answers with something else: {error}", REFUSED_RETRY_S)
        if isinstance(message, Welcome):
            problem = version_problem(message.version, "the daemon")
            if not problem:
                return message
            message = Rejected("version", problem)
        if not isinstance(message, Rejected):
            continue
        if message.code != "booting":
            return NoWelcome(message.message, REFUSED_RETRY_S, final=message.code == "version")
        booting(message.message)
        await trio.sleep(BOOTING_RETRY_S)
        await socket.send([codec.encode(connect)])


class Connection:
    """One welcomed connection. `resumable`: what was open on it may be taken up on the next one."""

    def __init__(self, socket: Socket, welcome: Welcome) -> None:
        self.socket = socket
        self.welcome = welcome
        self.limits = Limits.from_dict(welcome.limits)
        self.backlog: deque[bytes] = deque()
        self.backlog_grew = trio.Event()
        self.scope = trio.CancelScope()
        self.ended = ""
        self.resumable = True
        self.heard_s = trio.current_time()
        self._unanswered = 0

    def post(self, message: FromFrontEnd) -> None:
        """Send in order, without waiting; at the high-water mark it is queued here (bounded by the open streams)."""
        data = codec.encode(message)
        if self.backlog or not self.socket.try_send([data]):
            self.backlog.append(data)
            self.backlog_grew.set()

    def end(self, reason: str, resumable: bool = True) -> None:
        """This connection is over; the first reason counts."""
        if not self.ended:
            self.ended, self.resumable = reason, resumable
        self.scope.cancel()

    async def run(self, take: Callable[[list[ToFrontEnd]], None], pings_unanswered_max: int) -> None:
        """Read until the end; `take` gets what came, in order."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, take)
                nursery.start_soon(self._ping, pings_unanswered_max)
                nursery.start_soon(self._send_backlog)
                nursery.start_soon(self._watch)

    async def _read(self, take: Callable[[list[ToFrontEnd]], None]) -> None:
        while not self.ended:
            batch = await self.socket.recv_batch(READ_BATCH)
            self.heard_s, self._unanswered = trio.current_time(), 0
            messages: list[ToFrontEnd] = []
            try:
                for frames in batch:
                    messages.append(codec.to_frontend(frames[-1]))
            except DecodeError as error:
                self.end(f"the daemon sent what is no message: {error}")
            take(messages)

    async def _ping(self, unanswered_max: int) -> None:
        while True:
            if not self.backlog:
                self.post(Ask("ping", PING_TICKET))
            await trio.sleep(PING_S)
            self._unanswered += 1
            if self._unanswered > unanswered_max:
                self.end(f"the daemon has not answered for {trio.current_time() - self.heard_s:.1f} s")
                return

    async def _watch(self) -> None:
        await self.socket.wait_disconnected()
        self.end(GONE)

    async def _send_backlog(self) -> NoReturn:
        """Move the backlog into the socket as it makes room."""
        while True:
            await self.backlog_grew.wait()
            while self.backlog:
                await self.socket.send([self.backlog[0]])
                self.backlog.popleft()
            self.backlog_grew = trio.Event()
