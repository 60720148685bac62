"""Order: the waiting queue and the policies that sort it.

Owns the queue of requests that hold nothing. Must never look at memory or rows: whether the head fits is admission's
question. Invariant: keys are unique (they end in the request number), so the order is total and the same on replay.

Under `fcfs` no request has a priority: arrival refuses one that does, so that none is ignored in silence.

Each policy maps a request to an integer key, smaller first. A retracted request keeps its number, so it comes back in
front of everything that arrived after it. Starvation bound of `priority`: one level of priority is worth
`OVERTAKEN_MAX` request numbers, so a request is overtaken by at most that many later ones per level of difference.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from daemon.core.requests import Request

OVERTAKEN_MAX = 4096


def _fcfs(request: Request) -> int:
    return request.number


def _priority(request: Request) -> int:
    return request.number - request.priority * OVERTAKEN_MAX


POLICIES: dict[str, Callable[[Request], int]] = {"fcfs": _fcfs, "priority": _priority}


class WaitingQueue:
    """Waiting requests in policy order. Raises ValueError for a policy that does not exist."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"schedule_policy {policy!r} is none of {sorted(POLICIES)}")
        self._key = POLICIES[policy]
        self._entries: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._entries)

    def add(self, request: Request) -> None:
        """Put a request in its place; it must not be queued already."""
        insort(self._entries, (self._key(request), request.number, request))

    def remove(self, request: Request) -> None:
        """Take a queued request out, wherever it stands."""
        key = (self._key(request), request.number)
        at = bisect_left(self._entries, key, key=lambda entry: entry[:2])
        assert at < len(self._entries), "the request is queued"
        assert self._entries[at][1] == request.number, "the request is queued once"
        del self._entries[at]

    def first(self, count: int) -> list[Request]:
        """The first `count` requests in order, or all there are."""
        return [request for _, _, request in self._entries[:count]]
