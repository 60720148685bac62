"""The order that the CUDA device gives its streams, on modeled ones: nothing races, and without any one kind of wait
something does."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.columns import pack_i32, pack_i64
from allocator.effects import (
    Bind,
    Copy,
    Effect,
    HostRead,
    HostWait,
    HostWrite,
    PublishUnits,
    SendUnits,
    WaitCopy,
    WaitForward,
    Zero,
)
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from daemon.rank.cuda import CudaDevice, Streams
from daemon.rank.errors import StepRefused
from daemon.rank.executor import Executor
from tests.rank.modeled_streams import Clock, Engine, Machine, Units

STAGE = StageGeometry(8 * 40, 8, [BandGeometry("full", "full", 8)])
GEOMETRY = Geometry(4, 30, 0, [STAGE])


class Rank:
    """An executor over a CUDA device on modeled streams."""

    def __init__(self, deaf: frozenset[tuple[str, str]] = frozenset(), engine: bool = True) -> None:
        self.machine = Machine(deaf)
        stream = self.machine.stream
        streams = Streams(stream("forward"), stream("schedule"), stream("copies"), self.machine.on)
        self.units = Units(self.machine, [8])
        self.engine = Engine(self.machine, self.units)
        self.device = CudaDevice(streams, self.units, self.engine if engine else None)
        self.executor = Executor(GEOMETRY, 0, self.device, [0])
        self._ends: dict[int, Clock] = {}

    def step(self, *effects: Effect, processed: int = 0, released: tuple[int, ...] = ()) -> None:
        """Logical progress, then effects. A processed forward's tokens were seen by the host."""
        if processed:
            self.machine.order("host", "tokens", self._ends[processed])
        self.device.release(released)
        self.device.retire_through(processed)
        self.executor.execute(list(effects))

    def forward(self, seq: int, reads: list[int], writes: list[int], *waits: Effect) -> None:
        """What `launched` returned, then a forward that touches these units."""
        self.executor.execute(list(waits))
        touched = [self.units.bytes_of(0, np.array(units, dtype=np.int32)) for units in (reads, writes)]
        self.machine.issue(f"forward {seq}", "forward", *touched)
        self.device.record_forward(seq)
        self._ends[seq] = dict(self.machine.clocks["forward"])


def bind(virtual: list[int], physical: list[int]) -> Bind:
    """Point ids at units."""
    return Bind(0, pack_i32(virtual), pack_i32(physical))


def scene(deaf: frozenset[tuple[str, str]] = frozenset()) -> Rank:
    """Overlapped forwards with a move, a backup and a load, a send and a publication, each with the waits it needs."""
    rank = Rank(deaf)
    rank.step(Zero(0, pack_i32([1, 2, 3])), bind([1, 2, 3], [1, 2, 3]))
    rank.forward(1, [1], [2, 3])
    # A move of what forward 1 writes; its old place is read by nobody else.
    rank.step(WaitForward(1), Copy(0, pack_i32([2]), pack_i32([5])), bind([2], [5]))
    rank.forward(2, [1, 5], [5, 3])
    # A backup of a unit that forward 2 writes, and of one zeroed now; forward 3 writes it again, behind the copy.
    backup = HostRead(70, 0, pack_i32([5, 8]), pack_i64([0, 1]))
    rank.step(Zero(0, pack_i32([8])), backup, bind([8], [8]), processed=1)
    rank.forward(3, [1], [5, 3], WaitCopy(70))
    # A load of the slots into units; forward 4 reads them behind it. A send of what forward 3 writes, deferred.
    load = HostWrite(71, 0, pack_i32([9, 10]), pack_i64([0, 1]))
    rank.step(Zero(0, pack_i32([9, 10])), load, SendUnits(72, 0, pack_i32([3]), 3), processed=2, released=(70,))
    rank.forward(4, [9, 10], [5], WaitCopy(71))
    # A publication of units zeroed now, and of what forward 4 writes; both leave when it was processed.
    fresh = PublishUnits(73, 0, pack_i32([11]), pack_i32([11]), 0)
    used = PublishUnits(74, 0, pack_i32([2]), pack_i32([5]), 4)
    rank.step(Zero(0, pack_i32([11])), fresh, used, processed=3)
    rank.forward(5, [1], [12])
    # A send that must go at once, because its units are wanted.
    rank.step(SendUnits(75, 0, pack_i32([12]), 5), HostWait(75), Zero(0, pack_i32([12])), processed=4)
    rank.step(HostWait(72), Zero(0, pack_i32([3])), processed=5)
    return rank


