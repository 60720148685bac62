"""Micro-batches: all pipeline stages have work, and a row's token is known when its micro-batch comes again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from daemon.core import inputs
from daemon.core.limits import CoreConfig
from ipc.messages import EXPLICIT, SAMPLE, Sampling, Step
from tests.core.scenes import drive
from tests.core.world import World
from tools.worlds.cases import FAMILIES

CONFIG = CoreConfig(page_size=4, max_running_requests=12, max_batched_tokens=64, chunked_prefill_size=16)
SCORED = Sampling(temperature=0.0, logprobs=1, prompt_logprobs=1)


def world_of(stages: int, config: CoreConfig = CONFIG, pages: int = 200, family: str = "full") -> World:
    """An empty world."""
    return World(config, pages=pages, stages=stages, shape=FAMILIES[family])


def fill(world: World) -> list[Step]:
    """Ticks until no further forward may be launched; the steps."""
    steps = []
    while world.wants_tick:
        step = world.tick().step
        if step is None:
            break
        steps.append(step)
    return steps


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_pipeline_has_a_forward_for_every_stage_and_one_more(stages: int) -> None:
    """One stage: two forwards of one micro-batch. More: each micro-batch has one, and every row is in one."""
    world = world_of(stages)
    for k in range(12):
        world.send(f"r{k}", 3 + k, 40)
    steps = fill(world)
    expected = [0, 0] if stages == 1 else list(range(stages + 1))
    assert [step.microbatch for step in steps] == expected
    for _ in range(30):
        world.report()
        assert [step.microbatch for step in fill(world)] in (
            [[0]] if stages == 1 else [[one] for one in range(stages + 1)]
        )
    world.run()
    world.check_rest()


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_without_overlap_one_forward_is_in_flight(stages: int) -> None:
    """And there is one micro-batch; with stages its tokens are explicit all the same."""
    world = world_of(stages, msgspec.structs.replace(CONFIG, overlap=False))
    for k in range(4):
        world.send(f"r{k}", 5, 9)
    assert len(fill(world)) == 1
    world.run()
    assert {step.microbatch for step in world.steps} == {0}
    world.check_rest()


def test_decode_rows_bring_their_tokens() -> None:
    """The newest token of each decode row comes first, then those of the chunks; with one stage the rank has it."""
    for stages in (1, 2):
        world = world_of(stages)
        world.send("a", 3, 20)
        drive(world, lambda world=world: len(world.output("a")) == 4)  # type: ignore[misc]
        world.send("b", 5, 20)
        while world.reports_waiting:
            world.report()
        step = world.tick().step
        assert step is not None
        assert step.forward is not None
        flags, tokens = list(step.forward.flags), np.frombuffer(step.forward.tokens, np.int64).tolist()
        prompt = np.frombuffer(world.clients["fe", "b"].generate.prompt, np.int64).tolist()
        if stages == 1:
            assert (flags, tokens) == ([SAMPLE, SAMPLE | EXPLICIT], prompt)
        elif step.microbatch == 0:
            assert (flags, tokens) == ([SAMPLE | EXPLICIT, SAMPLE | EXPLICIT], [world.output("a")[-1], *prompt])
        world.run()
        world.check_rest()


@pytest.mark.parametrize("output", [126, 127, 128, 129, 257])
def test_tokens_are_right_where_a_tail_is_full(output: int) -> None:
    """A row's newest token is told also when its output fills whole tails."""
    world = World(CONFIG, pages=200, stages=2)
    world.send("a", 3, output)
    world.run()
    world.check_rest()


def test_a_burst_of_short_prompts_is_spread_over_the_micro_batches() -> None:
    """Each takes its share of all rows, though the first step would have room for all."""
    world = world_of(2)
    for k in range(12):
        world.send(f"r{k}", 3, 30)
    fill(world)
    assert world.core._state.rows.bound == [4, 4, 4]
    assert not world.verdicts("waits"), "whom the next micro-batch takes is not told to wait"
    for k in range(3):
        world.abort(f"r{k}")
    assert world.core._state.rows.bound == [1, 4, 4]
    for k in range(3):
        world.send(f"s{k}", 3, 30)
    for _ in range(6):
        world.report()
        fill(world)
    assert world.core._state.rows.bound == [4, 4, 4]
    world.run()
    world.check_rest()


