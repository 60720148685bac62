"""One action of a tiny world as one step of its chains and devices.

Owns the translation of actions into ops and calls, and the model's own account of what they do. Must never look into a
chain: what is live, in use, quarantined and frozen is reckoned here from the actions alone, to be compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from allocator.columns import Int32s
from allocator.ops import Flush, Op
from tools.smallscope.checks import Moved, compare_moves, live_masks, pins_of
from tools.smallscope.exact import Pin
from tools.smallscope.world import FIXED, KEPT, Action, State, Units, Use, ids_of


def perform(state: State, action: Action, moved: Moved) -> None:
    """Turns `state` into the state after `action`; raises what must never happen."""
    kind, about = action
    if kind == "report":
        _report(state)
        return
    released: tuple[int, ...] = ()
    extents = state.extents()
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
        before = [live_masks(state, stage) for stage in range(len(state.chains))]
        pins = [pins_of(state, stage) for stage in range(len(state.chains))]
        ops = [_take(state, *about)]
    elif kind in ("free", "retire", "free_slot"):
        ops = [_free(state, kind, about)]
    elif kind == "copy_state":
        ops = [state.logical.copy_state(ids_of(about[0]), ids_of(about[1]))]
    elif kind == "rebind":
        ops = [_rebind(state, *about)]
    elif kind == "fix":
        ops = [_fix(state, about[0])]
    elif kind != "launch":
        ops = [_begin_use(state, kind, about[0])]
    newest = state.newest
    _step(state, ops, released, action)
    now = state.extents()
    if now != extents or (kind in ("fix", "publish", "lend") and newest):
        state.reports = (*state.reports, (newest, now))
    if kind == "take":
        for stage, masks in enumerate(before):
            compare_moves(state, stage, about[0], masks, pins[stage], moved)


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
    writable = units - state.named_by(*FIXED)
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
    stays = (state.quarantine | units) & state.named_by(*KEPT)
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
    stays = state.quarantine & state.named_by(*KEPT)
    windows = {page for band, page in stays if band in state.world.windows}
    owned = {(state.world.owner, page) for page in windows} & state.quarantine
    gone = state.quarantine - stays - owned
    state.quarantine = stays | owned
    for other, use in state.uses.items():
        state.uses[other] = Use(use.kind, use.units - gone)
    return state.logical.end_uses([number])


def _fix(state: State, number: int) -> Op:
    state.uses[number] = Use("fix", state.uses[number].units)
    _published(state, number)
    return state.logical.fix(number)


def _published(state: State, number: int) -> None:
    state.newest = number
    state.unreported = (*state.unreported, number)
    state.caps = state.counts()


def _rebind(state: State, band: int, source: int, target: int) -> Op:
    op = state.logical.rebind(band, ids_of(source), ids_of(target))
    state.pages[source] &= ~(1 << band)
    state.pages[target] |= 1 << band
    for number, use in state.uses.items():
        if (band, source) in use.units:
            units = use.units - {(band, source)}
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
        _published(state, number)
    if call in ("backup", "load"):
        slots = [None if ids is None else ids.astype(np.int64) for ids in parts]
        op: Op = getattr(state.logical, call)(number, parts, slots)
    else:
        op = getattr(state.logical, call)(number, parts)
    return op


def _report(state: State) -> None:
    """The oldest report arrives: as of a state that may be gone, of publications that may be over."""
    (through, extents), *rest = state.reports
    state.reports = tuple(rest)
    state.logical.extents_fixed(extents, through)
    if through in state.unreported:
        state.unreported = state.unreported[state.unreported.index(through) + 1 :]
        state.known = extents
    else:
        assert through == state.through, "reports come in order"
        state.known = tuple(tuple(map(_common, *stages)) for stages in zip(state.known, extents, strict=True))
    state.through = through


def _common(one: Pin, other: Pin) -> Pin:
    """Bytes that both say are fixed."""
    if one is None or other is None:
        return None
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return (low, high) if low < high else None
