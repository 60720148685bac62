"""Tree scan: how far of a path is usable, found while walking down it once.

Owns what each band demands of a place where a match may end. Must never change a node. Invariant: within one node the
usable ends are the ones from some page on, because the pages that have window units are a suffix of the node; so it is
enough to look at the last matched page of each node, and at a node's state.
"""

from __future__ import annotations

import numpy as np

from allocator.columns import Int32s
from daemon.core.tree_nodes import NO_PAGES, Node
from daemon.core.tree_shape import TreeShape


class Scan:
    """`matched` pages in full attention, `usable` ones in every band, and the nodes in which they end."""

    def __init__(self, shape: TreeShape) -> None:
        self.matched = 0
        self.usable = 0
        self.node: Node | None = None
        self.deepest: Node | None = None
        self._bands = shape.bands
        self._state = shape.state
        self._leads = shape.leads
        self._runs = [0] * shape.count  # where the unbroken run of units that ends at `matched` begins
        self._reach = [0] * shape.count  # the longest match each band alone would allow
        self._columns: list[Int32s] = []
        self._usable_columns = 0

    def enter(self, node: Node, end: int) -> None:
        """The path goes on through `node`, which matches up to page `end`."""
        assert node.start == self.matched < end <= node.end, "a path is walked without gaps"
        self.matched, self.deepest = end, node
        self._columns.append(node.pages)
        usable = True
        for band, lead in self._leads:
            first = node.first[band]
            if first > node.start:
                self._runs[band] = min(first, end)
            run = self._runs[band]
            if run and end < run + lead:
                usable = False
            else:
                self._reach[band] = end
        if self._state >= 0:
            if end == node.end and node.slot:
                self._reach[self._state] = end
            else:
                usable = False
        if usable:
            self.usable, self.node, self._usable_columns = end, node, len(self._columns)

    def cut(self, limit: int) -> str:
        """Why the usable part ends before page `limit`: see `Match`."""
        if self.usable == limit:
            return ""
        if self.usable == self.matched:
            return "full"
        demanding = [band for band, _ in self._leads]
        demanding += [self._state] if self._state >= 0 else []
        assert demanding, "only a window or a state cuts below full attention"
        return self._bands[min(sorted(demanding), key=lambda band: self._reach[band])].name

    def pages(self) -> Int32s:
        """Virtual pages of the usable part (int32)."""
        if not self.usable:
            return NO_PAGES
        return np.concatenate(self._columns[: self._usable_columns])[: self.usable]
