"""Visits: what is learned of who goes on, in integers, from what comes in and nothing else."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from daemon.core import visits
from daemon.core.eviction import POLICIES
from daemon.core.tree import PrefixTree
from daemon.core.tree_nodes import Reader
from daemon.core.visits import (
    EDGES_MS,
    GHOSTS_MAX,
    MARK_TOKENS,
    WAITING_MAX,
    Visit,
    Visits,
    bucket_of,
    mark_of,
    path_key,
)
from tests.core.tree_world import bands


def visit_at(all_: Visits, turn: int, added: int) -> Visit:
    """A visit that was entered now."""
    visit = Visit(turn, added, all_.new_line(), all_.now_ms)
    all_.enter(visit, b"")
    return visit


def teach(all_: Visits, often: Visit, seldom: Visit, random: Random, count: int = 1_500) -> None:
    """Requests like one visit go on nine times in ten within a minute, like the other one time in twenty."""
    for _ in range(count):
        all_.now_ms += 1_000
        for like, chance in ((often, 0.9), (seldom, 0.05)):
            visit = visit_at(all_, like.turn, like.added)
            if random.random() < chance:
                all_.continued(visit, visit.time_ms + random.randrange(5_000, 60_000), None)


def test_a_mark_lies_before_the_last_token_of_its_prompt() -> None:
    """The same prompt again is matched up to its mark at least."""
    assert [mark_of(tokens) for tokens in (0, 1, 512, 513, 1_024, 1_025)] == [0, 0, 0, 512, 512, 1_024]


def test_ages_fall_into_buckets_by_their_edges() -> None:
    """Each edge begins its bucket; nothing is younger than the first and nothing too old for the last."""
    assert [bucket_of(edge) for edge in EDGES_MS] == list(range(len(EDGES_MS)))
    assert bucket_of(-5) == 0
    assert bucket_of(EDGES_MS[1] - 1) == 0
    assert bucket_of(10**9) == len(EDGES_MS) - 1


def test_before_anything_is_learned_the_older_is_worth_less() -> None:
    """With no data all classes are alike, and rates fall with age: the order is that of the last use."""
    all_ = Visits()
    all_.now_ms = 4_000_000
    rates = []
    for age in EDGES_MS:
        ages = {
            all_.rate(Visit(turn, added, 1, all_.now_ms - age)) for turn in range(8) for added in (0, 5_000, 99_000)
        }
        assert len(ages) == 1
        rates += ages
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1] > 0


def test_classes_that_go_on_more_often_come_to_be_worth_more() -> None:
    """The rate of a class follows its visits, at every age at which they were seen to go on."""
    all_, random = Visits(), Random(1)
    often, seldom = Visit(3, 100, 0, 0), Visit(0, 20_000, 0, 0)
    teach(all_, often, seldom, random)
    for age in (1_000, 20_000, 50_000):
        strong, weak = (all_.rate(Visit(like.turn, like.added, 0, all_.now_ms - age)) for like in (often, seldom))
        assert strong > 3 * weak
        assert all_.best_rate(Visit(0, 0, 0, all_.now_ms - age)) >= strong


def test_a_class_never_seen_takes_after_its_turn_and_its_size() -> None:
    """What short additions and late turns have in common is learned of all classes together."""
    all_, random = Visits(), Random(2)
    teach(all_, Visit(3, 100, 0, 0), Visit(0, 20_000, 0, 0), random)
    late_and_long, early_and_short = Visit(3, 20_000, 0, all_.now_ms), Visit(0, 100, 0, all_.now_ms)
    strong, weak = Visit(3, 100, 0, all_.now_ms), Visit(0, 20_000, 0, all_.now_ms)
    for unseen in (late_and_long, early_and_short):
        assert all_.rate(weak) < all_.rate(unseen) < all_.rate(strong)


def test_old_days_weigh_less() -> None:
    """When classes change places, so do their rates: counts are halved where they grow large."""
    all_, random = Visits(), Random(3)
    one, two = Visit(3, 100, 0, 0), Visit(0, 20_000, 0, 0)
    teach(all_, one, two, random, 3_000)
    teach(all_, two, one, random, 9_000)
    first, second = (all_.rate(Visit(like.turn, like.added, 0, all_.now_ms)) for like in (one, two))
    assert second > first


def test_tails_are_worth_what_continuations_found_of_them() -> None:
    """As much as the rest at first; next to nothing once requests were seen to go on from prompts alone."""
    all_ = Visits()
    assert all_.tail_rate(visit_at(all_, 0, 10)) == all_.rate(visit_at(all_, 0, 10))
    for _ in range(200):
        all_.now_ms += 1_000
        all_.continued(visit_at(all_, 0, 10), all_.now_ms + 10, tail=False)
    probe = visit_at(all_, 0, 10)
    assert 20 * all_.tail_rate(probe) < all_.rate(probe)


def test_a_path_that_was_evicted_is_recalled_at_its_mark() -> None:
    """By the namespace, the place and the tokens before it; once, and the newest visit of several."""
    all_ = Visits()
    key = path_key("salt:x", 512, b"tokens")
    assert key != path_key("", 512, b"tokens")
    assert key != path_key("salt:x", 1_024, b"tokens")
    old, new = Visit(0, 1, 1, 0), Visit(1, 1, 1, 5)
    all_.enter(old, key)
    all_.enter(new, key)
    assert all_.recall(key) is new
    all_.continued(new, 9, None)
    assert all_.recall(key) is None


def test_no_more_paths_are_remembered_than_a_bound() -> None:
    """The oldest are forgotten; nobody waits for ever to be seen going on."""
    all_ = Visits()
    for number in range(GHOSTS_MAX + 10):
        all_.enter(Visit(0, 1, number, 0), number.to_bytes(16, "little"))
    assert len(all_._ghosts) == GHOSTS_MAX
    assert all_.recall((9).to_bytes(16, "little")) is None
    assert all_.recall((10).to_bytes(16, "little")) is not None


@pytest.mark.parametrize("step_ms", [0, 20])
def test_no_more_visits_are_watched_than_a_bound(step_ms: int) -> None:
    """Of all ages together, whatever the rate and though time stands still; the oldest go, whatever their age."""
    all_ = Visits()
    all_.now_ms = 1
    made = []
    for number in range(WAITING_MAX + 1_000):
        all_.now_ms += step_ms
        made.append(visit_at(all_, 0, number % 3))
        if number % 499 == 0:
            assert sum(map(len, all_._waiting)) <= WAITING_MAX
    left = sorted((visit for column in all_._waiting for visit in column), key=lambda visit: visit.line)
    assert left == made[1_000:]


def test_what_was_forgotten_while_it_waited_counts_no_more() -> None:
    """Its going on at an age to which it was not followed would stand beside none of those that did not go on."""
    all_ = Visits()
    early, late = visit_at(all_, 0, 0), visit_at(all_, 0, 0)
    for _ in range(WAITING_MAX):
        visit_at(all_, 5, 99_999)
    all_.continued(early, EDGES_MS[1] - 1, None)
    assert sum(all_._hit[early.class_]) == 1, "of the age at which it was watched"
    all_.now_ms = 100_000
    all_.continued(late, 100_000, None)
    assert sum(all_._hit[late.class_]) == 1
    assert late.over


def test_a_visit_that_is_watched_no_more_is_told_by_the_digest() -> None:
    """It decides what later inputs teach."""
    contents = []
    for watched in (3, 4):
        visit = Visit(0, 0, 1, 0)
        visit.watched = watched
        contents.append(visit.content())
    assert contents[0] != contents[1]


def test_rates_hold_for_a_whole_moment() -> None:
    """So that what a component is worth does not depend on when in a step it is asked."""
    all_ = Visits()
    visit = visit_at(all_, 0, 10)
    for _ in range(300):
        all_.now_ms += 100
        before = all_.moment, all_.rate(visit)
        all_.now_ms += 10
        if all_.moment == before[0]:
            assert all_.rate(visit) == before[1]


def test_equal_histories_learn_the_same_and_the_digest_tells_others_apart() -> None:
    """Everything learned is in the content."""
    made = []
    for seed in (4, 4, 5):
        all_ = Visits()
        teach(all_, Visit(3, 100, 0, 0), Visit(0, 20_000, 0, 0), Random(seed), 200)
        made.append(all_.content())
    assert made[0] == made[1]
    assert made[0] != made[2]


@pytest.mark.parametrize("page_size", [48, 64, 512])
def test_turns_are_told_though_all_was_evicted_in_between(page_size: int) -> None:
    """The second turn is known by the ghost of the first, whatever the page size; a retracted one is no turn."""
    tree = PrefixTree(page_size, bands(), POLICIES["value"])
    learned = tree._tree.visits
    assert learned is not None
    history, page = np.arange(1_700), 1
    for turn in range(3):
        history = np.append(history, 10_000 * turn + np.arange(700))
        for resumed in (False, True):
            tree.at((turn * 60 + 30 * resumed) * 1_000_000_000)
            lock = tree.lock(tree.match("", history, len(history) - 1), Reader(0, len(history), resumed))
            count = len(history) // page_size
            pages = np.append(np.zeros(lock.pages, np.int32), np.arange(page, page + count, dtype=np.int32))[:count]
            page += count
            tree.insert("", history, pages, (0,), 0, lock)
            tree.unlock(lock)
            newest = lock.node.visit
            assert newest is not None
            assert newest.turn == turn
            assert newest.mark == (len(history) - 1) // MARK_TOKENS * MARK_TOKENS
            if turn:
                assert newest.added <= 700 + MARK_TOKENS
        tree.flush()
    assert sum(map(sum, learned._hit)) == 2


def test_the_classes_are_as_many_as_the_queues_can_tell() -> None:
    """Every visit has a place in the tables."""
    for turn in range(20):
        for added in (0, 1_023, 1_024, 10**6):
            assert 0 <= Visit(turn, added, 0, 0).class_ < visits.CLASSES
