"""Eviction policies, and what value per byte gives up first: by what serves no hit, and by what visits teach."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.geometry import BandGeometry
from daemon.core import value
from daemon.core.eviction import EVICTION_POLICIES, POLICIES
from daemon.core.limits import CoreConfig
from daemon.core.tree import PrefixTree
from daemon.core.tree_nodes import Node, Reader
from tests.core.test_tree import CHAINS
from tests.core.tree_world import TreeWorld, bands

FULL, WINDOW, STATE = (
    BandGeometry("full", "full", 4),
    BandGeometry("window:4", "window", 4, 4),
    BandGeometry("state", "state", 8),
)


class Chats:
    """A tree of pages of 512 tokens, under `value` as a rule, and conversations told apart by their first tokens."""

    def __init__(self, chain: list[BandGeometry], policy: str = "value") -> None:
        self.tree = PrefixTree(512, chain, POLICIES[policy])
        self.page = self.slot = 1
        self.now_ms = 0

    def request(self, tokens: list[int], ms: int = 0, priority: int = 0) -> int:
        """A whole request of so many blocks of 512 equal tokens; how many tokens it found."""
        self.now_ms += ms
        tree, state = self.tree, self.tree.shape.state
        tree.at(self.now_ms * 1_000_000)
        column = np.repeat(np.array(tokens, np.int64), 512)
        match = tree.match("", column, len(column) - 1)
        lock = tree.lock(match, Reader(priority, len(column)))
        pages = np.concatenate([match.pages, np.arange(self.page, self.page + len(tokens), dtype=np.int32)])
        self.page += len(tokens)
        first = [int(page) for page in match.window_first]
        given = tree.insert("", column, pages[: len(tokens)], first, self.slot if state >= 0 else 0, lock)
        self.slot += given.slot_kept
        if lock.state_node is not None:
            tree.release_state(lock)
        tree.unlock(lock)
        return match.tokens

    def known(self, tokens: list[int]) -> int:
        """Blocks of a conversation that are there."""
        column = np.repeat(np.array(tokens, np.int64), 512)
        return self.tree.match("", column, len(column)).matched_tokens // 512

    def evict(self, units: int = 1, band: int = -1) -> tuple[int, ...]:
        """Give up at least so many units of a band; what came free."""
        return tuple(len(ids) for ids in self.tree.evict(lambda freed: freed[band] >= units))


def test_the_default_policy_is_value_per_byte() -> None:
    """The core's default is the first of the names that the settings offer."""
    assert EVICTION_POLICIES[0] == CoreConfig().eviction_policy == "value"
    assert set(EVICTION_POLICIES) == {"value", "lru", "lfu", "fifo", "priority"}


@pytest.mark.parametrize(
    ("policy", "order"), [("lru", [2, 3, 1]), ("fifo", [1, 2, 3]), ("lfu", [2, 3, 1]), ("priority", [2, 3, 1])]
)
def test_each_policy_has_its_order(policy: str, order: list[int]) -> None:
    """Three paths, the first of which is found again and was of high priority."""
    world = TreeWorld(1, bands(), policy)
    for tokens in ([1, 1, 1], [2, 2, 2], [3, 3, 3], [1, 1, 1, 1]):
        row = world.enter(tokens)
        world.give(row, 3)
        world.leave(row)
    gone = []
    for _ in range(3):
        before = set(world.cache[""])
        world.evict({0: 3})
        gone += sorted({prefix[0] for prefix in before - set(world.cache.get("", {}))})
    assert gone == order


def test_equal_frequencies_fall_back_on_time() -> None:
    """Of paths that were hit equally often the one that was used longest ago goes first."""
    world = TreeWorld(1, bands(), "lfu")
    for tokens in ([1, 1], [2, 2], [2, 2, 2], [1, 1, 1]):
        row = world.enter(tokens)
        world.give(row, 2)
        world.leave(row)
    world.evict({0: 1})
    assert (1, 1) in world.cache[""]
    assert (2, 2) not in world.cache[""]


def test_value_gives_up_pages_behind_the_last_state_first() -> None:
    """A model with states cannot use them; they go before anything that serves a hit, newest though they are."""
    world = TreeWorld(1, [STATE, FULL], "value")
    for first in (1, 2):
        row = world.enter([first] * 8)
        world.give(row, 4, with_state=True)
        world.give(row, 8)
        world.leave(row)
    assert world.evict({1: 8}) == (0, 8)
    for first in (1, 2):
        assert world.tree.match("", np.full(9, first), 8).tokens == 4


