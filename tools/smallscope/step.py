"""One action of a tiny world as one step of its chains, and everything that must hold after it.

Owns the translation of actions into ops and calls, and the checks: what is accepted is realized, what is refused does
not fit by brute force and changed nothing, effects are safe on the symbolic device, and no relief moves more bytes
than the exact least. Must never repair anything: what does not hold raises `SymbolFault`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from allocator.columns import Int32s
from allocator.errors import CapacityRefused
from allocator.ops import Flush, Op
from tools.smallscope.device import SymbolFault
from tools.smallscope.exact import Pin
from tools.smallscope.world import Action, State, Units, Use, World


class Moved:
    """Bytes that takes moved, against the exact least, over many steps."""

    __slots__ = ("least", "moved", "ratio", "reliefs")

    def __init__(self) -> None:
        self.reliefs = self.moved = self.least = 0
        self.ratio = 1.0

    def add(self, moved: int, least: int) -> None:
        """One take on one stage."""
        if moved or least:
            self.reliefs += 1
            self.moved += moved
            self.least += least
            self.ratio = max(self.ratio, moved / least if least else float("inf"))


def perform(state: State, action: Action, moved: Moved) -> None:
    """Turns `state` into the state after `action`; raises what must never happen."""
    kind, about = action
    if kind == "report":
        _report(state)
        return
    released: tuple[int, ...] = ()
    ops: list[Op] = []
    before: list[tuple[int, ...]] = []
    if kind == "process":
        state.processed, state.in_flight = state.in_flight[0], state.in_flight[1:]
    elif kind == "release":
        released = (about[0],)
        ops = [_release(state, about[0])]
    elif kind == "flush":
        ops = [Flush(about[0])]
    elif kind == "take":
        before = [_live_masks(state, stage) for stage in range(len(state.chains))]
        pins = [_pins(state, stage) for stage in range(len(state.chains))]
        ops = [_take(state, *about)]
    elif kind in ("free", "retire", "free_slot"):
        ops = [_free(state, kind, about)]
    elif kind == "copy_state":
        ops = [state.logical.copy_state(_ids(about[0]), _ids(about[1]))]
    elif kind == "rebind":
        ops = [_rebind(state, *about)]
    elif kind != "launch":
        ops = [_begin_use(state, kind, about[0])]
    _step(state, ops, released, action)
    if kind == "take":
        for stage, masks in enumerate(before):
            _compare_moves(state, stage, about[0], masks, pins[stage], moved)


def check(state: State) -> None:
    """What must hold in a state, however it was reached; costs more than a step."""
    counts = state.counts()
    if tuple(state.logical.live_units()) != counts:
        raise SymbolFault("counts", f"the logical chain counts {state.logical.live_units()}, the model {counts}")
    state.logical.check()
    quarantined = [0] * len(counts)
    for band, _ in state.quarantine:
        quarantined[band] += 1
    if list(state.logical.quarantined()) != quarantined:
        raise SymbolFault("counts", f"{state.logical.quarantined()} units in quarantine, the model has {quarantined}")
    for stage, (chain, device) in enumerate(zip(state.chains, state.devices, strict=True)):
        chain.check()
        rows = chain.band_counts().reshape(-1, 4).tolist()
        for band, size in enumerate(state.world.exact[stage].units):
            if size and rows[band][0] != counts[band]:
                raise SymbolFault("counts", f"stage {stage} band {band} holds {rows[band]}, the model {counts}")
            device.check_table(band, chain.physical(band, state.world.id_columns[band]).tolist())
    _check_fixed(state)
    check_refusals(state)
    if not (state.pages or state.slots or state.quarantine or state.uses or state.in_flight):
        state.logical.check_idle()
        for chain in state.chains:
            chain.check_idle()


def check_refusals(state: State) -> None:
    """Every demand is refused exactly when brute force finds no layout, or a freeze or an id space forbids it."""
    counts, world = state.counts(), state.world
    pins = tuple(_known_pins(state))
    caps = state.caps if state.unreported else world.ids
    key = (counts, pins, caps)
    expected = world.answers.get(key)
    if expected is None:
        expected = world.answers[key] = tuple(_may_have(world, counts, pins, caps, demand) for demand in world.demands)
    tried = False
    for demand, possible in zip(world.demands, expected, strict=True):
        refused = state.logical.refusal(demand)
        if (refused is None) != possible:
            raise SymbolFault("wrong_refusal", f"{demand} on {counts}: refusal {refused}, possible: {possible}")
        if refused is not None and not tried:
            tried = True
            _refused_changes_nothing(state, demand)


def _may_have(
    world: World, counts: tuple[int, ...], pins: tuple[tuple[Pin, ...], ...], caps: tuple[int, ...], demand: Any
) -> bool:
    """Whether a demand fits by brute force, a freeze and the id spaces."""
    total = tuple(a + b for a, b in zip(counts, demand, strict=True))
    if any(n > most or n > cap for n, most, cap in zip(total, world.ids, caps, strict=True)):
        return False
    return all(exact.fits(total, fixed) for exact, fixed in zip(world.exact, pins, strict=True))


def _refused_changes_nothing(state: State, demand: tuple[int, ...]) -> None:
    digest = state.logical.state_digest()
    try:
        state.logical.take(demand)
    except CapacityRefused:
        if state.logical.state_digest() != digest:
            raise SymbolFault("refusal_changed", f"the refused take of {demand} changed the logical chain") from None
        return
    raise SymbolFault("wrong_refusal", f"a refused take of {demand} was made")


# --- one step ------------------------------------------------------------------------------------------------------


def _step(state: State, ops: list[Op], released: tuple[int, ...], action: Action) -> None:
    state.seq += 1
    state.logical.step_digest(state.seq, ops, released)
    launch = action.kind == "launch"
    reads, writes, told = _launch_sets(state, action.about) if launch else ({}, {}, {})
    peers = {number: use.kind == "receive" for number, use in state.uses.items()}
    for chain, device in zip(state.chains, state.devices, strict=True):
        chain.begin_step(state.seq, state.processed, released)
        device.processed(state.processed)
        device.released(released)
        device.apply(ops, chain.apply(ops), peers)
        chain.end_step()
        if launch:
            device.launch(state.seq, chain.launched(state.seq, told), reads, writes)
    if launch:
        state.in_flight = (*state.in_flight, state.seq)


def _launch_sets(state: State, about: tuple[Any, ...]) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
    """Ids that a forward reads and writes per band, and what the chains are told of the writes."""
    waiting = state.named_by("hold", "receive")
    loading = state.named_by("load")
    units = set(state.owned_units()) - waiting
    writable = units - state.named_by("lend")
    if about[0] == "page":
        writable = {(band, virtual) for band, virtual in writable if virtual == about[1] and band != state.world.state}
    elif about[0] == "none":
        writable = set()
    reads = _by_band(units - (loading - writable))
    writes = _by_band(writable)
    if about[0] == "unknown":
        return reads, writes, dict.fromkeys(range(len(state.world.ids)))
    return reads, writes, {band: np.array(ids, dtype=np.int32) for band, ids in writes.items()}


def _by_band(units: Units | set[tuple[int, int]]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for band, virtual in sorted(units):
        out.setdefault(band, []).append(virtual)
    return out


# --- ops -----------------------------------------------------------------------------------------------------------


def _ids(*values: int) -> Int32s:
    return np.array(values, dtype=np.int32)


def _take(state: State, demand: tuple[int, ...], onto: tuple[tuple[int, ...], ...]) -> Op:
    """Windows bind the last of the new pages, and the pages of `onto`."""
    pages = demand[state.world.owner]
    bound: list[Int32s | None] = [None] * len(demand)
    for band in state.world.windows:
        fresh = demand[band] - len(onto[band])
        bound[band] = np.arange(pages - fresh, pages, dtype=np.int32)
    older = [np.array(ids, dtype=np.int32) if ids else None for ids in onto]
    taken = state.logical.take(demand, bound, older)
    for page in taken.ids[state.world.owner].tolist():
        state.pages[page] = 0
    for band in state.world.windows:
        for page in taken.ids[band].tolist():
            state.pages[page] |= 1 << band
    if state.world.state >= 0:
        state.slots = (*state.slots, *taken.ids[state.world.state].tolist())
    return taken.op


def _free(state: State, kind: str, about: tuple[Any, ...]) -> Op:
    """Frees a page with its windows' units, one window's unit, or a slot; what is published goes to quarantine."""
    if kind == "free":
        units = state.units_of(about[0])
        del state.pages[about[0]]
    elif kind == "retire":
        band, page = about
        units = frozenset([(band, page)])
        state.pages[page] &= ~(1 << band)
    else:
        units = frozenset([(state.world.state, about[0])])
        state.slots = tuple(slot for slot in state.slots if slot != about[0])
    op = state.logical.free(state.parts(units))
    published = state.named_by("receive", "lend")
    stays = (state.quarantine | units) & published
    stays |= {
        (state.world.owner, page) for band, page in stays if band in state.world.windows and page not in state.pages
    }
    state.quarantine |= stays & (state.quarantine | units)
    gone = units - state.quarantine
    for number, use in state.uses.items():
        state.uses[number] = Use(use.kind, use.units - gone)
    return op


def _release(state: State, number: int) -> Op:
    del state.uses[number]
    state.unreported = tuple(use for use in state.unreported if use != number)
    published = state.named_by("receive", "lend")
    stays = state.quarantine & published
    windows = {page for band, page in stays if band in state.world.windows}
    owned = {(state.world.owner, page) for page in windows} & state.quarantine
    state.quarantine = stays | owned
    if not published:
        state.reported = state.nothing_fixed()
    return state.logical.end_uses([number])


def _rebind(state: State, band: int, source: int, target: int) -> Op:
    op = state.logical.rebind(band, _ids(source), _ids(target))
    state.pages[source] &= ~(1 << band)
    state.pages[target] |= 1 << band
    for number, use in state.uses.items():
        if (band, source) in use.units:
            units = use.units - {(band, source)}
            if use.kind in ("lend", "receive", "send", "backup", "load"):
                units |= {(band, target)}
            state.uses[number] = Use(use.kind, units)
    return op


def _begin_use(state: State, kind: str, about: Any) -> Op:
    if kind == "publish":
        number, units = about, state.uses[about].units
        state.uses[number] = Use("receive", units)
    else:
        number, units = state.next_use, frozenset(about)
        state.next_use += 1
        state.uses[number] = Use(kind, units)
    parts = state.parts(units)
    call = "publish" if kind in ("lend", "publish") else kind
    if call == "publish":
        state.unreported = (*state.unreported, number)
        state.caps = state.counts()
    if call in ("backup", "load"):
        slots = [None if ids is None else ids.astype(np.int64) for ids in parts]
        op: Op = getattr(state.logical, call)(number, parts, slots)
    else:
        op = getattr(state.logical, call)(number, parts)
    return op


def _report(state: State) -> None:
    extents = state.extents()
    through = max(state.unreported, default=0)
    state.logical.extents_fixed(extents, through)
    state.reported = extents
    state.unreported = ()


# --- exact ---------------------------------------------------------------------------------------------------------


def _live_masks(state: State, stage: int) -> tuple[int, ...]:
    device = state.devices[stage]
    return tuple(device.masks(band) if size else 0 for band, size in enumerate(state.world.exact[stage].units))


def _span(mask: int, size: int) -> Pin:
    return (((mask & -mask).bit_length() - 1) * size, mask.bit_length() * size) if mask else None


def _known_pins(state: State) -> list[tuple[Pin, ...]]:
    """The extents that the logical chain goes by: those reported, of bands with a publication they cover."""
    covered = set()
    for number, use in state.uses.items():
        if use.kind in ("lend", "receive") and number not in state.unreported:
            covered |= {band for band, _ in use.units}
    return [tuple(pin if band in covered else None for band, pin in enumerate(stage)) for stage in state.reported]


def _pins(state: State, stage: int) -> tuple[tuple[Pin, ...], tuple[Pin, ...], tuple[int, ...]]:
    """Per band: what published units pin, what all transfers and holds pin, and freed units a send still reads."""
    device, sizes = state.devices[stage], state.world.exact[stage].units
    held = state.named_by("hold")
    fixed: list[Pin] = []
    kept: list[Pin] = []
    freed: list[int] = []
    for band, size in enumerate(sizes):
        peers = device.used(band, "peer") if size else 0
        sends = device.used(band, "send") if size else 0
        rows = 0
        if size:
            for b, virtual in held:
                if b == band:
                    rows |= 1 << device.tables[band][virtual]
        fixed.append(_span(peers, size))
        kept.append(_span(peers | sends | rows, size))
        freed.append((sends & ~device.masks(band)).bit_count() if size else 0)
    return tuple(fixed), tuple(kept), tuple(freed)


def _compare_moves(
    state: State, stage: int, demand: tuple[int, ...], live: tuple[int, ...], pins: Any, moved: Moved
) -> None:
    """A take moved no more bytes than the exact least; transfers stay where they are where a layout allows it."""
    exact = state.world.exact[stage]
    fixed, kept, freed = pins
    total = tuple(mask.bit_count() + wanted for mask, wanted in zip(live, demand, strict=True))
    done = state.devices[stage].copied_bytes
    least = exact.least_bytes(tuple(a + b for a, b in zip(total, freed, strict=True)), kept, live)
    if least is None:
        least = exact.least_bytes(total, fixed, live)
    if least is None:
        raise SymbolFault("unrealizable", f"stage {stage} realized {demand}, for which no layout exists")
    moved.add(done, least)
    if done > least:
        raise SymbolFault("too_many_moves", f"stage {stage} moved {done} bytes for {demand}; {least} are enough")


def _check_fixed(state: State) -> None:
    """What the chains report as fixed is what peers were told, and it lies where it was published."""
    for stage, (chain, device) in enumerate(zip(state.chains, state.devices, strict=True)):
        sizes = state.world.exact[stage].units
        told = [_span(device.used(band, "peer"), size) if size else None for band, size in enumerate(sizes)]
        if chain.fixed_extents() != told:
            raise SymbolFault("fixed_unit", f"stage {stage} reports {chain.fixed_extents()} fixed, peers know {told}")
