"""Tree gift: what becomes of the pages that a row gives where the tree already has equal ones.

Owns the pairing of a row's pages with the tree's. Must never change a node's locks. Invariant: every unit the row gave
ends up in exactly one place: on a new node, rebound to a page of the tree that lacked it, or freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allocator.columns import Int32s
from daemon.core.tree_nodes import NO_PAGES, Node


class Gift:
    """One row's `pages` (int32, its table); `held_from[band]` is the first whose unit of a window band it holds."""

    def __init__(self, pages: Int32s, held_from: Sequence[int]) -> None:
        self.pages = pages
        self.held_from = held_from
        self.duplicates = 0
        self._free: list[list[Int32s]] = [[] for _ in held_from]
        self._pairs: list[list[tuple[Int32s, Int32s]]] = [[] for _ in held_from]

    def first_held(self, node: Node, band: int) -> int:
        """The first page of a node's stretch whose unit the row holds; the node's end when it holds none."""
        return min(max(self.held_from[band], node.start), node.end)

    def merge_window(self, node: Node, band: int) -> int:
        """The row's units for this node: rebound where the node lacks them, else freed. How many the node gains.

        What the row holds reaches to the node's end, so the node's units stay a suffix.
        """
        given, start = self.first_held(node, band), node.start
        have = node.first[band]
        if given < have:
            self._pairs[band].append((self.pages[given:have], node.pages[given - start : have - start]))
        self._free[band].append(self.pages[max(given, have) : node.end])
        return max(0, have - given)

    def merge_pages(self, node: Node, owner: int) -> None:
        """The row's pages for this node are duplicates."""
        mine = self.pages[node.start : node.end]
        assert not (mine == node.pages).any(), "what the tree owns is not given to it again"
        self._free[owner].append(mine)
        self.duplicates += len(mine)

    def result(self) -> tuple[tuple[Int32s, ...], list[tuple[int, Int32s, Int32s]]]:
        """Ids to free per band, and rebinds with ascending sources."""
        free = tuple(np.concatenate(ids) if ids else NO_PAGES for ids in self._free)
        rebinds = []
        for band, pairs in enumerate(self._pairs):
            if pairs:
                sources = np.concatenate([source for source, _ in pairs])
                targets = np.concatenate([target for _, target in pairs])
                order = sources.argsort()
                rebinds.append((band, sources[order], targets[order]))
        return free, rebinds
