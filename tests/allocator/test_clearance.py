"""The clearance table against the page that defines it, cell by cell through a chain; and the batches that pend."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.checks import Checks
from allocator.effects import Copy, Effect, HostWrite, PublishUnits, Zero
from allocator.errors import InvariantBroken
from allocator.physical.clearance import CLEARANCE, Clear, Consumer, Hazard
from allocator.physical.forward_steps import ForwardSteps, PendingBatches
from allocator.physical.ledger import BandLedger
from tests.allocator.worlds import World, hybrid_geometry, ids, room, waits

ROWS = {
    "FORWARD": "none, stream wait, stream wait, host wait, excluded",
    "SCHEDULE_COPY": "stream wait, stream wait, stream wait, host wait, excluded",
    "ZERO": "stream wait, stream wait, stream wait, host wait, excluded",
    "HOST_LOAD": "none, stream wait, stream wait, host wait, excluded",
    "NETWORK_RECEIVE": "after retire, stream wait, stream wait, host wait, excluded",
}
"""The design's table: FORWARD, COPY_READ, COPY_WRITE, NETWORK, FIXED."""


@pytest.mark.parametrize("consumer", list(Consumer))
def test_each_consumer_clears_each_hazard_as_designed(consumer: Consumer) -> None:
    """The row of every consumer says what the design's row says, and no pair is missing."""
    row = [CLEARANCE[consumer][hazard].name.lower().replace("_", " ") for hazard in Hazard]
    assert ", ".join(row) == ROWS[consumer.name]


# --- every cell through a chain ------------------------------------------------------------------------------------

STATE, FULL = 0, 1


class Cell:
    """A full arena of two slots and three pages; the hazard is on one slot and one page, then a consumer comes."""

    def __init__(self) -> None:
        self.world = World(hybrid_geometry(room(2 * 16 + 3 * 8, 16, 8)))
        self.slots, self.pages = self.world.take(2, 3)
        self.world.step(writes={STATE: self.slots, FULL: self.pages})
        self.world.process()
        self.world.step()
        self.touched = {STATE: self.slots[:1], FULL: self.pages[:1]}

    def record(self, hazard: Hazard) -> None:
        """Puts the hazard on record; every copy and transfer of it is use 9."""
        world = self.world
        if hazard is Hazard.COPY_READ:
            world.backup(9, self.touched)
        elif hazard is Hazard.COPY_WRITE:
            slots = world.backup(1, self.touched)
            world.step()
            world.end(1)
            world.load(9, self.touched, slots)
        elif hazard is Hazard.NETWORK:
            world.send(9, self.touched)
        elif hazard is Hazard.FIXED:
            world.publish(9, self.touched, writes=False)
        world.step(writes=self.touched if hazard is Hazard.FORWARD else None)
        self.forward = world.seq

    def consume(self, consumer: Consumer) -> tuple[list[Effect], type[Effect] | None]:
        """The consumer comes; the effects it led to, and the type of the one by which it touches the unit."""
        world = self.world
        if consumer is Consumer.FORWARD:
            world.step(writes=self.touched)
            return world.launch_waits, None
        if consumer is Consumer.SCHEDULE_COPY:
            world.copy_state(self.slots[1:], self.slots[:1])
            return world.step(), Copy
        if consumer is Consumer.ZERO:
            world.free({FULL: self.pages[:1]})
            world.take(0, 1)
            return world.step(), Zero
        if consumer is Consumer.HOST_LOAD:
            slots = world.backup(20, {FULL: self.pages[2:]})
            world.step()
            world.end(20)
            world.load(21, {FULL: self.pages[:1]}, slots)
            return world.step(), HostWrite
        world.hold(21, {FULL: self.pages[:1]})
        world.publish(21, {FULL: self.pages[:1]})
        return world.step(), PublishUnits


def excluded(cell: Cell, consumer: Consumer) -> bool:
    """Whether the unit is not this consumer's to have."""
    if consumer is Consumer.ZERO:
        cell.world.free({FULL: cell.pages[:1]})
        return cell.world.logical.refusal((0, 1)) is not None and cell.world.logical.quarantined() == (0, 1)
    with pytest.raises(InvariantBroken, match=r"has fixed units|is published|are published") as caught:
        cell.consume(consumer)
    return caught.value.name == "band.write_of_fixed_unit"


def seen(effects: list[Effect], touch: type[Effect] | None) -> str:
    """What stood between the hazard and the consumer, in the words of the table."""
    before = effects
    if touch is not None:
        at = next(index for index, effect in enumerate(effects) if isinstance(effect, touch))
        before = effects[:at]
        late = effects[at]
        if isinstance(late, PublishUnits) and late.after:
            assert not waits(effects)
            return "after retire"
    kinds = {kind for kind, _ in waits(before)}
    assert len(kinds) <= 1, kinds
    return {"forward": "stream wait", "copy": "stream wait", "host": "host wait"}[kinds.pop()] if kinds else "none"


