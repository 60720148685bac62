"""A double of `ipc.client.DaemonClient`: scripted events, and a record of everything the front end asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import trio

from allocator.columns import i64, pack_i32, pack_i64
from daemon.frontend.app import build_app
from daemon.frontend.chat_template import ChatTemplate
from daemon.frontend.service import Service
from ipc.client_stream import Tokens
from ipc.errors import DaemonLost
from ipc.messages import Accepted, Answer, Finished, Generate, Logprobs, ModelFacts, Refused, Welcome
from tests.frontend.tokenizers_made import EOS, TEMPLATE, byte_level

MAX_MODEL_LEN = 200
VOCAB = 500
MODEL = "tiny"

Event = Accepted | Refused | Tokens | Finished
Script = Callable[["FakeStream"], AsyncIterator[Event]]


def accepted(message: Generate) -> Accepted:
    """The acceptance of a request."""
    return Accepted(message.id, 1, message.n, message.max_tokens or 100, 7)


def finished(
    message: Generate,
    reason: str = "stop",
    output: int = 0,
    choice: int = 0,
    detail: str = "",
    hit: tuple[int, int, str] = (0, 0, "full"),
) -> Finished:
    """The end of a choice; `hit` is cached tokens, matched tokens and the cut."""
    return Finished(message.id, choice, 1 + choice, reason, detail, len(message.prompt) // 8, output, *hit)


def refused(message: Generate, code: str, text: str = "", **numbers: Any) -> Refused:
    """A refusal."""
    return Refused(message.id, code, text, **numbers)


def columns(k: int, *positions: tuple[float, list[tuple[int, float]]]) -> Logprobs:
    """Logprob columns: per position the chosen value and `k` alternatives."""
    import numpy as np

    tops = [pair for _, top in positions for pair in top]
    return Logprobs(
        k,
        np.asarray([chosen for chosen, _ in positions], "<f4").tobytes(),
        pack_i32([1] * len(positions)),
        pack_i64([token for token, _ in tops]),
        np.asarray([value for _, value in tops], "<f4").tobytes(),
    )


@dataclass
class FakeStream:
    """One Generate as the daemon sees it."""

    message: Generate
    finish_asked: list[tuple[int, int]] = field(default_factory=list)
    told: trio.Event = field(default_factory=trio.Event)  # finish_at or abort was called
    aborts: int = 0
    ended: bool = False
    events: Any = None

    @property
    def prompt(self) -> list[int]:
        """The prompt's ids."""
        return i64(self.message.prompt).tolist()

    def finish_at(self, choice: int, output_tokens: int) -> None:
        """As the client's."""
        self.finish_asked.append((choice, output_tokens))
        self.told.set()

    def abort(self) -> None:
        """As the client's."""
        self.aborts += 1
        self.told.set()

    def __aiter__(self) -> Any:
        return self.events


class FakeDaemon:
    """Runs `script` for every request; `streams` holds them all in order."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.connected = True
        self.waits = True
        self.lost_reason = ""
        self.stats = {"connects": 2, "resumed": 5}
        facts = ModelFacts(MODEL, "llama", VOCAB, MAX_MODEL_LEN, "float32", [EOS])
        self.welcome: Welcome | None = Welcome(1, facts, {}, "life")
        self.streams: list[FakeStream] = []
        self.answers: dict[str, Answer | BaseException] = {}

    def stop_waiting(self) -> None:
        """As the client's."""
        self.waits = False

    @asynccontextmanager
    async def generate(self, message: Generate) -> AsyncIterator[FakeStream]:
        """As the client's: leaving before the end aborts."""
        if not self.connected:
            raise DaemonLost("not connected")
        stream = FakeStream(message)
        self.streams.append(stream)
        async with aclosing(self.script(stream)) as events:
            stream.events = events
            try:
                yield stream
                stream.ended = True
            finally:
                if not stream.ended:
                    stream.abort()

    async def ask(self, what: str, options: dict[str, int] | None = None, timeout_s: float = 5.0) -> Answer:
        """As the client's."""
        answer = self.answers.get(what, Answer(1, True, '{"live": true, "ready": true}' if what == "health" else ""))
        if isinstance(answer, BaseException):
            raise answer
        return answer


def says(text: str, reason: str = "stop", per_event: int = 1) -> Script:
    """A script: every choice says `text` in events of `per_event` tokens, then ends; stop strings are obeyed."""

    async def script(stream: FakeStream) -> AsyncIterator[Event]:
        message = stream.message
        yield accepted(message)
        ids = byte_level().encode(text, False)[: message.max_tokens]
        if reason == "stop" and len(ids) < (message.max_tokens or 1 << 30):
            ids = [*ids, EOS]
        for choice in range(message.n):
            sent = 0
            for start in range(0, len(ids), per_event):
                if any(asked == choice for asked, _ in stream.finish_asked):
                    break
                part = ids[start : start + per_event]
                sent += len(part)
                yield Tokens(choice, part)
                await trio.lowlevel.checkpoint()
            yield finished(message, reason, sent, choice)

    return script


def make_service(script: Script, **options: Any) -> tuple[Service, FakeDaemon]:
    """A service over a double and the tiny tokenizer."""
    tokenizer, daemon = byte_level(), FakeDaemon(script)
    return Service(daemon, tokenizer, ChatTemplate(TEMPLATE, tokenizer), **options), daemon


def http_client(service: Service, **options: Any) -> httpx.AsyncClient:
    """An HTTP client that calls the application in this process."""
    transport = httpx.ASGITransport(app=build_app(service), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://front", **options)


def events_of(body: str) -> list[str]:
    """The `data` of every server-sent event; named events as `NAME: DATA`. Comments are none."""
    found = []
    for block in body.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if lines:
            found.append((lines["event"] + ": " if "event" in lines else "") + lines["data"])
    return found
