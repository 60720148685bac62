"""Drivers for tests: one logical chain, a mirror, and a physical chain with real bytes for every rank of every stage.

`World` steps them together and checks after every step what must always hold: equal effects and digests on the ranks of
a stage, live units as counted, no byte in two units, and the right contents in every live unit on every rank, however
late its forwards and copies run. `OneBand` is the small one: full attention only, one rank, no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from allocator.checks import STRICT, Checks
from allocator.columns import Int32s, Int64s
from allocator.effects import Effect, HostWait, WaitCopy, WaitForward, canonical_bytes
from allocator.geometry import Geometry, StageGeometry
from allocator.logical.chain import LogicalChain
from allocator.logical.mirror import LogicalMirror
from allocator.ops import Flush, Free, Op
from allocator.physical.chain import PhysicalChain
from tests.allocator.byte_arena import PACES, Arena, Pace, Place
from tests.allocator.shapes import full_geometry, hybrid_geometry, ids, stage_of

__all__ = ["OneBand", "World", "full_geometry", "hybrid_geometry", "ids", "room", "stage_of", "waits"]

Ids = Mapping[int, Sequence[int]]
"""Virtual ids by band."""


def room(room_bytes: int, *unit_bytes: int) -> StageGeometry:
    """A stage whose chain has `room_bytes`, behind the sinks and a padding slot: bands as in `stage_of`."""
    state = unit_bytes[0] if len(unit_bytes) > 1 else 0
    sink = max(unit_bytes[1:] if len(unit_bytes) > 1 else unit_bytes)
    start = (-(-sink // state) + 1) * state if state else sink
    return stage_of(start + room_bytes, start, unit_bytes)


def waits(effects: Iterable[Effect]) -> list[tuple[str, int]]:
    """The waits among effects: what is waited for, and its number."""
    out: list[tuple[str, int]] = []
    for effect in effects:
        match effect:
            case WaitForward(seq):
                out.append(("forward", seq))
            case WaitCopy(use):
                out.append(("copy", use))
            case HostWait(use):
                out.append(("host", use))
            case _:
                pass
    return out


class Rank(NamedTuple):
    """One rank: its layout, its bytes."""

    chain: PhysicalChain
    arena: Arena


@dataclass
class OpenUse:
    """A use that is not over: per place the value that it carries (None: nobody knows)."""

    kind: str
    values: dict[Place, int | None]
    slots: dict[Place, int] = field(default_factory=dict)
    freed: set[Place] = field(default_factory=set)


class World:
    """All chains of an epoch. Operations join the step being formed; `step` sends it."""

    def __init__(self, geometry: Geometry, paces: Sequence[Pace] = PACES) -> None:
        self.geometry = geometry
        self.bands = len(geometry.stages[0].bands)
        self.kinds = [band.kind for band in geometry.stages[0].bands]
        self.owner = self.bands - 1
        self.logical = LogicalChain(geometry, Checks(STRICT))
        self.mirror = LogicalMirror(geometry, Checks(STRICT))
        self.stages = [[self._rank(stage, pace) for pace in paces] for stage in range(len(geometry.stages))]
        self.known: dict[Place, int] = {}  # contents of each live unit that anyone may rely on
        self.host: dict[Place, int | None] = {}  # contents of host slots
        self.uses: dict[int, OpenUse] = {}
        self.effects: list[list[Effect]] = []  # of the newest step, per stage
        self.launch_waits: list[Effect] = []  # what the newest forward waited for on the first stage
        self.in_flight: list[int] = []
        self.seq = self.processed = 0
        self._ops: list[Op] = []
        self._released: list[int] = []
        self._value = 0
        self._slot = 0
        self._published = 0

    def _rank(self, stage: int, pace: Pace) -> Rank:
        chain = PhysicalChain(self.geometry, stage, Checks(STRICT))
        resting = [chain.resting_unit(band) for band in range(self.bands)]
        return Rank(chain, Arena(self.geometry, stage, resting, pace, self._peer_values))

    # --- operations of the step being formed -----------------------------------------------------------------------

    def take(self, *demand: int, onto: Ids | None = None, bound: Ids | None = None) -> list[list[int]]:
        """Takes units jointly; the virtual ids per band."""
        taken = self.logical.take(demand, self._columns(bound) if bound else None, self._columns(onto or {}))
        self._ops.append(taken.op)
        for band, column in enumerate(taken.ids):
            if self.kinds[band] != "state":
                self.known.update({(band, int(one)): 0 for one in column})
        return [column.tolist() for column in taken.ids]

    def free(self, parts: Ids) -> Free:
        """Frees ids."""
        op = self.logical.free(self._columns(parts))
        self._ops.append(op)
        for place in _places(parts):
            self.known.pop(place, None)
            for use in self.uses.values():
                use.freed.add(place)
        return op

    def flush(self, moves_max: int = 8) -> None:
        """Opportunistic compaction."""
        self._ops.append(Flush(moves_max))

    def rebind(self, band: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Gives window units to other pages."""
        self._ops.append(self.logical.rebind(band, ids(*sources), ids(*targets)))
        moved = {
            (band, target): self.known.pop((band, source)) for source, target in zip(sources, targets, strict=True)
        }
        self.known.update(moved)

    def copy_state(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies states."""
        self._ops.append(self.logical.copy_state(ids(*sources), ids(*targets)))
        for source, target in zip(sources, targets, strict=True):
            self.known.pop((0, target), None)
            if (0, source) in self.known:
                self.known[0, target] = self.known[0, source]

    def backup(self, use: int, parts: Ids) -> dict[int, list[int]]:
        """A host copy of these units; the host slots, in the order of the ids."""
        slots = {band: [self._next_slot() for _ in column] for band, column in parts.items()}
        self._ops.append(self.logical.backup(use, self._columns(parts), self._slots(slots)))
        at = {(band, one): slot for band in parts for one, slot in zip(parts[band], slots[band], strict=True)}
        self.uses[use] = OpenUse("backup", {place: self.known.get(place) for place in at}, at)
        return slots

    def load(self, use: int, parts: Ids, slots: Ids) -> None:
        """Loads these units from host slots; nobody relies on them until it is over."""
        self._ops.append(self.logical.load(use, self._columns(parts), self._slots(slots)))
        values = {
            (band, one): self.host[band, slot]
            for band in parts
            for one, slot in zip(parts[band], slots[band], strict=True)
        }
        self.uses[use] = OpenUse("load", values)
        for place in values:
            self.known.pop(place, None)

    def send(self, use: int, parts: Ids) -> None:
        """Our engine reads these units."""
        self._ops.append(self.logical.send(use, self._columns(parts)))
        self.uses[use] = OpenUse("send", {place: self.known.get(place) for place in _places(parts)})

    def fix(self, use: int) -> None:
        """Nobody can wait for this send any more."""
        self._ops.append(self.logical.fix(use))
        self._published = use

    def hold(self, use: int, parts: Ids) -> None:
        """These units await a peer's rows."""
        self._ops.append(self.logical.hold(use, self._columns(parts)))
        self.uses[use] = OpenUse("hold", {})
        for place in _places(parts):
            self.known.pop(place, None)

    def publish(self, use: int, parts: Ids, writes: bool = True) -> None:
        """A peer learns where these units lie, to write or to read them."""
        self._ops.append(self.logical.publish(use, self._columns(parts)))
        self._published = use
        if writes:
            self.uses[use] = OpenUse("receive", {place: self._next_value() for place in _places(parts)})
            for place in _places(parts):
                self.known.pop(place, None)
        else:
            self.uses[use] = OpenUse("pull", {place: self.known.get(place) for place in _places(parts)})

    def end(self, *uses: int) -> Free:
        """These uses are proved to be over."""
        op = self.logical.end_uses(uses)
        self._ops.append(op)
        self._released += uses
        for use in map(self.uses.__getitem__, uses):
            if use.kind == "backup":
                self.host.update({(place[0], slot): use.values[place] for place, slot in use.slots.items()})
        return op

    def report(self) -> None:
        """The ranks' reports of where the fixed units lie have come, for all steps so far."""
        self.logical.extents_fixed(
            tuple(tuple(ranks[0].chain.fixed_extents()) for ranks in self.stages), self._published
        )

    def process(self, forwards: int = 1) -> None:
        """The core consumed the oldest forwards' results; the next step says so."""
        for _ in range(forwards):
            self.processed = self.in_flight.pop(0)

    # --- the step --------------------------------------------------------------------------------------------------

    def step(self, writes: Ids | None = None, unknown: Sequence[int] = ()) -> list[Effect]:
        """Sends the step; effects of its ops on the first stage.

        With `writes` (maybe empty) it has a forward that reads everything known, then writes these units; the chains
        are not told which ones in the bands `unknown`.
        """
        self.seq += 1
        ops, self._ops = self._ops, []
        released, self._released = self._released, []
        digest = self.logical.step_digest(self.seq, ops, released)
        assert self.mirror.apply_step(self.seq, ops, released) == digest
        self.effects = [self._apply(ranks, ops, released) for ranks in self.stages]
        for use in released:
            self._over(use)
        if writes is not None:
            self._launch(writes, unknown)
        self.check()
        return self.effects[0]

    def _apply(self, ranks: list[Rank], ops: list[Op], released: list[int]) -> list[Effect]:
        effects: list[Effect] = []
        seen: list[tuple[bytes, bytes, object]] = []
        for chain, arena in ranks:
            chain.begin_step(self.seq, self.processed, released)
            arena.processed(self.processed)
            for use in released:
                arena.release(use)
            effects = chain.apply(ops)
            arena.execute(effects)
            seen.append((canonical_bytes(effects), chain.end_step(), chain.fixed_extents()))
        assert seen == seen[:1] * len(seen), "ranks of one stage differ"
        return effects

    def _launch(self, writes: Ids, unknown: Sequence[int]) -> None:
        told = {band: None if band in unknown else ids(*column) for band, column in writes.items()}
        told.update(dict.fromkeys(unknown))
        values = {place: self._next_value() for place in _places(writes)}
        for stage, ranks in enumerate(self.stages):
            stored = [bool(band.unit_bytes) for band in self.geometry.stages[stage].bands]
            reads = [(place, value) for place, value in self.known.items() if stored[place[0]]]
            here = [(place, value) for place, value in values.items() if stored[place[0]]]
            seen = []
            for chain, arena in ranks:
                late = chain.launched(self.seq, told)
                assert len(waits(late)) == len(late), "a launch only waits"
                arena.execute(late)
                arena.launch(self.seq, reads, here)
                seen.append(late)
            assert seen == seen[:1] * len(seen), "ranks of one stage wait for different things"
            if stage == 0:
                self.launch_waits = seen[0]
        self.known.update(values)
        self.in_flight.append(self.seq)

    def _over(self, number: int) -> None:
        """A use is over: what it carried is where it belongs, on every rank."""
        use = self.uses.pop(number)
        for stage, ranks in enumerate(self.stages):
            stored = [bool(band.unit_bytes) for band in self.geometry.stages[stage].bands]
            for _, arena in ranks:
                wanted = [(place, value) for place, value in use.values.items() if stored[place[0]]]
                if use.kind == "backup":
                    found = [arena.host[place[0], use.slots[place]] for place, _ in wanted]
                elif use.kind in ("send", "pull"):
                    found = [value for _, value in arena.carried.pop(number, [])]
                else:
                    continue
                assert len(found) == len(wanted)
                pairs = zip(found, wanted, strict=True)
                assert all(value in (None, got) for got, (_, value) in pairs), f"{use.kind} {number} carried {found}"
        if use.kind in ("load", "receive"):
            for place, value in use.values.items():
                if place not in use.freed and place not in self.known and value is not None:
                    self.known[place] = value

    # --- reading ---------------------------------------------------------------------------------------------------

    def chain(self, stage: int = 0) -> PhysicalChain:
        """The first rank's layout."""
        return self.stages[stage][0].chain

    def where(self, band: int, column: Sequence[int], stage: int = 0) -> list[int]:
        """Physical units of virtual ids."""
        return [int(unit) for unit in self.chain(stage).physical(band, ids(*column))]

    def counts(self, band: int, stage: int = 0) -> tuple[int, int, int, int]:
        """Live, hole, pending and beyond units."""
        live, hole, pending, beyond = self.chain(stage).band_counts().reshape(-1, 4)[band].tolist()
        return live, hole, pending, beyond

    def check(self) -> None:
        """What must hold between steps, on every rank."""
        live = self.logical.live_units()
        for stage, ranks in enumerate(self.stages):
            bands = [b for b, band in enumerate(self.geometry.stages[stage].bands) if band.unit_bytes]
            for chain, arena in ranks:
                counts = chain.band_counts().reshape(-1, 4)
                assert [int(counts[b, 0]) for b in bands] == [live[b] for b in bands], "live units differ"
                assert not arena.data[: self._sink_bytes(stage)].any(), "a sink was written"
                self._check_places(chain, arena, bands)

    def _check_places(self, chain: PhysicalChain, arena: Arena, bands: list[int]) -> None:
        """No byte lies in two live units, tables agree, and contents are right."""
        taken = np.zeros(arena.data.size, dtype=np.uint8)
        late = arena.unfinished()
        for band in bands:
            column = self.mirror.live_ids(band)
            units = chain.physical(band, column)
            assert np.array_equal(units, arena.tables[band][column]), "effects and the chain's table differ"
            size = arena.unit_bytes[band]
            rows = taken[: taken.size // size * size].reshape(-1, size)
            rows[units] += 1
            for one, unit in zip(column.tolist(), units.tolist(), strict=True):
                wanted = self.known.get((band, one))
                if wanted is not None and (band, unit) not in late:
                    found = arena.value((band, unit))
                    assert found == wanted, f"id {one} of band {band} holds {found}, not {wanted}, in unit {unit}"
        assert taken.max(initial=0) <= 1, "two units share bytes"

    def _sink_bytes(self, stage: int) -> int:
        shape = self.geometry.stages[stage]
        return max((band.unit_bytes for band in shape.bands if band.kind != "state"), default=0)

    def drain(self) -> None:
        """Everything ends; then nothing is left on record anywhere."""
        self.step()
        if self.uses:
            self.end(*sorted(self.uses))
        parts = {band: self.logical.live_ids(band).tolist() for band in range(self.bands)}
        if any(parts.values()):
            self.free(parts)
        self.process(len(self.in_flight))
        self.step()
        self.step()
        self.logical.check_idle()
        self.mirror.check_idle()
        for ranks in self.stages:
            for chain, _ in ranks:
                chain.check_idle()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _columns(self, parts: Ids) -> list[Int32s | None]:
        return [ids(*parts[band]) if parts.get(band) else None for band in range(self.bands)]

    def _slots(self, slots: Ids) -> list[Int64s | None]:
        return [np.array(slots[band], dtype=np.int64) if slots.get(band) else None for band in range(self.bands)]

    def _peer_values(self, use: int, band: int, virtual: Int32s) -> list[int] | None:
        values = self.uses[use].values
        if self.uses[use].kind == "pull":
            return None
        out = [values[band, one] for one in virtual.tolist()]
        return [value for value in out if value is not None]

    def _next_value(self) -> int:
        self._value = self._value % 200 + 1
        return self._value

    def _next_slot(self) -> int:
        self._slot += 1
        return self._slot - 1


def _places(parts: Ids) -> list[Place]:
    return [(band, one) for band, column in parts.items() for one in column]


@dataclass
class OneBand:
    """One logical chain, one mirror and one physical chain over a full-attention band, stepped together."""

    units: int
    seq: int = 0
    processed: int = 0
    in_flight: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.geometry = full_geometry(self.units)
        self.logical = LogicalChain(self.geometry, Checks(STRICT))
        self.mirror = LogicalMirror(self.geometry, Checks(STRICT))
        self.physical = PhysicalChain(self.geometry, 0, Checks(STRICT))
        self._ops: list[Op] = []

    def take(self, pages: int) -> list[int]:
        """Takes pages in the step being formed; their virtual ids."""
        taken = self.logical.take((pages,))
        self._ops.append(taken.op)
        return [int(page) for page in taken.ids[0]]

    def free(self, pages: list[int]) -> None:
        """Frees pages in the step being formed."""
        self._ops.append(self.logical.free([ids(*pages)]))

    def flush(self, moves_max: int = 8) -> None:
        """Asks for a flush in the step being formed."""
        self._ops.append(Flush(moves_max))

    def step(self, writes: list[int] | None = None) -> list[Effect]:
        """Sends the step; with `writes` (maybe empty) it has a forward that writes these pages."""
        self.seq += 1
        ops, self._ops = self._ops, []
        wanted = self.logical.step_digest(self.seq, ops)
        assert self.mirror.apply_step(self.seq, ops) == wanted
        self.physical.begin_step(self.seq, self.processed)
        effects = self.physical.apply(ops)
        self.physical.end_step()
        if writes is not None:
            self.physical.launched(self.seq, {0: ids(*writes)})
            self.in_flight.append(self.seq)
        return effects

    def process(self, forwards: int = 1) -> None:
        """The core consumed the oldest forwards' results; the next step says so."""
        for _ in range(forwards):
            self.processed = self.in_flight.pop(0)

    def where(self, pages: list[int]) -> list[int]:
        """Physical units of virtual pages."""
        return [int(unit) for unit in self.physical.physical(0, ids(*pages))]

    def counts(self) -> dict[str, int]:
        """Units of the band by state."""
        return dict(zip(("live", "hole", "pending", "beyond"), map(int, self.physical.band_counts()), strict=True))
