"""Streaming: a request's output as server-sent events.

Owns the order of events on the wire. Must never decide how a request ends. Invariants: the status line waits for the
daemon's acceptance, so a refusal is a plain answer; `[DONE]` follows success only; anything else ends with one `error`
event in the API's shape. While nothing is there to be said a comment says that the stream lives: a proxy would close
one that is silent for as long as a daemon needs to come back.
"""

from __future__ import annotations

from typing import Any

import trio

from daemon.frontend.choice import Choice
from daemon.frontend.errors import ApiError
from daemon.frontend.generation import Generation
from daemon.frontend.render import Document, Renderer, usage
from daemon.frontend.schemas import CHAT, Options

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients skip it


class StreamSink:
    """Sends a request's output as it comes."""

    def __init__(self, send: Any, renderer: Renderer, options: Options, generation: Generation) -> None:
        self._send = send
        self._renderer = renderer
        self._options = options
        self._generation = generation
        self.open = False  # the status line was sent
        self._sending = False  # calls come one at a time, but for comments
        self._commenting: trio.Event | None = None
        self._sent_s = 0.0  # trio time

    def _usage(self) -> Document | None:
        return usage(self._generation) if self._options.continuous_usage else None

    async def _body(self, data: bytes, more: bool = True) -> None:
        await self._say({"type": "http.response.body", "body": data, "more_body": more})

    async def _say(self, message: dict[str, Any]) -> None:
        if self._commenting is not None:
            await self._commenting.wait()
        self._sending = True
        try:
            await self._send(message)
        finally:
            self._sending, self._sent_s = False, trio.current_time()

    async def keep_alive(self, every_s: float) -> None:
        """A comment whenever nothing was sent for `every_s`, until cancelled; one that was begun is sent whole."""
        while True:
            now_s = trio.current_time()
            quiet = self.open and not self._sending
            await trio.sleep_until(self._sent_s + every_s if quiet else now_s + every_s)
            if self.open and not self._sending and self._sent_s + every_s <= trio.current_time():
                await self._comment()

    async def _comment(self) -> None:
        self._commenting = over = trio.Event()
        try:
            with trio.CancelScope(shield=True):
                await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        finally:
            self._commenting, self._sent_s = None, trio.current_time()
            over.set()

    async def _event(self, document: bytes) -> None:
        await self._body(b"data: " + document + b"\n\n")

    async def started(self) -> None:
        """The status line, and for chats each choice's role."""
        self.open = True
        await self._say({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        if self._options.endpoint == CHAT:
            counts = self._usage()
            events = [self._renderer.role_chunk(choice, counts) for choice in self._generation.choices]
            await self._body(b"".join([b"data: " + event + b"\n\n" for event in events]))

    async def text(self, choice: Choice, text: str) -> None:
        """One chunk."""
        await self._event(self._renderer.chunk(choice, text, self._usage()))

    async def ended(self, choice: Choice, text: str) -> None:
        """The choice's last chunk, with its finish reason."""
        await self._event(self._renderer.chunk(choice, text, self._usage()))

    async def done(self) -> None:
        """All choices ended well."""
        data = DONE
        if self._options.include_usage:
            data = b"data: " + self._renderer.usage_chunk(usage(self._generation)) + b"\n\n" + DONE
        await self._body(data)
        await self._body(b"", more=False)

    async def fail(self, error: ApiError) -> None:
        """The request ended without success after the stream had begun."""
        await self._body(b"event: error\ndata: " + error.body() + b"\n\n")
        await self._body(b"", more=False)


class WholeSink:
    """Collects a request's output for an answer in one piece."""

    def __init__(self, choices: int) -> None:
        self._parts: list[list[str]] = [[] for _ in range(choices)]

    async def started(self) -> None:
        """Nothing is sent before the end."""

    async def text(self, choice: Choice, text: str) -> None:
        """More of a choice; log probabilities and ids stay in it."""
        self._parts[choice.index].append(text)

    async def ended(self, choice: Choice, text: str) -> None:
        """The rest of a choice."""
        self._parts[choice.index].append(text)

    def texts(self) -> list[str]:
        """Each choice's text."""
        return ["".join(parts) for parts in self._parts]
