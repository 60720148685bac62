"""Tree order: which component of the prefix tree is given up next.

Owns the queues of what can be evicted, one per band, and the interface of the policies that rank it. Must never change
a node beyond the mark that it is queued. Invariant: every component that can be evicted waits in its band's queue under
its present rank, so the next victim depends on nodes alone, not on how they came to be queued.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from allocator.errors import InvariantBroken
from daemon.core.tree_nodes import Node

SPARE_ENTRIES = 64  # a queue is rebuilt when more than half of it, and more than this, is out of date


class Policy(Protocol):
    """Ranks components for eviction."""

    def rank(self, node: Node, band: int) -> int:
        """The lowest rank goes first. It is at least 0, never falls, and rises only when the component is used."""


class LeastRecentlyUsed:
    """What was used longest ago goes first."""

    def rank(self, node: Node, band: int) -> int:
        """When the component was used last."""
        return node.stamps[band]


class EvictionOrder:
    """Queues of nodes whose component of a band nobody holds; `state` and `owner` are bands, `state` -1 without one."""

    def __init__(self, bands: int, owner: int, state: int, policy: Policy) -> None:
        self._owner = owner
        self._state = state
        self._policy = policy
        self._heaps: list[list[tuple[int, int, Node]]] = [[] for _ in range(bands)]
        self._waiting = [0] * bands  # nodes whose mark says that they are queued

    def evictable(self, node: Node, band: int) -> bool:
        """Whether this component could be given up now: a leaf's pages, a window's unread units, an unread state."""
        if band == self._owner:
            return not node.locks and not node.children and node.parent is not None
        if band == self._state:
            return bool(node.slot) and not node.state_locks
        return node.first[band] < node.floor[band]

    def offer(self, node: Node, band: int) -> None:
        """Queue the component under its present rank if it can be evicted; does nothing if it waits there already."""
        if not self.evictable(node, band):
            return
        rank = self._policy.rank(node, band)
        assert rank >= 0, "a rank is not negative"
        if node.queued[band] == rank:
            return
        if node.queued[band] < 0:
            self._waiting[band] += 1
        node.queued[band] = rank
        heap = self._heaps[band]
        heapq.heappush(heap, (rank, node.serial, node))
        if len(heap) > 2 * self._waiting[band] + SPARE_ENTRIES:
            heap[:] = [entry for entry in heap if entry[2].queued[band] == entry[0]]
            heapq.heapify(heap)

    def forget(self, node: Node, band: int) -> None:
        """The component is gone or taken; its entry is out of date."""
        if node.queued[band] >= 0:
            node.queued[band] = -1
            self._waiting[band] -= 1

    def check(self, node: Node) -> None:
        """What can be evicted waits under its present rank; raises InvariantBroken."""
        for band in range(len(self._heaps)):
            if self.evictable(node, band) and node.queued[band] != self._policy.rank(node, band):
                detail = f"node {node.serial} can be evicted from band {band} and does not wait for it"
                raise InvariantBroken("core.prefix_tree", detail)

    def pop(self, only: int | None) -> tuple[Node, int] | None:
        """Takes out the next victim and its band, of one band or of all; None when nothing can be evicted.

        Of equal ranks a leaf's pages go first, which take everything else along, then windows, then states.
        """
        best: tuple[int, int, int] | None = None
        for band in [only] if only is not None else range(len(self._heaps)):
            top = self._top(band)
            if top is not None and (best is None or (top[0], -band, top[1]) < best):
                best = (top[0], -band, top[1])
        if best is None:
            return None
        band = -best[1]
        node = heapq.heappop(self._heaps[band])[2]
        self.forget(node, band)
        return node, band

    def _top(self, band: int) -> tuple[int, int, Node] | None:
        heap = self._heaps[band]
        while heap:
            rank, _, node = heap[0]
            if node.queued[band] == rank:
                if self.evictable(node, band):
                    return heap[0]
                self.forget(node, band)
            heapq.heappop(heap)
        return None
