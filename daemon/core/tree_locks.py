"""Tree locks: who reads what of the prefix tree, from a match to the end of its reader.

Owns every change of a lock and of the marks that locks leave on nodes. Must never free or take anything. Invariants: a
lock ends where its node ends; a parent has at least as many locks as a child, and a node without them has no other
lock; `locked` counts each held unit once, whoever holds it.
"""

from __future__ import annotations

from daemon.core.tree_nodes import Lock, Match, Node, Reader
from daemon.core.tree_paths import leave, visit_before
from daemon.core.tree_state import TreeState, path_up
from daemon.core.tree_worth import split
from daemon.core.visits import mark_of


def lock(tree: TreeState, match: Match, reader: Reader) -> Lock:
    """Hold a match against eviction, whatever it found; nothing may have changed since it was made."""
    assert match.version == tree.version, "a match is locked before the tree changes"
    pages = len(match.pages)
    node = match.node
    if node is None:
        node = tree.space(match.namespace).root
    elif node.end > pages:
        node = split(tree, node, pages)
    held = Lock(
        namespace=match.namespace,
        node=node,
        pages=pages,
        hit_pages=pages,
        first=list(match.window_first),
        hit_node=node,
        reader=reader,
        made_ms=tree.now_ms,
        matched_tokens=match.matched_tokens,
        before=visit_before(match),
    )
    hold_path(tree, node, None)
    hold_windows(tree, held, node, None)
    if match.slot:
        assert node.slot == match.slot, "a match with state ends where the state is"
        held.state_node = node
        node.state_locks += 1
        if node.state_locks == 1:
            tree.locked[tree.shape.state] += 1
    tree.open_locks += 1
    return held


def unlock(tree: TreeState, held: Lock, touch: bool) -> None:
    """Let go; `touch`: what it held was used."""
    assert tree.open_locks > 0, "a lock is let go once"
    if held.state_node is not None:
        release_state(tree, held, touch)
    stamp = tree.tick() if touch else -1
    shape = tree.shape
    for band, _ in shape.windows:
        move_window(tree, held, band, held.pages, stamp, held.pages)
    tree.open_locks -= 1
    space = held.node.space
    for node in path_up(held.node, None):
        assert node.locks > 0, "a path is let go as often as it was held"
        node.locks -= 1
        if touch:
            node.stamps[shape.owner] = stamp
            node.priority = max(node.priority, held.reader.priority)
        if not node.locks:
            tree.locked[shape.owner] -= node.end - node.start
            tree.offer(node, shape.owner)
    if touch:
        _touch_states(tree, held, stamp)
        leave(tree, held)
        for node in path_up(held.node, space.root):
            for band in range(shape.count):
                tree.offer(node, band)
    tree.drop_if_empty(space)


def release_state(tree: TreeState, held: Lock, touch: bool) -> None:
    """The state that the lock's match ended with was copied: it may go."""
    node = held.state_node
    assert node is not None, "a state is released once"
    assert node.state_locks > 0, "a state is let go as often as it was held"
    held.state_node = None
    node.state_locks -= 1
    if not node.state_locks:
        tree.locked[tree.shape.state] -= 1
    if touch:
        node.stamps[tree.shape.state] = tree.tick()
    tree.offer(node, tree.shape.state)


def hold_path(tree: TreeState, node: Node, above: Node | None) -> None:
    """One more reader of every page from `node` up to below `above` (None: the root too)."""
    for at in path_up(node, above):
        at.locks += 1
        if at.locks == 1:
            tree.locked[tree.shape.owner] += at.end - at.start


def hold_windows(tree: TreeState, held: Lock, node: Node, above: Node | None) -> None:
    """The reader reads the units from `first` on, in every node from `node` up to below `above`."""
    for band, _ in tree.shape.windows:
        at: Node | None = node
        while at is not above and at is not None and at.end > held.first[band]:
            first = max(held.first[band], at.start)
            at.starts[band][first] = at.starts[band].get(first, 0) + 1
            tree.refloor(at, band)
            at = at.parent


def move_window(tree: TreeState, held: Lock, band: int, first: int, stamp: int, touched: int) -> None:
    """The reader reads from page `first` on. Nodes it leaves were used at `stamp` if they end at or before
    page `touched`."""
    before = held.first[band]
    node: Node | None = held.node
    while node is not None and node.end > before:
        was, now = max(before, node.start), max(first, node.start)
        if was < now:
            starts = node.starts[band]
            starts[was] -= 1
            if not starts[was]:
                del starts[was]
            if now < node.end:
                starts[now] = starts.get(now, 0) + 1
            elif stamp >= 0 and node.end <= touched:
                node.stamps[band] = stamp
            tree.refloor(node, band)
            tree.offer(node, band)
        node = node.parent
    held.first[band] = first


def _touch_states(tree: TreeState, held: Lock, stamp: int) -> None:
    """The state nearest to a reader's end is where a continuation starts, or one from its prompt's mark on: they were
    used, as what they read was."""
    shape, mark = tree.shape, mark_of(held.reader.prompt_tokens) or held.pages * tree.shape.page_size
    nearest = True
    for node in path_up(held.node, held.node.space.root) if shape.state >= 0 else ():
        if not node.slot:
            continue
        if not nearest and node.end * shape.page_size < mark:
            return
        nearest = False
        node.stamps[shape.state] = stamp
        first = shape.window_first(node.end * shape.page_size)
        for band, _ in shape.windows:
            before: Node | None = node
            while before is not None and before.end > first[band]:
                before.stamps[band] = stamp
                before = before.parent
