"""The scheduler-level world of a program: holders of units, one logical chain, the fleet of ranks, and the steps.

Owns who holds what and what is outstanding, and the only ways to change it: `take`, `free`, `begin_use`, `release` and
`step`. Must never make a program illegal: operations ask here for what is possible. Invariant: every op of the logical
chain reaches every rank in the step after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from allocator.capacity import Extents
from allocator.checks import STRICT, WARN, Checks
from allocator.columns import Int32s, i32
from allocator.errors import CapacityRefused
from allocator.logical.chain import LogicalChain, Taken
from allocator.ops import Fix, Free, Op, Publish
from tools.pagesafety.contents import ForwardPlan
from tools.pagesafety.faults import StressFault
from tools.pagesafety.fleet import Fleet, MakeDevice
from tools.pagesafety.shapes import Setting

USES_MAX = 40  # outstanding at once; a device has bits for 64 actors
REPORT_STEPS_MAX = 3  # after so many steps an extents report is delivered, asked for or not
Ids = dict[int, Int32s]
"""Virtual ids per band."""


@dataclass
class Holder:
    """A request or a tree node: what it owns, and the node whose pages it reads besides."""

    number: int
    request: bool
    tokens: int
    pages: list[int]
    slots: list[int] = field(default_factory=list)  # a request's working slot, then its checkpoint slot
    shared: int = 0  # the node it reads, 0: none
    readers: int = 0  # requests that read this node
    waits_for: int = 0  # 0: ready; -1: units taken for a load that was not submitted; else the use that must end
    entry: int = 0  # the host entry that a load is to read


@dataclass
class Use:
    """An outstanding host copy or transfer."""

    number: int
    kind: str  # backup, load, send, fix (a send that may never end), pull (a peer reads), hold, receive
    ids: Ids
    holder: int
    sent: int = 0  # the step that carried its newest op, 0: not yet
    entry: int = 0


@dataclass
class Entry:
    """A copy in host memory: pages, which of them have units of each window, slots; `slots[band]` per unit."""

    number: int
    pages: int
    windows: dict[int, Int32s]  # window band -> indexes of the pages whose units were copied
    states: int
    slots: dict[int, NDArray[np.int64]]
    readers: int = 0
    ready: bool = False


class World:
    """Everything of one run. `figures` counts what happened."""

    def __init__(self, setting: Setting, ranks: int, seed: int, strict: bool, make: MakeDevice | None = None) -> None:
        geometry = self.geometry = setting.geometry
        self.setting = setting
        level = STRICT if strict else WARN
        self.logical = LogicalChain(geometry, Checks(level))
        self.fleet = Fleet(geometry, ranks, seed, level, setting.host_slots, make)
        self.page_size = geometry.page_size
        kinds = [band.kind for band in geometry.stages[0].bands]
        self.bands = len(kinds)
        self.owner = self.bands - 1
        self.windows = [band for band, kind in enumerate(kinds) if kind == "window"]
        self.state = kinds.index("state") if "state" in kinds else -1
        ids = [(geometry.virtual_slots if kind == "state" else geometry.virtual_pages) + 1 for kind in kinds]
        self.held = [np.zeros(n, dtype=np.bool_) for n in ids]  # window units that our pages hold
        self.stuck = [np.zeros(n, dtype=np.bool_) for n in ids]  # freed while on a transfer: bound until its release
        self.shown = [np.zeros(n, dtype=np.int32) for n in ids]  # outstanding publications and fixed sends of a unit
        self.sent = [np.zeros(n, dtype=np.int32) for n in ids]  # outstanding sends of a unit
        self.slot_known = np.zeros(geometry.virtual_slots + 1, dtype=np.bool_)
        self.holders: dict[int, Holder] = {}
        self.uses: dict[int, Use] = {}
        self.entries: dict[int, Entry] = {}
        self.free_host = [list(range(setting.host_slots)) for _ in kinds]
        self.ops: list[Op] = []
        self.released: list[int] = []
        self.reports: list[tuple[int, int, Extents]] = []  # step, newest publication, extents per stage
        self.in_flight: list[int] = []
        self.seq = 0
        self.processed = 0
        self.value = 0
        self._number = 0
        self._use = 0
        self._published = 0
        self.figures = dict.fromkeys(
            ("steps", "forwards", "takes", "refusals", "frozen", "uses", "fixes", "quarantined"), 0
        )

    # --- choosing --------------------------------------------------------------------------------------------------

    def pick(self, number: int, chosen: Sequence[Holder]) -> Holder | None:
        """One of `chosen`, by number; None when there is none."""
        return chosen[number % len(chosen)] if chosen else None

    def requests(self, ready: bool = True) -> list[Holder]:
        """Requests, oldest first."""
        return [h for h in self.holders.values() if h.request and (not ready or h.waits_for == 0)]

    def nodes(self, ready: bool = True, unread: bool = False) -> list[Holder]:
        """Tree nodes, oldest first."""
        return [
            h
            for h in self.holders.values()
            if not h.request and (not ready or h.waits_for == 0) and not (unread and h.readers)
        ]

    def readable(self) -> list[Holder]:
        """Holders whose units a copy or transfer may read: ready, or being loaded, which it then waits for."""
        loading = {use.number for use in self.uses.values() if use.kind == "load"}
        return [h for h in self.holders.values() if h.waits_for == 0 or h.waits_for in loading]

    def read_pages(self, holder: Holder) -> Int32s:
        """The pages that a forward of this holder reads."""
        shared = self.holders[holder.shared].pages if holder.shared else []
        return np.array(shared + holder.pages, dtype=np.int32)

    def units_of(self, holder: Holder, first: int = 0, last: int | None = None) -> Ids:
        """What a holder owns, for pages [first, last): per band ascending ids; slots where `first` is 0."""
        pages = np.sort(np.array(holder.pages[first:last], dtype=np.int32))
        parts: Ids = {band: pages[self.held[band][pages]] for band in self.windows}
        parts[self.owner] = pages
        if self.state >= 0 and first == 0:
            parts[self.state] = np.sort(np.array(holder.slots, dtype=np.int32))
        return {band: ids for band, ids in parts.items() if ids.size}

    def per_band(self, parts: Ids) -> list[Int32s | None]:
        """Parts as the logical chain takes them."""
        return [parts.get(band) for band in range(self.bands)]

    # --- changes ---------------------------------------------------------------------------------------------------

    def add_holder(self, request: bool, tokens: int, pages: list[int], slots: list[int]) -> Holder:
        """A new holder of units that were taken."""
        self._number += 1
        holder = self.holders[self._number] = Holder(self._number, request, tokens, pages, slots)
        return holder

    def take(
        self,
        demand: list[int],
        bound: list[Int32s | None] | None = None,
        onto: list[Int32s | None] | None = None,
    ) -> Taken | None:
        """A joint take, or None when it was refused, with nothing changed."""
        wanted = tuple(demand)
        refusal = self.logical.refusal(wanted)
        if refusal is not None:
            self.figures["frozen" if refusal.stage == -2 else "refusals"] += 1
            before = self.logical.state_digest(), self.fleet.digests()
            try:
                self.logical.take(wanted, bound, onto)
            except CapacityRefused:
                pass
            else:
                raise StressFault("refusal_changed", f"{wanted} was refused and then taken")
            if before != (self.logical.state_digest(), self.fleet.digests()):
                raise StressFault("refusal_changed", f"the refusal of {wanted} changed a digest")
            return None
        taken = self.logical.take(wanted, bound, onto)
        self.ops.append(taken.op)
        self.figures["takes"] += 1
        for band in self.windows:
            self.held[band][taken.ids[band]] = True
        if self.state >= 0:
            self.slot_known[taken.ids[self.state]] = False
        return taken

    def free(self, parts: Ids) -> None:
        """Frees units; those that a peer knows are quarantined, and bound until their release."""
        parts = {band: ids for band, ids in parts.items() if ids.size}
        if not parts:
            return
        for band, ids in parts.items():
            if band in self.windows:
                self.held[band][ids] = False
            self.stuck[band][ids[self.shown[band][ids] + self.sent[band][ids] > 0]] = True
        op = self.logical.free(self.per_band(parts))
        self._append_free(op)

    def _append_free(self, op: Free) -> None:
        for part in op.parts:
            self.stuck[part.band][i32(part.ids)] = False
        if op.parts:
            self.ops.append(op)

    def drop(self, holder: Holder) -> None:
        """Ends a holder in whatever state it is."""
        use = self.uses.get(holder.waits_for)
        if use is not None and use.kind == "hold":
            self.release(use)
        self.free(self.units_of(holder))
        if holder.shared:
            self.holders[holder.shared].readers -= 1
        if holder.waits_for == -1 and holder.entry:
            self.entries[holder.entry].readers -= 1
        del self.holders[holder.number]

    # --- uses ------------------------------------------------------------------------------------------------------

    @property
    def next_use(self) -> int:
        """A number that no use has had."""
        return self._use + 1

    def begin_use(self, kind: str, ids: Ids, holder: Holder, entry: int = 0) -> Use | None:
        """Records a use that is about to begin; None when too many are outstanding or there is nothing to touch."""
        if len(self.uses) >= USES_MAX or not ids:
            return None
        self._use += 1
        use = self.uses[self._use] = Use(self._use, kind, ids, holder.number, entry=entry)
        self.figures["uses"] += 1
        if kind == "pull":
            self.show(use)
        elif kind == "send":
            self._mark(self.sent, use, 1)
        return use

    def show(self, use: Use) -> None:
        """The use is published by an op just made."""
        use.sent = 0
        self._published = use.number
        self._mark(self.shown, use, 1)

    def fix(self, use: Use) -> None:
        """A send may never end: it counts as a publication from the step that is formed now, before all else in it."""
        if self.ops:
            self.step()
        self.ops.append(self.logical.fix(use.number))
        self._mark(self.sent, use, -1)
        use.kind = "fix"
        self.figures["fixes"] += 1
        self.show(use)

    def _mark(self, marks: list[NDArray[np.int32]], use: Use, by: int) -> None:
        for band, column in use.ids.items():
            marks[band][column] += by

    def rename(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Window units go by other pages from now on."""
        for marks in (self.shown, self.sent):
            marks[band][targets] = marks[band][sources]
            marks[band][sources] = 0
        self.held[band][sources] = False
        self.held[band][targets] = True
        names = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        for use in self.uses.values():
            if use.kind in ("send", "fix", "pull") and band in use.ids:
                renamed = sorted(names.get(page, page) for page in use.ids[band].tolist())
                use.ids[band] = np.array(renamed, dtype=np.int32)

    def release(self, use: Use) -> None:
        """Ends a use, with proof from every rank; sends its op first if it was not sent."""
        if not use.sent:
            self.step()
        del self.uses[use.number]
        for stage in self.fleet.stages:
            for rank in stage.ranks:
                rank.device.finish(use.number)
        if use.kind in ("pull", "receive", "fix"):
            self._mark(self.shown, use, -1)
        elif use.kind == "send":
            self._mark(self.sent, use, -1)
        self.released.append(use.number)
        self._append_free(self.logical.end_uses([use.number]))
        holder = self.holders.get(use.holder)
        if holder is not None and holder.waits_for == use.number:
            holder.waits_for = 0
            if self.state >= 0 and use.kind != "hold":
                self.slot_known[holder.slots] = True
        if use.entry:
            entry = self.entries[use.entry]
            if use.kind == "load":
                entry.readers -= 1
            else:
                entry.ready = True
                for stage in self.fleet.stages:
                    for band in stage.stored:
                        if band in entry.slots:
                            stage.check_host(band, entry.slots[band])

    def forget(self, entry: Entry) -> None:
        """Frees the host slots of an entry that nothing reads."""
        del self.entries[entry.number]
        for band, slots in entry.slots.items():
            self.free_host[band] += [int(slot) for slot in slots]

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self, plan: ForwardPlan | None = None) -> None:
        """Sends everything decided so far, with a forward or without."""
        self.seq += 1
        ops, self.ops = self.ops, []
        released, self.released = self.released, []
        digest = self.logical.step_digest(self.seq, ops, released)
        self.fleet.step(self.seq, self.processed, released, ops, digest, self.logical.live_units())
        self.figures["steps"] += 1
        self.figures["quarantined"] = max(self.figures["quarantined"], sum(self.logical.quarantined()))
        for use in self.uses.values():
            use.sent = use.sent or self.seq
        if released or any(isinstance(op, Publish | Fix) for op in ops):
            extents = tuple(tuple(stage.extents()) for stage in self.fleet.stages)
            self.reports.append((self.seq, self._published, extents))
        if self.reports and self.reports[0][0] + REPORT_STEPS_MAX <= self.seq:
            self.report()
        if plan is not None:
            self.figures["forwards"] += 1
            self.in_flight.append(self.seq)
            for stage in self.fleet.stages:
                stage.launch(self.seq, plan)
        for stage in self.fleet.stages:
            for rank in stage.ranks:
                rank.device.drift()

    def report(self, number: int = 0) -> None:
        """The daemon consumes an extents report: the oldest, or another one (each holds, in whichever order)."""
        if self.reports:
            _, through, extents = self.reports.pop(number % len(self.reports))
            self.logical.extents_fixed(extents, through)
            unsent = any(isinstance(op, Publish | Fix) for op in self.ops)
            if not self.reports and not unsent and self.logical.form.caps is not None:
                raise StressFault("ledger_leak", "every publication was reported, and bands are still frozen")

    def process(self, count: int = 1) -> None:
        """The daemon consumes the results of the oldest forwards."""
        done, self.in_flight = self.in_flight[:count], self.in_flight[count:]
        if done:
            self.processed = done[-1]
            for stage in self.fleet.stages:
                stage.processed(done)

    def settle(self) -> None:
        """Everything outstanding ends; then nothing may be on record."""
        for use in list(self.uses.values()):
            self.release(use)
        self.process(len(self.in_flight))
        self.step()
        while self.reports:
            self.report()
        for stage in self.fleet.stages:
            stage.check_quiet()

    def finish(self) -> None:
        """Ends everything: free equals boot everywhere."""
        for holder in sorted(self.holders.values(), key=lambda h: not h.request):
            self.drop(holder)
        self.settle()
        self.logical.check_idle()
        self.fleet.mirror.check_idle()
        for stage in self.fleet.stages:
            stage.check_idle()
        if self.logical.max_extra() != self.logical.most_ever():
            raise StressFault("ledger_leak", f"{self.logical.max_extra()} of {self.logical.most_ever()} pages are free")

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens need."""
        return math.ceil(tokens / self.page_size)
