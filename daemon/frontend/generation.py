"""Generation: one HTTP request's choices, from the messages to the daemon until each has its end.

Owns the streams of a request and the order of its events. Must never know HTTP. Invariants: nothing is emitted before
every prompt was accepted; leaving early, by any road, aborts what is open; a request ends once, well or with one error.
"""

from __future__ import annotations

from typing import Any, Protocol

import trio

from daemon.frontend.choice import Choice, Hit
from daemon.frontend.errors import SUCCESSES, ApiError, end_error, lost_error, refusal_error
from daemon.frontend.prepare import Prepared
from daemon.frontend.service import Service
from ipc.client_stream import Tokens
from ipc.errors import DaemonLost
from ipc.messages import Accepted, Finished, Refused


class Sink(Protocol):
    """Where a request's output goes; calls come one at a time."""

    async def started(self) -> None:
        """Every prompt was accepted."""

    async def text(self, choice: Choice, text: str) -> None:
        """More of a choice; its log probabilities and ids are taken from it. `text` may be empty."""

    async def ended(self, choice: Choice, text: str) -> None:
        """The choice ended well; `text` is the rest of it."""


class Generation:
    """Runs a prepared request; `run` returns when all choices ended well, or raises the ApiError that ended it."""

    def __init__(self, service: Service, prepared: Prepared, request_id: str, arrived_s: float | None = None) -> None:
        pieces, options = service.tokenizer.pieces, prepared.options
        self._service = service
        self._prepared = prepared
        self._request_id = request_id
        self._lock = trio.Lock()  # one call of the sink at a time
        self._all_accepted = trio.Event()
        self._to_accept = len(prepared.prompts)
        self._error: ApiError | None = None
        self._streams: list[Any] = []
        self._sink: Sink
        self.choices = [
            Choice(number * options.n + k, prompt, prepared, pieces)
            for number, prompt in enumerate(prepared.prompts)
            for k in range(options.n)
        ]
        self.clocks = [service.metrics.clock(arrived_s) for _ in self.choices]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(map(len, self._prepared.prompts))

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token of any choice."""
        return min((clock.first_token_s for clock in self.clocks if clock.first_token_s is not None), default=None)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(choice.output_tokens for choice in self.choices)

    @property
    def hits(self) -> list[Hit] | None:
        """What the prefix cache had of each prompt; None until the first choice of every prompt has ended.

        The first choice speaks for its prompt: the others find what it computed, which is no reuse to account for.
        """
        hits = [choice.hit for choice in self.choices[:: self._prepared.options.n]]
        known = [hit for hit in hits if hit is not None]
        return known if len(known) == len(hits) else None

    async def run(self, sink: Sink) -> None:
        """Send every prompt and follow it to its end; output goes to `sink`."""
        self._sink = sink
        async with trio.open_nursery() as nursery:
            for number in range(len(self._prepared.prompts)):
                nursery.start_soon(self._follow, number, nursery.cancel_scope)
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Tell the daemon to end what is still open here."""
        for stream in self._streams:
            stream.abort()

    async def _follow(self, number: int, scope: trio.CancelScope) -> None:
        """One prompt; the first error of any prompt ends them all."""
        try:
            await self._events(number)
        except ApiError as error:
            self._error = self._error or error
            scope.cancel()
        except DaemonLost as error:
            self._error = self._error or lost_error(error.reason)
            scope.cancel()

    async def _events(self, number: int) -> None:
        n = self._prepared.options.n
        choices = self.choices[number * n : number * n + n]
        message = self._prepared.generate(number, f"{self._request_id}-{number}")
        async with self._service.daemon.generate(message) as stream:
            self._streams.append(stream)
            try:
                async for event in stream:
                    await self._event(stream, choices, event)
            finally:
                self._streams.remove(stream)

    async def _event(self, stream: Any, choices: list[Choice], event: Any) -> None:
        if isinstance(event, Tokens):
            await self._tokens(stream, choices[event.choice], event)
        elif isinstance(event, Finished):
            await self._finished(choices[event.choice], event)
        elif isinstance(event, Accepted):
            await self._accepted(choices)
        else:
            assert isinstance(event, Refused)
            raise refusal_error(event, self._prepared.options.max_tokens_field)

    async def _accepted(self, choices: list[Choice]) -> None:
        self._to_accept -= 1
        if self._to_accept == 0:
            await self._sink.started()
            self._all_accepted.set()
        await self._all_accepted.wait()
        if self._prepared.options.echo:
            for choice in choices:
                async with self._lock:
                    await self._sink.text(choice, choice.echo())

    async def _tokens(self, stream: Any, choice: Choice, event: Tokens) -> None:
        if choice.stopped:
            return
        self.clocks[choice.index].tokens(len(event.tokens))
        if event.prompt_logprobs:
            choice.add_prompt_logprobs(event.prompt_logprobs)
        text = choice.push(event.tokens, event.logprobs)
        if choice.stopped:
            stream.finish_at(self._number_in_prompt(choice), choice.output_tokens)
        if text or choice.logprobs or choice.new_ids:
            async with self._lock:
                await self._sink.text(choice, text)

    def _number_in_prompt(self, choice: Choice) -> int:
        return choice.index % self._prepared.options.n

    async def _finished(self, choice: Choice, event: Finished) -> None:
        if event.reason not in SUCCESSES and not choice.stopped:
            raise end_error(event)
        rest = choice.end(event)
        self.clocks[choice.index].ended()
        async with self._lock:
            await self._sink.ended(choice, rest)
