"""Pace: how long the ranks of a recorded run took for a forward, fitted to the times in its own reports.

Owns the samples and the fit. Must never read a clock. A forward takes from the report before its own to its own; where
none was in flight it starts `start_ns` behind its tick: the way to the ranks and back. Those are left out of the fit
(unless most are such, as without overlap), and fewer than `IDLE_LEAST` of them say nothing. An epoch's first forward
warms ranks up, and takes `warm_ns` more. What no forward explains (a paused machine, a debugger) is left out and
counted. Memory is bounded: of very many forwards every second, fourth, ... is kept.

    forward = fixed + prompt tokens * prompt_token + decoding rows * decoding_row + 1,000 positions read * context

How well it fits is said twice: by single forwards (`error`), and by stretches of `STRETCH` in a row (`stretch`), which
is what waiting hangs on: a late report makes one forward long and the next one short, a busy machine makes stretches
long.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.columns import i32
from ipc.messages import EXPLICIT, Forward

KEPT_MAX = 200_000
OUTLIER_SIGMAS = 5.0
PAUSE_TIMES = 20.0  # a forward that took so many times what is predicted was none
SIGMA_OF_MAD = 1.4826
ROUNDS = 6  # of the fit, each with the last one's weights
LEAST_SHARE = 0.2  # of the median forward: what is shorter counts no more for that
LEAST_TIMES = 0.05  # what counts as noise at least, of the median forward
FEATURES = 4
WARM_LEAST = 0.1  # of the fixed part of a forward: what a first one took longer is not chance
IDLE_LEAST = 8  # forwards that found the ranks idle, before anything is made of them
SOON_PERCENT = 25.0  # single forwards are off to both sides
STRETCH = 32  # forwards
SLOW_TIMES = 1.5  # a stretch that took so many times what is predicted was slow

Floats = NDArray[np.float64]
NOTHING: Floats = np.zeros(0)


class Work(NamedTuple):
    """What a forward computes: tokens of prompts, rows that decode, and thousands of positions that they read."""

    prompt_tokens: float
    decoding_rows: float
    context_k: float


def work_of(forward: Forward) -> Work:
    """The work of one step's forward."""
    explicit = (np.frombuffer(forward.flags, np.uint8) & EXPLICIT) != 0
    counts, starts = i32(forward.counts), i32(forward.starts)
    return Work(
        int(counts[explicit].sum()),
        int(np.count_nonzero(~explicit)),
        float((starts + counts).sum(dtype=np.int64)) / 1e3,
    )


class Pace(NamedTuple):
    """Nanoseconds. `turn_ns` is from what lets a step be formed to its tick, `start_ns` from a tick to a forward that
    finds the ranks idle, `warm_ns` what the first one of an epoch takes longer; `error` the mean deviation of the
    fitted forwards, as a part of their mean, `stretch` that of stretches; `slow_ns` of `fitted_ns` were spent in slow
    stretches, which took `slow_times` what is predicted; `pauses` how many were left out, which took `paused_ns`;
    `off_ns` by how much each fitted forward, in their order, took longer than predicted, and `at_ns` when its tick was,
    behind the first."""

    fixed_ns: float
    prompt_token_ns: float
    decoding_row_ns: float
    context_ns: float
    start_ns: int = 0
    turn_ns: int = 0
    forwards: int = 0
    error: float = 0.0
    pauses: int = 0
    paused_ns: int = 0
    warm_ns: int = 0
    stretch: float = 0.0
    fitted_ns: int = 0
    slow_ns: int = 0
    slow_times: float = 0.0
    off_ns: Floats = NOTHING
    at_ns: Floats = NOTHING

    def forward_ns(self, work: Work) -> int:
        """What one forward takes."""
        return round(
            self.fixed_ns
            + work.prompt_tokens * self.prompt_token_ns
            + work.decoding_rows * self.decoding_row_ns
            + work.context_k * self.context_ns
        )


