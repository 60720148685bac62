"""A daemon's door, scripted by a test: it answers what the test tells it to, and nothing by itself but handshakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import trio

from allocator.columns import pack_i64
from ipc.client import DaemonClient
from ipc.codec import encode, from_frontend
from ipc.errors import PeerGone
from ipc.handshake import Limits
from ipc.messages import (
    PROTOCOL_VERSION,
    Answer,
    Ask,
    Connect,
    Finished,
    FromFrontEnd,
    ModelFacts,
    ToFrontEnd,
    TokenBatch,
    Welcome,
)
from ipc.sockets import bind_router

FACTS = ModelFacts("m", "llama", 1000, 4096, "float32", [2])


class FakeDaemon:
    """A ROUTER with a mailbox of what it read. It welcomes and answers pings unless told otherwise."""

    def __init__(self, endpoint: str, life: str = "life-1", limits: Limits | None = None) -> None:
        self.socket = bind_router(endpoint)
        self.life = life
        self.limits = limits or Limits()
        self.peer = b""
        self.welcoming = True
        self.answering = True
        self.pings = 0
        self._got, self.got = trio.open_memory_channel[FromFrontEnd](1000)

    async def run(self) -> None:
        """Read and answer until the socket is closed, at whichever of the two that finds it."""
        with suppress(trio.ClosedResourceError):
            while True:
                identity, data = await self.socket.recv()
                with suppress(PeerGone):  # a client that gave this connection up tries again on another
                    await self._handle(identity, from_frontend(data, self.limits))

    async def _handle(self, identity: bytes, message: FromFrontEnd) -> None:
        if isinstance(message, Connect) and self.welcoming:
            self.peer = identity
            welcome = Welcome(PROTOCOL_VERSION, FACTS, self.limits.as_dict(), self.life)
            await self.socket.send([identity, encode(welcome)])
        elif isinstance(message, Ask) and message.what == "ping":
            self.pings += 1
            if self.answering:
                await self.socket.send([identity, encode(Answer(message.ticket, True, ""))])
        else:
            self.peer = identity
            await self._got.send(message)

    async def send(self, *messages: ToFrontEnd) -> None:
        """Send to the peer that spoke last."""
        for message in messages:
            await self.socket.send([self.peer, encode(message)])


@asynccontextmanager
async def fake_daemon(endpoint: str, life: str = "life-1", limits: Limits | None = None) -> AsyncIterator[FakeDaemon]:
    """A running fake daemon; its socket is gone afterwards, as after a kill."""
    daemon = FakeDaemon(endpoint, life, limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.run)
        try:
            yield daemon
        finally:
            daemon.socket.close()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(
    endpoint: str, lost_after_s: float = 5.0, return_within_s: float = 0.0
) -> AsyncIterator[tuple[FakeDaemon, DaemonClient]]:
    """A fake daemon and a client that it has welcomed; the client does not wait for another one by default."""
    waits = {"lost_after_s": lost_after_s, "return_within_s": return_within_s}
    with trio.fail_after(30):
        async with fake_daemon(endpoint) as daemon, DaemonClient(endpoint, "fe", **waits) as client:
            await client.wait_connected(5)
            yield daemon, client


def tokens(step: int, entries: dict[int, int]) -> TokenBatch:
    """One step's tokens, by request number."""
    return TokenBatch(step, pack_i64(list(entries)), pack_i64(list(entries.values())))


def finished(id: str, request: int, choice: int = 0, reason: str = "stop", output_tokens: int = 0) -> Finished:
    """The end of a choice."""
    return Finished(id, choice, request, reason, "", 1, output_tokens)
