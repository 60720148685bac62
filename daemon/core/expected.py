"""Expected output: which share of what they may still ask for running requests are expected to take.

Owns one estimate per namespace, in parts per million of the output limit, and the margin that corrects all of them.
Must never be read by anything but the price of an admission. Every request that finishes moves its namespace's estimate
towards the share of its limit that it used. Rows end at different times, so what they may still grow by is never needed
at once: every step with scheduled tokens lowers the margin, a factor on all estimates, down to a fifth of them; a
retraction raises it, up to half as much again. It is one for all, because a retraction says that all rows together grew
more than expected, not which.

A namespace seen first begins with the estimate over everything. Estimates of namespaces without rows are forgotten,
those longest unused first, beyond `NAMESPACES_MAX`. Integers only, so that every machine decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHARE_ONE_PPM = 1_000_000
SHARE_START_PPM = 500_000
SHARE_MIN_PPM = 20_000
MARGIN_MIN_PPM, MARGIN_MAX_PPM = -800_000, 500_000
MARGIN_RAISE_PPM = 100_000  # by each retraction
MARGIN_FALL_PPM = 500  # by each step with tokens
LEARN_DIVISOR = 8  # a finished request moves its estimate by this part of the difference
NAMESPACES_MAX = 4096


@dataclass(slots=True)
class Estimate:
    """One namespace: the share, how many rows it has, and the output tokens that those began with permission for."""

    share_ppm: int
    rows: int = 0
    weight_tokens: int = 0


class Expected:
    """Estimates of one epoch; `full` pins every share to one (`reserve = full`)."""

    def __init__(self, full: bool) -> None:
        self._full = full
        self._overall_ppm = SHARE_START_PPM
        self._margin_ppm = 0
        self._weight = 0  # output tokens that all rows began with permission for
        self._weighted = 0  # the same, each times its namespace's share
        self._estimates: dict[str, Estimate] = {}  # longest unused first

    def share_ppm(self, namespace: str) -> int:
        """The share of its output limit that a request of this namespace is expected to use."""
        estimate = self._estimates.get(namespace)
        return self._with_margin(self._overall_ppm if estimate is None else estimate.share_ppm)

    def mean_ppm(self, without: Sequence[tuple[str, int]] = ()) -> int:
        """The same over all rows, each weighing what it was allowed to produce when it began.

        `without` rows of these namespaces that began with so many output tokens.
        """
        weight = self._weight - sum(tokens for _, tokens in without)
        weighted = self._weighted - sum(tokens * self._estimates[name].share_ppm for name, tokens in without)
        return self._with_margin(-(-weighted // weight) if weight else self._overall_ppm)

    def began(self, namespace: str, output_tokens: int) -> None:
        """A request that may produce so many tokens got a row."""
        assert output_tokens >= 0, "a request may produce what it has not yet"
        estimate = self._used(namespace)
        estimate.rows += 1
        estimate.weight_tokens += output_tokens
        self._weight += output_tokens
        self._weighted += output_tokens * estimate.share_ppm

    def left(self, namespace: str, output_tokens: int) -> None:
        """It gave its row back."""
        estimate = self._estimates[namespace]
        estimate.rows -= 1
        estimate.weight_tokens -= output_tokens
        self._weight -= output_tokens
        self._weighted -= output_tokens * estimate.share_ppm
        assert min(estimate.rows, estimate.weight_tokens, self._weighted) >= 0, "what leaves began"

    def finished(self, namespace: str, used_tokens: int, limit_tokens: int) -> None:
        """A request of this namespace finished with so many output tokens of those it was allowed."""
        if limit_tokens <= 0:
            return
        observed = min(used_tokens * SHARE_ONE_PPM // limit_tokens, SHARE_ONE_PPM)
        estimate = self._used(namespace)
        before = estimate.share_ppm
        estimate.share_ppm = _towards(before, observed)
        self._weighted += estimate.weight_tokens * (estimate.share_ppm - before)
        self._overall_ppm = _towards(self._overall_ppm, observed)

    def tighten(self) -> None:
        """Somebody was retracted for memory."""
        self._margin_ppm = min(MARGIN_MAX_PPM, self._margin_ppm + MARGIN_RAISE_PPM)

    def relax(self) -> None:
        """A step with tokens was scheduled, and nothing is throttled."""
        if self._margin_ppm > MARGIN_MIN_PPM:
            self._margin_ppm -= MARGIN_FALL_PPM

    def content(self) -> list[object]:
        """What the state digest covers."""
        rows = [[name, one.share_ppm, one.rows, one.weight_tokens] for name, one in self._estimates.items()]
        return [self._overall_ppm, self._margin_ppm, self._weight, self._weighted, rows]

    def _with_margin(self, share_ppm: int) -> int:
        if self._full:
            return SHARE_ONE_PPM
        return min(SHARE_ONE_PPM, share_ppm * (SHARE_ONE_PPM + self._margin_ppm) // SHARE_ONE_PPM)

    def _used(self, namespace: str) -> Estimate:
        """The namespace's estimate, as the one used last."""
        estimate = self._estimates.pop(namespace, None)
        if estimate is None:
            estimate = Estimate(self._overall_ppm)
            if len(self._estimates) >= NAMESPACES_MAX:
                idle = next((name for name, one in self._estimates.items() if not one.rows), None)
                if idle is not None:
                    del self._estimates[idle]
        self._estimates[namespace] = estimate
        return estimate


def _towards(share_ppm: int, observed_ppm: int) -> int:
    return max(SHARE_MIN_PPM, share_ppm + (observed_ppm - share_ppm) // LEARN_DIVISOR)
