"""The logical chain: decides from counts whether a demand fits, which virtual ids it gets, and what is freed.

Owns the decision side of the allocator; there is one, in the daemon. Must never know a position in an arena (beyond the
fixed extents that ranks report), an event or a forward: units pending behind a forward in flight count as free here,
because every physical chain can have them by waiting. Every public change is all or nothing.

Invariants: `refusal(d) is None` exactly when `take(d)` succeeds, on every stage and in both id spaces; what it accepts
each physical chain can realize (`chain.realizable`); a freed unit is visible to the very next question, unless a
transfer may still touch it: then it waits in quarantine, live and counted, until the step that lists its use as
released.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from allocator.capacity import CapacityForm, CapacityRefusal, Demand, Extents
from allocator.checks import STRICT, Checks, some
from allocator.columns import Int32s, Int64s, pack_i64
from allocator.digest import advance
from allocator.errors import CapacityRefused
from allocator.geometry import Geometry
from allocator.logical.bands import LogicalBands, OptionalIds
from allocator.logical.freeze import Freeze
from allocator.logical.quarantine import Quarantine
from allocator.logical.uses import Columns
from allocator.ops import Backup, CopyState, Fix, Free, Hold, Load, Op, Part, Publish, Rebind, Send, Take
from allocator.parts import ascends, make_parts

ANSWERS_MAX = 1024  # remembered answers between two changes

OptionalSlots = Int64s | None
AnyUse = TypeVar("AnyUse", Backup, Hold, Load, Publish, Send)


class Taken(NamedTuple):
    """A take that happened: the op for the step, and the virtual ids per band (ascending int32, maybe empty)."""

    op: Take
    ids: tuple[Int32s, ...]


class LogicalChain:
    """Counts, ids, uses and capacity of one epoch.

    Ask `refusal` (or `max_extra`), then `take`; `free` when something ends; `end_uses` when transfers and host copies
    are proved to be over; `step_digest` once per step with the ops that the step carries, in the order in which they
    were made here, and the uses that it lists as released. `epoch` rises with every change of an answer.
    """

    def __init__(self, geometry: Geometry, checks: Checks | None = None) -> None:
        self.checks = checks or Checks()
        self.form = CapacityForm(geometry)
        self.bands = self.form.bands
        self.owner = self.form.owner
        self.epoch = 0
        self._state = LogicalBands(geometry, self.checks)
        self._quarantine = Quarantine(self._state, self.checks)
        self._freeze = Freeze(geometry, self._state.uses)
        self.counts = self._state.counts
        self._answers: dict[Demand, CapacityRefusal | None] = {}  # of the present epoch
        self._clips: dict[tuple[Demand | None, Demand], int] = {}
        self._begun: list[int] = []  # uses that this step begins or publishes
        self._ended: list[int] = []  # uses that this step must list as released
        self._deciding = 0
        self._zero: Demand = (0,) * len(self.bands)
        self._page: Demand = (*self._zero[:-1], 1)
        self._windows = tuple(self._state.windows)
        assert self.owner == len(self.bands) - 1, "the owner is the last band of the chain"

    # --- questions -----------------------------------------------------------------------------------------------

    def refusal(self, demand: Demand, given_back: Demand | None = None) -> CapacityRefusal | None:
        """None when the demand fits beside what is live, less `given_back`; otherwise why not. Reads only."""
        if given_back is not None:
            kept = [units - back for units, back in zip(self.counts, given_back, strict=True)]
            return self.form.refusal(kept, demand, self._quarantined())
        if demand in self._answers:
            return self._answers[demand]
        if len(self._answers) >= ANSWERS_MAX:
            self._answers.clear()
        answer = self._answers[demand] = self.form.refusal(self.counts, demand, self._quarantined())
        return answer

    def fits(self, demand: Demand, given_back: Demand | None = None) -> bool:
        """Whether the demand would fit if `given_back` units per band were free too. Reads only, and keeps nothing.

        What a reclaim asks per victim: as `refusal`, without looking for whom to blame.
        """
        back = given_back or self._zero
        return self.form.fits([c + d - b for c, d, b in zip(self.counts, demand, back, strict=True)])

    def never_fits(self, demand: Demand) -> CapacityRefusal | None:
        """None when an arena that holds only the quarantined units could hold the demand; otherwise why not.

        Reads only; where units are fixed and whether a freeze lasts, which all ends, does not count.
        """
        kept = self._quarantined()
        return self._freeze.bare.refusal(kept, demand, kept)

    def max_extra(self, base: Demand | None = None, per: Demand | None = None) -> int:
        """The largest n for which `base` + n times `per` (default: one owner page) still fits. Reads only.

        -1 when `base` alone does not fit. Used to clip a request's output to memory.
        """
        key = (base, per or self._page)
        if key not in self._clips:
            if len(self._clips) >= ANSWERS_MAX:
                self._clips.clear()
            held = self.counts if base is None else [c + b for c, b in zip(self.counts, base, strict=True)]
            self._clips[key] = self.form.most(held, key[1])
        return self._clips[key]

    def most_ever(self, per: Demand | None = None) -> int:
        """The largest n for which n times `per` (default: one owner page) fits beside what is quarantined."""
        return self._freeze.bare.most(self._quarantined(), per or self._page)

    def live_units(self) -> tuple[int, ...]:
        """Live units per band, in chain order, quarantined ones among them."""
        return tuple(self.counts)

    def quarantined(self) -> tuple[int, ...]:
        """Per band, the units that were freed and wait for the end of a transfer."""
        return tuple(self._quarantine.counts)

    def free_estimate(self) -> tuple[int, ...]:
        """Per band, the units it could still take if no other band took any. For metrics and text, never to decide."""
        if self._deciding:
            self.checks.broken("capacity.observe_only_read", "free_estimate was read while a decision was made")
        per_band = []
        for band in range(len(self.bands)):
            one = tuple(int(index == band) for index in range(len(self.bands)))
            per_band.append(self.form.most(self.counts, one))
        return tuple(per_band)

    @contextmanager
    def decision(self) -> Iterator[None]:
        """Marks a decision path: an estimate read inside breaks `capacity.observe_only_read`."""
        self._deciding += 1
        try:
            yield
        finally:
            self._deciding -= 1

    # --- takes and frees -----------------------------------------------------------------------------------------

    def take(
        self,
        demand: Demand,
        bound: Sequence[OptionalIds] | None = None,
        onto: Sequence[OptionalIds] | None = None,
    ) -> Taken:
        """Takes the demand jointly: the lowest free ids of each space; raises CapacityRefused when it does not fit.

        A window's units are bound to the pages taken with them, all of them or those at the indexes `bound[band]`
        (ascending), and to the live owner pages `onto[band]` (ascending) that hold none; its demand counts both.
        """
        if not any(demand):
            raise ValueError("a take must want at least one unit")
        refused = self.refusal(demand)
        if refused is not None:
            raise CapacityRefused(refused)
        for band in self._windows:
            self._check_bound(band, demand, bound, onto)
        ids = self._state.mint(demand, bound, onto)
        self._changed()
        parts = [Part(band, column.tobytes()) for band, column in enumerate(ids) if column.size]
        return Taken(Take(parts), ids)

    def free(self, parts: Sequence[OptionalIds]) -> Free:
        """Frees ids per band (int32 in any order, None or empty where a band has none).

        What a transfer may still touch stays in quarantine, and the op does not name it: it may have no parts. An id
        that is not live, is held, or is named twice raises InvariantBroken with nothing changed.
        """
        columns, _ = self._columns(parts, None, "band.free_of_bound_unit")
        quarantine = self._quarantine
        quarantine.check_owned(columns, "a free", "band.free_of_bound_unit")
        self._state.check_free(columns, quarantine.waiting)
        # Only what is published or sent can stay behind.
        if self._state.uses.any_kept:
            columns = quarantine.hold_back(columns)
        self._state.release(columns)
        self._changed()
        return Free(make_parts(columns))

    # --- uses ----------------------------------------------------------------------------------------------------

    def hold(self, use: int, parts: Sequence[OptionalIds]) -> Hold:
        """These live units are the rows of receive `use`: nobody writes or frees them until it ends."""
        columns, _ = self._columns(parts, None, "op.canonical")
        return self._begin(Hold(use, make_parts(columns)), columns)

    def publish(self, use: int, parts: Sequence[OptionalIds]) -> Publish:
        """A peer learns where these units lie: those that `use` holds, all of them, or units for it to read.

        From here until `extents_fixed` no band grows beyond its present count.
        """
        columns, _ = self._columns(parts, None, "op.canonical")
        op = self._begin(Publish(use, make_parts(columns)), columns)
        self._frozen(use)
        return op

    def send(self, use: int, parts: Sequence[OptionalIds]) -> Send:
        """The ranks' own engine reads these live units and pushes them to a peer; freed ones wait for its end."""
        columns, _ = self._columns(parts, None, "op.canonical")
        return self._begin(Send(use, make_parts(columns)), columns)

    def fix(self, use: int) -> Fix:
        """Open send `use` may never end, so nobody waits for it any more: from here on it counts as a publication.

        A rank that has waited for it already has nothing to fix, and reports no extents of it.
        """
        op = Fix(use)
        self._state.apply(op)
        self._begun.append(use)
        self._frozen(use)
        return op

    def backup(self, use: int, parts: Sequence[OptionalIds], slots: Sequence[OptionalSlots]) -> Backup:
        """A host copy reads these live units into the host slots that stand at the same places (int64)."""
        columns, places = self._columns(parts, slots, "op.canonical")
        return self._begin(Backup(use, make_parts(columns), places), columns)

    def load(self, use: int, parts: Sequence[OptionalIds], slots: Sequence[OptionalSlots]) -> Load:
        """A host copy writes these live units from the host slots that stand at the same places (int64)."""
        columns, places = self._columns(parts, slots, "op.canonical")
        return self._begin(Load(use, make_parts(columns), places), columns)

    def end_uses(self, uses: Sequence[int]) -> Free:
        """These open uses are proved to be over, and the step being formed lists them as released.

        The returned op (maybe without parts) frees the quarantined units that nothing fixes any more, in that step. A
        use that is not open, or that began, was published or fixed in this very step, raises with nothing changed.
        """
        for place, use in enumerate(uses):
            self._state.uses.check_open(use)
            if use in uses[:place] or use in self._begun:
                self.checks.broken(
                    "use.once", f"use {use} ends twice, or in the step that begins, publishes or fixes it"
                )
        ended: Columns = []
        for use in uses:
            ended += self._state.uses.end(use)
        self._ended += uses
        columns = self._quarantine.release(ended)
        self._state.release(columns)
        if ended:
            self._freeze.refit()
            self.form = self._freeze.form
            self._changed()
        return Free(make_parts(columns))

    def extents_fixed(self, extents: Extents, through_use: int) -> None:
        """Every rank reported where the fixed units lie, as of a step.

        `through_use` is the newest publication (or fixed send) up to that step in the order of the ops, whether it is
        over by now or not; 0: none. `extents[stage][band]` is the lowest fixed byte and the end of the highest, or
        None. Ends the freeze when there is no later publication. A report of an older state than one that came before
        changes nothing. Extents that are none, or that what is live does not fit, raise with nothing changed.
        """
        if through_use > self._state.uses.highest:
            raise ValueError(f"extents through use {through_use}, and the newest is {self._state.uses.highest}")
        self._freeze.report(extents, through_use, self.counts, self.checks)
        self.form = self._freeze.form
        self._changed()

    # --- other changes -------------------------------------------------------------------------------------------

    def rebind(self, band: int, sources: Int32s, targets: Int32s) -> Rebind:
        """Gives the units that pages `sources` (ascending) hold in a window band to pages `targets`, pair by pair."""
        name = "band.rebind_of_bound_unit"
        self._quarantine.check_owned([(band, sources)], "a rebind", name)
        self._quarantine.check_owned([(self.owner, targets)], "a rebind", name)
        op = Rebind(band, _column(sources).tobytes(), _column(targets).tobytes())
        self._state.apply(op)
        self._changed()
        return op

    def copy_state(self, sources: Int32s, targets: Int32s) -> CopyState:
        """Copies the states in slots `sources` (any live ones) to live slots `targets` (ascending), pair by pair."""
        band = next((b for b, kind in enumerate(self._state.kinds) if kind == "state"), -1)
        if band < 0:
            raise ValueError("this model has no state band")
        for ids in (sources, targets):
            self._quarantine.check_owned([(band, ids)], "a state copy", "use.names_live_units")
        op = CopyState(band, _column(sources).tobytes(), _column(targets).tobytes())
        self._state.apply(op)
        return op

    # --- digests and checks --------------------------------------------------------------------------------------

    def step_digest(self, seq: int, ops: list[Op], released: Sequence[int] = ()) -> bytes:
        """Advances the chained logical digest by one step and returns it (16 bytes); `seq` is dense from 1."""
        if self.checks.level >= STRICT:
            self.check()
        if sorted(released) != sorted(self._ended):
            detail = f"step {seq} lists uses {some(released)}, and {some(self._ended)} ended"
            self.checks.broken("use.released_in_step", detail)
        digest = self._state.end_step(seq, ops, released)
        self._begun, self._ended = [], []
        return digest

    def state_digest(self) -> bytes:
        """16 bytes over everything this chain holds: digest so far, counts, heads, live ids, uses, quarantine, freeze.

        What is empty adds nothing.
        """
        content = self._state.heads() + b"".join(self._state.live_ids(b).tobytes() for b in range(len(self.bands)))
        waiting = [self._quarantine.ids(band).tobytes() for band in range(len(self.bands))]
        uses = self._state.uses
        rest = (uses.highest, uses.content(), waiting, self._freeze.content(), self._begun, self._ended)
        if uses.highest:
            content += msgspec.msgpack.encode(rest)
        return advance(self._state.digest, content)

    def live_ids(self, band: int) -> Int32s:
        """Live virtual ids of a band, ascending, quarantined ones among them: for leak checks and tests."""
        return self._state.live_ids(band)

    def open_uses(self) -> tuple[int, ...]:
        """Numbers of the uses that are not over, ascending: for leak checks and reports."""
        return tuple(sorted(self._state.uses.open))

    def check_idle(self) -> None:
        """With no request and no cached page left, nothing is live or in use: raises naming what leaked."""
        for band, units in enumerate(self.counts):
            if units:
                leaked = some(self.live_ids(band))
                waiting = f", {self._quarantine.counts[band]} in quarantine" if self._quarantine.counts[band] else ""
                detail = f"band {self.bands[band].name} still holds {units} units: {leaked}{waiting}"
                self.checks.broken("chain.idle", detail)
        if self._state.uses.open:
            self.checks.broken("chain.idle", f"uses {some(self.open_uses())} are still open")

    def check(self) -> None:
        """Counts equal the live ids, uses and quarantine their marks, and what is live fits: tests and level 2."""
        for band, units in enumerate(self.counts):
            if self.live_ids(band).size != units:
                self.checks.broken("chain.byte_conservation", f"band {band} counts {units} units, its ids do not")
        self._state.uses.check()
        self._quarantine.check()
        if not self.form.fits(self.counts):
            self.checks.broken("chain.byte_conservation", f"live units {self.counts} do not fit the arena")

    # --- inside --------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self.epoch += 1
        self._answers.clear()
        self._clips.clear()

    def _frozen(self, use: int) -> None:
        """The units of this use are fixed at places that nobody has reported yet."""
        self._freeze.begin(use, tuple(self.counts))
        self.form = self._freeze.form
        self._changed()

    def _quarantined(self) -> Demand:
        return tuple(self._quarantine.counts)

    def _begin(self, op: AnyUse, columns: Columns) -> AnyUse:
        """A use begins, with everything checked first; capacity does not change."""
        self._quarantine.check_owned(columns, f"use {op.use}", "use.names_live_units")
        self._state.apply(op)
        self._begun.append(op.use)
        return op

    def _columns(
        self, parts: Sequence[OptionalIds], slots: Sequence[OptionalSlots] | None, name: str
    ) -> tuple[Columns, list[bytes]]:
        """Parts as canonical columns, with their host slots in the same order."""
        if len(parts) != len(self.bands) or (slots is not None and len(slots) != len(parts)):
            raise ValueError(f"{len(parts)} parts for {len(self.bands)} bands")
        columns: Columns = []
        places: list[bytes] = []
        for band, ids in enumerate(parts):
            if ids is None or ids.size == 0:
                continue
            column = _column(ids)
            order = None
            if not ascends(column):
                order = column.argsort(kind="stable")
                column = column[order]
                if not ascends(column):
                    twice = column[1:][column[1:] == column[:-1]]
                    self.checks.broken(name, f"{self.bands[band].name} ids {some(twice)} named twice")
            columns.append((band, column))
            if slots is not None:
                here = slots[band]
                if here is None or here.size != ids.size:
                    raise ValueError(f"band {self.bands[band].name}: {ids.size} units need as many host slots")
                places.append(pack_i64(here if order is None else here[order]))
        if not columns:
            raise ValueError("a free or a use must name at least one id")
        return columns, places

    def _check_bound(
        self, band: int, demand: Demand, bound: Sequence[OptionalIds] | None, onto: Sequence[OptionalIds] | None
    ) -> None:
        """Before anything changes: the window's demand equals the pages it is to be bound to."""
        pages = demand[self.owner]
        wanted = demand[band]
        chosen = bound[band] if bound is not None else None
        older = onto[band] if onto is not None else None
        name = self.bands[band].name
        size = pages if chosen is None else chosen.size
        if older is not None and older.size:
            if not ascends(older):
                raise ValueError(f"band {name}: pages {some(older)} must ascend")
            self._quarantine.check_owned([(self.owner, older)], "a take", "chain.window_segment_bound")
            self._state.check_onto(band, older)
            size += older.size
        elif not wanted:
            return
        inside = chosen is None or not chosen.size or (chosen[0] >= 0 and chosen[-1] < pages and ascends(chosen))
        if size != wanted or not inside:
            raise ValueError(f"band {name}: {wanted} units do not match {size} of {pages} pages taken")


def _column(ids: Int32s) -> Int32s:
    return ids if ids.dtype == np.int32 else ids.astype(np.int32)
