"""Arrival checks: each refusal has its code, field, limit and value, and holds nothing; equal ids are idempotent."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from allocator.columns import pack_i64
from daemon.core import inputs
from daemon.core.arrival import RANGES
from daemon.core.limits import CoreConfig
from daemon.core.reasons import RefusalCode
from daemon.frontend.schemas import TABLES
from ipc.messages import Generate, Sampling
from tests.core.world import World, facts

PROMPT = pack_i64([1, 2, 3])


def refused(generate: Generate, world: World | None = None) -> Any:
    """The refusal that a request gets; the world must hold nothing for it."""
    world = world or World()
    out = world.arrive(generate)
    assert [reply.message for reply in out.replies] == world.refusals[-1:]
    assert world.core.gauges()["live"] == 0
    assert not world.knows("fe", generate.id)
    assert [decision.verdict for decision in out.decisions] == ["refused"]
    assert out.decisions[0].reason == world.refusals[-1].code
    return world.refusals[-1]


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> Generate:
    """A request that is right except for what is given."""
    fields = {"id": "r", "prompt": PROMPT, "max_tokens": 4} | fields
    return Generate(sampling=Sampling(**(sampling or {})), **fields)


def measured(step_ms: int = 1, **config: Any) -> World:
    """A world in which enough forwards were measured to hold deadlines against them, each as long as the other."""
    world = World(CoreConfig(**{"page_size": 4, "max_batched_tokens": 8, "chunked_prefill_size": 8} | config))
    world.send("measure", 8, 40)
    while world.turn():
        world.now_ns += (step_ms - 1) * 1_000_000 if world.reports_waiting == 0 else 0
    return world


BAD_FIELDS = [
    ("n", 0, 1),
    ("n", -1, 1),
    ("n", 129, 128),
    ("n", 2**63, 128),
    ("max_tokens", -1, 0),
    ("max_tokens", 0, 1),
    ("max_tokens", 2**63, 2**31 - 1),
    ("min_tokens", -1, 0),
    ("min_tokens", 2**40, 2**31 - 1),
    ("min_tokens", 5, 4),
    ("priority", 10**9, 10**6),
    ("priority", -(10**9), -(10**6)),
    ("deadline_ms", -1, 0),
    ("deadline_ms", 2**60, 7 * 24 * 3600 * 1000),
    ("pin_ms", -1, 0),
    ("pin_ms", 2**60, 7 * 24 * 3600 * 1000),
]

BAD_SAMPLING = [
    ("top_k", -1, 0),
    ("top_k", 2**31, 2**31 - 1),
    ("seed", 10**20, 2**63 - 1),
    ("seed", -(10**20), -(2**63)),
    ("logprobs", 21, 20),
    ("logprobs", -2, -1),
    ("prompt_logprobs", 21, 20),
    ("prompt_logprobs", -7, -1),
]

BAD_FLOATS = [
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e9),
    ("presence_penalty", 2.5),
    ("presence_penalty", -2.5),
    ("frequency_penalty", -3.0),
    ("frequency_penalty", 3.0),
]


@pytest.mark.parametrize(("field", "value", "limit"), BAD_FIELDS)
def test_a_number_out_of_range_is_refused_by_field_limit_and_value(field: str, value: int, limit: int) -> None:
    """The refusal names the field, the nearest allowed value and the value given."""
    refusal = refused(request(**{field: value}))
    assert (refusal.code, refusal.field, refusal.limit) == (RefusalCode.BAD_PARAMETER, field, limit)
    assert refusal.value == min(value, 2**63 - 1)
    assert str(value) in refusal.message
    assert field in refusal.message


@pytest.mark.parametrize(("field", "value", "limit"), BAD_SAMPLING)
def test_a_sampling_number_out_of_range_is_refused(field: str, value: int, limit: int) -> None:
    """Sampling fields are refused under their own names, wider than 64 bits too."""
    refusal = refused(request({field: value}))
    assert (refusal.code, refusal.field, refusal.limit) == (RefusalCode.BAD_PARAMETER, field, limit)
    assert str(value) in refusal.message


@pytest.mark.parametrize(("field", "value"), BAD_FLOATS)
def test_a_float_out_of_range_is_refused(field: str, value: float) -> None:
    """Values outside an interval are refused, an excluded end too."""
    refusal = refused(request({field: value}))
    assert (refusal.code, refusal.field) == (RefusalCode.BAD_PARAMETER, field)
    assert str(value) in refusal.message


@pytest.mark.parametrize("field", sorted({name for name, _ in BAD_FLOATS}))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_that_is_no_number_is_refused(field: str, value: float) -> None:
    """NaN and infinities never pass."""
    assert refused(request({field: value})).field == field


def test_a_long_id_or_namespace_is_refused() -> None:
    """Names have a length limit, and an id must not be empty."""
    assert refused(request(id="")).field == "id"
    assert refused(request(id="x" * 257)).limit == 256
    assert refused(request(namespace="x" * 300)).value == 300


def test_empty_prompt() -> None:
    """A prompt has at least one token."""
    refusal = refused(request(prompt=b""))
    assert (refusal.code, refusal.field) == (RefusalCode.EMPTY_PROMPT, "prompt")


@pytest.mark.parametrize("field", ["prompt", "stop_ids"])
@pytest.mark.parametrize("token", [-1, 97, 2**31, 2**63 - 1, -(2**63)])
def test_a_token_outside_the_vocabulary(field: str, token: int) -> None:
    """The first offending token and its place are named."""
    refusal = refused(request(**{field: pack_i64([3, token, -5])}))
    assert (refusal.code, refusal.field) == (RefusalCode.TOKEN_OUT_OF_RANGE, field)
    assert (refusal.limit, refusal.value) == (96, token)
    assert f"{field}[1]" in refusal.message


@pytest.mark.parametrize("field", ["prompt", "stop_ids"])
def test_a_ragged_column_is_refused(field: str) -> None:
    """Bytes that are no whole int64 column are refused, never decoded."""
    refusal = refused(request(**{field: b"\x01" * 13}))
    assert (refusal.code, refusal.field, refusal.value) == (RefusalCode.BAD_PARAMETER, field, 13)


def test_too_many_stop_ids() -> None:
    """The number of stop ids is bounded."""
    world = World(CoreConfig(page_size=4, max_running_requests=4, stop_ids_max=2))
    refusal = refused(request(stop_ids=pack_i64([1, 2, 3])), world)
    assert (refusal.code, refusal.field, refusal.limit) == (RefusalCode.BAD_PARAMETER, "stop_ids", 2)


def test_prompt_and_output_against_the_models_length() -> None:
    """Both limits are sharp, `clip` and an open max_tokens cut, and the cut is told."""
    world = World(model=facts(97, 32))
    assert refused(request(prompt=pack_i64([1] * 33)), world).code == RefusalCode.PROMPT_TOO_LONG
    refusal = refused(request(prompt=pack_i64([1] * 32)), world)
    assert (refusal.code, refusal.limit, refusal.value) == (RefusalCode.PROMPT_TOO_LONG, 31, 32)
    refusal = refused(request(prompt=pack_i64([1] * 30), max_tokens=3), world)
    assert (refusal.code, refusal.field) == (RefusalCode.OUTPUT_TOO_LONG, "max_tokens")
    assert (refusal.limit, refusal.value) == (2, 3)
    world.send("fits", 30, 2)
    world.send("cut", 30, 3, clip=True)
    world.send("open", 30, None)
    assert [world.clients["fe", id].accepted.max_tokens for id in ("fits", "cut", "open")] == [2, 2, 2]
    world.run()
    world.check_rest()


def test_the_configured_length_is_below_the_models() -> None:
    """`max_model_len` lowers the limit and never raises it."""
    low = World(CoreConfig(page_size=4, max_model_len=16), model=facts(97, 32))
    assert refused(request(prompt=pack_i64([1] * 17)), low).limit == 16
    high = World(CoreConfig(page_size=4, max_model_len=999), model=facts(97, 32))
    assert refused(request(prompt=pack_i64([1] * 33)), high).limit == 32


def test_prompt_and_output_against_the_empty_memory() -> None:
    """What the arena can never hold is refused with both numbers, or cut where the client allows."""
    world = World(pages=4)  # 16 tokens; the newest output token needs no place
    refusal = refused(request(prompt=pack_i64([1] * 17)), world)
    assert (refusal.code, refusal.field, refusal.limit, refusal.value) == (RefusalCode.NEVER_FITS, "prompt", 16, 17)
    refusal = refused(request(prompt=pack_i64([1] * 10), max_tokens=8), world)
    assert (refusal.code, refusal.field, refusal.limit, refusal.value) == (RefusalCode.NEVER_FITS, "max_tokens", 7, 8)
    world.send("exact", 10, 7)
    world.send("cut", 10, 400, clip=True)
    world.send("open", 16, None)
    assert [world.clients["fe", id].accepted.max_tokens for id in ("exact", "cut", "open")] == [7, 7, 1]
    world.run()
    world.check_rest()


def test_a_minimum_above_what_is_left_after_the_cut_is_refused() -> None:
    """`min_tokens` is compared with the output that is really allowed."""
    world = World(pages=4)
    refusal = refused(request(prompt=pack_i64([1] * 10), max_tokens=50, min_tokens=8, clip=True), world)
    assert (refusal.field, refusal.limit, refusal.value) == ("min_tokens", 7, 8)


def test_queue_full_says_when_to_come_back() -> None:
    """The queue's limit holds for all choices of a request together, and the hint is within its bounds."""
    world = World(CoreConfig(page_size=4, max_running_requests=1, max_queued_requests=3))
    world.send("a", 3, n=2)
    out = world.send("b", 3, n=2)
    refusal = world.refusals[-1]
    assert (refusal.code, refusal.limit, refusal.value) == (RefusalCode.QUEUE_FULL, 3, 4)
    assert 100 <= refusal.retry_after_ms <= 30_000
    assert out.replies[0].message is refusal
    world.send("c", 3)
    assert len(world.refusals) == 1
    world.run()
    world.check_rest()


