"""Preemption by priority: who gives way for whom, and that nobody does in vain."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from daemon.core import batching, preempt
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from daemon.core.requests import Request
from daemon.core.state import CoreState
from daemon.core.tree_alone import held_alone
from tests.core.rank_double import FULL_ONLY, Shape
from tests.core.scenes import drive, stage
from tests.core.world import World

SHAPES = {
    "full": FULL_ONLY,
    "window": Shape(windows=(9,)),
    "state": Shape(state=True),
    "everything": Shape(windows=(21, 6), state=True),
}


def world(pages: int = 64, shape: Shape = FULL_ONLY, caching: bool = True, **config: Any) -> World:
    """Preemption is on."""
    settings: dict[str, Any] = {
        "page_size": 4,
        "max_running_requests": 2,
        "max_batched_tokens": 32,
        "checkpoint_interval": 8,
        "priority_preemption": True,
    }
    return World(CoreConfig(**(settings | config)), pages, shape=shape, caching=caching)


def test_O3_a_high_priority_does_not_wait_behind_slots_of_low_ones() -> None:
    """Every row taken by low ones: the high one runs with the next step, the cheapest low one goes on later, its output
    that of a lone run."""
    one = world()
    one.send("old", 12, 30, priority=-1)
    one.send("young", 5, 30, priority=-1)
    drive(one, lambda: stage(one, "young") == "running")
    one.send("high", 6, 5, priority=3)
    one.turn()
    assert (stage(one, "high"), stage(one, "young"), stage(one, "old")) == ("running", "retracted", "running")
    (decision,) = one.verdicts("retracted")
    assert (decision.reason, decision.by, decision.numbers["priority"]) == ("priority", 3, 3)
    one.run()
    one.check_rest()
    assert one.core.gauges()["preemptions_total"] == 1
    assert all(one.output(id) == one.expected(id)[0] for id in ("old", "young", "high"))


@pytest.mark.parametrize(
    ("config", "priority"),
    [({"priority_preemption": False}, 3), ({}, 0), ({"retracts_max": 0}, 3)],
    ids=["off", "equal priority", "protected"],
)
def test_nobody_gives_way_where_the_rule_does_not_say_so(config: dict[str, Any], priority: int) -> None:
    """Switched off, without a higher priority, or against protected requests: the new one waits."""
    one = world(**config)
    for id in ("a", "b"):
        one.send(id, 5, 12)
    drive(one, lambda: stage(one, "b") == "running")
    one.send("new", 6, 5, priority=priority)
    one.turn()
    assert stage(one, "new") == "waiting"
    one.run()
    one.check_rest()
    assert not one.verdicts("retracted")


def test_victims_must_make_room_or_nobody_is_taken() -> None:
    """All of lower priority together would not be enough beside one that is higher: admission says no first."""
    one = world(pages=20, caching=False, max_running_requests=4, reserve="full", page_size=1)
    one.send("higher", 6, 7, priority=9)
    one.send("low", 2, 5, priority=-1)
    drive(one, lambda: stage(one, "low") == "running")
    one.send("middle", 9, 6, priority=3)
    for _ in range(3):
        one.turn()
        assert (stage(one, "middle"), stage(one, "low")) == ("waiting", "running")
    one.run()
    one.check_rest()
    assert not one.verdicts("retracted")


def test_only_victims_that_are_needed_are_taken() -> None:
    """The cheapest alone would not do and a dearer one alone does: the cheap one is kept."""
    one = world(pages=31, caching=False, max_running_requests=4, reserve="full", page_size=1)
    one.send("cheap", 1, 3, priority=-1)
    one.send("dear", 14, 8, priority=-1)
    drive(one, lambda: stage(one, "dear") == "running")
    one.send("high", 12, 8, priority=3)
    one.turn()
    assert [decision.request for decision in one.verdicts("retracted")] == [2]
    assert stage(one, "high") == "running"
    one.run()
    one.check_rest()


def test_the_lowest_priority_gives_way_first() -> None:
    """Priority before cost, and the resident chunk of a long prompt may be the victim."""
    one = world(max_running_requests=2, chunked_prefill_size=8, max_batched_tokens=9)
    one.send("long", 60, 4, priority=-5)
    one.send("small", 3, 30, priority=-1)
    drive(one, lambda: stage(one, "long") == "prefilling" and stage(one, "small") != "waiting")
    one.send("high", 6, 5, priority=3)
    drive(one, lambda: bool(one.verdicts("retracted")))
    assert stage(one, "long") == "retracted"
    assert stage(one, "small") == "running"
    one.run()
    one.check_rest()


def test_a_request_is_preempted_a_bounded_number_of_times() -> None:
    """High ones without end: the low one is protected once it was retracted so often, and comes to its end."""
    one = world(max_running_requests=1, retracts_max=2)
    one.send("low", 3, 20, priority=-1)
    drive(one, lambda: stage(one, "low") == "running")
    for k in range(6):
        one.send(f"high{k}", 3, 2, priority=1)
        for _ in range(8):
            one.turn()
    one.run()
    one.check_rest()
    assert len(one.verdicts("retracted")) == 2
    assert one.finished("low").reason == "length"


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("caching", [False, True])
def test_whoever_was_preempted_made_room(shape: str, caching: bool) -> None:
    """Random worlds of every family: each preemption is followed by the admission of the one it was for in the same
    step, its victims had lower priority, and everybody gets the tokens of a lone run."""
    preempted = 0
    for seed in range(8):
        rng = random.Random(seed)
        one = world(
            pages=rng.choice([24, 40]),
            shape=SHAPES[shape],
            caching=caching,
            max_running_requests=rng.choice([1, 2, 4]),
            chunked_prefill_size=rng.choice([8, 16]),
            reserve=rng.choice(["estimate", "full"]),
            schedule_policy=rng.choice(["priority", "fair", "lpm", "deadline"]),
        )
        stem = [rng.randrange(90) for _ in range(40)]
        for k in range(24):
            prompt = stem[: rng.choice([0, 8, 20])] + [rng.randrange(90) for _ in range(rng.randint(1, 20))]
            one.send(f"r{k}", prompt, rng.randint(1, 16), priority=rng.randint(-2, 2))
            for _ in range(rng.randint(0, 4)):
                if one.wants_tick:
                    preempted += check_tick(one)
                elif one.reports_waiting:
                    one.report()
        while one.wants_tick or one.reports_waiting:
            if one.wants_tick:
                preempted += check_tick(one)
            else:
                one.report()
        one.check_rest()
    assert preempted > 3


def check_tick(one: World) -> int:
    """One tick; the number of victims of preemption in it, each of which must have helped."""
    requests = dict(one.core._state.requests)
    decisions = one.tick().decisions
    victims = [entry for entry in decisions if entry.verdict == "retracted" and entry.reason == "priority"]
    admitted = [entry.request for entry in decisions if entry.verdict == "admitted"]
    for entry in victims:
        assert entry.by in admitted, "who was helped starts in this step"
        assert requests[entry.request].priority < requests[entry.by].priority
    return len(victims)


def test_what_readers_hold_alone_is_what_letting_them_go_gives() -> None:
    """Random worlds: for every set of up to three running requests the answer is the growth of `reclaimable` when their
    locks are let go in a copy of the world."""
    compared = 0
    for seed, shape in itertools.product(range(2), sorted(SHAPES)):
        one = played(seed, SHAPES[shape])
        numbers = sorted(owner.number for owner in one.core._state.rows.owners if owner is not None)
        for chosen in itertools.chain.from_iterable(itertools.combinations(numbers, k) for k in (1, 2, 3)):
            copy = played(seed, SHAPES[shape])
            memory = copy.core._state.memory
            assert memory is not None
            assert memory.cache is not None
            locks = [lock for lock in (copy.core._state.requests[number].lock for number in chosen) if lock]
            windows = [band for band, _ in memory.windows]
            said = held_alone(locks, len(memory.none), memory.owner, memory.state, windows)
            before = memory.cache.reclaimable()
            for lock in locks:
                memory.cache.unlock(lock)
            assert tuple(b + s for b, s in zip(before, said, strict=True)) == memory.cache.reclaimable()
            compared += any(said)
    assert compared > 20


def played(seed: int, shape: Shape) -> World:
    """A world in mid-flight with readers that share."""
    rng = random.Random(seed)
    one = world(pages=80, shape=shape, max_running_requests=4, chunked_prefill_size=8)
    stem = [rng.randrange(90) for _ in range(40)]
    for k in range(8):
        one.send(f"r{k}", stem[: rng.choice([8, 16, 24])] + [rng.randrange(90) for _ in range(rng.randint(1, 12))], 12)
        for _ in range(rng.randint(2, 12)):
            one.turn()
    return one


def test_without_a_scene_the_question_changes_nothing() -> None:
    """A world in which nobody may be asked decides as one where preemption is off, byte for byte."""
    logs = []
    for on in (False, True):
        rng = random.Random(3)
        one = world(priority_preemption=on)
        for k in range(30):
            one.send(f"r{k}", rng.randint(1, 20), rng.randint(1, 8), priority=2)
            one.turn()
        one.run()
        logs.append(bytes(one.log))
    assert logs[0] == logs[1]


def test_nobody_gives_way_while_admissions_are_throttled() -> None:
    """Behind a shortage of pages nobody may start for some steps: who gave way then would have made room for nobody."""
    settings: dict[str, Any] = {"page_size": 1, "max_batched_tokens": 64, "chunked_prefill_size": 4, "overlap": False}
    one = world(pages=88, caching=False, max_running_requests=9, **settings)
    for k in range(8):
        one.send(f"s{k}", 1, 13)
    one.send("long", 30, 1)
    drive(one, lambda: bool(one.verdicts("retracted")))
    assert one.core._state.throttled_steps
    one.send("high", 40, 2, priority=9)
    drive(one, lambda: one.verdicts("retracted")[-1].reason == "priority")
    assert stage(one, "high") == "prefilling"
    one.run()
    one.check_rest()


ROOM: dict[str, Any] = {"max_running_requests": 8, "max_batched_tokens": 64}

# --- a no that is remembered ------------------------------------------------------------------------------------------


def helpless(**config: Any) -> World:
    """Three run, and a fourth of a priority between theirs waits: those below it hold too little for it."""
    settings: dict[str, Any] = {"page_size": 1, "max_running_requests": 4, "reserve": "full"}
    one = world(pages=118, caching=False, **(settings | config))
    one.send("low", 2, 40, priority=-1)
    one.send("equal", 2, 30, priority=3)
    one.send("higher", 2, 30, priority=9)
    drive(one, lambda: stage(one, "higher") == "running")
    one.send("middle", 28, 30, priority=3)
    return one


def test_what_cannot_be_helped_is_not_asked_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in which no row comes or goes: the two questions are asked once, and again after so many passes."""
    asked = 0
    ask = preempt.starts

    def counted(*args: Any) -> bool:
        nonlocal asked
        asked += 1
        return ask(*args)

    one = helpless()
    monkeypatch.setattr(preempt, "starts", counted)
    for _ in range(20):
        one.turn()
        assert (stage(one, "middle"), stage(one, "low")) == ("waiting", "running")
    assert asked == 2
    monkeypatch.setattr(preempt, "ASK_AGAIN_PASSES", 2)
    one.turn()
    assert asked == 4


