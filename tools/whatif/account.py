"""Account: what became of the requests of a run, recorded or replayed, counted in one way for all of them.

Owns the figures that are compared. Must never ask the core anything: it sees what was fed and what came out. Invariant:
every request that was accepted is live or counted in `ends`. Memory grows with the requests, three numbers each, and
with what is live, not with steps.

    arrived --- waits --- started --- first token --- retracted --- waits --- started --- ended
            |--- its waiting ---|                              |- and this -|
            |------- time to first token -------|
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from allocator.columns import i32
from daemon.core.inputs import Arrived, Input, RecoveredGroup
from daemon.core.outputs import Decided, Outputs
from daemon.core.reasons import WAITS_AGAIN, Verdict
from ipc.messages import EXPLICIT, Accepted, Finished, Forward, Refused

NS_PER_MS = 1e6
NEAR = 2  # percent of the requests to either side of a percentile
COUNTED = {Verdict.RETRACTED: "retractions", Verdict.PARKED: "parks", Verdict.REQUEUED: "requeues"}


@dataclass(slots=True)
class _Live:
    """One accepted choice that has not ended. `queued_ns` is since when it waits, -1 while it has a row."""

    arrived_ns: int
    queued_ns: int
    waited_ns: int = 0
    started: bool = False


class Figures(dict[str, Any]):
    """The figures of a run by name, plain values; None where nothing was observed."""


class Account:
    """Follows one run, over its lives: `take` everything that is fed to its core with what it led to."""

    def __init__(self) -> None:
        self.live: dict[int, _Live] = {}
        self.refusals: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.received = 0
        self.accepted = 0
        self.now_ns = 0
        self._next = 1  # the next number of a request that was not seen
        self._awaited: set[int] = set()  # those without a first token
        self._waits_ms, self._first_ms, self._ages_ms = array("d"), array("d"), array("d")
        self._busy_ns = 0  # time during which anything was live
        self._busy_since_ns = -1

    def adopt(self, groups: list[RecoveredGroup], now_ns: int) -> None:
        """What a run begins with; it counts as having come now. Choices that have ended are none of it."""
        for group in groups:
            for choice, was in enumerate(group.choices):
                number = group.accepted.first_request + choice
                self._next = max(self._next, number + 1)
                if was.ended is None:
                    self.received += 1
                    self._enter(number, now_ns)
                    if was.tokens:
                        self._awaited.discard(number)

    def take(self, item: Input, out: Outputs) -> None:
        """One input and what the core said."""
        self.now_ns = now_ns = item.now_ns
        if isinstance(item, Arrived):
            for reply in out.replies:
                self._answer(item, reply.message)
        for decision in out.decisions:
            self._decided(decision, now_ns)
        if out.tokens is not None and len(out.tokens.requests):
            self.counts["output_tokens"] += len(out.tokens.requests)
            if self._awaited:
                self._first_tokens(out.tokens.requests.tolist(), now_ns)
        for reply in out.replies:
            if isinstance(reply.message, Finished):
                self._end(reply.message, now_ns)
        if out.step is not None:
            self.counts["steps"] += 1
            if out.step.forward is not None:
                self._forward(out.step.forward)
        if self.live and self._busy_since_ns < 0:
            self._busy_since_ns = now_ns
        elif not self.live and self._busy_since_ns >= 0:
            self._busy_ns += now_ns - self._busy_since_ns
            self._busy_since_ns = -1

    def figures(self) -> Figures:
        """The figures as they stand. What still lives counts with its waiting so far."""
        waits = self._waits_ms + array("d", (self._waited(one) / NS_PER_MS for one in self.live.values()))
        busy_ns = self._busy_ns + (self.now_ns - self._busy_since_ns if self._busy_since_ns >= 0 else 0)
        counts, seconds = self.counts, busy_ns / 1e9
        prompt = counts["started_prompt_tokens"]
        return Figures(
            requests=self.received,
            refused=sum(self.refusals.values()),
            refusals=dict(sorted(self.refusals.items())),
            ends=dict(sorted(self.ends.items())),
            live=len(self.live),
            cached_tokens=counts["cached_tokens"],
            hit_rate=counts["cached_tokens"] / prompt if prompt else None,
            computed_prompt_tokens=counts["computed_prompt_tokens"],
            retractions=counts["retractions"],
            parks=counts["parks"],
            requeues=counts["requeues"],
            evicted_units=counts["evicted_units"],
            waiting_ms=spread(waits),
            first_token_ms=spread(self._first_ms),
            request_ms=spread(self._ages_ms),
            output_tokens=counts["output_tokens"],
            steps=counts["steps"],
            busy_s=seconds,
            output_tokens_per_s=counts["output_tokens"] / seconds if seconds else None,
        )

    # --- inside ---------------------------------------------------------------------------------------------------

    def _answer(self, item: Arrived, message: Any) -> None:
        if isinstance(message, Refused):
            self.refusals[str(message.code)] += 1
            self.received += 1
        elif isinstance(message, Accepted) and message.first_request >= self._next:
            self.received += message.n
            self._next = message.first_request + message.n
            for number in range(message.first_request, self._next):
                self._enter(number, item.now_ns)

    def _enter(self, number: int, now_ns: int) -> None:
        self.accepted += 1
        self.live[number] = _Live(now_ns, now_ns)
        self._awaited.add(number)

    def _decided(self, decision: Decided, now_ns: int) -> None:
        verdict, numbers = decision.verdict, decision.numbers
        if verdict == Verdict.EVICTED:
            self.counts["evicted_units"] += sum(numbers.values())
        elif verdict in COUNTED:
            self.counts[COUNTED[Verdict(verdict)]] += 1
        one = self.live.get(decision.request)
        if one is None:
            return
        if verdict == Verdict.ADMITTED:
            one.waited_ns, one.queued_ns = self._waited(one), -1
            if not one.started:
                one.started = True
                self.counts["cached_tokens"] += numbers.get("cached_tokens", 0)
                self.counts["started_prompt_tokens"] += numbers["tokens"]
        elif verdict in WAITS_AGAIN and one.queued_ns < 0:
            one.queued_ns = now_ns

    def _waited(self, one: _Live) -> int:
        return one.waited_ns + (self.now_ns - one.queued_ns if one.queued_ns >= 0 else 0)

    def _first_tokens(self, numbers: list[int], now_ns: int) -> None:
        for number in numbers:
            if number in self._awaited:
                self._awaited.remove(number)
                self._first_ms.append((now_ns - self.live[number].arrived_ns) / NS_PER_MS)

    def _end(self, message: Finished, now_ns: int) -> None:
        one = self.live.pop(message.request, None)
        if one is None:
            return  # told again to a client that came back
        self.ends[str(message.reason)] += 1
        self._awaited.discard(message.request)
        self._waits_ms.append(self._waited(one) / NS_PER_MS)
        self._ages_ms.append((now_ns - one.arrived_ns) / NS_PER_MS)

    def _forward(self, forward: Forward) -> None:
        explicit = (np.frombuffer(forward.flags, np.uint8) & EXPLICIT) != 0
        self.counts["computed_prompt_tokens"] += int(i32(forward.counts)[explicit].sum())


def together(runs: list[Figures]) -> Figures:
    """The means of several runs of one kind, and in `spread` the least and the most of each number."""
    assert runs, "at least one run"
    if len(runs) == 1:
        return runs[0]
    made = Figures()
    apart: dict[str, Any] = {}
    for name, first in runs[0].items():
        values = [run[name] for run in runs]
        if isinstance(first, dict):
            keys = sorted({key for value in values for key in value})
            columns = {key: [value.get(key, 0) for value in values] for key in keys}
            made[name] = {key: _mean(column) for key, column in columns.items()}
            apart[name] = {key: _range(column) for key, column in columns.items()}
        else:
            made[name], apart[name] = _mean(values), _range(values)
    made["spread"] = apart
    return made


def _mean(values: list[float | None]) -> float | None:
    some = [value for value in values if value is not None]
    return round(sum(some) / len(some), 6) if some else None


def _range(values: list[float | None]) -> list[float] | None:
    some = [value for value in values if value is not None]
    return [min(some), max(some)] if some else None


def spread(values: array[float]) -> dict[str, float | None]:
    """Mean, median and 99th percentile, and what these two were for `NEAR` percent of the values fewer or more; None
    where nothing is."""
    around = {f"p{of}{end}": of + by for of in (50, 99) for end, by in (("", 0), ("_low", -NEAR), ("_high", NEAR))}
    if not len(values):
        return {"mean": None, **dict.fromkeys(around)}
    some = np.frombuffer(values, np.float64)
    found = np.percentile(some, [min(percent, 100) for percent in around.values()])
    values_at = zip(around, found.tolist(), strict=True)
    return {"mean": round(float(some.mean()), 3), **{name: round(value, 3) for name, value in values_at}}