def test_more_choices_than_can_ever_wait_are_a_bad_parameter() -> None:
    """Trying again would never help, so it is no full queue: the refusal names the limit's flag and both numbers."""
    world = World(CoreConfig(page_size=4, max_queued_requests=3))
    refusal = refused(request(n=4), world)
    assert (refusal.code, refusal.field, refusal.limit, refusal.value) == (RefusalCode.BAD_PARAMETER, "n", 3, 4)
    assert "--max-queued-requests" in refusal.message
    assert refusal.retry_after_ms == 0
    world.arrive(request(n=3))
    assert len(world.refusals) == 1


def test_the_hint_when_to_come_back_counts_only_time_in_which_somebody_waited() -> None:
    """An idle hour between two requests says nothing about how fast the queue moves; a wait of a second does."""
    second_ns = 1_000_000_000
    world = World(CoreConfig(page_size=4, max_running_requests=1, max_queued_requests=1))
    world.send("before", 3, 1)
    world.run()
    world.now_ns += 3600 * second_ns
    world.send("after", 3, 9)
    world.tick()
    world.send("waits", 3, 1)
    world.send("full", 3)
    assert (world.refusals[-1].code, world.refusals[-1].retry_after_ms) == (RefusalCode.QUEUE_FULL, 100)
    world.now_ns += 16 * second_ns
    world.run()
    world.send("runs", 3, 9)
    world.tick()
    world.send("waits too", 3, 1)
    world.send("full again", 3)
    assert 1000 <= world.refusals[-1].retry_after_ms <= 2000, "an eighth of the sixteen seconds counts so far"


