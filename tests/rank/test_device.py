"""The host device behind the executor: host copies, transfers, and what is refused without a pool or an engine."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.columns import Int32s, pack_i32, pack_i64
from allocator.effects import Copy, Effect, HostRead, HostWait, HostWrite, PublishUnits, SendUnits, WaitCopy, Zero
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from daemon.rank.arena import BLOCK_BYTES, HostArena
from daemon.rank.device import HostDevice
from daemon.rank.errors import StepRefused
from daemon.rank.executor import Executor
from daemon.rank.host_pool import HostPool

STAGE = StageGeometry(256 * 20, 512, [BandGeometry("state", "state", 512), BandGeometry("full", "full", 256)])
GEOMETRY = Geometry(4, 30, 5, [STAGE])


class Peer:
    """An engine whose transfers copy at once; `log` keeps what it was asked."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []

    def submit(self, use: int, band: int, units: Int32s) -> None:
        """Note it."""
        self.log.append(("submit", use, band, units.tolist()))

    def publish(self, use: int, band: int, virtual: Int32s, units: Int32s) -> None:
        """Note it."""
        self.log.append(("publish", use, band, virtual.tolist(), units.tolist()))

    def wait(self, use: int) -> None:
        """Note it."""
        self.log.append(("wait", use))

    def end(self, use: int) -> None:
        """Note it."""
        self.log.append(("end", use))


def made(slots: int = 4) -> tuple[Executor, HostDevice, HostPool, Peer]:
    """An executor over an arena whose every byte is its unit's number in units of 256 bytes, with a pool and a peer."""
    pool, peer = HostPool(STAGE, slots), Peer()
    device = HostDevice(STAGE, pool=pool, engine=peer)
    device.arena.units(1)[2:] = np.arange(2, 20, dtype=np.uint8)[:, None]
    return Executor(GEOMETRY, 0, device, [0, 0]), device, pool, peer


def test_a_backup_and_a_load_carry_bytes_through_the_pool() -> None:
    """Units of two bands go out, are overwritten, and come back to other units, each band through its own slots."""
    executor, device, pool, _ = made()
    executor.execute([HostRead(7, 1, pack_i32([5, 9]), pack_i64([3, 0])), HostRead(7, 0, pack_i32([4]), pack_i64([3]))])
    executor.execute([WaitCopy(7), Zero(1, pack_i32([5, 9])), Zero(0, pack_i32([4]))])
    device.release([7])
    executor.execute(
        [HostWrite(8, 1, pack_i32([12, 13]), pack_i64([0, 3])), HostWrite(8, 0, pack_i32([8]), pack_i64([3]))]
    )
    assert device.arena.units(1)[[5, 9, 12, 13], 0].tolist() == [0, 0, 9, 5]
    assert device.arena.units(0)[8, [0, 256]].tolist() == [8, 9]
    assert pool.rows(1)[[0, 3], 255].tolist() == [9, 5]
    with pytest.raises(StepRefused, match="host copy 7, which is not under way"):
        executor.execute([WaitCopy(7)])


def test_transfers_reach_the_engine_by_unit_and_end_once() -> None:
    """Sends and publications name physical units; the engine is waited for, and told of the end of what it began."""
    executor, device, _, peer = made()
    device.record_forward(3)
    executor.execute([SendUnits(5, 1, pack_i32([6, 4]), 3), SendUnits(5, 0, pack_i32([3]), 3), HostWait(5)])
    executor.execute([PublishUnits(6, 1, pack_i32([30, 1]), pack_i32([7, 8]), 0)])
    device.release([5, 6, 99])
    device.release([5])
    assert peer.log == [
        ("submit", 5, 1, [6, 4]),
        ("submit", 5, 0, [3]),
        ("wait", 5),
        ("publish", 6, 1, [30, 1], [7, 8]),
        ("end", 5),
        ("end", 6),
    ]


