"""A crowd over ZeroMQ: one front end whose requests are all cancelled, and which hears every message about them.

Owns its connection. Must never resume: a connection that is lost is a fault of the server here. It has no task for each
request, so that what it costs does not pass for the daemon's time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

import trio

from ipc import codec
from ipc.messages import Abort, Acknowledge, Answer, Ask, Connect, FromFrontEnd, Generate, Rejected, Welcome
from ipc.sockets import Socket, SocketOptions, connect_dealer
from tools.cancels.books import Books
from tools.cancels.failed import Failed

PING_EVERY_S = 0.5
WELCOME_WITHIN_S = 10.0
READ_AT_ONCE = 64
OPTIONS = SocketOptions(4096, 4096, codec.TRUSTED_LIMITS.message_bytes_max)


class WireCrowd:
    """Its requests at the daemon's endpoint: `async with WireCrowd(...).open() as crowd`."""

    def __init__(self, endpoint: str, name: str, asks: Sequence[Generate]) -> None:
        self.books = Books([ask.id for ask in asks])
        self._endpoint, self._name, self._asks = endpoint, name, asks
        self._socket: Socket

    @asynccontextmanager
    async def open(self) -> AsyncIterator[WireCrowd]:
        """Connected and reading, until left; raises Failed."""
        self._socket = connect_dealer(self._endpoint, OPTIONS)
        try:
            await self._meet()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                nursery.start_soon(self._ping)
                yield self
                nursery.cancel_scope.cancel()
        finally:
            self._socket.close(linger_ms=200)

    @property
    def accepted(self) -> int:
        """Requests that were accepted."""
        return self.books.accepted

    @property
    def decoding(self) -> int:
        """Requests that got tokens and no end."""
        return self.books.decoding

    @property
    def refused(self) -> list[str]:
        """Why requests were not taken."""
        return self.books.refused

    @property
    def ended(self) -> int:
        """Requests that were told an end."""
        return self.books.ended

    async def ask(self) -> None:
        """Send every request."""
        for ask in self._asks:
            await self._post(ask)

    async def cancel(self, place: int) -> None:
        """Cancel one."""
        await self._post(Abort(self._asks[place].id))

    async def _post(self, message: FromFrontEnd) -> None:
        await self._socket.send([codec.encode(message)])

    async def _meet(self) -> None:
        with trio.move_on_after(WELCOME_WITHIN_S):
            await self._post(Connect(self._name))
            while True:
                message = codec.to_frontend((await self._socket.recv())[-1])
                if isinstance(message, Welcome):
                    return
                if isinstance(message, Rejected):
                    raise Failed(f"the daemon rejected {self._name} ({message.code}): {message.message}")
        raise Failed(f"the daemon did not welcome {self._name} within {WELCOME_WITHIN_S:g} s")

    async def _ping(self) -> NoReturn:
        for ticket in itertools.count(1):
            await self._post(Ask("ping", ticket))
            await trio.sleep(PING_EVERY_S)
        raise AssertionError("counting has no end")

    async def _read(self) -> NoReturn:
        while True:
            batch, ended = await self._socket.recv_batch(READ_AT_ONCE), []
            now_s = time.monotonic()
            for frames in batch:
                message = codec.to_frontend(frames[-1])
                if isinstance(message, Rejected):
                    raise Failed(f"the daemon rejected {self._name} ({message.code}): {message.message}")
                if not isinstance(message, Answer | Welcome) and (id_ := self.books.take(message, now_s)):
                    ended.append(id_)
            if ended:
                await self._post(Acknowledge(ended))
