"""What the prefix cache must not keep, and what it must not take for granted: evicted nodes, ended pins, old values."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from daemon.core.eviction import EvictionOrder
from daemon.core.tree_nodes import Node, Reader, Space
from daemon.core.visits import Visit
from tests.core.test_eviction import FULL, STATE, Chats
from tests.core.tree_world import TreeWorld, bands


def nodes() -> int:
    """Nodes that anything still refers to."""
    gc.collect()
    return sum(type(one) is Node for one in gc.get_objects())


@pytest.mark.parametrize("turns", [1, 3])
def test_what_was_evicted_is_kept_by_nobody(turns: int) -> None:
    """Visits remember paths for an hour and more, but not their nodes, whoever else came through them."""
    before, chats = nodes(), Chats([FULL])
    for number in range(50):
        for turn in range(turns):
            chats.request([number * 10 + part for part in range(2 + turn)], 1_000)
            chats.request([number * 10 + part for part in range(2 + turn)], 1_000)
    assert chats.tree.held() == (50 * (1 + turns),)
    chats.tree.flush()
    assert nodes() - before < 20, "but the newest of them, which the queues let go with later ones"


def test_the_ends_of_pins_that_name_nothing_are_forgotten() -> None:
    """Pins that were given up or made again leave nothing behind, though their time is far; the others end on time."""
    world = TreeWorld(16, bands(), "value")

    def cached(first: int) -> list[int]:
        row = world.enter([first] * 64)
        world.give(row, 4)
        world.leave(row)
        return [first] * 64

    early, late = cached(1), cached(2)
    for number in range(200):
        assert world.pin(early, "", 1_000_000)
        assert world.pin(late, "", 9_000_000)
        world.pin(cached(1_000 + number), "", 800_000)
        world.evict({0: 4})
        world.wait(10)
    assert len(world.tree._pins.ends) < 200
    world.wait(1_000_000)
    assert world.tree.pinned() == (4,), "of those that are left the later one"
    world.wait(8_000_000)
    assert world.tree.pinned() == (0,)


def test_a_pin_whose_end_was_given_up_ends_for_what_is_left_of_it() -> None:
    """The pages in front of those that were evicted stay pinned until the pin's time, and no longer."""
    world = TreeWorld(16, bands(), "value")
    row = world.enter([1] * 160)
    world.give(row, 10)
    world.leave(row)
    other = world.enter([1] * 64 + [2] * 16)
    world.leave(other)
    assert world.pin([1] * 160, "", 5_000)
    world.evict({0: 6})
    for number in range(200):
        world.pin([1] * 48, "", 4_000 + number)
    assert world.tree.pinned() == (4,)
    world.wait(4_500)
    assert world.tree.pinned() == (4,)
    world.wait(600)
    assert world.tree.pinned() == (0,)


def test_a_resumed_request_takes_nothing_from_who_went_on_elsewhere() -> None:
    """The newest visit on its path can be another one's, of a longer path: that one may still be continued."""
    world = TreeWorld(16, bands(), "value")
    row = world.enter(list(range(1_100)))
    world.more(row, list(range(1_100, 1_700)))
    world.give(row, 106)
    world.leave(row)
    path = next(iter(world.tree._tree.spaces[""].root.children.values()))
    newest = path.visit
    assert newest is not None
    match = world.tree.match("", np.arange(1_150), 1_149)
    world.tree.unlock(world.tree.lock(match, Reader(0, 1_150, True)))
    world.compare()
    assert not newest.over


def test_a_state_that_many_share_is_not_passed_by_one_of_them() -> None:
    """Of those who lead on from it only the newest is left, with a later state: the next one starts at the shared."""
    chats = Chats([STATE, FULL])
    for number in range(6):
        chats.request([1, 2], 1_000)
        chats.request([1, 2, 100 + number], 1_000)
        chats.request([1, 2, 100 + number, 200 + number], 1_000)
    for number in range(20):
        chats.request([1_000 * number + 7, 1_000 * number + 8], 10)
    shared = next(iter(chats.tree._tree.spaces[""].root.children.values()))
    while len(shared.children) > 1:
        chats.evict(1)
    chats.evict(chats.tree.held()[0] - 4, band=0)
    column = np.repeat(np.array([1, 2, 999], np.int64), 512)
    assert chats.tree.match("", column, len(column)).tokens == 1024


class ByWorth:
    """Every node has a class of its own, and its head is worth what the node is."""

    classes = 8
    last = -1
    visits = None
    moment = (0, 0)

    def place(self, node: Node, band: int) -> tuple[int, int]:
        """The class is the node's number."""
        return node.serial, 0

    def limit(self, node: Node, band: int) -> int:
        """Every unread unit."""
        return node.floor[band]

    def value(self, node: Node, class_: int, rank: int) -> int:
        """Its worth, and how often what came through it had come before."""
        return node.worth + (node.visit.turn if node.visit is not None else 0)


def test_the_value_of_a_head_is_what_it_is_now() -> None:
    """What was worked out for the head of a class holds for its visit and its worth, not for a whole moment."""
    space = Space("", -1, 1, 0)
    order = EvictionOrder(1, 0, -1, ByWorth())
    made = {number: Node(number, space.root, space, 0, bytes(8), np.ones(1, np.int32), 1) for number in range(1, 6)}
    for number, node in made.items():
        node.worth = number
        order.offer(node, 0)
    assert order.pop(None) == (made[1], 0)
    made[2].worth = 7
    assert order.pop(None) == (made[3], 0)
    made[4].visit = Visit(5, 0, 0, 0)
    assert order.pop(None) == (made[5], 0)
    assert order.pop(None) == (made[2], 0)
    assert order.pop(None) == (made[4], 0)
    assert order.pop(None) is None