def test_a_priority_is_refused_where_it_means_nothing() -> None:
    """Under fcfs no priority but the neutral one is taken, by a refusal that names the flag; by default all are."""
    refusal = refused(request(priority=5), World(CoreConfig(page_size=4, schedule_policy="fcfs")))
    assert (refusal.code, refusal.field, refusal.value) == (RefusalCode.BAD_PARAMETER, "priority", 5)
    assert "--schedule-policy" in refusal.message
    fcfs = World(CoreConfig(page_size=4, schedule_policy="fcfs"))
    fcfs.arrive(request(priority=0))
    default = World()
    default.arrive(request(priority=5))
    assert not fcfs.refusals + default.refusals


@pytest.mark.parametrize("policy", ["lpm", "priority", "deadline", "fair"])
def test_a_priority_is_taken_wherever_it_breaks_ties(policy: str) -> None:
    """Every other policy asks for the priority of equal requests, so none is refused."""
    world = World(CoreConfig(page_size=4, schedule_policy=policy))
    world.arrive(request(priority=5))
    assert not world.refusals


def test_a_pin_is_refused_where_nothing_would_be_kept() -> None:
    """Without a cache, and for a request that is not stored: by name, with the reason."""
    refusal = refused(request(pin_ms=5, store=False))
    assert (refusal.code, refusal.field, refusal.value) == (RefusalCode.BAD_PARAMETER, "pin_ms", 5)
    assert "store is false" in refusal.message
    off = World(caching=False)
    assert "the prefix cache is off" in refused(request(pin_ms=5), off).message
    off.arrive(request(store=False))
    assert len(off.refusals) == 1, "nothing is stored there anyway"


def test_draining_and_not_ready_and_a_degraded_journal_refuse_new_requests() -> None:
    """Each closed door has its code, and the degraded journal's opens again."""
    early = World(begin=False)
    early.arrive(request())
    assert early.refusals[-1].code == RefusalCode.NOT_READY
    world = World()
    world.feed(inputs.JournalDegraded(0, False, "disk full"))
    assert refused(request(), world).code == RefusalCode.NOT_READY
    assert "disk full" in world.refusals[-1].message
    world.feed(inputs.JournalDegraded(0, True, ""))
    world.send("taken", 3)
    world.feed(inputs.Controlled(0, "drain"))
    world.arrive(request(id="late"))
    assert world.refusals[-1].code == RefusalCode.DRAINING
    world.run()
    assert world.finished("taken").reason == "length"


