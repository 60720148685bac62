"""Steps: what one iteration sends, mixed batches under one budget, and results that come one step late."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from allocator.columns import i32, i64, pack_i64
from allocator.errors import InvariantBroken
from allocator.ops import Flush, Free, Take
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.rows import TAIL_TOKENS
from ipc.messages import EXPLICIT, SAMPLE, Forward, Sampling
from tests.core.scenes import crowd, drive, stage
from tests.core.world import World, facts

SMALL = CoreConfig(page_size=4, max_running_requests=4, max_batched_tokens=16, chunked_prefill_size=8)


def forward_of(world: World, at: int = -1) -> Forward:
    """The forward of a step that was sent."""
    forward = world.steps[at].forward
    assert forward is not None
    return forward


def shape(world: World, at: int = -1) -> list[tuple[int, int, int]]:
    """Start, count and flags of each row of a step."""
    forward = forward_of(world, at)
    return list(zip(i32(forward.starts).tolist(), i32(forward.counts).tolist(), list(forward.flags), strict=True))


def test_a_prompt_is_cut_into_chunks_and_samples_after_the_last() -> None:
    """Chunks are contiguous, at most `chunked_prefill_size`, and only the last one samples."""
    world = World(SMALL)
    world.send("r", 19, 3)
    world.run()
    world.check_rest()
    assert [shape(world, at)[0] for at in range(5)] == [
        (0, 8, EXPLICIT),
        (8, 8, EXPLICIT),
        (16, 3, EXPLICIT | SAMPLE),
        (19, 1, SAMPLE),
        (20, 1, SAMPLE),
    ]
    assert world.steps[5].forward is None, "the idle step has no forward"


def test_decode_rows_come_first_and_chunks_share_the_rest_of_the_budget() -> None:
    """Decode rows take one token each, the resident chunk comes next, a new request that fits whole last."""
    world = World(SMALL)
    world.send("first", 4, 9)
    world.tick()
    world.send("long", 30, 2)
    world.send("long2", 30, 2)
    world.send("short", 5, 2)
    world.tick()
    assert shape(world) == [(4, 1, SAMPLE), (0, 8, EXPLICIT), (0, 5, EXPLICIT | SAMPLE)]
    assert stage(world, "long2") == "waiting", "one request at a time is partly prefilled"
    world.report()
    world.tick()
    assert shape(world) == [(5, 1, SAMPLE), (5, 1, SAMPLE), (8, 8, EXPLICIT)]
    world.run()
    world.check_rest()


def test_the_next_step_is_formed_before_the_result_is_known() -> None:
    """With overlap two forwards are in flight, the second one's input is what the first samples."""
    world = World(SMALL)
    world.send("r", 3, 5)
    world.tick()
    assert world.wants_tick
    world.tick()
    assert forward_of(world).tokens == b""
    assert not world.wants_tick
    assert world.tick().step is None
    world.report()
    assert world.wants_tick
    world.run()
    world.check_rest()


def test_without_overlap_one_forward_is_in_flight() -> None:
    """Step N+1 waits for the result of step N."""
    world = World(msgspec.structs.replace(SMALL, overlap=False))
    world.send("r", 3, 5)
    world.tick()
    assert not world.wants_tick
    assert world.tick().step is None
    world.run()
    world.check_rest()


@pytest.mark.parametrize("overlap", [True, False])
def test_the_end_by_length_is_foreseen(overlap: bool) -> None:
    """No surplus forward runs for a request that ends by max_tokens."""
    world = World(msgspec.structs.replace(SMALL, overlap=overlap))
    world.send("r", 3, 5)
    world.run()
    assert sum(step.forward is not None for step in world.steps) == 5
    assert world.core.gauges()["surplus_tokens_total"] == 0
    world.check_rest()


def test_a_stop_id_ends_one_step_late_and_the_surplus_is_discarded() -> None:
    """The token after a stop id is sampled by the step in flight and reaches nobody."""
    plain = World(SMALL)
    plain.send("r", 3, 9)
    plain.run()
    third = plain.output("r")[2]
    world = World(SMALL)
    world.send("r", 3, 9, stop_ids=pack_i64([third]))
    world.run()
    world.check_rest()
    assert world.output("r") == plain.output("r")[: plain.output("r").index(third) + 1]
    finished = world.finished("r")
    assert (finished.reason, finished.output_tokens) == ("stop", len(world.output("r")))
    assert world.core.gauges()["surplus_tokens_total"] == 1


