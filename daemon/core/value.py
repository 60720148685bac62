"""Value per byte: what a cached component is worth, by how likely it is used again and by what that would save.

Owns the classes of components, and the comparison of their heads. Must never keep a number that can differ between
machines: everything is an integer. In a class the one that was used longest ago goes first.

    value of a class's head  =  uses to be expected per time (`visits`)  x  tokens saved per byte (a power of two)

Components that can serve no hit any more have no value and go first: pages and window units that no likely end reads,
states whose window is gone; then what a later request left aside when it went on from the same visit. Those that an end
needs, beside the component that the end itself stands for, go last: that one goes first and takes their value along.
"""

from __future__ import annotations

from daemon.core.tree_nodes import Node
from daemon.core.tree_shape import WORTHS, TreeShape
from daemon.core.visits import CLASSES as VISITS
from daemon.core.visits import Visits

# Classes: without value; left aside; windows before no likely end, far from one and near to one; states that a later
# one of the same path makes superfluous; tails; what an end needs. Then, for each worth: what several lines of visits
# share; other ends from which a path leads on; ends of paths, by the class of their visit.
DEAD, ASIDE, FAR, NEAR, PASSED, TAIL, NEEDED = range(7)
SHARED = NEEDED + 1
INNER = SHARED + WORTHS
ENDS = INNER + WORTHS
CLASSES = ENDS + VISITS * WORTHS

SHARED_TIMES = 4  # what is shared is expected to be used so many times as often as the best other path of its age
SHARERS_MIN = 2  # a node is shared when its visit was so often one of another line
NEVER = 1 << 100

# By how many powers of two less likely a use of these is than one of the path's end.
LESS = {INNER: 2, NEAR: 4, PASSED: 6, FAR: 8}


class ValuePerByte:
    """The policy `value`; see the module."""

    classes = CLASSES
    last = NEEDED

    def __init__(self, shape: TreeShape) -> None:
        self.visits: Visits | None = Visits()
        self._visits = self.visits
        self._page_size = shape.page_size
        self._owner = shape.owner
        self._state = shape.state
        self._leads = dict(shape.leads)

    @property
    def moment(self) -> tuple[int, int]:
        """That of what was learned."""
        return self._visits.moment

    def place(self, node: Node, band: int) -> tuple[int, int]:
        """Its class, and when it was used last."""
        stamp = node.stamps[band]
        if band == self._owner:
            return (_end(node) if node.usable else DEAD), stamp
        if band == self._state:
            if not node.usable:
                return DEAD, stamp
            if node.passed and node.sharers < SHARERS_MIN:
                return PASSED, stamp
            ends = len(node.children) < 2 and (not node.children or node.visit is not None)
            return (_end(node) if ends or self._at_mark(node) else _inner(node)), stamp
        needed = node.end - node.reach[band]
        if node.first[band] < needed:
            if self._state >= 0 or not node.usable:
                return DEAD, stamp
            return (FAR if node.first[band] < needed - self._leads[band] else NEAR), stamp
        if self._state >= 0 or not node.children or node.first[band] >= node.end - node.below[band]:
            return NEEDED, stamp
        return (_end(node) if self._at_mark(node) else _inner(node)), stamp

    def limit(self, node: Node, band: int) -> int:
        """Where the units of another class begin, or what a reader holds."""
        first, needed = node.first[band], node.end - node.reach[band]
        if first >= needed:
            return node.floor[band]
        far = needed - self._leads[band]
        if self._state < 0 and node.usable and first < far:
            needed = far
        return min(needed, node.floor[band])

    def value(self, node: Node, class_: int, rank: int) -> int:
        """The likely saving per byte; none for what serves no hit, beyond all for what another one's end needs."""
        visit = node.visit
        if class_ <= ASIDE:
            return class_
        if class_ == NEEDED:
            return NEVER
        if visit is None:  # a reader is at work on this path
            if self._state < 0:  # and moves its window on
                return ASIDE + 1
            # What it gave last is where its next turn starts, though the pages that it still writes lie behind.
            return ASIDE + 2 + (self._visits.newest_rate >> LESS[INNER] << node.worth)
        if class_ >= ENDS:
            rate = self._visits.rate(visit)
        elif class_ == TAIL:
            rate = self._visits.tail_rate(visit)
        elif SHARED <= class_ < INNER:
            rate = self._visits.best_rate(visit) * SHARED_TIMES
        else:
            rate = self._visits.rate(visit) >> LESS[INNER if class_ >= INNER else class_]
        return ASIDE + 2 + (rate << node.worth)

    def _at_mark(self, node: Node) -> bool:
        """Whether the next request is expected to leave the newest path through this node at its very end."""
        return node.visit is not None and node.end == node.visit.mark // self._page_size


def _end(node: Node) -> int:
    """Where a path ends: by its visit, and by what the end saves per byte."""
    if node.sharers >= SHARERS_MIN:
        return SHARED + node.worth
    if node.visit is None:
        return ENDS + node.worth
    if node.visit.over:
        return ASIDE
    return TAIL if node.tail else ENDS + node.visit.class_ * WORTHS + node.worth


def _inner(node: Node) -> int:
    return (SHARED if node.sharers >= SHARERS_MIN else INNER) + node.worth
