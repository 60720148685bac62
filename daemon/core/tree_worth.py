"""Tree worth: what a later request could still start from, derived from a node and its neighbours.

Owns the derived marks of nodes: where matches are likely to end, which window units those ends read, which states serve
no hit any more, and how many tokens an end saves per byte that goes with it. Must never look at time or decide an
order. Work per change is bounded: it goes up a path only while something changes there, and looks at few children.

A **likely end** of a model with states is a node's end with a state; of another one where paths end or part, and on the
path of the newest visit its mark and the last page that its prompt would find again. A window unit is needed when it
lies within a window before a likely end at or below its node. An end is **usable** when its window is there as a whole.
"""

from __future__ import annotations

from daemon.core.tree_nodes import Node
from daemon.core.tree_shape import WORTHS
from daemon.core.tree_state import TreeState

CHILDREN_MAX = 16  # of a node with more children, what those below read only grows while it has so many
WALK_MAX = 64  # nodes looked at for the state before or behind another one
WORTH_ONE = 16  # `worth` of tokens whose pages and units are all freed with them, before it becomes a power of two


def derive(tree: TreeState, node: Node) -> None:
    """A node changed: derive its marks anew, and of those above it what follows; queues what takes another place."""
    if node.parent is None:
        return
    shape = tree.shape
    node.usable = _usable(tree, node)
    _reach(tree, node)
    _weigh(tree, node)
    for band in range(shape.count):
        tree.offer(node, band)
    above = node.parent
    while above.parent is not None and _reach(tree, above):
        for band, _ in shape.windows:
            tree.offer(above, band)
        above = above.parent


def split(tree: TreeState, node: Node, at: int) -> Node:
    """Cut a node before page `at`, with what follows for both parts; the upper part."""
    upper = tree.split(node, at)
    derive(tree, node)
    derive(tree, upper)
    return upper


def derive_states(tree: TreeState, node: Node) -> None:
    """States came, went or parted at this node: derive which of it and of the last one above it are passed."""
    if tree.shape.state < 0:
        return
    at: Node | None = node
    for _ in range(WALK_MAX):
        if at is None:
            return
        if at.slot:
            at.passed = _passed(tree, at)
            _weigh(tree, at)
            tree.offer(at, tree.shape.state)
            if at is not node:
                return
        at = at.parent


def revisit(tree: TreeState, node: Node) -> None:
    """A node has a new visit: its likely ends may be others. What waits of it for eviction is not queued anew."""
    if node.slot:
        node.passed = _passed(tree, node)
    elif tree.shape.windows and tree.shape.state < 0:
        derive(tree, node)


def _usable(tree: TreeState, node: Node) -> bool:
    """Whether a match can end in this node: its end has a state, where there are any, and whole windows before it."""
    shape = tree.shape
    if shape.state >= 0 and not node.slot:
        return False
    for band, lead in shape.leads:
        at, run = node, node.first[band]
        while run == at.start and at.parent is not None and node.end - run < lead:
            at = at.parent
            run = at.first[band]
        if run and node.end - run < lead:
            return False
    return True


def _reach(tree: TreeState, node: Node) -> bool:
    """Derive how many units before the node's end are needed; whether that changed."""
    changed = False
    for band, lead in tree.shape.leads:
        length, below = 0, 0
        if len(node.children) > CHILDREN_MAX:
            below = node.below[band]
        for _, child in zip(range(CHILDREN_MAX), node.children.values(), strict=False):
            length = child.end - child.start
            below = max(below, child.reach[band] - length)
        end = _likely_end(tree, node)
        own = lead + node.end - end if end else 0
        reach = max(own, below)
        if (reach, below) != (node.reach[band], node.below[band]):
            node.reach[band], node.below[band] = reach, below
            changed = True
    return changed


def _likely_end(tree: TreeState, node: Node) -> int:
    """The first page end in this node at which a match is likely to end; 0: none is."""
    if tree.shape.state >= 0:
        return node.end if node.slot else 0
    if not node.usable:
        return 0
    end = node.end if len(node.children) != 1 else 0
    if node.visit is not None:
        for tokens in (node.visit.again, node.visit.mark):
            page = tokens // tree.shape.page_size
            if node.start < page <= node.end:
                end = min(end or page, page)
    return end


def _passed(tree: TreeState, node: Node) -> bool:
    """Whether the next request would start at a later state than this: behind it is one path, with a state up to the
    mark of its newest visit."""
    if node.visit is None:
        return False
    at, mark = node, node.visit.mark // tree.shape.page_size
    for _ in range(WALK_MAX):
        if len(at.children) != 1:
            return False
        at = next(iter(at.children.values()))
        if at.end > mark:
            return False
        if at.slot:
            return True
    return False


def _weigh(tree: TreeState, node: Node) -> None:
    """Derive how many tokens per byte the node's end saves: back to the usable end before it, for what goes with it."""
    shape = tree.shape
    if shape.state < 0 and not shape.windows:
        node.worth = WORTH_ONE.bit_length()
        return
    units = [0] * shape.count
    leaf, at, chain = not node.children, node, True
    for _ in range(WALK_MAX):
        if at.parent is None or (at is not node and at.usable):
            break
        chain = chain and (at is node or len(at.children) == 1)
        if leaf and chain:
            units[shape.owner] += at.end - at.start
        for band, lead in shape.leads:
            held = at.end - at.first[band]
            units[band] += held if leaf and chain else min(held, lead) if at is node else 0
        at = at.parent
    if node.slot:
        units[shape.state] = 1
    page_bytes = sum(size for band, size in enumerate(shape.unit_bytes) if band != shape.state)
    ratio = (node.end - at.end) * page_bytes * WORTH_ONE // max(1, shape.bytes_of(units))
    node.worth = min(ratio.bit_length(), WORTHS - 1)
