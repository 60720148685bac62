"""What must hold in every state and after every step of a tiny world, against brute force.

Owns the checks: what is refused does not fit and changed nothing, what is accepted fits, no take moves more bytes than
the exact least, counts and tables agree, what peers may write nobody reads. Must never repair anything: what does not
hold raises `SymbolFault`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from allocator.errors import CapacityRefused, InvariantBroken
from tools.smallscope.device import FOR_GOOD, SymbolFault
from tools.smallscope.exact import Pin
from tools.smallscope.world import FIXED, State, Units, World, ids_of


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


def check(state: State) -> None:
    """What must hold in a state, however it was reached; costs more than a step."""
    counts = state.counts()
    if tuple(state.logical.live_units()) != counts:
        raise SymbolFault("counts", f"the logical chain counts {state.logical.live_units()}, the model {counts}")
    state.logical.check()
    quarantined = _per_band(state.quarantine, len(counts))
    if tuple(state.logical.quarantined()) != quarantined:
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
    check_received(state)
    if not (state.pages or state.slots or state.quarantine or state.uses or state.in_flight):
        state.logical.check_idle()
        for chain in state.chains:
            chain.check_idle()


def check_refusals(state: State) -> None:
    """Every demand is refused exactly when brute force finds no layout, or a freeze or an id space forbids it.

    `never` is said exactly of what does not fit beside the quarantined units, nothing fixed.
    """
    counts, world = state.counts(), state.world
    pins = known_pins(state)
    caps = state.caps if state.unreported else world.ids
    kept = _per_band(state.quarantine, len(counts))
    key = (counts, pins, caps, kept)
    expected = world.answers.get(key)
    if expected is None:
        free = ((None,) * len(counts),) * len(pins)
        may = [_may_have(world, counts, pins, caps, demand) for demand in world.demands]
        ever = [_may_have(world, kept, free, world.ids, demand) for demand in world.demands]
        expected = world.answers[key] = tuple(zip(may, ever, strict=True))
    tried = False
    for demand, (possible, ever_possible) in zip(world.demands, expected, strict=True):
        refused = state.logical.refusal(demand)
        if (refused is None) != possible:
            raise SymbolFault("wrong_refusal", f"{demand} on {counts}: refusal {refused}, possible: {possible}")
        if refused is None:
            continue
        if refused.never == ever_possible:
            raise SymbolFault("wrong_refusal", f"{demand} on {counts}: {refused}, ever possible: {ever_possible}")
        if not tried:
            tried = True
            _refused_changes_nothing(state, demand)


def check_received(state: State) -> None:
    """Nobody reads a unit that a peer may be writing: each attempt raises and changes nothing."""
    received = state.named_by("receive") & frozenset(state.owned_units())
    if not received:
        return
    logical, parts = state.logical, state.parts(frozenset(received))
    slots = [None if ids is None else ids.astype(np.int64) for ids in parts]
    tries: list[Callable[[], object]] = [
        lambda: logical.send(state.next_use, parts),
        lambda: logical.publish(state.next_use, parts),
        lambda: logical.backup(state.next_use, parts, slots),
    ]
    source = next((virtual for band, virtual in received if band == state.world.state), None)
    closed = state.named_by("hold", *FIXED)
    target = next((slot for slot in state.slots if (state.world.state, slot) not in closed), None)
    if source is not None and target is not None:
        tries.append(lambda: logical.copy_state(ids_of(source), ids_of(target)))
    digest = logical.state_digest()
    for attempt in tries:
        try:
            attempt()
        except InvariantBroken as error:
            if error.name == "use.reads_received_unit" and logical.state_digest() == digest:
                continue
        raise SymbolFault("reads_received", f"a read of received units {sorted(received)} was not refused")


def _per_band(units: Units, bands: int) -> tuple[int, ...]:
    out = [0] * bands
    for band, _ in units:
        out[band] += 1
    return tuple(out)


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


# --- exact ---------------------------------------------------------------------------------------------------------


def live_masks(state: State, stage: int) -> tuple[int, ...]:
    """Per band, the physical units that are bound on a stage, as a mask."""
    device = state.devices[stage]
    return tuple(device.masks(band) if size else 0 for band, size in enumerate(state.world.exact[stage].units))


def _span(mask: int, size: int) -> Pin:
    return (((mask & -mask).bit_length() - 1) * size, mask.bit_length() * size) if mask else None


def known_pins(state: State) -> tuple[tuple[Pin, ...], ...]:
    """The extents that the logical chain goes by: those reported, of bands with an open publication they cover."""
    covered = set()
    for number, use in state.uses.items():
        if use.kind in FIXED and number not in state.unreported:
            covered |= {band for band, _ in use.units}
    return tuple(tuple(pin if band in covered else None for band, pin in enumerate(stage)) for stage in state.known)


def pins_of(state: State, stage: int) -> tuple[tuple[Pin, ...], tuple[Pin, ...]]:
    """Per band: what fixed units pin, and what all transfers and holds pin."""
    device, sizes = state.devices[stage], state.world.exact[stage].units
    held = state.named_by("hold")
    fixed: list[Pin] = []
    kept: list[Pin] = []
    for band, size in enumerate(sizes):
        for_good = device.used(band, *FOR_GOOD) if size else 0
        all_kept = for_good | (device.used(band, "send") if size else 0)
        for b, virtual in held:
            if size and b == band:
                all_kept |= 1 << device.tables[band][virtual]
        fixed.append(_span(for_good, size))
        kept.append(_span(all_kept, size))
    return tuple(fixed), tuple(kept)


def compare_moves(
    state: State, stage: int, demand: tuple[int, ...], live: tuple[int, ...], pins: Any, moved: Moved
) -> None:
    """A take moved no more bytes than the exact least; transfers stay where they are where a layout allows it."""
    exact = state.world.exact[stage]
    fixed, kept = pins
    total = tuple(mask.bit_count() + wanted for mask, wanted in zip(live, demand, strict=True))
    done = state.devices[stage].copied_bytes
    least = exact.least_bytes(total, kept, live)
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
        told = [_span(device.used(band, *FOR_GOOD), size) if size else None for band, size in enumerate(sizes)]
        if chain.fixed_extents() != told:
            raise SymbolFault("fixed_unit", f"stage {stage} reports {chain.fixed_extents()} fixed, peers know {told}")
