"""The clearance table, row by row, against the page that defines it; and the batches that pend."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.checks import Checks
from allocator.physical.clearance import CLEARANCE, Clear, Consumer, Hazard
from allocator.physical.forward_steps import ForwardSteps, PendingBatches
from allocator.physical.ledger import BandLedger
from tests.allocator.worlds import ids

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


def test_a_consumer_that_is_not_served_stops_there() -> None:
    """Asking a stream wait for a receive, whose rule is another, is a defect, not a guess."""
    assert CLEARANCE[Consumer.NETWORK_RECEIVE][Hazard.FORWARD] is Clear.AFTER_RETIRE
    with pytest.raises(AssertionError, match="not served"):
        BandLedger(4, flying(1)).stream_wait(Consumer.NETWORK_RECEIVE, 1)


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