def test_a_scene_of_everything_has_no_race() -> None:
    """Forwards, moves, host copies and transfers touch each unit in one order."""
    rank = scene()
    assert rank.machine.races == []
    assert rank.engine.log == [
        ("submit", 72, 0, [3]),
        ("publish", 73, 0, [11], [11]),
        ("publish", 74, 0, [2], [5]),
        ("submit", 75, 0, [12]),
        ("wait", 75),
        ("wait", 72),
    ]


KINDS = [
    ("forward", "schedule"),
    ("schedule", "forward"),
    ("schedule", "copies"),
    ("copies", "schedule"),
    ("copies", "forward"),
    ("host", "forward"),
    ("host", "schedule"),
    ("host", "engine"),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-behind-{kind[1]}")
def test_without_any_kind_of_wait_something_races(kind: tuple[str, str]) -> None:
    """A device that does not wait in one of these ways is found out; the scene has all of them and no other."""
    assert scene().machine.heard == {*KINDS, ("host", "tokens")}
    assert scene(frozenset([kind])).machine.races


def test_a_send_waits_for_its_forward_and_for_what_the_schedule_stream_waits_for() -> None:
    """It leaves when the later of both was processed, not at the step that ordered it, and in order."""
    rank = Rank()
    rank.step(Zero(0, pack_i32([1])))
    rank.forward(1, [], [1])
    rank.step()
    rank.forward(2, [], [2])
    rank.step(SendUnits(7, 0, pack_i32([1]), 1))
    rank.step(WaitForward(2), Copy(0, pack_i32([2]), pack_i32([3])), SendUnits(8, 0, pack_i32([3]), 0))
    assert rank.engine.log == []
    rank.step(processed=1)
    assert rank.engine.log == [("submit", 7, 0, [1])]
    rank.step(processed=2)
    assert rank.engine.log[1:] == [("submit", 8, 0, [3])]
    rank.step(SendUnits(9, 0, pack_i32([1]), 2))
    assert rank.engine.log[2:] == [("submit", 9, 0, [1])]
    assert rank.machine.races == []


def test_a_released_transfer_is_not_started_any_more() -> None:
    """What was deferred of it is dropped, and the engine is told that it is over."""
    rank = Rank()
    rank.step()
    rank.forward(1, [], [1])
    rank.step(SendUnits(7, 0, pack_i32([1]), 1), SendUnits(8, 0, pack_i32([1]), 1))
    rank.step(released=(7, 99))
    rank.step(processed=1)
    assert rank.engine.log == [("end", 7), ("submit", 8, 0, [1])]


def test_retired_forwards_are_not_waited_for() -> None:
    """A wait for a forward that was processed adds none to the stream; one for the future is refused."""
    rank = Rank()
    rank.step()
    rank.forward(1, [], [1])
    rank.step(WaitForward(1), processed=1)
    assert ("schedule", "forward") not in rank.machine.heard
    with pytest.raises(StepRefused, match="newest launched one is 1"):
        rank.step(WaitForward(2))
    with pytest.raises(StepRefused, match="after forward 1"):
        rank.device.record_forward(1)


WITHOUT: dict[str, Effect] = {
    "a send": SendUnits(7, 0, pack_i32([1]), 0),
    "a publication": PublishUnits(7, 0, pack_i32([1]), pack_i32([1]), 0),
    "a wait for a transfer": HostWait(7),
    "a wait for a copy": WaitCopy(7),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_an_engine_transfers_are_refused(name: str) -> None:
    """Named, not skipped; so is a wait for a use that never began."""
    with pytest.raises(StepRefused, match=r"ships no engine|not under way"):
        Rank(engine=False).step(WITHOUT[name])


def test_columns_may_be_reused_after_a_call() -> None:
    """A deferred send keeps the units that it was given."""
    rank = Rank()
    rank.step()
    rank.forward(1, [], [1])
    units = np.array([1], dtype=np.int32)
    rank.device.send_units(7, 0, units, 1)
    units[:] = 9
    rank.step(processed=1)
    assert rank.engine.log == [("submit", 7, 0, [1])]
