"""Admission: choices of one prompt, smaller chunks where windows lack, the queue's order through the scheduler, and the
bound on overtaking in whole worlds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from allocator.columns import i64
from daemon.core import inputs
from daemon.core.admission import LOOKAHEAD, LOOKUPS_MAX
from daemon.core.limits import CoreConfig
from daemon.core.order import POLICIES
from daemon.core.outputs import Outputs
from ipc.messages import Sampling
from tests.core.rank_double import FULL_ONLY, Shape
from tests.core.scenes import drive, stage
from tests.core.workload import Workload
from tests.core.world import World

WINDOW = Shape(windows=(9,))
STATE = Shape(state=True)


def world(pages: int = 200, shape: Shape = FULL_ONLY, caching: bool = True, **config: Any) -> World:
    """Small chunks, a prefix cache."""
    settings: dict[str, Any] = {
        "page_size": 4,
        "max_running_requests": 4,
        "max_batched_tokens": 32,
        "chunked_prefill_size": 16,
        "checkpoint_interval": 8,
    }
    return World(CoreConfig(**(settings | config)), pages, shape=shape, caching=caching)


def admissions(one: World) -> list[int]:
    """Numbers of requests in the order of their admissions."""
    return [decision.request for decision in one.verdicts("admitted")]


# --- choices of one prompt --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [FULL_ONLY, WINDOW, STATE], ids=["full", "window", "state"])
def test_choices_of_one_prompt_compute_it_once(shape: Shape) -> None:
    """The others wait until the first has given its pages, start behind them, and get the tokens of a lone run."""
    one = world(shape=shape)
    one.send("r", 40, 6, n=4, sampling=Sampling(temperature=1.0))
    one.send("other", 5, 3)
    one.run()
    waits = [decision for decision in one.verdicts("waits") if decision.reason == "sibling"]
    assert {decision.request for decision in waits} == {2, 3, 4}
    assert all(decision.numbers == {"sibling": 1} for decision in waits)
    cached = {decision.request: decision.numbers["cached_tokens"] for decision in one.verdicts("admitted")}
    assert cached[1] == 0
    assert {cached[number] for number in (2, 3, 4)} == {32 if shape is STATE else 36}
    assert admissions(one).index(5) < admissions(one).index(2), "the next request does not wait for them"
    computed = one.core.gauges()["prompt_tokens_total"]
    assert computed == 40 + 3 * (40 - cached[2]) + 5
    one.check_rest()


SEPARATE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"caching": False}, {}),
    ({}, {"store": False}),
    ({}, {"sampling": Sampling(temperature=1.0, prompt_logprobs=0)}),
]


@pytest.mark.parametrize(("setting", "fields"), SEPARATE, ids=["no cache", "not stored", "scored"])
def test_choices_that_could_share_nothing_do_not_wait_for_each_other(
    setting: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Without a cache, without leave to store, or with log probabilities of the prompt owed to each."""
    one = world(**setting)
    one.send("r", 16, 4, n=2, **({"sampling": Sampling(temperature=1.0)} | fields))
    one.tick()
    assert admissions(one) == [1, 2]
    one.run()
    one.check_rest()


def test_choices_of_a_cached_or_short_prompt_start_together() -> None:
    """What is there already need not be waited for, and less than a page cannot be shared."""
    one = world()
    one.send("first", 40, 2)
    one.run()
    one.arrive(
        one.clients["fe", "first"].generate.__class__(
            "again", one.clients["fe", "first"].generate.prompt, Sampling(), max_tokens=3, n=3
        )
    )
    one.send("short", 4, 3, n=3)
    one.tick()
    assert admissions(one)[1:] == [2, 3, 4, 5]
    one.run()
    one.check_rest()


def test_a_choice_that_waits_for_another_starts_when_that_one_is_gone() -> None:
    """The one that computes the prompt is told to finish in the middle of it: the next choice takes over."""
    one = world(chunked_prefill_size=8)
    one.send("r", 40, 4, n=3, sampling=Sampling(temperature=1.0))
    drive(one, lambda: stage_of(one, 1) == "prefilling")
    one.feed(inputs.FinishAsked(one.now_ns, "fe", "r", 0, 0))
    one.run()
    assert [one.finished("r", choice).reason for choice in (1, 2)] == ["length", "length"]
    one.check_rest()


