"""Tree nodes: runs of cached pages, the locks on them, and what a match or an insertion says.

Owns the plain records of the prefix tree and the one change that touches no total, splitting a node. Must never decide
what is evicted. All page indexes are absolute: the index in the page table of a row whose tokens run along the path.

Invariant (suffix): the pages of a node that have a unit of a window band are the last ones, [`first`, `end`). Insertion
gives units to the end of a node, eviction takes them from its front, a leaf shrinks from its end, and splitting a
suffix leaves two suffixes; where a gift would leave a gap, the node is split behind it. The pages that readers hold
against eviction are a suffix too, [`floor`, `end`), because a lock always ends at a node's end.

    page      start        first          floor         end
    window      |  none      |  evictable   |  locked    |     state slot, if any: after the last token of the node
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from allocator.columns import Int32s


class Node:
    """Pages [`start`, `end`) of a path, `tokens` their int64 token column as bytes, `pages` their virtual ids (int32).

    `locks` counts the locks whose path runs through it (never less than a child's), `starts[band]` at which page locks
    of a window band begin in this node and how many do, `state_locks` the readers of its state. `stamps[band]` is when
    that component was used last. Lists are by band; entries that make no sense for a band stay as they began.
    """

    __slots__ = (
        "children",
        "end",
        "first",
        "floor",
        "locks",
        "pages",
        "parent",
        "queued",
        "serial",
        "slot",
        "stamps",
        "start",
        "starts",
        "state_locks",
        "tokens",
    )

    def __init__(self, serial: int, parent: Node | None, start: int, tokens: bytes, pages: Int32s, bands: int) -> None:
        self.serial = serial
        self.parent = parent
        self.start = start
        self.end = start + len(pages)
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Node] = {}  # by the tokens of a child's first page
        self.first = [self.end] * bands
        self.floor = [self.end] * bands
        self.starts: list[dict[int, int]] = [{} for _ in range(bands)]
        self.slot = 0
        self.locks = 0
        self.state_locks = 0
        self.stamps = [0] * bands
        self.queued = [-1] * bands  # the rank under which a component waits for eviction; -1: it does not

    def split(self, at: int, serial: int, page_bytes: int) -> Node:
        """Cut the node before page `at`; returns the new upper part. This one keeps the end, the state and children."""
        assert self.start < at < self.end, "a node is cut inside"
        assert self.parent is not None, "a root has no pages"
        count, bands = at - self.start, len(self.first)
        upper = Node(serial, self.parent, self.start, self.tokens[: count * page_bytes], self.pages[:count], bands)
        self.parent.children[upper.tokens[:page_bytes]] = upper
        self.tokens, self.pages = self.tokens[count * page_bytes :], self.pages[count:]
        self.start, self.parent = at, upper
        upper.children[self.tokens[:page_bytes]] = self
        upper.locks, upper.stamps = self.locks, list(self.stamps)
        for band in range(bands):
            upper.first[band], self.first[band] = min(self.first[band], at), max(self.first[band], at)
            upper.floor[band], self.floor[band] = min(self.floor[band], at), max(self.floor[band], at)
            below: dict[int, int] = {}
            for page, count in self.starts[band].items():
                if page < at:
                    upper.starts[band][page] = count
                below[max(page, at)] = below.get(max(page, at), 0) + count
            self.starts[band] = below
        return upper

    def content(self) -> list[Any]:
        """What the state digest covers of this node alone."""
        locked = [sorted(starts.items()) for starts in self.starts]
        identity = [self.serial, self.start, self.tokens, self.pages.tobytes()]
        return [*identity, self.first, self.slot, self.locks, locked, self.state_locks, self.stamps]


class Match(NamedTuple):
    """How far the tree knows a sequence; it holds nothing until it is locked.

    `tokens` can be used, `matched_tokens` full-attention pages alone would give. `cut` is what ended the usable part:
    empty (all that was asked for), `full` (the tree knows no more tokens) or the name of the band that cut. `pages`
    (int32) are the usable part's virtual pages, `window_first[band]` the first of them whose window unit the next token
    reads, `slot` the state after it (0: none). The first `asked_tokens` were looked up, at the tree's `version`.
    """

    namespace: str
    tokens: int
    matched_tokens: int
    cut: str
    pages: Int32s
    window_first: tuple[int, ...]
    slot: int
    node: Node | None
    asked_tokens: int
    version: int


@dataclass(slots=True, eq=False)
class Lock:
    """What one reader holds: the whole path to `node`, each window from `first[band]` on, and `state_node`'s state.

    `pages` is where it ends, `hit_pages` where it ended when it was made: what lies before was found, not given.
    """

    namespace: str
    node: Node
    pages: int
    hit_pages: int
    first: list[int]
    state_node: Node | None = None

    def content(self) -> list[Any]:
        """What the state digest covers of this lock."""
        state = self.state_node.serial if self.state_node is not None else -1
        return [self.node.serial, self.pages, self.hit_pages, self.first, state]


@dataclass(slots=True)
class Inserted:
    """What became of pages given to the tree, which now knows `tokens` tokens of the sequence.

    The row's table names `pages` (int32) from index `first` on; `duplicates` of them differ from what was given. First
    `rebinds` (band, sources ascending, targets) are to be made, then `free` (ids per band) to be freed. `slot_kept`:
    the given state slot belongs to the tree now.
    """

    tokens: int
    first: int
    pages: Int32s
    duplicates: int
    free: tuple[Int32s, ...]
    rebinds: list[tuple[int, Int32s, Int32s]]
    slot_kept: bool
