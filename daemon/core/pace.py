"""Pace: how fast the fastest of the recent forwards were, from the times in the inputs.

Owns the two measures. Must never read a clock: a forward takes from the tick that launched it, or from the report
before if that came later, to its own report. A report that waited for a daemon that paused makes its forward long and
the one behind it short: of two such in a row the shorter one counts as their mean. Only forwards with a full chunk say
what a prompt token takes; with fewer it is the step that takes the time. Invariant: a measure is never above a recent
observation; it rises by a part of itself with every step, so that a time no longer reached is forgotten.
"""

from __future__ import annotations

SAMPLES_MIN = 32  # forwards measured before anything is said
DRIFT_SHIFT = 10  # a measure rises by a 1024th of itself with every forward that does not lower it
NONE_YET = 2**62


class Pace:
    """The measures of one epoch: the fastest forward, and the fastest token of those with `chunk_tokens` of prompts."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self.samples = 0
        self.step_ns = NONE_YET
        self.token_ps = NONE_YET
        self._reported_ns = 0
        self._took_ns = 0

    def reported(self, since_ns: int, prompt_tokens: int, now_ns: int) -> None:
        """The result of the oldest forward in flight came in: launched at `since_ns`, with so many prompt tokens."""
        behind = since_ns < self._reported_ns
        if behind:
            since_ns = self._reported_ns
        self._reported_ns = now_ns
        took_ns = now_ns - since_ns if now_ns > since_ns else 0
        before_ns, self._took_ns = self._took_ns, took_ns
        if behind and took_ns < before_ns:
            took_ns = (took_ns + before_ns) >> 1
        self.samples += 1
        risen_ns = self.step_ns + (self.step_ns >> DRIFT_SHIFT) + 1
        self.step_ns = took_ns if took_ns < risen_ns else risen_ns
        if prompt_tokens >= self._chunk_tokens:
            risen_ps = self.token_ps + (self.token_ps >> DRIFT_SHIFT) + 1
            self.token_ps = min(took_ns * 1000 // prompt_tokens, risen_ps)

    def least_ns(self, prompt_tokens: int, chunk_tokens: int, output_tokens: int) -> int | None:
        """The least time from the first forward to the last of so many output tokens; None: too little was measured.

        At most `chunk_tokens` of the prompt are computed in one forward, the last of which gives the first output
        token.
        """
        if self.samples < SAMPLES_MIN:
            return None
        assert prompt_tokens >= 0 < chunk_tokens, "what is left is computed in chunks"
        chunks = -(-prompt_tokens // chunk_tokens)
        by_token = prompt_tokens * self.token_ps // 1000 if self.token_ps < NONE_YET else 0
        return max(chunks * self.step_ns, by_token) + max(0, output_tokens - 1) * self.step_ns

    def content(self) -> list[object]:
        """What the state digest covers."""
        return [self.samples, self.step_ns, self.token_ps, self._reported_ns, self._took_ns]
