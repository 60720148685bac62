"""Arena: one epoch's memory on every stage, followed step by step and told of batch by batch.

Owns who took which unit, and the counts per step. Must never decide anything. Invariants: a stage is driven as a rank
drives it; every count is what the chain says, but for two that it cannot know: `cached`, live units whose taker does
not run any more, and `fixed`, live units at addresses that a peer knows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from allocator.columns import Int32s, Int64s, i32
from allocator.geometry import Geometry
from allocator.ops import CopyState, Op, Rebind, Take
from allocator.physical.band import Band
from daemon.core.limits import CoreConfig
from ipc.messages import Forward, ModelFacts, Step
from tools.view.requests import Requests
from tools.view.takers import Held, Holding, Takers
from tools.view.units import Changes
from tools.view.watch import BandWatch, Watched

CHAIN_COUNTS = ("live", "hole", "pending", "vacated", "fenced", "beyond", "begin", "end")
COUNTS = (*CHAIN_COUNTS[:6], "cached", "fixed", *CHAIN_COUNTS[6:])
"""Per step and stored band, in units; `begin` and `end` of the span, as positions."""
LAYOUTS_KEPT = 4096  # digests of so many steps wait for the ranks' reports
BATCH_STEPS = 64
BATCH_BYTES = 8 << 20  # of copies: a large arena has few steps in a batch, where the calls cost little beside the work


class Batch(NamedTuple):
    """What some steps did: changes of each stored band, one column of COUNTS after the other for each band, and units
    and bytes that moved in each step.
    """

    steps: int
    changes: list[Changes]
    counts: list[Int64s]
    moved: Int64s
    moved_bytes: Int64s


class Arena:
    """All stages of an epoch, empty, or as `snapshot` has them: the bytes of each stage."""

    def __init__(
        self, geometry: Geometry, facts: ModelFacts, config: CoreConfig, snapshot: Sequence[bytes] = ()
    ) -> None:
        self.geometry = geometry
        self.steps = 0  # in the batch so far
        self._stages = [Watched(geometry, at, config, facts) for at in range(len(geometry.stages))]
        for stage, data in zip(self._stages, snapshot, strict=False):
            stage.resume(data)
        self.bands: list[tuple[int, Band]] = [
            (at, band) for at, stage in enumerate(self._stages) for band in stage.stored()
        ]
        self._kinds = [band.kind for band in geometry.stages[0].bands]
        self._pages, self._slots = Takers(geometry.virtual_pages + 1), Takers(geometry.virtual_slots + 1)
        self._watches = [BandWatch(band, self._takers_of(band.index)) for _, band in self.bands]
        self._taken_now = np.zeros(geometry.virtual_pages + 1, np.bool_)
        self._held: list[Held] = []
        self._counts = array("q")  # of the chains, step by step
        self._bytes = 0
        self._layouts: dict[int, list[bytes]] = {}

    def first_look(self, requests: Requests) -> None:
        """Take note of what stages of a snapshot hold already."""
        for watch in self._watches:
            watch.look(Holding([], requests.active, 1))
        self._pages.settle()
        self._slots.settle()

    def took(self, request: int, held: Sequence[Int32s]) -> None:
        """What a request of a snapshot holds, ids by band."""
        for band, ids in enumerate(held):
            self._takers_of(band).put(0, ids, request)

    def apply(self, step: Step, requests: Requests) -> None:
        """Apply a step on every stage. Raises what a chain raises: the step is then in no batch."""
        self._take_over(step, requests)
        self._layouts[step.seq] = [stage.apply_step(step) for stage in self._stages]
        self._layouts.pop(step.seq - LAYOUTS_KEPT, None)
        bound = self._bound(step.ops)
        for (_, band), watch in zip(self.bands, self._watches, strict=True):
            self._bytes += watch.note(bound[band.index])
            self._counts.extend((*band.counts(), band.units.begin, band.units.frontier))
        self.steps += 1

    @property
    def full(self) -> bool:
        """Whether the batch should be settled."""
        return self.steps >= BATCH_STEPS or self._bytes >= BATCH_BYTES

    def settle(self, requests: Requests) -> Batch:
        """What the steps of the batch did; the next one begins."""
        steps, bands = self.steps, len(self.bands)
        moved, moved_bytes = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
        told = np.array(self._counts, np.int64).reshape(steps, bands, len(CHAIN_COUNTS))
        changes, counts = list[Changes](), list[Int64s]()
        if steps:
            holding = Holding(self._held, requests.active, steps)
            for place, ((_, band), watch) in enumerate(zip(self.bands, self._watches, strict=True)):
                some, own = watch.settle(holding)
                changes.append(some)
                named = dict(zip(CHAIN_COUNTS, told[:, place].T, strict=True))
                named |= {"cached": own.cached, "fixed": own.fixed}
                counts += [named[name] for name in COUNTS]
                moved += own.moved
                moved_bytes += own.moved * band.unit_bytes
            self._pages.settle()
            self._slots.settle()
            self._held = [held._replace(step=0) for held in self._held if held.step == steps]
        del self._counts[:]
        self.steps = self._bytes = 0
        return Batch(steps, changes, counts, moved, moved_bytes)

    def frame(self) -> list[Changes]:
        """All that is not beyond in front of the batch, by stored band."""
        return [watch.frame() for watch in self._watches]

    def layout(self, seq: int, stage: int) -> bytes | None:
        """The layout digest of a stage behind a step that is still known."""
        known = self._layouts.get(seq)
        return known[stage] if known is not None and 0 <= stage < len(known) else None

    def held(self, request: int, holds: bool) -> None:
        """A request begins or ends to run: what it took is its own, or left behind."""
        self._held.append(Held(self.steps, request, holds))

    # --- inside --------------------------------------------------------------------------------------------------

    def _takers_of(self, band: int) -> Takers:
        return self._slots if self._kinds[band] == "state" else self._pages

    def _take_over(self, step: Step, requests: Requests) -> None:
        """Who takes the ids that this step binds."""
        fresh = list[Int32s]()
        for op in step.ops:
            for part in op.parts if isinstance(op, Take) else ():
                ids, kind = i32(part.ids), self._kinds[part.band]
                if kind == "state":
                    self._slots.put(self.steps, ids, 0)
                elif kind == "full":
                    self._pages.put(self.steps, ids, 0)
                    fresh.append(ids)
        if step.forward is not None:
            self._by_rows(step.forward, requests, fresh)
        for op in step.ops:
            if isinstance(op, CopyState):
                self._slots.put(self.steps, i32(op.targets), self._slots.now[i32(op.sources)])

    def _by_rows(self, forward: Forward, requests: Requests, fresh: Sequence[Int32s]) -> None:
        if fresh and forward.table_rows:
            rows, pages = i32(forward.table_rows), i32(forward.table_pages)
            for ids in fresh:
                self._taken_now[ids] = True
            own = self._taken_now[pages]
            for ids in fresh:
                self._taken_now[ids] = False
            self._pages.put(self.steps, pages[own], requests.on_rows(rows[own]))
        if forward.slots:
            slots = i32(forward.slots)
            unknown = self._slots.now[slots] == 0
            if unknown.any():
                self._slots.put(self.steps, slots[unknown], requests.on_rows(i32(forward.rows)[unknown]))

    def _bound(self, ops: Sequence[Op]) -> list[list[Int32s]]:
        """By band the ids that these ops bind."""
        bound: list[list[Int32s]] = [[] for _ in self._kinds]
        for op in ops:
            if isinstance(op, Take):
                for part in op.parts:
                    bound[part.band].append(i32(part.ids))
            elif isinstance(op, Rebind):
                bound[op.band].append(i32(op.targets))
        return bound
