"""Gateway: the actor at the daemon's door to its front ends.

Owns the front ROUTER, the sessions and what is held or queued for them. Must never let bytes that are not a valid
message of a connected front end reach the core, nor let any peer end a task, block the loop or grow memory without
bound. Invariants:

* a full engine mailbox makes the gateway stop reading; nothing that was read is dropped;
* a watcher (`Connect.watches`) gets answers to questions and nothing else, on places of its own;
* one request's messages leave in order: Accepted, its tokens, its Finished; Accepted not before it is on disk;
* who does not read is cut off: its connection is forgotten, never its requests (`silence_s` later those end too).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import trio

from daemon.core.inputs import Aborted, Acknowledged, Arrived, FinishAsked, FrontEndLost, Input, Resumed
from daemon.core.outputs import Outputs, Reply, TokenColumns
from daemon.core.reasons import RefusalCode
from daemon.gateway_hold import HoldBack, is_empty
from daemon.gateway_hostile import Complaints
from daemon.gateway_sessions import Session, Sessions
from daemon.gateway_tokens import NOBODY, batches_by_frontend
from ipc import codec
from ipc.errors import DecodeError, PeerGone
from ipc.handshake import Limits, version_problem
from ipc.keys import ServerKeys
from ipc.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Acknowledge,
    Answer,
    Ask,
    Connect,
    Continued,
    FinishAt,
    Finished,
    FromFrontEnd,
    Generate,
    ModelFacts,
    Refused,
    Rejected,
    Resume,
    ToFrontEnd,
    Welcome,
)
from ipc.sockets import Socket, SocketOptions, bind_router
from ipc.zap import Authenticator

AskHandler = Callable[[dict[str, int]], Awaitable[tuple[bool, str]]]

READ_BATCH = 256  # messages taken per wake-up
SEND_HWM = 1024  # messages in ZeroMQ's own queue per front end, before our outbox
RETRY_S = 0.005  # how often a slow reader is tried again, while there is one
HOUSEKEEPING_S = 1.0  # one round of looking for silence; shorter when little of it is allowed
ROUNDS_MIN = 4  # silent rounds before a front end is given up, at least
BUSY_RETRY_MS = 1000

COUNTERS = (
    "received", "sent", "sent_bytes", "malformed", "not_connected", "rejected", "connects", "takeovers",
    "too_many_frontends", "too_many_watchers", "refused_here", "mailbox_full", "undelivered", "disconnects",
    "slow_readers_cut", "outbox_dropped", "frontends_lost", "asks", "asks_failed", "asks_busy",
)  # fmt: skip


class Gateway:
    """Front ends in, inputs out; outputs in, messages out. Wire one per daemon."""

    def __init__(
        self,
        *,
        endpoint: str,
        life: str,
        limits: Limits,
        mailbox: trio.MemorySendChannel[Input],
        names: Sequence[str],
        now_ns: Callable[[], int],
        draw_seed: Callable[[], int],
        log: Any,
        asks: Mapping[str, AskHandler] | None = None,
        orders: Mapping[str, AskHandler] | None = None,
        keys: ServerKeys | None = None,
        insecure: bool = False,
        silence_s: float = 10.0,
        trouble: Callable[[], str] = str,
        bind: Callable[..., Socket] = bind_router,
    ) -> None:
        """`names` is the core's live list of front ends, `draw_seed` gives a fresh int64 per request.

        `asks` are the questions that anybody may ask, `orders` those to which only a front end is entitled, because
        they change something. `trouble` says what is waited for while the door is closed; empty where there is nothing.
        """
        self._endpoint, self._keys, self._insecure = endpoint, keys, insecure
        self._life, self._limits = life, limits
        self._mailbox, self._names = mailbox, names
        self._now_ns, self._draw_seed = now_ns, draw_seed
        self._asks = dict(asks or {})
        self._orders = dict(orders or {})
        self._asks_running = {False: 0, True: 0}  # by whether a watcher asked: it takes no front end's place
        self._silence_s = silence_s
        self._trouble = trouble
        self._bind = bind
        self._log = log
        self._facts: ModelFacts | None = None
        self._sessions = Sessions(limits)
        self._hold = HoldBack()
        self._owners: dict[int, int] = {}  # request number -> front-end index, until its Finished is sent
        self._socket: Socket | None = None
        self._waiting_puts = 0  # the mailbox is full: nothing is read, so silence means nothing
        self._outboxes = trio.Event()  # set while an outbox holds something
        self._someone = trio.Event()  # set while a session exists
        self.stats: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._complaints = Complaints(log, trio.current_time)

    # --- life --------------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Bind and serve until cancelled; started once the socket is bound. EndpointError when it cannot be."""
        async with trio.open_nursery() as nursery:
            if self._keys is not None:
                await nursery.start(Authenticator(self._keys.allowed).run)
            options = SocketOptions(SEND_HWM, READ_BATCH, self._limits.message_bytes_max)
            self._socket = self._bind(self._endpoint, options, self._keys, self._insecure)
            try:
                nursery.start_soon(self._read, self._socket, nursery)
                nursery.start_soon(self._retry_outboxes)
                nursery.start_soon(self._keep_house)
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._socket.close(linger_ms=200)

    @property
    def endpoint(self) -> str:
        """Where front ends connect to; with a tcp wildcard, the port that was bound."""
        return self._socket.endpoint if self._socket is not None else self._endpoint

    def open(self, facts: ModelFacts) -> None:
        """The model is ready: from now on a Connect is welcomed."""
        self._facts = facts

    def expect(self, names: Iterable[str], next_request: int) -> None:
        """An earlier life left requests of these front ends: once the door is open they have `silence_s` to come back.

        Requests below `next_request` were accepted then; what is said of them waits for no disk.
        """
        self._hold.known_below(next_request)
        for name in names:
            self._sessions.expect(name, trio.current_time())
            self._someone.set()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or held for any front end; False when `timeout_s` passed first."""
        with trio.move_on_after(timeout_s):
            while len(self._hold) or any(session.outbox for session in self._sessions):
                await trio.sleep(RETRY_S)
            return True
        return False

    def frontends(self) -> list[dict[str, Any]]:
        """One row per front end for status pages: name, connected, silent seconds, live requests, queued messages."""
        now = trio.current_time()
        return [
            {
                "name": session.name,
                "connected": session.identity is not None,
                "silent_s": round(now - session.heard_s, 1),
                "live_requests": len(session.live),
                "queued_messages": len(session.outbox),
                "connects": session.connects,
                "watches": session.watches,
            }
            for session in self._sessions
        ]

    # --- outputs: core -> front ends ---------------------------------------------------------------------------------

    def deliver(self, outputs: Outputs, sequence: int) -> None:
        """Send what one `feed` led to, tokens before replies; it is written through journal `sequence`. Never waits."""
        if outputs.tokens is not None:
            self._send_tokens(self._hold.tokens(outputs.tokens))
        for reply in outputs.replies:
            self._account(reply)
            if self._hold.reply(reply, sequence):
                self._send_reply(reply)

    def durable(self, synced_through: int) -> None:
        """The journal is on disk through this sequence: send what waited for it. Never waits."""
        for item in self._hold.durable(synced_through):
            if isinstance(item, TokenColumns):
                self._send_tokens(item)
            else:
                self._send_reply(item)

    def _send_tokens(self, columns: TokenColumns) -> None:
        if is_empty(columns):
            return
        for frontend, batch in batches_by_frontend(columns, self._owners):
            if frontend == NOBODY:
                self.stats["undelivered"] += 1
            else:
                self._send_to(self._names[frontend], batch)

    def _send_reply(self, reply: Reply) -> None:
        if isinstance(reply.message, Finished):
            self._owners.pop(reply.message.request, None)
        self._send_to(self._names[reply.frontend], reply.message)

    def _account(self, reply: Reply) -> None:
        """Keep count of what a front end has live, and of whose a request is."""
        message = reply.message
        if isinstance(message, Accepted):
            numbers = range(message.first_request, message.first_request + message.n)
            self._owners.update(dict.fromkeys(numbers, reply.frontend))
        elif isinstance(message, Continued):
            self._owners[message.request] = reply.frontend
        session = self._sessions.by_name(self._names[reply.frontend])
        if session is None:
            return
        live = session.live
        if isinstance(message, Accepted):
            live[message.id] = set(range(message.n))
        elif isinstance(message, Continued):  # the end of one that has ended follows
            live.setdefault(message.id, set()).add(message.choice)
        elif isinstance(message, Finished):
            live.get(message.id, set()).discard(message.choice)
            if not live.get(message.id):
                live.pop(message.id, None)
        elif not live.get(message.id):
            live.pop(message.id, None)

    def _send_to(self, name: str, message: ToFrontEnd) -> None:
        self._send(self._sessions.by_name(name), message)

    def _send(self, session: Session | None, message: ToFrontEnd) -> None:
        if session is None or session.identity is None:
            self.stats["undelivered"] += 1
            return
        data = codec.encode(message)
        if session.outbox or not self._try(session, data):
            self._queue(session, data)

    def _try(self, session: Session, data: bytes) -> bool:
        """False when the front end's queue is full; a connection found gone counts as done: nobody reads it."""
        assert self._socket is not None
        assert session.identity is not None
        try:
            if not self._socket.try_send([session.identity, data]):
                return False
        except PeerGone:
            self.stats["disconnects"] += 1
            self.stats["undelivered"] += 1
            self.stats["outbox_dropped"] += self._sessions.disconnect(session)
            self._log.info("front_end_disconnected", frontend=session.name, live_requests=len(session.live))
            return True
        self.stats["sent"] += 1
        self.stats["sent_bytes"] += len(data)
        return True

    def _queue(self, session: Session, data: bytes) -> None:
        if session.identity is None:
            self.stats["undelivered"] += 1
            return
        session.queue(data)
        limits = self._limits
        if len(session.outbox) <= limits.outbox_messages_max and session.outbox_bytes <= limits.outbox_bytes_max:
            self._outboxes.set()
            return
        self.stats["slow_readers_cut"] += 1
        dropped = self._sessions.disconnect(session)
        self.stats["outbox_dropped"] += dropped
        self._log.warning(
            "slow_reader_cut",
            frontend=session.name,
            queued_messages=dropped,
            limit_messages=limits.outbox_messages_max,
            limit_bytes=limits.outbox_bytes_max,
        )

    async def _retry_outboxes(self) -> None:
        """A router cannot say which peer has room again: ask, while somebody is behind; otherwise sleep."""
        while True:
            await self._outboxes.wait()
            behind = False
            for session in self._sessions:
                while session.outbox and self._try(session, session.outbox[0]):
                    if session.outbox:  # still connected
                        session.outbox_bytes -= len(session.outbox.popleft())
                behind = behind or bool(session.outbox)
            if not behind:
                self._outboxes = trio.Event()
                continue
            await trio.sleep(RETRY_S)

    # --- inputs: front ends -> core ----------------------------------------------------------------------------------

    async def _read(self, socket: Socket, nursery: trio.Nursery) -> None:
        while True:
            for frames in await socket.recv_batch(READ_BATCH):
                await self._take(frames, nursery)

    async def _take(self, frames: list[bytes], nursery: trio.Nursery) -> None:
        self.stats["received"] += 1
        identity = frames[0]
        session = self._sessions.by_identity(identity)
        if len(frames) != 2:
            self._malformed(identity, session, DecodeError("malformed", f"{len(frames) - 1} frames where 1 belongs"))
            return
        try:
            message = codec.from_frontend(frames[1], self._limits)
        except DecodeError as error:
            self._malformed(identity, session, error)
            return
        if isinstance(message, Connect):
            self._connect(identity, message)
        elif isinstance(message, Ask) and message.what == "alive":
            self._tell_stranger(identity, Answer(message.ticket, True, self._life))
        elif session is None:
            self.stats["not_connected"] += 1
            self._reject(identity, "not_connected", f"{type(message).__name__} before Connect")
        else:
            session.heard(trio.current_time())
            if isinstance(message, Ask):
                self._ask(session, message, nursery)
            elif session.watches:
                self._reject(identity, "watches", f"{type(message).__name__} of {session.name}, which only watches")
            else:
                await self._forward(identity, session, message)

    async def _forward(self, identity: bytes, session: Session, message: FromFrontEnd) -> None:
        now_ns, name = self._now_ns(), session.name
        if isinstance(message, Generate):
            live, limit = len(session.live), self._limits.requests_per_frontend_max
            if live >= limit and message.id not in session.live:
                text = f"front end {name} has {live} requests that have not ended, the limit is {limit}"
                refused = Refused(message.id, RefusalCode.QUEUE_FULL, text, "", limit, live + 1, BUSY_RETRY_MS)
                self._refuse_here(session, refused)
                return
            session.live.setdefault(message.id, set())
            await self._put(Arrived(now_ns, name, message, self._draw_seed()))
        elif isinstance(message, Abort):
            await self._put(Aborted(now_ns, name, message.id, "client"))
        elif isinstance(message, FinishAt):
            await self._put(FinishAsked(now_ns, name, message.id, message.choice, message.output_tokens))
        elif isinstance(message, Acknowledge):
            await self._put(Acknowledged(now_ns, name, message.ids))
        else:
            assert isinstance(message, Resume)
            await self._put(Resumed(now_ns, name, message.id, message.choice, message.tokens))

    async def _put(self, item: Input) -> bool:
        """Hand an input to the engine; a full mailbox stops the reading, so ZeroMQ's bounded queues fill next.

        False when it had to wait: whatever was known before it may have changed.
        """
        try:
            self._mailbox.send_nowait(item)
        except trio.WouldBlock:
            self.stats["mailbox_full"] += 1
            self._waiting_puts += 1
            try:
                await self._mailbox.send(item)
            finally:
                self._waiting_puts -= 1
            return False
        return True

    def _malformed(self, identity: bytes, session: Session | None, error: DecodeError) -> None:
        """Bytes that are no message. Where they are a request that could be told apart, it is that one's refusal."""
        if session is not None and error.id and not session.watches:
            too_long = error.field == "prompt" and error.code == "too_long"
            code = RefusalCode.PROMPT_TOO_LONG if too_long else RefusalCode.BAD_PARAMETER
            self._refuse_here(session, Refused(error.id, code, error.text, error.field))
            return
        self.stats["malformed"] += 1
        self._complaints.note("malformed_message", error.code, peer=session.name if session else "", text=error.text)
        self._reject(identity, error.code, error.text)

    def _refuse_here(self, session: Session, refused: Refused) -> None:
        self.stats["refused_here"] += 1
        self._send_to(session.name, refused)

    def _reject(self, identity: bytes, code: str, text: str) -> None:
        """Tell a peer, if it can be told at once; strangers are never queued for."""
        self.stats["rejected"] += 1
        self._tell_stranger(identity, Rejected(code, text[:500]))

    def _tell_stranger(self, identity: bytes, message: ToFrontEnd) -> None:
        """At once or not at all. `alive` is answered to whoever asks, introduced or not, booting or not."""
        assert self._socket is not None
        try:
            self._socket.try_send([identity, codec.encode(message)])
        except PeerGone:
            return  # it left; what it was told is counted all the same

    def _connect(self, identity: bytes, message: Connect) -> None:
        problem = version_problem(message.version, f"front end {message.frontend}")
        if problem:
            self._complaints.note("version_mismatch", "version", peer=message.frontend, text=problem)
            self._reject(identity, "version", problem)
            return
        if self._facts is None:
            self._reject(identity, "booting", self._trouble() or "the model is being loaded")
            return
        if self._sessions.is_late(message):
            self._reject(identity, "late", f"a later connection of {message.frontend} is here")
            return
        session, replaced = self._sessions.connect(message, identity, trio.current_time())
        if session is None:
            self._no_place(identity, message)
            return
        self.stats["connects"] += 1
        if replaced is not None:
            self.stats["takeovers"] += 1
            self._reject(replaced, "taken_over", f"another connection introduced itself as {message.frontend}")
        self._someone.set()
        self._log.info("front_end_connected", frontend=session.name, takeover=replaced is not None)
        self._send(session, Welcome(PROTOCOL_VERSION, self._facts, self._limits.as_dict(), self._life))

    def _no_place(self, identity: bytes, message: Connect) -> None:
        """All places of its kind are taken; watchers and front ends have their own."""
        kind, event, counter = ("front ends", "too_many_front_ends", "too_many_frontends")
        if message.watches:
            kind, event, counter = ("watchers", "too_many_watchers", "too_many_watchers")
        text = f"{self._sessions.most(message.watches)} {kind} are connected or left just now, which is the limit"
        self.stats[counter] += 1
        self._complaints.note(event, kind, peer=message.frontend, text=text)
        self._reject(identity, counter, text)

    # --- questions ---------------------------------------------------------------------------------------------------

    def _ask(self, session: Session, ask: Ask, nursery: trio.Nursery) -> None:
        self.stats["asks"] += 1
        if ask.what == "ping":
            self._send(session, Answer(ask.ticket, True, self._life))
            return
        entitled = self._asks if session.watches else self._asks | self._orders
        handler, running = entitled.get(ask.what), self._asks_running[session.watches]
        if handler is None and ask.what in self._orders:
            text = f"{ask.what} is an order, and {session.name} only watches: connect as a front end to give it"
            self._send(session, Answer(ask.ticket, False, text))
        elif handler is None:
            known = ", ".join(sorted([*entitled, "ping"]))
            self._send(session, Answer(ask.ticket, False, f"unknown question {ask.what!r}; known: {known}"))
        elif running >= self._limits.asks_running_max:
            self.stats["asks_busy"] += 1
            text = f"{running} questions are being answered, which is the limit; ask again"
            self._send(session, Answer(ask.ticket, False, text))
        else:
            self._asks_running[session.watches] += 1
            nursery.start_soon(self._answer, session, ask, handler)

    async def _answer(self, session: Session, ask: Ask, handler: AskHandler) -> None:
        """Run a handler; whatever it raises is an answer and a log line, and serving goes on."""
        try:
            ok, body = await handler(ask.options)
        except Exception as error:
            self.stats["asks_failed"] += 1
            self._log.error("ask_failed", what=ask.what, frontend=session.name, error=repr(error), exc_info=True)
            ok, body = False, f"{ask.what} failed: {error!r}"
        finally:
            self._asks_running[session.watches] -= 1
        self._send(session, Answer(ask.ticket, ok, body))

    # --- silence -----------------------------------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        """Give up front ends that were silent too long; sleeps without a timer while there are none.

        Silence is counted in rounds, not read off the clock: after a stall of this process everybody's messages lie
        unread, and nobody may be given up for that.
        """
        pause_s = min(HOUSEKEEPING_S, self._silence_s / ROUNDS_MIN)
        rounds = math.ceil(self._silence_s / pause_s)
        while True:
            await self._someone.wait()
            await trio.sleep(pause_s)
            if self._waiting_puts or self._facts is None:  # nobody is heard, nobody can come in
                continue
            await self._give_up_silent(rounds)
            if not len(self._sessions):
                self._someone = trio.Event()

    async def _give_up_silent(self, rounds: int) -> None:
        """One round. After a wait nobody else is given up in it: their messages may have lain unread meanwhile."""
        for session in self._sessions.silent(rounds):
            if session.watches:
                self._sessions.give_up(session)
                self._log.info("watcher_left", frontend=session.name)
                continue
            self.stats["frontends_lost"] += 1
            live = len(session.live)
            self._sessions.give_up(session)
            self._log.warning("front_end_lost", frontend=session.name, silence_s=self._silence_s, live_requests=live)
            if not await self._put(FrontEndLost(self._now_ns(), session.name)):
                return
