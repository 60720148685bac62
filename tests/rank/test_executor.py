"""The executor on a host arena: effects in order, ids and units checked."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.columns import pack_i32
from allocator.effects import Bind, Copy, Effect, WaitForward, Zero
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from daemon.rank.arena import HostArena
from daemon.rank.device import HostDevice
from daemon.rank.errors import StepRefused
from daemon.rank.executor import Executor

STAGE = StageGeometry(
    256 * 20,
    512,
    [BandGeometry("state", "state", 512), BandGeometry("w", "window", 0), BandGeometry("full", "full", 256)],
)
GEOMETRY = Geometry(4, 30, 5, [STAGE])


def made() -> tuple[Executor, HostArena, HostDevice]:
    """An executor over an arena whose every byte but the sink's is its unit's number in 256-byte units."""
    device = HostDevice(STAGE)
    arena = device.arena
    arena.units(2)[2:] = np.arange(2, 20, dtype=np.uint8)[:, None]
    return Executor(GEOMETRY, 0, device, [0, 0, 0]), arena, device


def test_effects_are_performed_in_order() -> None:
    """A copy then a zero of its source: the target holds the old bytes, the source none."""
    executor, arena, _ = made()
    executor.execute(
        [
            Copy(2, pack_i32([5, 9]), pack_i32([12, 3])),
            Zero(2, pack_i32([5])),
            Bind(2, pack_i32([1, 30]), pack_i32([12, 3])),
            Bind(2, pack_i32([1]), pack_i32([0])),
        ]
    )
    assert arena.units(2)[[12, 3, 5, 9], 0].tolist() == [5, 9, 0, 9]
    assert executor.tables[2][[0, 1, 30]].tolist() == [0, 0, 3]
    assert [table.size for table in executor.tables] == [6, 31, 31]


def test_units_of_different_size_share_the_bytes() -> None:
    """Unit u of each band starts at u times its own size."""
    executor, arena, _ = made()
    executor.execute([Zero(0, pack_i32([3]))])
    assert arena.units(2)[5:9, 0].tolist() == [5, 0, 0, 8]


REFUSED: dict[str, tuple[Effect, str]] = {
    "the sink zeroed": (Zero(2, pack_i32([1])), "leave the chain"),
    "a unit beyond the arena": (Zero(2, pack_i32([20])), "leave the chain"),
    "a copy into the sink": (Copy(2, pack_i32([5]), pack_i32([0])), "leave the chain"),
    "a band of nothing": (Zero(1, pack_i32([4])), "stores nothing"),
    "an id beyond the space": (Bind(2, pack_i32([31]), pack_i32([4])), "1 to 30"),
    "the sink's id": (Bind(2, pack_i32([0]), pack_i32([4])), "1 to 30"),
    "a wait for the future": (WaitForward(4), "newest launched one is 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_effects_are_refused(name: str) -> None:
    """Every effect outside its band, arena or id space is refused and says so."""
    executor, _, device = made()
    device.record_forward(3)
    effect, text = REFUSED[name]
    with pytest.raises(StepRefused, match=text):
        executor.execute([effect])


def test_forwards_are_recorded_in_order() -> None:
    """A device refuses a forward that is not newer than the last."""
    device = HostDevice(STAGE)
    device.record_forward(2)
    device.wait_forward(2)
    with pytest.raises(StepRefused, match="after forward 2"):
        device.record_forward(2)
