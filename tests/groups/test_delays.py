"""Ranks that are late at random: the same digests, the same group calls and the right tokens, whatever the delays."""

from __future__ import annotations

from functools import cache

import pytest

from tools.groups.group import SimulatedGroup
from tools.groups.work import Load, core_config, stage_settings

STEPS = {(2, 2): 500, (1, 2): 100, (2, 1): 100, (3, 1): 100}
DELAYS = {(2, 2): (1, 2), (1, 2): (0, 1), (2, 1): (0, 1), (3, 1): (0, 1)}  # 0: nobody lags
RANDOM_STEPS = 80
ARENA_BYTES = 1 << 16
LOAD_SEED = 11


@cache
def ran(stages: int, ranks: int, delays: int, steady: bool = True) -> SimulatedGroup:
    """A group that was busy for so many steps and came to rest, every output checked."""
    steps = STEPS[stages, ranks] if steady else RANDOM_STEPS
    settings = stage_settings(stages, ranks, ARENA_BYTES)
    group = SimulatedGroup(core_config(), settings, ranks, delays, steady=steady)
    load = Load(LOAD_SEED)
    load.drive(group, steps)
    group.check_rest()
    assert load.check_outputs(group) > steps
    return group


@pytest.mark.parametrize(("stages", "ranks"), STEPS)
def test_digests_are_equal_whatever_the_delays(stages: int, ranks: int) -> None:
    """Two groups of up to 500 steps whose ranks lag differently: equal steps and digests."""
    one, other = [ran(stages, ranks, delays) for delays in DELAYS[stages, ranks]]
    assert len(one.steps) >= STEPS[stages, ranks]
    assert one.steps == other.steps
    assert one.digests == other.digests
    logical = {(item.seq, item.logical) for item in one.digests}
    assert len(logical) == len(one.steps), "one logical digest a step, on every rank of every stage"
    assert one.in_flight_most > stages, "every stage has work at the same time, and one step waits"
    layouts = {(item.seq, item.stage, item.layout) for item in one.digests}
    assert len(layouts) == len(one.steps) * stages, "one layout digest a step and stage"


@pytest.mark.parametrize(("stages", "ranks"), STEPS)
def test_results_that_come_whenever_they_come_agree(stages: int, ranks: int) -> None:
    """With ticks and reports at random moments the ranks agree on every step, and no output is another."""
    group = ran(stages, ranks, 3, steady=False)
    assert group.in_flight_most > 1


@pytest.mark.parametrize(("stages", "ranks"), [(1, 2), (2, 2)])
def test_every_tensor_rank_makes_the_same_group_calls(stages: int, ranks: int) -> None:
    """How many calls of the group a forward makes never depends on a rank's progress (user report R3)."""
    for delays in DELAYS[stages, ranks]:
        kinds = set()
        for seq, stage, calls in ran(stages, ranks, delays).group_calls():
            assert len(calls) == ranks, f"step {seq} stage {stage}"
            assert calls[0] == calls[1], f"step {seq} stage {stage}"
            kinds.update(calls[0])
        assert kinds == ({"reduce", "broadcast"} | ({"send", "receive"} if stages > 1 else set()))
