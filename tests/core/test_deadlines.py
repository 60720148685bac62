"""Deadlines: refused when they cannot be met, ended early while waiting, never before their time once running."""

from __future__ import annotations

import re

import pytest

from daemon.core.limits import CoreConfig
from daemon.core.pace import SAMPLES_MIN, Pace
from daemon.core.reasons import RefusalCode
from ipc.messages import Sampling
from tests.core.world import World

MS = 1_000_000


def paced(**config: object) -> World:
    """Chunks of eight tokens, each forward takes ten milliseconds, and enough of them were measured."""
    settings = {
        "page_size": 4,
        "max_running_requests": 2,
        "max_batched_tokens": 10,
        "chunked_prefill_size": 8,
        "overlap": False,
        "schedule_policy": "deadline",
    }
    world = World(CoreConfig(**(settings | config)))  # type: ignore[arg-type]
    world.send("measured", list(range(8)), SAMPLES_MIN + 4)
    run(world)
    return world


def run(world: World, until: object = None) -> None:
    """Every forward takes ten milliseconds."""
    while until is None or not until():  # type: ignore[operator]
        if world.reports_waiting:
            world.now_ns += 10 * MS
            world.report()
        elif world.wants_tick:
            world.tick()
        else:
            return


# prompt tokens computed, chunk tokens, output tokens -> least time in ms, with steps of 10 ms and 1 ms per prompt token
LEAST = [
    (0, 8, 1, 0),
    (1, 8, 1, 10),
    (8, 8, 1, 10),
    (9, 8, 1, 20),
    (8, 8, 3, 30),
    (64, 64, 1, 64),
    (64, 64, 2, 74),
]


@pytest.mark.parametrize(("prompt", "chunk", "output", "least_ms"), LEAST)
def test_the_best_case_is_made_of_the_fastest_step_and_token(
    prompt: int, chunk: int, output: int, least_ms: int
) -> None:
    """Chunks and tokens bound the prefill, steps the output behind the first token; slower steps change nothing."""
    pace, now = Pace(10), 0
    for seq in range(1, SAMPLES_MIN + 1):
        assert pace.least_ns(prompt, chunk, output) is None
        since = now
        now += 10 * MS if seq % 4 < 2 else 17 * MS
        pace.reported(since, 10 if seq % 2 else 0, now)
    least = pace.least_ns(prompt, chunk, output)
    assert least is not None
    assert least_ms * MS <= least <= least_ms * MS * 1.01 + 100


def test_a_step_in_flight_behind_another_is_timed_from_the_others_report() -> None:
    """With two forwards in flight the second takes what passes between the reports."""
    pace = Pace(10)
    for launched, reported in ((0, 100), (1, 130), (101, 160)):
        pace.reported(launched, 0, reported)
    assert pace.step_ns == 30


def test_a_time_that_is_no_longer_reached_is_forgotten() -> None:
    """After one fast step among many slow ones the measure comes back to what is seen."""
    pace, now = Pace(10), 0
    for seq in range(1, 8000):
        since = now
        now += MS if seq == 5 else 10 * MS
        pace.reported(since, 0, now)
    assert pace.step_ns == 10 * MS


@pytest.mark.parametrize(
    ("prompt", "output", "least_ms"), [(40, 1, 50), (8, 30, 300), (3, 1, 10)], ids=["chunks", "outputs", "one step"]
)
def test_a_deadline_below_the_best_case_is_refused_with_the_numbers(prompt: int, output: int, least_ms: int) -> None:
    """The refusal names the field, the least that is needed and what was asked for; one above it is taken and met."""
    world = paced()
    tokens = [50 + k % 40 for k in range(prompt)]
    world.send("late", tokens, output, min_tokens=output, deadline_ms=least_ms - 4)
    refusal = world.refusals[-1]
    assert (refusal.code, refusal.field, refusal.value) == (RefusalCode.DEADLINE, "deadline_ms", least_ms - 4)
    assert least_ms <= refusal.limit <= least_ms + 20
    assert str(refusal.limit) in refusal.message
    assert world.core.gauges()["live"] == 0
    world.send("met", tokens, output, min_tokens=output, deadline_ms=refusal.limit * 2 + 40)
    run(world)
    assert world.finished("met").reason in ("length", "stop")
    world.check_rest()


def test_what_the_cache_knows_is_no_work() -> None:
    """The same prompt again needs one step; of another namespace, or with the check off, it is another matter."""
    world = paced()
    long = [50 + k % 40 for k in range(80)]
    world.send("first", long, 1)
    run(world)
    world.send("again", long, 1, deadline_ms=40)
    assert not world.refusals
    world.send("other", long, 1, deadline_ms=40, namespace="salt:x")
    assert world.refusals[-1].code == RefusalCode.DEADLINE
    world.send("scored", long, 1, deadline_ms=40, sampling=Sampling(temperature=0.0, prompt_logprobs=0))
    assert len(world.refusals) == 2, "who wants log probabilities of its prompt computes all of it"
    run(world)
    assert world.finished("again").reason == "length"
    off = paced(deadline_check=False)
    off.send("late", long, 1, deadline_ms=5)
    assert not off.refusals
    run(off)
    assert off.finished("late").reason == "deadline"
    off.check_rest()


