"""Arena: one epoch's memory on every stage, followed step by step.

Owns who took which unit, and the counts per step. Must never decide anything. Invariants: a stage is driven as a rank
drives it; every count is what the chain says, but for two that it cannot know: `cached`, live units whose taker does
not run any more, and `fixed`, live units at addresses that a peer knows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from allocator.columns import Int32s, i32
from allocator.geometry import Geometry
from allocator.ops import CopyState, Op, Rebind, Take
from allocator.physical.band import Band
from daemon.core.limits import CoreConfig
from ipc.messages import Forward, ModelFacts, Step
from tools.view.requests import Requests
from tools.view.units import BandWatch, Changes, Mask, Watched

COUNTS = ("live", "hole", "pending", "vacated", "fenced", "beyond", "cached", "fixed", "begin", "end")
"""Per step and stored band, in units; `begin` and `end` of the span, as positions."""
FIRST_REQUESTS = 1024  # columns by request number grow from here
LAYOUTS_KEPT = 4096  # digests of so many steps wait for the ranks' reports


class Arena:
    """All stages of an epoch, empty, or as `snapshot` has them: the bytes of each stage."""

    def __init__(
        self, geometry: Geometry, facts: ModelFacts, config: CoreConfig, snapshot: Sequence[bytes] = ()
    ) -> None:
        self.geometry = geometry
        self._stages = [Watched(geometry, at, config, facts) for at in range(len(geometry.stages))]
        for stage, data in zip(self._stages, snapshot, strict=False):
            stage.resume(data)
        self.bands: list[tuple[int, Band]] = [
            (at, band) for at, stage in enumerate(self._stages) for band in stage.stored()
        ]
        self._watches = [BandWatch(band) for _, band in self.bands]
        self._kinds = [band.kind for band in geometry.stages[0].bands]
        self._page_taker = np.zeros(geometry.virtual_pages + 1, np.int32)
        self._slot_taker = np.zeros(geometry.virtual_slots + 1, np.int32)
        self._live_of = [np.zeros(FIRST_REQUESTS, np.int32) for _ in self.bands]
        self._cached = [0] * len(self.bands)
        self._fixed = [0] * len(self.bands)
        self._layouts: dict[int, list[bytes]] = {}

    def first_look(self, requests: Requests) -> None:
        """Take note of what stages of a snapshot hold already."""
        self._noted([], requests)

    def took(self, request: int, held: Sequence[Int32s]) -> None:
        """What a request of a snapshot holds, ids by band."""
        for kind, ids in zip(self._kinds, held, strict=True):
            (self._slot_taker if kind == "state" else self._page_taker)[ids] = request

    def apply(self, step: Step, requests: Requests) -> list[Changes]:
        """Apply a step on every stage: what changed, by stored band. Raises what a chain raises."""
        self._take_over(step, requests)
        self._layouts[step.seq] = [stage.apply_step(step) for stage in self._stages]
        self._layouts.pop(step.seq - LAYOUTS_KEPT, None)
        return self._noted(step.ops, requests)

    def frame(self) -> list[Changes]:
        """All that is not beyond behind the newest step, by stored band."""
        return [watch.frame() for watch in self._watches]

    def layout(self, seq: int, stage: int) -> bytes | None:
        """The layout digest of a stage behind a step that is still known."""
        known = self._layouts.get(seq)
        return known[stage] if known is not None and 0 <= stage < len(known) else None

    def count(self, columns: Sequence[array[int]]) -> None:
        """Append the counts behind the newest step: one column for every stored band and name in COUNTS."""
        at = 0
        for place, (_, band) in enumerate(self.bands):
            span = (band.units.begin, band.units.frontier)
            for number in (*band.counts(), self._cached[place], self._fixed[place], *span):
                columns[at].append(number)
                at += 1

    def held(self, request: int, holds: bool) -> None:
        """A request begins or ends to run: what it took is its own, or left behind."""
        for place, live_of in enumerate(self._live_of):
            if request < live_of.size:
                self._cached[place] += int(live_of[request]) * (-1 if holds else 1)

    # --- inside --------------------------------------------------------------------------------------------------

    def _take_over(self, step: Step, requests: Requests) -> None:
        """Who takes the ids that this step binds."""
        taken = [part for op in step.ops if isinstance(op, Take) for part in op.parts]
        fresh = np.zeros(self._page_taker.size, np.bool_)
        for part in taken:
            ids = i32(part.ids)
            if self._kinds[part.band] == "state":
                self._slot_taker[ids] = 0
            elif self._kinds[part.band] == "full":
                self._page_taker[ids] = 0
                fresh[ids] = True
        if step.forward is not None:
            self._by_rows(step.forward, requests, fresh)
        for op in step.ops:
            if isinstance(op, CopyState):
                self._slot_taker[i32(op.targets)] = self._slot_taker[i32(op.sources)]

    def _by_rows(self, forward: Forward, requests: Requests, fresh: Mask) -> None:
        rows, pages = i32(forward.table_rows), i32(forward.table_pages)
        own = fresh[pages]
        if own.any():
            self._page_taker[pages[own]] = requests.on_rows(rows[own].tolist())
        slots = i32(forward.slots)
        if slots.size:
            unknown = self._slot_taker[slots] == 0
            if unknown.any():
                self._slot_taker[slots[unknown]] = requests.on_rows(i32(forward.rows)[unknown].tolist())

    def _noted(self, ops: Sequence[Op], requests: Requests) -> list[Changes]:
        """Every band's changes; the counts by taker follow them."""
        changes = []
        for place, (_, band) in enumerate(self.bands):
            bound = [
                i32(part.ids) for op in ops if isinstance(op, Take) for part in op.parts if part.band == band.index
            ]
            bound += [i32(op.targets) for op in ops if isinstance(op, Rebind) and op.band == band.index]
            taker_of = self._slot_taker if self._kinds[band.index] == "state" else self._page_taker
            change = self._watches[place].changes(bound, taker_of)
            changes.append(change)
            self._follow_takers(place, change, requests)
            self._fixed[place] += change.fixed
        return changes

    def _follow_takers(self, place: int, change: Changes, requests: Requests) -> None:
        most = max(int(change.takers.max(initial=0)), int(change.left.max(initial=0)))
        live_of = self._live_of[place]
        if most >= live_of.size:
            live_of = np.concatenate([live_of, np.zeros(max(most, live_of.size), np.int32)])
            self._live_of[place] = live_of
        np.subtract.at(live_of, change.left, 1)
        np.add.at(live_of, change.takers, 1)
        active = requests.active
        self._cached[place] += int(np.count_nonzero(~active[change.takers]))
        self._cached[place] -= int(np.count_nonzero(~active[change.left]))
