"""Order: the waiting queue, the policies that sort it, and the bound on overtaking that holds under each of them.

Owns the queue of requests that hold nothing. Must never look at memory or rows: whether the head fits is admission's
question. Invariant: keys are unique (they end in the request number), so the order is total and the same on replay.

    fcfs       as they came; a priority is refused at arrival, so that none is ignored in silence
    lpm        longest known prefix first, as of each one's newest look-up in the cache
    priority   the higher one first
    deadline   the earlier one first, those without one last
    fair       deficit round robin between namespaces (`daemon.core.fair`), by priority within one

Equal ones go by priority, then as they came. A retracted request keeps its number, and so its place.

Starvation bound: a request is overtaken by at most `overtaken_max` later ones, whatever the policy. One overtakes
another when it starts while the other, with a lower number, waits. As numbers rise with time, whoever overtakes a
request overtakes every older one that waits, so the oldest is overtaken most, and counting for it alone is exact: those
that began since and have a higher number. At the bound it is the only candidate. A retracted request takes over
the count of those that began while it ran, so it is served sooner, never later; whom it gave way to by priority starts
before it all the same, which is the first one to overtake it.

Adding, removing and starting cost O(log n) in the number of waiting requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from daemon.core.fair import PASSED_OVER, FairShare
from daemon.core.limits import CoreConfig
from daemon.core.ordered_heap import Key, OrderedHeap
from daemon.core.requests import Request

NO_DEADLINE_NS = 2**63 - 1


class Discipline(Protocol):
    """How one policy sorts. What a namespace is charged matters to `fair` alone."""

    def add(self, request: Request) -> None:
        """It waits."""

    def remove(self, request: Request) -> None:
        """It waits no longer."""

    def began(self, namespace: str, tokens: int) -> None:
        """A request of the namespace started and takes so many tokens; it was removed before."""

    def charge(self, namespace: str, tokens: int) -> None:
        """Tokens were produced for the namespace."""

    def walk(self) -> Generator[Request, int | None, None]:
        """Waiting requests in order; what each takes is sent back, or `PASSED_OVER`."""

    def content(self) -> list[object]:
        """What the state digest covers beside the requests that wait."""


class Sorted:
    """A policy that gives each request a key; smaller ones go first."""

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._waiting: OrderedHeap[Request] = OrderedHeap()

    def add(self, request: Request) -> None:
        """It waits."""
        self._waiting.add(self._key(request), request)

    def remove(self, request: Request) -> None:
        """It waits no longer."""
        self._waiting.remove(self._key(request))

    def began(self, namespace: str, tokens: int) -> None:
        """Nobody is charged."""

    def charge(self, namespace: str, tokens: int) -> None:
        """Nobody is charged."""

    def walk(self) -> Generator[Request, int | None, None]:
        """Waiting requests in order, whatever they take."""
        yield from self._waiting.walk()

    def content(self) -> list[object]:
        """The order says everything."""
        return []


class LongestPrefix(Sorted):
    """By the tokens of it that the cache knew when it was looked up last; `due` says whose turn that is."""

    def __init__(self) -> None:
        super().__init__(self._by_found)
        self._found: dict[int, int] = {}
        self._looks: OrderedHeap[Request] = OrderedHeap()  # never looked up first, then the longest ago
        self._looked: dict[int, int] = {}
        self._serial = 0

    def _by_found(self, request: Request) -> Key:
        return (-self._found[request.number], -request.priority, request.number)

    def add(self, request: Request) -> None:
        """It waits, and nothing is known of it."""
        self._found[request.number] = self._looked[request.number] = 0
        self._looks.add((0, request.number), request)
        super().add(request)

    def remove(self, request: Request) -> None:
        """It waits no longer."""
        super().remove(request)
        self._looks.remove((self._looked.pop(request.number), request.number))
        del self._found[request.number]

    def due(self, count: int) -> list[Request]:
        """The `count` requests that were looked up least recently."""
        return [request for request, _ in zip(self._looks.walk(), range(count), strict=False)]

    def found(self, request: Request, tokens: int) -> None:
        """It was looked up now, and the cache knows so many of its tokens."""
        number = request.number
        self._looks.remove((self._looked[number], number))
        self._serial += 1
        self._looked[number] = self._serial
        self._looks.add((self._serial, number), request)
        if tokens != self._found[number]:
            super().remove(request)
            self._found[number] = tokens
            super().add(request)

    def content(self) -> list[object]:
        """What each look-up found, and whose turn is next."""
        return [self._serial, sorted(self._found.items()), sorted(self._looked.items())]


def _as_they_came(request: Request) -> Key:
    return (request.number,)


def _by_priority(request: Request) -> Key:
    return (-request.priority, request.number)


def _by_deadline(request: Request) -> Key:
    return (request.deadline_ns or NO_DEADLINE_NS, -request.priority, request.number)


POLICIES: dict[str, Callable[[CoreConfig], Discipline]] = {
    "fcfs": lambda config: Sorted(_as_they_came),
    "lpm": lambda config: LongestPrefix(),
    "priority": lambda config: Sorted(_by_priority),
    "deadline": lambda config: Sorted(_by_deadline),
    "fair": lambda config: FairShare(config.fair_quantum_tokens),
}


class Walk:
    """The candidates of one pass, in order; the queue must not change before it is over.

    Whoever is taken is told by `take`; the others are passed over, and the oldest waiting request is overtaken by those
    that are taken. Where that may not go on, the walk goes by age instead, and ends at the first that is passed over.
    `first` comes before all others.
    """

    def __init__(
        self,
        order: Generator[Request, int | None, None],
        ages: Iterator[Request],
        allowance: int,
        first: Request | None,
    ) -> None:
        self._order, self._ages, self._allowance, self._first = order, ages, allowance, first
        self._taken: dict[int, None] = {}
        self._seen: dict[int, None] = {}
        self._oldest = next(ages, None)
        self._last: Request | None = None
        self._told: int | None = None  # what `order` hears of its newest candidate

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        if self._first is not None:
            request, self._first = self._first, None
        else:
            request = self._by_policy() if self._allowance > 0 else self._by_age()
        self._last = request
        self._seen[request.number] = None
        return request

    def take(self, tokens: int) -> None:
        """The candidate that came last starts, and `tokens` of it are computed."""
        assert self._last is not None, "a candidate is taken"
        assert self._last.number not in self._taken, "once"
        if self._told is not None:
            self._told = max(tokens, 0)
        self._taken[self._last.number] = None
        if self._last is not self._oldest:
            self._allowance -= 1
        while self._oldest is not None and self._oldest.number in self._taken:
            self._oldest = next(self._ages, None)

    def _by_policy(self) -> Request:
        while True:
            request, self._told = self._order.send(self._told), PASSED_OVER
            if request.number not in self._seen:
                return request

    def _by_age(self) -> Request:
        if self._oldest is None or self._oldest.number in self._seen:
            raise StopIteration
        return self._oldest


class WaitingQueue:
    """Waiting requests in policy order. Raises ValueError for a policy that does not exist, or a bound below 0."""

    def __init__(self, config: CoreConfig) -> None:
        if config.schedule_policy not in POLICIES:
            raise ValueError(f"schedule_policy {config.schedule_policy!r} is none of {sorted(POLICIES)}")
        if config.overtaken_max < 0:
            raise ValueError(f"overtaken_max must be at least 0, not {config.overtaken_max}")
        self._discipline = POLICIES[config.schedule_policy](config)
        self._overtaken_max = config.overtaken_max
        self._ages: OrderedHeap[Request] = OrderedHeap()
        self._count = 0
        self._passed: list[int] = []  # a heap: numbers of those that began while an older one waited that still waits

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """Everything in policy order, as if each were passed over; for views and digests."""
        return self._discipline.walk()

    @property
    def overtaken(self) -> int:
        """How many later ones began while the oldest waiting request waited."""
        return len(self._passed)

    @property
    def longest_prefix(self) -> LongestPrefix | None:
        """The policy `lpm`, which wants to hear of look-ups; None under every other."""
        return self._discipline if isinstance(self._discipline, LongestPrefix) else None

    def add(self, request: Request) -> None:
        """Put a request in its place; it must not be queued already."""
        self._count += 1
        self._ages.add((request.number,), request)
        self._discipline.add(request)

    def remove(self, request: Request) -> None:
        """Take a queued request out, wherever it stands: it ends."""
        self._count -= 1
        assert self._count == len(self._ages) - 1, "a queued request is removed once"
        self._ages.remove((request.number,))
        self._discipline.remove(request)
        self._settle()

    def began(self, request: Request, tokens: int, overtakes: bool = True) -> None:
        """A queued request starts, and `tokens` of it are computed for its namespace.

        One that is tried alone overtakes nobody: it waits again, or nobody else could start meanwhile.
        """
        self.remove(request)
        self._discipline.began(request.group.namespace, tokens)
        if overtakes and len(self._ages) and self._ages.first().number < request.number:
            heapq.heappush(self._passed, request.number)
            assert self._passed[0] > self._ages.first().number, "who is counted came later than the oldest"

    def forget_found(self) -> None:
        """The cache is gone, and with it whatever was found there of anybody."""
        sorts = self.longest_prefix
        if sorts is not None:
            for request in [*self._discipline.walk()]:
                sorts.found(request, 0)

    def charge(self, namespace: str, tokens: int) -> None:
        """Output tokens of a request that leaves its row."""
        self._discipline.charge(namespace, tokens)

    def head(self) -> Request:
        """The first candidate of a pass; there must be one waiting."""
        return next(self.walk())

    def walk(self, first: Request | None = None) -> Walk:
        """The candidates of a pass, `first` before all others: those that gave way to it are older perhaps."""
        allowance = max(0, self._overtaken_max - len(self._passed))
        return Walk(self._discipline.walk(), self._ages.walk(), allowance, first)

    def content(self) -> list[object]:
        """What the state digest covers: the order, and everything that changes it."""
        return [[request.number for request in self], sorted(self._passed), self._discipline.content()]

    def _settle(self) -> None:
        """Who came before the oldest that waits now, or is that one come back, overtook nobody that is left."""
        passed = self._passed
        while passed and (not len(self._ages) or passed[0] <= self._ages.first().number):
            heapq.heappop(passed)
