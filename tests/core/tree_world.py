"""A world for the prefix tree: the tree beside a flat list of every cached page, compared after every operation.

The flat model knows nothing of nodes: for each cached prefix (a tuple of tokens, whole pages) the page id, which window
bands have its unit, and the state slot behind it. Readers are prefixes too. Every answer of the tree must
follow from that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from allocator.capacity import Demand
from allocator.columns import Int32s
from allocator.geometry import BandGeometry
from daemon.core.eviction import POLICIES
from daemon.core.tree import PrefixTree
from daemon.core.tree_nodes import Lock, Match, Node, Reader

Prefix = tuple[int, ...]


def bands(windows: tuple[int, ...] = (), state: bool = False) -> list[BandGeometry]:
    """Bands in chain order."""
    chain = [BandGeometry("state", "state", 64)] if state else []
    chain += [BandGeometry(f"window:{window}", "window", 8, window) for window in sorted(windows, reverse=True)]
    return [*chain, BandGeometry("full", "full", 16)]


@dataclass
class Entry:
    """One cached page."""

    page: int
    windows: set[int]
    slot: int = 0


@dataclass(eq=False)
class Row:
    """A reader that computes: its tokens, its page table, and from where on it holds window units."""

    namespace: str
    tokens: list[int]
    lock: Lock
    match: Match
    pages: list[int]
    first: list[int]
    copying: bool = False  # the state of its hit is still held
    slots: list[int] = field(default_factory=list)

    def locked_prefix(self, page_size: int) -> Prefix:
        """What its lock must cover."""
        return tuple(self.tokens[: self.lock.pages * page_size])


class TreeWorld:
    """Operations on both sides; every one ends with a full comparison."""

    def __init__(
        self,
        page_size: int,
        chain: list[BandGeometry],
        policy: str = "lru",
        quota_bytes: dict[str, int] | None = None,
        pinned_bytes_max: int = -1,
    ) -> None:
        self.page_size, self.chain = page_size, chain
        quotas = quota_bytes or {}
        self.tree = PrefixTree(
            page_size, chain, POLICIES[policy], None, lambda name: quotas.get(name, -1), pinned_bytes_max
        )
        self.quotas = quotas
        self.now_ms = 0
        self.cache: dict[str, dict[Prefix, Entry]] = {}
        self.rows: list[Row] = []
        self.live_pages: set[int] = set()
        self.live_slots: set[int] = set()
        self.windows = [b for b, band in enumerate(chain) if band.kind == "window"]
        self.state = next((b for b, band in enumerate(chain) if band.kind == "state"), -1)
        self.owner = len(chain) - 1

    # --- operations ------------------------------------------------------------------------------------------------

    def enter(self, tokens: list[int], namespace: str = "", limit: int | None = None, refused: bool = False) -> Row:
        """A request matches, locks, and takes pages for the rest of its tokens; a refused one lets go at once."""
        limit = max(0, len(tokens) - 1) if limit is None else limit
        match = self.tree.match(namespace, np.array(tokens, np.int64), limit)
        self.check_match(namespace, tokens, limit, match)
        lock = self.tree.lock(match, Reader(len(tokens) % 3, len(tokens)))
        count = len(tokens) // self.page_size
        fresh = [] if refused else self.fresh_pages(count - len(match.pages))
        first = list(match.window_first)
        row = Row(namespace, list(tokens), lock, match, match.pages.tolist() + fresh, first, match.slot > 0)
        self.rows.append(row)
        self.compare()
        if refused:
            self.rows.remove(row)
            self.tree.unlock(lock, touch=False)
            self.compare()
        return row

    def more(self, row: Row, tokens: list[int]) -> None:
        """The row computes further tokens."""
        row.tokens += tokens
        row.pages += self.fresh_pages(len(row.tokens) // self.page_size - len(row.pages))

    def retire(self, row: Row, band: int, first: int) -> None:
        """The row's window moves up: its own units are freed, the tree's are read no more."""
        if first > row.first[band]:
            row.first[band] = first
            self.tree.advance(row.lock, band, first)
            self.compare()

    def copied(self, row: Row) -> None:
        """The state of the row's hit was copied."""
        if row.copying:
            row.copying = False
            self.tree.release_state(row.lock)
            self.compare()

    def give(self, row: Row, pages: int, with_state: bool = False) -> None:
        """The row gives its first pages to the tree."""
        pages = max(row.lock.pages, min(pages, len(row.tokens) // self.page_size))
        slot = self.fresh_slot() if with_state and self.state >= 0 else 0
        before, table = row.lock.pages, list(row.pages)
        given = self.tree.insert(
            row.namespace,
            np.array(row.tokens[: pages * self.page_size], np.int64),
            np.array(row.pages, np.int32),
            tuple(row.first),
            slot,
            row.lock,
        )
        assert (given.first, given.tokens) == (before, pages * self.page_size)
        row.pages[before:pages] = given.pages.tolist()
        self._check_given(row, table, before, pages, slot, given.free, given.rebinds, given.slot_kept)
        assert given.duplicates == len(given.free[self.owner])
        if slot and not given.slot_kept:
            self.live_slots.remove(slot)
        self.compare()

    def leave(self, row: Row) -> None:
        """The row ends: what it did not give is freed."""
        own = row.pages[row.lock.pages :]
        self.live_pages -= set(own)
        self.rows.remove(row)
        self.tree.unlock(row.lock)
        self.compare()

    def evict(self, wanted: dict[int, int], only: int | None = None) -> Demand:
        """Evict until so many units of each named band are free; returns what was freed."""
        before, most = self.tree.reclaimable(), self._most(only)

        def enough(freed: Demand) -> bool:
            return all(freed[band] >= count for band, count in wanted.items())

        freed = self._freed(self.tree.evict(enough, only))
        possible = all(most[band] >= count for band, count in wanted.items())
        assert enough(freed) == possible, "what is counted can be freed, and no more"
        if not possible and only is None:
            assert freed == before, "what does not suffice was still everything"
        if only is not None and only != self.owner:
            assert sum(freed) == freed[only], "only one band's component went"
        self.compare()
        return freed

    def wait(self, ms: int) -> None:
        """Time passes."""
        self.now_ms += ms
        self.tree.at(self.now_ms * 1_000_000)
        self.compare()

    def pin(self, tokens: list[int], namespace: str, ms: int) -> bool:
        """What the tree knows of these tokens is to stay for so long."""
        match = self.tree.match(namespace, np.array(tokens, np.int64), len(tokens))
        before = self.tree.reclaimable()
        done = self.tree.pin(match, (self.now_ms + ms) * 1_000_000)
        assert self.tree.reclaimable() == before, "a pin holds nothing against a reader"
        self.compare()
        return done

    def shrink(self, namespace: str) -> Demand:
        """What a namespace holds beyond its quota and nobody reads goes: not a unit more, and none of others."""
        others = {name: self.tree.held_by(name) for name in self.cache if name != namespace}
        freed = self._freed(self.tree.shrink(namespace))
        assert others == {name: self.tree.held_by(name) for name in others}
        over = self.tree.shape.bytes_of(self.tree.held_by(namespace)) - self.quotas.get(namespace, 1 << 60)
        if over > 0:
            for prefix, entry in self.cache.get(namespace, {}).items():
                page, windows, state = self._reading(namespace, prefix)
                assert page, "what is beyond a quota is read"
                assert entry.windows <= windows
                assert state or not entry.slot
        self.compare()
        return freed

    def flush(self) -> Demand:
        """Evict everything unlocked: exactly what was called reclaimable."""
        before = self.tree.reclaimable()
        freed = self._freed(self.tree.flush())
        assert freed == before
        assert not any(self.tree.reclaimable())
        self.compare()
        return freed

    # --- numbers -----------------------------------------------------------------------------------------------

    def fresh_pages(self, count: int) -> list[int]:
        """Lowest page ids nobody holds."""
        ids: list[int] = []
        page = 1
        while len(ids) < count:
            if page not in self.live_pages:
                ids.append(page)
            page += 1
        self.live_pages |= set(ids)
        return ids

    def fresh_slot(self) -> int:
        """The lowest slot nobody holds."""
        slot = next(slot for slot in range(1, len(self.live_slots) + 2) if slot not in self.live_slots)
        self.live_slots.add(slot)
        return slot

    # --- the flat model ----------------------------------------------------------------------------------------

    def check_match(self, namespace: str, tokens: list[int], limit: int, match: Match) -> None:
        """The longest usable prefix, found by trying every one."""
        cache, size = self.cache.get(namespace, {}), self.page_size
        most = min(limit, len(tokens)) // size
        known = 0
        while known < most and tuple(tokens[: (known + 1) * size]) in cache:
            known += 1
        usable = max(m for m in range(known + 1) if all(self._allows(b, cache, tokens, m) for b in self._demanding()))
        assert match.matched_tokens == known * size
        assert match.tokens == usable * size
        path = [cache[tuple(tokens[: (k + 1) * size])] for k in range(usable)]
        assert match.pages.tolist() == [entry.page for entry in path]
        assert match.slot == (path[-1].slot if path else 0)
        for band in self.windows:
            assert match.window_first[band] == max(0, usable * size - self.chain[band].window_tokens + 1) // size
        if usable == most:
            assert match.cut == ""
        elif usable == known:
            assert match.cut == "full"
        else:
            names = [self.chain[b].name for b in self._demanding()]
            reach = [max(m for m in range(known + 1) if self._allows(b, cache, tokens, m)) for b in self._demanding()]
            assert match.cut == names[reach.index(min(reach))]

    def _demanding(self) -> list[int]:
        return sorted([*self.windows, *([self.state] if self.state >= 0 else [])])

    def _allows(self, band: int, cache: dict[Prefix, Entry], tokens: list[int], m: int) -> bool:
        size = self.page_size
        path = [cache[tuple(tokens[: (k + 1) * size])] for k in range(m)]
        if band == self.state:
            return m == 0 or path[-1].slot > 0
        window = self.chain[band].window_tokens
        read = {position // size for position in range(max(0, m * size - window + 1), m * size)}
        return all(band in path[k].windows for k in read)

    def _check_given(
        self,
        row: Row,
        table: list[int],
        before: int,
        pages: int,
        slot: int,
        free: tuple[Int32s, ...],
        rebinds: list[tuple[int, Int32s, Int32s]],
        kept: bool,
    ) -> None:
        cache = self.cache.setdefault(row.namespace, {})
        freed: dict[int, list[int]] = {b: [] for b in range(len(self.chain))}
        moved: dict[int, dict[int, int]] = {b: {} for b in self.windows}
        for k in range(before, pages):
            prefix = tuple(row.tokens[: (k + 1) * self.page_size])
            held = {band for band in self.windows if k >= row.first[band]}
            entry = cache.get(prefix)
            if entry is None:
                cache[prefix] = Entry(table[k], held)
                continue
            freed[self.owner].append(table[k])
            for band in sorted(held):
                if band in entry.windows:
                    freed[band].append(table[k])
                else:
                    moved[band][table[k]] = entry.page
                    entry.windows.add(band)
        assert [sorted(ids.tolist()) for ids in free] == [sorted(freed[b]) for b in range(len(self.chain))]
        for band, sources, targets in rebinds:
            assert sources.tolist() == sorted(moved[band])
            assert dict(zip(sources.tolist(), targets.tolist(), strict=True)) == moved.pop(band)
        assert not any(moved.values())
        self.live_pages -= set(freed[self.owner])
        end = cache.get(tuple(row.tokens[: pages * self.page_size]))
        assert kept == bool(slot and end is not None and not end.slot)
        if kept and end is not None:
            end.slot = slot

    def _reading(self, namespace: str, prefix: Prefix) -> tuple[bool, set[int], bool]:
        """Whether a page is read, its windows that are, and whether its state is."""
        size = self.page_size
        page, windows, state = False, set[int](), False
        for row in self.rows:
            locked = row.locked_prefix(size)
            if row.namespace != namespace or locked[: len(prefix)] != prefix:
                continue
            page = True
            windows |= {band for band in self.windows if len(prefix) // size - 1 >= row.lock.first[band]}
            state |= row.copying and len(row.match.pages) * size == len(prefix)
        return page, windows, state

    def reclaimable(self) -> Demand:
        """Units that no reader holds, and that go when what does not hold them goes."""
        units = [0] * len(self.chain)
        for namespace, cache in self.cache.items():
            for prefix, entry in cache.items():
                page, windows, state = self._reading(namespace, prefix)
                units[self.owner] += not page
                for band in entry.windows - windows:
                    units[band] += 1
                if entry.slot and not state:
                    units[self.state] += 1
        return tuple(units)

    def _most(self, only: int | None) -> Demand:
        """What an eviction of one band's component alone could free: of the owner, pages and what hangs on them."""
        units = self.reclaimable()
        return tuple(count if only in (None, band) else 0 for band, count in enumerate(units))

    def _freed(self, parts: tuple[Int32s, ...]) -> Demand:
        """Apply freed ids to the model: each was there, unread, and no page stays below a page that went."""
        where = {e.page: (n, p) for n, cache in self.cache.items() for p, e in cache.items()}
        slots = {e.slot: (n, p) for n, cache in self.cache.items() for p, e in cache.items() if e.slot}
        gone = set(parts[self.owner].tolist())
        for band, column in enumerate(parts):
            ids = column.tolist()
            assert len(set(ids)) == len(ids)
            for id in ids:
                namespace, prefix = slots[id] if band == self.state else where[id]
                page, windows, state = self._reading(namespace, prefix)
                entry = self.cache[namespace][prefix]
                if band == self.state:
                    assert not state
                    entry.slot = 0
                    self.live_slots.remove(id)
                elif band == self.owner:
                    assert not page
                else:
                    assert band not in windows
                    entry.windows.remove(band)
        for id in sorted(gone):
            namespace, prefix = where[id]
            entry = self.cache[namespace].pop(prefix)
            assert not entry.windows, "a page goes with its window units"
            assert not entry.slot, "a page goes with the state behind it"
        self.live_pages -= gone
        for cache in self.cache.values():
            assert all(len(p) == self.page_size or p[: -self.page_size] in cache for p in cache), "a page was orphaned"
        return tuple(len(column) for column in parts)

    # --- comparison --------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """The tree holds exactly what the model does, and says so."""
        self.tree.check([row.lock for row in self.rows])
        flat: dict[str, dict[Prefix, Entry]] = {}
        for namespace, space in self.tree._tree.spaces.items():
            flat[namespace] = {}
            stack: list[tuple[Prefix, Node]] = [((), space.root)]
            while stack:
                prefix, node = stack.pop()
                if node.parent is not None:
                    tokens = np.frombuffer(node.tokens, np.int64).tolist()
                    for index, page in enumerate(node.pages.tolist()):
                        prefix += tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
                        has = {band for band in self.windows if node.start + index >= node.first[band]}
                        flat[namespace][prefix] = Entry(page, has)
                    flat[namespace][prefix].slot = node.slot
                stack += [(prefix, child) for child in node.children.values()]
        assert {n: c for n, c in flat.items() if c} == {n: c for n, c in self.cache.items() if c}
        assert self.tree.reclaimable() == self.reclaimable()
        for row in self.rows:
            for index, page in enumerate(row.pages[: row.lock.pages]):
                entry = self.cache[row.namespace][tuple(row.tokens[: (index + 1) * self.page_size])]
                assert entry.page == page, "a reader's page stays where it is"
                for band in self.windows:
                    assert index < row.lock.first[band] or band in entry.windows, "what is read stays"


Check = Callable[[TreeWorld], None]