def test_value_gives_up_window_units_that_no_state_reads() -> None:
    """Only the units before the state are worth anything; without the state neither they nor its pages are."""
    world = TreeWorld(1, [STATE, WINDOW, FULL], "value")
    row = world.enter([1] * 12)
    world.give(row, 12, with_state=True)
    world.leave(row)
    assert world.evict({1: 9}) == (0, 9, 0), "the three units before the end are left"
    assert world.tree.match("", np.full(13, 1), 12).tokens == 12
    assert world.evict({1: 1}) == (1, 1, 1), "the end with its state; what only it read is worth nothing then"
    assert world.evict({2: 11}) == (0, 2, 11)


def test_value_takes_the_tail_of_a_path_that_is_shorter_than_the_window() -> None:
    """Every end of such a path reads its first unit, so that its last page goes and the hit is one page shorter."""
    world = TreeWorld(1, [BandGeometry("window:64", "window", 4, 64), FULL], "value")
    row = world.enter([1] * 8)
    world.give(row, 8)
    world.leave(row)
    assert world.evict({0: 2}) == (2, 2)
    assert world.tree.match("", np.full(8, 1), 8).tokens == 6


def test_value_keeps_the_window_before_the_place_where_the_same_prompt_would_end() -> None:
    """The units of a long path that no likely end reads go first; then the path is worth nothing but as a whole."""
    world = TreeWorld(1, [WINDOW, FULL], "value")
    row = world.enter([1] * 20)
    world.give(row, 20)
    world.leave(row)
    assert world.evict({0: 16}) == (16, 0), "the next prompt ends at 19 and reads 16, 17 and 18"
    assert world.tree.match("", np.full(20, 1), 19).tokens == 19


@pytest.mark.parametrize(("policy", "left"), [("value", (8, 1)), ("lru", (0, 9))])
def test_a_conversation_that_goes_on_outlives_one_that_did_not(policy: str, left: tuple[int, int]) -> None:
    """After many of both kinds, a path of four turns is kept up to its mark, and what came once goes, though newer."""
    chats = Chats([FULL], policy)
    for number in range(120):
        once, history = 10_000 + 20 * number, [1_000_000 + 100 * number]
        for turn in range(1, 5):
            history = [*history, history[0] + turn, history[0] + 50 + turn]
            chats.request(history, 1_000)
        chats.request([once + k for k in range(20)], 1_000)
    going, last = history, [once + k for k in range(20)]
    assert chats.known(last) == 20
    chats.evict(chats.tree.held()[0] - len(going))
    assert (len(going), chats.tree.held()) == (9, (9,))
    assert (chats.known(going), chats.known(last)) == left


def test_what_a_later_request_left_aside_goes_first() -> None:
    """A turn that goes on from the prompt and not from the output that was given leaves that output behind."""
    chats = Chats([FULL])
    chats.request([7, 8, 9, 10, 11])
    chats.request([1, 2, 3, 4, 5], 1_000)
    chats.request([7, 8, 9, 10, 12, 13], 1_000)
    assert chats.known([7, 8, 9, 10, 11]) == 5
    chats.evict(1)
    assert chats.known([7, 8, 9, 10, 11]) == 4, "older than the other paths or not"
    assert chats.known([1, 2, 3, 4, 5]) == 5
    assert chats.known([7, 8, 9, 10, 12, 13]) == 6


def test_what_many_share_outlives_what_one_has() -> None:
    """Windows and state before the end that several paths lead on from stay while the paths behind it go."""
    chats = Chats([STATE, BandGeometry("window:512", "window", 4, 512), FULL])
    chats.request([1, 2])
    for number in range(8):
        assert chats.request([1, 2, 100 + number, 200 + number], 1_000) == 1024
    chats.evict(14)
    column = np.repeat(np.array([1, 2, 999], np.int64), 512)
    assert chats.tree.match("", column, len(column)).tokens == 1024


def test_a_shared_end_is_worth_more_than_any_path_of_its_age() -> None:
    """Not before `SHARERS_MIN` lines of visits came through it; then its head is worth four times the best path."""
    chats = Chats([FULL])
    policy = chats.tree._tree._policy

    def worth(of: Node) -> int:
        return policy.value(of, *policy.place(of, 0))

    chats.request([1, 99])
    node = next(iter(chats.tree._tree.spaces[""].root.children.values()))
    for number in range(100, 110):
        if node.sharers < value.SHARERS_MIN:
            assert worth(node) <= max(map(worth, node.children.values()), default=worth(node))
            chats.request([1, number])
            node = next(iter(chats.tree._tree.spaces[""].root.children.values()))
    paths = list(node.children.values())
    assert node.sharers >= value.SHARERS_MIN
    assert len(paths) >= 2, "one that goes on is no sharer"
    assert worth(node) > 3 * max(map(worth, paths)) > 0