def stage_of(one: World, number: int) -> str:
    """Where a request stands."""
    view = one.core.request_view(number)
    return "ended" if view is None else str(view["stage"])


# --- smaller chunks ---------------------------------------------------------------------------------------------------


def test_a_new_request_starts_with_a_smaller_chunk_where_a_window_lacks() -> None:
    """Beside a running one there is room for its pages and a short chunk's window, not for a long chunk's: it starts at
    once with less, says so, and goes on."""
    shrunk = 0
    for pages in range(20, 60, 2):
        one = world(pages, WINDOW, caching=False, max_batched_tokens=64, chunked_prefill_size=48, reserve="full")
        one.send("runs", 30, 12)
        drive(one, lambda one=one: stage(one, "runs") == "running")  # type: ignore[misc]
        one.send("new", [60 + k % 30 for k in range(48)], 4)
        if not one.refusals:
            one.tick()
            told = [decision for decision in one.verdicts("shrunk") if decision.request == 2]
            if stage(one, "new") == "prefilling" and told:
                numbers = told[0].numbers
                assert 0 < numbers["tokens"] < numbers["wanted_tokens"] == 48
                assert admissions(one)[-1] == 2
                shrunk += 1
        one.run()
        one.check_rest()
    assert shrunk


def test_a_smaller_chunk_is_the_largest_that_fits() -> None:
    """Powers of two of pages: the next larger one would have been refused, by the same question."""
    taken = set[int]()
    for pages in range(20, 60):
        one = world(pages, WINDOW, caching=False, max_batched_tokens=64, chunked_prefill_size=48, reserve="full")
        one.send("runs", 30, 12)
        drive(one, lambda one=one: stage(one, "runs") == "running")  # type: ignore[misc]
        one.send("new", [60 + k % 30 for k in range(48)], 4)
        one.tick()
        taken |= {decision.numbers["tokens"] for decision in one.verdicts("shrunk") if decision.request == 2}
        one.run()
        one.check_rest()
    assert taken
    assert all(tokens % 4 == 0 and tokens & (tokens - 1) == 0 for tokens in taken)


# --- the policies, through the scheduler ------------------------------------------------------------------------------


def test_longest_prefix_first_serves_what_the_cache_knows() -> None:
    """Of requests that wait for a row, those that continue a cached prefix go first, whatever came earlier."""
    one = world(max_running_requests=1, schedule_policy="lpm")
    stem = [7 * k % 90 for k in range(32)]
    one.send("seed", stem, 1)
    one.run()
    one.send("runs", [80, 81, 82], 8)
    one.tick()
    for k in range(3):
        one.send(f"cold{k}", [60 + k, *range(20)], 1)
    one.send("half", stem[:16] + [50] * 8, 1)
    one.send("whole", [*stem, 50, 51], 1)
    one.run()
    assert admissions(one)[2:] == [7, 6, 3, 4, 5]
    one.check_rest()


def test_fair_shares_go_to_whoever_waits() -> None:
    """One namespace floods, another sends now and then: the second is served in its turns, not behind the flood."""
    one = world(max_running_requests=1, schedule_policy="fair", fair_quantum_tokens=16)
    for k in range(12):
        one.send(f"flood{k}", [k, *range(11)], 4, namespace="salt:flood")
    for k in range(3):
        one.send(f"few{k}", [50 + k, *range(11)], 4, namespace="salt:few")
    one.run()
    few = [at for at, number in enumerate(admissions(one)) if number > 12]
    assert few[-1] <= 7
    one.check_rest()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("most", [0, 2, 8])
