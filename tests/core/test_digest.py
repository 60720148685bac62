"""The state digest: it tells apart all states that can act differently, and nothing of the state is left out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from daemon.core import inputs
from daemon.core.due import Due
from daemon.core.expected import Estimate
from daemon.core.grid import Kind
from daemon.core.kept_logprobs import UNKNOWN
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided
from daemon.core.requests import Request, State
from daemon.core.state import CoreState, Gift, Helpless
from ipc.messages import Generate, RequestLogprobs, Sampling
from tests.core.world import World

CONFIG = CoreConfig(page_size=4, max_running_requests=4, max_batched_tokens=8, chunked_prefill_size=8)
MS = 1_000_000

# What the digest leaves out, and where the same is said again.
SAID_ELSEWHERE = {
    "core": {"config", "groups", "requests", "memory", "rows", "flights", "frontend_index", "queue"}
    | {"stall_retry_ns"}  # when the shell is asked for a tick; the tick decides, not this
    | {"skipped", "told_evicted"}  # made anew by each pass, and equal to what memory counted
    | {"measure", "ended_bytes"}  # the memory, or the dead one's geometry; and what is counted of the ended groups
    | {"expected", "pace"},  # parts of their own below; what the queue holds has its own test
    "group": {"prompt", "generate"},
    "request": {"group", "sequence", "match"},
    "rows": {"capacity", "page_size", "owners", "tail", "table", "_free", "_batches", "_going"}
    | {"windows", "slots_each", "explicit"},
    "flight": set[str](),
    "expected": {"_full"},  # in the configuration
    "pace": {"_chunk_tokens"},  # in the configuration
}


def waiting(priority: int = 0, deadline_ms: int = 10, seed: int = 1, after_ms: int = 0) -> World:
    """One request waits, with a seed that the daemon drew; nothing was scheduled."""
    world = World(CONFIG)
    world.now_ns += after_ms * MS
    prompt = np.arange(3, dtype=np.int64).tobytes()
    generate = Generate("r", prompt, Sampling(), max_tokens=4, priority=priority, deadline_ms=deadline_ms)
    world.arrive(generate, seed=seed)
    return world


def flush_asked() -> World:
    """The same, and a flush was asked for."""
    world = waiting()
    world.feed(inputs.FlushAsked(world.now_ns, 8))
    return world


OTHERS = {
    "seed": lambda: waiting(seed=2),
    "deadline": lambda: waiting(deadline_ms=20),
    "arrival": lambda: waiting(after_ms=5),
    "priority": lambda: waiting(priority=1),
    "flush": flush_asked,
}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_states_that_decide_differently_have_different_digests(name: str) -> None:
    """One difference in what was fed, the same tick after it: other outputs, and other digests before."""
    one, other = waiting(), OTHERS[name]()
    assert one.core.state_digest() == waiting().core.state_digest()
    assert one.core.state_digest() != other.core.state_digest()
    if name == "priority":
        return  # decides only beside a second request
    for world in (one, other):
        world.now_ns = waiting().now_ns + (5 if name == "seed" else 12) * MS  # before the deadline, or after it
        world.tick()
    assert bytes(one.log) != bytes(other.log)


def test_another_arena_or_another_configuration_is_another_state() -> None:
    """Empty cores of other geometry or limits digest differently."""
    digests = set()
    for config, pages in ((CONFIG, 64), (CONFIG, 65), (msgspec.structs.replace(CONFIG, retracts_max=3), 64)):
        digests.add(World(config, pages=pages).core.state_digest())
    assert len(digests) == 3


def scene() -> World:
    """Steps in flight, a decoding row, a resident chunk, requests that wait, an ended id."""
    world = World(CONFIG)
    world.send("ended", 3, 1)
    world.run()
    world.send("decodes", 3, 30)
    world.send("chunked", 40, 4)
    world.send("waits", 3, 4, stop_ids=np.array([5], np.int64).tobytes())
    for _ in range(2):
        world.tick()
        world.report()
    world.tick()
    state = world.core._state
    assert state.flights
    assert state.resident is not None
    assert state.rows.decoding.any()
    assert len(state.queue)
    assert state.ended_groups
    return world


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, State):
        return State.PARKED_ROW
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str | bytes):
        return value + value[:1] if value else type(value)(b"x" if isinstance(value, bytes) else "x")
    if isinstance(value, msgspec.Struct):
        field = value.__struct_fields__[0]
        return msgspec.structs.replace(value, **{field: changed(getattr(value, field))})
    if dataclasses.is_dataclass(value) and not isinstance(value, Request | type):
        field = dataclasses.fields(value)[0].name
        return dataclasses.replace(value, **{field: changed(getattr(value, field))})
    if isinstance(value, np.ndarray):
        return ~value if value.dtype == np.bool_ else value + 1 if value.size else np.ones(1, value.dtype)
    if isinstance(value, tuple):
        return (*value, (1, 1))
    raise AssertionError(f"how does a {type(value).__name__} change?")


def changed_container(name: str, value: Any, core: CoreState) -> Any:
    """Another content of the containers that hold more than plain values."""
    some, due = core.requests[max(core.requests)], Due()
    due.add(1, some.number)
    contents: dict[str, Any] = {
        "frontends": ["other"],
        "lost_frontends": {0: None},
        "counts": {**core.counts, State.RUNNING: 77},
        "ended_groups": {},
        "parked_rows": [some],
        "relief": {"rows": Decided(1, "relief", 0, "park")},
        "resident": None,
        "suspects": {some.number: None},
        "trial": some,
        "kept": [b"\0" * 8],
        "gifts": {0: Gift(4, 1, Kind.PROMPT)},
        "checkpoints_given": [1, *core.checkpoints_given[1:]],
        "checkpoints_hit": [1, *core.checkpoints_hit[1:]],
        "changed": {0: [1]},
        "lock": next(owner.lock for owner in core.rows.owners if owner is not None),
        "launched": [99],
        "flying": [True],
        "bound": [99],
        "helpless": Helpless(some.number, 1, (0, 0, 0), 1),
        "deadlines": due,
        "_estimates": {"": Estimate(7)},
        "outputs": {0: b"\0" * 8},
        "logprobs": {0: [RequestLogprobs(1, -1, UNKNOWN)]},
        "prompt_logprobs": [RequestLogprobs(1, 1, UNKNOWN)],
        "output_logprobs": [RequestLogprobs(1, -1, UNKNOWN)],
        "ended": {0: next(iter(next(iter(core.ended_groups.values())).ended.values()))},
    }
    if name in contents and not isinstance(value, np.ndarray):
        assert contents[name] != value
        return contents[name]
    return changed(value)


def parts(core: CoreState) -> Iterator[tuple[str, Any]]:
    """Every object of the state that holds fields."""
    yield "core", core
    yield "rows", core.rows
    yield "flight", core.flights[0]
    yield "expected", core.expected
    yield "pace", core.pace
    request = core.requests[max(core.requests)]
    yield "request", request
    yield "group", request.group


def fields_of(held: Any) -> list[str]:
    """Names of a part's fields."""
    return [field.name for field in dataclasses.fields(held)] if dataclasses.is_dataclass(held) else sorted(vars(held))


def test_every_field_of_the_state_is_in_the_digest() -> None:
    """Changing any one field changes the digest, but for those that the rest of the state says again."""
    missed = []
    names = [(kind, field) for kind, held in parts(scene().core._state) for field in fields_of(held)]
    for kind, field in names:
        if field in SAID_ELSEWHERE[kind]:
            continue
        world = scene()
        core = world.core._state
        before = world.core.state_digest()
        held = dict(parts(core))[kind]
        setattr(held, field, changed_container(field, getattr(held, field), core))
        if world.core.state_digest() == before:
            missed.append(f"{kind}.{field}")
    assert not missed
    assert len(names) > 60


def test_pages_and_ids_that_are_live_are_in_the_digest() -> None:
    """The same counts with other pages, or another op waiting for its step, are other states."""
    world, other = scene(), scene()
    row = int(np.flatnonzero(other.core._state.rows.decoding)[0])
    other.core._state.rows.table[row, 0] += 1
    assert world.core.state_digest() != other.core.state_digest()
    memory = world.core._state.memory
    assert memory is not None
    before = world.core.state_digest()
    memory.flush(1)
    assert world.core.state_digest() != before
