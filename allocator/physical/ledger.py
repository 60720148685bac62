"""The ledger: a record per use of units that is not over, and what a consumer must do about it.

Owns, per band, which forward writes which unit, the vacated units, and how many uses touch each unit (`BandLedger`);
per stage, the open uses with the units they resolved, and the bytes that a band gave up while a use still touches them
(`StageLedger`). Must never decide what is taken or moved. Invariant: a record ends by logical progress only, the same
on every rank: a forward is processed, a use is released, or an effect made the schedule stream (or the host) wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allocator.checks import Checks
from allocator.columns import Int32s
from allocator.physical.clearance import CLEARANCE, Clear, Consumer, Hazard, to_move_from
from allocator.physical.forward_steps import ForwardSteps, PendingBatches

HELD = 4  # the row of a receive that is not published; no hazard, but a reason to stay
ROWS = {Hazard.COPY_READ: 0, Hazard.COPY_WRITE: 1, Hazard.NETWORK: 2, Hazard.FIXED: 3}
COPIES = (Hazard.COPY_READ, Hazard.COPY_WRITE)
_COUNTS = 5


@dataclass(frozen=True, slots=True)
class Use:
    """A host copy or transfer: its hazard (None: a hold), and per band the positions it resolved, ascending.

    A hold names virtual ids instead, because its units may still move.
    """

    number: int
    hazard: Hazard | None
    parts: tuple[tuple[int, Int32s], ...]

    def column(self, band: int) -> Int32s | None:
        """Its units of one band."""
        return next((column for index, column in self.parts if index == band), None)


class BandLedger:
    """Uses of a band's units, by position in the band."""

    __slots__ = ("_capacity", "_counts", "_steps", "_unknown_through", "_written_by", "held", "uses", "vacated")

    def __init__(self, capacity: int, steps: ForwardSteps) -> None:
        self._capacity = capacity
        self._steps = steps
        # The newest forward that writes the unit, 0: none. `full` touches the memory now, and not while serving.
        self._written_by = np.full(capacity, 0, dtype=np.int64)
        self._counts: NDArray[np.int16] | None = None  # int16[uses by kind, capacity], made at the first use
        self._unknown_through = 0  # forwards up to this one may write any unit
        self.vacated = PendingBatches()  # moved-from units, behind the newest forward that may still read them
        self.held = 0  # units that await publication
        self.uses = 0  # columns of uses on record

    # --- forwards ------------------------------------------------------------------------------------------------

    def record_writes(self, seq: int, positions: Int32s) -> None:
        """Forward `seq` writes these units until it retires."""
        assert seq > self._steps.retired_through, "a forward that is over cannot write"
        self._written_by[positions] = seq

    def record_unknown(self, seq: int) -> None:
        """Forward `seq` may write any unit of the band (speculative): nothing moves unwaited until it retires."""
        self._unknown_through = seq

    def written(self, positions: Int32s) -> NDArray[np.bool_]:
        """For each position, whether a forward that has not retired writes it (hazard FORWARD)."""
        retired = self._steps.retired_through
        if self._unknown_through > retired:
            return np.ones(positions.size, dtype=np.bool_)
        return self._written_by[positions] > retired

    def move_writes(self, sources: Int32s, targets: Int32s) -> None:
        """The contents went elsewhere; so does what is known about who wrote them, and holds."""
        self._written_by[targets] = 0
        if self._counts is not None and self.held:
            self._counts[HELD, targets] = self._counts[HELD, sources]
            self._counts[HELD, sources] = 0

    def written_positions(self) -> Int32s:
        """Positions with a write that has not retired: for idle checks and tests."""
        return (self._written_by > self._steps.retired_through).nonzero()[0].astype(np.int32)

    def stream_wait(self, consumer: Consumer, seq: int) -> bool:
        """Whether `consumer` of units that forward `seq` may touch must first have its stream wait for it."""
        return CLEARANCE[consumer][Hazard.FORWARD] is Clear.STREAM_WAIT and self._steps.wait(seq)

    # --- uses ----------------------------------------------------------------------------------------------------

    def add(self, hazard: Hazard | None, positions: Int32s) -> None:
        """One more use touches these positions."""
        if self._counts is None:
            self._counts = np.zeros((_COUNTS, self._capacity), dtype=np.int16)
        row = HELD if hazard is None else ROWS[hazard]
        self._counts[row, positions] += 1
        self.uses += 1
        if hazard is None:
            self.held += positions.size

    def remove(self, hazard: Hazard | None, positions: Int32s) -> None:
        """A use of these positions is over."""
        assert self._counts is not None, "only what was added is removed"
        row = HELD if hazard is None else ROWS[hazard]
        self._counts[row, positions] -= 1
        assert (self._counts[row, positions] >= 0).all(), "a use ends once"
        self.uses -= 1
        if hazard is None:
            self.held -= positions.size

    def touched(self, positions: Int32s) -> NDArray[np.bool_] | None:
        """For each position, whether a host copy or transfer may touch it; None: none does anywhere."""
        if self._counts is None or not self.uses:
            return None
        rows: NDArray[np.bool_] = self._counts[:HELD, positions] > 0
        out: NDArray[np.bool_] = rows[0] | rows[1] | rows[2] | rows[3]
        return out

    def on_transfer(self, positions: Int32s) -> NDArray[np.bool_] | None:
        """For each position, whether our engine reads it or a peer knows its address; None: none anywhere."""
        if self._counts is None or not self.uses:
            return None
        network, fixed = self._counts[ROWS[Hazard.NETWORK], positions], self._counts[ROWS[Hazard.FIXED], positions]
        out: NDArray[np.bool_] = (network > 0) | (fixed > 0)
        return out

    def may_move_unwaited(self, positions: Int32s) -> NDArray[np.bool_]:
        """For each source, whether a move needs no wait: what an opportunistic flush may touch."""
        movable = ~self.written(positions)
        if self._counts is not None and self.uses:
            for hazard in to_move_from():
                movable &= self._counts[ROWS[hazard], positions] == 0
        return movable

    def is_clear(self) -> bool:
        """Whether no use of any unit is on record."""
        return self.uses == 0


