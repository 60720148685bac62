"""Order: every policy by its table row, the bound on overtaking, fair shares, and what a change of the queue costs."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from daemon.core.fair import FairShare
from daemon.core.limits import CoreConfig
from daemon.core.order import POLICIES, WaitingQueue
from daemon.core.ordered_heap import OrderedHeap
from daemon.core.requests import Group, Request
from daemon.settings_table import BY_KEY
from ipc.messages import Accepted, Generate, Sampling

NO_TOKENS = np.zeros(0, np.int64)


def request(
    number: int, namespace: str = "", priority: int = 0, deadline_ns: int = 0, prompt_tokens: int = 8
) -> Request:
    """A request that waits."""
    accepted = Accepted(str(number), number, 1, 4, 0)
    generate = Generate(str(number), b"", Sampling())
    group = Group(0, str(number), b"", generate, accepted, NO_TOKENS, NO_TOKENS, Sampling(), 1, namespace)
    return Request(number, group, 0, prompt_tokens, 4, 0, (1,), (1,), priority, 0, deadline_ns)


def queue(policy: str, overtaken_max: int = 1000, quantum: int = 16) -> WaitingQueue:
    """An empty one."""
    config = CoreConfig(schedule_policy=policy, overtaken_max=overtaken_max, fair_quantum_tokens=quantum)
    return WaitingQueue(config)


# --- the heap ---------------------------------------------------------------------------------------------------------


def test_the_heap_is_a_sorted_list_whatever_is_added_and_removed() -> None:
    """Random additions and removals from anywhere: the walk, the first and the length are those of a sorted list."""
    for seed in range(40):
        rng, heap, model = random.Random(seed), OrderedHeap[int](), list[tuple[int, int]]()
        for step in range(300):
            if model and rng.random() < 0.45:
                key = rng.choice(model)
                model.remove(key)
                assert heap.remove(key) == key[1]
            else:
                key = (rng.randrange(10), step)
                model.append(key)
                heap.add(key, step)
            assert len(heap) == len(model)
            if model:
                assert heap.first_key() == min(model)
                assert heap.first() == min(model)[1]
        assert list(heap.walk()) == [item for _, item in sorted(model)]
        assert all(key in heap for key in model)


class Counted(tuple[int, ...]):
    """A key that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: Any) -> bool:
        Counted.compared += 1
        return tuple.__lt__(self, other)


@pytest.mark.parametrize("waiting", [1_000, 64_000])
def test_a_change_of_a_long_queue_costs_a_logarithm(waiting: int) -> None:
    """Adding, removing from anywhere and looking at the first few compare a few keys per level of the heap."""
    rng, heap = random.Random(1), OrderedHeap[int]()
    keys = [Counted((rng.randrange(10**9), number)) for number in range(waiting)]
    for key in keys:
        heap.add(key, 0)
    for key in rng.sample(keys, 200):
        Counted.compared = 0
        heap.remove(key)
        heap.add(key, 0)
        walk = heap.walk()
        for _ in range(3):
            next(walk)
        assert Counted.compared <= 4 * math.log2(waiting) + 20


# --- the policies -----------------------------------------------------------------------------------------------------

CROWD = [
    request(1, "a", 0, 50),
    request(2, "a", 1, 0),
    request(3, "b", 0, 20),
    request(4, "b", 1, 20),
    request(5, "a", 0, 0),
    request(6, "c", 2, 0),
]
# Quantum 16 and prompts of 8: two of a namespace in a turn.
ORDERS = {
    "fcfs": [1, 2, 3, 4, 5, 6],
    "lpm": [6, 2, 4, 1, 3, 5],
    "priority": [6, 2, 4, 1, 3, 5],
    "deadline": [4, 3, 1, 6, 2, 5],
    "fair": [2, 1, 4, 3, 6, 5],
}


def test_the_table_of_policies_is_what_the_flag_offers() -> None:
    """Each row of the table has its scene below and its choice in the settings; another name is refused."""
    assert set(POLICIES) == set(ORDERS) == set(BY_KEY["schedule-policy"].choices)
    with pytest.raises(ValueError, match="schedule_policy 'shortest' is none of"):
        queue("shortest")
    with pytest.raises(ValueError, match="overtaken_max must be at least 0, not -1"):
        queue("fcfs", overtaken_max=-1)
    with pytest.raises(ValueError, match="fair_quantum_tokens must be at least 1, not 0"):
        queue("fair", quantum=0)


@pytest.mark.parametrize("policy", sorted(ORDERS))
def test_each_policy_sorts_as_its_row_says(policy: str) -> None:
    """All candidates start one after the other, in a shuffled order of arrival in the structure."""
    for seed in range(5):
        waiting = queue(policy)
        for one in random.Random(seed).sample(CROWD, len(CROWD)) if policy != "fair" else CROWD:
            waiting.add(one)
        walk, order = waiting.walk(), []
        for one in walk:
            walk.take(one.prompt_tokens)
            order.append(one.number)
        assert order == ORDERS[policy]


