"""Client: a front end's connection to the daemon, over the daemon's deaths and restarts.

Owns the connection, the streams open on it and what the daemon must still be told. Must never leave a stream waiting
for a daemon that is gone, nor a request running that nobody reads. Invariants:

* a stream that is left before its end has its Abort queued when `__aexit__` returns, cancelled or not; if the
  connection breaks first, the Abort is sent again to the same life of the daemon after reconnecting;
* a lost connection ends every open stream with DaemonLost; streams never continue over it, so no gap can hide;
* a daemon whose process ended is noticed at once, one that is stopped or stuck after `lost_after_s`.
"""

from __future__ import annotations

import math
from collections import deque
from types import TracebackType
from typing import Any, NoReturn

import trio
import zmq

from allocator.columns import i64
from ipc import codec
from ipc.checks import check_generate
from ipc.client_stream import Choice, RequestStream
from ipc.errors import DaemonLost, DecodeError
from ipc.handshake import Limits, version_problem
from ipc.keys import ClientKeys
from ipc.messages import (
    Abort,
    Accepted,
    Acknowledge,
    Answer,
    Ask,
    Connect,
    FinishAt,
    Finished,
    FromFrontEnd,
    Generate,
    Refused,
    Rejected,
    ToFrontEnd,
    TokenBatch,
    Welcome,
)
from ipc.sockets import Socket, SocketOptions, connect_dealer

PING_S = 1.0
PING_TICKET = 0
ATTEMPT_S = 2.0  # how long one socket may take for the handshake before a fresh one is tried
BOOTING_RETRY_S = 0.2
REFUSED_RETRY_S = 2.0
READ_BATCH = 256
DRAIN_MS = 500
CLIENT_SOCKET = SocketOptions(4096, 4096, codec.TRUSTED_LIMITS.message_bytes_max)


class _Question:
    """An Ask that waits for its Answer."""

    __slots__ = ("answer", "done", "lost")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: Answer | None = None
        self.lost = ""


