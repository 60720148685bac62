"""Uses: what begins when a host copy or a network transfer is submitted.

Owns the translation of a use's virtual ids into units, once, when its op is applied, and the waits that come before it.
Must never remember an address from before: until submission, the units of a load may have moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from allocator.columns import Int32s, pack_i32
from allocator.effects import Effect, HostRead, HostWrite, PublishUnits, SendUnits
from allocator.ops import Backup, Fix, Hold, Load, Part, Publish, Send, UseOp
from allocator.physical.band import Band, WaitForUses
from allocator.physical.clearance import CLEARANCE, TO_READ, Clear, Consumer, Hazard, to_write
from allocator.physical.forward_steps import ForwardSteps
from allocator.physical.ledger import StageLedger, Use

HAZARDS: dict[type[UseOp], Hazard | None] = {
    Backup: Hazard.COPY_READ,
    Load: Hazard.COPY_WRITE,
    Hold: None,
    Send: Hazard.NETWORK,
    Publish: Hazard.FIXED,
}
"""What each kind of use is to the next consumer of its units."""


class HasParts(Protocol):
    """An op that names units by parts."""

    @property
    def parts(self) -> list[Part]:
        """One per band, ascending."""


def begin_use(
    op: UseOp,
    columns: Sequence[tuple[Band, Int32s]],
    ledger: StageLedger,
    steps: ForwardSteps,
    wait: WaitForUses,
) -> list[Effect]:
    """Puts a use on record with the units of its parts that this stage stores; effects to submit it."""
    for band, ids in columns:
        band.check_bound(ids, f"use {op.use} names")
    effects: list[Effect] = []
    receives = isinstance(op, Publish) and ledger.holds(op.use)
    if receives:
        held = ledger.end(op.use)
        assert held is not None
        for band, _ in columns:
            band.use_over(held)
    for band, ids in columns:
        positions = band.units.positions(ids)
        if isinstance(op, Load) or receives:
            writer = Consumer.NETWORK_RECEIVE if receives else Consumer.HOST_LOAD
            effects += clear(band, positions, to_write(writer), writer, ledger, wait)
        elif not isinstance(op, Hold):
            effects += clear(band, positions, TO_READ, Consumer.SCHEDULE_COPY, ledger, wait)
    effects += _submit(op, columns, steps)
    hazard = HAZARDS[type(op)]
    parts: list[tuple[int, Int32s]] = []
    for band, ids in columns:
        positions = np.sort(band.units.positions(ids))
        band.ledger.add(hazard, positions)
        parts.append((band.index, ids if hazard is None else positions))
    ledger.begin(Use(op.use, hazard, tuple(parts)))
    return effects


def _submit(op: UseOp, columns: Sequence[tuple[Band, Int32s]], steps: ForwardSteps) -> list[Effect]:
    """What hands the use's addresses to whoever acts on them."""
    out: list[Effect] = []
    # CLEARANCE row NETWORK_RECEIVE: an address leaves the host only after the forwards that may touch the unit.
    late = CLEARANCE[Consumer.NETWORK_RECEIVE][Hazard.FORWARD] is Clear.AFTER_RETIRE
    after = steps.newest_in_flight if late else 0
    slots: dict[int, bytes] = {}
    if isinstance(op, Backup | Load):
        slots = {part.band: column for part, column in zip(op.parts, op.slots, strict=True)}
    for band, ids in columns:
        units = pack_i32(band.units.unit_of[ids])
        if isinstance(op, Backup):
            out.append(HostRead(op.use, band.index, units, slots[band.index]))
        elif isinstance(op, Load):
            out.append(HostWrite(op.use, band.index, units, slots[band.index]))
        elif isinstance(op, Send):
            out.append(SendUnits(op.use, band.index, units, after))
        elif isinstance(op, Publish):
            out.append(PublishUnits(op.use, band.index, ids.tobytes(), units, after))
    return out


def clear(
    band: Band,
    positions: Int32s,
    hazards: tuple[Hazard, ...],
    consumer: Consumer,
    ledger: StageLedger,
    wait: WaitForUses,
) -> list[Effect]:
    """Waits for the uses of these hazards on units that a consumer is about to touch (`TO_READ`, `to_write`)."""
    if band.ledger.touched(positions) is None:
        return []
    return wait(ledger.uses_of(band.index, positions, hazards), consumer)


def fix(op: Fix, bands: Sequence[Band], ledger: StageLedger) -> None:
    """An open send's units are fixed where they are; nothing where this rank has waited for the send."""
    before = ledger.fix(op.use)
    if before is None:
        return
    for band in bands:
        column = before.column(band.index)
        if column is not None:
            band.ledger.remove(before.hazard, column)
            band.ledger.add(Hazard.FIXED, column)
