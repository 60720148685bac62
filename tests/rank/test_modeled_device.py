"""The modeled device: work runs late and only in the order that waits give, and what no wait orders is a fault."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.columns import Bytes8s, Int32s
from allocator.geometry import BandGeometry, StageGeometry
from daemon.rank.modeled_device import JUNK, Draws, ModeledDevice
from daemon.rank.modeled_order import DeviceFault

UNIT = 4
STAGE = StageGeometry(10 * UNIT, UNIT, [BandGeometry("full", "full", UNIT)])


def units(*values: int) -> Int32s:
    """A column of units."""
    return np.array(values, dtype=np.int32)


def byte_rows(*values: int) -> Bytes8s:
    """One byte for each unit."""
    return np.array(values, dtype=np.uint8)[:, None]


def slots(*values: int) -> np.ndarray:
    """A column of host slots."""
    return np.array(values, dtype=np.int64)


def device(watch: bool = True, writes: Bytes8s | None = None) -> ModeledDevice:
    """One rank; the peers of its publications write `writes`, or read."""
    return ModeledDevice(STAGE, seed=0, host_slots=4, peer_writes=lambda use, band, virtual: writes, watch=watch)


def launch(one: ModeledDevice, seq: int, reads: Int32s, writes: Int32s, value: int = 7) -> None:
    """A forward that reads whole units and writes the first byte of others."""
    values = np.full((writes.size, 1), value, dtype=np.uint8)
    one.launch(seq, [(0, reads)], [(0, writes, np.zeros(writes.size, dtype=np.int32), values)])
    one.record_forward(seq)


def test_work_waits_to_be_asked_for() -> None:
    """What is issued runs by itself at the earliest when it may, at the latest when the host sees its end."""
    one = device()
    one.zero(0, units(3))
    launch(one, 1, units(3), units(3))
    assert one.memory.units[0][3].tolist() == [JUNK] * UNIT
    one.retire_through(1)
    assert one.seen.pop(1)[0].tolist() == [[0] * UNIT], "the forward read before it wrote, behind the zeroing"
    assert one.memory.units[0][3].tolist() == [7, 0, 0, 0]


def test_a_watched_device_holds_at_once_what_it_will_hold() -> None:
    """The second memory is that of a device on which nothing is late; both are equal once all has run."""
    one = device()
    one.zero(0, units(2, 3))
    launch(one, 1, units(2), units(3))
    one.host_read(1, 0, units(3), slots(2))
    one.wait_copy(1)
    one.copy(0, units(3), units(5))
    assert one.at_once is not None
    assert one.at_once.units[0][5].tolist() == [7, 0, 0, 0]
    assert one.memory.units[0][5].tolist() == [JUNK] * UNIT
    one.drain()
    assert np.array_equal(one.memory.data, one.at_once.data)
    assert np.array_equal(one.memory.host[0], one.at_once.host[0])
    assert one.memory.host[0][2].tolist() == [7, 0, 0, 0]


def test_delays_differ_by_seed_and_repeat() -> None:
    """The draws of a seed are always the same, those of another seed differ, and devices really lag differently."""
    assert [Draws(3).next() for _ in range(2)] == [Draws(3).next()] * 2
    first = [draws.next() for draws in [Draws(1)] * 50]
    second = [draws.next() for draws in [Draws(2)] * 50]
    assert first != second
    assert 0 <= min(first) < 0.2 < 0.8 < max(first) < 1
    ran = set()
    for seed in range(12):
        one = ModeledDevice(STAGE, seed, watch=False)
        for unit in range(1, 9):
            one.zero(0, units(unit))
            one.drift()
        ran.add(int((one.memory.units[0][1:9] == 0).all(axis=1).sum()))
    assert len(ran) > 2


def forward_then(one: ModeledDevice, reads: Int32s, writes: Int32s) -> None:
    """Zeroes all units, then launches forward 1."""
    one.zero(0, units(*range(1, 10)))
    launch(one, 1, reads, writes)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("what", ["zero what it reads", "copy over what it reads", "copy from what it writes"])
def test_schedule_work_beside_a_forward(what: str, ordered: bool) -> None:
    """Without a wait it is a race, whatever the delays; behind `wait_forward`, or the forward's end, it is not."""
    one = device()
    forward_then(one, units(2), units(3))
    one.copy(0, units(2), units(4))  # two readers do not race
    if ordered:
        one.wait_forward(1)
    act = {
        "zero what it reads": lambda: one.zero(0, units(2)),
        "copy over what it reads": lambda: one.copy(0, units(4), units(2)),
        "copy from what it writes": lambda: one.copy(0, units(3), units(5)),
    }[what]
    if ordered:
        act()
        return
    with pytest.raises(DeviceFault, match=r"unit \d of band full beside forward 1") as fault:
        act()
    assert fault.value.check == "unordered_overlap"