REFUSED: dict[str, tuple[Effect, str]] = {
    "a slot beyond the pool": (HostRead(7, 1, pack_i32([4]), pack_i64([4])), r"slots 4..4 of band full; .* has 4"),
    "a slot below 0": (HostWrite(7, 1, pack_i32([4]), pack_i64([-1])), r"slots -1..-1"),
    "a slot never written": (
        HostWrite(7, 1, pack_i32([4]), pack_i64([2])),
        "slot 2 of band full is read but was never",
    ),
    "a pair without a slot": (HostRead(7, 1, pack_i32([4, 5]), pack_i64([2])), "HostRead pairs 2 with 1"),
    "the sink backed up": (HostRead(7, 1, pack_i32([0]), pack_i64([2])), "units 0..0 of band full"),
    "the padding slot sent": (SendUnits(7, 0, pack_i32([0]), 0), "units 0..0 of band state"),
    "a send behind the future": (SendUnits(7, 1, pack_i32([4]), 9), "forward 9, but the newest launched one is 0"),
    "a publication of other ids": (PublishUnits(7, 1, pack_i32([1, 2]), pack_i32([4]), 0), "2 ids for 1 units"),
    "a publication of no id": (PublishUnits(7, 1, pack_i32([31]), pack_i32([4]), 0), "ids run from 1 to 30"),
    "a transfer that never began": (HostWait(7), "transfer 7, which is not under way"),
    "a copy that never began": (WaitCopy(7), "host copy 7, which is not under way"),
    "two copies into one unit": (Copy(1, pack_i32([4, 5]), pack_i32([6, 6])), "Copy writes a unit twice"),
    "a copy over its own source": (Copy(1, pack_i32([4, 5]), pack_i32([5, 6])), "whose target 5 is a source"),
    "a copy of uneven columns": (Copy(1, pack_i32([4, 5]), pack_i32([6])), "Copy pairs 2 with 1"),
    "a band that is none": (Zero(2, pack_i32([4])), "band 2 of 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_effects_are_refused_before_they_touch_anything(name: str) -> None:
    """Each refusal names what was wrong, and arena, pool and engine are as they were."""
    executor, device, pool, peer = made()
    before = device.arena.data.copy()
    effect, text = REFUSED[name]
    with pytest.raises(StepRefused, match=text):
        executor.execute([effect])
    assert np.array_equal(device.arena.data, before)
    assert not pool.rows(1).any()
    assert peer.log == []


MISSING: dict[str, tuple[Effect, str]] = {
    "a backup": (
        HostRead(7, 1, pack_i32([4]), pack_i64([0])),
        "this rank has none: this version gives ranks no host tier",
    ),
    "a load": (HostWrite(7, 1, pack_i32([4]), pack_i64([0])), "host copy 7 needs a host pool"),
    "a send": (SendUnits(7, 1, pack_i32([4]), 0), "transfer 7 needs a transfer engine, and this rank has none"),
    "a publication": (PublishUnits(7, 1, pack_i32([1]), pack_i32([4]), 0), "this version ships no engine"),
}


@pytest.mark.parametrize("name", MISSING)
def test_without_a_pool_or_an_engine_the_refusal_says_so(name: str) -> None:
    """What this version lacks is named, never skipped."""
    executor = Executor(GEOMETRY, 0, HostDevice(STAGE), [0, 0])
    effect, text = MISSING[name]
    with pytest.raises(StepRefused, match=text):
        executor.execute([effect])


def test_a_state_may_be_copied_to_several_slots() -> None:
    """A repeated source is allowed, and its bytes stay."""
    executor, device, _, _ = made()
    executor.execute([Copy(0, pack_i32([3, 3]), pack_i32([5, 8]))])
    assert device.arena.units(0)[[3, 5, 8], 0].tolist() == [6, 6, 6]


def test_a_copy_of_more_than_a_block_is_whole() -> None:
    """Copies are made in blocks; the last one is shorter."""
    unit = BLOCK_BYTES // 4
    arena = HostArena(StageGeometry(unit * 16, unit, [BandGeometry("full", "full", unit)]))
    arena.units(0)[1:8] = np.arange(1, 8, dtype=np.uint8)[:, None]
    arena.copy(0, np.arange(1, 8, dtype=np.int32), np.arange(15, 8, -1, dtype=np.int32))
    assert arena.units(0)[:, [0, -1]].tolist() == [[u, u] for u in [0, 1, 2, 3, 4, 5, 6, 7, 0, 7, 6, 5, 4, 3, 2, 1]]


def test_unbound_ids_read_as_the_resting_unit() -> None:
    """Every table starts at its band's resting unit, id 0 included; binding to it needs no unit of the chain."""
    executor = Executor(GEOMETRY, 0, HostDevice(STAGE), [0, 0])
    padded = Executor(GEOMETRY, 0, HostDevice(STAGE), [1, 0])
    assert executor.tables[0].tolist() == [0] * 6
    assert padded.tables[0].tolist() == [1] * 6
    assert padded.tables[1].tolist() == [0] * 31
