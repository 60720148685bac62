"""Agreement: the smallest rank decides; ranks that describe different models end the boot."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from allocator.geometry import BandGeometry, StageGeometry
from daemon.agreement import RanksDisagree, agree
from daemon.exits import Exit
from ipc.messages import ModelFacts, Ready
from ipc.rank_id import RankId

FACTS = ModelFacts("m", "llama", 100, 64, "float32")


def ready(rank: RankId, arena: int, pages: int, unit: int = 256) -> Ready:
    geometry = StageGeometry(arena, 512, [BandGeometry("full", "full", unit)])
    return Ready(*rank, geometry, pages, 1, FACTS)


def world() -> dict[RankId, Ready]:
    return {
        (1, 1): ready((1, 1), 4000, 12, 128),
        (0, 0): ready((0, 0), 9000, 30),
        (1, 0): ready((1, 0), 5000, 14, 128),
        (0, 1): ready((0, 1), 8000, 25),
    }


def test_the_smallest_rank_decides() -> None:
    """Arenas are cut per stage, id spaces over all stages; stages keep their own unit bytes."""
    geometry, facts = agree(world(), 16)
    assert facts == FACTS
    assert (geometry.page_size, geometry.virtual_pages) == (16, 12)
    assert [stage.arena_bytes for stage in geometry.stages] == [8000, 4000]
    assert [stage.bands[0].unit_bytes for stage in geometry.stages] == [256, 128]


@pytest.mark.parametrize(
    ("rank", "change", "what"),
    [
        ((1, 1), {"facts": msgspec.structs.replace(FACTS, vocab_size=99)}, "facts of the model"),
        ((0, 1), {"geometry": StageGeometry(8000, 512, [BandGeometry("full", "full", 260)])}, "bands of a stage"),
        ((1, 1), {"geometry": StageGeometry(8000, 999, [BandGeometry("full", "full", 128)])}, "bands of a stage"),
    ],
)
def test_differences_are_named(rank: RankId, change: dict[str, Any], what: str) -> None:
    """What differs, between which ranks, and both values; the exit code is that of a failed boot."""
    made = world()
    made[rank] = msgspec.structs.replace(made[rank], **change)
    with pytest.raises(RanksDisagree, match=f"{what}.*rank {rank[0]}.{rank[1]}") as caught:
        agree(made, 16)
    assert caught.value.code == Exit.BOOT


def test_stages_list_the_same_bands() -> None:
    """A stage that stores nothing of a kind still lists the band; one that leaves it out is refused."""
    made = {rank: ready(rank, 5000, 10) for rank in ((0, 0), (1, 0))}
    made[1, 0] = msgspec.structs.replace(made[1, 0], geometry=StageGeometry(5000, 512, []))
    with pytest.raises(RanksDisagree, match="bands in chain order"):
        agree(made, 16)
