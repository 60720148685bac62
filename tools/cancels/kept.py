"""Kept streams: requests that go on beside the cancels, each read by the client that front ends use.

Owns their reading and when each of their tokens came. Must never cancel one: they end as at a stop string, wherever
they are when nothing more is to be measured. Times are seconds of the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import trio

from allocator.columns import i64
from ipc.client import DaemonClient
from ipc.client_stream import RequestStream, Tokens
from ipc.errors import DaemonLost
from ipc.messages import Finished, Generate, Refused


class Kept:
    """One stream; `problem` is empty while nothing is wrong with it."""

    def __init__(self, ask: Generate) -> None:
        self.ask = ask
        self.tokens: list[int] = []
        self.arrivals_s: list[float] = []  # one per delivery
        self.decoding, self.over = trio.Event(), trio.Event()
        self.end = ""
        self.problem = ""
        self._stream: RequestStream | None = None

    async def read(self, client: DaemonClient) -> None:
        """Follow it to its end."""
        try:
            async with client.generate(self.ask) as self._stream:
                async for event in self._stream:
                    if isinstance(event, Tokens):
                        self.arrivals_s.append(time.monotonic())
                        self.tokens += event.tokens
                        self.decoding.set()
                    elif isinstance(event, Finished):
                        self.end = event.reason
                        del self.tokens[event.output_tokens :]  # what came behind a stop string is not output
                    elif isinstance(event, Refused):
                        self.problem = f"{self.ask.id} was refused ({event.code}): {event.message}"
        except DaemonLost as error:
            self.problem = f"{self.ask.id} lost the daemon: {error}"
        self.decoding.set()
        self.over.set()

    def finish(self) -> None:
        """Let it end where it is."""
        assert self._stream is not None, "only what is read can end"
        self._stream.finish_at(0, len(self.tokens))


def problems(kept: Sequence[Kept], reason: str) -> list[str]:
    """Streams that did not end with this reason, one sentence each."""
    found = [one.problem for one in kept if one.problem]
    wrong = [one for one in kept if not one.problem and one.end != reason]
    return found + [f"{one.ask.id} ended with {one.end or 'nothing'} behind {len(one.tokens)} tokens" for one in wrong]


def differences(kept: Sequence[Kept], again: Sequence[Kept]) -> list[str]:
    """Where outputs are not what they are without cancels, one sentence for each stream."""
    found = []
    for one, other in zip(kept, again, strict=True):
        if one.tokens != other.tokens:
            pairs = zip(one.tokens, other.tokens, strict=False)
            at = next((place for place, (left, right) in enumerate(pairs) if left != right), -1)
            where = f"at token {at}" if at >= 0 else f"in length: {len(one.tokens)} and {len(other.tokens)} tokens"
            prompt = len(i64(one.ask.prompt))
            found.append(f"{one.ask.id} ({prompt} prompt tokens) differs from itself without cancels {where}")
    return found