def test_min_tokens_bans_the_stop_ids_for_that_many_tokens() -> None:
    """The rank is told until which position stop ids are banned, and the core ignores them before."""
    world = World(SMALL)
    stops = pack_i64(list(range(0, 97, 2)))
    world.send("r", 3, 20, min_tokens=6, stop_ids=stops)
    world.tick()
    (row,) = forward_of(world).sampling
    assert (row.ban_before, row.banned) == (9, stops)
    world.run()
    world.check_rest()
    assert world.finished("r").output_tokens > 6


def test_a_row_freed_by_a_result_is_used_by_the_next_step() -> None:
    """The row, under a new generation, and its pages serve the next request at once."""
    config = CoreConfig(page_size=4, max_running_requests=1, max_batched_tokens=16)
    world = World(config, pages=2)
    world.send("a", 5, 2)
    world.send("b", 5, 2)
    world.run()
    world.check_rest()
    rows = [(i32(step.forward.rows)[0], i32(step.forward.generations)[0]) for step in world.steps if step.forward]
    assert rows == [(0, 1), (0, 1), (0, 2), (0, 2)]
    assert [type(op) for op in world.steps[2].ops] == [Free, Take]


def test_a_stale_result_does_not_reach_the_rows_new_owner() -> None:
    """A row is handed on while the old owner's forward is in flight: the old token is told by its generation."""
    config = CoreConfig(page_size=4, max_running_requests=1, max_batched_tokens=16)
    world = World(config)
    world.send("a", 5, 9)
    world.tick()
    world.tick()
    world.abort("a")
    world.send("b", 5, 9)
    world.report()
    world.tick()
    world.run()
    world.check_rest()
    assert world.output("a") == []
    assert len(world.output("b")) == 9


def test_choices_have_their_own_noise_and_consecutive_numbers() -> None:
    """n > 1: children share prompt and seed, differ by choice, and each ends on its own."""
    world = World(SMALL)
    world.send("r", 5, 6, n=3)
    world.run()
    world.check_rest()
    accepted = world.clients["fe", "r"].accepted
    numbers = [world.finished("r", choice).request for choice in range(3)]
    assert numbers == [accepted.first_request + choice for choice in range(3)]
    assert len({tuple(world.output("r", choice)) for choice in range(3)}) == 3


def test_scoring_a_prompt_needs_no_output() -> None:
    """max_tokens 0 with prompt log probabilities: every position once, nothing sampled, reason length."""
    world = World(SMALL)
    world.send("r", 19, 0, sampling=Sampling(prompt_logprobs=2))
    world.run()
    client = world.clients["fe", "r"]
    assert client.prompt_logprobs[0] == i64(client.generate.prompt).tolist()[1:]
    assert (world.finished("r").reason, world.finished("r").output_tokens) == ("length", 0)
    assert all(not flag & SAMPLE for step in world.steps if step.forward for flag in step.forward.flags)
    world.check_rest()


def test_log_probabilities_come_with_their_tokens() -> None:
    """One entry per output token and per prompt position, under the request's number."""
    world = World(SMALL)
    world.send("r", 11, 6, sampling=Sampling(logprobs=1, prompt_logprobs=1))
    world.run()
    world.check_rest()
    assert len(world.clients["fe", "r"].logprobs[0]) == 6


def test_prompt_log_probabilities_are_sent_once_though_the_prompt_is_computed_twice() -> None:
    """A request retracted in mid-prefill goes on where its prompt log probabilities stopped."""
    world = crowd(80, 1, 20, 1, Sampling(temperature=0.0, prompt_logprobs=1))
    drive(world, lambda: stage(world, "long") == "retracted")
    delivered = len(world.clients["fe", "long"].prompt_logprobs[0])
    assert 0 < delivered < 19
    world.run()
    world.check_rest()
    assert len(world.clients["fe", "long"].prompt_logprobs[0]) == 19


def test_a_retracted_request_goes_on_with_its_output_as_prompt() -> None:
    """Its row sampling is sent again with the output that penalties read, and the tokens are those of a lone run."""
    world = crowd(70, 4, 20, 6, Sampling(temperature=0.0, repetition_penalty=1.5))
    drive(world, lambda: any(row.output_ids for step in world.steps if step.forward for row in step.forward.sampling))
    step = next(step for step in world.steps if step.forward and any(row.output_ids for row in step.forward.sampling))
    assert step.forward is not None
    row = next(row for row in step.forward.sampling if row.output_ids)
    at = i32(step.forward.rows).tolist().index(row.row)
    assert row.generation == i32(step.forward.generations)[at]
    kept = i64(row.output_ids).tolist()
    client = next(client for client, choice in world.by_request.values() if client.tokens[choice][: len(kept)] == kept)
    assert i64(row.prompt_ids).tolist() == i64(client.generate.prompt).tolist()
    world.run()
    world.check_rest()