@pytest.mark.parametrize("later", range(1, 20, 3))
def test_who_could_not_be_helped_is_helped_when_a_row_was_given_back(later: int) -> None:
    """A row of higher priority comes free, and those below are enough then: the one that waits runs in the next step,
    having been asked for in vain only once."""
    one = helpless()
    for _ in range(later):
        one.turn()
        assert stage(one, "middle") == "waiting"
    one.abort("higher")
    passes = one.core.passes
    drive(one, lambda: one.core.passes > passes)
    assert (stage(one, "middle"), stage(one, "low")) == ("running", "retracted")
    one.run()
    one.check_rest()


def test_rows_that_come_and_go_do_not_have_it_asked_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones of higher priority start and end in every step: the questions come rarer, and never stop."""
    at: list[int] = []
    ask = preempt.starts
    one = helpless(max_running_requests=5)
    core = one.core._state

    def noted(core: CoreState, request: Request, victims: list[Request]) -> bool:
        if request.number == 4:
            at.append(core.totals.passes)
        return ask(core, request, victims)

    monkeypatch.setattr(preempt, "starts", noted)
    began = core.totals.passes
    for k in range(8):
        one.send(f"small{k}", 1, 1, priority=10)
        for _ in range(6):
            one.turn()
    assert stage(one, "middle") == "waiting"
    asked = sorted(set(at))
    gaps = [after - before for before, after in itertools.pairwise(asked)]
    assert gaps[:3] == sorted(gaps[:3])
    assert max(gaps) <= preempt.PAUSE_MAX_PASSES + 1
    assert len(asked) < (core.totals.passes - began) // 3


@pytest.mark.parametrize("caching", [False, True])
def test_decoding_rows_never_turn_a_no_into_a_yes(caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random worlds of full pages in which whole outputs are reserved: while no row came or went, what was remembered
    is what a question would find."""
    compared = 0

    def compare(core: CoreState, now_ns: int, out: Outputs) -> Request | None:
        nonlocal compared
        told = core.helpless
        request = core.requests.get(told.request) if told is not None else None
        if told is not None and request is not None and request.row < 0 and told.rows == core.row_changes():
            lower = [one for one in core.rows.owners if one is not None and preempt._below(core, one, request)]
            if lower and not core.throttled_steps:
                compared += 1
                assert not preempt.starts(core, request, lower)
        return preempt.preempt(core, now_ns, out)

    monkeypatch.setattr(batching, "preempt", compare)
    for seed in range(24):
        rng = random.Random(seed)
        page = rng.choice([1, 2, 4])
        one = world(-(-rng.randint(100, 126) // page), caching=caching, reserve="full", page_size=page, **ROOM)
        stem = [rng.randrange(90) for _ in range(8)]
        for k, priority in enumerate([-1, -1, 3, 9, 9]):
            one.send(f"r{k}", [*stem[: rng.choice([0, 2, 8])], k], rng.randint(10, 24), priority=priority)
        drive(one, lambda one=one: not one.core.gauges()["waiting"])  # type: ignore[misc]
        one.send("waits", stem[: rng.choice([0, 2, 8])] + [7] * 20, rng.randint(30, 50), priority=3)
        one.run()
        one.check_rest()
    assert compared > 60
