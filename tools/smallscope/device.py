"""A symbolic arena: what a rank's device would be doing, with every uncertainty resolved against the allocator.

Owns the bytes of one rank as tags (which band's unit, which virtual id, which byte of it), and what may still touch
which bytes. Must never know how the chain decided. Streams are modeled conservatively: a forward touches all its units
from its launch until the schedule stream waits for it or it is processed, a host copy from its submission until a
wait or its release, a transfer until the host waited for it or its release. The bytes of free units count as
overwritten at once.

What it finds, by name: `lost_write` (a live unit holds other bytes than its writers left), `unordered_overlap` (two
things that no wait orders touch one byte and one of them writes), `fixed_unit` (the bytes of a published unit are
touched), `out_of_chain` (a byte outside the chain is written), `table` (effects and the chain's own id table differ),
`needless_wait` (a wait for a copy or a transfer none of whose bytes is then touched).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allocator.columns import i32
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
from allocator.geometry import StageGeometry
from allocator.ops import CopyState, Fix, Op, Rebind

FOR_GOOD = ("peer", "stuck")
"""Kinds of uses that nothing can wait for."""
ZEROED = -1
UNKNOWN = -2
_BYTES = 64  # room for a byte's offset inside a unit, in a tag
_IDS = 256


class SymbolFault(AssertionError):
    """The chain let the device do what must never happen; `name` says which kind."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


class Flight:
    """A forward that is launched and not processed: the bytes that it may read and write, as masks."""

    __slots__ = ("reads", "seq", "writes")

    def __init__(self, seq: int, reads: int, writes: int) -> None:
        self.seq, self.reads, self.writes = seq, reads, writes


class Using:
    """A host copy or transfer that is not over: bytes read and written, as masks, and what it was waited by."""

    __slots__ = ("cleared", "kind", "reads", "units", "writes")

    def __init__(self, kind: str) -> None:
        self.kind = kind  # copy, send, stuck (a send that nobody may wait for any more) or peer
        self.reads = 0
        self.writes = 0
        self.cleared = False
        self.units: dict[int, int] = {}  # per band, a mask of physical units


