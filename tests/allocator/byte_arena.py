"""One rank's memory in a test: real bytes, effects performed in order, other streams as late as they may be.

Schedule work runs at once. A forward, a host copy or a transfer runs at once on a prompt rank; on a late one only when
something waits for it, or when the step stream says that it is over. So a missing wait is a wrong byte on some rank.
Every unit is filled with one value: 0 from zeroing, else what a forward, a load or a peer wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from allocator.columns import I32, Int32s, i32, i64
from allocator.effects import (
    Bind,
    Copy,
    Effect,
    HostRead,
    HostWait,
    HostWrite,
    PublishUnits,
    SendUnits,
    WaitCopy,
    WaitForward,
    Zero,
)
from allocator.geometry import Geometry

JUNK = 0xEE  # what an earlier user of the memory left
TORN = -1  # a unit whose bytes differ
PADDING = 0xDD  # what a forward's padding rows write

Place = tuple[int, int]
"""A band, and a unit, virtual id or host slot of it."""


class Pace(NamedTuple):
    """Which work of a rank runs as late as it may."""

    forwards_late: bool = False
    uses_late: bool = False


PACES = (Pace(False, False), Pace(True, True), Pace(False, True), Pace(True, False))


@dataclass
class Flight:
    """A launched forward, with addresses as they were then: what it must read, and what it writes."""

    seq: int
    reads: list[tuple[Place, int]]
    writes: list[tuple[Place, int]]
    ran: bool = False


@dataclass
class Submitted:
    """A use under way: pieces of work that run behind forward `behind`."""

    behind: int
    published: bool
    work: list[Callable[[], None]] = field(default_factory=list)


class Arena:
    """`peer_values(use, band, ids)` is what the peer of a published use writes into those units; None: it reads."""

    def __init__(
        self,
        geometry: Geometry,
        stage: int,
        resting: Sequence[int],
        pace: Pace,
        peer_values: Callable[[int, int, Int32s], list[int] | None],
    ) -> None:
        shape = geometry.stages[stage]
        self.unit_bytes = [band.unit_bytes for band in shape.bands]
        self.start_bytes = shape.chain_start_bytes
        self.data = np.full(shape.arena_bytes, JUNK, dtype=np.uint8)
        self.data[: self.start_bytes] = 0
        ids = [geometry.virtual_slots if band.kind == "state" else geometry.virtual_pages for band in shape.bands]
        self.tables = [np.full(n + 1, unit, dtype=I32) for n, unit in zip(ids, resting, strict=True)]
        self.padding = [
            (index, unit) for index, unit in enumerate(resting) if shape.bands[index].kind == "state" and unit
        ]
        self.host: dict[Place, int] = {}
        self.carried: dict[int, list[tuple[int, int]]] = {}  # use -> (band, value) of each unit that left the rank
        self._pace = pace
        self._peer_values = peer_values
        self._flights: list[Flight] = []
        self._uses: dict[int, Submitted] = {}
        self._over: set[int] = set()  # waited for, not released
        self._newest = 0

    # --- bytes ---------------------------------------------------------------------------------------------------

    def unit(self, place: Place) -> np.ndarray:
        """The bytes of a unit."""
        size = self.unit_bytes[place[0]]
        return self.data[place[1] * size : (place[1] + 1) * size]

    def value(self, place: Place) -> int:
        """What a unit is filled with."""
        unit = self.unit(place)
        return int(unit[0]) if (unit == unit[0]).all() else TORN

    def at(self, place: Place) -> Place:
        """The band and unit of a band and virtual id."""
        return place[0], int(self.tables[place[0]][place[1]])

    def unfinished(self) -> set[Place]:
        """Units that forwards have yet to write."""
        return {place for flight in self._flights if not flight.ran for place, _ in flight.writes}

    # --- progress ------------------------------------------------------------------------------------------------

    def processed(self, through: int) -> None:
        """The host has seen these forwards end."""
        self._run_forwards(through)
        self._flights = [flight for flight in self._flights if flight.seq > through]

    def release(self, use: int) -> None:
        """The use is over on every rank."""
        if use in self._uses:
            self._run_use(use)
        self._over.discard(use)

    def launch(self, seq: int, reads: list[tuple[Place, int]], writes: list[tuple[Place, int]]) -> None:
        """A forward that reads and writes virtual ids; addresses are those of now."""
        padding = [(place, PADDING) for place in self.padding]
        flight = Flight(
            seq,
            [(self.at(place), value) for place, value in reads],
            [(self.at(place), value) for place, value in writes] + padding,
        )
        assert all(place[1] * self.unit_bytes[place[0]] >= self.start_bytes for place, _ in flight.reads), "a sink"
        self._flights.append(flight)
        self._newest = seq
        if not self._pace.forwards_late:
            self._run_forwards(seq)

    def execute(self, effects: Sequence[Effect]) -> None:
        """Performs effects in order."""
        for effect in effects:
            self._perform(effect)

    # --- effects -------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case WaitForward(seq):
                assert seq <= self._newest, f"a wait for forward {seq}, which was not launched"
                self._run_forwards(seq)
            case WaitCopy(use) | HostWait(use):
                assert use in self._uses, f"a wait for use {use}, which is not under way"
                assert not self._uses[use].published, f"a wait for use {use}, which a peer may keep for ever"
                self._run_use(use)
                self._over.add(use)
            case Zero(band, column):
                for unit in i32(column).tolist():
                    self._inside(band, unit)
                    self.unit((band, unit))[:] = 0
            case Copy(band, sources, targets):
                self._copy(band, i32(sources).tolist(), i32(targets).tolist())
            case Bind(band, virtual, physical):
                self.tables[band][i32(virtual)] = i32(physical)
            case _:
                self._submit(effect)

    def _submit(self, effect: Effect) -> None:
        match effect:
            case HostRead(use, band, units, slots):
                pairs = list(zip(i32(units).tolist(), i64(slots).tolist(), strict=True))
                self._begin(use, self._newest, lambda: self._backup(band, pairs))
            case HostWrite(use, band, units, slots):
                pairs = list(zip(i32(units).tolist(), i64(slots).tolist(), strict=True))
                self._begin(use, self._newest, lambda: self._load(band, pairs))
            case SendUnits(use, band, units, after):
                self._begin(use, after, lambda: self._carry(use, band, i32(units).tolist()))
            case PublishUnits(use, band, virtual, units, after):
                values = self._peer_values(use, band, i32(virtual))
                if values is None:
                    self._begin(use, after, lambda: self._carry(use, band, i32(units).tolist()), published=True)
                else:
                    pairs = list(zip(i32(units).tolist(), values, strict=True))
                    self._begin(use, after, lambda: self._receive(band, pairs), published=True)
            case _:
                raise AssertionError(f"unknown effect {effect!r}")

    def _begin(self, use: int, behind: int, work: Callable[[], None], published: bool = False) -> None:
        assert behind <= self._newest, f"use {use} comes after forward {behind}, which was not launched"
        submitted = self._uses.setdefault(use, Submitted(behind, published))
        submitted.work.append(work)
        if not self._pace.uses_late:
            self._run_forwards(behind)
            work()
            submitted.work.clear()

    def _copy(self, band: int, sources: list[int], targets: list[int]) -> None:
        assert len(set(targets)) == len(targets), "a copy writes a target twice"
        assert not set(sources) & set(targets), "a copy reads what it writes"
        for source, target in zip(sources, targets, strict=True):
            self._inside(band, source)
            self._inside(band, target)
            self.unit((band, target))[:] = self.unit((band, source))

    def _backup(self, band: int, pairs: list[tuple[int, int]]) -> None:
        for unit, slot in pairs:
            self.host[band, slot] = self.value((band, unit))

    def _load(self, band: int, pairs: list[tuple[int, int]]) -> None:
        for unit, slot in pairs:
            self.unit((band, unit))[:] = self.host[band, slot]

    def _carry(self, use: int, band: int, units: list[int]) -> None:
        self.carried.setdefault(use, []).extend((band, self.value((band, unit))) for unit in units)

    def _receive(self, band: int, pairs: list[tuple[int, int]]) -> None:
        for unit, value in pairs:
            self.unit((band, unit))[:] = value

    def _inside(self, band: int, unit: int) -> None:
        size = self.unit_bytes[band]
        assert unit * size >= self.start_bytes, f"unit {unit} of band {band} lies before the chain"
        assert (unit + 1) * size <= self.data.size, f"unit {unit} of band {band} leaves the arena"

    # --- other streams -------------------------------------------------------------------------------------------

    def _run_forwards(self, through: int) -> None:
        for flight in self._flights:
            if flight.seq <= through and not flight.ran:
                for place, wanted in flight.reads:
                    found = self.value(place)
                    assert found == wanted, f"forward {flight.seq} reads {found}, not {wanted}, in unit {place}"
                for place, value in flight.writes:
                    self.unit(place)[:] = value
                flight.ran = True

    def _run_use(self, use: int) -> None:
        submitted = self._uses.pop(use)
        self._run_forwards(submitted.behind)
        for work in submitted.work:
            work()