def test_a_wait_for_a_copy_covers_what_the_copy_was_behind() -> None:
    """A host copy runs behind every forward launched before it, so whoever waits for the copy is behind them too."""
    one = device()
    forward_then(one, units(2), units(3))
    one.host_read(1, 0, units(3), slots(0))
    one.wait_copy(1)
    one.zero(0, units(2, 3))
    one.drain()
    assert one.memory.host[0][0].tolist() == [7, 0, 0, 0]


def test_copies_and_transfers_race_with_whoever_is_not_behind_them() -> None:
    """A backup, a send and a peer each hold their units against schedule work, forwards and each other."""
    for begin in (
        lambda one: one.host_read(1, 0, units(2), slots(0)),
        lambda one: one.send_units(1, 0, units(2), 0),
        lambda one: one.publish_units(1, 0, units(1), units(2), 0),
    ):
        for act in (
            lambda one: one.zero(0, units(2)),
            lambda one: launch(one, 1, units(), units(2)),
            lambda one: one.host_write(2, 0, units(2), slots(1)),
        ):
            one = device()
            one.zero(0, units(2))
            begin(one)
            launch_free = device()
            launch_free.zero(0, units(2))
            with pytest.raises(DeviceFault, match=r"beside (backup|send|peer) 1"):
                act(one)
            begin(launch_free)
            launch_free.release([1])
            act(launch_free)


def test_a_send_starts_behind_the_forward_it_names_only() -> None:
    """After forward 1 it may read what that wrote; named without it, it races."""
    one = device()
    forward_then(one, units(), units(2))
    one.send_units(1, 0, units(2), 1)
    one.finish(1)
    assert one.carried[1][0][1].tolist() == [[7, 0, 0, 0]]
    other = device()
    forward_then(other, units(), units(2))
    with pytest.raises(DeviceFault, match="send 1 reads unit 2 of band full beside forward 1"):
        other.send_units(1, 0, units(2), 0)


def test_a_peer_writes_when_it_likes_until_the_release() -> None:
    """Its bytes are there after the release at the latest, and nobody may read the unit before."""
    one = device(writes=byte_rows(9).repeat(UNIT, axis=1))
    one.zero(0, units(2))
    one.publish_units(1, 0, units(1), units(2), 0)
    with pytest.raises(DeviceFault, match="beside peer 1"):
        one.copy(0, units(2), units(3))
    one.release([1])
    assert one.memory.units[0][2].tolist() == [9] * UNIT


def test_waits_that_can_never_end_are_faults() -> None:
    """For forwards not launched, copies not issued, and peers, which owe us nothing."""
    one = device()
    one.zero(0, units(2))
    one.publish_units(3, 0, units(1), units(2), 0)
    for wait in (
        lambda: one.wait_forward(1),
        lambda: one.wait_copy(2),
        lambda: one.host_wait(3),
        lambda: one.send_units(4, 0, units(2), 1),
    ):
        with pytest.raises(DeviceFault) as fault:
            wait()
        assert fault.value.check == "stuck_wait"


def test_bytes_before_the_chain_are_out_of_bounds() -> None:
    """The sink is unit 0: it is read by forwards and written by nobody."""
    one = device()
    launch(one, 1, units(0), units(3))
    with pytest.raises(DeviceFault) as fault:
        one.zero(0, units(0))
    assert fault.value.check == "outside_chain"
    with pytest.raises(DeviceFault, match="reads or writes a target twice"):
        one.copy(0, units(4, 5), units(6, 6))
