"""Tree give up: what goes when memory is short, victim by victim, and no more than is needed.

Owns the walk of an eviction and how each kind of component shrinks. Must never take what a reader holds, and never
choose a victim itself. Invariants: what a leaf's pages take along (their window units, its state) is counted with them;
of the last victim the fewest units go that suffice; what is freed leaves `held` at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from allocator.capacity import Demand
from allocator.columns import Int32s
from daemon.core.eviction import EvictionOrder
from daemon.core.tree_nodes import NO_PAGES, Node, Space
from daemon.core.tree_pins import Pins
from daemon.core.tree_state import TreeState
from daemon.core.tree_worth import derive, derive_states

Enough = Callable[[Demand], bool]
Gain = Callable[[int], list[int]]


class Eviction:
    """What one need takes, until `enough` says so of the units freed, per band. `parts` are the ids that came free."""

    def __init__(self, tree: TreeState, pins: Pins, enough: Enough) -> None:
        self._tree = tree
        self._pins = pins
        self._need = self._enough = enough
        self._freed = [0] * tree.shape.count
        self._parts: list[list[Int32s]] = [[] for _ in range(tree.shape.count)]

    @property
    def parts(self) -> tuple[Int32s, ...]:
        """Ids that came free so far, per band."""
        return tuple(ids[0] if len(ids) == 1 else np.concatenate(ids) if ids else NO_PAGES for ids in self._parts)

    def shrink(self, space: Space, only: int | None) -> bool:
        """What a namespace holds beyond its quota, and no more than is needed; True when it is enough."""
        shape = self._tree.shape
        least = shape.bytes_of(self._freed) + self._tree.over_quota_bytes(space)
        self._enough = lambda freed: self._need(freed) or shape.bytes_of(freed) >= least
        self.walk(self._tree.space_orders[space.name], only)
        self._enough = self._need
        return self._need(tuple(self._freed))

    def walk(self, order: EvictionOrder, only: int | None) -> bool:
        """Victims of one order, of one band only or of all; True when it is enough."""
        tree = self._tree
        while not self._enough(tuple(self._freed)):
            victim = order.pop(only)
            if victim is None:
                return False
            node, band = victim
            if band == tree.shape.owner:
                units = self._shrink_leaf(node)
            elif band == tree.shape.state:
                units = self._drop_state(node)
            else:
                units = self._shrink_window(node, band)
            self._freed = [have + plus for have, plus in zip(self._freed, units, strict=True)]
        return True

    def _fewest(self, most: int, gain: Gain) -> int:
        """The smallest count from 1 to `most` whose gain suffices, or `most` when none does; monotone."""
        assert most > 0, "a victim has something to give"

        def suffices(count: int) -> bool:
            return self._enough(tuple(have + more for have, more in zip(self._freed, gain(count), strict=True)))

        if most == 1 or not suffices(most):
            return most
        low, high = 1, 1  # few are missing as a rule
        while high < most and not suffices(high):
            low, high = high + 1, min(2 * high, most)
        return low + bisect_left(range(low, high), True, key=suffices)

    def _shrink_leaf(self, node: Node) -> list[int]:
        """Take the last pages of an unread leaf, as few as suffice or all, with what hangs on them."""
        tree, shape = self._tree, self._tree.shape
        assert tree.order.evictable(node, shape.owner), "a leaf that nobody reads"

        def gain(count: int) -> list[int]:
            units = [0] * shape.count
            units[shape.owner] = count
            for band, _ in shape.windows:
                units[band] = node.end - max(node.first[band], node.end - count)
            if node.slot:
                units[shape.state] = 1
            return units

        count = self._fewest(node.end - node.start, gain)
        units, start = gain(count), node.start
        self._pins.drop(tree, node, shape.owner)
        if node.slot:
            self._take_slot(node)
        for band in (*(band for band, _ in shape.windows), shape.owner):
            if units[band]:
                self._parts[band].append(node.pages[node.end - units[band] - start :])
                tree.hold(node, band, -units[band])
        self._cut_leaf(node, node.end - count)
        return units

    def _cut_leaf(self, node: Node, end: int) -> None:
        """The leaf ends at page `end` now, or is gone."""
        tree, parent = self._tree, node.parent
        assert parent is not None, "a root is no leaf"
        page_bytes = tree.shape.page_bytes
        if end == node.start:
            del parent.children[node.tokens[:page_bytes]]
            tree.forget(node)
            if parent.parent is None:
                tree.drop_if_empty(parent.space)
            else:
                derive(tree, parent)
                derive_states(tree, parent)
            return
        count = end - node.start
        node.end, node.pages, node.tokens = end, node.pages[:count], node.tokens[: count * page_bytes]
        for band in range(tree.shape.count):
            node.first[band] = min(node.first[band], end)
            node.floor[band] = node.pin_first[band] = end
        derive(tree, node)
        derive_states(tree, node)

    def _take_slot(self, node: Node) -> None:
        self._parts[self._tree.shape.state].append(np.array([node.slot], np.int32))
        node.slot, node.passed = 0, False
        self._tree.hold(node, self._tree.shape.state, -1)

    def _drop_state(self, node: Node) -> list[int]:
        """Take the state of a node."""
        tree = self._tree
        assert tree.order.evictable(node, tree.shape.state), "a state that nobody reads"
        self._pins.drop(tree, node, tree.shape.state)
        self._take_slot(node)
        derive(tree, node)
        derive_states(tree, node)
        return [int(band == tree.shape.state) for band in range(tree.shape.count)]

    def _shrink_window(self, node: Node, band: int) -> list[int]:
        """Take the first window units of a node that nobody reads and that go together, as few as suffice or all."""
        tree, first = self._tree, node.first[band]

        def gain(count: int) -> list[int]:
            return [count if index == band else 0 for index in range(tree.shape.count)]

        if first >= node.pin_first[band]:
            self._pins.drop(tree, node, band)
        count = self._fewest(tree.order.limit(node, band) - first, gain)
        self._parts[band].append(node.pages[first - node.start : first - node.start + count])
        node.first[band] = first + count
        tree.hold(node, band, -count)
        derive(tree, node)
        return gain(count)
