"""The ledger of one band: a record per use of its units that is not over, and what a consumer must do about it.

Owns forward writes and vacated units, the hazards that exist in this version; host copies, network transfers, fenced
bytes and fixed units join here. Must never decide what is taken or moved. Invariant: a record ends by logical progress
only, the same on every rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int32s
from allocator.physical.clearance import CLEARANCE, Clear, Consumer, Hazard
from allocator.physical.forward_steps import ForwardSteps, PendingBatches


class BandLedger:
    """Uses of a band's units, by position in the band."""

    __slots__ = ("_steps", "_written_by", "vacated")

    def __init__(self, capacity: int, steps: ForwardSteps) -> None:
        self._steps = steps
        self._written_by = np.zeros(capacity, dtype=np.int64)  # the newest forward that writes the unit, 0: none
        self.vacated = PendingBatches()  # moved-from units, behind the newest forward that may still read them

    def record_writes(self, seq: int, positions: Int32s) -> None:
        """Forward `seq` writes these units until it retires."""
        assert seq > self._steps.retired_through, "a forward that is over cannot write"
        self._written_by[positions] = seq

    def written(self, positions: Int32s) -> NDArray[np.bool_]:
        """For each position, whether a forward that has not retired writes it (hazard FORWARD)."""
        return self._written_by[positions] > self._steps.retired_through

    def written_positions(self) -> Int32s:
        """Positions with a write that has not retired: for idle checks and tests."""
        return (self._written_by > self._steps.retired_through).nonzero()[0].astype(np.int32)

    def stream_wait(self, consumer: Consumer, seq: int) -> bool:
        """Whether `consumer` of units that forward `seq` may touch must first have its stream wait for it."""
        clear = CLEARANCE[consumer][Hazard.FORWARD]
        assert clear in (Clear.NONE, Clear.STREAM_WAIT), f"{consumer} is not served by this version"
        return clear is Clear.STREAM_WAIT and self._steps.wait(seq)

    def may_move_unwaited(self, positions: Int32s) -> NDArray[np.bool_]:
        """For each source, whether a move needs no wait: what an opportunistic flush may touch."""
        if CLEARANCE[Consumer.SCHEDULE_COPY][Hazard.FORWARD] is Clear.NONE:
            return np.ones(positions.size, dtype=np.bool_)
        return ~self.written(positions)