def test_one_request_does_not_wait_for_the_others() -> None:
    """Alone it is in every step that it can be in, and a lone arrival joins the very next step."""
    world = world_of(3)
    world.send("a", 3, 10)
    steps = 0
    while world.core.gauges()["live"]:
        steps += world.wants_tick
        world.turn()
    assert steps <= 12
    world.send("b", 3, 20)
    world.tick()
    world.send("c", 3, 20)
    assert world.tick().step is not None
    assert world.core.gauges()["running"] == 2
    world.run()
    world.check_rest()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_long_prompt_keeps_all_stages_busy(family: str) -> None:
    """Its chunks ride in every step, there is no token to wait for; only a state that is to be given waits."""
    config = msgspec.structs.replace(CONFIG, checkpoint_interval=16, checkpoint_mark_tokens=0)
    world = world_of(2, config, family=family)
    world.send("long", 300, 4, sampling=SCORED)
    most = 0
    while len(world.output("long")) == 0:
        world.turn()
        most = max(most, world.core.gauges()["in_flight"])
    assert most == 3
    world.run()
    world.check_rest()
    if FAMILIES[family].state:
        assert world.core.gauges()["checkpoints_given_total"] > 0
        assert world.core.gauges()["checkpoints_skipped_total"] == 0


@pytest.mark.parametrize("policy", ["likely", "grid"])
def test_states_that_are_wanted_are_given_by_a_pipeline_too(policy: str) -> None:
    """A later request finds as much of a long prompt as it does with one stage."""
    found = []
    for stages in (1, 2, 3):
        config = msgspec.structs.replace(CONFIG, checkpoint_interval=8, checkpoint_policy=policy)
        world = world_of(stages, config, pages=600, family="windows_state")
        world.send("first", [5] * 200, 4)
        world.run()
        world.send("second", [5] * 200, 4)
        world.run()
        found.append((world.finished("second").cached_tokens, world.core.gauges()["checkpoints_given_total"]))
        world.check_rest()
    assert found[0] == found[1] == found[2]
    assert found[0][0] > 100


@pytest.mark.parametrize("stages", [2, 3])
def test_a_thousand_cancels_in_one_instant_do_not_stall_the_pipeline(stages: int) -> None:
    """All that still lives goes on, in no more steps than its own tokens need."""
    config = msgspec.structs.replace(CONFIG, max_running_requests=256, max_batched_tokens=512, max_queued_requests=2000)
    world = world_of(stages, config, pages=8000)
    for k in range(1100):
        world.send(f"r{k}", 3, 30)
    for _ in range(20):
        world.turn()
    for k in range(1100):
        if k % 11:
            world.abort(f"r{k}")
    assert world.core.gauges()["live"] == 100
    steps = len(world.steps)
    world.run()
    assert not world.verdicts("stalled")
    assert len(world.steps) - steps <= (stages + 1) * (30 + 8)
    assert {world.finished(f"r{k}").reason for k in range(0, 1100, 11)} == {"length"}
    world.check_rest()


def test_a_row_keeps_its_micro_batch_until_it_gives_its_row_back() -> None:
    """Also when an epoch ends: then nobody is in any."""
    world = world_of(2)
    for k in range(6):
        world.send(f"r{k}", 3, 30)
    for _ in range(12):
        world.turn()
    rows = world.core._state.rows
    assert sorted(rows.microbatch[rows.decoding].tolist()) == [0, 0, 1, 1, 2, 2]
    world.feed(inputs.EpochEnded(world.now_ns, 1, "a rank died", True))
    world.stages = 1
    world.begin()
    world.run()
    assert {step.microbatch for step in world.steps if step.epoch == 2} == {0}
    world.check_rest()
