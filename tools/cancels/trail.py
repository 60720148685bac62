"""The trail of cancels in the daemon's journal: what reached the core, what it did, and when tokens were made.

Owns one walk over the records. Must never ask anybody else: what is counted here is held against what clients were
told. Times are nanoseconds of the daemon's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allocator.columns import i32
from daemon.core.inputs import Aborted, Arrived, Reported
from daemon.core.outputs import Decided
from daemon.core.reasons import LOSES_ROW, EndReason, Verdict
from journal.reader import Record
from journal.records import Kind
from tools.cancels.books import named
from tools.cancels.pauses import Span


@dataclass(slots=True)
class Asked:
    """One request as the journal has it; 0 for what did not happen."""

    frontend: str
    id: str
    arrived_ns: int
    number: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    aborts_ns: list[int] = field(default_factory=list)
    ends: list[tuple[int, str]] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)  # of kept ones: when, and by which step


class Trail:
    """All requests of a journal, and the steps."""

    def __init__(self, records: Iterable[Record], kept_by: str) -> None:
        """`kept_by`: the front end whose requests' tokens are noted."""
        self.asked: dict[tuple[str, str], Asked] = {}
        self.reported_ns: list[int] = []  # one per step
        self._kept_by = kept_by
        self._numbers: dict[int, Asked] = {}
        self._tenants: dict[tuple[int, int], Asked] = {}  # by row and generation
        self._newest: Asked | None = None
        takers: dict[Kind, Callable[[Any], None]] = {
            Kind.ARRIVED: self._arrived,
            Kind.ABORTED: self._aborted,
            Kind.DECIDED: self._decided,
            Kind.REPORTED: self._reported,
        }
        for record in records:
            if taker := takers.get(Kind(record.kind)):
                taker(record.decode())

    def crowd(self, span: Span) -> list[Asked]:
        """What others than the keeper asked within a span."""
        return [
            one
            for one in self.asked.values()
            if one.frontend != self._kept_by and span.begin <= one.arrived_ns <= span.end
        ]

    def kept(self, ids: Iterable[str]) -> list[Asked]:
        """Requests of the keeper, by id."""
        return [self.asked[self._kept_by, id_] for id_ in ids if (self._kept_by, id_) in self.asked]

    def steps(self, begin_ns: int, end_ns: int) -> int:
        """Steps whose reports came within a span."""
        first, last = np.searchsorted(self.reported_ns, [begin_ns, end_ns])
        return int(last - first)

    def _arrived(self, item: Arrived) -> None:
        self._newest = Asked(item.frontend, item.generate.id, item.now_ns)
        self.asked.setdefault((item.frontend, item.generate.id), self._newest)

    def _aborted(self, item: Aborted) -> None:
        if one := self.asked.get((item.frontend, item.id)):
            one.aborts_ns.append(item.now_ns)

    def _decided(self, item: Decided) -> None:
        if item.verdict == Verdict.ACCEPTED:
            assert self._newest is not None, "what is accepted has arrived"
            self._newest.number = item.request
            self._numbers[item.request] = self._newest
        one = self._numbers.get(item.request)
        if one is None:
            return
        if item.verdict == Verdict.ADMITTED:
            one.admitted_ns = item.now_ns
            self._tenants[item.numbers["row"], item.numbers["generation"]] = one
        elif item.verdict in LOSES_ROW:
            one.admitted_ns = one.first_token_ns = 0
        elif item.verdict == Verdict.ENDED:
            one.ends.append((item.now_ns, item.reason))

    def _reported(self, item: Reported) -> None:
        self.reported_ns.append(item.now_ns)
        for key in zip(i32(item.rows).tolist(), i32(item.generations).tolist(), strict=True):
            one = self._tenants.get(key)
            if one is None:
                continue
            one.first_token_ns = one.first_token_ns or item.now_ns
            if one.frontend == self._kept_by:
                one.tokens.append((item.now_ns, item.seq))


def states(crowd: Iterable[Asked]) -> dict[str, int]:
    """How many of a crowd were decoding, in the middle of their prompt, and waiting when their cancel came."""
    found = {"decoding": 0, "prefilling": 0, "waiting": 0}
    for one in crowd:
        at_ns = one.aborts_ns[0] if one.aborts_ns else 0
        if one.admitted_ns == 0 or one.admitted_ns > at_ns:
            found["waiting"] += 1
        elif one.first_token_ns == 0 or one.first_token_ns > at_ns:
            found["prefilling"] += 1
        else:
            found["decoding"] += 1
    return found


def problems(crowd: list[Asked], expected: int) -> list[str]:
    """What is wrong with a crowd of so many, of which each was to end once and by its cancel."""
    told = (
        ("were never cancelled", [one.id for one in crowd if not one.aborts_ns]),
        ("have no end", [one.id for one in crowd if not one.ends]),
        ("ended more than once", [one.id for one in crowd if len(one.ends) > 1]),
        ("ended otherwise", [one.id for one in crowd if {reason for _, reason in one.ends} - {EndReason.ABORT}]),
    )
    found = [f"the journal has {len(crowd)} requests of {expected}"] if len(crowd) != expected else []
    return found + [f"in the journal {len(ids)} of {expected} {what}: {named(ids)}" for what, ids in told if ids]
