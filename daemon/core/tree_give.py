"""Tree give: how a row's pages, window units and states become the tree's.

Owns the walk of an insertion: what is new, what the tree has already, where a leaf grows. Must never free a unit itself
or let a window have a gap. Invariants: a page that the tree already has wins over the row's; a window unit or a state
that it lacks is taken over; the row's lock ends at the last page given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allocator.columns import Int32s, Int64s
from daemon.core.tree_gift import Gift
from daemon.core.tree_locks import hold_path, hold_windows, move_window
from daemon.core.tree_nodes import NO_PAGES, Inserted, Lock, Node
from daemon.core.tree_paths import recall
from daemon.core.tree_state import TreeState, path_up
from daemon.core.tree_worth import derive, derive_states, split

GROW_PAGES_MAX = 512  # a leaf of so many pages does not grow: growing copies it


def insert(
    tree: TreeState,
    tokens: Int64s,
    pages: Int32s,
    window_first: Sequence[int],
    slot: int,
    lock: Lock,
    kind: int,
) -> Inserted:
    """Give a row's pages to the tree, extending its lock in place; see `PrefixTree.insert`."""
    shape = tree.shape
    first, last = lock.pages, len(tokens) // shape.page_size
    assert first <= last <= len(pages), "what is given ends behind what is held, and has pages"
    if last == first and not (slot and last):
        return Inserted(last * shape.page_size, first, NO_PAGES, 0, (NO_PAGES,) * shape.count, [], False)
    data = tokens[first * shape.page_size : last * shape.page_size].tobytes()
    gift = Gift(pages, window_first)
    stamp = tree.tick()
    node, now = lock.node, pages[first:last].copy()
    tree.version += 1
    for band, _ in shape.windows:
        if window_first[band] > lock.first[band]:
            move_window(tree, lock, band, window_first[band], tree.tick(), lock.hit_pages)
    while node.end < last:
        at = node.end
        child = tree.child(node, data, at, first)
        if child is None and node is lock.node and _grows(tree, node, gift):
            _grow(tree, lock, data, pages[at:last], gift, stamp)
            child = node
        elif child is None:
            child = _attach(tree, lock, node, data[(at - first) * shape.page_bytes :], pages[at:last], gift, stamp)
        else:
            end = at + tree.common(child, data, at, first)
            child = split(tree, child, end) if end < child.end else child
            now[at - first : end - first] = child.pages
            _give_duplicates(tree, child, gift, stamp)
        node = child
    _extend(tree, lock, node)
    kept = bool(slot) and give_state(tree, node, slot, stamp, kind)
    recall(tree, lock, tokens, first, last)
    free, rebinds = gift.result()
    return Inserted(last * shape.page_size, first, now, gift.duplicates, free, rebinds, kept)


def give_state(tree: TreeState, node: Node, slot: int, stamp: int, kind: int) -> bool:
    """Whether the tree keeps this state at the node's end."""
    assert tree.shape.state >= 0, "only a model with recurrent layers has states"
    if node.slot:
        return False
    node.slot, node.kind = slot, kind
    node.stamps[tree.shape.state] = stamp
    tree.hold(node, tree.shape.state, 1)
    derive(tree, node)
    derive_states(tree, node)
    return True


def place_state(tree: TreeState, lock: Lock, pages: int, slot: int, kind: int) -> bool:
    """Whether the tree keeps this state after the first `pages` pages of the lock's path, where it lacked one."""
    assert 0 < pages <= lock.pages, "a state is placed on what its reader holds"
    node = next(node for node in path_up(lock.node, None) if node.start < pages)
    if node.end > pages:
        node = split(tree, node, pages)
    elif node.slot:
        return False
    tree.version += 1
    return give_state(tree, node, slot, tree.tick(), kind)


def _attach(tree: TreeState, lock: Lock, parent: Node, tokens: bytes, pages: Int32s, gift: Gift, stamp: int) -> Node:
    """A new leaf under `parent` with the row's pages and the window units it holds."""
    shape = tree.shape
    node = tree.node(parent, tokens, pages.copy())
    node.stamps = [stamp] * shape.count
    node.born, node.priority = stamp, lock.reader.priority
    tree.hold(node, shape.owner, len(pages))
    for band, _ in shape.windows:
        node.first[band] = gift.first_held(node, band)
        tree.hold(node, band, node.end - node.first[band])
    derive(tree, node)
    derive(tree, parent)
    derive_states(tree, parent)
    return node


def _grows(tree: TreeState, node: Node, gift: Gift) -> bool:
    """Whether a row's next pages can join the leaf its lock ends at, so that long paths have few nodes.

    Nobody else reads it, no state stands at its end, no pin ends there, and its window units stay a suffix.
    """
    if node.parent is None or node.children or node.slot or node.locks > 1 or node.pinned_until:
        return False
    if node.end - node.start >= GROW_PAGES_MAX:
        return False
    return all(node.first[band] == node.end or gift.held_from[band] <= node.end for band, _ in tree.shape.windows)


def _grow(tree: TreeState, lock: Lock, tokens: bytes, pages: Int32s, gift: Gift, stamp: int) -> None:
    """The leaf that the lock ends at becomes longer, and the lock with it."""
    node, old, shape = lock.node, lock.node.end, tree.shape
    assert node.locks == 1, "only its one reader lets a leaf grow"
    node.tokens += tokens
    node.pages = np.concatenate([node.pages, pages])
    node.end = lock.pages = old + len(pages)
    node.stamps, node.pin_first = [stamp] * shape.count, [node.end] * shape.count
    tree.hold(node, shape.owner, len(pages))
    tree.locked[shape.owner] += len(pages)
    for band, _ in shape.windows:
        if node.first[band] == old:
            node.first[band] = min(max(gift.held_from[band], old), node.end)
        tree.hold(node, band, node.end - max(node.first[band], old))
        tree.locked[band] -= old - node.floor[band]
        node.floor[band] = node.end
        if old <= lock.first[band] < node.end:
            node.starts[band][lock.first[band]] = 1
        tree.refloor(node, band)
    derive(tree, node)


def _give_duplicates(tree: TreeState, node: Node, gift: Gift, stamp: int) -> None:
    """The tree has these pages: it takes over the window units that it lacks, the row's others are freed."""
    gained = False
    for band, _ in tree.shape.windows:
        units = gift.merge_window(node, band)
        if units:
            gained = True
            node.first[band] -= units
            node.stamps[band] = stamp
            tree.hold(node, band, units)
    gift.merge_pages(node, tree.shape.owner)
    if gained:
        derive(tree, node)


def _extend(tree: TreeState, lock: Lock, node: Node) -> None:
    """The reader holds the path down to `node`, and of windows what it held and what it gave."""
    old = lock.node
    if node is not old:
        hold_path(tree, node, old)
        hold_windows(tree, lock, node, old)
        lock.node, lock.pages = node, node.end
    for at in path_up(node, old):
        for band, _ in tree.shape.windows:
            tree.offer(at, band)