def test_in_no_world_is_anybody_overtaken_more_often_than_allowed(policy: str, most: int) -> None:
    """Random worlds under each policy: of the requests that wait, none sees more later ones begin than the bound."""
    worst = 0
    for seed in range(6):
        config: dict[str, Any] = {"schedule_policy": policy, "overtaken_max": most, "priority_preemption": False}
        workload = Workload(seed, caching=True, **config)
        counts: dict[int, int] = {}

        def watch(one: World, item: inputs.Input, out: Outputs, counts: dict[int, int] = counts) -> None:
            if isinstance(item, inputs.Recovered):
                counts.clear()  # another life counts for itself
            for decision in out.decisions:
                if decision.verdict == "admitted":
                    counts.pop(decision.request, None)
                    for number in counts:
                        counts[number] += number < decision.request
            waiting = {request.number for request in one.core._state.queue}
            for number in [number for number in counts if number not in waiting]:
                del counts[number]
            for number in waiting:
                counts.setdefault(number, 0)
            nonlocal worst
            worst = max([worst, *counts.values()])

        workload.world.watchers.append(watch)
        workload.run(120)
    assert worst <= most


def test_what_a_namespace_is_charged_is_what_was_computed_for_it() -> None:
    """Prompt tokens once, less what the cache gave, and every output token, retractions or not."""
    for seed in range(8):
        rng = random.Random(seed)
        one = world(pages=30, schedule_policy="fair", fair_quantum_tokens=8)
        charged: dict[str, int] = {}
        fair = one.core._state.queue._discipline
        honest = fair.charge

        def charge(namespace: str, tokens: int, honest: Any = honest, charged: dict[str, int] = charged) -> None:
            charged[namespace] = charged.get(namespace, 0) + tokens
            honest(namespace, tokens)

        fair.charge = charge  # type: ignore[method-assign]
        stem = [rng.randrange(90) for _ in range(24)]
        for k in range(16):
            prompt = stem[: rng.choice([0, 12])] + [rng.randrange(90) for _ in range(rng.randint(1, 12))]
            one.send(f"r{k}", prompt, rng.randint(1, 12), namespace=rng.choice(["a", "b"]))
        one.run()
        wanted = {"a": 0, "b": 0}
        for (_, id), client in one.clients.items():
            tokens = len(i64(client.generate.prompt)) - one.finished(id).cached_tokens + len(one.output(id))
            wanted[client.generate.namespace] += tokens
        assert charged == {name: tokens for name, tokens in wanted.items() if tokens}
        one.check_rest()


# --- what one pass may cost -------------------------------------------------------------------------------------------


def test_a_pass_looks_at_so_many_and_looks_few_of_them_up() -> None:
    """A long prompt starts, and thirty behind it would need chunks too: sixteen are asked, and four of those looked up;
    the short one behind them starts once it is among the sixteen."""
    one = world(max_queued_requests=100, max_running_requests=8)
    for k in range(31):
        one.send(f"long{k}", [k] * 40, 2)
    one.send("short", [80, 81], 2)
    one.tick()
    assert admissions(one) == [1]
    assert list(one.core._state.skipped) == list(range(2, 1 + LOOKAHEAD)), "beside the one that starts"
    assert all(reason == "resident" for reason, _ in one.core._state.skipped.values())
    looked = [number for number, request in one.core._state.requests.items() if request.match is not None]
    assert looked == list(range(2, 2 + LOOKUPS_MAX))
    one.run()
    one.check_rest()
    assert 31 - LOOKAHEAD <= admissions(one).index(32) < 31


@pytest.mark.parametrize("readers", [2, 3])
def test_what_starts_in_one_step_behind_one_prefix_is_not_priced_for_what_it_shares(readers: int) -> None:
    """The arena holds the cached prefix once and what each adds, to the unit: all start in the same step, and with one
    page less the last of them waits."""
    shared, own, output = 20, 3, 6
    stem = list(range(shared))
    for short in (0, 1):
        config = CoreConfig(page_size=1, max_running_requests=4, max_batched_tokens=64, reserve="full")
        one = World(config, pages=shared + readers * (own + output - 1) - short, caching=True)
        one.send("warm", stem, 1)
        one.run()
        for k in range(readers):
            one.send(f"r{k}", stem + [80 + k] * own, output)
        admitted = [entry.request for entry in one.tick().decisions if entry.verdict == "admitted"]
        assert len(admitted) == readers - short
        one.run()
        one.check_rest()
        assert not one.verdicts("retracted")
