"""Eviction: which component of the prefix tree is given up next, and the policies that rank components.

Owns the queues of what can be evicted and the interface of the policies. Must never change a node beyond the mark that
it is queued. Components wait by band and class; in a class the lowest rank goes first, and the heads of all classes are
compared by the value that the policy puts on them now, so a pop costs O(log n) and one look per class that is not
empty. What a pin names is a class of its own, behind all others: it goes when nothing else is left, the pin that ends
earliest first.

Invariant: every component that can be evicted waits in its band's queue under its present class and rank, so the next
victim depends on nodes and on the policy's own numbers alone, not on how components came to be queued.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from allocator.errors import InvariantBroken
from daemon.core.tree_nodes import NOT_QUEUED, Node
from daemon.core.tree_shape import TreeShape
from daemon.core.value import ValuePerByte
from daemon.core.visits import Visit, Visits

SPARE_ENTRIES = 64  # a queue is rebuilt when more than half of it, and more than this, is out of date
CLASSES_MAX = 256  # a power of two: a queued component's mark is its rank times this plus its class
PRIORITY_OFFSET = 1 << 21  # above the highest priority of a request
STAMPS_MAX = 1 << 48

Seen = tuple[tuple[int, int], Visit | None, int]
"""All that the value of a head depends on: the policy's moment, the node's visit and its worth."""


class Policy(Protocol):
    """Ranks components for eviction: pure functions of nodes and of what was learned of `visits`."""

    classes: int
    last: int  # a class whose heads go behind those of every other one, or -1
    visits: Visits | None

    @property
    def moment(self) -> tuple[int, int]:
        """As long as it is the same, a component in its place has the same value."""

    def place(self, node: Node, band: int) -> tuple[int, int]:
        """Class (below `classes`) and rank (at least 0) under which a component that can be evicted waits."""

    def limit(self, node: Node, band: int) -> int:
        """The page before which window units go together as the class that `place` says; at most the node's floor."""

    def value(self, node: Node, class_: int, rank: int) -> int:
        """What the head of a class is worth at this moment; the lowest goes first."""


class Ranked:
    """A policy of one class: whatever ranks lowest goes first, of any band."""

    classes = 1
    last = -1
    visits: Visits | None = None
    moment = (0, 0)

    def __init__(self, rank: Callable[[Node, int], int]) -> None:
        self._rank = rank

    def place(self, node: Node, band: int) -> tuple[int, int]:
        """One class; the rank is the policy's."""
        return 0, self._rank(node, band)

    def limit(self, node: Node, band: int) -> int:
        """Every unread unit."""
        return node.floor[band]

    def value(self, node: Node, class_: int, rank: int) -> int:
        """The rank itself."""
        return rank


def least_recently_used(shape: TreeShape) -> Ranked:
    """What was used longest ago goes first."""
    return Ranked(_last_use)


def least_frequently_used(shape: TreeShape) -> Ranked:
    """What the fewest hits reached goes first; of those, what was used longest ago."""
    return Ranked(_hits)


def first_in_first_out(shape: TreeShape) -> Ranked:
    """What was given first goes first, used or not."""
    return Ranked(_birth)


def lowest_priority(shape: TreeShape) -> Ranked:
    """What only requests of low priority used goes first; of those, what was used longest ago."""
    return Ranked(_priority)


# Ranks have names, so that a state that holds one can be written down and read again.


def _last_use(node: Node, band: int) -> int:
    return node.stamps[band]


def _hits(node: Node, band: int) -> int:
    return node.hits * STAMPS_MAX + node.stamps[band]


def _birth(node: Node, band: int) -> int:
    return node.born


def _priority(node: Node, band: int) -> int:
    return (node.priority + PRIORITY_OFFSET) * STAMPS_MAX + node.stamps[band]


PolicyOf = Callable[[TreeShape], Policy]
"""A policy for trees of one shape."""

POLICIES: dict[str, PolicyOf] = {
    "value": ValuePerByte,
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
    "priority": lowest_priority,
}
EVICTION_POLICIES = tuple(POLICIES)  # the first is the default


