"""Deliberate faults of the allocator, each of which the harness must catch: what shows that the harness can fail.

Owns the table `MUTANTS`: what each breaks, the checks that may see it, and how it is applied. Must never leave a patch
behind: `applied` undoes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.capacity import StageWalk
from allocator.columns import Int32s, pack_i32
from allocator.effects import Bind, HostWait, HostWrite, PublishUnits, SendUnits, WaitCopy, WaitForward, Zero
from allocator.free_set import FreeSet
from allocator.logical.bands import LogicalBands
from allocator.logical.chain import LogicalChain
from allocator.logical.freeze import Freeze
from allocator.logical.quarantine import Quarantine
from allocator.logical.uses import Uses
from allocator.physical import band as band_module
from allocator.physical import chain as chain_module
from allocator.physical import relief as relief_module
from allocator.physical import uses as uses_module
from allocator.physical.band import Band, Room
from allocator.physical.chain import PhysicalChain
from allocator.physical.clearance import Consumer, Hazard
from allocator.physical.forward_steps import ForwardSteps, PendingBatches
from allocator.physical.ledger import ROWS, BandLedger, StageLedger
from allocator.physical.relief import Relief
from allocator.physical.units import HOLE, LIVE
from daemon.rank.modeled_device import ModeledDevice
from tools.pagesafety.fleet import Rank
from tools.pagesafety.shapes import FIVE


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


def skip_forward_wait(patch: Patch) -> None:
    """No schedule work ever waits for a forward."""
    patch.set(BandLedger, "stream_wait", lambda self, consumer, seq: False)


def settle_waits_one_short(patch: Patch) -> None:
    """Settling pending units waits for the forward before the one they pend behind."""
    settle = patch.set(PendingBatches, "settle", None)

    def early(self: PendingBatches, units: int) -> tuple[int, Int32s]:
        seq, positions = settle(self, units)
        return seq - 1, positions

    patch.set(PendingBatches, "settle", early)


def settle_all_without_wait(patch: Patch) -> None:
    """Relief settles everything and waits for nobody."""
    settle_all = patch.set(Band, "settle_all", None)
    patch.set(Band, "settle_all", lambda self: 0 * settle_all(self))


def free_at_launch(patch: Patch) -> None:
    """A freed unit is a hole at once though a forward in flight may touch it."""

    def free(self: Band, ids: Int32s) -> list[object]:
        self.become_free(self.units.unbind(ids))
        return [Bind(self.index, ids.tobytes(), pack_i32(np.full(ids.size, self.units.resting)))]

    patch.set(Band, "free", free)


def return_pending_early(patch: Patch) -> None:
    """Processing a forward also returns what pends behind the next one."""
    progress = patch.set(Band, "progress", None)
    patch.set(Band, "progress", lambda self, through: progress(self, through + 1))


def count_pending_twice(patch: Patch) -> None:
    """The plan in place counts every pending unit twice."""
    room = patch.set(Band, "room", None)

    def twice(self: Band) -> Room:
        holes, pending, late = room(self)
        return Room(holes, 2 * pending, late)

    patch.set(Band, "room", twice)


def skip_zeroing(patch: Patch) -> None:
    """Units are handed out with the bytes of their last user."""
    take = patch.set(Band, "take", None)
    patch.set(Band, "take", lambda self, ids, growth: [e for e in take(self, ids, growth) if not isinstance(e, Zero)])


def move_written_units(patch: Patch) -> None:
    """A flush moves a unit that an unfinished forward writes."""
    patch.set(BandLedger, "written", lambda self, positions: np.zeros(positions.size, dtype=np.bool_))


def ignore_unknown_writes(patch: Patch) -> None:
    """A speculative forward's band is compacted under it."""
    patch.set(BandLedger, "record_unknown", lambda self, seq: None)


def reuse_vacated_at_once(patch: Patch) -> None:
    """A moved-from unit is a hole at once though a forward may still read it."""
    move = patch.set(Band, "_move_behind", None)

    def forgetful(self: Band, sources: Int32s, targets: Int32s) -> list[object]:
        effects = move(self, sources, targets)
        positions = self.ledger.vacated.release_through(2**60)
        if positions is not None:
            self.become_free(positions)
        return list(effects)

    patch.set(Band, "_move_behind", forgetful)


def forget_copy_fence(patch: Patch) -> None:
    """A free unit that a host copy still reads is an ordinary hole."""

    def become_free(self: Band, positions: Int32s) -> None:
        if positions.size:
            self.units.become(HOLE, positions)

    patch.set(Band, "become_free", become_free)


def forget_fenced_bytes(patch: Patch) -> None:
    """Bytes that leave a band while a host copy reads them are anybody's."""
    patch.set(StageLedger, "fence", lambda self, first_byte, end_byte, number: None)


