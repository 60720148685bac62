"""The logical chain: decides from counts whether a demand fits, which virtual ids it gets, and what is freed.

Owns the decision side of the allocator; there is one, in the daemon. Must never know a position in an arena, an event
or a forward: units pending behind a forward in flight count as free here, because every physical chain can have them
by waiting. Every public change is all or nothing.

Invariants: `refusal(d) is None` exactly when `take(d)` succeeds, on every stage and in both id spaces; what it accepts
each physical chain can realize (`chain.realizable`); a freed unit is visible to the very next question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from allocator.capacity import CapacityForm, CapacityRefusal, Demand
from allocator.checks import STRICT, Checks, some
from allocator.columns import Int32s
from allocator.digest import advance
from allocator.errors import CapacityRefused
from allocator.geometry import Geometry
from allocator.logical.bands import LogicalBands, OptionalIds
from allocator.ops import Free, Op, Take
from allocator.parts import make_parts

ANSWERS_MAX = 1024  # remembered refusals and consents between two changes


class Taken(NamedTuple):
    """A take that happened: the op for the step, and the virtual ids per band (ascending int32, maybe empty)."""

    op: Take
    ids: tuple[Int32s, ...]


class LogicalChain:
    """Counts, ids and capacity of one epoch.

    Ask `refusal` (or `max_extra`), then `take`; `free` when something ends; `step_digest` once per step with the ops
    that the step carries, in the order in which they were made here.
    """

    def __init__(self, geometry: Geometry, checks: Checks | None = None) -> None:
        self.checks = checks or Checks()
        self.form = CapacityForm(geometry)
        self.bands = self.form.bands
        self.owner = self.form.owner
        self._state = LogicalBands(geometry, self.checks)
        self.counts = self._state.counts
        self._answers: dict[Demand, CapacityRefusal | None] = {}  # of the present counts
        self._deciding = 0
        self._zero: Demand = (0,) * len(self.bands)
        self._page: Demand = (*self._zero[:-1], 1)
        assert self.owner == len(self.bands) - 1, "the owner is the last band of the chain"

    # --- questions -----------------------------------------------------------------------------------------------

    def refusal(self, demand: Demand) -> CapacityRefusal | None:
        """None when the demand fits beside what is live; otherwise why not. Reads only."""
        if demand in self._answers:
            return self._answers[demand]
        if len(self._answers) >= ANSWERS_MAX:
            self._answers.clear()
        answer = self._answers[demand] = self.form.refusal(self.counts, demand)
        return answer

    def never_fits(self, demand: Demand) -> CapacityRefusal | None:
        """None when an empty arena holds the demand; otherwise why not even that does. Reads only."""
        return self.form.refusal(self._zero, demand)

    def max_extra(self, base: Demand | None = None, per: Demand | None = None) -> int:
        """The largest n for which `base` + n times `per` (default: one owner page) still fits. Reads only.

        -1 when `base` alone does not fit. Used to clip a request's output to memory.
        """
        held = self.counts if base is None else [c + b for c, b in zip(self.counts, base, strict=True)]
        return self.form.most(held, per or self._page)

    def most_ever(self, per: Demand | None = None) -> int:
        """The largest n for which n times `per` (default: one owner page) fits an empty arena."""
        return self.form.most(self._zero, per or self._page)

    def live_units(self) -> tuple[int, ...]:
        """Live units per band, in chain order."""
        return tuple(self.counts)

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

    # --- changes -------------------------------------------------------------------------------------------------

    def take(self, demand: Demand, bound: Sequence[OptionalIds] | None = None) -> Taken:
        """Takes the demand jointly: the lowest free ids of each space; raises CapacityRefused when it does not fit.

        A window's units are bound to the pages taken with them: all of them, or those at the indexes `bound[band]`.
        """
        if not any(demand):
            raise ValueError("a take must want at least one unit")
        refused = self.refusal(demand)
        if refused is not None:
            raise CapacityRefused(refused)
        self._check_bound(demand, bound)
        ids = self._state.mint(demand, bound)
        self._answers.clear()
        assert tuple(column.size for column in ids) == demand
        return Taken(Take(make_parts([(b, column) for b, column in enumerate(ids) if column.size])), ids)

    def free(self, parts: Sequence[OptionalIds]) -> Free:
        """Frees ids per band (int32 in any order, None or empty where a band has none).

        An id that is not live, or named twice, raises InvariantBroken with nothing changed.
        """
        if len(parts) != len(self.bands):
            raise ValueError(f"{len(parts)} parts for {len(self.bands)} bands")
        columns: list[tuple[int, Int32s]] = []
        for band, ids in enumerate(parts):
            if ids is None or ids.size == 0:
                continue
            column = np.sort(ids).astype(np.int32, copy=False)
            if column.size > 1 and not (column[1:] > column[:-1]).all():
                twice = column[1:][column[1:] == column[:-1]]
                self.checks.broken("band.free_of_bound_unit", f"{self.bands[band].name} ids {some(twice)} named twice")
            columns.append((band, column))
        if not columns:
            raise ValueError("a free must name at least one id")
        self._state.check_free(columns)
        self._state.release(columns)
        self._answers.clear()
        return Free(make_parts(columns))

    # --- digests and checks --------------------------------------------------------------------------------------

    def step_digest(self, seq: int, ops: list[Op]) -> bytes:
        """Advances the chained logical digest by one step and returns it (16 bytes); `seq` is dense from 1."""
        if self.checks.level >= STRICT:
            self.check()
        return self._state.end_step(seq, ops)

    def state_digest(self) -> bytes:
        """16 bytes over everything this chain holds: digest so far, counts, heads and every live id."""
        live = b"".join(self._state.live_ids(band).tobytes() for band in range(len(self.bands)))
        return advance(self._state.digest, self._state.heads() + live)

    def live_ids(self, band: int) -> Int32s:
        """Live virtual ids of a band, ascending: for leak checks and tests."""
        return self._state.live_ids(band)

    def check_idle(self) -> None:
        """With no request and no cached page left, nothing is live: raises InvariantBroken naming what leaked."""
        for band, units in enumerate(self.counts):
            if units:
                leaked = some(self.live_ids(band))
                self.checks.broken("chain.idle", f"band {self.bands[band].name} still holds {units} units: {leaked}")

    def check(self) -> None:
        """Counts equal the live ids, and what is live fits: for tests and invariant level 2."""
        for band, units in enumerate(self.counts):
            if self.live_ids(band).size != units:
                self.checks.broken("chain.byte_conservation", f"band {band} counts {units} units, its ids do not")
        if not self.form.fits(self.counts):
            self.checks.broken("chain.byte_conservation", f"live units {self.counts} do not fit the arena")

    def _check_bound(self, demand: Demand, bound: Sequence[OptionalIds] | None) -> None:
        """Before anything changes: each window's demand equals the pages it is to be bound to."""
        pages = demand[self.owner]
        for band, info in enumerate(self.bands):
            if info.kind != "window" or not demand[band]:
                continue
            chosen = bound[band] if bound is not None else None
            size = pages if chosen is None else chosen.size
            inside = chosen is None or (chosen[0] >= 0 and chosen[-1] < pages and bool((np.diff(chosen) > 0).all()))
            if size != demand[band] or not inside:
                raise ValueError(f"band {info.name}: {demand[band]} units do not match {size} of {pages} pages taken")
