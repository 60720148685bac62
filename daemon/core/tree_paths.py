"""Tree paths: what the visits of requests leave on the nodes of their paths.

Owns which visit a request goes on from and the marks by which a later one is told: the newest visit of each node, where
a path's tail begins, who shares what. Must never change what a match could say. Invariant: a node's visit is the newest
whose path came through it, so a path that was continued elsewhere is told from the one that goes on.
"""

from __future__ import annotations

from allocator.columns import Int64s
from daemon.core.tree_nodes import Lock, Match, Node
from daemon.core.tree_shape import TOKEN_BYTES
from daemon.core.tree_state import TreeState, path_up
from daemon.core.tree_worth import revisit, split
from daemon.core.value import SHARERS_MIN
from daemon.core.visits import GHOST_TOKENS, MARK_TOKENS, Visit, Visits, mark_of, path_key

FORKS_MIN = 2  # paths part at a node where so many requests left what was known: it is no turn of one conversation


def visit_before(match: Match) -> Visit | None:
    """The visit from which a request goes on that finds this: its path was found up to its mark, by one line alone."""
    node = match.deepest
    if node is None or node.visit is None or node.sharers >= SHARERS_MIN or node.forks >= FORKS_MIN:
        return None
    return node.visit if match.matched_tokens >= node.visit.mark > 0 else None


def recall(tree: TreeState, lock: Lock, tokens: Int64s, first: int, last: int) -> None:
    """A row gave pages [`first`, `last`) of `tokens` that were not found: perhaps they came before and were evicted."""
    if tree.visits is None or lock.reader.resumed:
        return
    size = tree.shape.page_size
    begin = max(first * size, lock.matched_tokens) // MARK_TOKENS + 1
    for position in range(begin * MARK_TOKENS, last * size + 1, MARK_TOKENS):
        key = path_key(lock.namespace, position, tokens[_known_from(position, size) : position].tobytes())
        visit = tree.visits.recall(key)
        if visit is not None:
            lock.before = visit


def leave(tree: TreeState, lock: Lock) -> None:
    """A reader let go of its path: what it found was hit, and the path has a new visit."""
    root, size = lock.node.space.root, tree.shape.page_size
    if lock.hit_pages:
        found = lock.hit_node
        found.forks += lock.node is not found and not lock.reader.resumed
        for node in path_up(found, root):
            node.hits += 1
            node.sharers += found.forks >= FORKS_MIN
    if tree.visits is None or not lock.pages:
        return
    visit, given = _visit(tree, tree.visits, lock), lock.pages * size
    if mark_of(lock.reader.prompt_tokens) <= given:
        visit.mark = mark_of(lock.reader.prompt_tokens)
    visit.again = min(max(0, lock.reader.prompt_tokens - 1), given)
    visit.end, visit.end_tokens = lock.node, given
    page = visit.mark // size
    if page:
        node = next(node for node in path_up(lock.node, root) if node.start < page)
        if node.end > page:
            split(tree, node, page)
    path = list(path_up(lock.node, root))
    for node in path:
        if node.visit is not None:
            node.sharers += node.visit.line != visit.line
            if node.visit.end is node:
                node.visit.end = None
        node.visit, node.tail = visit, bool(page) and node.start >= page
    for node in path:
        revisit(tree, node)
    tree.visits.enter(visit, _ghost(tree, lock, visit.mark))


def _visit(tree: TreeState, visits: Visits, lock: Lock) -> Visit:
    """The visit of a reader that leaves, and what that says of the one before."""
    before, reader = lock.before, lock.reader
    if before is None:
        return Visit(0, max(0, reader.prompt_tokens - lock.matched_tokens), visits.new_line(), tree.now_ms)
    if reader.resumed:
        if not before.over and _ends_on(before, lock):
            visits.drop(before)
        return Visit(before.turn, before.added, before.line, tree.now_ms)
    if not before.over:
        visits.continued(before, lock.made_ms, _tail_found(before, lock))
        _set_aside(tree, before)
    added = max(0, reader.prompt_tokens - max(lock.matched_tokens, before.mark))
    return Visit(before.turn + 1, added, before.line, tree.now_ms)


def _ends_on(visit: Visit, lock: Lock) -> bool:
    """Whether a visit may be what a retraction left: another one's path goes on elsewhere, or beyond the lock's."""
    return visit.end is None or any(node is visit.end for node in path_up(lock.node, None))


def _tail_found(before: Visit, lock: Lock) -> bool | None:
    """Whether a reader found at least half of what lay behind the mark; None when that was evicted, or nothing did."""
    node, tail = before.end, before.end_tokens - before.mark
    if node is None or node.visit is not before or tail <= 0:
        return None
    return lock.matched_tokens >= before.mark + tail // 2


def _set_aside(tree: TreeState, visit: Visit) -> None:
    """A visit was continued: what of its path is not on the new one goes before anything that may be used again."""
    node = visit.end
    visit.end = None
    while node is not None and node.visit is visit:
        for band in range(tree.shape.count):
            tree.offer(node, band)
        node = node.parent


def _ghost(tree: TreeState, lock: Lock, mark: int) -> bytes:
    """What the path is known by once it was evicted; empty for one without a mark."""
    if not mark:
        return b""
    size = tree.shape.page_size
    node: Node = next(node for node in path_up(lock.node, None) if node.start * size < mark)
    begin, end = _known_from(mark, size) - node.start * size, mark - node.start * size
    return path_key(lock.namespace, mark, node.tokens[begin * TOKEN_BYTES : end * TOKEN_BYTES])


def _known_from(position: int, page_size: int) -> int:
    """Where the tokens begin by which a path is known at a position: in the page that ends there or holds it."""
    return max((position - 1) // page_size * page_size, position - GHOST_TOKENS)
