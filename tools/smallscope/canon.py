"""The canonical form of a state: what can make a difference to what happens next, and nothing else.

Owns which fields of the chains count. Two states with one form differ only by names: virtual ids are renamed by where
their units lie, uses and forwards by their order; history (digests, counters, what was minted) is left out. Must never
leave out a field it has not heard of: every class's fields are compared with the table here once, and a new one raises
until someone says what it means.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np

from allocator.physical.band import Band
from allocator.physical.chain import PhysicalChain
from allocator.physical.forward_steps import ForwardSteps, PendingBatches
from allocator.physical.ledger import BandLedger, StageLedger
from allocator.physical.units import Units
from tools.smallscope.checks import known_pins
from tools.smallscope.copies import fields_of
from tools.smallscope.device import SymbolicDevice
from tools.smallscope.world import State

# Fields that are read below, or that never change (geometry and references), or that are history.
KNOWN: dict[type, str] = {
    PhysicalChain: "checks stage _steps _effects _late _digest _ledger _bands _stored _relief",
    Band: "index geometry unit_bytes floats units consumer _steps _stage _stage_wait _checks pending ledger",
    Units: "_bound_log _left_log _live_blocks anchor begin capacity checks direction fenced frontier holder holes live "
    "name resting state unit_of",
    ForwardSteps: "_checks _in_flight _open processed_through seq waited_through",
    PendingBatches: "_batches units",
    BandLedger: "_capacity _counts _steps _unknown_through _written_by held uses vacated",
    StageLedger: "_checks _open _waited strays",
}
_checked: set[type] = set()


def canonical_hash(state: State) -> bytes:
    """16 bytes that stand for the canonical form."""
    return blake2b(repr(canonical_form(state)).encode(), digest_size=16).digest()


def canonical_form(state: State) -> tuple[Any, ...]:
    """The form as nested tuples of numbers and bytes."""
    pages, slots = _names(state)
    names: dict[tuple[int, int], int] = {}
    for band, kind in enumerate(state.world.shape.kinds):
        for place, virtual in enumerate(slots if kind == "state" else pages):
            names[band, virtual] = place
    numbers = {*state.uses, *state.unreported, state.newest, state.through, *(number for number, _ in state.reports)}
    uses = {number: place for place, number in enumerate(sorted(numbers))}
    flights = {seq: place + 1 for place, seq in enumerate(state.in_flight)}
    bands = (state.world.owner, *state.world.windows)
    logical = (
        tuple((state.places(page, bands), state.pages.get(page, -1)) for page in pages),
        tuple((state.places(slot, (state.world.state,)), slot in state.slots) for slot in slots),
        tuple(sorted((band, names[band, virtual]) for band, virtual in state.quarantine)),
        tuple(
            (use.kind, tuple(sorted((b, names[b, v]) for b, v in use.units))) for _, use in sorted(state.uses.items())
        ),
        tuple(uses[use] for use in state.unreported),
        state.caps if state.unreported else (),
        tuple((uses[number], extents) for number, extents in state.reports),
        (uses[state.newest], uses[state.through]),
        known_pins(state),
    )
    stages = tuple(_chain_form(chain, flights, uses, names) for chain in state.chains)
    return logical, stages, tuple(_device_form(device, flights, uses) for device in state.devices)


def _names(state: State) -> tuple[list[int], list[int]]:
    """Live pages and slots, quarantined ones among them, in canonical order."""
    owner, windows, band = state.world.owner, state.world.windows, state.world.state
    pages = set(state.pages) | {virtual for b, virtual in state.quarantine if b != band}
    slots = set(state.slots) | {virtual for b, virtual in state.quarantine if b == band}
    by_page = sorted(pages, key=lambda page: (state.places(page, (owner, *windows)), page))
    return by_page, sorted(slots, key=lambda slot: (state.places(slot, (band,)), slot))


def _chain_form(
    chain: PhysicalChain, flights: dict[int, int], uses: dict[int, int], names: dict[tuple[int, int], int]
) -> tuple[Any, ...]:
    for part in (chain, chain._ledger, chain._steps):
        _known(part)
    assert not chain._steps._open
    steps, ledger = chain._steps, chain._ledger
    waited = flights.get(steps.waited_through, 0)
    open_uses = []
    for use in ledger:
        parts = [
            (band, tuple(sorted(names[band, v] for v in column.tolist())) if use.hazard is None else column.tobytes())
            for band, column in use.parts
        ]
        open_uses.append((uses[use.number], str(use.hazard), tuple(parts)))
    strays = tuple(sorted((low, high, uses[number]) for low, high, number in ledger.strays))
    finished = tuple(sorted(uses[number] for number in ledger._waited))
    retired = steps.retired_through
    return waited, tuple(open_uses), finished, strays, tuple(_band_form(b, flights, retired) for b in chain._stored)


def _band_form(band: Band, flights: dict[int, int], retired: int) -> tuple[Any, ...]:
    units, ledger = band.units, band.ledger
    for part in (band, units, ledger, band.pending):
        _known(part)
    written = ledger._written_by
    told = tuple(flights[seq] if seq > retired else 0 for seq in written.tolist()) if written.any() else ()
    unknown = flights[ledger._unknown_through] if ledger._unknown_through > retired else 0
    counted = ledger._counts
    # The counters follow from the rest; where a defect lets them drift, the state is another one.
    counters = (*band.counts(), ledger.held, ledger.uses)
    return (
        units.begin,
        units.frontier,
        counters,
        units.state[: units.capacity].tobytes(),
        told if any(told) else (),
        unknown,
        _batches(band.pending, flights),
        _batches(ledger.vacated, flights),
        counted.tobytes() if counted is not None and counted.any() else b"",
    )


def _batches(batches: PendingBatches, flights: dict[int, int]) -> tuple[Any, ...]:
    if not batches.units:
        return ()
    return tuple((flights[seq], np.sort(np.concatenate(columns)).tobytes()) for seq, columns in batches._batches)


def _device_form(device: SymbolicDevice, flights: dict[int, int], uses: dict[int, int]) -> tuple[Any, ...]:
    flying = tuple((flights[flight.seq], flight.reads, flight.writes) for flight in device.flights)
    held = tuple((uses[number], use.reads, use.writes, use.cleared) for number, use in sorted(device.uses.items()))
    return flights.get(device.waited, 0), flying, held


def _known(part: Any) -> None:
    kind = type(part)
    if kind in _checked:
        return
    fields: Iterable[str] = (*fields_of(kind), *getattr(part, "__dict__", {}))
    unheard = set(fields) ^ set(KNOWN[kind].split())
    if unheard:
        raise TypeError(f"tools.smallscope.canon does not know (or no longer finds) {kind.__name__}: {sorted(unheard)}")
    _checked.add(kind)
