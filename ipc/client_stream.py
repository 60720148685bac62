"""Client streams: what a front end reads of one request, and what it remembers to take the request up again.

Owns the events of one request that were not read yet, and all output of it that ever came. Must never drop an event:
tokens of a choice that nobody has read yet coalesce into one, so the buffer holds at most two events per choice and the
tokens the request may have at all. Invariants: the first event is Accepted or Refused; for each choice tokens come in
order, each position once, and before its Finished, whatever connections and daemons come and go meanwhile; after the
end, or after leaving, nothing is delivered any more.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import outcome
import trio

from allocator.columns import i64
from ipc.client_logprobs import each_position, from_position
from ipc.errors import DaemonLost
from ipc.messages import Accepted, Continued, Finished, Generate, Logprobs, Refused, RequestLogprobs


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
    """One choice of a request: `pending` is its token event that nobody has read yet, `held` all output that came.

    While `resuming`, the daemon was asked (or will be) where the choice stands: only its Continued counts.
    """

    __slots__ = ("ended", "held", "index", "pending", "prompt_next", "request", "resuming", "stop_at", "stream")

    def __init__(self, stream: RequestStream, index: int, held: Sequence[int] = ()) -> None:
        self.stream = stream
        self.index = index
        self.request = 0  # the daemon's number
        self.pending: Tokens | None = None
        self.held = array("q", held)
        self.prompt_next = 1  # first prompt position whose log probability has not come
        self.resuming = False
        self.stop_at = -1  # output tokens at which the reader found its stop string
        self.ended = False

    def event(self) -> Tokens:
        """The unread token event, a new one if need be."""
        pending = self.pending
        if pending is None:
            pending = self.pending = Tokens(self.index)
            self.stream.put(pending)
        return pending

    def prompt_logprobs(self, position: int, values: Logprobs) -> None:
        """Log probabilities of prompt positions from `position` on; what came before is dropped."""
        fresh = from_position(values, self.prompt_next - position)
        if fresh is not None:
            position = max(position, self.prompt_next)
            self.event().prompt_logprobs.append((position, fresh))
            self.prompt_next = position + len(fresh.chosen) // 4

    def take_up(self, continued: Continued) -> str:
        """Go on as the daemon says, each position once; a text when its output and ours are not the same."""
        held, first = self.held, continued.output_tokens
        tokens = i64(continued.tokens).tolist()
        known = len(held) - first  # of `tokens`, how many are here
        if known < 0:
            return f"it goes on behind {first} tokens of choice {self.index}, {len(held)} are here"
        if known > len(tokens) or held[first:].tolist() != tokens[:known]:
            return f"its output of choice {self.index} is not the {len(held)} tokens that are here"
        self.resuming = False
        self.stream.rounds = 0
        self.request = continued.request
        if known < len(tokens):
            self.event().tokens.extend(tokens[known:])
            held.extend(tokens[known:])
        self._logprobs(continued.logprobs, known)
        return ""

    def _logprobs(self, entries: list[RequestLogprobs], known: int) -> None:
        output = [entry.values for entry in entries if entry.prompt_position < 0]
        for entry in entries:
            if entry.prompt_position >= 0:
                self.prompt_logprobs(entry.prompt_position, entry.values)
        fresh = [values for entry in output for values in each_position(entry)][known:]
        if fresh:
            self.event().logprobs.extend(fresh)


class RequestStream:
    """The events of one request: an async context manager and, inside it, an async iterator. One reader."""

    def __init__(self, owner: Owner, generate: Generate, held: Sequence[Sequence[int]] = ()) -> None:
        self.generate = generate
        self.id = generate.id
        self.accepted: Accepted | None = None
        self.choices: list[Choice] = []
        self.left = generate.n  # choices that have not ended
        self.closed = False  # the reader has left
        self.aborted = False  # the reader asked for the end
        self.sent_again = bool(held)  # on the next acceptance every choice is taken up
        self.rounds = 0  # how often it was taken up since the daemon spoke of it
        self.holes = 0  # how often its end came before all of its tokens
        self._held = held
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
        """The next event. DaemonLost when the daemon is gone for good and everything before that was read."""
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

    @property
    def lost(self) -> bool:
        """The reader was told that the daemon is gone."""
        return self._lost is not None

    def put(self, event: Event) -> None:
        """Append an event and wake the reader. After the reader left, events go nowhere."""
        self.rounds = 0
        if self.closed:
            return
        self._events.append(event)
        self._wake()

    def accept(self, accepted: Accepted) -> None:
        """The request is taken. A repeated acceptance is no event, but its numbers count from now on."""
        first = self.accepted is None
        if first:
            held = [*self._held, *([()] * accepted.n)]
            self.choices = [Choice(self, index, held[index]) for index in range(accepted.n)]
            self.left = accepted.n
        self.accepted = accepted
        for choice in self.choices:
            choice.request = accepted.first_request + choice.index
        if first:
            self.put(accepted)

    def refuse(self, refused: Refused) -> None:
        """The request is not taken: the one event, and the end."""
        self.left = 0
        self.put(refused)

    def finish(self, finished: Finished) -> None:
        """One choice has ended."""
        self.choices[finished.choice].ended = True
        self.left -= 1
        self.put(finished)

    def suspend(self) -> None:
        """The connection is gone: what comes next of a choice must be its Continued."""
        for choice in self.choices:
            choice.resuming = not choice.ended

    def lose(self, reason: str) -> None:
        """The daemon is gone for good."""
        self._lost = reason
        self._wake()

    def _wake(self) -> None:
        reader = self._reader
        if reader is not None:
            self._reader = None
            trio.lowlevel.reschedule(reader, outcome.Value(None))