class EvictionOrder:
    """Queues of nodes whose component of a band nobody holds; `state` and `owner` are bands, `state` -1 without one.

    `offset` says which half of `Node.queued` is this order's: 0 for the tree's, the number of bands for a namespace's.
    """

    def __init__(self, bands: int, owner: int, state: int, policy: Policy, offset: int = 0) -> None:
        assert policy.classes < CLASSES_MAX, "one class is for what is pinned"
        self._bands = bands
        self._owner = owner
        self._state = state
        self._policy = policy
        self._offset = offset
        self._pinned = policy.classes
        self._late = (policy.last, self._pinned)
        # By band times CLASSES_MAX plus class; made when something waits there first.
        self._heaps: dict[int, list[tuple[int, int, Node]]] = {}
        self._waiting: dict[int, int] = {}  # nodes whose mark says that they wait there
        # What the head of a class was worth, and by what; nothing but a memory of what would be worked out again.
        self._values: dict[int, tuple[tuple[int, int, Node], Seen, tuple[bool, int, int, int, int]]] = {}

    def evictable(self, node: Node, band: int) -> bool:
        """Whether this component could be given up now: a leaf's pages, a window's unread units, an unread state."""
        if node.gone:
            return False
        if band == self._owner:
            return not node.locks and not node.children and node.parent is not None
        if band == self._state:
            return bool(node.slot) and not node.state_locks
        return node.first[band] < node.floor[band]

    def limit(self, node: Node, band: int) -> int:
        """The page before which a node's window units go with the first one; what a pin names waits apart."""
        pinned = node.pin_first[band]
        if node.first[band] >= pinned:
            return node.floor[band]
        return min(pinned, self._policy.limit(node, band))

    def offer(self, node: Node, band: int) -> None:
        """Queue the component in its present place if it can be evicted; does nothing if it waits there already."""
        if not self.evictable(node, band):
            return
        class_, rank = self._place(node, band)
        mark, at = rank * CLASSES_MAX + class_, self._offset + band
        before = node.queued[at]
        if before == mark:
            return
        key = band * CLASSES_MAX + class_
        if before >= 0:
            self._waiting[band * CLASSES_MAX + before % CLASSES_MAX] -= 1
        self._waiting[key] = self._waiting.get(key, 0) + 1
        node.queued[at] = mark
        heap = self._heaps.setdefault(key, [])
        heapq.heappush(heap, (rank, node.serial, node))
        if len(heap) > 2 * self._waiting[key] + SPARE_ENTRIES:
            heap[:] = [entry for entry in heap if entry[2].queued[at] == entry[0] * CLASSES_MAX + class_]
            heapq.heapify(heap)

    def forget(self, node: Node, band: int) -> None:
        """The component is gone or taken; its entry is out of date."""
        mark = node.queued[self._offset + band]
        if mark >= 0:
            node.queued[self._offset + band] = NOT_QUEUED
            self._waiting[band * CLASSES_MAX + mark % CLASSES_MAX] -= 1

    def check(self, node: Node) -> None:
        """What can be evicted waits in its present place; raises InvariantBroken."""
        for band in range(self._bands):
            if not self.evictable(node, band):
                continue
            class_, rank = self._place(node, band)
            if node.queued[self._offset + band] != rank * CLASSES_MAX + class_:
                detail = f"node {node.serial} can be evicted from band {band} and does not wait in class {class_}"
                raise InvariantBroken("core.prefix_tree", detail)

    def pop(self, only: int | None) -> tuple[Node, int] | None:
        """Takes out the next victim and its band, of one band or of all; None when nothing can be evicted.

        Of equal values the lower rank goes first; of equal ranks a leaf's pages, which take everything else along, then
        windows, then states.
        """
        keys = [key for key in self._heaps if only is None or key // CLASSES_MAX == only]
        late = [key for key in keys if key % CLASSES_MAX in self._late]  # not looked at while there is something else
        chosen = self._lowest([key for key in keys if key not in late] if late else keys)
        if chosen is None:
            chosen = self._lowest(late)
        if chosen is None:
            return None
        node = heapq.heappop(self._heaps[chosen])[2]
        band = chosen // CLASSES_MAX
        self.forget(node, band)
        return node, band

    def _lowest(self, keys: list[int]) -> int | None:
        """Of these queues the one whose head goes first; those that are empty are dropped."""
        best: tuple[bool, int, int, int, int] | None = None
        chosen = None
        moment = self._policy.moment
        for key in keys:
            top = self._top(key)
            if top is None:
                del self._heaps[key]
                continue
            known, node = self._values.get(key), top[2]
            seen = (moment, node.visit, node.worth)
            if known is None or known[0] is not top or known[1] != seen:
                known = self._values[key] = (top, seen, self._worth(key, top))
            if best is None or known[2] < best:
                best, chosen = known[2], key
        return chosen

    def _worth(self, key: int, top: tuple[int, int, Node]) -> tuple[bool, int, int, int, int]:
        band, class_ = divmod(key, CLASSES_MAX)
        rank, serial, node = top
        pinned = class_ == self._pinned
        return pinned, rank if pinned else self._policy.value(node, class_, rank), rank, -band, serial

    def _place(self, node: Node, band: int) -> tuple[int, int]:
        until = node.state_pinned_until if band == self._state else node.pinned_until
        if until and (band in (self._owner, self._state) or node.first[band] >= node.pin_first[band]):
            return self._pinned, until
        class_, rank = self._policy.place(node, band)
        assert rank >= 0, "a rank is not negative"
        return class_, rank

    def _top(self, key: int) -> tuple[int, int, Node] | None:
        heap = self._heaps[key]
        band, class_ = divmod(key, CLASSES_MAX)
        at = self._offset + band
        while heap:
            rank, _, node = heap[0]
            if node.queued[at] == rank * CLASSES_MAX + class_:
                if self.evictable(node, band):
                    return heap[0]
                self.forget(node, band)
            heapq.heappop(heap)
        return None
