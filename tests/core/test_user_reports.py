"""What users reported of engines of this kind, retold for the core: the same set-up, the right behaviour."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from allocator.columns import pack_i64
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from ipc.messages import Generate, Sampling
from tests.core.scenes import crowd, drive, last_row_parks, parked_and_shrunk, stage
from tests.core.workload import Workload
from tests.core.world import NEUTRAL, World, facts

SMALL = CoreConfig(page_size=4, max_running_requests=3, max_batched_tokens=16, chunked_prefill_size=8)


def test_U8_what_a_request_holds_is_what_it_was_charged() -> None:
    """The most pages a request ever holds are its ceiling, for every length around a page's edge."""
    for prompt in range(1, 10):
        for output in range(1, 10):
            world = World(SMALL)
            world.send("r", prompt, output)
            most = 0
            while world.wants_tick or world.reports_waiting:
                if world.wants_tick:
                    world.tick()
                else:
                    world.report()
                most = max(most, world.core.gauges()["live_units_full"])
            assert most == -(-(prompt + output - 1) // 4)


def test_S4_many_short_sessions_leak_nothing() -> None:
    """Hundreds of requests later rows, pages and capacity are what they were."""
    world = World(SMALL, pages=12)
    for k in range(600):
        world.send(f"r{k}", 1 + k % 20, 1 + k % 3)
        if k % 5 == 0:
            world.abort(f"r{k}")
        if k % 10 == 9:
            world.run()
    world.run()
    world.check_rest()
    assert world.core.gauges()["live_units_full"] == 0


def test_H1_a_prompt_above_all_memory_does_not_block_the_head() -> None:
    """Within the context limit but above total KV: refused at once with both numbers, small ones are served."""
    world = World(SMALL, pages=250, model=facts(97, 4000))
    world.send("huge", 2000, 4)
    refusal = world.refusals[-1]
    assert (refusal.code, refusal.limit, refusal.value) == ("never_fits", 1000, 2000)
    world.send("small", 20, 4)
    world.run()
    world.check_rest()
    assert world.finished("small").reason == "length"


def test_H3_prompts_around_the_limit_never_stop_progress() -> None:
    """limit-1, limit and limit+1 mixed with valid load: while anything waits, each iteration schedules tokens."""
    world = World(SMALL, model=facts(97, 64))
    for k in range(12):
        world.send(f"edge{k}", 62 + k % 4, 1)
        world.send(f"load{k}", 3 + k, 4)
    assert [refusal.code for refusal in world.refusals] == ["prompt_too_long"] * 6
    while world.core.gauges()["live"]:
        if world.wants_tick:
            before = world.core.gauges()
            out = world.tick()
            forward = out.step is not None and out.step.forward is not None
            assert forward or before["in_flight"], "with nothing in flight a tick makes progress"
        else:
            world.report()
    world.run()
    world.check_rest()


def test_H5_a_retraction_frees_what_it_promised() -> None:
    """The pages told in the decision are exactly those that the chain got back."""
    world = parked_and_shrunk()
    freed = 0
    while world.wants_tick or world.reports_waiting:
        before = world.core.gauges()["live_units_full"]
        told = len(world.verdicts("retracted"))
        out = world.tick() if world.wants_tick else world.report()
        new = world.verdicts("retracted")[told:]
        if new and out.step is not None and out.step.forward is not None:
            taken = len(out.step.forward.table_pages) // 4
            freed += 1
            assert world.core.gauges()["live_units_full"] == before - sum(one.numbers["pages"] for one in new) + taken
    assert freed


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_H7_retraction_under_a_forward_in_flight(overlap: bool, lag: int) -> None:
    """Whatever is in flight when a request is retracted: no double free, no leak, no wrong token."""
    config = CoreConfig(page_size=1, max_running_requests=4, max_batched_tokens=32, overlap=overlap)
    for pages in range(24, 44):
        world = World(config, pages=pages)
        for k in range(4):
            world.send(f"r{k}", 2 + k, 18)
        for turn in range(5000):
            if not (world.wants_tick or world.reports_waiting):
                break
            if world.reports_waiting and (not world.wants_tick or turn % 3 < lag):
                world.report()
            else:
                world.tick()
        world.check_rest()
        assert pages > 40 or world.core.gauges()["retractions_total"] > 0


def test_H11_two_prompts_that_together_exceed_the_pool() -> None:
    """Both are answered, one after the other; the loop comes to rest."""
    world = World(SMALL, pages=10)
    world.send("a", 30, 8)
    world.send("b", 30, 8)
    world.run()
    world.check_rest()
    assert world.finished("a").reason == world.finished("b").reason == "length"


@pytest.mark.parametrize("overlap", [True, False])
def test_C2_abort_after_every_chunk(overlap: bool) -> None:
    """Cancelled after chunk k, for all k and with or without its result: one terminal event, all pages back."""
    for inputs_before in range(24):
        world = World(msgspec.structs.replace(SMALL, overlap=overlap))
        world.send("r", 60, 4)
        for _ in range(inputs_before):
            if world.wants_tick:
                world.tick()
            else:
                world.report()
        world.abort("r")
        assert world.finished("r").reason in ("abort", "length")
        world.run()
        world.check_rest()


def test_C5_nothing_leaves_before_the_pass_is_final() -> None:
    """Decisions, replies and the step of a tick come out together: a tick that fails has told nobody anything."""
    world = parked_and_shrunk()
    while world.wants_tick or world.reports_waiting:
        if not world.wants_tick:
            world.report()
            continue
        out = world.tick()
        retracted = {one.request for one in out.decisions if one.verdict == "retracted"}
        assert not out.replies, "no client is told of a retraction"
        for number in retracted:
            view = world.core.request_view(number)
            assert view is not None
            assert (view["extent"], view["pages"], view["row"]) == ([0, 0], 0, -1)


def test_C6_a_request_ends_while_the_next_forward_runs_and_its_row_is_reused() -> None:
    """At every step one request stops and another starts: rows and pages are only handed out behind the forward."""
    plain = World(SMALL)
    plain.send("probe", 3, 12)
    plain.run()
    for token in plain.output("probe"):
        world = World(msgspec.structs.replace(SMALL, max_running_requests=2), pages=8)
        world.send("probe", 3, 12, stop_ids=pack_i64([token]))
        for k in range(6):
            world.send(f"r{k}", 6, 5)
        world.run()
        world.check_rest()
        assert world.finished("probe").reason == "stop"


@pytest.mark.parametrize(("in_flight", "stages", "pages"), [(1, 1, 34), (2, 1, 34), (3, 2, 44), (3, 2, 45)])
def test_C7_stale_results_after_a_retraction_neither_crash_nor_duplicate(
    in_flight: int, stages: int, pages: int
) -> None:
    """A request is retracted with results in flight: they are discarded and the tokens come once."""
    config = CoreConfig(page_size=1, max_running_requests=3, max_batched_tokens=32, overlap=in_flight >= 2)
    world = World(config, pages=pages, stages=stages)
    for k in range(3):
        world.send(f"r{k}", 4, 20, priority=9 * (stages > 1 and k == pages % 3))
    drive(world, lambda: bool(world.verdicts("retracted")))
    assert world.core.gauges()["in_flight"] == in_flight
    world.run()
    world.check_rest()
    assert in_flight == 1 or world.core.gauges()["surplus_tokens_total"] > 0


def test_R6_control_calls_at_any_time_do_not_stall_a_pipeline_of_four() -> None:
    """Flushes of arena and cache, snapshots and in the end a drain, at every moment of a load: all is served."""
    config = CoreConfig(page_size=4, max_running_requests=20, max_batched_tokens=64, chunked_prefill_size=16)
    world, asked = World(config, pages=200, stages=4), 0
    for k in range(20):
        world.send(f"r{k}", 3 + 4 * k, 12)
    for moment in range(1000):
        if not world.turn():
            break
        if moment % 3 == 0:
            world.feed(inputs.FlushAsked(world.now_ns, 8))
        elif moment % 3 == 1:
            asked += 1
            world.feed(inputs.Controlled(world.now_ns, "snapshot"))
        else:
            world.feed(inputs.Controlled(world.now_ns, "flush_cache" if moment < 60 else "drain"))
    assert 0 < sum(step.snapshot for step in world.steps) <= asked
    assert not world.verdicts("stalled")
    assert {world.finished(f"r{k}").reason for k in range(20)} == {"length"}
    world.check_rest()


def test_A2_an_end_that_is_no_success_is_told_apart_from_one() -> None:
    """Given up ranks, a stop, a client's abort: each its own reason, and never that of a finished request."""
    ends: list[inputs.Input] = [
        inputs.EpochEnded(0, 1, "no rank came up", False),
        inputs.Controlled(0, "stop"),
        inputs.Aborted(0, "fe", "a", "client"),
    ]
    reasons = []
    for item in ends:
        world = World(SMALL)
        world.send("a", 5, 9)
        world.tick()
        world.feed(item)
        reasons.append(world.finished("a").reason)
    assert reasons == ["fault", "drained", "abort"]


@pytest.mark.parametrize(
    ("scene", "reached"),
    [
        (parked_and_shrunk, {"waiting", "prefilling", "running", "parked_chunk", "retracted"}),
        (last_row_parks, {"running", "parked_row"}),
    ],
)
def test_C10_a_hang_up_at_every_stage_ends_the_request_within_one_input(scene: object, reached: set[str]) -> None:
    """Queue, prefill, decode, parked, retracted: the abort itself ends it, pages are back when the world rests."""
    stages = set()
    for moment in range(60):
        world = scene()  # type: ignore[operator]
        for _ in range(moment):
            if world.wants_tick:
                world.tick()
            elif world.reports_waiting:
                world.report()
        for entry in world.core.view()["requests"]:
            stages.add(entry["stage"])
            world.abort(entry["id"])
            assert stage(world, entry["id"]) == "ended"
        world.run()
        world.check_rest()
    assert stages >= reached


def test_O1_overload_is_refused_fast_and_with_a_hint() -> None:
    """Ten times the load: the queue stays at its limit, refusals carry a retry hint, the accepted ones all finish."""
    world = World(msgspec.structs.replace(SMALL, max_queued_requests=20))
    for k in range(200):
        world.send(f"r{k}", 5, 3)
        assert world.core.gauges()["waiting"] <= 20
    assert len(world.refusals) == 180
    assert all(refusal.retry_after_ms >= 100 for refusal in world.refusals)
    world.run()
    world.check_rest()
    assert world.core.gauges()["finished_total"] == 20


def test_O5_declared_lengths_are_admitted_without_retraction() -> None:
    """With full reservation nothing is ever retracted or parked, under any random load."""
    for seed in range(20):
        world = Workload(seed, pressed=True, reserve="full", priority_preemption=False).run(120)
        assert world.core.gauges()["retractions_total"] == world.core.gauges()["parks_total"] == 0


HOSTILE_IDS = [-1, 97, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)]