class SymbolicDevice:
    """One rank. `tables[band][virtual id]` is the physical unit, or -1."""

    __slots__ = ("copied_bytes", "flights", "resting", "stage", "tables", "uses", "waited")

    def __init__(self, stage: StageGeometry, ids: Sequence[int], resting: Sequence[int]) -> None:
        self.stage = stage
        self.resting = tuple(resting)
        self.tables = [[-1] * (count + 1) for count in ids]
        self.flights: list[Flight] = []
        self.uses: dict[int, Using] = {}
        self.waited = 0
        self.copied_bytes = 0  # by the effects applied last

    def copy(self) -> SymbolicDevice:
        """A device that goes on by itself."""
        out = SymbolicDevice.__new__(SymbolicDevice)
        out.stage, out.resting, out.waited, out.copied_bytes = self.stage, self.resting, self.waited, 0
        out.tables = [table.copy() for table in self.tables]
        out.flights = self.flights.copy()  # flights never change
        out.uses = {}
        for use, held in self.uses.items():
            twin = out.uses[use] = Using(held.kind)
            twin.reads, twin.writes, twin.cleared = held.reads, held.writes, held.cleared
            twin.units = held.units.copy()
        return out

    # --- progress ------------------------------------------------------------------------------------------------

    def processed(self, through: int) -> None:
        """The host saw these forwards end."""
        self.flights = [flight for flight in self.flights if flight.seq > through]

    def released(self, uses: Sequence[int]) -> None:
        """Every rank, or the peer, proved that these uses are over."""
        for use in uses:
            self.uses.pop(use, None)

    # --- a step --------------------------------------------------------------------------------------------------

    def apply(self, ops: Sequence[Op], effects: Sequence[Effect], wanted_write: Mapping[int, bool]) -> None:
        """Executes effects in order; `wanted_write[use]` says whether the peer of a published use writes."""
        self.copied_bytes = 0
        for op in ops:
            held = self.uses.get(op.use) if isinstance(op, Fix) else None
            if held is not None and not held.cleared:
                held.kind = "stuck"
        if not effects:
            return
        content = self._content()
        wanted = self._wanted(ops)
        fresh: set[tuple[int, int]] = set()
        waits = [effect for effect in effects if isinstance(effect, (WaitCopy, HostWait))]
        touched = 0
        for effect in effects:
            if isinstance(effect, Bind):
                touched |= self._bind(effect, fresh)
            else:
                touched |= self._execute(effect, content, wanted_write)
        for wait in waits:
            held = self.uses.get(wait.use)
            if held is not None and not touched & (held.reads | held.writes):
                raise SymbolFault("needless_wait", f"use {wait.use} is waited for, and nothing it touches is used")
        self._check_content(content, wanted, fresh)

    def launch(
        self,
        seq: int,
        effects: Sequence[Effect],
        reads: Mapping[int, Sequence[int]],
        writes: Mapping[int, Sequence[int]],
    ) -> None:
        """Forward `seq` is enqueued behind these effects (waits); it touches units by band and virtual id."""
        for effect in effects:
            if not isinstance(effect, (WaitForward, WaitCopy, HostWait)):
                raise SymbolFault("unordered_overlap", f"{type(effect).__name__} between a step's end and its launch")
            self._execute(effect, [], {})
        read_mask, write_mask = self._units_of(reads), self._units_of(writes)
        for use, held in self.uses.items():
            if held.kind in FOR_GOOD and (held.writes & (read_mask | write_mask) or held.reads & write_mask):
                raise SymbolFault("fixed_unit", f"forward {seq} touches bytes that the peer of use {use} touches")
            if not held.cleared and (held.writes & (read_mask | write_mask) or held.reads & write_mask):
                raise SymbolFault("unordered_overlap", f"forward {seq} beside {held.kind} {use}")
        self.flights = [*self.flights, Flight(seq, read_mask, write_mask)]

    def check_table(self, band: int, physical: Sequence[int]) -> None:
        """The chain's answer for ids 1.. of a band equals what its effects bound."""
        resting = self.resting[band]
        for virtual, (said, bound) in enumerate(zip(physical, self.tables[band][1:], strict=True), 1):
            if said != (resting if bound < 0 else bound):
                raise SymbolFault("table", f"band {band} id {virtual}: the chain says {said}, effects bound {bound}")

    def masks(self, band: int) -> int:
        """The physical units of a band that are bound, as a mask of units."""
        out = 0
        for unit in self.tables[band]:
            if unit >= 0:
                out |= 1 << unit
        return out

    def used(self, band: int, *kinds: str) -> int:
        """The physical units of a band that uses of these kinds touch and nobody waited for, as a mask."""
        out = 0
        for held in self.uses.values():
            if held.kind in kinds and not held.cleared:
                out |= held.units.get(band, 0)
        return out

    # --- effects -------------------------------------------------------------------------------------------------

    def _execute(self, effect: Effect, content: list[int], wanted_write: Mapping[int, bool]) -> int:
        """One effect that is no Bind; the bytes that it touches."""
        if isinstance(effect, WaitForward):
            if all(flight.seq != effect.seq for flight in self.flights):
                raise SymbolFault("needless_wait", f"forward {effect.seq} is waited for and is not in flight")
            self.waited = max(self.waited, effect.seq)
            return 0
        if isinstance(effect, (WaitCopy, HostWait)):
            held = self.uses.get(effect.use)
            kinds = ("copy",) if isinstance(effect, WaitCopy) else ("send",)
            if held is None or held.kind not in kinds or held.cleared:
                state = "over or unknown" if held is None else f"a {held.kind}, cleared: {held.cleared}"
                raise SymbolFault("needless_wait", f"{type(effect).__name__} for use {effect.use}, which is {state}")
            held.cleared = True
            return 0
        if isinstance(effect, Zero):
            return self._zero(effect, content)
        if isinstance(effect, Copy):
            return self._copy(effect, content)
        if isinstance(effect, (HostRead, HostWrite)):
            return self._host(effect)
        assert isinstance(effect, (SendUnits, PublishUnits)), effect
        return self._network(effect, wanted_write)

    def _zero(self, effect: Zero, content: list[int]) -> int:
        size = self.stage.bands[effect.band].unit_bytes
        mask = self._mask(effect.band, i32(effect.units).tolist())
        self._touch(mask, True, "zeroing")
        for unit in i32(effect.units).tolist():
            content[unit * size : (unit + 1) * size] = [ZEROED] * size
        return mask

    def _copy(self, effect: Copy, content: list[int]) -> int:
        size = self.stage.bands[effect.band].unit_bytes
        sources, targets = i32(effect.sources).tolist(), i32(effect.targets).tolist()
        if len(set(targets)) != len(targets) or set(sources) & set(targets):
            raise SymbolFault("lost_write", f"a copy {sources} -> {targets} whose targets are sources, or not distinct")
        read, write = self._mask(effect.band, sources), self._mask(effect.band, targets)
        self._touch(read, False, "copying from")
        self._touch(write, True, "copying to")
        for source, target in zip(sources, targets, strict=True):
            content[target * size : (target + 1) * size] = content[source * size : (source + 1) * size]
        self.copied_bytes += size * len(targets)
        return read | write

    def _bind(self, effect: Bind, fresh: set[tuple[int, int]]) -> int:
        """Points ids at units; the bytes of units that were not bound: the next forward may write them."""
        table = self.tables[effect.band]
        new = []
        for virtual, unit in zip(i32(effect.virtual).tolist(), i32(effect.physical).tolist(), strict=True):
            if unit == self.resting[effect.band]:
                table[virtual] = -1
                fresh.discard((effect.band, virtual))
            else:
                if table[virtual] < 0:
                    fresh.add((effect.band, virtual))
                    new.append(unit)
                table[virtual] = unit
        return self._mask(effect.band, new)

    def _host(self, effect: HostRead | HostWrite) -> int:
        mask = self._mask(effect.band, i32(effect.units).tolist())
        writes = isinstance(effect, HostWrite)
        for use, held in self.uses.items():
            if held.kind != "copy" and not held.cleared and (held.writes & mask or (writes and held.reads & mask)):
                raise SymbolFault("unordered_overlap", f"host copy {effect.use} beside {held.kind} {use}")
        held = self.uses.setdefault(effect.use, Using("copy"))
        self._record(held, effect)
        if writes:
            held.writes |= mask
        else:
            held.reads |= mask
        return mask

    def _network(self, effect: SendUnits | PublishUnits, wanted_write: Mapping[int, bool]) -> int:
        mask = self._mask(effect.band, i32(effect.units).tolist())
        peer = isinstance(effect, PublishUnits)
        writes = peer and wanted_write[effect.use]
        for flight in self.flights:
            if flight.seq > effect.after and (flight.writes & mask or (writes and flight.reads & mask)):
                raise SymbolFault(
                    "unordered_overlap", f"transfer {effect.use} after {effect.after} beside forward {flight.seq}"
                )
        for use, held in self.uses.items():
            if use != effect.use and not held.cleared and (held.writes & mask or (writes and held.reads & mask)):
                raise SymbolFault("unordered_overlap", f"transfer {effect.use} beside {held.kind} {use}")
        if isinstance(effect, PublishUnits):
            bound = [self.tables[effect.band][virtual] for virtual in i32(effect.virtual).tolist()]
            if bound != i32(effect.units).tolist():
                raise SymbolFault("table", f"use {effect.use} publishes units that its ids are not bound to")
        held = self.uses.setdefault(effect.use, Using("peer" if peer else "send"))
        self._record(held, effect)
        if writes:
            held.writes |= mask
        else:
            held.reads |= mask
        return mask

    # --- inside --------------------------------------------------------------------------------------------------

    @staticmethod
    def _record(held: Using, effect: HostRead | HostWrite | SendUnits | PublishUnits) -> None:
        mask = held.units.get(effect.band, 0)
        for unit in i32(effect.units).tolist():
            mask |= 1 << unit
        held.units[effect.band] = mask

    def _touch(self, mask: int, writes: bool, what: str) -> None:
        """Schedule work touches bytes: whatever it is not ordered behind must leave them alone."""
        if writes and (mask >> self.stage.arena_bytes or mask & ((1 << self.stage.chain_start_bytes) - 1)):
            raise SymbolFault("out_of_chain", f"{what} bytes outside the chain")
        for flight in self.flights:
            if flight.seq > self.waited and (flight.writes & mask or (writes and flight.reads & mask)):
                raise SymbolFault("unordered_overlap", f"{what} bytes beside forward {flight.seq}")
        for use, held in self.uses.items():
            if held.writes & mask or (writes and held.reads & mask):
                if held.kind in FOR_GOOD:
                    raise SymbolFault("fixed_unit", f"{what} bytes that the peer of use {use} touches")
                if not held.cleared:
                    raise SymbolFault("unordered_overlap", f"{what} bytes beside {held.kind} {use}")

    def _mask(self, band: int, units: Sequence[int]) -> int:
        size = self.stage.bands[band].unit_bytes
        one, out = (1 << size) - 1, 0
        for unit in units:
            out |= one << (unit * size)
        return out

    def _units_of(self, ids: Mapping[int, Sequence[int]]) -> int:
        out = 0
        for band, names in ids.items():
            if self.stage.bands[band].unit_bytes:
                units = [self.tables[band][name] for name in names]
                if min(units, default=0) < 0:
                    raise SymbolFault("table", f"a forward uses ids {list(names)} of band {band}; one is not bound")
                out |= self._mask(band, units)
        return out

    def _content(self) -> list[int]:
        """Tags of all bytes: each live unit's own, and garbage everywhere else."""
        out = [UNKNOWN] * self.stage.arena_bytes
        for band, table in enumerate(self.tables):
            size = self.stage.bands[band].unit_bytes
            for virtual, unit in enumerate(table):
                if unit >= 0:
                    tag = (band * _IDS + virtual) * _BYTES
                    out[unit * size : (unit + 1) * size] = range(tag, tag + size)
        return out

    def _wanted(self, ops: Sequence[Op]) -> dict[tuple[int, int], tuple[int, int]]:
        """Ids that an op gives another id's bytes: what they must hold afterwards."""
        out: dict[tuple[int, int], tuple[int, int]] = {}
        for op in ops:
            if isinstance(op, (Rebind, CopyState)):
                for source, target in zip(i32(op.sources).tolist(), i32(op.targets).tolist(), strict=True):
                    out[op.band, target] = (op.band, source)
        return out

    def _check_content(
        self, content: list[int], wanted: dict[tuple[int, int], tuple[int, int]], fresh: set[tuple[int, int]]
    ) -> None:
        """Every live unit holds what its writers left; a fresh unit of a token band holds zeros."""
        taken = 0
        for band, table in enumerate(self.tables):
            shape = self.stage.bands[band]
            size = shape.unit_bytes
            for virtual, unit in enumerate(table):
                if unit < 0:
                    continue
                mask = ((1 << size) - 1) << (unit * size)
                if taken & mask:
                    raise SymbolFault("lost_write", f"band {band} id {virtual} shares bytes with another live unit")
                taken |= mask
                held = content[unit * size : (unit + 1) * size]
                name = wanted.get((band, virtual))
                if name is None and (band, virtual) in fresh:
                    if shape.kind != "state" and any(tag != ZEROED for tag in held):
                        raise SymbolFault("lost_write", f"band {band} id {virtual}: a new page is not zero")
                    continue
                owner = name or (band, virtual)
                tag = (owner[0] * _IDS + owner[1]) * _BYTES
                if held != list(range(tag, tag + size)):
                    raise SymbolFault("lost_write", f"band {band} id {virtual} in unit {unit} holds other bytes")
        if taken & ((1 << self.stage.chain_start_bytes) - 1) or taken >> self.stage.arena_bytes:
            raise SymbolFault("out_of_chain", "a live unit lies outside the chain")