def test_sampling_is_sent_once_per_generation_and_history_only_for_penalties() -> None:
    """Neutral penalties send no history."""
    world = World(SMALL)
    world.send("plain", 9, 3)
    world.send("penalized", 9, 3, sampling=Sampling(frequency_penalty=0.5))
    world.run()
    sent = [row for step in world.steps if step.forward for row in step.forward.sampling]
    assert [bool(row.prompt_ids) for row in sent] == [False, True]


def test_long_outputs_survive_retraction_whole() -> None:
    """Output beyond one tail of the row's columns and tables beyond their first width come back complete."""
    config = CoreConfig(page_size=4, max_running_requests=2, max_batched_tokens=512, chunked_prefill_size=512)
    world = World(config, pages=130, model=facts(97, 512))
    world.send("a", 20, 3 * TAIL_TOKENS - 10)
    world.send("b", 20, 2 * TAIL_TOKENS + 40)
    world.run()
    assert world.core.gauges()["retractions_total"] > 0
    world.check_rest()


@pytest.mark.parametrize("overlap", [True, False])
def test_flush_goes_with_the_next_step_and_needs_no_forward(overlap: bool) -> None:
    """A flush is one op, within the configured moves, in a step that does not count as in flight."""
    world = World(msgspec.structs.replace(SMALL, overlap=overlap))
    world.feed(inputs.FlushAsked(0, 0))
    assert not world.wants_tick
    world.feed(inputs.FlushAsked(0, 500))
    assert world.wants_tick
    out = world.tick()
    assert out.step is not None
    assert out.step.forward is None
    assert out.step.ops == [Flush(SMALL.flush_moves_max)]
    world.send("r", 3, 5)
    while world.wants_tick:
        world.tick()
    world.feed(inputs.FlushAsked(0, 3))
    assert world.tick().step is not None, "a flush may be sent while forwards are in flight"
    world.run()
    world.check_rest()


def test_idle_is_told_once_and_returns_the_last_pages() -> None:
    """On becoming idle one step without forward carries the last frees and the newest progress."""
    world = World(SMALL, caching=False)
    world.send("r", 6, 3)
    world.run()
    last = world.steps[-1]
    assert last.forward is None
    assert [type(op) for op in last.ops] == [Free]
    assert last.processed_through == last.seq - 1
    assert len(world.verdicts("idle")) == 1
    assert world.tick().step is None
    assert len(world.verdicts("idle")) == 1
    world.send("s", 3, 1)
    world.run()
    assert len(world.verdicts("idle")) == 2


def test_a_report_that_does_not_fit_breaks_the_epoch() -> None:
    """Wrong order, other rows, another width and foreign tokens are named, and nothing is committed."""
    world = World(SMALL)
    world.send("r", 3, 5)
    world.tick()
    assert world.rank is not None
    good = world.rank.reports[0]
    bad = {
        "order": msgspec.structs.replace(good, seq=2),
        "rows": msgspec.structs.replace(good, rows=np.array([1], np.int32).tobytes()),
        "width": msgspec.structs.replace(good, tokens=good.tokens + good.tokens),
        "vocabulary": msgspec.structs.replace(good, tokens=pack_i64([97])),
        "negative": msgspec.structs.replace(good, tokens=pack_i64([-1])),
    }
    for report in bad.values():
        with pytest.raises(InvariantBroken):
            world.core.feed(report)
    world.run()
    world.check_rest()


def test_outputs_are_never_touched_again() -> None:
    """Columns handed out keep their values while the core goes on."""
    world = World(SMALL)
    kept: list[tuple[Any, list[Any]]] = []
    for k in range(4):
        world.send(f"r{k}", 3 + k, 9)
    while world.wants_tick or world.reports_waiting:
        out = world.tick() if world.wants_tick else world.report()
        if out.tokens is not None:
            columns = (out.tokens.requests, out.tokens.tokens, out.tokens.frontends)
            kept.append((columns, [column.copy() for column in columns]))
    assert kept
    for columns, copies in kept:
        for column, copy in zip(columns, copies, strict=True):
            assert np.array_equal(column, copy)