class _Connection:
    """One welcomed connection: its socket, what does not fit into the socket's queue yet, and why it ended."""

    def __init__(self, socket: Socket, welcome: Welcome) -> None:
        self.socket = socket
        self.welcome = welcome
        self.limits = Limits.from_dict(welcome.limits)
        self.backlog: deque[bytes] = deque()
        self.backlog_grew = trio.Event()
        self.scope = trio.CancelScope()
        self.ended = ""

    def post(self, message: FromFrontEnd) -> None:
        """Send in order, without waiting; at the high-water mark it is queued here (bounded by the open streams)."""
        data = codec.encode(message)
        if self.backlog or not self.socket.try_send([data]):
            self.backlog.append(data)
            self.backlog_grew.set()

    async def send_backlog(self) -> NoReturn:
        """Move the backlog into the socket as it makes room."""
        while True:
            await self.backlog_grew.wait()
            while self.backlog:
                await self.socket.send([self.backlog[0]])
                self.backlog.popleft()
            self.backlog_grew = trio.Event()

    def end(self, reason: str) -> None:
        """This connection is over; the first reason counts."""
        self.ended = self.ended or reason
        self.scope.cancel()


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
        log: Any = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.frontend = frontend
        self.lost_reason = "not connected yet"
        self.stats: dict[str, int] = dict.fromkeys(
            ("connects", "lost", "sent_requests", "token_batches", "tokens", "stray_tokens", "aborts"), 0
        )
        self._keys, self._insecure, self._context = keys, insecure, context
        self._pings_unanswered_max = max(1, math.ceil(lost_after_s / PING_S))
        self._log = log
        self._connection: _Connection | None = None
        self._changed = trio.Event()
        self._final = ""  # a reason why waiting is useless
        self._life = ""
        self._heard_s = -math.inf
        self._unanswered = 0
        self._streams: dict[str, RequestStream] = {}
        self._choices: dict[int, Choice] = {}
        self._orphans: dict[str, int] = {}  # id -> choices that have not ended: lost streams of this life, bounded
        self._ended: list[str] = []  # ids to acknowledge
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
        for stream in list(self._streams.values()):
            if stream.left and not stream.closed:
                self.leave(stream)
        self._nursery.cancel_scope.cancel()
        await self._manager.__aexit__(None, None, None)

    @property
    def connected(self) -> bool:
        """True while a daemon has welcomed us and is not found lost."""
        return self._connection is not None

    @property
    def welcome(self) -> Welcome | None:
        """What the present daemon said in the handshake; None without one."""
        return self._connection.welcome if self._connection is not None else None

    def last_answer_age(self) -> float:
        """Seconds since the daemon was last heard of; infinite if never."""
        return trio.current_time() - self._heard_s

    async def wait_connected(self, timeout_s: float = 120.0) -> Welcome:
        """Wait for a daemon; DaemonLost with the last reason after `timeout_s`, at once when it can never work."""
        with trio.move_on_after(timeout_s):
            while self._connection is None and not self._final:
                await self._changed.wait()
        if self._connection is None:
            raise DaemonLost(f"no daemon at {self.endpoint}: {self.lost_reason}")
        return self._connection.welcome

    # --- requests --------------------------------------------------------------------------------------------------

    def generate(self, generate: Generate) -> RequestStream:
        """A request as a context manager: `async with client.generate(g) as stream: async for event in stream`."""
        return RequestStream(self, generate)

    async def begin(self, stream: RequestStream) -> None:
        """Send a stream's request. What the daemon could not read is refused here, and never sent."""
        connection, generate = self._connection, stream.generate
        if connection is None:
            raise DaemonLost(self.lost_reason)
        if stream.id in self._streams:
            raise ValueError(f"the request id {stream.id!r} is in use on this connection")
        refused = _refusal(generate, connection.limits)
        if refused is not None:
            stream.refuse(refused)
            await trio.lowlevel.checkpoint()
            return
        self._streams[stream.id] = stream
        try:
            await connection.socket.send([codec.encode(generate)])
        except trio.ClosedResourceError:
            self._streams.pop(stream.id, None)
            raise DaemonLost(self.lost_reason) from None
        except BaseException:  # cancelled at the high-water mark: not sent, nothing to abort
            self._streams.pop(stream.id, None)
            raise
        self.stats["sent_requests"] += 1

    def leave(self, stream: RequestStream) -> None:
        """The reader is gone. The daemon is told; the id stays ours until the daemon has said that it ended."""
        stream.closed = True
        for request in stream.requests():
            self._choices.pop(request, None)
        if stream.left and self._streams.get(stream.id) is stream:
            self.abort(stream)

    def abort(self, stream: RequestStream) -> None:
        """Queue an Abort; never waits."""
        if self._connection is not None:
            self.stats["aborts"] += 1
            self._connection.post(Abort(stream.id))

    def finish_at(self, stream: RequestStream, choice: int, output_tokens: int) -> None:
        """Queue a FinishAt; never waits."""
        if self._connection is not None:
            self._connection.post(FinishAt(stream.id, choice, output_tokens))

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

    async def _stay_connected(self) -> NoReturn:
        while True:
            socket = connect_dealer(self.endpoint, CLIENT_SOCKET, self._keys, self._insecure, self._context)
            socket.watch_disconnects()
            connection: _Connection | None = None
            pause_s = 0.0
            try:
                welcome, pause_s = await self._shake_hands(socket)
                if welcome is not None:
                    connection = _Connection(socket, welcome)
                    await self._serve(connection)
            finally:
                if connection is not None:
                    self._lose(connection)
                socket.close(linger_ms=DRAIN_MS)
            await trio.sleep(pause_s)

    async def _shake_hands(self, socket: Socket) -> tuple[Welcome | None, float]:
        """Introduce ourselves: the welcome, or None and how long to pause before the next try."""
        await socket.send([codec.encode(Connect(self.frontend))])
        while True:
            with trio.move_on_after(ATTEMPT_S) as scope:
                frames = await socket.recv()
            if scope.cancelled_caught:
                self._note("nobody answers there")
                return None, 0.0
            try:
                message = codec.to_frontend(frames[-1])
            except DecodeError as error:
                self._note(f"it answers with something else: {error}")
                return None, REFUSED_RETRY_S
            if isinstance(message, Welcome):
                problem = version_problem(message.version, "the daemon")
                if not problem:
                    return message, 0.0
                message = Rejected("version", problem)
            if not isinstance(message, Rejected):
                continue
            self._note(message.message)
            if message.code != "booting":
                self._final = message.message if message.code == "version" else ""
                self._tell()
                return None, REFUSED_RETRY_S
            await trio.sleep(BOOTING_RETRY_S)
            await socket.send([codec.encode(Connect(self.frontend))])

    async def _serve(self, connection: _Connection) -> None:
        """Work on one connection until it ends; `connection.ended` says why."""
        self._connection = connection
        self._final = ""
        self._heard_s, self._unanswered = trio.current_time(), 0
        self.stats["connects"] += 1
        life = connection.welcome.life
        if self._log is not None:
            self._log.info("daemon_connected", endpoint=self.endpoint, life=life, aborts=len(self._orphans))
        if life == self._life:
            for id_ in self._orphans:
                self.stats["aborts"] += 1
                connection.post(Abort(id_))
        else:
            self._orphans.clear()
        self._life = life
        self._tell()
        with connection.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, connection)
                nursery.start_soon(self._ping, connection)
                nursery.start_soon(connection.send_backlog)
                nursery.start_soon(self._watch, connection)

    def _lose(self, connection: _Connection) -> None:
        """End everything that was open on a connection."""
        reason = connection.ended or "this front end is stopping"
        self._connection = None
        self._note(reason)
        self.stats["lost"] += bool(connection.ended)
        if self._log is not None:
            told = {"endpoint": self.endpoint, "reason": reason, "streams": len(self._streams)}
            if connection.ended:
                self._log.warning("daemon_lost", **told)
            else:
                self._log.info("daemon_left", **told)
        streams, self._streams, self._choices = list(self._streams.values()), {}, {}
        for stream in streams:
            if stream.left:
                self._orphans[stream.id] = stream.left
                stream.lose(reason)
        while len(self._orphans) > connection.limits.requests_per_frontend_max:  # no more can be live; the oldest go
            del self._orphans[next(iter(self._orphans))]
        for question in self._questions.values():
            question.lost = reason
            question.done.set()
        self._tell()

    def _note(self, reason: str) -> None:
        self.lost_reason = reason

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _ping(self, connection: _Connection) -> None:
        """Pings are counted, not timed: a stall of our own process must not pass for the daemon's silence."""
        while True:
            if not connection.backlog:
                connection.post(Ask("ping", PING_TICKET))
            await trio.sleep(PING_S)
            self._unanswered += 1
            if self._unanswered > self._pings_unanswered_max:
                connection.end(f"the daemon has not answered for {self.last_answer_age():.1f} s")
                return

    async def _watch(self, connection: _Connection) -> None:
        await connection.socket.wait_disconnected()
        connection.end("the daemon closed the connection or its process ended")

    async def _read(self, connection: _Connection) -> None:
        while not connection.ended:
            batch = await connection.socket.recv_batch(READ_BATCH)
            self._heard_s, self._unanswered = trio.current_time(), 0
            for frames in batch:
                try:
                    self._dispatch(connection, codec.to_frontend(frames[-1]))
                except DecodeError as error:
                    connection.end(f"the daemon sent what is no message: {error}")
            if self._ended:
                connection.post(Acknowledge(self._ended))
                self._ended = []

    # --- messages --------------------------------------------------------------------------------------------------

    def _dispatch(self, connection: _Connection, message: ToFrontEnd) -> None:
        if isinstance(message, TokenBatch):
            self._tokens(message)
        elif isinstance(message, Finished):
            self._finished(message)
        elif isinstance(message, Accepted):
            self._accepted(message)
        elif isinstance(message, Refused):
            stream = self._streams.pop(message.id, None)
            if stream is not None:
                stream.refuse(message)
        elif isinstance(message, Answer):
            question = self._questions.get(message.ticket)
            if question is not None:
                question.answer = message
                question.done.set()
        elif isinstance(message, Rejected):
            # Something of ours was not understood, or we are not known any more. Which stream it concerns cannot be
            # told, and one of them may wait for ever: start over.
            connection.end(f"the daemon rejected us ({message.code}): {message.message}")

    def _tokens(self, batch: TokenBatch) -> None:
        """One step's tokens to their streams. The hot path: one dictionary look-up and one append per token."""
        choices = self._choices
        stray = 0
        tokens = i64(batch.tokens).tolist()
        for request, token in zip(i64(batch.requests).tolist(), tokens, strict=True):
            choice = choices.get(request)
            if choice is None:
                stray += 1
                continue
            (choice.pending or choice.event()).tokens.append(token)
        for entry in batch.logprobs:
            choice = choices.get(entry.request)
            if choice is None:
                continue
            if entry.prompt_position < 0:
                choice.event().logprobs.append(entry.values)
            else:
                choice.event().prompt_logprobs.append((entry.prompt_position, entry.values))
        self.stats["token_batches"] += 1
        self.stats["tokens"] += len(tokens)
        self.stats["stray_tokens"] += stray

    def _accepted(self, message: Accepted) -> None:
        stream = self._streams.get(message.id)
        if stream is None or stream.accepted is not None:
            return
        stream.accept(message)
        if not stream.closed:
            self._choices.update(zip(stream.requests(), stream.choices, strict=True))

    def _finished(self, message: Finished) -> None:
        self._choices.pop(message.request, None)
        stream = self._streams.get(message.id)
        if stream is not None:
            stream.finish(message)
            if not stream.left:
                del self._streams[message.id]
                self._ended.append(message.id)
        elif message.id in self._orphans:
            self._orphans[message.id] -= 1
            if not self._orphans[message.id]:
                del self._orphans[message.id]
                self._ended.append(message.id)


def _refusal(generate: Generate, limits: Limits) -> Refused | None:
    """What the daemon's gateway would say to a request that it cannot read, said before it is sent."""
    try:
        check_generate(generate, limits)
        size = len(codec.encode(generate))
    except DecodeError as error:
        code = "prompt_too_long" if (error.field, error.code) == ("prompt", "too_long") else "bad_parameter"
        return Refused(generate.id, code, error.text, error.field)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:  # an integer or a text msgpack has no form for
        return Refused(generate.id, "bad_parameter", f"the request cannot be encoded: {error}")
    if size > limits.message_bytes_max:
        text = f"the request has {size} bytes, the limit is {limits.message_bytes_max}"
        return Refused(generate.id, "bad_parameter", text, "", limits.message_bytes_max, size)
    return None
