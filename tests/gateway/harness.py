"""A gateway in a nursery, with a mailbox that the test reads and raw peers that the test drives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import trio

from allocator.columns import I32, I64, pack_i64
from daemon.core.inputs import Input
from daemon.core.outputs import Outputs, Reply, TokenColumns
from daemon.gateway import AskHandler, Gateway
from ipc.codec import encode, to_frontend
from ipc.handshake import Limits
from ipc.messages import (
    Accepted,
    Connect,
    Finished,
    FromFrontEnd,
    Generate,
    ModelFacts,
    RequestLogprobs,
    Sampling,
    ToFrontEnd,
    Welcome,
)
from ipc.sockets import Socket, SocketOptions, connect_dealer

FACTS = ModelFacts("m", "llama", 1000, 4096, "float32", [2])
NOW_NS = 1_000
SEED = 77


class Log:
    """Log lines as data."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def _add(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    info = warning = error = _add

    def of(self, event: str) -> list[dict[str, Any]]:
        """The fields of every line of this event."""
        return [fields for name, fields in self.lines if name == event]


class World:
    """The gateway and what surrounds it."""

    def __init__(self, gateway: Gateway, inputs: trio.MemoryReceiveChannel[Input], names: list[str], log: Log) -> None:
        self.gateway = gateway
        self.inputs = inputs
        self.names = names
        self.log = log
        self.peers: list[Peer] = []

    async def peer(self, name: str = "", recv_hwm: int = 1000) -> Peer:
        """A raw peer; with a name, one that was welcomed."""
        peer = Peer(connect_dealer(self.gateway.endpoint, SocketOptions(recv_hwm=recv_hwm)))
        self.peers.append(peer)
        if name:
            assert isinstance(await peer.ask(Connect(name)), Welcome)
            if name not in self.names:
                self.names.append(name)
        return peer

    def deliver(self, outputs: Outputs, sequence: int = 0) -> None:
        """As the engine does; sequence 0 counts as on disk."""
        self.gateway.deliver(outputs, sequence)


class Peer:
    """A front end made of bare messages."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket

    async def send(self, *messages: FromFrontEnd) -> None:
        """Send messages."""
        for message in messages:
            await self.socket.send([encode(message)])

    async def recv(self) -> ToFrontEnd:
        """The next message of the daemon."""
        return to_frontend((await self.socket.recv())[0])

    async def ask(self, message: FromFrontEnd) -> ToFrontEnd:
        """Send one message and read one."""
        await self.send(message)
        return await self.recv()


@asynccontextmanager
async def gateway(
    endpoint: str,
    *,
    limits: Limits | None = None,
    asks: dict[str, AskHandler] | None = None,
    orders: dict[str, AskHandler] | None = None,
    silence_s: float = 60.0,
    mailbox: int = 10_000,
    opened: bool = True,
    **more: Any,
) -> AsyncIterator[World]:
    """A running gateway that welcomes, unless it is not `opened`."""
    send, receive = trio.open_memory_channel[Input](mailbox)
    names: list[str] = []
    log = Log()
    made = Gateway(
        endpoint=endpoint,
        life="life-1",
        limits=limits or Limits(),
        mailbox=send,
        names=names,
        now_ns=lambda: NOW_NS,
        draw_seed=lambda: SEED,
        log=log,
        asks=asks,
        orders=orders,
        silence_s=silence_s,
        **more,
    )
    if opened:
        made.open(FACTS)
    world = World(made, receive, names, log)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(made.run)
            try:
                yield world
            finally:
                for peer in world.peers:
                    peer.socket.close()
                nursery.cancel_scope.cancel()


def request(id: str, prompt: tuple[int, ...] = (1, 2), n: int = 1) -> Generate:
    """A small request."""
    return Generate(id, pack_i64(prompt), Sampling(), 8, n=n)


def accepted(frontend: int, id: str, first: int, n: int = 1) -> Reply:
    """The core accepts a request."""
    return Reply(frontend, Accepted(id, first, n, 8, SEED))


def finished(frontend: int, id: str, number: int, choice: int = 0) -> Reply:
    """The core ends a choice."""
    return Reply(frontend, Finished(id, choice, number, "stop", "", 1, 1))


def columns(
    step: int, entries: list[tuple[int, int, int]], logprobs: list[RequestLogprobs] | None = None
) -> TokenColumns:
    """One step's tokens from (front end, request, token) triples."""
    table = np.array(entries, dtype=I64).reshape(-1, 3)
    return TokenColumns(step, table[:, 0].astype(I32), table[:, 1].copy(), table[:, 2].copy(), logprobs or [])


def out(*replies: Reply, tokens: TokenColumns | None = None) -> Outputs:
    """Outputs of one feed."""
    return Outputs(replies=list(replies), tokens=tokens)
