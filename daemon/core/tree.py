"""The prefix tree: what is cached of which sequences, who reads it, and what can be given back.

Owns cached pages, window units and states by token content, per namespace, and is the one way to them; the parts lie in
`tree_*`. Must never touch the logical chain, read a clock or decide when something is evicted: it says which ids come
free, and the core frees them. Ids are only numbers here. Components of a node can be gone while others remain (a
tombstone): a page without its window unit, a path without states.

    match -> lock -> (advance, insert)* -> unlock          lock: full pages along the whole path
    evict, flush: leaves from their end, windows from      windows only where the reader still reads
                  their front, states                      state until the copy of the hit was processed

Invariants: `reclaimable` is exactly what `evict` can free, cascades and pins included, because `locks` of a parent are
never fewer than a child's and a node without them has no other lock; a page is named once; `held` counts what nodes
hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from allocator.capacity import Demand
from allocator.columns import Int32s, Int64s
from allocator.errors import InvariantBroken
from allocator.geometry import BandGeometry
from daemon.core import tree_give, tree_locks
from daemon.core.eviction import PolicyOf, least_recently_used
from daemon.core.tree_check import check_locks, check_nodes, nodes_of, pinned_of, totals_of
from daemon.core.tree_give_up import Enough, Eviction
from daemon.core.tree_nodes import Inserted, Lock, Match, Reader
from daemon.core.tree_pins import Pins
from daemon.core.tree_scan import Scan
from daemon.core.tree_shape import TreeShape
from daemon.core.tree_state import TreeState, path_up

NOBODY = Reader()


def _no_quota(namespace: str) -> int:
    return -1


class PrefixTree:
    """The cached sequences of one epoch; `bands` in chain order, the owner last. See the module.

    `unit_bytes` are bytes of a unit per band on all stages (default: those that the bands say). `policy` ranks what
    goes first (default: what was used longest ago). `quota_of` says how many bytes a namespace may hold, -1: no limit;
    `pinned_bytes_max` what pins may name together, -1: no limit. Raises ValueError for what cannot be a tree.
    """

    def __init__(
        self,
        page_size: int,
        bands: Sequence[BandGeometry],
        policy: PolicyOf | None = None,
        unit_bytes: Sequence[int] | None = None,
        quota_of: Callable[[str], int] | None = None,
        pinned_bytes_max: int = -1,
    ) -> None:
        self.shape = TreeShape(page_size, bands, unit_bytes)
        self.page_size = page_size
        ranked = (policy or least_recently_used)(self.shape)
        self._tree = TreeState(self.shape, ranked, quota_of or _no_quota)
        self._pins = Pins(self.shape.count, pinned_bytes_max)

    # --- questions -----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Rises with every change of what a match could say."""
        return self._tree.version

    @property
    def open_locks(self) -> int:
        """Locks that were not let go."""
        return self._tree.open_locks

    def match(self, namespace: str, tokens: Int64s, limit_tokens: int) -> Match:
        """How far the tree knows the first `limit_tokens` of `tokens` (int64), rounded down to pages. Reads only."""
        shape, tree = self.shape, self._tree
        asked = max(0, min(limit_tokens, len(tokens)))
        limit = asked // shape.page_size
        data = tokens[: limit * shape.page_size].tobytes()
        scan = Scan(shape)
        space = tree.spaces.get(namespace)
        node = space.root if space is not None else None
        while node is not None and scan.matched < limit:
            node = tree.child(node, data, scan.matched, 0)
            if node is not None:
                scan.enter(node, scan.matched + tree.common(node, data, scan.matched, 0))
                if scan.matched < node.end:
                    break
        tokens_usable = scan.usable * shape.page_size
        slot = scan.node.slot if scan.node is not None and shape.state >= 0 else 0
        return Match(
            namespace=namespace,
            tokens=tokens_usable,
            matched_tokens=scan.matched * shape.page_size,
            cut=scan.cut(limit),
            pages=scan.pages(),
            window_first=shape.window_first(tokens_usable),
            slot=slot,
            node=scan.node,
            deepest=scan.deepest,
            asked_tokens=asked,
            version=tree.version,
        )

    def ahead(self, lock: Lock, tokens: Int64s) -> int:
        """How many pages of `tokens` (int64) the tree knows along the path that the lock ends on. Reads only.

        An index of pages, at least `lock.pages`, whether what lies ahead is usable or not.
        """
        tree, first = self._tree, lock.pages
        if not lock.node.children:
            return first
        data = tokens[first * self.page_size : len(tokens) // self.page_size * self.page_size].tobytes()
        node, at = lock.node, first
        while at == node.end:
            child = tree.child(node, data, at, first)
            if child is None:
                break
            at += tree.common(child, data, at, first)
            node = child
        return at

    def found(self, lock: Lock) -> int:
        """How many tokens a match of what this reader shares would give now; work grows with the nodes on its path."""
        scan = Scan(self.shape)
        for node in reversed(list(path_up(lock.node, lock.node.space.root))):
            scan.enter(node, node.end)
        return scan.usable * self.page_size

    def window_first(self, position: int) -> tuple[int, ...]:
        """Per band, the first page whose window unit a token at `position` reads; 0 where a band is no window."""
        return self.shape.window_first(position)

    def held(self) -> Demand:
        """Units that nodes hold, per band."""
        return tuple(self._tree.held)

    def locked(self) -> Demand:
        """Units that readers hold against eviction, per band."""
        return tuple(self._tree.locked)

    def reclaimable(self) -> Demand:
        """Units that `evict` can free, per band, pinned ones among them."""
        return tuple(held - locked for held, locked in zip(self._tree.held, self._tree.locked, strict=True))

    def pinned(self) -> Demand:
        """Units that pins name, per band."""
        return tuple(self._pins.units)

    @property
    def pins_refused(self) -> int:
        """Pins that would have named more than all may together."""
        return self._pins.refused

    @property
    def pins_dropped(self) -> int:
        """Pinned components that were given up before their time, because nothing else was left."""
        return self._pins.dropped

    def held_by(self, namespace: str) -> Demand:
        """Units that the nodes of one namespace hold, per band."""
        space = self._tree.spaces.get(namespace)
        return tuple(space.held) if space is not None else (0,) * self.shape.count

    def content(self) -> bytes:
        """Canonical bytes of everything that can influence a later answer, for the state digest."""
        return b"".join([*self._tree.content(), msgspec.msgpack.encode(self._pins.content())])

    # --- readers -------------------------------------------------------------------------------------------------

    def lock(self, match: Match, reader: Reader = NOBODY) -> Lock:
        """Hold a match against eviction, whatever it found; nothing may have changed since it was made."""
        return tree_locks.lock(self._tree, match, reader)

    def unlock(self, lock: Lock, touch: bool = True) -> None:
        """Let go; the lock is dead afterwards. `touch`: what it held was used. A refused plan says False."""
        tree_locks.unlock(self._tree, lock, touch)

    def release_state(self, lock: Lock, touch: bool = True) -> None:
        """The state that the lock's match ended with was copied: it may go."""
        tree_locks.release_state(self._tree, lock, touch)

    def advance(self, lock: Lock, band: int, first_page: int) -> None:
        """The reader's window moved up: it reads no unit of this band before `first_page` any more."""
        if first_page > lock.first[band]:
            tree_locks.move_window(self._tree, lock, band, first_page, self._tree.tick(), lock.hit_pages)

    def pin(self, match: Match, until_ns: int) -> bool:
        """What a hit of this match reads is to stay until then, if memory allows; False when pins name enough already.

        Nothing may have changed since the match was made. Pinned again, the later time holds.
        """
        return self._pins.pin(self._tree, match, until_ns)

    def at(self, now_ns: int) -> None:
        """Time passed: pins that lasted until now or shorter are over, and visits are that much older."""
        self._tree.now_ms = now_ns // 1_000_000
        if self._tree.visits is not None:
            self._tree.visits.now_ms = self._tree.now_ms
        if self._pins.ends:
            self._pins.expire(self._tree, now_ns)

    # --- changes -------------------------------------------------------------------------------------------------

    def insert(
        self,
        namespace: str,
        tokens: Int64s,
        pages: Int32s,
        window_first: Sequence[int],
        slot: int,
        lock: Lock,
        kind: int = 0,
    ) -> Inserted:
        """Give a row's pages to the tree, whole pages only; the row holds them through `lock`, extended in place.

        `tokens` (int64) are the sequence's positions whose KV is written, `pages` (int32) the row's table, at least as
        long, of which the tree owns the first `lock.pages`. `window_first[band]` is the first table index whose window
        unit the row still holds. `slot` is the state after exactly these tokens, or 0, kept for what `kind` says. A
        page that the tree already has wins over the row's; a window unit or a state that it lacks is taken over.
        """
        assert namespace == lock.namespace, "a row gives to the namespace it reads"
        return tree_give.insert(self._tree, tokens, pages, window_first, slot, lock, kind)

    def place_state(self, lock: Lock, pages: int, slot: int, kind: int = 0) -> bool:
        """Give the state in `slot` after the first `pages` pages of the lock's path; False when the tree has one."""
        return tree_give.place_state(self._tree, lock, pages, slot, kind)

    def evict(self, enough: Enough, only: int | None = None) -> tuple[Int32s, ...]:
        """Give up components, of one band only or of all, until `enough` says so of the units freed; ids per band.

        What namespaces hold beyond their quota goes first. Of the last victim no more goes than is needed; `enough`
        must stay true when more is freed.
        """
        tree = self._tree
        tree.version += 1
        eviction = Eviction(tree, self._pins, enough)
        for name in sorted(tree.over):
            if eviction.shrink(tree.spaces[name], only):
                return eviction.parts
        eviction.walk(tree.order, only)
        return eviction.parts

    def shrink(self, namespace: str) -> tuple[Int32s, ...]:
        """Give up what a namespace holds beyond its quota, as far as nobody reads it; ids per band."""
        tree = self._tree
        eviction = Eviction(tree, self._pins, lambda freed: False)
        if namespace in tree.over:
            tree.version += 1
            eviction.shrink(tree.spaces[namespace], None)
        return eviction.parts

    def flush(self) -> tuple[Int32s, ...]:
        """Give up everything that nobody holds, pinned or not; ids per band."""
        return self.evict(lambda freed: False)

    def check(self, locks: Sequence[Lock] | None = None) -> None:
        """Recount everything; raises InvariantBroken. With `locks`: they are all there are."""
        tree, shape = self._tree, self.shape
        roots, windows = tree.roots(), [band for band, _ in shape.windows]
        check_nodes(roots, shape.page_bytes, windows)
        held, locked = totals_of(roots, shape.count, shape.owner, shape.state, windows)
        if (held, locked) != (tree.held, tree.locked):
            detail = f"counted {held} held, {locked} locked; kept {tree.held} and {tree.locked}"
            raise InvariantBroken("core.prefix_tree", detail)
        for name, space in tree.spaces.items():
            counted = totals_of([space.root], shape.count, shape.owner, shape.state, windows)[0]
            if counted != space.held:
                detail = f"namespace {name!r} holds {counted}, and {space.held} are counted"
                raise InvariantBroken("core.prefix_tree", detail)
        pinned = pinned_of(tree, roots)
        if pinned != self._pins.units:
            raise InvariantBroken("core.prefix_tree", f"pins name {pinned} units, and {self._pins.units} are counted")
        for node in nodes_of(roots):
            tree.order.check(node)
            if node.space.quota_bytes >= 0:
                tree.space_orders[node.space.name].check(node)
        if locks is not None:
            if len(locks) != tree.open_locks:
                raise InvariantBroken("core.prefix_tree", f"{tree.open_locks} locks are open, not {len(locks)}")
            check_locks(roots, windows, locks)
