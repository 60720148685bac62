"""Tree nodes: runs of cached pages, the locks on them, and what a match or an insertion says.

Owns the plain records of the prefix tree and the one change that touches no total, splitting a node. Must never decide
what is evicted. All page indexes are absolute: the index in the page table of a row whose tokens run along the path.

Invariant (suffix): the pages of a node that have a unit of a window band are the last ones, [`first`, `end`). Insertion
gives units to the end of a node, eviction takes them from its front, a leaf shrinks from its end, and splitting a
suffix leaves two suffixes; where a gift would leave a gap, the node is split behind it. The pages that readers hold
against eviction are a suffix too, [`floor`, `end`), because a lock always ends at a node's end; so are those that a pin
names, [`pin_first`, `end`).

    page      start        first          floor         end
    window      |  none      |  evictable   |  locked    |     state slot, if any: after the last token of the node
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from allocator.columns import Int32s
from daemon.core.visits import Visit

NO_PAGES: Int32s = np.zeros(0, np.int32)
NO_PAGES.setflags(write=False)
NOT_QUEUED = -1


class Node:
    """Pages [`start`, `end`) of a path, `tokens` their int64 token column as bytes, `pages` their virtual ids (int32).

    `locks` counts the locks whose path runs through it (never less than a child's), `starts[band]` at which page locks
    of a window band begin in this node and how many do, `state_locks` the readers of its state. Lists are by band;
    entries that make no sense for a band stay as they began.

    What policies rank by: `stamps[band]` is when that component was used last, `born` when the node came, `hits` how
    many hits ran through it, `priority` the highest of those that used it, `kind` what its state was kept for. `visit`
    is the newest visit that came through, of whose path it is the `tail` or not. `forks` counts the requests that found
    the tree up to its end and went on elsewhere, `sharers` how often the visit was one of another line or the paths of
    several parted behind it. `gone`: it is no part of the tree any more.

    What `tree_worth` derives: `reach[band]` units before the end are read by likely match ends at and below it, `below`
    by those below alone; `usable`: a match can end in it; `passed`: the one continuation of its state leads to a later
    one; `worth`: tokens that its end saves per byte, as a power of two. What a pin names: its pages until
    `pinned_until` (ns, 0: not), its state until `state_pinned_until`, its units from `pin_first[band]` on.
    """

    __slots__ = (
        "below",
        "born",
        "children",
        "end",
        "first",
        "floor",
        "forks",
        "gone",
        "hits",
        "kind",
        "locks",
        "pages",
        "parent",
        "passed",
        "pin_first",
        "pinned_until",
        "priority",
        "queued",
        "reach",
        "serial",
        "sharers",
        "slot",
        "space",
        "stamps",
        "start",
        "starts",
        "state_locks",
        "state_pinned_until",
        "tail",
        "tokens",
        "usable",
        "visit",
        "worth",
    )

    def __init__(
        self, serial: int, parent: Node | None, space: Space, start: int, tokens: bytes, pages: Int32s, bands: int
    ) -> None:
        self.serial = serial
        self.parent = parent
        self.space = space
        self.start = start
        self.end = start + len(pages)
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Node] = {}  # by the tokens of a child's first page
        self.first = [self.end] * bands
        self.floor = [self.end] * bands
        self.pin_first = [self.end] * bands
        self.starts: list[dict[int, int]] = [{} for _ in range(bands)]
        self.slot = 0
        self.locks = 0
        self.state_locks = 0
        self.stamps = [0] * bands
        self.born = self.hits = self.kind = self.worth = self.forks = 0
        self.priority = self.sharers = 0
        self.passed = self.tail = self.gone = False
        self.visit: Visit | None = None
        self.usable = True
        self.reach, self.below = [0] * bands, [0] * bands
        self.pinned_until = self.state_pinned_until = 0
        # Under what a component waits for eviction, in the tree's queues and in its namespace's.
        self.queued = [NOT_QUEUED] * (2 * bands)

    def split(self, at: int, serial: int, page_bytes: int) -> Node:
        """Cut the node before page `at`; returns the new upper part. This one keeps the end, the state and children."""
        assert self.start < at < self.end, "a node is cut inside"
        assert self.parent is not None, "a root has no pages"
        count, bands = at - self.start, len(self.first)
        tokens, pages = self.tokens[: count * page_bytes], self.pages[:count]
        upper = Node(serial, self.parent, self.space, self.start, tokens, pages, bands)
        self.parent.children[upper.tokens[:page_bytes]] = upper
        self.tokens, self.pages = self.tokens[count * page_bytes :], self.pages[count:]
        self.start, self.parent = at, upper
        upper.children[self.tokens[:page_bytes]] = self
        upper.locks, upper.stamps = self.locks, list(self.stamps)
        upper.born, upper.hits, upper.priority = self.born, self.hits, self.priority
        upper.visit, upper.tail, upper.sharers = self.visit, self.tail, self.sharers
        upper.pinned_until = self.pinned_until
        for marks, theirs in ((self.first, upper.first), (self.floor, upper.floor), (self.pin_first, upper.pin_first)):
            for band in range(bands):
                theirs[band], marks[band] = min(marks[band], at), max(marks[band], at)
        for band in range(bands):
            below: dict[int, int] = {}
            for page, readers in self.starts[band].items():
                if page < at:
                    upper.starts[band][page] = readers
                below[max(page, at)] = below.get(max(page, at), 0) + readers
            self.starts[band] = below
        return upper

    def content(self) -> list[Any]:
        """What the state digest covers of this node alone."""
        locked = [sorted(starts.items()) for starts in self.starts]
        identity = [self.serial, self.start, self.tokens, self.pages.tobytes()]
        held = [*identity, self.first, self.slot, self.locks, locked, self.state_locks, self.stamps]
        visit = self.visit.content() if self.visit is not None else 0
        used = [self.born, self.hits, self.priority, self.kind, visit, self.forks, self.tail, self.sharers]
        derived = [self.reach, self.below, self.usable, self.passed, self.worth]
        return [*held, *used, *derived, self.pinned_until, self.state_pinned_until, self.pin_first]


class Space:
    """One namespace: its name, its root (a node without pages), and the units per band that its nodes hold.

    `quota_bytes` is the most that those may take, -1 for no limit; a namespace with a limit has queues of its own.
    """

    __slots__ = ("held", "name", "quota_bytes", "root")

    def __init__(self, name: str, quota_bytes: int, bands: int, serial: int) -> None:
        self.name = name
        self.quota_bytes = quota_bytes
        self.held = [0] * bands
        self.root = Node(serial, None, self, 0, name.encode(), NO_PAGES, bands)


class Match(NamedTuple):
    """How far the tree knows a sequence; it holds nothing until it is locked.

    `tokens` can be used, `matched_tokens` full-attention pages alone would give. `cut` is what ended the usable part:
    empty (all that was asked for), `full` (the tree knows no more tokens) or the name of the band that cut. `pages`
    (int32) are the usable part's virtual pages, `window_first[band]` the first of them whose window unit the next token
    reads, `slot` the state after it (0: none). The first `asked_tokens` were looked up, at the tree's `version`. `node`
    is where the usable part ends, `deepest` where the known one does.
    """

    namespace: str
    tokens: int
    matched_tokens: int
    cut: str
    pages: Int32s
    window_first: tuple[int, ...]
    slot: int
    node: Node | None
    deepest: Node | None
    asked_tokens: int
    version: int


class Reader(NamedTuple):
    """Who reads: its `priority`, the length of its prompt (0: not known), and whether it goes on after a retraction."""

    priority: int = 0
    prompt_tokens: int = 0
    resumed: bool = False


@dataclass(slots=True, eq=False)
class Lock:
    """What one reader holds: the whole path to `node`, each window from `first[band]` on, and `state_node`'s state.

    `pages` is where it ends, `hit_pages` where it ended when it was made, in `hit_node`: what lies before was found,
    not given. `reader` is who reads, `made_ms` when it began, `matched_tokens` what the tree knew of it then, and
    `before` the visit from which it seems to go on.
    """

    namespace: str
    node: Node
    pages: int
    hit_pages: int
    first: list[int]
    hit_node: Node
    reader: Reader
    made_ms: int
    matched_tokens: int
    before: Visit | None = None
    state_node: Node | None = None

    def content(self) -> list[Any]:
        """What the state digest covers of this lock."""
        state = self.state_node.serial if self.state_node is not None else -1
        place = [self.node.serial, self.pages, self.hit_pages, self.first, state]
        before = self.before.content() if self.before is not None else 0
        return [*place, self.hit_node.serial, self.reader, self.made_ms, self.matched_tokens, before]


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
