"""Wire clients of a campaign: front ends of their own over ZeroMQ, that resume by the protocol alone.

Owns one front end and its requests. Must never use the product's client: what the protocol promises is judged here by
its messages. After a lost connection it connects again under its name, sends `Generate` for what was not accepted and
`Resume` with every token it holds for what was; tokens count only behind an `Accepted` or a `Continued` of the present
connection. Invariants: a position is never taken twice, and one that is skipped is noted as wrong.
"""

from __future__ import annotations

import itertools
from typing import NoReturn

import trio

from allocator.columns import i64, pack_i64
from ipc import codec
from ipc.messages import (
    Accepted,
    Acknowledge,
    Answer,
    Ask,
    Connect,
    Continued,
    Finished,
    Generate,
    Refused,
    Rejected,
    Resume,
    ToFrontEnd,
    TokenBatch,
    Welcome,
)
from ipc.sockets import Socket, SocketOptions, connect_dealer
from tools.faults.work import Story

PING_EVERY_S = 0.5
SILENCE_S = 2.0  # without an answer to a ping: the connection counts as lost
HANDSHAKE_S = 2.0
AGAIN_S = 0.2
OPTIONS = SocketOptions(4096, 4096, codec.TRUSTED_LIMITS.message_bytes_max)
GOOD = frozenset({"length", "stop"})  # reasons of an end that was asked for
UNKNOWN = "unknown_request"
TRANSIENT = frozenset({"queue_full", "draining", "booting"})  # refusals that ask to come again


class _Ask:
    """One request of this front end."""

    def __init__(self, story: Story, generate: Generate) -> None:
        self.story = story
        self.generate = generate
        self.sent = 0  # times its Generate was sent
        self.accepted = False
        self.following = False  # the next token of the present connection is at our position
        self.done = trio.Event()


