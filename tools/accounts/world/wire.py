"""Wire: sockets in memory between the gateway and its clients, with the manners of ZeroMQ.

Owns who is connected to whom. Must never lose or reorder what was sent between two ends that live. As there: whoever
connects before the router is bound is connected later, after a lost connection the router sees a new peer, a full queue
refuses, and whoever is written to and gone is `PeerGone`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import trio

from ipc.errors import PeerGone

QUEUE_MAX = 1024  # messages per peer and direction


class Mailbox:
    """Messages on their way to one reader."""

    def __init__(self) -> None:
        self._messages: deque[list[bytes]] = deque()
        self._news = trio.Event()
        self.closed = False

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._messages)

    def put(self, frames: list[bytes]) -> None:
        """Add one and wake the reader."""
        self._messages.append(frames)
        self._news.set()

    async def take(self, most: int) -> list[list[bytes]]:
        """Wait for one, then take what else is there; raises ClosedResourceError."""
        while not self._messages:
            if self.closed:
                raise trio.ClosedResourceError("the socket is closed")
            self._news = trio.Event()
            await self._news.wait()
        await trio.lowlevel.checkpoint()
        return [self._messages.popleft() for _ in range(min(most, len(self._messages)))]

    def close(self) -> None:
        """Nothing more comes; a sleeping reader is told."""
        self.closed = True
        self._news.set()


class Router:
    """The daemon's end."""

    def __init__(self, board: Switchboard, endpoint: str) -> None:
        self.endpoint = endpoint
        self.inbox = Mailbox()
        self.peers: dict[bytes, Dealer] = {}
        self._board = board
        self._named = 0

    def admit(self, dealer: Dealer) -> bytes:
        """A new peer; its identity."""
        self._named += 1
        identity = b"%d" % self._named
        self.peers[identity] = dealer
        return identity

    async def recv_batch(self, n: int) -> list[list[bytes]]:
        """As `ipc.sockets.Socket`."""
        return await self.inbox.take(n)

    def try_send(self, frames: Sequence[bytes]) -> bool:
        """As `ipc.sockets.Socket`."""
        dealer = self.peers.get(frames[0])
        if dealer is None:
            raise PeerGone(f"no peer {frames[0]!r} on {self.endpoint}")
        if len(dealer.inbox) >= QUEUE_MAX:
            return False
        dealer.inbox.put([frames[1]])
        return True

    def close(self, linger_ms: int = 0) -> None:
        """The daemon's end is gone: so is every connection."""
        if self.inbox.closed:
            return
        self.inbox.close()
        self._board.unbind(self)
        for dealer in list(self.peers.values()):
            dealer.part()
        self.peers.clear()


class Dealer:
    """A client's end."""

    def __init__(self, board: Switchboard) -> None:
        self.inbox = Mailbox()
        self._board = board
        self._router: Router | None = None
        self._identity = b""
        self._unsent: deque[bytes] = deque()
        self._parted = trio.Event()

    def meet(self, router: Router) -> None:
        """There is somebody to talk to; what waited goes first."""
        self._router, self._identity = router, router.admit(self)
        while self._unsent:
            router.inbox.put([self._identity, self._unsent.popleft()])

    def part(self) -> None:
        """The connection is gone."""
        self._router = None
        self._parted.set()

    def try_send(self, frames: Sequence[bytes]) -> bool:
        """As `ipc.sockets.Socket`."""
        if self.inbox.closed:
            raise trio.ClosedResourceError("the socket is closed")
        if self._router is None:
            self._unsent.append(frames[0])
            return len(self._unsent) < QUEUE_MAX
        self._router.inbox.put([self._identity, *frames])
        return True

    async def send(self, frames: Sequence[bytes]) -> None:
        """As `ipc.sockets.Socket`."""
        await trio.lowlevel.checkpoint()
        self.try_send(frames)

    async def recv(self) -> list[bytes]:
        """As `ipc.sockets.Socket`."""
        return (await self.inbox.take(1))[0]

    async def recv_batch(self, n: int) -> list[list[bytes]]:
        """As `ipc.sockets.Socket`."""
        return await self.inbox.take(n)

    def watch_disconnects(self) -> None:
        """They are noted from the beginning."""

    async def wait_disconnected(self) -> None:
        """As `ipc.sockets.Socket`."""
        await self._parted.wait()

    def close(self, linger_ms: int = 0) -> None:
        """This end is gone."""
        if self.inbox.closed:
            return
        self.inbox.close()
        self._board.dealers.discard(self)
        if self._router is not None:
            self._router.peers.pop(self._identity, None)


class Switchboard:
    """The one address of the world: a router while a daemon lives, and whoever wants to reach it."""

    def __init__(self) -> None:
        self.router: Router | None = None
        self.dealers: set[Dealer] = set()

    def bind(self, endpoint: str, *_: Any) -> Any:
        """As `ipc.sockets.bind_router`."""
        assert self.router is None, "one daemon at a time"
        self.router = Router(self, endpoint)
        for dealer in list(self.dealers):
            if not dealer._parted.is_set():
                dealer.meet(self.router)
        return self.router

    def unbind(self, router: Router) -> None:
        """The daemon's end is gone."""
        if self.router is router:
            self.router = None

    def connect(self, endpoint: str, *_: Any) -> Any:
        """As `ipc.sockets.connect_dealer`."""
        dealer = Dealer(self)
        self.dealers.add(dealer)
        if self.router is not None:
            dealer.meet(self.router)
        return dealer
