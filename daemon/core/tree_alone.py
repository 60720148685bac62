"""What would become evictable in the prefix tree if some readers went, without letting any of them go.

Owns that one question. Must never change anything. Invariant: exactly what `reclaimable` would gain if these locks, and
no others, were let go now.
"""

from __future__ import annotations

from collections.abc import Sequence

from allocator.capacity import Demand
from daemon.core.tree_nodes import Lock, Node


def held_alone(locks: Sequence[Lock], bands: int, owner: int, state: int, windows: Sequence[int]) -> Demand:
    """Units per band that these locks together hold against eviction and nobody else does; each unit once."""
    units = [0] * bands
    nodes: dict[int, Node] = {}
    through: dict[int, int] = {}  # by serial, how many of these locks run through a node
    states: dict[int, int] = {}
    starts: dict[tuple[int, int], dict[int, int]] = {}  # by serial and band, how many of them begin at a page
    for lock in locks:
        if lock.state_node is not None:
            nodes[lock.state_node.serial] = lock.state_node
            states[lock.state_node.serial] = states.get(lock.state_node.serial, 0) + 1
        node: Node | None = lock.node
        while node is not None:
            nodes[node.serial] = node
            through[node.serial] = through.get(node.serial, 0) + 1
            for band in windows:
                if node.end > lock.first[band]:
                    begin = max(lock.first[band], node.start)
                    counts = starts.setdefault((node.serial, band), {})
                    counts[begin] = counts.get(begin, 0) + 1
            node = node.parent
    for serial, count in through.items():
        assert count <= nodes[serial].locks, "these locks are among those of the node"
        if nodes[serial].locks == count:
            units[owner] += nodes[serial].end - nodes[serial].start
    for serial, count in states.items():
        units[state] += nodes[serial].state_locks == count
    for (serial, band), counts in starts.items():
        node = nodes[serial]
        assert all(node.starts[band].get(page, 0) >= count for page, count in counts.items()), "and so are their starts"
        others = [page for page, count in node.starts[band].items() if count > counts.get(page, 0)]
        units[band] += min(others, default=node.end) - node.floor[band]
    return tuple(units)
