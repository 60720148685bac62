"""Incidents and user reports that a prefix tree alone can have, by their names."""

from __future__ import annotations

from random import Random

import numpy as np

from allocator.capacity import Demand
from allocator.geometry import Geometry, StageGeometry
from allocator.logical.chain import LogicalChain
from daemon.core.tree import PrefixTree
from tests.core.test_tree import CHAINS, one_operation
from tests.core.tree_world import TreeWorld, bands


def test_incident_3_a_tombstone_leaf_is_counted_and_payable() -> None:
    """A node loses its checkpoint and its last child while it is locked; once let go it is freed like any leaf."""
    world = TreeWorld(1, bands(state=True))
    row = world.enter([1, 2, 3, 4])
    world.give(row, 2, with_state=True)
    world.give(row, 4, with_state=True)
    reader = world.enter([1, 2, 9])
    world.copied(reader)
    world.leave(row)
    world.evict({0: 2}, only=0)
    world.evict({1: 2})
    assert world.cache[""].keys() == {(1,), (1, 2)}, "the locked node lost its state and its last child"
    assert world.tree.reclaimable() == (0, 0)
    world.leave(reader)
    assert world.tree.reclaimable() == (0, 2)
    assert world.evict({1: 2}) == (0, 2)


def test_incident_3_a_chain_of_tombstones_becomes_payable_from_its_end() -> None:
    """Inner nodes that nobody locks are counted, and the walk reaches each of them."""
    world = TreeWorld(1, bands((2,), state=True))
    row = world.enter(list(range(9)))
    for pages in range(1, 10):
        world.give(row, pages, with_state=True)
    world.leave(row)
    world.evict({0: 9}, only=0)
    world.evict({1: 9}, only=1)
    assert world.tree.reclaimable() == (0, 0, 9)
    assert world.evict({2: 9}) == (0, 0, 9)


def test_incident_12_the_tree_part_the_question_changes_nothing() -> None:
    """What can be reclaimed is known without evicting: a demand that it cannot serve leaves all 96 tokens cached."""
    chain = bands()
    tree = PrefixTree(1, chain)
    arena = LogicalChain(Geometry(1, 400, 0, [StageGeometry(16 * 129, 16, chain)]))
    pages = arena.take((96,)).ids[0]
    lock = tree.lock(tree.match("", np.arange(96), 0))
    tree.insert("", np.arange(96), pages, (0,), 0, lock)
    tree.unlock(lock)
    before = tree.content(), arena.state_digest()
    assert not arena.fits((200,), tree.reclaimable())
    assert arena.fits((128,), tree.reclaimable())
    assert not arena.fits((33,))
    assert (tree.content(), arena.state_digest()) == before
    assert tree.held() == (96,)


def test_incident_13_the_predicate_is_asked_a_few_times_per_victim() -> None:
    """A deep reclaim asks `enough` twice per victim, and of the last one twice as often as its length has bits."""
    world = TreeWorld(1, bands())
    for first in range(50):
        row = world.enter([first] * 16)
        world.give(row, 16)
        world.leave(row)
    asked: list[Demand] = []

    def enough(freed: Demand) -> bool:
        asked.append(freed)
        return freed[0] >= 16 * 30 - 5

    freed = world.tree.evict(enough)
    assert len(freed[0]) == 16 * 30 - 5
    assert len(asked) <= 2 * 30 + 2 * 5


def test_P3_a_prefix_without_state_or_window_is_cut_where_all_kinds_hold() -> None:
    """With only the state, then only the window evicted, the hit is the longest point where every kind is valid."""
    world = TreeWorld(1, bands((3,), state=True))
    row = world.enter([5] * 12)
    for pages in (4, 8, 12):
        world.give(row, pages, with_state=True)
    world.leave(row)
    tokens = np.array([5] * 13)
    newest = world.cache[""][(5,) * 12].slot
    middle = world.cache[""][(5,) * 8]
    match = world.tree.match("", tokens, 12)
    assert (match.tokens, match.cut) == (12, "")
    world.evict({0: 2}, only=0)
    held = world.tree.match("", tokens, 12)
    assert (held.tokens, held.matched_tokens, held.cut, held.slot) == (12, 12, "", newest)
    world.evict({0: 1}, only=0)
    assert not middle.slot
    lost = world.tree.match("", tokens, 12)
    assert (lost.tokens, lost.matched_tokens, lost.cut, lost.slot) == (0, 12, "state", 0)

    world = TreeWorld(1, bands((3,), state=True))
    row = world.enter([5] * 12)
    for pages in (4, 8, 12):
        world.give(row, pages, with_state=True)
    world.leave(row)
    world.evict({1: 11}, only=1)
    lost = world.tree.match("", tokens, 12)
    assert (lost.tokens, lost.matched_tokens, lost.cut) == (0, 12, "window:3")
    row = world.enter([5] * 13)
    world.retire(row, 1, 5)
    world.give(row, 8)
    world.check_match("", [5] * 13, 12, back := world.tree.match("", tokens, 12))
    assert (back.tokens, back.matched_tokens, back.cut) == (8, 12, "window:3"), "the window was given back by a row"


def test_P9_shared_pages_are_counted_once() -> None:
    """Forked prefixes with overlapping gifts: available + evictable + protected = total after every operation."""
    for name in ("full", "windows", "everything"):
        random = Random(9)
        world = TreeWorld(2, CHAINS[name])
        for _ in range(150):
            one_operation(world, random)
            held, locked, free = world.tree.held(), world.tree.locked(), world.tree.reclaimable()
            assert tuple(a + b for a, b in zip(locked, free, strict=True)) == held
            assert min(*locked, *free) >= 0
            own = sum(len(row.pages) - row.lock.pages for row in world.rows)
            assert held[-1] + own == len(world.live_pages), "every page has one owner"


def test_P10_a_match_inside_a_node_splits_it_and_locks_the_matched_part_alone() -> None:
    """Under pressure the matched part survives and the rest goes; after the end no lock is left."""
    world = TreeWorld(4, bands((5,)))
    row = world.enter([7] * 40)
    world.give(row, 10)
    world.leave(row)
    hit = world.enter([7] * 18 + [8, 8])
    assert hit.lock.pages == 4
    assert world.tree.locked() == (1, 4), "the window reads one page back"
    assert world.flush() == (9, 6)
    assert world.cache[""].keys() == {(7,) * n for n in (4, 8, 12, 16)}
    world.leave(hit)
    assert world.tree.locked() == (0, 0)
    assert world.tree.open_locks == 0
    assert world.flush() == (1, 4)


def test_H8_only_a_childless_tombstone_is_left_and_it_pays() -> None:
    """With nothing but tombstones evictable, what is promised is what comes: page by page, to the last one."""
    world = TreeWorld(1, bands((2,)))
    row = world.enter([3] * 6)
    world.give(row, 6)
    world.leave(row)
    world.evict({0: 6}, only=0)
    for left in range(5, -1, -1):
        assert world.evict({1: 1}) == (0, 1)
        assert world.tree.reclaimable() == (0, left)
    assert world.evict({1: 1}) == (0, 0)
