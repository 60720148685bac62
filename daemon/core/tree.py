"""The prefix tree: what is cached of which sequences, who reads it, and what can be given back.

Owns cached pages, window units and states by token content, per namespace. Must never touch the logical chain, read a
clock or decide when something is evicted: it says which ids come free, and the core frees them. Ids are only numbers
here. Components of a node can be gone while others remain (a tombstone): a page without its window unit, a path
without states.

    match -> lock -> (advance, insert)* -> unlock          lock: full pages along the whole path
    evict, flush: leaves from their end, windows from      windows only where the reader still reads
                  their front, states                      state until the copy of the hit was processed

Invariants: `reclaimable` is exactly what `evict` can free, cascades included, because `locks` of a parent are never
fewer than a child's and a node without them has no other lock; a page is named once; `held` counts what nodes hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from allocator.capacity import Demand
from allocator.columns import Int32s, Int64s
from allocator.errors import InvariantBroken
from allocator.geometry import BandGeometry
from daemon.core.tree_check import check_locks, check_nodes, nodes_of, totals_of
from daemon.core.tree_gift import Gift
from daemon.core.tree_nodes import Inserted, Lock, Match, Node
from daemon.core.tree_order import EvictionOrder, LeastRecentlyUsed, Policy
from daemon.core.tree_scan import NO_PAGES, Scan

TOKEN_BYTES = 8
GROW_PAGES_MAX = 512  # a leaf of so many pages does not grow: growing copies it


class PrefixTree:
    """The cached sequences of one epoch; `bands` in chain order, the owner last. See the module."""

    def __init__(self, page_size: int, bands: Sequence[BandGeometry], policy: Policy | None = None) -> None:
        if page_size < 1 or not bands or bands[-1].kind != "full":
            raise ValueError(f"a tree needs pages of at least one token, not {page_size}, and an owner band at the end")
        self.page_size = page_size
        self.bands = tuple(bands)
        self.owner = len(bands) - 1
        self.state = next((index for index, band in enumerate(bands) if band.kind == "state"), -1)
        self.windows = tuple((b, band.window_tokens) for b, band in enumerate(bands) if band.kind == "window")
        self.open_locks = 0
        self.version = 0  # rises with every change of what a match could say
        self._roots: dict[str, Node] = {}
        self._page_bytes = page_size * TOKEN_BYTES
        self._order = EvictionOrder(len(bands), self.owner, self.state, policy or LeastRecentlyUsed())
        self._held = [0] * len(bands)
        self._locked = [0] * len(bands)
        self._clock = 0
        self._serial = 0

    # --- questions -----------------------------------------------------------------------------------------------

    def match(self, namespace: str, tokens: Int64s, limit_tokens: int) -> Match:
        """How far the tree knows the first `limit_tokens` of `tokens` (int64), rounded down to pages. Reads only."""
        asked = max(0, min(limit_tokens, len(tokens)))
        limit = asked // self.page_size
        data = tokens[: limit * self.page_size].tobytes()
        scan = Scan(self.page_size, self.bands, self.state)
        node = self._roots.get(namespace)
        while node is not None and scan.matched < limit:
            node = self._child(node, data, scan.matched, 0)
            if node is not None:
                scan.enter(node, scan.matched + self._common(node, data, scan.matched, 0))
                if scan.matched < node.end:
                    break
        tokens_usable = scan.usable * self.page_size
        slot = scan.node.slot if scan.node is not None and self.state >= 0 else 0
        return Match(
            namespace=namespace,
            tokens=tokens_usable,
            matched_tokens=scan.matched * self.page_size,
            cut=scan.cut(limit),
            pages=scan.pages(),
            window_first=self.window_first(tokens_usable),
            slot=slot,
            node=scan.node,
            asked_tokens=asked,
            version=self.version,
        )

    def found(self, lock: Lock) -> int:
        """How many tokens a match of what this reader shares would give now; work grows with the nodes on its path."""
        path, node = [lock.node], lock.node.parent
        while node is not None:
            path.append(node)
            node = node.parent
        scan = Scan(self.page_size, self.bands, self.state)
        for node in reversed(path[:-1]):  # the root has no pages
            scan.enter(node, node.end)
        return scan.usable * self.page_size

    def window_first(self, position: int) -> tuple[int, ...]:
        """Per band, the first page whose window unit a token at `position` reads; 0 where a band is no window."""
        first = [0] * len(self.bands)
        for band, window in self.windows:
            first[band] = max(0, position - window + 1) // self.page_size
        return tuple(first)

    def held(self) -> Demand:
        """Units that nodes hold, per band."""
        return tuple(self._held)

    def locked(self) -> Demand:
        """Units that readers hold against eviction, per band."""
        return tuple(self._locked)

    def reclaimable(self) -> Demand:
        """Units that `evict` can free, per band."""
        return tuple(held - locked for held, locked in zip(self._held, self._locked, strict=True))

    def content(self) -> bytes:
        """Canonical bytes of everything that can influence a later answer, for the state digest."""
        totals = [self._held, self._locked, self._clock, self._serial, self.open_locks]
        parts = [msgspec.msgpack.encode(totals)]
        for namespace in sorted(self._roots):
            parts.append(msgspec.msgpack.encode(namespace))
            stack = [self._roots[namespace]]
            while stack:
                node = stack.pop()
                parts.append(msgspec.msgpack.encode(node.content()))
                stack += [node.children[key] for key in sorted(node.children)]
        return b"".join(parts)

    # --- locks ---------------------------------------------------------------------------------------------------

    def lock(self, match: Match) -> Lock:
        """Hold a match against eviction, whatever it found; nothing may have changed since it was made."""
        assert match.version == self.version, "a match is locked before the tree changes"
        pages = len(match.pages)
        node = match.node
        if node is None:
            node = self._root(match.namespace)
        elif node.end > pages:
            node = self._split(node, pages)
        lock = Lock(match.namespace, node, pages, pages, list(match.window_first))
        self._hold_path(node, None)
        self._hold_windows(lock, node, None)
        if match.slot:
            assert node.slot == match.slot, "a match with state ends where the state is"
            lock.state_node = node
            node.state_locks += 1
            if node.state_locks == 1:
                self._locked[self.state] += 1
        self.open_locks += 1
        return lock

    def unlock(self, lock: Lock, touch: bool = True) -> None:
        """Let go; the lock is dead afterwards. `touch`: what it held was used. A refused plan says False."""
        assert self.open_locks > 0, "a lock is let go once"
        if lock.state_node is not None:
            self.release_state(lock, touch)
        stamp = self._tick() if touch else -1
        for band, _ in self.windows:
            self._move_window(lock, band, lock.pages, stamp, lock.pages)
        self.open_locks -= 1
        node = lock.node
        while True:
            assert node.locks > 0, "a path is let go as often as it was held"
            node.locks -= 1
            if touch:
                node.stamps[self.owner] = stamp
            if not node.locks:
                self._locked[self.owner] -= node.end - node.start
                self._order.offer(node, self.owner)
            if node.parent is None:
                break
            node = node.parent
        if touch and self.state >= 0:
            self._touch_checkpoint(lock.node, stamp)
        self._drop_if_empty(node)

    def _touch_checkpoint(self, node: Node, stamp: int) -> None:
        """The state nearest to a reader's end is where a continuation starts: it was used, as what it reads was."""
        at: Node | None = node
        while at is not None and not at.slot:
            at = at.parent
        if at is None:
            return
        at.stamps[self.state] = stamp
        self._order.offer(at, self.state)
        first = self.window_first(at.end * self.page_size)
        for band, _ in self.windows:
            before: Node | None = at
            while before is not None and before.end > first[band]:
                before.stamps[band] = stamp
                self._order.offer(before, band)
                before = before.parent

    def release_state(self, lock: Lock, touch: bool = True) -> None:
        """The state that the lock's match ended with was copied: it may go."""
        node = lock.state_node
        assert node is not None, "a state is released once"
        assert node.state_locks > 0, "a state is let go as often as it was held"
        lock.state_node = None
        node.state_locks -= 1
        if not node.state_locks:
            self._locked[self.state] -= 1
        if touch:
            node.stamps[self.state] = self._tick()
        self._order.offer(node, self.state)

    def advance(self, lock: Lock, band: int, first_page: int) -> None:
        """The reader's window moved up: it reads no unit of this band before `first_page` any more."""
        if first_page > lock.first[band]:
            self._move_window(lock, band, first_page, self._tick(), lock.hit_pages)

    # --- changes -------------------------------------------------------------------------------------------------

    def insert(
        self,
        namespace: str,
        tokens: Int64s,
        pages: Int32s,
        window_first: Sequence[int],
        slot: int,
        lock: Lock,
    ) -> Inserted:
        """Give a row's pages to the tree, whole pages only; the row holds them through `lock`, extended in place.

        `tokens` (int64) are the sequence's positions whose KV is written, `pages` (int32) the row's table, at least as
        long, of which the tree owns the first `lock.pages`. `window_first[band]` is the first table index whose window
        unit the row still holds. `slot` is the state after exactly these tokens, or 0. A page that the tree already
        has wins over the row's; a window unit or a state that it lacks is taken over.
        """
        assert namespace == lock.namespace, "a row gives to the namespace it reads"
        first, last = lock.pages, len(tokens) // self.page_size
        assert first <= last <= len(pages), "what is given ends behind what is held, and has pages"
        if last == first and not (slot and last):
            return Inserted(last * self.page_size, first, NO_PAGES, 0, (NO_PAGES,) * len(self.bands), [], False)
        data = tokens[first * self.page_size : last * self.page_size].tobytes()
        gift = Gift(pages, window_first)
        stamp = self._tick()
        node, now = lock.node, pages[first:last].copy()
        self.version += 1
        for band, _ in self.windows:
            self.advance(lock, band, window_first[band])
        while node.end < last:
            at = node.end
            child = self._child(node, data, at, first)
            if child is None and node is lock.node and self._grows(node, gift):
                self._grow(lock, data, pages[at:last], gift, stamp)
                child = node
            elif child is None:
                child = self._attach(node, data[(at - first) * self._page_bytes :], pages[at:last], gift, stamp)
            else:
                end = at + self._common(child, data, at, first)
                child = self._split(child, end) if end < child.end else child
                now[at - first : end - first] = child.pages
                self._give_duplicates(child, gift, stamp)
            node = child
        self._extend(lock, node)
        kept = bool(slot) and self._give_state(node, slot, stamp)
        free, rebinds = gift.result()
        return Inserted(last * self.page_size, first, now, gift.duplicates, free, rebinds, kept)

    def evict(self, enough: Callable[[Demand], bool], only: int | None = None) -> tuple[Int32s, ...]:
        """Give up components, of one band only or of all, until `enough` says so of the units freed; ids per band.

        Of the last victim no more goes than is needed; `enough` must stay true when more is freed.
        """
        self.version += 1
        freed = [0] * len(self.bands)
        parts: list[list[Int32s]] = [[] for _ in self.bands]

        def sufficient(more: Sequence[int]) -> bool:
            return enough(tuple(have + plus for have, plus in zip(freed, more, strict=True)))

        while not sufficient([0] * len(self.bands)):
            victim = self._order.pop(only)
            if victim is None:
                break
            node, band = victim
            if band == self.owner:
                gain = self._shrink_leaf(node, sufficient, parts)
            elif band == self.state:
                gain = self._drop_state(node, parts)
            else:
                gain = self._shrink_window(node, band, sufficient, parts)
            freed = [have + plus for have, plus in zip(freed, gain, strict=True)]
        return tuple(np.concatenate(ids) if ids else NO_PAGES for ids in parts)

    def flush(self) -> tuple[Int32s, ...]:
        """Give up everything that nobody holds; ids per band."""
        return self.evict(lambda freed: False)

    def check(self, locks: Sequence[Lock] | None = None) -> None:
        """Recount everything; raises InvariantBroken. With `locks`: they are all there are."""
        roots, windows = list(self._roots.values()), [band for band, _ in self.windows]
        check_nodes(roots, self._page_bytes, windows)
        held, locked = totals_of(roots, len(self.bands), self.owner, self.state, windows)
        if (held, locked) != (self._held, self._locked):
            detail = f"counted {held} held, {locked} locked; kept {self._held} and {self._locked}"
            raise InvariantBroken("core.prefix_tree", detail)
        for node in nodes_of(roots):
            self._order.check(node)
        if locks is not None:
            if len(locks) != self.open_locks:
                raise InvariantBroken("core.prefix_tree", f"{self.open_locks} locks are open, not {len(locks)}")
            check_locks(roots, windows, locks)

    # --- inside: paths -------------------------------------------------------------------------------------------

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._node(None, 0, namespace.encode(), NO_PAGES)
            self._roots[namespace] = root
        return root

    def _node(self, parent: Node | None, start: int, tokens: bytes, pages: Int32s) -> Node:
        self._serial += 1
        return Node(self._serial, parent, start, tokens, pages, len(self.bands))

    def _drop_if_empty(self, root: Node) -> None:
        """A namespace that holds nothing and that nobody reads is forgotten; a root's tokens are its name."""
        if not root.children and not root.locks:
            del self._roots[root.tokens.decode()]

    def _child(self, node: Node, data: bytes, at: int, base: int) -> Node | None:
        """The child that begins with page `at` of `data`, whose first page is `base`."""
        offset = (at - base) * self._page_bytes
        return node.children.get(data[offset : offset + self._page_bytes])

    def _common(self, node: Node, data: bytes, at: int, base: int) -> int:
        """Pages of `node` that equal those of `data` from page `at` on; at least one, it was found by its first."""
        offset = (at - base) * self._page_bytes
        if data.startswith(node.tokens, offset):
            return node.end - node.start
        theirs = np.frombuffer(node.tokens, np.int64)
        ours = np.frombuffer(data, np.int64, offset=offset)
        count = min(len(theirs), len(ours))
        differs = theirs[:count] != ours[:count]
        same = int(differs.argmax()) if differs.any() else count
        assert same >= self.page_size, "a child is found by its first page"
        return same // self.page_size

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node before page `at`; the upper part."""
        self.version += 1
        self._serial += 1
        upper = node.split(at, self._serial, self._page_bytes)
        for band, _ in self.windows:
            self._order.offer(upper, band)
        return upper

    def _hold_path(self, node: Node, above: Node | None) -> None:
        """One more reader of every page from `node` up to below `above` (None: the root too)."""
        at: Node | None = node
        while at is not above:
            assert at is not None, "a path leads to its root"
            at.locks += 1
            if at.locks == 1:
                self._locked[self.owner] += at.end - at.start
            at = at.parent

    def _hold_windows(self, lock: Lock, node: Node, above: Node | None) -> None:
        """The reader reads the units from `lock.first` on, in every node from `node` up to below `above`."""
        for band, _ in self.windows:
            at: Node | None = node
            while at is not above and at is not None and at.end > lock.first[band]:
                first = max(lock.first[band], at.start)
                at.starts[band][first] = at.starts[band].get(first, 0) + 1
                self._refloor(at, band)
                at = at.parent

    def _move_window(self, lock: Lock, band: int, first: int, stamp: int, touched: int) -> None:
        """The reader reads from page `first` on. Nodes it leaves were used at `stamp` if they end at or before
        page `touched`."""
        before = lock.first[band]
        node: Node | None = lock.node
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
                self._refloor(node, band)
                self._order.offer(node, band)
            node = node.parent
        lock.first[band] = first

    def _refloor(self, node: Node, band: int) -> None:
        """`floor` is where the first reader of this node's window units begins."""
        floor = min(node.starts[band], default=node.end)
        assert floor == node.end or node.first[band] <= floor, "what is read is there"
        self._locked[band] += node.floor[band] - floor
        node.floor[band] = floor

    # --- inside: what is given -----------------------------------------------------------------------------------

    def _attach(self, parent: Node, tokens: bytes, pages: Int32s, gift: Gift, stamp: int) -> Node:
        """A new leaf under `parent` with the row's pages and the window units it holds."""
        node = self._node(parent, parent.end, tokens, pages.copy())
        parent.children[tokens[: self._page_bytes]] = node
        node.stamps = [stamp] * len(self.bands)
        self._held[self.owner] += len(pages)
        for band, _ in self.windows:
            node.first[band] = gift.first_held(node, band)
            self._held[band] += node.end - node.first[band]
        return node

    def _grows(self, node: Node, gift: Gift) -> bool:
        """Whether a row's next pages can join the leaf its lock ends at, so that long paths have few nodes.

        Nobody else reads it, no state stands at its end, and its window units stay a suffix.
        """
        if node.parent is None or node.children or node.slot or node.locks > 1:
            return False
        if node.end - node.start >= GROW_PAGES_MAX:
            return False
        return all(node.first[band] == node.end or gift.held_from[band] <= node.end for band, _ in self.windows)

    def _grow(self, lock: Lock, tokens: bytes, pages: Int32s, gift: Gift, stamp: int) -> None:
        """The leaf that the lock ends at becomes longer, and the lock with it."""
        node, old = lock.node, lock.node.end
        assert node.locks == 1, "only its one reader lets a leaf grow"
        node.tokens += tokens
        node.pages = np.concatenate([node.pages, pages])
        node.end = lock.pages = old + len(pages)
        node.stamps = [stamp] * len(self.bands)
        self._held[self.owner] += len(pages)
        self._locked[self.owner] += len(pages)
        for band, _ in self.windows:
            if node.first[band] == old:
                node.first[band] = min(max(gift.held_from[band], old), node.end)
            self._held[band] += node.end - max(node.first[band], old)
            self._locked[band] -= old - node.floor[band]
            node.floor[band] = node.end
            if old <= lock.first[band] < node.end:
                node.starts[band][lock.first[band]] = 1
            self._refloor(node, band)
            self._order.offer(node, band)

    def _give_duplicates(self, node: Node, gift: Gift, stamp: int) -> None:
        """The tree has these pages: it takes over the window units that it lacks, the row's others are freed."""
        for band, _ in self.windows:
            gained = gift.merge_window(node, band)
            if gained:
                node.first[band] -= gained
                node.stamps[band] = stamp
                self._held[band] += gained
        gift.merge_pages(node, self.owner)

    def _give_state(self, node: Node, slot: int, stamp: int) -> bool:
        """Whether the tree keeps this state at the node's end."""
        assert self.state >= 0, "only a model with recurrent layers has states"
        if node.slot:
            return False
        node.slot = slot
        node.stamps[self.state] = stamp
        self._held[self.state] += 1
        self._order.offer(node, self.state)
        return True

    def _extend(self, lock: Lock, node: Node) -> None:
        """The reader holds the path down to `node`, and of windows what it held and what it gave."""
        old = lock.node
        if node is not old:
            self._hold_path(node, old)
            self._hold_windows(lock, node, old)
            lock.node, lock.pages = node, node.end
        at: Node | None = node
        while at is not old and at is not None:
            for band, _ in self.windows:
                self._order.offer(at, band)
            at = at.parent

    # --- inside: what is given up --------------------------------------------------------------------------------

    def _shrink_leaf(
        self, node: Node, sufficient: Callable[[Sequence[int]], bool], parts: list[list[Int32s]]
    ) -> list[int]:
        """Take the last pages of an unread leaf, as few as suffice or all, with what hangs on them."""
        assert self._order.evictable(node, self.owner), "a leaf that nobody reads"

        def gain(count: int) -> list[int]:
            units = [0] * len(self.bands)
            units[self.owner] = count
            for band, _ in self.windows:
                units[band] = node.end - max(node.first[band], node.end - count)
            if node.slot:
                units[self.state] = 1
            return units

        count = _fewest(node.end - node.start, lambda pages: sufficient(gain(pages)))
        units, start = gain(count), node.start
        if node.slot:
            self._drop_state(node, parts)
        for band in [*(band for band, _ in self.windows), self.owner]:
            if units[band]:
                parts[band].append(node.pages[node.end - units[band] - start :])
                self._held[band] -= units[band]
        self._cut_leaf(node, node.end - count)
        return units

    def _cut_leaf(self, node: Node, end: int) -> None:
        """The leaf ends at page `end` now, or is gone."""
        parent = node.parent
        assert parent is not None, "a root is no leaf"
        if end == node.start:
            del parent.children[node.tokens[: self._page_bytes]]
            for band in range(len(self.bands)):
                self._order.forget(node, band)
            if parent.parent is None:
                self._drop_if_empty(parent)
            self._order.offer(parent, self.owner)
            return
        count = end - node.start
        node.end, node.pages, node.tokens = end, node.pages[:count], node.tokens[: count * self._page_bytes]
        for band in range(len(self.bands)):
            node.first[band] = min(node.first[band], end)
            node.floor[band] = end
        self._order.offer(node, self.owner)

    def _drop_state(self, node: Node, parts: list[list[Int32s]]) -> list[int]:
        """Take the state of a node."""
        assert self._order.evictable(node, self.state), "a state that nobody reads"
        parts[self.state].append(np.array([node.slot], np.int32))
        node.slot = 0
        self._held[self.state] -= 1
        return [int(band == self.state) for band in range(len(self.bands))]

    def _shrink_window(
        self, node: Node, band: int, sufficient: Callable[[Sequence[int]], bool], parts: list[list[Int32s]]
    ) -> list[int]:
        """Take the first window units of a node that nobody reads, as few as suffice or all."""
        first = node.first[band]

        def gain(count: int) -> list[int]:
            return [count if index == band else 0 for index in range(len(self.bands))]

        count = _fewest(node.floor[band] - first, lambda units: sufficient(gain(units)))
        parts[band].append(node.pages[first - node.start : first - node.start + count])
        node.first[band] = first + count
        self._held[band] -= count
        self._order.offer(node, band)
        return gain(count)


def _fewest(most: int, suffices: Callable[[int], bool]) -> int:
    """The smallest count from 1 to `most` that suffices, or `most` when none does; monotone."""
    assert most > 0, "a victim has something to give"
    if most == 1 or not suffices(most):
        return most
    return 1 + bisect_left(range(1, most), True, key=suffices)
