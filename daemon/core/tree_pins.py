"""Tree pins: prefixes that are to stay until a time, whoever reads them.

Owns which components a pin names and until when, and how much all pins may name together. Must never hold anything
against a reader's need: what is pinned counts as reclaimable and goes behind everything else, the pin that ends
earliest first, before any request is refused, parked or ended for want of memory. Invariants: pages in front of a
pinned page are pinned as long; `units` are those of all pinned components, those that readers hold too among them.
"""

from __future__ import annotations

import heapq
from typing import Any

from daemon.core.tree_nodes import Match, Node
from daemon.core.tree_state import TreeState, path_up
from daemon.core.tree_worth import split

SPARE_ENDS = 64  # the ends of pins are looked through when more than half of them, and more than this, may name nothing


class Pins:
    """Pins of one tree; together they name at most `most_bytes`, -1: as much as there is."""

    def __init__(self, bands: int, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.units = [0] * bands
        self.refused = 0  # pins that would have named too much
        self.dropped = 0  # components that were given up before their time
        self.ends: list[tuple[int, int, Node]] = []  # until when a pin lasts, and the node at whose end it ends
        self._ends_most = SPARE_ENDS  # of those; then the ones that name nothing any more are forgotten

    def pin(self, tree: TreeState, match: Match, until_ns: int) -> bool:
        """Name what a hit of this match reads until then; False, with nothing changed, when that is too much."""
        assert match.version == tree.version, "a match is pinned before the tree changes"
        node, pages, shape = match.node, len(match.pages), tree.shape
        if node is None or not pages:
            return True
        more = [0] * shape.count
        for at in path_up(node, node.space.root):
            end = min(at.end, pages)
            more[shape.owner] += 0 if at.pinned_until else end - at.start
            for band, _ in shape.windows:
                more[band] += max(0, min(at.pin_first[band], end) - max(match.window_first[band], at.start))
        if match.slot:
            more[shape.state] = int(not node.state_pinned_until)
        if 0 <= self.most_bytes < shape.bytes_of(self.units) + shape.bytes_of(more):
            self.refused += 1
            return False
        if node.end > pages:
            node = split(tree, node, pages)
        self.units = [have + plus for have, plus in zip(self.units, more, strict=True)]
        for at in path_up(node, node.space.root):
            at.pinned_until = max(at.pinned_until, until_ns)
            for band, _ in shape.windows:
                at.pin_first[band] = min(at.pin_first[band], max(match.window_first[band], at.start))
        if match.slot:
            node.state_pinned_until = max(node.state_pinned_until, until_ns)
        heapq.heappush(self.ends, (until_ns, node.serial, node))
        if len(self.ends) > self._ends_most:
            self._clear_ends()
        _requeue(tree, node)
        return True

    def expire(self, tree: TreeState, now_ns: int) -> None:
        """Pins that lasted until now or shorter are over."""
        while self.ends and self.ends[0][0] <= now_ns:
            node = heapq.heappop(self.ends)[2]
            for at in path_up(node, node.space.root):
                if 0 < at.pinned_until <= now_ns:
                    self._release(tree, at, tree.shape.owner)
                if 0 < at.state_pinned_until <= now_ns:
                    self._release(tree, at, tree.shape.state)
            _requeue(tree, node)

    def drop(self, tree: TreeState, node: Node, band: int) -> None:
        """Something of this component is given up: no pin names it any more, nor what is of no use without it."""
        named = node.state_pinned_until if band == tree.shape.state else node.pinned_until
        if named:
            self.dropped += 1
            self._release(tree, node, band)

    def content(self) -> list[Any]:
        """What the state digest covers beyond the marks of nodes."""
        ends = sorted((until, serial) for until, serial, _ in self.ends)
        return [ends, self.units, self.refused, self.dropped]

    def _clear_ends(self) -> None:
        """Forget the ends of pins that were given up or that a later one took the place of."""
        kept: dict[tuple[int, int], Node] = {}
        for until, _, node in self.ends:
            at: Node | None = node
            while at is not None and (at.gone or until not in (at.pinned_until, at.state_pinned_until)):
                at = at.parent
            if at is not None:
                kept[until, at.serial] = at
        self.ends = [(until, serial, node) for (until, serial), node in kept.items()]
        heapq.heapify(self.ends)
        self._ends_most = 2 * len(self.ends) + SPARE_ENDS

    def _release(self, tree: TreeState, node: Node, band: int) -> None:
        before = pinned_units(tree, node)
        if band in (tree.shape.owner, tree.shape.state):
            node.state_pinned_until = 0
        if band == tree.shape.owner:
            node.pinned_until = 0
            node.pin_first = [node.end] * tree.shape.count
        elif band != tree.shape.state:
            node.pin_first[band] = node.end
        after = pinned_units(tree, node)
        self.units = [have - (was - now) for have, was, now in zip(self.units, before, after, strict=True)]
        assert min(self.units) >= 0, "what is named was counted"


def pinned_units(tree: TreeState, node: Node) -> list[int]:
    """Units of one node that pins name, per band."""
    shape = tree.shape
    units = [node.end - first for first in node.pin_first]
    units[shape.owner] = node.end - node.start if node.pinned_until else 0
    if shape.state >= 0:
        units[shape.state] = int(node.state_pinned_until > 0)
    return units


def _requeue(tree: TreeState, node: Node) -> None:
    for at in path_up(node, node.space.root):
        for band in range(tree.shape.count):
            tree.offer(at, band)