def test_I1_hostile_ids_with_a_minimum_length_do_not_touch_neighbours() -> None:
    """Every id-valued field, fuzzed: a refusal that names the field, and the neighbour's output is unchanged."""
    world = World(SMALL)
    world.send("neighbour", 5, 8)
    world.tick()
    for k, token in enumerate(HOSTILE_IDS):
        for field in ("prompt", "stop_ids"):
            columns: dict[str, Any] = {"prompt": pack_i64([1, 2]), "stop_ids": b""} | {field: pack_i64([3, token])}
            generate = Generate(id=f"{field}{k}", sampling=Sampling(), max_tokens=9, min_tokens=4, **columns)
            world.arrive(generate)
            assert (world.refusals[-1].code, world.refusals[-1].field) == ("token_out_of_range", field)
        world.report()
        world.tick()
    world.run()
    world.check_rest()
    assert world.output("neighbour") == world.expected("neighbour")[0]


def test_I1_stop_ids_over_the_whole_vocabulary_still_end() -> None:
    """All ids banned for the minimum length: the request ends once it may."""
    world = World(SMALL)
    world.send("all", 3, 9, min_tokens=4, stop_ids=pack_i64(range(97)))
    world.send("most", 3, 9, min_tokens=4, stop_ids=pack_i64(range(90)), n=2)
    world.run()
    world.check_rest()
    assert world.finished("all").output_tokens == 5