class WireFrontEnd:
    """A front end named `name` at the daemon's endpoint; run `run` in a nursery and `follow` for each request."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.connects = 0
        self.lost = 0
        self._endpoint = endpoint
        self._name = name
        self._asks: dict[str, _Ask] = {}
        self._by_number: dict[int, _Ask] = {}
        self._socket: Socket | None = None
        self._scope = trio.CancelScope()

    async def follow(self, story: Story, generate: Generate) -> None:
        """Ask and wait until the story is over."""
        ask = self._asks[generate.id] = _Ask(story, generate)
        if self._socket is not None:
            self._send(ask)
        try:
            await ask.done.wait()
        finally:
            del self._asks[generate.id]

    def vanish(self) -> None:
        """Lose the connection without a word, as if this process had died and come back with what it holds."""
        self._scope.cancel()

    async def run(self) -> NoReturn:
        """Connect, and connect again, until cancelled."""
        while True:
            socket = connect_dealer(self._endpoint, OPTIONS)
            socket.watch_disconnects()
            try:
                with trio.CancelScope() as self._scope:
                    if await self._welcomed(socket):
                        await self._serve(socket)
                self.lost += self._socket is not None
            finally:
                self._socket = None
                socket.close()
            await trio.sleep(AGAIN_S)

    async def _welcomed(self, socket: Socket) -> bool:
        with trio.move_on_after(HANDSHAKE_S):
            await socket.send([codec.encode(Connect(self._name))])
            while True:
                message = codec.to_frontend((await socket.recv())[-1])
                if isinstance(message, Welcome):
                    return True
                if isinstance(message, Rejected):
                    return False
        return False

    async def _serve(self, socket: Socket) -> None:
        self._socket = socket
        self.connects += 1
        self._by_number.clear()
        for ask in self._asks.values():
            ask.following = False
            self._send(ask)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ping, socket)
            nursery.start_soon(self._until_closed, socket, nursery.cancel_scope)
            while True:
                with trio.move_on_after(SILENCE_S) as patience:
                    batch = await socket.recv_batch(64)
                if patience.cancelled_caught:
                    break
                if not all(self._take(codec.to_frontend(frames[-1])) for frames in batch):
                    break
            nursery.cancel_scope.cancel()

    async def _ping(self, socket: Socket) -> NoReturn:
        for ticket in itertools.count(1):
            await socket.send([codec.encode(Ask("ping", ticket))])
            for ask in self._asks.values():
                if not ask.sent:
                    self._send(ask)
            await trio.sleep(PING_EVERY_S)
        raise AssertionError("counting has no end")

    @staticmethod
    async def _until_closed(socket: Socket, scope: trio.CancelScope) -> None:
        await socket.wait_disconnected()
        scope.cancel()

    def _post(self, message: Generate | Resume | Acknowledge) -> None:
        assert self._socket is not None
        if not self._socket.try_send([codec.encode(message)]):
            self.vanish()  # thousands of messages unread: that daemon does not listen

    def _send(self, ask: _Ask) -> None:
        """What the daemon must be told of it on this connection."""
        if ask.accepted:
            self._resume(ask)
        else:
            ask.sent += 1
            self._post(ask.generate)

    def _resume(self, ask: _Ask) -> None:
        ask.story.resumes += 1
        self._post(Resume(ask.generate.id, 0, pack_i64(ask.story.tokens)))

    # --- what comes

    def _take(self, message: ToFrontEnd) -> bool:
        """Account for a message; False when the connection is worth nothing any more."""
        match message:
            case TokenBatch():
                self._tokens(message)
            case Accepted():
                self._accepted(message)
            case Continued():
                self._continued(message)
            case Finished():
                self._finished(message)
            case Refused():
                self._refused(message)
            case Rejected():
                return False
            case Answer() | Welcome():
                pass
        return True

    def _accepted(self, message: Accepted) -> None:
        ask = self._asks.get(message.id)
        if ask is None or ask.following:
            return
        ask.accepted = True
        if ask.sent > 1:  # it may have been accepted long ago, and some of its tokens gone where we were
            self._resume(ask)
            return
        ask.following = True
        self._by_number[message.first_request] = ask

    def _continued(self, message: Continued) -> None:
        ask = self._asks.get(message.id)
        if ask is None or ask.following:
            return
        story, position, tokens = ask.story, message.output_tokens, i64(message.tokens).tolist()
        held = len(story.tokens)
        if position > held:
            story.wrong.append(f"continued behind token {position}, we hold {held}: {position - held} are missing")
        overlap = min(held - position, len(tokens))
        if overlap > 0 and story.tokens[position : position + overlap] != tokens[:overlap]:
            story.wrong.append(f"continued at {position} with other tokens than we hold")
        if new := tokens[max(0, held - position) :]:
            story.take(new)
        ask.following = True
        self._by_number[message.request] = ask

    def _tokens(self, batch: TokenBatch) -> None:
        found: dict[int, list[int]] = {}
        for number, token in zip(i64(batch.requests).tolist(), i64(batch.tokens).tolist(), strict=True):
            found.setdefault(number, []).append(token)
        for number, tokens in found.items():
            ask = self._by_number.get(number)
            if ask is not None:
                ask.story.take(tokens)

    def _finished(self, message: Finished) -> None:
        ask = self._asks.get(message.id)
        if ask is None:
            return
        if not ask.following and message.reason in GOOD:  # told again behind the `Continued` that we wait for
            return
        ask.story.finish = message.reason
        ask.story.told_tokens = message.output_tokens
        if message.reason not in GOOD:
            ask.story.error = f"{message.reason}: {message.detail}"
        ask.done.set()
        self._by_number.pop(message.request, None)
        self._post(Acknowledge([message.id]))

    def _refused(self, message: Refused) -> None:
        ask = self._asks.get(message.id)
        if ask is None:
            return
        if message.code == UNKNOWN and ask.accepted:  # lost with the journal's tail, or given up while we were away
            ask.accepted = False
            self._send(ask)
            return
        if message.code in TRANSIENT and not ask.accepted:
            ask.story.turned_away += 1
            ask.sent = 0  # nothing is held for it: the next ping asks anew
            return
        ask.story.error = f"refused ({message.code}): {message.message}"
        ask.done.set()