def skip_copy_waits(patch: Patch) -> None:
    """Nobody waits for a host copy."""
    wait = patch.set(PhysicalChain, "_wait_for_uses", None)
    patch.set(
        PhysicalChain,
        "_wait_for_uses",
        lambda self, numbers, consumer: [e for e in wait(self, numbers, consumer) if not isinstance(e, WaitCopy)],
    )


def skip_host_waits(patch: Patch) -> None:
    """Nobody waits for the transfer engine."""
    wait = patch.set(PhysicalChain, "_wait_for_uses", None)
    patch.set(
        PhysicalChain,
        "_wait_for_uses",
        lambda self, numbers, consumer: [e for e in wait(self, numbers, consumer) if not isinstance(e, HostWait)],
    )


def launch_without_waits(patch: Patch) -> None:
    """A forward writes a page that a host copy or our engine still reads."""
    launched = patch.set(PhysicalChain, "launched", None)
    patch.set(PhysicalChain, "launched", lambda self, seq, writes: launched(self, seq, writes)[:0])


def read_while_loading(patch: Patch) -> None:
    """A copy or send reads units that a load still writes."""
    patch.set(uses_module, "clear_reads", lambda band, positions, consumer, ledger, wait: [])


def flush_moves_loading_units(patch: Patch) -> None:
    """A flush moves units that a load still writes, or a peer knows, or our engine reads."""
    patch.set(BandLedger, "may_move_unwaited", lambda self, positions: ~self.written(positions))


def relief_moves_fixed_units(patch: Patch) -> None:
    """Relief moves units whose addresses a peer knows."""
    search = patch.set(Relief, "_search", None)
    pinned = Relief.pinned

    def loose(self: Relief, wanted: Sequence[int], keep_transfers: bool) -> object:
        inner = Patch()
        inner.set(Relief, "pinned", lambda self, band, keep_transfers: None)
        try:
            return search(self, wanted, keep_transfers)
        finally:
            inner.undo()
            assert Relief.pinned is pinned

    patch.set(Relief, "_search", loose)
    patch.set(band_module, "to_move_from", lambda: (Hazard.COPY_WRITE, Hazard.NETWORK))


def relief_moves_without_wait(patch: Patch) -> None:
    """Relief copies units while forwards may still write them."""
    patch.set(Relief, "_wait_forward", lambda self, seq, effects: None)


def relocate_in_wrong_order(patch: Patch) -> None:
    """Relief brings a band into bytes that another one still holds."""
    patch.set(Relief, "_is_open", lambda self, number, target, left: True)


def move_while_loading(patch: Patch) -> None:
    """A move reads units that a load still writes, or takes them away from our engine."""
    patch.set(band_module, "to_move_from", lambda: ())


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


def copy_state_without_wait(patch: Patch) -> None:
    """A state copy starts while the forward before it may still write its source."""
    copy = patch.set(PhysicalChain, "_copy_state", None)

    def hasty(self: PhysicalChain, op: object) -> list[object]:
        waited = self._steps.waited_through
        effects = [effect for effect in copy(self, op) if not isinstance(effect, WaitForward)]
        self._steps.waited_through = waited
        return effects

    patch.set(PhysicalChain, "_copy_state", hasty)


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


def forget_quarantine(patch: Patch) -> None:
    """Units that a peer may still touch are freed and handed out."""
    patch.set(Quarantine, "hold_back", lambda self, columns: columns)
    patch.set(LogicalBands, "_check_unkept", lambda self, columns: None)
    patch.set(BandLedger, "on_transfer", lambda self, positions: None)


def retreat_over_live_units(patch: Patch) -> None:
    """The frontier of a flush retreats past a live unit."""
    plan = patch.set(band_module, "plan_retreat", None)

    def too_far(state: NDArray[np.uint8], frontier: int, begin: int = 0) -> int:
        top = plan(state, frontier, begin)
        return top - 1 if top > begin + 1 and state[top - 1] == LIVE else top

    patch.set(band_module, "plan_retreat", too_far)


def grow_over_the_neighbour(patch: Patch) -> None:
    """The plan in place lets a band grow one unit into its neighbour's bytes."""
    grow = patch.set(relief_module, "_grow", None)
    patch.set(relief_module, "_grow", lambda band, short, edge, after: grow(band, short, edge, after + band.unit_bytes))


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


def rebind_forgets_the_table(patch: Patch) -> None:
    """A rebind tells the tables only about the pages that lose their units."""
    rebind = patch.set(Band, "rebind", None)

    def half(self: Band, sources: Int32s, targets: Int32s) -> list[Bind]:
        (bind,) = rebind(self, sources, targets)
        return [Bind(bind.band, bind.virtual[: sources.nbytes], bind.physical[: sources.nbytes])]

    patch.set(Band, "rebind", half)


def rebind_keeps_the_holder(patch: Patch) -> None:
    """After a rebind the unit still names its old page: the next move binds the wrong one."""
    rebind = patch.set(Band, "rebind", None)

    def keep(self: Band, sources: Int32s, targets: Int32s) -> list[object]:
        positions = self.units.positions(sources)
        effects = rebind(self, sources, targets)
        self.units.holder[positions] = sources
        return list(effects)

    patch.set(Band, "rebind", keep)


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