class Samples:
    """Forwards with their times, taken as a journal is read."""

    def __init__(self) -> None:
        self._rows = array("d")  # prompt tokens, decoding rows, context, tick; behind that, report before and report
        self._turns = array("d")
        self._first_ns = -1  # the first tick
        self._firsts: list[tuple[Work, int]] = []
        self._every = 1
        self._seen = 0
        self.forwards = 0

    def add(self, work: Work, tick_ns: int, before_ns: int, reported_ns: int) -> None:
        """A forward of the tick at `tick_ns`; the report before it came at `before_ns`."""
        self.forwards += 1
        if self._skips():
            return
        # Times relative to others, so that a float holds them.
        self._first_ns = tick_ns if self._first_ns < 0 else self._first_ns
        at_ns = float(tick_ns - self._first_ns)
        self._rows.extend((*work, at_ns, float(before_ns - tick_ns), float(reported_ns - tick_ns)))
        if len(self._rows) > KEPT_MAX * 6:
            table = np.frombuffer(self._rows).reshape(-1, 6)[::2].copy()
            self._rows = array("d", table.ravel().tolist())
            self._every *= 2

    def first(self, work: Work, took_ns: int) -> None:
        """An epoch's first forward, which took so long from its tick to its report."""
        self.forwards += 1
        self._firsts.append((work, took_ns))

    def turned(self, took_ns: int) -> None:
        """A tick came so long after it could."""
        if len(self._turns) < KEPT_MAX:
            self._turns.append(float(took_ns))

    def fit(self) -> Pace:
        """The pace of all forwards; ValueError where there is none."""
        if not self._rows:
            raise ValueError("no forward was reported but the first of an epoch, which warms ranks up")
        table = np.frombuffer(self._rows).reshape(-1, 6)
        features = np.column_stack([np.ones(len(table)), table[:, :3]])
        ticks, before, reported = table[:, 3], table[:, 4], table[:, 5]
        idle = before <= 0
        alone = bool(np.count_nonzero(idle) * 2 > len(table))
        fitted = np.ones(len(table), bool) if alone else ~idle
        took = reported - np.maximum(before, 0)
        weights = _robust(features[fitted], took[fitted])
        start, behind = 0.0, reported - features @ weights
        if not alone and np.count_nonzero(idle) >= IDLE_LEAST:
            # No forward starts sooner than that behind its tick, also none that waited for another one.
            start = max(0.0, float(min(np.median(behind[idle]), np.percentile(behind[fitted], SOON_PERCENT))))
        took, predicted = took[fitted], (features @ weights)[fitted]
        paused = took > PAUSE_TIMES * np.maximum(predicted, np.median(took))
        # Means count: what is slow now and then is slow in the prediction too, a little each time.
        scale = took[~paused].sum() / max(predicted[~paused].sum(), 1.0)
        weights, predicted = weights * scale, predicted * scale
        off = np.abs(took - predicted)[~paused].mean() / max(took[~paused].mean(), 1.0)
        stretch, slow_ns, slow_times = _stretches(took[~paused], predicted[~paused])
        turn = int(np.median(np.frombuffer(self._turns))) if self._turns else 0
        fixed, prompt, decoding, context = (float(weight) for weight in weights)
        later = [took_ns - start - float(weights @ (1, *work)) for work, took_ns in self._firsts]
        warm = float(np.mean(later)) if later else 0.0
        return Pace(
            fixed_ns=fixed,
            prompt_token_ns=prompt,
            decoding_row_ns=decoding,
            context_ns=context,
            start_ns=round(start),
            turn_ns=max(turn, 0),
            forwards=self.forwards,
            error=float(off),
            warm_ns=round(warm) if warm > WARM_LEAST * fixed else 0,
            pauses=int(np.count_nonzero(paused)) * self._every,
            paused_ns=int(took[paused].sum()) * self._every,
            stretch=stretch,
            fitted_ns=int(took[~paused].sum()) * self._every,
            slow_ns=int(slow_ns) * self._every,
            slow_times=slow_times,
            off_ns=(took - predicted)[~paused],
            at_ns=ticks[fitted][~paused],
        )

    def work(self) -> Work:
        """The mean work of a forward; ValueError where there is none."""
        if not self._rows:
            raise ValueError("no forward was reported")
        prompt, rows, context = np.frombuffer(self._rows).reshape(-1, 6)[:, :3].mean(axis=0)
        return Work(float(prompt), float(rows), float(context))

    def _skips(self) -> bool:
        self._seen += 1
        return self._seen % self._every != 0


def _stretches(took: Floats, predicted: Floats) -> tuple[float, float, float]:
    """How far stretches are off on the mean, as a part of theirs; ns of slow ones, and how many times too slow."""
    count = len(took) // STRETCH
    if not count:
        return 0.0, 0.0, 0.0
    sums, expected = (column[: count * STRETCH].reshape(count, STRETCH).sum(axis=1) for column in (took, predicted))
    slow = sums > SLOW_TIMES * expected
    times = float(sums[slow].sum() / max(expected[slow].sum(), 1.0)) if slow.any() else 0.0
    return float(np.abs(sums - expected).mean() / max(sums.mean(), 1.0)), float(sums[slow].sum()), times


def _robust(features: Floats, took: Floats) -> Floats:
    """Weights that are not negative. What is far off from all the others is left out, and long forwards, which are off
    by more, count less."""
    sound = np.ones(len(took), bool)
    middle_ns = max(float(np.median(took)), 1.0)
    least = LEAST_SHARE * middle_ns
    weights, predicted = np.zeros(FEATURES), np.full(len(took), middle_ns)
    for _ in range(ROUNDS):
        trust = 1 / np.sqrt(np.maximum(predicted, least))
        weights = _least_squares((features * trust[:, None])[sound], (took * trust)[sound])
        predicted = features @ weights
        off = (took - predicted) * trust
        middle = np.median(off[sound])
        sigma = max(
            SIGMA_OF_MAD * float(np.median(np.abs(off[sound] - middle))), LEAST_TIMES * float(np.median(took * trust))
        )
        kept = np.abs(off - middle) <= OUTLIER_SIGMAS * sigma
        if not kept.any():
            break
        sound = kept
    return weights


def _least_squares(features: Floats, took: Floats) -> Floats:
    """Least squares without negative weights: of what comes out negative, the most negative is left out and 0."""
    chosen = [at for at in range(FEATURES) if np.any(features[:, at])]
    weights = np.zeros(FEATURES)
    while chosen:
        scale = np.abs(features[:, chosen]).max(axis=0)
        found = np.linalg.lstsq(features[:, chosen] / scale, took, rcond=None)[0] / scale
        if (found >= 0).all():
            weights[chosen] = np.abs(found)  # no -0.0
            break
        del chosen[int(np.argmin(found * scale))]
    return weights
