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

from allocator.columns import Int32s, pack_i32
from allocator.effects import Bind, HostWait, WaitCopy, WaitForward, Zero
from allocator.physical import band as band_module
from allocator.physical import relief as relief_module
from allocator.physical import uses as uses_module
from allocator.physical.band import Band, Room
from allocator.physical.chain import PhysicalChain
from allocator.physical.clearance import TO_READ, Hazard
from allocator.physical.forward_steps import PendingBatches
from allocator.physical.ledger import BandLedger, StageLedger
from allocator.physical.relief import Relief
from allocator.physical.units import HOLE, LIVE
from tools.pagesafety.mutants_uses import (
    Patch,
    ask_the_event,
    capacity_ignores_fixed_units,
    capacity_one_unit_too_many,
    capacity_without_alignment,
    choose_by_rank,
    extents_one_unit_short,
    extents_swapped,
    forget_fixed_sends,
    forget_quarantine,
    forget_sent_units,
    free_held_units,
    ignore_the_freeze,
    padding_rows_in_the_sink,
    publish_before_forward_ends,
    read_received_units,
    refusal_mints,
    release_ends_other_uses,
    release_keeps_a_record,
    resolve_load_at_take,
    thaw_when_a_publication_ends,
    wait_for_sends_elsewhere,
    waited_use_is_forgotten,
)
from tools.pagesafety.shapes import FIVE


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
    clear = patch.set(uses_module, "clear", None)

    def of_writers(band: Any, at: Any, hazards: Any, *more: Any) -> Any:
        return [] if hazards == TO_READ else clear(band, at, hazards, *more)

    patch.set(uses_module, "clear", of_writers)


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


def copy_state_without_wait(patch: Patch) -> None:
    """A state copy starts while the forward before it may still write its source."""
    copy = patch.set(PhysicalChain, "_copy_state", None)

    def hasty(self: PhysicalChain, op: object) -> list[object]:
        waited = self._steps.waited_through
        effects = [effect for effect in copy(self, op) if not isinstance(effect, WaitForward)]
        self._steps.waited_through = waited
        return effects

    patch.set(PhysicalChain, "_copy_state", hasty)


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


def free_keeps_the_table(patch: Patch) -> None:
    """A freed page still reads as its old unit."""
    free = patch.set(Band, "free", None)
    patch.set(Band, "free", lambda self, ids: free(self, ids)[:0])


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
