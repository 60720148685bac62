"""Tree state: the nodes of the prefix tree, its totals, and the steps along a path that everything else is made of.

Owns namespaces, counts per band and the split of a node with what hangs on it. Must never decide what is evicted or who
holds what. Invariants: `held` and `locked` are those of all nodes, a namespace's `held` those of its nodes; a namespace
exists as long as it has nodes or readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from allocator.columns import Int32s
from daemon.core.eviction import EvictionOrder, Policy
from daemon.core.tree_nodes import NO_PAGES, Node, Space
from daemon.core.tree_shape import TreeShape


class TreeState:
    """Nodes and totals of one tree. `quota_of` says how many bytes a namespace may hold, -1: as many as there are."""

    def __init__(self, shape: TreeShape, policy: Policy, quota_of: Callable[[str], int]) -> None:
        self.shape = shape
        self.visits = policy.visits
        self.spaces: dict[str, Space] = {}
        self.held = [0] * shape.count
        self.locked = [0] * shape.count
        self.open_locks = 0
        self.version = 0  # rises with every change of what a match could say
        self.clock = 0
        self.now_ms = 0
        self.order = EvictionOrder(shape.count, shape.owner, shape.state, policy)
        self._policy = policy
        self.space_orders: dict[str, EvictionOrder] = {}  # of the namespaces with a limit
        self.over: dict[str, None] = {}  # namespaces that hold more than their limit
        self._quota_of = quota_of
        self._serial = 0

    def tick(self) -> int:
        """The next moment."""
        self.clock += 1
        return self.clock

    # --- namespaces ----------------------------------------------------------------------------------------------

    def space(self, name: str) -> Space:
        """The namespace, made when it is not there."""
        space = self.spaces.get(name)
        if space is None:
            shape = self.shape
            self._serial += 1
            space = self.spaces[name] = Space(name, self._quota_of(name), shape.count, self._serial)
            if space.quota_bytes >= 0:
                order = EvictionOrder(shape.count, shape.owner, shape.state, self._policy, shape.count)
                self.space_orders[name] = order
        return space

    def drop_if_empty(self, space: Space) -> None:
        """A namespace that holds nothing and that nobody reads is forgotten."""
        if not space.root.children and not space.root.locks:
            del self.spaces[space.name]
            self.over.pop(space.name, None)
            self.space_orders.pop(space.name, None)

    def over_quota_bytes(self, space: Space) -> int:
        """By how much the namespace holds more than it may; at most 0: it does not."""
        return self.shape.bytes_of(space.held) - space.quota_bytes if space.quota_bytes >= 0 else 0

    # --- nodes ---------------------------------------------------------------------------------------------------

    def node(self, parent: Node, tokens: bytes, pages: Int32s) -> Node:
        """A new leaf under `parent`; its units are not counted yet."""
        self._serial += 1
        node = Node(self._serial, parent, parent.space, parent.end, tokens, pages, self.shape.count)
        parent.children[tokens[: self.shape.page_bytes]] = node
        return node

    def hold(self, node: Node, band: int, units: int) -> None:
        """A node has so many units more of a band, or fewer."""
        self.held[band] += units
        space = node.space
        space.held[band] += units
        if space.quota_bytes >= 0:
            if self.over_quota_bytes(space) > 0:
                self.over[space.name] = None
            else:
                self.over.pop(space.name, None)
        assert self.held[band] >= 0, "nothing is given up twice"

    def offer(self, node: Node, band: int) -> None:
        """Let a component wait for eviction, if it can be evicted, in its present place."""
        self.order.offer(node, band)
        if node.space.quota_bytes >= 0 and not node.gone:
            self.space_orders[node.space.name].offer(node, band)

    def forget(self, node: Node) -> None:
        """A node is gone: nothing of it waits any more, and who still knows it keeps no more than the way up.

        The visit whose path ended in it ends above, as far as that path is still its own, and has no tail any more.
        """
        visit, above = node.visit, node.parent
        if visit is not None and visit.end is node:
            visit.end, visit.end_tokens = above if above is not None and above.visit is visit else None, 0
        node.gone, node.visit = True, None
        node.tokens, node.pages = b"", NO_PAGES
        for band in range(self.shape.count):
            self.order.forget(node, band)
            if node.space.quota_bytes >= 0:
                self.space_orders[node.space.name].forget(node, band)

    def child(self, node: Node, data: bytes, at: int, base: int) -> Node | None:
        """The child that begins with page `at` of `data`, whose first page is `base`."""
        offset = (at - base) * self.shape.page_bytes
        return node.children.get(data[offset : offset + self.shape.page_bytes])

    def common(self, node: Node, data: bytes, at: int, base: int) -> int:
        """Pages of `node` that equal those of `data` from page `at` on; at least one, it was found by its first."""
        offset = (at - base) * self.shape.page_bytes
        if data.startswith(node.tokens, offset):
            return node.end - node.start
        theirs = np.frombuffer(node.tokens, np.int64)
        ours = np.frombuffer(data, np.int64, offset=offset)
        count = min(len(theirs), len(ours))
        differs = theirs[:count] != ours[:count]
        same = int(differs.argmax()) if differs.any() else count
        assert same >= self.shape.page_size, "a child is found by its first page"
        return same // self.shape.page_size

    def split(self, node: Node, at: int) -> Node:
        """Cut a node before page `at`; the upper part. What can be evicted of either is not queued anew yet."""
        self.version += 1
        self._serial += 1
        return node.split(at, self._serial, self.shape.page_bytes)

    def refloor(self, node: Node, band: int) -> None:
        """`floor` is where the first reader of this node's window units begins."""
        floor = min(node.starts[band], default=node.end)
        assert floor == node.end or node.first[band] <= floor, "what is read is there"
        self.locked[band] += node.floor[band] - floor
        node.floor[band] = floor

    def roots(self) -> list[Node]:
        """The roots of all namespaces, in the order of their making."""
        return [space.root for space in self.spaces.values()]

    def content(self) -> Iterator[bytes]:
        """Canonical bytes of everything that can influence a later answer, for the state digest."""
        totals: list[Any] = [self.held, self.locked, self.clock, self._serial, self.open_locks, self.now_ms]
        yield msgspec.msgpack.encode([totals, self.visits.content() if self.visits is not None else 0])
        for name in sorted(self.spaces):
            yield msgspec.msgpack.encode(name)
            stack = [self.spaces[name].root]
            while stack:
                node = stack.pop()
                yield msgspec.msgpack.encode(node.content())
                stack += [node.children[key] for key in sorted(node.children)]


def path_up(node: Node, above: Node | None) -> Iterator[Node]:
    """`node` and its ancestors up to below `above` (None: the root too)."""
    at: Node | None = node
    while at is not above:
        assert at is not None, "a path leads to its root"
        yield at
        at = at.parent
