"""Client: a front end's connection to the daemon, over the daemon's deaths and restarts.

Owns the connection, the streams open on it and what the daemon must still be told. Must never leave a stream waiting
for a daemon that is gone for good, nor a request running that nobody reads. Invariants:

* a stream that is left before its end has its Abort queued when `__aexit__` returns, cancelled or not; if the
  connection breaks first, the Abort is sent on the next one, to whichever life of the daemon answers there;
* streams outlive their connection: on the next one each is sent again or taken up behind the tokens that came, so no
  gap and no repetition can hide; after `return_within_s` without a sign of life they end with DaemonLost;
* a daemon whose process ended is noticed at once, one that is stopped or stuck after `lost_after_s`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import trio
import zmq

from ipc import codec
from ipc.client_connection import PING_S, PING_TICKET, Connection, NoWelcome, shake_hands
from ipc.client_stream import RequestStream
from ipc.client_streams import OpenStreams
from ipc.errors import DaemonLost
from ipc.keys import ClientKeys
from ipc.messages import Answer, Ask, Connect, Generate, Rejected, ToFrontEnd, Welcome
from ipc.sockets import Socket, SocketOptions, connect_dealer

DRAIN_MS = 500
NOT_KNOWN = ("not_connected", "booting")  # the daemon has nothing against us, it only does not know us (any more)
CLIENT_SOCKET = SocketOptions(4096, 4096, codec.TRUSTED_LIMITS.message_bytes_max)


class _Question:
    """An Ask that waits for its Answer."""

    __slots__ = ("answer", "done", "lost")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: Answer | None = None
        self.lost = ""


class DaemonClient:
    """The front end's daemon: `async with DaemonClient(endpoint, name) as client`. Connects in the background."""

    def __init__(
        self,
        endpoint: str,
        frontend: str,
        *,
        keys: ClientKeys | None = None,
        insecure: bool = False,
        lost_after_s: float = 5.0,
        return_within_s: float = 60.0,
        log: Any = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        watches: bool = False,
        connect: Callable[..., Socket] = connect_dealer,
    ) -> None:
        """`return_within_s`: how long open streams wait for a daemon that gives no sign of life; 0: not at all.

        `watches`: it is there to `ask` questions; it can give no order and send no request (ValueError).
        """
        self.endpoint = endpoint
        self.frontend = frontend
        self._absent = "not connected yet"  # why the newest attempt led to nothing
        self._parted = ""  # why the last connection ended; empty while there is one, and before the first
        self._streams = OpenStreams()
        self.stats = self._streams.stats
        self.stats |= {"connects": 0, "lost": 0}
        self._keys, self._insecure, self._context = keys, insecure, context
        self._pings_unanswered_max = max(1, math.ceil(lost_after_s / PING_S))
        self._return_within_s = return_within_s
        self._log = log
        self._watches = watches
        self._connect = connect
        self._connection: Connection | None = None
        self._changed = trio.Event()
        self._final = ""  # a reason why waiting is useless
        self._replaced = False  # another process goes by our name
        self._process = secrets.token_hex(8)
        self._attempts = 0
        self._heard_s = -math.inf
        self._alive_s = -math.inf  # the newest sign of life: of a connection, or that a daemon boots
        self._questions: dict[int, _Question] = {}
        self._next_ticket = PING_TICKET + 1

    # --- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> DaemonClient:
        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        self._nursery.start_soon(self._stay_connected)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is open, give the socket half a second to say so, and stop. The body's exception stays its own."""
        self._return_within_s = 0.0
        self._streams.abort_all()
        self._nursery.cancel_scope.cancel()
        await self._manager.__aexit__(None, None, None)

    @property
    def connected(self) -> bool:
        """True while a daemon has welcomed us and is not found lost."""
        return self._connection is not None

    @property
    def lost_reason(self) -> str:
        """Why there is no daemon: how the last connection ended, who waits, how it looks now; empty with one."""
        if self._connection is not None:
            return ""
        if not self._parted:
            return self._absent
        waiting = f"; streams that wait for it: {len(self._streams)}" if len(self._streams) else ""
        now = f"; now: {self._absent}" if self._absent else ""
        return f"{self._parted}{waiting}{now}"

    @property
    def welcome(self) -> Welcome | None:
        """What the present daemon said in the handshake; None without one."""
        return self._connection.welcome if self._connection is not None else None

    def last_answer_age(self) -> float:
        """Seconds since the daemon was last heard of; infinite if never."""
        heard_s = self._connection.heard_s if self._connection is not None else self._heard_s
        return trio.current_time() - heard_s

    async def wait_connected(self, timeout_s: float = 120.0) -> Welcome:
        """Wait for a daemon; DaemonLost with the last reason after `timeout_s`, at once when it can never work."""
        with trio.move_on_after(timeout_s):
            while self._connection is None and not self._final:
                await self._changed.wait()
        if self._connection is None:
            raise DaemonLost(f"no daemon at {self.endpoint}: {self.lost_reason}")
        return self._connection.welcome

    def stop_waiting(self) -> None:
        """This process is about to end: from now on a daemon that is gone is not waited for."""
        self._return_within_s = 0.0
        if self._connection is None:
            self._streams.give_up(self.lost_reason)

    # --- requests --------------------------------------------------------------------------------------------------

    def generate(self, generate: Generate) -> RequestStream:
        """A request as a context manager: `async with client.generate(g) as stream: async for event in stream`."""
        return RequestStream(self, generate)

    def resume(self, generate: Generate, held: Sequence[Sequence[int]]) -> RequestStream:
        """As `generate`, for a request that an earlier process of this name sent: it goes on behind the `held` tokens.

        `held` has one entry per choice. What the daemon does not know any more is computed anew, behind them.
        """
        return RequestStream(self, generate, held)

    async def begin(self, stream: RequestStream) -> None:
        """Send a stream's request. What the daemon could not read is refused here, and never sent."""
        await trio.lowlevel.checkpoint()  # cancelled: nothing was sent, so there is nothing to abort
        if self._watches:
            raise ValueError(f"{self.frontend} only watches (watches=True): it can ask, and send no request")
        if self._connection is None:
            raise DaemonLost(self.lost_reason)
        self._streams.begin(stream)

    def leave(self, stream: RequestStream) -> None:
        """The reader is gone: its Abort is queued, now or for the next connection; never waits."""
        self._streams.leave(stream)

    def abort(self, stream: RequestStream) -> None:
        """Queue an Abort, now or for the next connection; never waits."""
        self._streams.abort(stream)

    def finish_at(self, stream: RequestStream, choice: int, output_tokens: int) -> None:
        """Queue a FinishAt, now or for when the choice was taken up; never waits."""
        self._streams.finish_at(stream, choice, output_tokens)

    async def ask(self, what: str, options: dict[str, int] | None = None, timeout_s: float = 5.0) -> Answer:
        """Ask the daemon itself. DaemonLost without one, trio.TooSlowError after `timeout_s`."""
        connection = self._connection
        if connection is None:
            raise DaemonLost(self.lost_reason)
        ticket, question = self._next_ticket, _Question()
        self._next_ticket += 1
        self._questions[ticket] = question
        try:
            with trio.fail_after(timeout_s):
                connection.post(Ask(what, ticket, options or {}))
                await question.done.wait()
        finally:
            del self._questions[ticket]
        if question.answer is None:
            raise DaemonLost(question.lost)
        return question.answer

    # --- the connection --------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        while not self._replaced:
            pause_s = await self._connect_once()
            if trio.current_time() - self._alive_s >= self._return_within_s:
                self._streams.give_up(self.lost_reason)
            await trio.sleep(pause_s)

    async def _connect_once(self) -> float:
        """One socket from its handshake to its end; how long to pause before the next one."""
        socket = self._connect(self.endpoint, CLIENT_SOCKET, self._keys, self._insecure, self._context)
        socket.watch_disconnects()
        connection: Connection | None = None
        try:
            self._attempts += 1
            process, attempt = self._process, self._attempts
            connect = Connect(self.frontend, process=process, attempt=attempt, watches=self._watches)
            greeting = await shake_hands(socket, connect, self._booting)
            if isinstance(greeting, NoWelcome):
                self._absent = greeting.reason
                self._final = greeting.reason if greeting.final else ""
                self._tell()
                return greeting.pause_s
            connection = Connection(socket, greeting)
            self._meet(connection)
            await connection.run(self._take, self._pings_unanswered_max)
        finally:
            if connection is not None:
                self._lose(connection)
            socket.close(linger_ms=DRAIN_MS if connection is not None else 0)
        return 0.0

    def _booting(self, reason: str) -> None:
        self._absent = reason
        self._alive_s = trio.current_time()

    def _meet(self, connection: Connection) -> None:
        """A daemon has welcomed us: tell it what is open here, and what nobody reads any more."""
        self._connection = connection
        self._final = ""
        self.stats["connects"] += 1
        if self._log is not None:
            life = connection.welcome.life
            self._log.info("daemon_connected", endpoint=self.endpoint, life=life, streams=len(self._streams))
        self._streams.meet(connection.post, connection.limits)
        self._tell()

    def _lose(self, connection: Connection) -> None:
        """A connection is over: streams wait for the next one, or end."""
        reason = connection.ended or "this front end is stopping"
        self._connection = None
        self._parted, self._absent = reason, ""
        self._heard_s, self._alive_s = connection.heard_s, trio.current_time()
        self.stats["lost"] += bool(connection.ended)
        if self._log is not None:
            told = {"endpoint": self.endpoint, "reason": reason, "streams": len(self._streams)}
            if connection.ended:
                self._log.warning("daemon_lost", **told)
            else:
                self._log.info("daemon_left", **told)
        self._streams.part()
        if not connection.resumable or not connection.ended or not self._return_within_s:
            self._streams.give_up(reason)
        for question in self._questions.values():
            question.lost = reason
            question.done.set()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- messages --------------------------------------------------------------------------------------------------

    def _take(self, messages: list[ToFrontEnd]) -> None:
        for message in messages:
            if isinstance(message, Answer):
                question = self._questions.get(message.ticket)
                if question is not None:
                    question.answer = message
                    question.done.set()
            elif isinstance(message, Rejected):
                self._rejected(message)
            elif not isinstance(message, Welcome):
                self._streams.take(message)
        self._streams.acknowledge()

    def _rejected(self, message: Rejected) -> None:
        """Something of ours was not understood, or we are not known any more: start over.

        Which stream it concerns cannot be told; only one who is not known may take its streams up again.
        """
        assert self._connection is not None, "only a connection is read"
        reason = f"the daemon rejected us ({message.code}): {message.message}"
        if message.code == "taken_over":
            self._replaced, self._final = True, reason
        self._connection.end(reason, resumable=message.code in NOT_KNOWN)
