"""Client streams: what a front end reads of one request, and the small buffer behind it.

Owns the events of one request that were not read yet. Must never drop one: tokens of a choice that nobody has read yet
coalesce into one event, so the buffer holds at most two events per choice and the tokens the request may have at all.
Invariants: the first event is Accepted or Refused; for each choice tokens come in order and before its Finished; after
the end, or after leaving, nothing is delivered any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import outcome
import trio

from ipc.errors import DaemonLost
from ipc.messages import Accepted, Finished, Generate, Logprobs, Refused


@dataclass(slots=True)
class Tokens:
    """New output tokens of one choice, those of several steps when the reader is slower than the daemon.

    `logprobs` has one entry per token when they were asked for; `prompt_logprobs` pairs a first position with values.
    """

    choice: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)


Event = Accepted | Refused | Tokens | Finished


class Owner(Protocol):
    """The client behind a stream."""

    async def begin(self, stream: RequestStream) -> None:
        """Send the request; DaemonLost when there is no daemon."""

    def leave(self, stream: RequestStream) -> None:
        """The reader is gone: abort what has not ended."""

    def abort(self, stream: RequestStream) -> None:
        """Ask the daemon to end the request."""

    def finish_at(self, stream: RequestStream, choice: int, output_tokens: int) -> None:
        """Tell the daemon where a choice ends."""


class Choice:
    """One choice of a request: `pending` is its token event that nobody has read yet."""

    __slots__ = ("index", "pending", "stream")

    def __init__(self, stream: RequestStream, index: int) -> None:
        self.stream = stream
        self.index = index
        self.pending: Tokens | None = None

    def event(self) -> Tokens:
        """The unread token event, a new one if need be."""
        pending = self.pending
        if pending is None:
            pending = self.pending = Tokens(self.index)
            self.stream.put(pending)
        return pending


class RequestStream:
    """The events of one request: an async context manager and, inside it, an async iterator. One reader."""

    def __init__(self, owner: Owner, generate: Generate) -> None:
        self.generate = generate
        self.id = generate.id
        self.accepted: Accepted | None = None
        self.choices: list[Choice] = []
        self.left = generate.n  # choices that have not ended
        self.closed = False  # the reader has left
        self._owner = owner
        self._events: deque[Event] = deque()
        self._lost: str | None = None
        self._reader: trio.lowlevel.Task | None = None

    # --- the reader's side -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> RequestStream:
        await self._owner.begin(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave: whatever has not ended is aborted, without awaiting anything, so cancellation cannot prevent it."""
        self.closed = True
        self._events.clear()
        self._owner.leave(self)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        """The next event. DaemonLost when the daemon is gone and everything before that was read."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._events:
            if self._lost is not None:
                raise DaemonLost(self._lost)
            if not self.left:
                raise StopAsyncIteration
            await self._sleep()
        event = self._events.popleft()
        if isinstance(event, Tokens):
            self.choices[event.choice].pending = None
        return event

    def abort(self) -> None:
        """Ask for the end of all choices; events go on until their Finished. Harmless after the end."""
        if self.left and self._lost is None:
            self._owner.abort(self)

    def finish_at(self, choice: int, output_tokens: int) -> None:
        """A stop string was found: the choice ends with reason stop after so many output tokens."""
        if self.left and self._lost is None:
            self._owner.finish_at(self, choice, output_tokens)

    async def _sleep(self) -> None:
        assert self._reader is None, "a stream has one reader"
        self._reader = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    # --- the client's side -----------------------------------------------------------------------------------------

    def requests(self) -> range:
        """The daemon's numbers of the choices; empty before acceptance."""
        accepted = self.accepted
        return range(accepted.first_request, accepted.first_request + accepted.n) if accepted is not None else range(0)

    def put(self, event: Event) -> None:
        """Append an event and wake the reader. After the reader left, events go nowhere."""
        if self.closed:
            return
        self._events.append(event)
        self._wake()

    def accept(self, accepted: Accepted) -> None:
        """The request is taken. A repeated acceptance says nothing new."""
        if self.accepted is not None:
            return
        self.accepted = accepted
        self.choices = [Choice(self, index) for index in range(accepted.n)]
        self.left = accepted.n
        self.put(accepted)

    def refuse(self, refused: Refused) -> None:
        """The request is not taken: the one event, and the end."""
        self.left = 0
        self.put(refused)

    def finish(self, finished: Finished) -> None:
        """One choice has ended."""
        self.left -= 1
        self.put(finished)

    def lose(self, reason: str) -> None:
        """The daemon is gone."""
        self._lost = reason
        self._wake()

    def _wake(self) -> None:
        reader = self._reader
        if reader is not None:
            self._reader = None
            trio.lowlevel.reschedule(reader, outcome.Value(None))