class StageLedger:
    """Open uses of one stage in the order in which they began, and the bytes they touch outside every span."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._open: dict[int, Use] = {}
        self._waited: set[int] = set()  # open for the daemon, over for this rank
        self.strays: list[tuple[int, int, int]] = []  # first byte, end byte, use

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Use]:
        return iter(self._open.values())

    @property
    def unreleased(self) -> int:
        """Uses that the daemon counts as open, whether or not this rank has waited for them."""
        return len(self._open) + len(self._waited)

    def begin(self, use: Use) -> None:
        """A use begins, or a hold was published; records keep the order of these ops."""
        if use.number in self._open or use.number in self._waited:
            self._checks.broken("use.once", f"use {use.number} is on record already")
        self._open[use.number] = use

    def end(self, number: int) -> Use | None:
        """A use is over by release; None where a wait has ended its record before."""
        if number in self._waited:
            self._waited.remove(number)
            return None
        if number not in self._open:
            self._checks.broken("use.once", f"use {number} is released, but not on record")
        return self._forget(number)

    def wait(self, number: int) -> Use:
        """The schedule stream, or the host, waits for a use: for this rank it is over."""
        self._waited.add(number)
        return self._forget(number)

    def fix(self, number: int) -> Use | None:
        """An open send counts as published from now on: the use before; None where nothing of it is on record here."""
        if number in self._waited:
            return None
        use = self._open.get(number)
        if use is None or use.hazard is not Hazard.NETWORK:
            self._checks.broken("use.once", f"use {number} is fixed, but is no open send")
        assert use is not None
        self._open[number] = Use(number, Hazard.FIXED, use.parts)
        return use

    def hazard(self, number: int) -> Hazard:
        """What an open use that is no hold is to the next consumer."""
        hazard = self._open[number].hazard
        assert hazard is not None, "nobody waits for a hold"
        return hazard

    def holds(self, number: int) -> bool:
        """Whether `number` is a hold that has not been published."""
        use = self._open.get(number)
        return use is not None and use.hazard is None

    def fence(self, first_byte: int, end_byte: int, number: int) -> None:
        """These bytes leave their band's span while use `number` may still touch them."""
        assert first_byte < end_byte
        self.strays.append((first_byte, end_byte, number))

    def uses_of_bytes(self, first_byte: int, end_byte: int) -> list[int]:
        """Uses that may still touch bytes outside every span, in [first_byte, end_byte); ascending."""
        found = {number for first, end, number in self.strays if first < end_byte and first_byte < end}
        return sorted(found)

    def uses_of(self, band: int, positions: Int32s, hazards: tuple[Hazard, ...]) -> list[int]:
        """Uses of these hazards that touch any of these positions; ascending."""
        found: list[int] = []
        for use in self._open.values():
            column = use.column(band) if use.hazard in hazards else None
            if column is not None and np.isin(positions, column).any():
                found.append(use.number)
        return sorted(found)

    def is_clear(self) -> bool:
        """Whether nothing is on record: for idle checks."""
        return not (self._open or self._waited or self.strays)

    def _forget(self, number: int) -> Use:
        self.strays = [stray for stray in self.strays if stray[2] != number]
        return self._open.pop(number)
