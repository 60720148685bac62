"""Value per byte: what a cached component is worth, by how likely it is used again and by what that would save.

Owns the classes of components, and the comparison of their heads. Must never keep a number that can differ between
machines: everything is an integer. In a class the one that was used longest ago goes first.

    value of a class's head  =  weight of the class x tokens saved per byte (a power of two) / time since its last use

Components that can serve no hit any more have no value and go first: pages and window units that no likely end reads,
states whose window is gone. Those that an end needs, beside the component that the end itself stands for, go last: that
one goes first and takes their value along.
"""

from __future__ import annotations

from typing import Any

from daemon.core.tree_nodes import Node
from daemon.core.tree_shape import PROMPT_KIND, WORTHS, TreeShape

DEAD, FAR, NEAR, PASSED, NEEDED = range(5)
INNER = 5  # states, and windows before ends, from which several paths lead on; a class for each worth
ENDS = INNER + WORTHS  # where a path ends: a leaf's pages, the newest states of a path; by turn, then by worth
TURNS = 4  # turns that are told apart: the first to the third, and all later ones
CLASSES = ENDS + TURNS * WORTHS

VALUE_BITS = 40
NEVER = 1 << 100

# What a likely use weighs beside that of a path that was used once; parts of 16.
END_WEIGHTS = (16, 48, 64, 64)
INNER_WEIGHT = 16
PASSED_WEIGHT = 2
NEAR_WEIGHT = 4
FAR_WEIGHT = 1


class ValuePerByte:
    """The policy `value`; see the module."""

    classes = CLASSES

    def __init__(self, shape: TreeShape) -> None:
        self._owner = shape.owner
        self._state = shape.state
        self._leads = dict(shape.leads)
        weights = [0, FAR_WEIGHT << 5, NEAR_WEIGHT << 5, PASSED_WEIGHT << 5, 0]
        weights += [INNER_WEIGHT << worth for worth in range(WORTHS)]
        weights += [weight << worth for weight in END_WEIGHTS for worth in range(WORTHS)]
        self._weights = [weight << VALUE_BITS for weight in weights]

    def place(self, node: Node, band: int) -> tuple[int, int]:
        """Its class, and when it was used last."""
        stamp = node.stamps[band]
        if band == self._owner:
            return (_end(node) if node.usable else DEAD), stamp
        if band == self._state:
            if not node.usable:
                return DEAD, stamp
            if not node.children or (node.kind == PROMPT_KIND and len(node.children) == 1 and not node.passed):
                return _end(node), stamp
            return (PASSED if node.passed else INNER + node.worth), stamp
        needed = node.end - node.reach[band]
        if node.first[band] < needed:
            if self._state >= 0 or not node.usable:
                return DEAD, stamp
            return (FAR if node.first[band] < needed - self._leads[band] else NEAR), stamp
        if self._state >= 0 or not node.children or node.first[band] >= node.end - node.below[band]:
            return NEEDED, stamp
        return INNER + node.worth, stamp

    def limit(self, node: Node, band: int) -> int:
        """Where the units of another class begin, or what a reader holds."""
        first, needed = node.first[band], node.end - node.reach[band]
        if first >= needed:
            return node.floor[band]
        far = needed - self._leads[band]
        if self._state < 0 and node.usable and first < far:
            needed = far
        return min(needed, node.floor[band])

    def value(self, band: int, class_: int, rank: int, now: int) -> int:
        """The likely saving per byte; none for what serves no hit, beyond all for what another one's end needs."""
        if class_ == NEEDED:
            return NEVER - now + rank
        return self._weights[class_] // (now - rank + 1)

    def used(self, node: Node, age: int) -> None:
        """Nothing is learned yet."""

    def gone(self, node: Node, band: int, age: int) -> None:
        """Nothing is learned yet."""

    def content(self) -> list[Any]:
        """Nothing was learned."""
        return []


def _end(node: Node) -> int:
    return ENDS + min(node.turn, TURNS - 1) * WORTHS + node.worth
