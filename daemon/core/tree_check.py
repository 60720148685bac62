"""Tree check: a recount of everything the prefix tree claims, from its nodes and locks alone.

Owns the comparison of totals, marks and queues with what they stand for. Must never change anything. For tests, for
idle, and for the strict level; its cost grows with everything that is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allocator.errors import InvariantBroken
from daemon.core.tree_nodes import Lock, Node
from daemon.core.tree_pins import pinned_units
from daemon.core.tree_state import TreeState

NAME = "core.prefix_tree"


def nodes_of(roots: Sequence[Node]) -> Iterator[Node]:
    """All nodes, roots among them, parents first."""
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        yield node
        stack += reversed(node.children.values())


def check_nodes(roots: Sequence[Node], page_bytes: int, windows: Sequence[int]) -> None:
    """Every path is whole, every id is named once, and the marks of each node agree with one another."""
    pages: set[int] = set()
    slots: set[int] = set()
    for node in nodes_of(roots):
        _say(node, len(node.pages) == node.end - node.start, "its pages do not fill its stretch")
        if node.parent is not None:
            _say(node, node.start == node.parent.end and node.end > node.start, "it does not follow its parent")
            _say(node, len(node.tokens) == len(node.pages) * page_bytes, "its tokens do not fill its pages")
            _say(node, node.parent.children.get(node.tokens[:page_bytes]) is node, "its parent does not know it")
        named = set(node.pages.tolist())
        _say(node, len(named) == len(node.pages) and min(named, default=1) > 0, "a page is named twice, or the sink")
        _say(node, not named & pages, "it names a page of another node")
        pages |= named
        if node.slot:
            _say(node, node.slot not in slots, f"slot {node.slot} belongs to another node too")
            slots.add(node.slot)
        _say(node, node.locks >= sum(child.locks for child in node.children.values()), "children are read by more")
        _say(node, bool(node.slot) or not node.state_locks, "a state is read that is not there")
        _say(node, node.locks >= node.state_locks >= 0, "its state is read by more than its pages")
        for band in windows:
            starts = node.starts[band]
            inside = all(node.start <= page < node.end and count > 0 for page, count in starts.items())
            _say(node, inside, f"readers of band {band} begin outside")
            _say(node, sum(starts.values()) <= node.locks, f"band {band} is read by more than its pages")
            _say(node, node.floor[band] == min(starts, default=node.end), f"the floor of band {band} is wrong")
            _say(node, node.start <= node.first[band] <= node.end, f"the units of band {band} lie outside")
            _say(node, node.first[band] <= node.floor[band], f"a reader of band {band} lacks units")


def totals_of(
    roots: Sequence[Node], bands: int, owner: int, state: int, windows: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Units held and units locked, per band, counted over all nodes."""
    held, locked = [0] * bands, [0] * bands
    for node in nodes_of(roots):
        held[owner] += len(node.pages)
        locked[owner] += len(node.pages) if node.locks else 0
        if node.slot:
            held[state] += 1
            locked[state] += int(node.state_locks > 0)
        for band in windows:
            held[band] += node.end - node.first[band]
            locked[band] += node.end - node.floor[band]
    return held, locked


def pinned_of(tree: TreeState, roots: Sequence[Node]) -> list[int]:
    """Units that pins name, per band, counted over all nodes; pages in front of a pinned one are pinned as long."""
    units = [0] * tree.shape.count
    for node in nodes_of(roots):
        units = [have + plus for have, plus in zip(units, pinned_units(tree, node), strict=True)]
        if node.parent is not None and node.parent.parent is not None:
            _say(node, node.parent.pinned_until >= node.pinned_until, "it is pinned longer than what leads to it")
        _say(node, node.pinned_until >= node.state_pinned_until, "its state is pinned longer than its pages")
    return units


def check_locks(roots: Sequence[Node], windows: Sequence[int], locks: Sequence[Lock]) -> None:
    """The marks of all nodes are those of exactly these locks."""
    paths: dict[int, int] = {}
    states: dict[int, int] = {}
    starts: dict[tuple[int, int, int], int] = {}
    for lock in locks:
        _say(lock.node, lock.node.end == lock.pages, "a lock does not end where its node ends")
        node: Node | None = lock.node
        while node is not None:
            paths[node.serial] = paths.get(node.serial, 0) + 1
            for band in windows:
                first = max(lock.first[band], node.start)
                if first < node.end:
                    starts[node.serial, band, first] = starts.get((node.serial, band, first), 0) + 1
            node = node.parent
        if lock.state_node is not None:
            states[lock.state_node.serial] = states.get(lock.state_node.serial, 0) + 1
    for node in nodes_of(roots):
        _say(node, node.locks == paths.pop(node.serial, 0), f"it counts {node.locks} readers, and others hold it")
        _say(node, node.state_locks == states.pop(node.serial, 0), "its state is held by others than it counts")
        for band in windows:
            for page, count in node.starts[band].items():
                counted = starts.pop((node.serial, band, page), 0)
                _say(node, counted == count, f"{count} readers of band {band} begin at page {page}, not {counted}")
    if paths or states or starts:
        raise InvariantBroken(NAME, f"locks hold nodes that are gone: {sorted(paths)} {sorted(states)}")


def _say(node: Node, holds: bool, what: str) -> None:
    if not holds:
        raise InvariantBroken(NAME, f"node {node.serial}, pages {node.start} to {node.end}: {what}")
