"""A crowd over HTTP: streamed completions whose clients hang up.

Owns the connections. Must never say more to the server than that: no client says that it cancels, it is gone. What
became of the requests is told by the journal alone, since nobody is there to be answered.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import trio

from allocator.columns import i64
from ipc.messages import Generate

AT_ONCE = 64  # connections being opened
READ_BYTES = 1 << 16
HEAD_BYTES_MAX = 1 << 16


class HttpCrowd:
    """Its requests at the server's address: `async with HttpCrowd(...).open() as crowd`."""

    def __init__(self, url: str, asks: Sequence[Generate]) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._asks = asks
        self._streams: list[trio.SocketStream | None] = [None] * len(asks)
        self._opening = trio.CapacityLimiter(AT_ONCE)
        self._gone: set[int] = set()
        self._nursery: trio.Nursery
        self.accepted = 0
        self.decoding = 0
        self.refused: list[str] = []  # why requests were not taken
        self.problems: list[str] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HttpCrowd]:
        """Ready to ask, until left."""
        async with trio.open_nursery() as self._nursery:
            try:
                yield self
            finally:
                self._nursery.cancel_scope.cancel()

    async def ask(self) -> None:
        """Open every connection and send its request."""
        for place in range(len(self._asks)):
            self._nursery.start_soon(self._follow, place)

    async def cancel(self, place: int) -> None:
        """Hang up."""
        self._gone.add(place)
        stream = self._streams[place]
        assert stream is not None, "only who was accepted hangs up"
        await stream.aclose()

    async def _follow(self, place: int) -> None:
        """Read one stream and throw away what comes, until it is closed."""
        try:
            async with self._opening:
                stream = self._streams[place] = await trio.open_tcp_stream(self._host, self._port)
                await stream.send_all(self._request(self._asks[place]))
            head = await self._head(stream)
            if b" 200 " not in head.split(b"\r\n")[0]:
                self.refused.append(head[-300:].decode(errors="replace"))
                return
            self.accepted += 1
            rest = head.partition(b"\r\n\r\n")[2]
            while b"data: " not in rest:
                rest = await self._some(stream, place)
            self.decoding += 1
            while True:
                await self._some(stream, place)
        except (trio.ClosedResourceError, trio.BrokenResourceError, OSError) as error:
            if place not in self._gone:
                self.problems.append(f"the connection of request {place + 1} broke: {error or type(error).__name__}")

    async def _some(self, stream: trio.SocketStream, place: int) -> bytes:
        if data := await stream.receive_some(READ_BYTES):
            return bytes(data)
        raise trio.BrokenResourceError(f"request {place + 1} ended by itself")

    async def _head(self, stream: trio.SocketStream) -> bytes:
        head = b""
        while b"\r\n\r\n" not in head and len(head) < HEAD_BYTES_MAX:
            if not (data := await stream.receive_some(READ_BYTES)):
                raise trio.BrokenResourceError("no answer")
            head += data
        return head

    def _request(self, ask: Generate) -> bytes:
        fields = {
            "prompt": i64(ask.prompt).tolist(),
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body
