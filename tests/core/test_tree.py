"""The prefix tree against a flat list of cached pages: seeded random programs and an exhaustive small world."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest

from allocator.geometry import BandGeometry
from daemon.core.eviction import EVICTION_POLICIES
from daemon.core.tree import PrefixTree
from tests.core.tree_world import TreeWorld, bands

CHAINS = {
    "full": bands(),
    "window": bands((3,)),
    "windows": bands((1, 4, 7)),
    "state": bands(state=True),
    "everything": bands((5, 2), state=True),
}


def one_operation(world: TreeWorld, random: Random) -> None:
    """One random operation of a random program."""
    size = world.page_size
    choice = random.randrange(13)
    if choice <= 2 or not world.rows:
        tokens = [random.randrange(2) for _ in range(random.randrange(1, 9 * size))]
        known = [row.tokens for row in world.rows] + [list(p) for cache in world.cache.values() for p in cache]
        if known and random.random() < 0.7:
            tokens = random.choice(known)[: random.randrange(9 * size)] + tokens[: random.randrange(1, 3 * size)]
        limit = random.choice([None, None, len(tokens), random.randrange(len(tokens) + 1)])
        world.enter(tokens, random.choice(["", "", "salt:x"]), limit, refused=random.random() < 0.2)
        return
    if choice == 10:
        world.wait(random.choice([1, 500, 3_000, 100_000]))
        return
    if choice == 11:
        name = random.choice(list(world.cache) or [""])
        known = random.choice([list(prefix) for prefix in world.cache.get(name, {})] or [[0]])
        world.pin(known, name, random.choice([1, 2_000, 500_000]))
        return
    if choice == 12:
        world.shrink(random.choice(["", "salt:x"]))
        return
    row = random.choice(world.rows)
    if choice == 3:
        world.more(row, [random.randrange(2) for _ in range(random.randrange(1, 3 * size))])
    elif choice in (4, 5):
        world.give(row, random.randrange(len(row.pages) + 1), with_state=random.random() < 0.6)
    elif choice == 6:
        for band in world.windows:
            world.retire(row, band, random.randrange(len(row.pages) + 2))
    elif choice == 7:
        world.copied(row)
        if random.random() < 0.5:
            world.give(row, len(row.pages), with_state=random.random() < 0.6)
        world.leave(row)
    elif choice == 8:
        band = random.randrange(len(world.chain))
        world.evict({band: random.randrange(1, 5)}, random.choice([None, None, band]))
    elif random.random() < 0.1:
        world.flush()
    else:
        world.evict({band: random.randrange(3) for band in range(len(world.chain))})


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_random_programs_agree_with_a_flat_list(chain: str, page_size: int, policy: str) -> None:
    """Whatever is matched, given, moved up, pinned, let go and evicted: every answer follows from what is cached."""
    for seed in range(8 if policy == "value" else 2):
        random = Random(f"{chain} {page_size} {seed}")
        world = TreeWorld(page_size, CHAINS[chain], policy, {"salt:x": random.randrange(400)}, 600)
        for _ in range(60):
            one_operation(world, random)
        for row in list(world.rows):
            world.leave(row)
        world.flush()
        assert not any(world.tree.held())
        assert not world.tree._tree.spaces, "an empty namespace is forgotten"


def test_an_exhaustive_small_world() -> None:
    """Every program of four operations over two sequences that fork, with a window and a state, holds the model."""
    left, right = [0, 0, 1], [0, 1, 1]

    def turn(world: TreeWorld, tokens: list[int], first: int) -> None:
        row = world.enter(tokens, limit=len(tokens))
        world.copied(row)
        world.retire(row, 1, first)
        world.give(row, len(tokens), with_state=True)
        world.leave(row)

    def close(world: TreeWorld) -> None:
        if world.rows:
            world.leave(world.rows[0])

    operations = [
        lambda world: turn(world, left, 0),
        lambda world: turn(world, right, 2),
        lambda world: turn(world, left[:2], 1),
        lambda world: world.enter([*left, 5]),
        lambda world: world.enter(right[:2], limit=2),
        close,
        lambda world: world.evict({2: 1}),
        lambda world: world.evict({1: 1}, only=1),
        lambda world: world.evict({0: 1}, only=0),
    ]
    for program in product(operations, repeat=4):
        world = TreeWorld(1, bands((2,), state=True))
        for operation in program:
            operation(world)
        while world.rows:
            world.leave(world.rows[0])
        world.flush()
        assert world.tree.held() == (0, 0, 0)


def test_equal_programs_give_equal_trees() -> None:
    """Content depends on the operations alone; every operation that changes something changes it."""
    worlds = [TreeWorld(2, CHAINS["everything"]) for _ in range(2)]
    for world in worlds:
        random = Random(5)
        for _ in range(80):
            one_operation(world, random)
    assert worlds[0].tree.content() == worlds[1].tree.content()
    before = worlds[0].tree.content()
    worlds[0].enter([1, 0, 1, 1])
    assert worlds[0].tree.content() != before


def test_a_refused_plan_leaves_the_order_of_eviction_alone() -> None:
    """Lock and let go untouched, again and again: the victim is the same one, and nothing piles up."""
    world = TreeWorld(1, bands())
    for tokens in ([1, 1, 1], [2, 2, 2]):
        row = world.enter(tokens)
        world.give(row, 3)
        world.leave(row)
    oldest = world.cache[""][1,].page
    for _ in range(200):
        world.enter([1, 1, 1, 1], refused=True)
    assert sum(len(heap) for heap in world.tree._tree.order._heaps.values()) < 5
    world.evict({0: 3})
    assert all(entry.page != oldest for entry in world.cache[""].values())
    world.enter([2, 2, 2, 2])


def test_the_least_recently_used_goes_first_in_each_component() -> None:
    """A hit renews the path, the window before its end and its state, not what else lies on the path."""
    world = TreeWorld(1, bands((2,), state=True))
    for tokens in ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]):
        row = world.enter(tokens)
        for pages in (2, 4):
            world.give(row, pages, with_state=True)
        world.leave(row)
    hit = world.enter([1, 1, 9])
    world.copied(hit)
    world.leave(hit)
    state_of = {entry.slot: prefix for prefix, entry in world.cache[""].items() if entry.slot}
    gone = [state_of[int(world.tree.evict(lambda freed: freed[0] > 0, only=0)[0][0])] for _ in range(6)]
    assert gone == [(1,) * 4, (2,) * 2, (2,) * 4, (3,) * 2, (3,) * 4, (1,) * 2]


def test_the_newest_checkpoint_of_a_path_and_its_window_count_as_used_at_the_end() -> None:
    """Where a conversation would go on outlives what was used before it ended, though it was given earlier."""
    world = TreeWorld(1, bands((4,), state=True))
    long = world.enter([1] * 20)
    for pages in (4, 8):
        world.give(long, pages, with_state=True)
    world.retire(long, 1, 17)
    other = world.enter([2] * 8)
    world.give(other, 8, with_state=True)
    world.leave(other)
    world.give(long, 20)
    world.leave(long)
    assert world.tree.match("", np.array([1] * 21), 20).tokens == 8
    state_of = {entry.slot: prefix for prefix, entry in world.cache[""].items() if entry.slot}
    gone = [state_of[int(world.tree.evict(lambda freed: freed[0] > 0, only=0)[0][0])] for _ in range(3)]
    assert gone == [(1,) * 4, (2,) * 8, (1,) * 8]
    page_of = {entry.page: prefix for prefix, entry in world.cache[""].items()}
    gone = [page_of[int(world.tree.evict(lambda freed: freed[1] > 0, only=1)[1][0])] for _ in range(4 + 8 + 4)]
    assert gone[:12] == [(1,) * n for n in range(1, 5)] + [(2,) * n for n in range(1, 9)]
    assert set(gone[12:]) == {(1,) * n for n in range(5, 9)}


def test_content_covers_every_mark_of_a_node() -> None:
    """The state digest tells two trees apart by whatever could lead to another answer."""
    world = TreeWorld(1, bands((3,), state=True))
    row = world.enter([1, 2, 3, 4])
    world.give(row, 4, with_state=True)
    node, before = row.lock.node, world.tree.content()
    for name in ("serial", "start", "slot", "locks", "state_locks"):
        setattr(node, name, getattr(node, name) + 1)
        assert world.tree.content() != before, name
        setattr(node, name, getattr(node, name) - 1)
    for marks in (node.first, node.stamps):
        marks[1] += 1
        assert world.tree.content() != before
        marks[1] -= 1
    node.starts[1][2] = 5
    assert world.tree.content() != before


def test_what_one_row_gives_in_chunks_is_one_node() -> None:
    """A long prompt makes a short path; where somebody else reads to, or window units would have a gap, one begins."""
    world = TreeWorld(2, bands((8,)))
    row = world.enter(list(range(80)))
    for pages in range(1, 21):
        world.give(row, pages)
    assert row.lock.node.start == 0
    reader = world.enter(list(range(40)), limit=40)
    world.retire(row, 0, 12)
    world.give(row, 30)
    assert (row.lock.node.start, row.lock.node.end) == (20, 30)
    world.leave(reader)
    world.give(row, 35)
    assert (row.lock.node.start, row.lock.node.end) == (20, 35)
    world.retire(row, 0, 36)
    world.give(row, 40)
    assert (row.lock.node.start, row.lock.node.end) == (35, 40), "its window units would leave a gap"
    world.leave(row)


def test_of_the_last_victim_no_more_goes_than_is_needed() -> None:
    """A long leaf gives up exactly the pages that are missing, from its end, and their window units with them."""
    world = TreeWorld(1, bands((4,)))
    row = world.enter(list(range(100)))
    world.retire(row, 0, 60)
    world.give(row, 100)
    world.leave(row)
    assert world.evict({1: 7}) == (7, 7)
    assert len(world.cache[""]) == 93
    assert world.evict({0: 10}, only=0) == (10, 0), "units of one window alone"
    assert len(world.cache[""]) == 93
    assert world.evict({0: 30}) == (23, 93), "what cannot suffice is everything there is"


def test_a_tree_needs_pages_and_an_owner() -> None:
    """What cannot be a tree is refused with the value."""
    with pytest.raises(ValueError, match="not 0"):
        PrefixTree(0, bands())
    with pytest.raises(ValueError, match="owner band"):
        PrefixTree(1, [BandGeometry("state", "state", 1)])


def test_positions_of_a_long_prompt_are_compared_exactly() -> None:
    """One other token anywhere in a prompt of thousands ends the match on the page before it."""
    tree, tokens = PrefixTree(16, bands()), np.arange(4_096, dtype=np.int64)
    lock = tree.lock(tree.match("", tokens, 0))
    tree.insert("", tokens, np.arange(1, 257, dtype=np.int32), (0,), 0, lock)
    for at in [*range(40), 2_047, 2_048, 4_094, 4_095]:
        other = tokens.copy()
        other[at] = 1 << 40
        match = tree.match("", other, len(other))
        assert match.tokens == at // 16 * 16
        assert match.cut == "full"