@pytest.mark.parametrize("hazard", list(Hazard))
@pytest.mark.parametrize("consumer", list(Consumer))
def test_each_cell_of_the_table_is_kept_by_a_chain(consumer: Consumer, hazard: Hazard) -> None:
    """Whoever comes to a unit with this hazard waits as the table says, for that alone, and contents stay right."""
    wanted = ROWS[consumer.name].split(", ")[list(Hazard).index(hazard)]
    cell = Cell()
    cell.record(hazard)
    if wanted == "excluded" or (consumer, hazard) == (Consumer.ZERO, Hazard.NETWORK):
        assert excluded(cell, consumer), "nobody gets it to zero: freed under a transfer it waits in quarantine"
        return
    effects, touch = cell.consume(consumer)
    assert seen(effects, touch) == wanted
    assert all(number == (cell.forward if kind == "forward" else 9) for kind, number in waits(effects))
    cell.world.drain()


def test_a_hazard_is_cleared_once() -> None:
    """After one wait, nobody on this rank waits for the same copy, transfer or forward again."""
    for hazard in (Hazard.FORWARD, Hazard.COPY_READ, Hazard.COPY_WRITE, Hazard.NETWORK):
        cell = Cell()
        cell.record(hazard)
        effects, _ = cell.consume(Consumer.SCHEDULE_COPY if hazard is Hazard.NETWORK else Consumer.ZERO)
        assert len(waits(effects)) == 1
        cell.world.copy_state(cell.slots[1:], cell.slots[:1])
        assert waits(cell.world.step()) == []
        cell.world.step(writes={STATE: cell.slots})
        assert cell.world.launch_waits == []
        cell.world.drain()


# --- what the table's users keep on record -------------------------------------------------------------------------


def flying(*launched: int, processed: int = 0) -> ForwardSteps:
    """Progress with these forwards launched, one step each from 1 on."""
    steps = ForwardSteps(Checks())
    for seq in range(1, max(launched) + 2):
        steps.begin(seq, processed if seq > max(launched) else 0)
        steps.end()
        if seq in launched:
            steps.launch(seq)
    return steps


def test_only_consumers_the_table_makes_wait_do_wait() -> None:
    """Zeroing and moves wait for a forward in flight, once; the forward's own stream needs no wait."""
    ledger = BandLedger(4, flying(1, 2))
    assert not ledger.stream_wait(Consumer.FORWARD, 1)
    assert ledger.stream_wait(Consumer.ZERO, 1)
    assert not ledger.stream_wait(Consumer.SCHEDULE_COPY, 1), "the stream is behind forward 1 already"
    assert ledger.stream_wait(Consumer.SCHEDULE_COPY, 2)


def test_a_receive_never_waits_on_the_stream_for_a_forward() -> None:
    """Its rule is another: the address leaves the host after the forward has ended, so the stream waits for nothing."""
    assert CLEARANCE[Consumer.NETWORK_RECEIVE][Hazard.FORWARD] is Clear.AFTER_RETIRE
    assert not BandLedger(4, flying(1)).stream_wait(Consumer.NETWORK_RECEIVE, 1)


def test_writes_end_when_their_forward_retires() -> None:
    """A unit is written until its newest writer is processed or waited for."""
    steps = flying(1, 2)
    ledger = BandLedger(4, steps)
    ledger.record_writes(1, ids(0, 1))
    ledger.record_writes(2, ids(1, 2))
    assert ledger.written(ids(0, 1, 2, 3)).tolist() == [True, True, True, False]
    assert ledger.may_move_unwaited(ids(0, 3)).tolist() == [False, True]
    steps.wait(1)
    assert ledger.written_positions().tolist() == [1, 2]
    steps.begin(4, 2)
    assert ledger.written_positions().tolist() == []


def test_batches_keep_their_forward_and_order() -> None:
    """Release and settle give whole batches, oldest first, ascending; what is left still counts."""
    batches = PendingBatches()
    batches.add(1, ids(5, 9))
    batches.add(1, ids(2))
    batches.add(4, ids(7))
    batches.add(6, ids(1, 3))
    assert batches.units == 6
    assert batches.positions().tolist() == [1, 2, 3, 5, 7, 9]
    assert batches.release_through(0) is None
    released = batches.release_through(3)
    assert released is not None
    assert released.tolist() == [2, 5, 9]
    seq, positions = batches.settle(2)
    assert (seq, positions.tolist()) == (6, [1, 3, 7])
    assert batches.units == 0
    assert np.array_equal(batches.positions(), ids())


def test_frees_behind_an_older_forward_than_the_newest_batch_stop() -> None:
    """Batches are keyed by the newest launched forward, which never goes back."""
    batches = PendingBatches()
    batches.add(3, ids(1))
    with pytest.raises(AssertionError):
        batches.add(2, ids(2))
