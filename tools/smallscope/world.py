"""Tiny worlds and everything that can happen in them: one step per action, on one logical and all physical chains.

Owns the shapes that are explored, the state of a world (chains, symbolic devices, and a model of what is live and in
use, kept apart from the chains), the list of actions of a state in canonical order, and how an action becomes a step.
Must never choose at random. What must hold after each step is `tools.explore_checks`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from allocator.checks import WARN, Checks
from allocator.columns import Int32s
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.logical.chain import LogicalChain
from allocator.physical.chain import PhysicalChain
from tools.smallscope.copies import clone
from tools.smallscope.device import SymbolicDevice
from tools.smallscope.exact import ExactStage

IN_FLIGHT_MAX = 2
REPORTS_MAX = 2  # so many reports of extents may be on their way before something else is published

KEPT = ("send", "fix", "lend", "receive")
"""Kinds of uses whose units, freed, wait for the release."""
FIXED = ("fix", "lend", "receive")
"""Kinds of uses whose units stay where they are."""
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "backup": ("hold", "receive"),
    "send": ("hold", "receive"),
    "lend": ("hold", "receive"),
    "load": ("hold", *FIXED),
    "hold": ("hold", *FIXED),
}
"""Which open uses of a unit forbid that another of this kind begins on it."""

Units = frozenset[tuple[int, int]]
"""Units as (band, virtual id)."""


class Shape(NamedTuple):
    """Band kinds in chain order, and per stage the unit bytes of each band (0: the stage stores none)."""

    kinds: tuple[str, ...]
    stages: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """Like `state+full 3,2/1,2`."""
        sizes = "/".join(",".join(map(str, stage)) for stage in self.stages)
        return f"{'+'.join(self.kinds)} {sizes}"


SHAPES: dict[int, tuple[Shape, ...]] = {
    1: (Shape(("full",), ((2,),)),),
    2: (
        Shape(("window", "full"), ((2, 3),)),
        Shape(("window", "full"), ((1, 1),)),
        Shape(("state", "full"), ((3, 2),)),
        Shape(("state", "full"), ((2, 1), (1, 3))),
        Shape(("window", "full"), ((3, 1), (0, 2))),
    ),
    3: (
        Shape(("state", "window", "full"), ((3, 1, 2),)),
        Shape(("state", "window", "full"), ((1, 2, 1),)),
        Shape(("state", "window", "full"), ((2, 3, 2), (1, 0, 2))),
        Shape(("state", "window", "full"), ((1, 2, 0), (2, 0, 3))),
        Shape(("window", "window", "full"), ((2, 3, 1),)),
    ),
}
"""The explored shapes by number of bands; coprime and equal unit bytes, and stages that lack a band."""


class Limits(NamedTuple):
    """What bounds a world besides its depth."""

    units: int  # bytes of the chain: so many of the largest unit, and one byte
    uses: int = 1  # open host copies and transfers at a time


def geometry_of(shape: Shape, units: int) -> Geometry:
    """A geometry whose arenas hold about `units` of the largest unit of each stage."""
    stages, pages = [], []
    for sizes in shape.stages:
        largest = max(sizes)
        slot = sizes[0] if shape.kinds[0] == "state" else 0
        start = largest + slot + (-(largest + slot) % slot if slot else 0)
        arena = start + units * largest + 1
        bands = []
        for number, (kind, size) in enumerate(zip(shape.kinds, sizes, strict=True)):
            window = 64 >> number if kind == "window" else 0
            bands.append(BandGeometry(f"window:{window}" if window else kind, kind, size, window))  # type: ignore[arg-type]
        stages.append(StageGeometry(arena, start, bands))
        pages.append((arena - start) // sizes[-1] if sizes[-1] else units)
    slots = units if shape.kinds[0] == "state" else 0
    return Geometry(16, min(min(pages), units + 2), slots, stages)


class Use(NamedTuple):
    """An open use: what it is, and the units it names, as (band, virtual id)."""

    kind: str  # backup, load, hold, send, fix (a send for good), lend (published to read), receive (to write)
    units: Units


class Action(NamedTuple):
    """Something that can happen: its kind and what it is about."""

    kind: str
    about: tuple[Any, ...] = ()

    def text(self) -> str:
        """For findings."""
        return f"{self.kind}{list(self.about)!r}" if self.about else self.kind


class World:
    """What does not change: geometry, limits, and the exact yardstick of each stage."""

    def __init__(self, shape: Shape, limits: Limits) -> None:
        self.shape, self.limits = shape, limits
        self.geometry = geometry_of(shape, limits.units)
        self.exact = tuple(ExactStage(stage) for stage in self.geometry.stages)
        self.owner = len(shape.kinds) - 1
        self.windows = tuple(band for band, kind in enumerate(shape.kinds) if kind == "window")
        self.state = 0 if shape.kinds[0] == "state" else -1
        self.ids = tuple(
            self.geometry.virtual_slots if kind == "state" else self.geometry.virtual_pages for kind in shape.kinds
        )
        self.id_columns = tuple(np.arange(1, count + 1, dtype=np.int32) for count in self.ids)
        self.demands = tuple(self._demands())
        self.answers: dict[Any, tuple[tuple[bool, bool], ...]] = {}  # by brute force: each demand now, and ever

    def _demands(self) -> list[tuple[int, ...]]:
        """Every mix of up to 2 units of each band and up to 3 in all."""
        out: list[tuple[int, ...]] = [()]
        for band in range(len(self.shape.kinds)):
            most = 1 if band == self.state and len(self.shape.kinds) > 2 else 2
            out = [(*head, count) for head in out for count in range(most + 1)]
        return [demand for demand in out if 0 < sum(demand) <= 3]


_PLAIN: tuple[str, ...] = ("seq", "processed", "in_flight", "slots", "quarantine", "next_use")
_PLAIN += ("newest", "unreported", "caps", "through", "known", "reports")


class State:
    """A reachable state; `apply` makes the next one out of it, in place."""

    __slots__ = (
        "caps",
        "chains",
        "devices",
        "in_flight",
        "known",
        "logical",
        "newest",
        "next_use",
        "pages",
        "processed",
        "quarantine",
        "reports",
        "seq",
        "slots",
        "through",
        "unreported",
        "uses",
        "world",
    )

    def __init__(self, world: World) -> None:
        self.world = world
        geometry = world.geometry
        checks = Checks(WARN)
        self.logical = LogicalChain(geometry, checks)
        self.chains = [PhysicalChain(geometry, stage, checks) for stage in range(len(geometry.stages))]
        self.devices = [
            SymbolicDevice(stage, world.ids, [chain.resting_unit(band) for band in range(len(world.ids))])
            for stage, chain in zip(geometry.stages, self.chains, strict=True)
        ]
        self.seq = self.processed = 0
        self.in_flight: tuple[int, ...] = ()
        self.pages: dict[int, int] = {}  # owned pages -> mask of the window bands whose unit they own
        self.slots: tuple[int, ...] = ()
        self.quarantine: Units = frozenset()
        self.uses: dict[int, Use] = {}
        self.next_use = 1
        self.newest = 0  # the newest publication in the order of the ops
        self.unreported: tuple[int, ...] = ()  # publications, over or not, that no report that arrived covers
        self.caps: tuple[int, ...] = ()  # counts that no band may exceed until then
        self.through = 0  # the newest publication of the newest report that arrived
        self.known: tuple[Any, ...] = self.nothing_fixed()  # extents by the reports that arrived
        self.reports: tuple[tuple[int, Any], ...] = ()  # on their way: newest publication, extents

    def copy(self) -> State:
        """A state that goes on by itself."""
        out = State.__new__(State)
        out.world = self.world
        out.logical = clone(self.logical)
        out.chains = [clone(chain) for chain in self.chains]
        out.devices = [device.copy() for device in self.devices]
        out.pages, out.uses = self.pages.copy(), self.uses.copy()
        for name in _PLAIN:
            setattr(out, name, getattr(self, name))
        return out

    # --- what is there -------------------------------------------------------------------------------------------

    def counts(self) -> tuple[int, ...]:
        """Live units per band, quarantined ones among them, by this model."""
        out = [0] * len(self.world.ids)
        for mask in self.pages.values():
            out[self.world.owner] += 1
            for band in self.world.windows:
                out[band] += mask >> band & 1
        if self.world.state >= 0:
            out[self.world.state] = len(self.slots)
        for band, _ in self.quarantine:
            out[band] += 1
        return tuple(out)

    def places(self, virtual: int, bands: tuple[int, ...]) -> tuple[int, ...]:
        """Physical units of an id in these bands on every stage, -1 where it has none: what identifies it."""
        return tuple(device.tables[band][virtual] for device in self.devices for band in bands)

    def sorted_pages(self) -> list[int]:
        """Owned pages in canonical order: by where they lie."""
        bands = (self.world.owner, *self.world.windows)
        return sorted(self.pages, key=lambda page: (self.places(page, bands), page))

    def sorted_slots(self) -> list[int]:
        """Owned slots in canonical order."""
        return sorted(self.slots, key=lambda slot: (self.places(slot, (self.world.state,)), slot))

    def owned_units(self) -> list[tuple[int, int]]:
        """Every unit that is not quarantined."""
        out = [unit for page in self.pages for unit in self.units_of(page)]
        return out + [(self.world.state, slot) for slot in self.slots]

    def units_of(self, page: int) -> Units:
        """A page's units: of the owner, and of its windows."""
        mask = self.pages[page]
        return frozenset([(self.world.owner, page), *((b, page) for b in self.world.windows if mask >> b & 1)])

    def named_by(self, *kinds: str) -> Units:
        """Units that open uses of these kinds name."""
        return frozenset().union(*(use.units for use in self.uses.values() if use.kind in kinds))

    def nothing_fixed(self) -> tuple[Any, ...]:
        """Extents of a world without published units."""
        return tuple((None,) * len(self.world.ids) for _ in self.world.geometry.stages)

    def extents(self) -> tuple[Any, ...]:
        """What the ranks report as fixed now."""
        return tuple(tuple(chain.fixed_extents()) for chain in self.chains)

    # --- what can happen -----------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        """Everything that can happen next except what is refused, in canonical order."""
        out: list[Action] = []
        for demand in self.world.demands:
            out += self._takes(demand)
        self._releases_of_memory(out)
        self._forwards(out)
        out += [Action("flush", (1,)), Action("flush", (8,))]
        self._state_actions(out)
        self._use_actions(out)
        return out

    def _takes(self, demand: tuple[int, ...]) -> list[Action]:
        """A demand's takes: windows bind to new pages, the rest to the first, or the last, owned ones without one."""
        variants: list[Action] = []
        for last in (False, True):
            onto: list[tuple[int, ...]] = []
            for band in range(len(demand)):
                rest = demand[band] - demand[self.world.owner] if band in self.world.windows else 0
                if rest <= 0:
                    onto.append(())
                    continue
                bare = self._without(band)
                if len(bare) < rest:
                    return []
                onto.append(tuple(sorted(bare[-rest:] if last else bare[:rest])))
            action = Action("take", (demand, tuple(onto)))
            if action not in variants:
                variants.append(action)
        if self.logical.refusal(demand) is not None:
            return []
        return variants

    def _without(self, band: int) -> list[int]:
        """Owned pages without a unit of a window band, not even a quarantined one."""
        pages = self.sorted_pages()
        return [page for page in pages if not self.pages[page] >> band & 1 and (band, page) not in self.quarantine]

    def _releases_of_memory(self, out: list[Action]) -> None:
        held = self.named_by("hold")
        for page in self.sorted_pages():
            units = self.units_of(page)
            if not units & held:
                out.append(Action("free", (page,)))
            for band in self.world.windows:
                if (band, page) in units and (band, page) not in held:
                    out.append(Action("retire", (band, page)))
        for slot in self.sorted_slots():
            if (self.world.state, slot) not in held:
                out.append(Action("free_slot", (slot,)))

    def _forwards(self, out: list[Action]) -> None:
        if self.in_flight:
            out.append(Action("process"))
        if len(self.in_flight) == IN_FLIGHT_MAX or not (self.pages or self.slots):
            return
        out += [Action("launch", ("all",)), Action("launch", ("none",)), Action("launch", ("unknown",))]
        fixed = self.named_by("hold", *FIXED)
        pages = [page for page in self.sorted_pages() if (self.world.owner, page) not in fixed]
        if len(pages) > 1:
            out += [Action("launch", ("page", pages[0])), Action("launch", ("page", pages[-1]))]

    def _state_actions(self, out: list[Action]) -> None:
        kept = self.named_by("hold", *FIXED)
        slots = self.sorted_slots()
        written = self.named_by("hold", "receive")
        for source in slots:
            for target in slots:
                if source == target or (self.world.state, source) in written:
                    continue
                if (self.world.state, target) not in kept:
                    out.append(Action("copy_state", (source, target)))
        held = self.named_by("hold")
        for band in self.world.windows:
            for source in self.sorted_pages():
                if not self.pages[source] >> band & 1 or (band, source) in held:
                    continue
                out += [Action("rebind", (band, source, target)) for target in self._without(band)]

    def _use_actions(self, out: list[Action]) -> None:
        may_publish = len(self.reports) < REPORTS_MAX
        fixed_for_good = self.named_by("fix")
        for use, record in self.uses.items():
            out.append(Action("release", (use,)))
            if may_publish and record.kind == "hold" and not record.units & fixed_for_good:
                out.append(Action("publish", (use,)))
            if may_publish and record.kind == "send":
                out.append(Action("fix", (use,)))
        if self.reports:
            out.append(Action("report", (self.reports[0][0],)))
        if len(self.uses) >= self.world.limits.uses:
            return
        forbidden = {kind: self.named_by(*kinds) for kind, kinds in FORBIDDEN.items()}
        wholes = [self.units_of(page) for page in self.sorted_pages()]
        wholes += [frozenset([(self.world.state, slot)]) for slot in self.sorted_slots()]
        for units in wholes:
            for kind, others in forbidden.items():
                if not units & others and (kind != "lend" or may_publish):
                    out.append(Action(kind, (tuple(sorted(units)),)))

    # --- columns -------------------------------------------------------------------------------------------------

    def parts(self, units: Units) -> list[Int32s | None]:
        """Units as id columns per band."""
        out: list[Int32s | None] = []
        for band in range(len(self.world.ids)):
            ids = sorted(virtual for b, virtual in units if b == band)
            out.append(np.array(ids, dtype=np.int32) if ids else None)
        return out


def ids_of(*values: int) -> Int32s:
    """An id column."""
    return np.array(values, dtype=np.int32)
