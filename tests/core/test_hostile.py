"""Hostile values: whatever a front end can send, the core answers and goes on."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest

from allocator.capacity import Demand
from allocator.columns import pack_i64
from allocator.errors import InvariantBroken
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.memory import Memory
from ipc.messages import Generate, Sampling
from tests.core.world import World, facts

INTEGERS = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 5, 96, 97, 128, 129, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1]
FLOATS = [0.0, -0.0, 1.0, 0.5, 2.0, -2.0, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"), 5e-324]
NAMES = ["r", "", "x" * 256, "x" * 257, "naïve \U0001f600", "\0", "../../etc", "'; drop table"]


def hostile(rng: random.Random) -> Generate:
    """A request of which each field is usual or anything that its type can hold."""

    def either(usual: Any, others: list[Any]) -> Any:
        return usual if rng.random() < 0.8 else rng.choice(others)

    def column() -> bytes:
        kind = rng.randrange(4)
        if kind == 0:
            return pack_i64([rng.choice([0, 5, 96, 97, -1, 2**62]) for _ in range(rng.randrange(6))])
        return rng.randbytes(rng.randrange(40)) if kind == 1 else pack_i64(range(rng.randrange(1, 60)))

    sampling = Sampling(
        temperature=either(1.0, FLOATS),
        top_p=either(1.0, FLOATS),
        top_k=either(0, INTEGERS),
        min_p=either(0.0, FLOATS),
        repetition_penalty=either(1.0, FLOATS),
        presence_penalty=either(0.0, FLOATS),
        frequency_penalty=either(0.0, FLOATS),
        seed=either(None, INTEGERS),
        logprobs=either(-1, INTEGERS),
        prompt_logprobs=either(-1, INTEGERS),
    )
    return Generate(
        id=either(f"id{rng.randrange(500)}", NAMES),
        prompt=either(pack_i64([1, 2, 3]), [column()]),
        sampling=sampling,
        max_tokens=either(3, [None, *INTEGERS]),
        min_tokens=either(0, INTEGERS),
        stop_ids=either(b"", [column()]),
        n=either(1, INTEGERS),
        priority=either(0, INTEGERS),
        deadline_ms=either(0, INTEGERS),
        clip=rng.random() < 0.5,
        namespace=either("", NAMES),
    )


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_hostile_requests_are_answered_and_nothing_else_happens(policy: str) -> None:
    """Thousands of them between good ones: each gets a reply, the good ones' tokens are right, nothing is left."""
    rng = random.Random(policy)
    config = CoreConfig(
        page_size=4, max_running_requests=4, max_batched_tokens=32, schedule_policy=policy, max_queued_requests=40
    )
    world = World(config, pages=64, model=facts(97, 40))
    for turn in range(3000):
        generate = hostile(rng)
        out = world.arrive(generate)
        assert out.replies, "every request is answered"
        if rng.random() < 0.1:
            world.feed(inputs.FinishAsked(0, "fe", generate.id, rng.choice(INTEGERS), rng.choice(INTEGERS)))
            world.feed(inputs.Aborted(0, rng.choice(["fe", "stranger"]), rng.choice(NAMES), "client"))
            world.feed(inputs.Acknowledged(0, "fe", [generate.id, rng.choice(NAMES)]))
        for _ in range(rng.randrange(3)):
            if world.wants_tick:
                world.tick()
            elif world.reports_waiting:
                world.report()
        if turn % 500 == 0:
            world.run()
    world.run()
    world.check_rest()
    codes = {refusal.code for refusal in world.refusals}
    assert codes >= {"bad_parameter", "empty_prompt", "token_out_of_range", "prompt_too_long", "id_conflict"}
    assert world.core.gauges()["finished_total"] > 250


def test_every_byte_of_a_prompt_may_be_anything() -> None:
    """Columns of every length and random bytes: refused by name or taken, never decoded into foreign memory."""
    rng = random.Random(1)
    world = World()
    for length in range(64):
        world.arrive(Generate(id=f"r{length}", prompt=rng.randbytes(length), sampling=Sampling(), max_tokens=1))
    assert len(world.refusals) == 64
    small = struct.pack("<3q", 1, 2, 3)
    world.arrive(Generate(id="good", prompt=small, sampling=Sampling(), max_tokens=1))
    world.run()
    world.check_rest()


def test_an_estimate_read_while_deciding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planning of a step is a marked decision path: at the strict level an estimate read in it raises."""
    honest = Memory.refusal

    def careless(memory: Memory, demand: Demand) -> object:
        memory.chain.free_estimate()
        return honest(memory, demand)

    world = World()
    world.send("r", 3)
    world.core.view()
    monkeypatch.setattr(Memory, "refusal", careless)
    with pytest.raises(InvariantBroken, match="observe_only"):
        world.tick()
