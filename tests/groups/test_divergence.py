"""A rank that decides by itself is found in that step, named with op and band, and nothing of it is told."""

from __future__ import annotations

import pytest

from daemon.divergence import diverged, in_words
from daemon.results import DigestMismatch
from tools.groups.group import SimulatedGroup
from tools.groups.plants import planted
from tools.groups.work import Load, core_config, stage_settings

ARENA_BYTES = 1 << 16
FROM = 60


def found(stages: int, place: tuple[int, int], kind: str) -> tuple[SimulatedGroup, DigestMismatch]:
    """The group with the plant, and what the collator found."""
    settings = stage_settings(stages, 2, ARENA_BYTES)
    group = SimulatedGroup(core_config(), settings, 2, 5, change=planted(kind, place, FROM))
    with pytest.raises(DigestMismatch) as caught:
        Load(11).drive(group, 500)
    return group, caught.value


@pytest.mark.parametrize(("stages", "place"), [(1, (0, 1)), (2, (0, 1)), (2, (1, 0))])
@pytest.mark.parametrize("kind", ["hole", "clock"])
def test_a_planted_divergence_is_named(stages: int, place: tuple[int, int], kind: str) -> None:
    """The verdict has the first step, the op and the band; no token of that step or of a later one left (R2)."""
    group, mismatch = found(stages, place, kind)
    assert mismatch.step.seq >= FROM
    assert mismatch.difference.what == "layout"
    record = diverged(mismatch, group.explained(), 1, 0)
    pair = {f"rank {place[0]}.0", f"rank {place[0]}.1"}
    assert {record.left, record.right} == pair
    assert record.seq == mismatch.step.seq
    assert f"at step {record.seq}" in in_words(record)
    if kind == "hole":
        assert record.op >= 0
        assert record.band in {band.name for band in group.geometry.stages[place[0]].bands}
        assert record.kind == type(mismatch.step.ops[record.op]).__name__
        assert record.left_did != record.right_did
    assert group.told, "tokens of earlier steps were told"
    assert max(seq for seq, _ in group.told) < mismatch.step.seq
    assert all(item.seq < mismatch.step.seq for item in group.digests)


def test_the_first_step_that_differs_is_the_one_named() -> None:
    """Everything before the verdict is what an honest group did."""
    honest = SimulatedGroup(core_config(), stage_settings(1, 2, ARENA_BYTES), 2, 0)
    Load(11).drive(honest, 80)
    group, mismatch = found(1, (0, 1), "hole")
    count = 2 * (mismatch.step.seq - 1)
    assert group.digests == honest.digests[:count]
    seq = mismatch.step.seq
    wrong = [item for item in mismatch.digests if item.layout != honest.digests[count].layout]
    assert [(item.seq, item.stage, item.rank) for item in wrong] == [(seq, 0, 1)]