def test_a_state_of_a_request_at_work_outlives_older_ends() -> None:
    """It is where the next turn will start, though the request's own pages lie behind it and nobody has left it yet."""
    chats = Chats([STATE, FULL])
    tree = chats.tree
    chats.request([7, 8, 9])
    tree.at(3_600_000_000_000)
    column = np.repeat(np.array([1, 2, 3], np.int64), 512)
    lock = tree.lock(tree.match("", column, 1_535), Reader(0, 1_025))
    pages = np.array([11, 12, 13], np.int32)
    assert tree.insert("", column[:1_024], pages, (0, 0), 5, lock).slot_kept
    tree.insert("", column, pages, (0, 0), 0, lock)
    chats.evict(1, band=0)
    assert tree.match("", column, 1_535).tokens == 1_024
    assert chats.known([7, 8, 9]) == 2
    chats.evict(1, band=0)
    assert tree.match("", column, 1_535).tokens == 0, "nobody waits for it"
    tree.unlock(lock)


def test_a_state_behind_the_mark_does_not_take_the_place_of_the_one_at_it() -> None:
    """The next turn is sure to come by the mark and not by the end: the end goes with its page, and the mark stays."""
    chats = Chats([STATE, FULL])
    chats.request([1, 2])
    chats.request([1, 2, 3], 1_000)
    assert chats.evict(1, band=0) == (1, 1)
    column = np.repeat(np.array([1, 2, 999], np.int64), 512)
    assert chats.tree.match("", column, len(column)).tokens == 1024