@pytest.mark.parametrize("policy", sorted(ORDERS))
def test_a_walk_changes_nothing_and_starting_in_its_order_goes_on_in_it(policy: str) -> None:
    """What one pass promised is what many passes of one start each give."""
    waiting = queue(policy)
    for one in CROWD:
        waiting.add(one)
    before = waiting.content()
    walk, promised = waiting.walk(), []
    for one in walk:
        walk.take(one.prompt_tokens)
        promised.append(one.number)
    assert waiting.content() == before
    started = []
    while len(waiting):
        head = waiting.head()
        waiting.began(head, head.prompt_tokens)
        started.append(head.number)
    assert started == promised


def test_longest_prefix_first_goes_by_the_newest_look_up() -> None:
    """What the cache knows of each decides; who was never looked up is due first, then the longest ago."""
    waiting = queue("lpm")
    for one in CROWD:
        waiting.add(one)
    sorts = waiting.longest_prefix
    assert sorts is not None
    assert [one.number for one in sorts.due(2)] == [1, 2]
    sorts.found(CROWD[4], 6)
    sorts.found(CROWD[0], 3)
    assert [one.number for one in waiting] == [5, 1, 6, 2, 4, 3]
    sorts.found(CROWD[4], 0)
    assert [one.number for one in waiting] == [1, 6, 2, 4, 3, 5]
    assert [one.number for one in sorts.due(6)] == [2, 3, 4, 6, 1, 5]
    waiting.remove(CROWD[0])
    waiting.add(CROWD[0])
    assert [one.number for one in sorts.due(1)] == [1], "nothing is known of one that came back"
    assert queue("priority").longest_prefix is None


# --- the bound on overtaking ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("most", [0, 1, 3, 20])
def test_nobody_is_overtaken_more_often_than_allowed(policy: str, most: int) -> None:
    """Arrivals, ends, passes that take and pass over at random, retractions: a brute count of the later ones that began
    while each waited never exceeds the bound, and it is reached where the policy allows any overtaking."""
    worst = 0
    for seed in range(60):
        rng, waiting = random.Random(seed), queue(policy, most)
        counts: dict[int, int] = {}
        requests: dict[int, Request] = {}
        began: list[Request] = []
        for _ in range(120):
            action = rng.random()
            if action < 0.5 or not counts:
                one = request(len(requests) + 1, rng.choice("abc"), rng.randint(-1, 2), rng.choice([0, 5, 9]))
                requests[one.number] = one
                waiting.add(one)
                counts[one.number] = 0
            elif action < 0.6:
                gone = rng.choice(sorted(counts))
                del counts[gone]
                waiting.remove(requests[gone])
            elif action < 0.7 and began:
                back = began.pop(rng.randrange(len(began)))
                waiting.add(back)
                counts[back.number] = 0
            else:
                walk, taken = waiting.walk(), []
                for one in walk:
                    if rng.random() < 0.6:
                        walk.take(rng.randint(0, 40))
                        taken.append(one)
                    if len(taken) == 4:
                        break
                for one in taken:
                    waiting.began(one, 8)
                    began.append(one)
                    del counts[one.number]
                    for other in counts:
                        counts[other] += other < one.number
                worst = max([worst, *counts.values()])
        assert max(counts.values(), default=0) <= most
        assert waiting.overtaken <= max(most, 0)
    assert worst <= most
    if policy != "fcfs" or most == 0:
        assert worst == most, "the bound is no stricter than it says"


def test_at_the_bound_the_oldest_is_the_only_candidate() -> None:
    """Until then the policy decides alone; once the oldest was passed over there, the pass is over."""
    waiting = queue("priority", 2)
    old = request(1)
    waiting.add(old)
    for number in range(2, 8):
        waiting.add(request(number, priority=5))
    for expected in (2, 3):
        head = waiting.head()
        assert head.number == expected
        waiting.began(head, 1)
    assert [one.number for one in waiting.walk()] == [1]
    waiting.began(old, 1)
    assert [one.number for one in waiting.walk()] == [4, 5, 6, 7]
    assert waiting.overtaken == 0


def test_within_one_pass_the_bound_holds_too() -> None:
    """What the pass took already counts: then it goes on by age."""
    waiting = queue("priority", 2)
    for number, priority in ((1, 0), (2, 0), (3, 5), (4, 5), (5, 5)):
        waiting.add(request(number, priority=priority))
    walk, order = waiting.walk(), []
    for one in walk:
        walk.take(1)
        order.append(one.number)
    assert order == [3, 4, 1, 2, 5]


# --- fair shares ------------------------------------------------------------------------------------------------------