def waited_use_is_forgotten(patch: Patch) -> None:
    """A use that a wait ended is not remembered until its release."""
    patch.set(StageLedger, "wait", lambda self, number: self._forget(number))


def free_keeps_the_table(patch: Patch) -> None:
    """A freed page still reads as its old unit."""
    free = patch.set(Band, "free", None)
    patch.set(Band, "free", lambda self, ids: free(self, ids)[:0])


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


class Mutant(NamedTuple):
    """A deliberate fault: how it is applied, the checks that may see it, and within how many seeds of which shapes."""

    apply: Callable[[Patch], None]
    checks: tuple[str, ...]
    seeds: int
    shapes: tuple[str, ...] = FIVE

    @property
    def breaks(self) -> str:
        """What it breaks, in a sentence."""
        return (self.apply.__doc__ or "").strip()


_RACE = ("unordered_overlap",)
_ROWS = (
    Mutant(skip_forward_wait, _RACE, 4),
    Mutant(settle_waits_one_short, _RACE, 20),
    Mutant(settle_all_without_wait, _RACE, 20),
    Mutant(free_at_launch, _RACE, 4),
    Mutant(return_pending_early, _RACE, 20),
    Mutant(count_pending_twice, ("unrealizable", "error"), 20),
    Mutant(skip_zeroing, ("lost_write", "cross_dtype_bytes"), 4),
    Mutant(move_written_units, _RACE, 20),
    Mutant(ignore_unknown_writes, _RACE, 20),
    Mutant(reuse_vacated_at_once, _RACE, 40),
    Mutant(forget_copy_fence, _RACE, 20),
    Mutant(forget_fenced_bytes, _RACE, 40),
    Mutant(skip_copy_waits, _RACE, 4),
    Mutant(skip_host_waits, _RACE, 20),
    Mutant(launch_without_waits, _RACE, 4),
    Mutant(read_while_loading, _RACE, 20),
    Mutant(flush_moves_loading_units, (*_RACE, "table"), 20),
    Mutant(relief_moves_fixed_units, _RACE, 40),
    Mutant(relief_moves_without_wait, _RACE, 20),
    Mutant(relocate_in_wrong_order, ("lost_write", "cross_dtype_bytes"), 20),
    Mutant(move_while_loading, _RACE, 20),
    Mutant(forget_sent_units, _RACE, 20),
    Mutant(forget_fixed_sends, ("stuck_wait", *_RACE), 20),
    Mutant(wait_for_sends_elsewhere, ("stuck_wait",), 20, ("no-owner", "gaps", "stages")),
    Mutant(read_received_units, ("trespass", *_RACE), 4),
    Mutant(free_held_units, ("trespass",), 20),
    Mutant(thaw_when_a_publication_ends, ("ledger_leak",), 40),
    Mutant(copy_state_without_wait, _RACE, 20),
    Mutant(publish_before_forward_ends, _RACE, 4),
    Mutant(resolve_load_at_take, (*_RACE, "lost_write"), 40),
    Mutant(forget_quarantine, (*_RACE, "invariant"), 20),
    Mutant(retreat_over_live_units, ("lost_write", "cross_dtype_bytes"), 20),
    Mutant(grow_over_the_neighbour, ("lost_write", "cross_dtype_bytes", "invariant"), 20),
    Mutant(choose_by_rank, ("rank_divergence",), 4),
    Mutant(ask_the_event, ("rank_divergence",), 20),
    Mutant(capacity_one_unit_too_many, ("unrealizable",), 4),
    Mutant(capacity_without_alignment, ("unrealizable",), 20),
    Mutant(capacity_ignores_fixed_units, ("unrealizable",), 20),
    Mutant(ignore_the_freeze, ("unrealizable", "invariant"), 20),
    Mutant(extents_one_unit_short, ("unrealizable",), 40),
    Mutant(extents_swapped, ("invariant", "unrealizable"), 40),
    Mutant(rebind_forgets_the_table, ("table",), 20),
    Mutant(rebind_keeps_the_holder, ("table", "lost_write", "invariant"), 40),
    Mutant(release_ends_other_uses, _RACE, 20),
    Mutant(release_keeps_a_record, ("ledger_leak",), 4),
    Mutant(waited_use_is_forgotten, ("invariant",), 20),
    Mutant(free_keeps_the_table, ("table",), 4),
    Mutant(padding_rows_in_the_sink, ("cross_dtype_bytes",), 4),
    Mutant(refusal_mints, ("refusal_changed",), 4),
)
MUTANTS: dict[str, Mutant] = {row.apply.__name__: row for row in _ROWS}


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """The allocator with this fault (None: as it is)."""
    patch = Patch()
    try:
        if name is not None:
            MUTANTS[name].apply(patch)
        yield
    finally:
        patch.undo()