@pytest.mark.parametrize(("later_gone", "known"), [(False, (0, 2)), (True, (2, 1))])
def test_a_state_is_an_end_again_once_the_later_one_is_gone(later_gone: bool, known: tuple[int, int]) -> None:
    """While a later state serves the next turn, one before it goes first; without it, an older path's end does."""
    chats = Chats([STATE, FULL])
    chats.request([7, 8])
    for tokens in ([1, 2], [1, 2, 3], [1, 2, 3, 4]):
        chats.request(tokens, 9_000)
    column = np.repeat(np.array([7, 8], np.int64), 512)
    older = chats.tree.lock(chats.tree.match("", column, len(column)))
    if later_gone:
        assert [len(ids) for ids in chats.tree.evict(lambda units: units[1] >= 2, 1)] == [2, 2]
        assert chats.known([1, 2, 3]) == 2
    chats.tree.unlock(older, touch=False)
    chats.evict(1, band=0)
    column = np.repeat(np.array([1, 2, 999], np.int64), 512)
    assert (chats.tree.match("", column, len(column)).tokens // 512, chats.known([7, 8])) == known


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("chain", [name for name in CHAINS if name != "windows"])  # a window of one token reads nothing
def test_giving_up_one_page_asks_few_questions(policy: str, chain: str) -> None:
    """Of a tree of many leaves one page is had by looking at a few heads: the queues are not walked."""
    world = TreeWorld(1, CHAINS[chain], policy)
    tree = world.tree
    for first in range(300):
        lock = tree.lock(tree.match("", np.array([first]), 0), Reader(0, 1))
        tree.insert("", np.array([first]), np.array([first + 1], np.int32), (0,) * tree.shape.count, 0, lock)
        tree.unlock(lock)
    asked = 0

    def enough(freed: tuple[int, ...]) -> bool:
        nonlocal asked
        asked += 1
        return freed[-1] >= 1

    assert len(tree.evict(enough)[-1]) == 1
    assert asked <= 3


# --- pins and quotas -----------------------------------------------------------------------------------------------


def test_a_pin_keeps_a_path_while_anything_else_is_left() -> None:
    """Until its time; the older path is given up last, and counted then."""
    world = TreeWorld(1, [WINDOW, FULL], "value")
    for first in (1, 2, 3):
        row = world.enter([first] * 8)
        world.give(row, 8)
        world.leave(row)
    assert world.pin([1] * 8, "", 10_000)
    assert world.tree.pinned() == (3, 8)
    world.evict({1: 16})
    assert {prefix[0] for prefix in world.cache[""]} == {1}
    assert world.tree.match("", np.full(8, 1), 8).tokens == 8
    assert world.tree.pins_dropped == 0
    assert world.evict({1: 1})[1] == 1, "a pin never makes anybody wait"
    assert world.tree.pins_dropped == 1
    assert world.tree.pinned() == (0, 0)


def test_a_pin_ends_at_its_time_and_the_later_one_of_two_holds() -> None:
    """Pinned for one second and for three: over after three, not after one."""
    world = TreeWorld(1, bands(), "lru")
    for first in (1, 2):
        row = world.enter([first] * 4)
        world.give(row, 4)
        world.leave(row)
    assert world.pin([1] * 4, "", 3_000)
    assert world.pin([1] * 4, "", 1_000)
    world.wait(2_000)
    assert world.tree.pinned() == (4,)
    world.wait(1_000)
    assert world.tree.pinned() == (0,)
    world.evict({0: 4})
    assert {prefix[0] for prefix in world.cache[""]} == {2}, "it is the oldest again"


def test_of_two_pins_the_one_that_ends_earlier_goes_first() -> None:
    """When nothing but pinned paths is left."""
    world = TreeWorld(1, bands(), "value")
    for first, ms in ((1, 9_000), (2, 4_000)):
        row = world.enter([first] * 4)
        world.give(row, 4)
        world.leave(row)
        assert world.pin([first] * 4, "", ms)
    world.evict({0: 4})
    assert {prefix[0] for prefix in world.cache[""]} == {1}


def test_pins_together_name_no_more_than_they_may() -> None:
    """A pin beyond the bound is refused and counted, and changes nothing; pages pinned already cost nothing."""
    world = TreeWorld(1, bands(), "value", pinned_bytes_max=16 * 6)
    for first in (1, 2):
        row = world.enter([first] * 4)
        world.give(row, 4)
        world.leave(row)
    assert world.pin([1] * 4, "", 1_000)
    assert not world.pin([2] * 4, "", 1_000)
    assert world.tree.pins_refused == 1
    assert world.tree.pinned() == (4,)
    assert world.pin([1] * 4, "", 2_000)
    assert world.pin([2] * 2, "", 1_000)
    world.flush()
    assert world.tree.pinned() == (0,)


def test_a_namespace_gives_up_what_it_holds_beyond_its_quota_and_no_other_pays() -> None:
    """Its own least valuable pages go, as few as bring it back; what is read stays until its reader goes."""
    world = TreeWorld(1, bands(), "value", {"salt:x": 16 * 6})
    for first in (1, 2):
        for name in ("", "salt:x"):
            row = world.enter([first] * 4, name)
            world.give(row, 4)
            world.leave(row)
    assert world.shrink("") == (0,)
    assert world.shrink("salt:x") == (2,)
    assert len(world.cache["salt:x"]) == 6
    reader = world.enter([2] * 4, "salt:x")
    row = world.enter([3] * 6, "salt:x")
    world.give(row, 6)
    assert world.shrink("salt:x") == (6 - 3,), "what two requests read stays"
    world.leave(row)
    world.leave(reader)
    assert world.shrink("salt:x") == (3,)


def test_a_namespace_beyond_its_quota_pays_first_in_joint_reclaim() -> None:
    """Though what others hold is older; once it is back, the order is that of all."""
    world = TreeWorld(1, bands(), "lru", {"salt:x": 16 * 2})
    for name in ("", "salt:x"):
        row = world.enter([1] * 6, name)
        world.give(row, 6)
        world.leave(row)
    assert world.evict({0: 4}) == (4,)
    assert (len(world.cache[""]), len(world.cache["salt:x"])) == (6, 2)
    world.evict({0: 1})
    assert (len(world.cache[""]), len(world.cache["salt:x"])) == (5, 2)


def test_a_namespace_that_is_gone_is_offered_nothing() -> None:
    """What is left of it elsewhere (a visit that a later request continues, a pin that ends) finds nobody."""
    world = TreeWorld(1, bands(), "value", {"salt:x": 16 * 64})
    tokens = [5] * 600
    row = world.enter(tokens, "salt:x")
    world.give(row, 600)
    world.leave(row)
    world.pin(tokens, "salt:x", 1_000)
    world.flush()
    world.wait(2_000)
    row = world.enter([*tokens, 6, 7], "salt:x")
    world.give(row, 602)
    world.leave(row)
    world.flush()
    assert not world.tree._tree.spaces
