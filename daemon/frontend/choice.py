"""Choice: one output as it grows: tokens in, text out, until it ends.

Owns what is known of one choice: detokenizer, stop matcher, counts, log probabilities not sent yet. Must never talk to
the daemon or the client. Invariant: after a stop string or a stop id was seen nothing further is shown; `usage` counts
tokens up to the match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from daemon.frontend.detokenizer import Detokenizer
from daemon.frontend.logprobs import TokenLogprob, read_logprobs
from daemon.frontend.pieces import Pieces
from daemon.frontend.prepare import Prepared
from daemon.frontend.stops import StopMatcher
from ipc.messages import Finished, Logprobs


class Hit(NamedTuple):
    """What the prefix cache had of a choice's prompt when it first started; see `ipc.messages.Finished`."""

    cached_tokens: int
    matched_tokens: int
    cut: str


class Choice:
    """Choice `index` of the response: choice `number` of the prompt `prompt`."""

    __slots__ = (
        "_detokenizer",
        "_matcher",
        "_min_tokens",
        "_named_ids",
        "_show_stop",
        "_stop_ids",
        "_wants_ids",
        "_wants_logprobs",
        "finish_reason",
        "hit",
        "index",
        "logprobs",
        "new_ids",
        "output_tokens",
        "prompt",
        "stop_reason",
    )

    def __init__(self, index: int, prompt: Sequence[int], prepared: Prepared, pieces: Pieces) -> None:
        options = prepared.options
        self.index = index
        self.prompt = prompt
        self.output_tokens = 0
        self.hit: Hit | None = None  # told at the end
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.new_ids: list[int] = []  # since the last delta, when the client wants ids
        self.logprobs: list[TokenLogprob] = []  # since the last delta
        self._detokenizer = Detokenizer(pieces, options.skip_special_tokens, at_start=options.echo)
        self._matcher = StopMatcher(options.stop, options.include_stop_str_in_output) if options.stop else None
        self._min_tokens = options.min_tokens
        self._stop_ids = prepared.stop_ids
        self._named_ids = options.stop_token_ids
        self._show_stop = options.include_stop_str_in_output
        self._wants_ids = options.return_token_ids
        self._wants_logprobs = options.logprobs >= 0
        if not options.echo:
            self._detokenizer.prime(prompt)

    @property
    def stopped(self) -> bool:
        """A stop string was found here, so the daemon must be told and later tokens are not shown."""
        return self._matcher is not None and self._matcher.found is not None

    def echo(self) -> str:
        """The prompt's text, as the beginning of the output; its first token has no log probability."""
        if self._wants_logprobs:
            self.logprobs.append(TokenLogprob(self.prompt[0]))
        return "".join([self._detokenizer.push(token) for token in self.prompt])

    def add_prompt_logprobs(self, values: Sequence[tuple[int, Logprobs]]) -> None:
        """Log probabilities of prompt positions from 1 on, in order."""
        for position, columns in values:
            end = position + len(columns.chosen) // 4
            self.logprobs.extend(read_logprobs(self.prompt[position:end], columns))

    def push(self, tokens: Sequence[int], logprobs: Sequence[Logprobs] = ()) -> str:
        """The text that `tokens` add to what the client sees; tokens behind a stop string are dropped."""
        if self.stopped:
            return ""
        texts, first = [], self.output_tokens
        for token in tokens:
            self.output_tokens += 1
            texts.append(self._text(token))
            if self.stopped:
                break
        taken = self.output_tokens - first
        if self._wants_ids:
            self.new_ids.extend(tokens[:taken])
        for token, columns in zip(tokens[:taken], logprobs, strict=False):
            self.logprobs.extend(read_logprobs((token,), columns))
        return "".join(texts)

    def _text(self, token: int) -> str:
        if token in self._stop_ids:
            self.stop_reason = token if token in self._named_ids else None
            if not self._show_stop:
                return ""
        text = self._detokenizer.push(token)
        if self._matcher is None or self.output_tokens <= self._min_tokens:
            return text
        shown = self._matcher.push(text)
        if self._matcher.found is not None:
            self.stop_reason = self._matcher.found
        return shown

    def end(self, finished: Finished) -> str:
        """The choice has ended well: the rest of its text; sets `finish_reason` and the final counts."""
        self.hit = Hit(finished.cached_tokens, finished.matched_tokens, finished.hit_cut)
        if self.stopped:
            self.finish_reason = "stop"
            return ""
        self.finish_reason = finished.reason
        self.output_tokens = finished.output_tokens
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        shown = self._matcher.push(rest) + self._matcher.flush()
        if self._matcher.found is not None:
            self.finish_reason, self.stop_reason = "stop", self._matcher.found
        return shown

    def take_delta(self) -> tuple[list[TokenLogprob], list[int]]:
        """Log probabilities and ids since the last call."""
        taken = self.logprobs, self.new_ids
        self.logprobs, self.new_ids = [], []
        return taken
