"""The life table: every row by public transitions, every other pair refused, every accepted choice ends once."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from allocator.capacity import CapacityRefusal, Demand
from allocator.errors import InvariantBroken
from daemon.core import inputs, pressure
from daemon.core.limits import CoreConfig
from daemon.core.memory import Memory
from daemon.core.outputs import Outputs
from daemon.core.reasons import END_TEXT, EndReason
from daemon.core.requests import END_EVENT, HOLDING, LIFE, LIVE, QUEUED, Event, State, step_life
from tests.core.scenes import (
    chunk_retracted,
    chunk_retracted_while_parked,
    drive,
    last_row_parks,
    parked_and_shrunk,
    stage,
)
from tests.core.world import World


def test_the_table_is_closed() -> None:
    """States that are live have every end; terminal states have no event at all."""
    assert {state for state, _ in LIFE} == set(LIVE)
    assert set(LIFE.values()) <= set(State)
    for state, event in itertools.product(LIVE, (Event.FINISH, Event.ABORT, Event.FAIL)):
        assert LIFE[state, event] not in LIVE
    assert not QUEUED & HOLDING


@pytest.mark.parametrize(("state", "event"), [pair for pair in itertools.product(State, Event) if pair not in LIFE])
def test_an_illegal_event_names_both(state: State, event: Event) -> None:
    """What the table does not list breaks an invariant, with the state and the event in the text."""
    with pytest.raises(InvariantBroken, match=f"{event.value}.*{state.value}"):
        step_life(state, event)


def test_every_end_reason_has_an_event_and_a_sentence() -> None:
    """The closed set of reasons is complete in both tables."""
    assert set(END_EVENT) == set(END_TEXT) == set(EndReason)


Pair = tuple[State, Event]


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> set[Pair]:
    """Every transition that any core makes during the test."""
    seen: set[Pair] = set()

    def spy(state: State, event: Event) -> State:
        seen.add((state, event))
        return step_life(state, event)

    monkeypatch.setattr("daemon.core.state.step_life", spy)
    return seen


def simple(ticks: int) -> World:
    """One request of two chunks, some iterations after its arrival."""
    world = World(CoreConfig(page_size=4, max_batched_tokens=8, max_running_requests=2, chunked_prefill_size=8))
    world.send("long", 12, 8)
    for _ in range(ticks):
        world.tick()
        world.report()
    return world


SCENES: dict[State, tuple[Callable[[], World], str]] = {
    State.WAITING: (lambda: simple(0), "long"),
    State.PREFILLING: (lambda: simple(1), "long"),
    State.RUNNING: (lambda: simple(2), "long"),
    State.PARKED_CHUNK: (parked_and_shrunk, "long"),
    State.PARKED_ROW: (last_row_parks, "a"),
    State.RETRACTED: (chunk_retracted, "long"),
}


@pytest.mark.parametrize("state", sorted(LIVE))
@pytest.mark.parametrize("event", [Event.FINISH, Event.ABORT, Event.FAIL])
def test_every_live_state_can_end_in_every_way(state: State, event: Event, walked: set[Pair]) -> None:
    """Whatever a request is doing, a found stop string, an abort and a stop of the daemon end it, once."""
    build, id = SCENES[state]
    world = build()
    drive(world, lambda: stage(world, id) == state)
    if event is Event.FINISH:
        world.feed(inputs.FinishAsked(world.now_ns, "fe", id, 0, 0))
    elif event is Event.ABORT:
        world.abort(id)
    else:
        world.feed(inputs.Controlled(world.now_ns, "stop"))
    assert (state, event) in walked
    assert stage(world, id) == "ended"
    world.run()
    world.check_rest()


def test_the_scenes_walk_every_other_row(walked: set[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row that is no end is walked by inputs alone, but one that needs a chain of another opinion."""
    for build in (parked_and_shrunk, chunk_retracted_while_parked, chunk_retracted, last_row_parks):
        world = build()
        world.run()
        world.check_rest()
    retract_a_parked_row(monkeypatch)
    assert walked >= {pair for pair in LIFE if pair[1] not in (Event.FINISH, Event.ABORT, Event.FAIL)}


def retract_a_parked_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that refuses one question: a lone row parks, nobody is admitted beside it, and its place is asked for."""
    config = CoreConfig(page_size=1, max_running_requests=2, max_batched_tokens=8, overlap=False)
    world = World(config, caching=False)
    world.send("a", 1, 9)
    world.tick()
    world.report()
    honest = Memory.refusal
    opinions: list[bool] = []

    def disagree(memory: Memory, demand: Demand) -> CapacityRefusal | None:
        return honest(memory, (10**6,)) if opinions and opinions.pop() else honest(memory, demand)

    monkeypatch.setattr(Memory, "refusal", disagree)
    monkeypatch.setattr(Memory, "room_pages", lambda memory, planned: 0)
    world.send("b", 4, 9)
    opinions[:] = [True]
    world.tick()
    assert (stage(world, "a"), stage(world, "b")) == ("parked_row", "waiting")
    state = world.core._state
    pressure.retract(state, state.requests[1], 2, {}, world.now_ns, Outputs(), "priority")
    assert stage(world, "a") == "retracted"
    world.tick()
    world.run()
    world.check_rest(refused=True)