class Shares:
    """Namespaces that share, with an account of what each was charged while which of them had requests waiting."""

    def __init__(self, rng: random.Random, quantum: int) -> None:
        self.rng, self.fair = rng, FairShare(quantum)
        self.names = "abcd"[: rng.randint(2, 4)]
        self.prompt_max, self.output_max, self.rows = rng.choice([3, 50, 400]), rng.choice([0, 30]), 4
        self.bound = 4 * quantum + 2 * (self.prompt_max + self.rows * self.output_max)
        self.number, self.largest = 0, 0
        self.charged = dict.fromkeys(self.names, 0)
        self.waiting = dict.fromkeys(self.names, 0)
        self.running = {name: list[int]() for name in self.names}
        self.least: dict[tuple[str, str], int] = {}  # of their difference, since both have had requests waiting

    def act(self) -> None:
        """Some arrive, some outputs are charged, one starts."""
        for name in self.names:
            if self.rng.random() < 0.5 or (name < "c" and self.waiting[name] < 3):
                self.number += 1
                self.waiting[name] += 1
                self.fair.add(request(self.number, name, prompt_tokens=self.rng.randint(1, self.prompt_max)))
            if self.running[name] and self.rng.random() < 0.5:
                self._ends(name)
        head = next(iter(self.fair.walk()))
        name = head.group.namespace
        if len(self.running[name]) >= self.rows:
            self._ends(name)
        self.fair.remove(head)
        self.waiting[name] -= 1
        self.fair.began(name, head.prompt_tokens)
        self.charged[name] += head.prompt_tokens
        self.running[name].append(self.rng.randint(0, self.output_max))
        for pair in itertools.permutations(self.names, 2):
            self._compare(pair)

    def _ends(self, name: str) -> None:
        tokens = self.running[name].pop()
        self.fair.charge(name, tokens)
        self.charged[name] += tokens

    def _compare(self, pair: tuple[str, str]) -> None:
        difference = self.charged[pair[0]] - self.charged[pair[1]]
        if not self.waiting[pair[0]] or not self.waiting[pair[1]]:
            self.least.pop(pair, None)
            return
        self.least[pair] = min(self.least.get(pair, difference), difference)
        self.largest = max(self.largest, difference - self.least[pair])


@pytest.mark.parametrize("quantum", [1, 7, 64, 1000])
def test_namespaces_with_requests_waiting_get_equal_shares_within_the_bound(quantum: int) -> None:
    """Random sizes, late charges for outputs, namespaces that come and go: over every stretch in which two of them had
    requests waiting all the time, their charges differ by at most what the module states."""
    tightest = 0.0
    for seed in range(40):
        shares = Shares(random.Random(seed), quantum)
        for _ in range(400):
            shares.act()
        assert shares.largest <= shares.bound, f"seed {seed}"
        tightest = max(tightest, shares.largest / shares.bound)
    assert tightest > 0.2, "the bound is of the size of what happens"


def test_a_namespace_that_took_much_waits_for_the_others() -> None:
    """One request of ten quanta is paid back in turns left out, however many the others are."""
    fair = FairShare(10)
    for number, (name, tokens) in enumerate([("a", 100), ("a", 1), *[("b", 5)] * 30]):
        fair.add(request(number, name, prompt_tokens=tokens))
    order = []
    while (head := next(iter(fair.walk()), None)) is not None:
        fair.remove(head)
        fair.began(head.group.namespace, head.prompt_tokens)
        order.append(head.group.namespace)
    assert order[0] == "a"
    assert 18 <= order.index("a", 1) <= 22, "a hundred tokens of b came between"


def test_newcomers_without_end_do_not_hold_up_a_round() -> None:
    """A namespace that waits for its next turn gets it, however many new ones come in every turn."""
    fair = FairShare(4)
    for number in range(3):
        fair.add(request(number, "old", prompt_tokens=8))
    served = list[str]()
    for number in range(100, 160):
        fair.add(request(number, f"new{number}", prompt_tokens=4))
        head = next(iter(fair.walk()))
        fair.remove(head)
        fair.began(head.group.namespace, head.prompt_tokens)
        served.append(head.group.namespace)
    assert served.count("old") == 3


def test_debts_of_namespaces_that_left_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace does not get rid of what it owes by leaving the queue; of very many the smallest are dropped."""
    fair = FairShare(10)
    fair.add(request(1, "a", prompt_tokens=50))
    fair.remove(request(1, "a"))
    fair.began("a", 50)
    fair.add(request(2, "b"))
    fair.add(request(3, "a"))
    fair.add(request(4, "b"))
    assert [one.group.namespace for one in fair.walk()][:2] == ["b", "b"]
    monkeypatch.setattr("daemon.core.fair.DEBTS_MAX", 5)
    many = FairShare(10)
    for number in range(100):
        many.charge(f"n{number}", 1000 + number)
        many.began("x", 1)
    content = many.content()
    assert len(content[2]) <= 6  # type: ignore[arg-type]
    assert content[2][0][0] == "n95"  # type: ignore[index]


def test_one_that_starts_out_of_turn_ends_no_rounds_for_the_others() -> None:
    """Where the oldest starts for its age, deep in debt, a newcomer still comes right behind those that have turns."""
    fair = FairShare(10)
    for number in range(1, 3):
        fair.add(request(number, "deep"))
    for number in range(3, 7):
        fair.add(request(number, "light"))
    fair.charge("deep", 10_000)
    deep = fair._accounts["deep"].waiting.first()
    fair.remove(deep)
    fair.began("deep", 5)
    fair.add(request(7, "new"))
    assert [one.group.namespace for one in fair.walk()][:3] == ["light", "new", "light"]
