"""Due: when each waiting or running request is to be looked at for its deadline.

Owns the heap of times. Must never decide what a look finds. Invariants: of several entries of a request the earliest
counts; entries of requests that ended are at most as many as those of live ones, so that what is held grows with
what is live however far away the deadlines of ended ones were; adding, taking and an end cost O(log n) on average.
"""

from __future__ import annotations

import heapq


class Due:
    """Times in ns under request numbers, which are given once."""

    __slots__ = ("_dead", "_entries", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._entries: dict[int, int] = {}  # by live request, how many entries of the heap are its own
        self._dead = 0

    def __len__(self) -> int:
        """Entries held, those of ended requests among them."""
        return len(self._heap)

    def add(self, at_ns: int, request: int) -> None:
        """Look at the live request then."""
        self._entries[request] = self._entries.get(request, 0) + 1
        heapq.heappush(self._heap, (at_ns, request))

    def first_ns(self) -> int | None:
        """When to look at the next one, or None."""
        while self._heap and self._heap[0][1] not in self._entries:
            heapq.heappop(self._heap)
            self._dead -= 1
        return self._heap[0][0] if self._heap else None

    def pop(self) -> int:
        """The request that is to be looked at first, without that entry; there must be one."""
        assert self.first_ns() is not None, "asked before"
        request = heapq.heappop(self._heap)[1]
        left = self._entries.pop(request) - 1
        if left:
            self._entries[request] = left
        self._trim()
        return request

    def ended(self, request: int) -> None:
        """It is looked at no more; one without a deadline has no entry."""
        self._dead += self._entries.pop(request, 0)
        self._trim()

    def content(self) -> list[tuple[int, int]]:
        """What the state digest covers: the entries of live requests, in order."""
        return sorted(entry for entry in self._heap if entry[1] in self._entries)

    def _trim(self) -> None:
        assert 0 <= self._dead <= len(self._heap), "what is dead is among what is held"
        if 2 * self._dead > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1] in self._entries]
            heapq.heapify(self._heap)
            self._dead = 0
