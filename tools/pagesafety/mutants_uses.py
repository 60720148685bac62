"""Deliberate faults of uses, capacity and what ranks agree on; `mutants` lists them with the others.

Owns `Patch` and these faults. Must never leave a patch behind: `mutants.applied` undoes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from allocator.capacity import StageWalk
from allocator.columns import Int32s, pack_i32
from allocator.effects import HostWrite, PublishUnits, SendUnits
from allocator.free_set import FreeSet
from allocator.logical.bands import LogicalBands
from allocator.logical.chain import LogicalChain
from allocator.logical.freeze import Freeze
from allocator.logical.quarantine import Quarantine
from allocator.logical.uses import Uses
from allocator.physical import chain as chain_module
from allocator.physical import uses as uses_module
from allocator.physical.band import Band
from allocator.physical.chain import PhysicalChain
from allocator.physical.clearance import Consumer, Hazard
from allocator.physical.forward_steps import ForwardSteps
from allocator.physical.ledger import ROWS, BandLedger, StageLedger
from allocator.physical.relief import Relief
from daemon.rank.modeled_device import ModeledDevice
from tools.pagesafety.fleet import Rank


class Patch:
    """Replaces attributes, and puts them back."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """`owner.name` is `value` from now on; returns what it was."""
        old = owner.__dict__[name]
        self._undo.append((owner, name, old))
        setattr(owner, name, value)
        return old

    def undo(self) -> None:
        """Everything as it was, last change first."""
        for owner, name, old in reversed(self._undo):
            setattr(owner, name, old)
        self._undo.clear()


def forget_quarantine(patch: Patch) -> None:
    """Units that a peer may still touch are freed and handed out."""
    patch.set(Quarantine, "hold_back", lambda self, columns: columns)
    patch.set(LogicalBands, "_check_unkept", lambda self, columns: None)
    patch.set(BandLedger, "on_transfer", lambda self, positions: None)


def read_received_units(patch: Patch) -> None:
    """Rows that a peer may still be writing are sent, published or copied."""
    patch.set(Uses, "check_readable", lambda self, columns, what: None)


def free_held_units(patch: Patch) -> None:
    """Rows that are held for a peer are freed like any other."""
    patch.set(Uses, "check_unheld", lambda self, columns, what, name: None)


def thaw_when_a_publication_ends(patch: Patch) -> None:
    """A publication that is over is forgotten: a report that covers it is not known to cover those before it."""
    refit = patch.set(Freeze, "refit", None)

    def thaw(self: Freeze) -> None:
        self._unreported = [use for use in self._unreported if use in self._uses.open]
        refit(self)

    patch.set(Freeze, "refit", thaw)


def choose_by_rank(patch: Patch) -> None:
    """The second rank takes the highest holes."""
    odd: list[FreeSet] = []
    init = patch.set(Rank, "__init__", None)
    lowest = patch.set(FreeSet, "take_lowest", None)
    made = [0]

    def build(self: Rank, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        made[0] += 1
        if made[0] % 2 == 0:
            odd.extend(band.units.holes for band in self.chain._stored)

    def take(self: FreeSet, k: int) -> Int32s:
        if any(one is self for one in odd):
            chosen = self.members()[-k:].astype(np.int32)
            self.remove(chosen)
            return chosen
        return lowest(self, k)

    patch.set(Rank, "__init__", build)
    patch.set(FreeSet, "take_lowest", take)


def ask_the_event(patch: Patch) -> None:
    """A chain asks its own device which forwards have ended (the harness's rank lends it), not what was processed."""
    begin = patch.set(PhysicalChain, "begin_step", None)
    build = patch.set(Rank, "__init__", None)
    devices: dict[int, ModeledDevice] = {}

    def lend(self: Rank, *args: object, **kwargs: object) -> None:
        build(self, *args, **kwargs)
        devices[id(self.chain)] = self.device

    def eager(self: PhysicalChain, seq: int, processed_through: int, released: Sequence[int] = ()) -> None:
        device = devices[id(self)]
        ran = [forward for forward, count in device._forward_at.items() if count <= device._forward.done]
        begin(self, seq, processed_through, released)
        for band in self._stored:
            band.progress(max(ran, default=0))

    patch.set(Rank, "__init__", lend)
    patch.set(PhysicalChain, "begin_step", eager)


def capacity_one_unit_too_many(patch: Patch) -> None:
    """The closed form finds room for one more unit of the last band than there is."""
    overlap = patch.set(StageWalk, "overlap_bytes", None)
    patch.set(StageWalk, "overlap_bytes", lambda self, counts: overlap(self, counts) - self.last_unit_bytes)


def capacity_without_alignment(patch: Patch) -> None:
    """The closed form adds bytes and forgets that spans start at multiples of their unit."""

    def sum_of_bytes(self: StageWalk, counts: Sequence[int]) -> int:
        rising = sum(counts[band] * unit for band, unit, _, _ in self.rising)
        return self.start_bytes + rising + counts[self.last] * self.last_unit_bytes - self.arena_bytes

    patch.set(StageWalk, "overlap_bytes", sum_of_bytes)


def capacity_ignores_fixed_units(patch: Patch) -> None:
    """Capacity is asked as if published units could move."""
    patch.set(Freeze, "_masked", lambda self, extents, unreported: None)


def ignore_the_freeze(patch: Patch) -> None:
    """Bands grow while nobody knows yet where the published units lie."""
    begin = patch.set(Freeze, "begin", None)
    patch.set(Freeze, "begin", lambda self, use, counts: begin(self, use, (2**30,) * len(counts)))


def extents_one_unit_short(patch: Patch) -> None:
    """Ranks report fixed extents without their highest unit."""
    extents = patch.set(PhysicalChain, "fixed_extents", None)

    def short(self: PhysicalChain) -> list[tuple[int, int] | None]:
        sizes = [info.unit_bytes for info in self.stage.bands]
        return [
            pair if pair is None or pair[1] - pair[0] == size else (pair[0], pair[1] - size)
            for pair, size in zip(extents(self), sizes, strict=True)
        ]

    patch.set(PhysicalChain, "fixed_extents", short)


def extents_swapped(patch: Patch) -> None:
    """Ranks report the fixed extents of two bands with equal units the wrong way round."""
    extents = patch.set(PhysicalChain, "fixed_extents", None)

    def swap(self: PhysicalChain) -> list[tuple[int, int] | None]:
        out = list(extents(self))
        sizes = [info.unit_bytes for info in self.stage.bands]
        pairs = [(i, j) for i in range(len(out)) for j in range(i) if sizes[i] == sizes[j] and out[i] and out[j]]
        for i, j in pairs[:1]:
            out[i], out[j] = out[j], out[i]
        return out

    patch.set(PhysicalChain, "fixed_extents", swap)


def waited_use_is_forgotten(patch: Patch) -> None:
    """A use that a wait ended is not remembered until its release."""
    patch.set(StageLedger, "wait", lambda self, number: self._forget(number))


def padding_rows_in_the_sink(patch: Patch) -> None:
    """Padding rows write their state into the sink."""
    resting = patch.set(chain_module, "resting_unit", None)
    patch.set(chain_module, "resting_unit", lambda stage, band: 0 * resting(stage, band))


def refusal_mints(patch: Patch) -> None:
    """A question that is answered with a refusal counts an id as minted."""
    refusal = patch.set(LogicalChain, "refusal", None)

    def leaky(self: LogicalChain, demand: tuple[int, ...]) -> object:
        answer = refusal(self, demand)
        if answer is not None:
            self._state.pages.minted += 1
        return answer

    patch.set(LogicalChain, "refusal", leaky)


def forget_sent_units(patch: Patch) -> None:
    """Freed units that our engine still reads are handed out."""
    patch.set(Uses, "kept", lambda self, band, ids: self._marked["fixed"].mask(band, ids))
    patch.set(BandLedger, "on_transfer", lambda self, positions: None)
    patch.set(BandLedger, "touched", lambda self, positions: None)


def forget_fixed_sends(patch: Patch) -> None:
    """A rank goes on waiting for a send that may never end."""
    patch.set(StageLedger, "fix", lambda self, number: None)


def wait_for_sends_elsewhere(patch: Patch) -> None:
    """Relief waits for sends that this stage stores nothing of."""
    make_room = patch.set(Relief, "make_room", None)

    def wait_for_all(self: Relief, wanted: Sequence[int]) -> list[object]:
        empty = [use.number for use in self._ledger if use.hazard is Hazard.NETWORK and not use.parts]
        return list(self._bands[0]._stage_wait(empty, Consumer.SCHEDULE_COPY)) + list(make_room(self, wanted))

    patch.set(Relief, "make_room", wait_for_all)


def publish_before_forward_ends(patch: Patch) -> None:
    """A send starts, or a peer is told, while a forward may still touch the units."""
    submit = patch.set(uses_module, "_submit", None)

    def early(op: object, columns: object, steps: ForwardSteps) -> list[object]:
        effects = submit(op, columns, steps)
        for at, e in enumerate(effects):
            if isinstance(e, SendUnits):
                effects[at] = SendUnits(e.use, e.band, e.units, 0)
            elif isinstance(e, PublishUnits):
                effects[at] = PublishUnits(e.use, e.band, e.virtual, e.units, 0)
        return list(effects)

    patch.set(uses_module, "_submit", early)


def resolve_load_at_take(patch: Patch) -> None:
    """A load writes where its units were when they were taken, not where they are when it is submitted."""
    take = patch.set(Band, "take", None)
    submit = patch.set(uses_module, "_submit", None)
    first: dict[int, dict[int, int]] = {}

    def remember(self: Band, ids: Int32s, growth: object) -> list[object]:
        effects = take(self, ids, growth)
        first.setdefault(id(self), {}).update(zip(ids.tolist(), self.units.unit_of[ids].tolist(), strict=True))
        return list(effects)

    def stale(op: object, columns: Sequence[tuple[Band, Int32s]], steps: ForwardSteps) -> list[object]:
        effects = submit(op, columns, steps)
        for at, (e, (band, ids)) in enumerate(zip(effects, columns, strict=bool(effects))):
            if isinstance(e, HostWrite):
                units = [first[id(band)][page] for page in ids.tolist()]
                effects[at] = HostWrite(e.use, e.band, pack_i32(units), e.slots)
        return list(effects)

    patch.set(Band, "take", remember)
    patch.set(uses_module, "_submit", stale)


def release_ends_other_uses(patch: Patch) -> None:
    """The end of one use of a unit drops the records of all of its kind."""

    def remove(self: BandLedger, hazard: object, positions: Int32s) -> None:
        row = 4 if hazard is None else ROWS[hazard]  # type: ignore[index]
        assert self._counts is not None
        self._counts[row, positions] = 0
        self.uses -= 1
        if hazard is None:
            self.held -= positions.size

    patch.set(BandLedger, "remove", remove)


def release_keeps_a_record(patch: Patch) -> None:
    """The end of a use leaves its count behind."""
    remove = patch.set(BandLedger, "remove", None)

    def keep(self: BandLedger, hazard: object, positions: Int32s) -> None:
        remove(self, hazard, positions)
        self.uses += 1

    patch.set(BandLedger, "remove", keep)
