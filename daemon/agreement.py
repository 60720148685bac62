"""Agreement: from what every rank can hold to the one geometry of an epoch.

Owns the rule that the smallest rank decides. Must never guess: ranks that describe different models or bands end the
boot with both sides named. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from allocator.geometry import Geometry, StageGeometry
from daemon.exits import DaemonError, Exit
from ipc.messages import ModelFacts, Ready
from ipc.rank_id import RankId


class RanksDisagree(DaemonError):
    """Ranks of one model describe different things; the text names both sides."""

    def __init__(self, what: str, left: RankId, right: RankId, values: tuple[object, object]) -> None:
        super().__init__(
            Exit.BOOT,
            f"{what} differ: rank {left[0]}.{left[1]} has {values[0]!r}, rank {right[0]}.{right[1]} has {values[1]!r}",
        )


def agree(ready: Mapping[RankId, Ready], page_size: int) -> tuple[Geometry, ModelFacts]:
    """The geometry that all ranks can hold, and the model's facts; raises RanksDisagree."""
    assert ready, "an epoch has at least one rank"
    ranks = sorted(ready)
    stages: dict[int, list[RankId]] = {}
    for rank in ranks:
        stages.setdefault(rank[0], []).append(rank)
        _same("the facts of the model", ranks[0], rank, ready[ranks[0]].facts, ready[rank].facts)
    assert sorted(stages) == list(range(len(stages))), f"stages {sorted(stages)} are not 0, 1, 2, ..."
    geometry = Geometry(
        page_size=page_size,
        virtual_pages=min(ready[rank].virtual_pages for rank in ranks),
        virtual_slots=min(ready[rank].virtual_slots for rank in ranks),
        stages=[_stage(stages[stage], ready) for stage in sorted(stages)],
    )
    for rank in ranks:
        names = [[(band.name, band.kind) for band in ready[of].geometry.bands] for of in (ranks[0], rank)]
        _same("the bands in chain order", ranks[0], rank, *names)
    return geometry, ready[ranks[0]].facts


def _stage(ranks: list[RankId], ready: Mapping[RankId, Ready]) -> StageGeometry:
    """The smallest arena of a stage; everything else must be equal on its tensor ranks."""
    smallest = min(ready[rank].geometry.arena_bytes for rank in ranks)
    shapes = [msgspec.structs.replace(ready[rank].geometry, arena_bytes=smallest) for rank in ranks]
    for rank, shape in zip(ranks, shapes, strict=True):
        _same("the bands of a stage", ranks[0], rank, shapes[0], shape)
    return shapes[0]


def _same(what: str, left: RankId, right: RankId, a: object, b: object) -> None:
    if a != b:
        raise RanksDisagree(what, left, right, (a, b))
