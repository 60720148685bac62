"""Recent: the newest decisions, those about each live request, and sums over iterations, for whoever watches.

Owns bounded memories of what the engine did. Must never be read by anything that decides, nor grow with time or
traffic. Invariants: serials of decisions are dense over one life of the daemon; of a request its first and its newest
decisions are kept, and how many between them are not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import islice

import msgspec

from daemon.core.inputs import Arrived, Input, Recovered
from daemon.core.outputs import Decided
from daemon.core.reasons import LOSES_ROW, Verdict
from daemon.mailbox import Iteration

DECISIONS_KEPT = 1024  # newest ones, about whatever
FIRST_KEPT = 16  # decisions of one request, from its arrival on
LAST_KEPT = 48  # its newest ones
LIVE_KEPT = 4096  # requests that have not ended; the oldest goes first
ENDED_KEPT = 256  # requests that have


@dataclass(slots=True)
class Sums:
    """What iterations add up to since the life began. Counts and tokens; times in the unit of their names."""

    iterations: int = 0
    reports: int = 0
    forwards: int = 0
    forward_us: int = 0  # from launch to tokens, slowest rank, all forwards together
    core_ns: int = 0
    flush_ns: int = 0
    admitted: int = 0
    waited_ms: int = 0  # from arrival to admission, all first admissions together
    first_admitted: int = 0
    queried_tokens: int = 0  # looked up in the prefix cache, by first admissions and resumed ones
    cached_tokens: int = 0  # of those, found there


class Told(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A decision with its serial."""

    serial: int
    decided: Decided


@dataclass(slots=True)
class Life:
    """The decisions about one request, or for its sake about others; in the middle `left_out` are missing."""

    id: str = ""
    frontend: str = ""
    prompt_tokens: int = 0
    first: list[Told] = field(default_factory=list)
    last: deque[Told] = field(default_factory=lambda: deque(maxlen=LAST_KEPT))
    left_out: int = 0
    admitted: bool = True  # it had its first admission, or that is not known
    back: str = ""  # the verdict by which it lost its row and waits again; empty: it does not, or that is not known

    def add(self, told: Told) -> None:
        """One more."""
        if len(self.first) < FIRST_KEPT:
            self.first.append(told)
            return
        self.left_out += len(self.last) == LAST_KEPT
        self.last.append(told)


class Recent:
    """What can be told of the newest iterations."""

    def __init__(self) -> None:
        self.serial = 0  # of the newest decision
        self._sums = Sums()
        self._decisions: deque[Told] = deque(maxlen=DECISIONS_KEPT)
        self._lives: dict[int, Life] = {}
        self._ended: dict[int, Life] = {}

    def take(self, iteration: Iteration) -> None:
        """Take one iteration in."""
        sums = self._sums
        sums.iterations += 1
        sums.core_ns += iteration.core_ns
        sums.flush_ns += iteration.flush_ns
        for collated in iteration.collated:
            sums.reports += 1
            if collated.forward_us:
                sums.forwards += 1
                sums.forward_us += collated.forward_us
        for item, outputs in zip(iteration.inputs, iteration.outputs, strict=True):
            if isinstance(item, Recovered):
                self._recovered(item)
            for decided in outputs.decisions:
                self._decided(item, decided)

    def sums(self) -> dict[str, int]:
        """The sums by name."""
        return asdict(self._sums)

    def decisions(self, since: int, most: int) -> list[Told]:
        """Decisions behind serial `since`, the newest `most` of them, oldest first."""
        wanted = min(most, max(0, self.serial - since), len(self._decisions))
        return list(islice(self._decisions, len(self._decisions) - wanted, None))

    def life(self, request: int) -> Life | None:
        """What is known of a request; None when it is not, or not any more."""
        return self._lives.get(request) or self._ended.get(request)

    def _decided(self, item: Input, decided: Decided) -> None:
        self.serial += 1
        told = Told(self.serial, decided)
        self._decisions.append(told)
        if decided.verdict == Verdict.ACCEPTED:
            self._accepted(item, told)
        elif decided.request:
            life = self._life_of(decided.request)
            life.add(told)
            if decided.verdict in LOSES_ROW and not life.back:  # who waits already has no row to lose
                life.back = decided.verdict
        if decided.by and decided.by != decided.request and decided.by in self._lives:
            self._lives[decided.by].add(told)
        if decided.verdict == Verdict.ADMITTED:
            self._admitted(decided)
        elif decided.verdict == Verdict.ENDED:
            self._end(decided.request)

    def _accepted(self, item: Input, told: Told) -> None:
        numbers = told.decided.numbers
        for request in range(told.decided.request, told.decided.request + numbers.get("n", 1)):
            life = self._life_of(request)
            if isinstance(item, Arrived):
                life.id, life.frontend = item.generate.id, item.frontend
            life.prompt_tokens, life.admitted = numbers.get("prompt_tokens", 0), False
            life.add(told)

    def _recovered(self, item: Recovered) -> None:
        """Choices of an earlier life that go on in this one; what they waited for first was told then."""
        for group in item.groups:
            for choice, was in enumerate(group.choices):
                if was.ended is None:
                    life = self._life_of(group.accepted.first_request + choice)
                    life.id, life.frontend = group.accepted.id, group.frontend
                    life.prompt_tokens, life.admitted = len(group.generate.prompt) // 8, was.started

    def _admitted(self, decided: Decided) -> None:
        sums, numbers = self._sums, decided.numbers
        sums.admitted += 1
        sums.queried_tokens += numbers.get("queried_tokens", 0)
        sums.cached_tokens += numbers.get("cached_tokens", 0)
        life = self._lives[decided.request]
        life.back = ""
        if not life.admitted:
            life.admitted = True
            sums.first_admitted += 1
            sums.waited_ms += numbers.get("waited_ms", 0)

    def _life_of(self, request: int) -> Life:
        life = self._lives.get(request)
        if life is None:
            if len(self._lives) >= LIVE_KEPT:
                del self._lives[next(iter(self._lives))]
            life = self._lives[request] = Life()
        return life

    def _end(self, request: int) -> None:
        life = self._lives.pop(request, None)
        if life is None:
            return
        if len(self._ended) >= ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        self._ended[request] = life