@pytest.mark.parametrize("seed", [10**20, -(10**20), 2**63, -(2**63) - 1])
def test_I3_a_seed_beyond_64_bits_is_refused(seed: int) -> None:
    """The refusal names the seed; the largest and smallest that fit are taken."""
    world = World(SMALL)
    world.send("r", 3, 2, sampling=Sampling(seed=seed))
    assert (world.refusals[-1].code, world.refusals[-1].field) == ("bad_parameter", "seed")
    for k, fits in enumerate((2**63 - 1, -(2**63), 0)):
        world.send(f"fits{k}", 3, 2, sampling=Sampling(seed=fits))
    world.run()
    world.check_rest()
    assert len(world.by_request) == 3


def test_I5_one_token_over_is_refused_with_both_numbers() -> None:
    """limit+1 prompt tokens, and prompt plus output over the limit by one."""
    world = World(SMALL, model=facts(97, 40))
    world.send("prompt", 41, 1)
    world.send("sum", 30, 11)
    first, second = world.refusals
    assert (first.limit, first.value) == (40, 41)
    assert "41" in first.message
    assert "40" in first.message
    assert (second.limit, second.value) == (10, 11)
    world.send("exact", 30, 10)
    world.run()
    world.check_rest()
    assert world.finished("exact").output_tokens == 10