def test_the_same_id_with_the_same_content_is_answered_again() -> None:
    """A repeated request changes nothing: it gets the same acceptance, and the end when it has ended."""
    world = World()
    generate = request(n=2)
    first = world.arrive(generate)
    again = world.arrive(generate, seed=99)
    assert [reply.message for reply in first.replies] == [reply.message for reply in again.replies]
    assert not again.decisions
    world.run()
    late = world.arrive(generate)
    assert [type(reply.message).__name__ for reply in late.replies] == ["Accepted", "Finished", "Finished"]
    gauges = world.core.gauges()
    assert (gauges["received_total"], gauges["repeated_total"]) == (2, 2)
    world.check_rest()


def test_the_same_id_with_other_content_is_refused() -> None:
    """An id in use by other content is refused by name; another front end may use the same id."""
    world = World()
    world.arrive(request())
    world.arrive(request(max_tokens=5))
    assert (world.refusals[-1].code, world.refusals[-1].field) == (RefusalCode.ID_CONFLICT, "id")
    world.arrive(request(max_tokens=5), frontend="other")
    assert len(world.refusals) == 1
    world.run()
    world.feed(inputs.Acknowledged(world.now_ns, "fe", ["r"]))
    assert not world.knows("fe", "r")
    world.arrive(request(max_tokens=6))
    assert len(world.refusals) == 1


def test_every_refusal_code_is_reached() -> None:
    """The closed set is not larger than what can happen: every code is raised in this module."""
    tight = World(CoreConfig(page_size=4, max_queued_requests=1), pages=4, model=facts(97, 32))
    codes = set()
    for generate in [
        request(prompt=b""),
        request(prompt=pack_i64([97])),
        request(prompt=pack_i64([1] * 40)),
        request(prompt=pack_i64([1] * 10), max_tokens=30),
        request(prompt=pack_i64([1] * 10), max_tokens=20),
        request(n=0),
    ]:
        codes.add(refused(generate, tight).code)
    tight.arrive(request())
    tight.arrive(request(max_tokens=1))
    tight.arrive(request(id="second"))
    tight.feed(inputs.Controlled(0, "drain"))
    tight.arrive(request(id="x"))
    tight.feed(inputs.EpochEnded(0, 1, "test"))
    early = World(begin=False)
    early.arrive(request())
    late = measured()
    late.send("late", 40, 1, deadline_ms=1)
    late.feed(inputs.Resumed(0, "fe", "never sent", 0, b""))
    codes |= {refusal.code for refusal in tight.refusals + early.refusals + late.refusals}
    assert codes == set(RefusalCode)


def test_the_seed_is_the_clients_or_the_drawn_one() -> None:
    """A seed that the client gave is used, else the one the daemon drew; the acceptance tells which."""
    world = World()
    world.arrive(request(id="given", sampling={"seed": -5}), seed=11)
    world.arrive(request(id="zero", sampling={"seed": 0}), seed=11)
    world.arrive(request(id="drawn"), seed=12)
    assert [world.clients["fe", id].accepted.seed for id in ("given", "zero", "drawn")] == [-5, 0, 12]
    out = world.tick()
    assert out.step is not None
    assert out.step.forward is not None
    assert [row.sampling.seed for row in out.step.forward.sampling] == [-5, 0, 12]


def test_content_is_compared_by_every_field() -> None:
    """A change of any field of a request makes other content."""
    changed = {
        "prompt": pack_i64([1, 2, 4]),
        "max_tokens": 3,
        "min_tokens": 1,
        "stop_ids": pack_i64([5]),
        "n": 2,
        "priority": 1,
        "deadline_ms": 5000,
        "clip": True,
        "namespace": "tenant",
        "store": False,
        "pin_ms": 7,
        "sampling": Sampling(temperature=0.5),
    }
    assert set(changed) | {"id"} == set(Generate.__struct_fields__)
    for field, value in changed.items():
        world = World()
        world.arrive(request())
        world.arrive(msgspec.structs.replace(request(), **{field: value}))
        assert world.refusals[-1].code == RefusalCode.ID_CONFLICT, field


def test_the_front_ends_numbers_are_within_the_cores() -> None:
    """What the HTTP table lets through in n, priority and logprobs is never refused behind it."""
    table = TABLES["completions"]
    highest = {name: highest_of(CoreConfig()) for name, _, _, highest_of in RANGES}
    lowest = {name: lowest_of(CoreConfig()) for name, _, lowest_of, _ in RANGES}
    same = ("n", "priority", "logprobs", "deadline_ms")
    assert {name: table[name].high for name in same} == {name: highest[name] for name in same}
    assert table["cache_pin_ms"].high == highest["pin_ms"]
    assert table["priority"].low == lowest["priority"]