def test_a_waiting_request_ends_when_it_can_no_longer_make_it() -> None:
    """It is ended when its best case no longer fits, with both numbers, and not when the deadline has passed."""
    world = paced(max_running_requests=1)
    world.send("runs", 3, 40)
    world.tick()
    began_ns = world.now_ns
    world.send("waits", [60 + k for k in range(24)], 3, min_tokens=3, deadline_ms=120)
    run(world, lambda: bool(world.clients["fe", "waits"].finished))
    finished = world.finished("waits")
    assert finished.reason == "deadline"
    assert finished.detail.startswith("of deadline_ms 120, ")
    assert "are left and" in finished.detail
    assert 60 * MS <= world.now_ns - began_ns < 100 * MS, "fifty are needed"
    run(world)
    world.check_rest()


def test_a_running_request_is_never_ended_before_its_deadline() -> None:
    """One that has a row ends when the time is over, and says how late that was seen."""
    world = paced(max_running_requests=1)
    world.send("runs", 3, 40, deadline_ms=200)
    world.tick()
    began_ns = world.now_ns
    run(world, lambda: bool(world.clients["fe", "runs"].finished))
    assert world.finished("runs").reason == "deadline"
    assert re.fullmatch(r"deadline_ms 200 passed \d+ ms ago; it was running", world.finished("runs").detail)
    assert world.now_ns - began_ns >= 199 * MS
    run(world)
    world.check_rest()


def test_an_engine_is_woken_for_a_request_that_would_have_to_start() -> None:
    """Nothing wants a tick, and the time at which the next look is due is before the deadline itself."""
    world = paced(max_running_requests=1)
    world.send("runs", 3, 40)
    world.tick()
    world.send("waits", [60 + k for k in range(24)], 1, deadline_ms=120)
    assert world.due_ns is not None
    assert world.due_ns < world.now_ns + 100 * MS
    world.wait(121)
    assert world.finished("waits").reason == "deadline"
    run(world)
    world.check_rest()


def test_earliest_deadline_goes_first() -> None:
    """Under the policy `deadline`; those without one come last."""
    world = paced(max_running_requests=1)
    world.send("runs", 3, 4)
    world.tick()
    for id, deadline_ms in (("none", 0), ("later", 9000), ("soon", 5000)):
        world.send(id, 3, 1, deadline_ms=deadline_ms)
    run(world)
    first = {client.accepted.first_request: id for (_, id), client in world.clients.items()}
    order = [first[decision.request] for decision in world.verdicts("admitted")]
    assert order[-3:] == ["soon", "later", "none"]
    world.check_rest()


def test_short_prompts_say_nothing_of_the_tokens_of_long_ones() -> None:
    """A forward with a few prompt tokens takes as long as one without: only full chunks tell what a token costs."""
    pace, now = Pace(512), 0
    for _ in range(2000):
        since = now
        now += 5 * MS + 8 * 10_000
        pace.reported(since, 8, now)
    least = pace.least_ns(4096, 512, 1)
    assert least is not None
    assert least <= 8 * (5 * MS + 512 * 10_000), "what eight full chunks take"


def test_reports_that_wait_together_make_no_fast_forward() -> None:
    """A daemon that pauses finds two reports at once: the second forward did not take the time between them."""
    pace, now = Pace(512), 0
    for _ in range(SAMPLES_MIN):
        pace.reported(now - 5 * MS, 0, now + 5 * MS)
        now += 5 * MS
    pace.reported(now - 5 * MS, 0, now + 200 * MS)
    pace.reported(now + 5 * MS, 0, now + 200 * MS + 1000)
    assert pace.step_ns >= 5 * MS


def test_one_that_gave_way_is_held_to_what_it_must_compute_again() -> None:
    """Retracted in the middle of its output it is ended when prompt, kept output and the rest no longer fit."""
    world = paced(max_running_requests=1, schedule_policy="priority", priority_preemption=True, retracts_max=1)
    world.send(
        "low", [60 + k for k in range(8)], 40, min_tokens=40, deadline_ms=600, namespace="salt:other", store=False
    )
    began_ns = world.now_ns
    run(world, lambda: len(world.output("low")) == 20)
    world.send("high", 3, 90, min_tokens=90, priority=5)
    run(world, lambda: bool(world.clients["fe", "low"].finished))
    finished, kept = world.finished("low"), len(world.output("low"))
    assert [decision.reason for decision in world.verdicts("retracted")] == ["priority"]
    assert f"{8 + kept} prompt and {40 - kept} output tokens" in finished.detail
    least_ms = 10 * (-(-(8 + kept) // 8) + 40 - kept - 1)
    assert 0 <= world.now_ns - began_ns - (600 - least_ms) * MS <= 20 * MS, "as soon as it is too late, and not before"
    run(world)
    world.check_rest()