def test_I7_limits_that_cannot_work_are_refused_at_boot() -> None:
    """Zero and negative limits never reach the first request."""
    for name in ("page_size", "max_running_requests", "max_batched_tokens", "chunked_prefill_size"):
        for value in (0, -1):
            with pytest.raises(ValueError, match=name):
                World(msgspec.structs.replace(SMALL, **{name: value}))


def test_I7_a_token_budget_below_the_running_limit_lowers_it() -> None:
    """More rows than tokens in a step cannot decode: no more are admitted than the budget serves."""
    world = World(msgspec.structs.replace(SMALL, max_running_requests=9, max_batched_tokens=2, chunked_prefill_size=1))
    for k in range(5):
        world.send(f"r{k}", 3, 4)
    world.run()
    world.check_rest()


def test_A3_every_accepted_choice_has_exactly_one_terminal_event() -> None:
    """In decisions and to the client alike, over random lives."""
    for seed in range(30):
        world = Workload(seed).run(150)
        ended = sorted(decision.request for decision in world.verdicts("ended"))
        clients = [client for client, choice in world.by_request.values() if choice == 0]
        told = sorted(message.request for client in clients for message in client.finished.values())
        assert ended == told == sorted(world.by_request)


def test_M1_a_waiting_request_is_told_why_once_per_reason() -> None:
    """The passes that skip a request say why, when the reason changes and not in every step."""
    world = World(msgspec.structs.replace(SMALL, max_running_requests=1))
    world.send("a", 5, 30)
    world.send("b", 5, 2)
    world.run()
    waits = [decision.reason for decision in world.verdicts("waits") if decision.request == 2]
    assert waits == ["rows"]


def test_M2_each_retraction_has_victim_reason_pages_lost_work_and_count() -> None:
    """Nothing about a retraction must be guessed afterwards."""
    world = crowd(70, 4, 20, 6)
    world.run()
    retracted = world.verdicts("retracted")
    assert len(retracted) == world.core.gauges()["retractions_total"] > 1
    assert sum(one.numbers["tokens"] for one in retracted) == world.core.gauges()["retracted_tokens_total"]
    times: dict[int, int] = {}
    for one in retracted:
        times[one.request] = times.get(one.request, 0) + 1
        assert one.numbers["times"] == times[one.request]
        assert one.reason == "memory"
    world.check_rest()


def test_P11_a_resumed_request_sizes_its_work_from_what_it_holds_now() -> None:
    """After a retraction the new prefill covers exactly prompt plus kept output, from position 0."""
    world = crowd(70, 4, 20, 6, NEUTRAL)
    world.run()
    again = [one for one in world.verdicts("admitted") if one.numbers["generation"] > 1]
    assert again
    for one in again:
        client, _ = world.by_request[one.request]
        assert one.numbers["tokens"] >= len(client.generate.prompt) // 8
    world.check_rest()


def test_X7_the_expiry_of_a_drain_gives_each_client_a_clear_reason() -> None:
    """New calls are refused, running ones finish or end as drained, nothing hangs."""
    world = World(SMALL)
    for k in range(5):
        world.send(f"r{k}", 5, 30)
    world.tick()
    world.feed(inputs.Controlled(world.now_ns, "drain"))
    world.send("late", 3)
    assert world.refusals[-1].code == "draining"
    world.report()
    world.feed(inputs.Controlled(world.now_ns, "drain_expired"))
    assert {world.finished(f"r{k}").reason for k in range(5)} == {"drained"}
    world.run()
    world.check_rest()
