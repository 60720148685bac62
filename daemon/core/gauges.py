"""Gauges: the core's state as numbers for metrics and as a tree for people.

Owns read-only views. Must never change anything, and no decision may read a view.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from daemon.core.grid import KIND_NAMES
from daemon.core.memory import Memory
from daemon.core.passes import places, waits_for
from daemon.core.requests import Request, State
from daemon.core.state import CoreState


def gauges(core: CoreState) -> dict[str, int]:
    """Counters and gauges by name; units in the names."""
    counts = core.counts
    numbers = {
        "live": core.live,
        "waiting": len(core.queue),
        "running": counts[State.RUNNING] + counts[State.PARKED_ROW],
        "prefilling": counts[State.PREFILLING] + counts[State.PARKED_CHUNK],
        "parked": counts[State.PARKED_CHUNK] + counts[State.PARKED_ROW],
        "suspects": len(core.suspects),
        "in_flight": core.in_flight,
        "processed_through": core.processed_through,
        "draining": int(core.draining),
        "ready": int(core.memory is not None),
        "capacity_pages": 0,
        "kept_logprob_bytes": core.kept_logprobs.kept_bytes,
    }
    if core.memory is not None:
        numbers["capacity_pages"] = core.memory.capacity_pages
        for band, units in zip(core.memory.chain.bands, core.memory.chain.live_units(), strict=True):
            numbers[f"live_units_{band.name}"] = units
        for band, units in zip(core.memory.chain.bands, core.memory.chain.free_estimate(), strict=True):
            numbers[f"free_units_{band.name}"] = units
        numbers.update(_cache(core.memory))
    numbers.update({f"{name}_total": count for name, count in dataclasses.asdict(core.totals).items()})
    for kind, name in KIND_NAMES.items():
        numbers[f"states_given_{name}_total"] = core.checkpoints_given[kind]
        numbers[f"states_hit_{name}_total"] = core.checkpoints_hit[kind]
    return numbers


def _cache(memory: Memory) -> dict[str, int]:
    """Units of the prefix cache per band: held now, without a reader, pinned, and taken from it so far; pins."""
    cache = memory.cache
    held = cache.held() if cache is not None else memory.none
    reclaimable = cache.reclaimable() if cache is not None else memory.none
    pinned = cache.pinned() if cache is not None else memory.none
    numbers = {
        "pins_refused_total": cache.pins_refused if cache is not None else 0,
        "pins_dropped_total": cache.pins_dropped if cache is not None else 0,
    }
    for band, units, idle, kept in zip(memory.chain.bands, held, reclaimable, pinned, strict=True):
        numbers[f"cached_units_{band.name}"] = units
        numbers[f"reclaimable_units_{band.name}"] = idle
        numbers[f"pinned_units_{band.name}"] = kept
        numbers[f"evicted_units_{band.name}_total"] = memory.evicted[band.name]
        numbers[f"quota_evicted_units_{band.name}_total"] = memory.quota_evicted[band.name]
    return numbers


def request_view(core: CoreState, number: int, now_ns: int | None = None) -> dict[str, Any] | None:
    """Stage, age and holdings of one live request, and what it waits for; None when it is not live."""
    request = core.requests.get(number)
    return None if request is None else _describe(core, request, now_ns, places(core).get(number, 0))


def view(core: CoreState, now_ns: int | None = None) -> dict[str, Any]:
    """The whole state as plain values, requests by number; their ages are 0 without a time."""
    ahead = places(core)
    requests = [
        _describe(core, core.requests[number], now_ns, ahead.get(number, 0)) for number in sorted(core.requests)
    ]
    return {
        "epoch": core.epoch,
        "seq": core.seq,
        "reported_seq": core.reported_seq,
        "flights": [[flight.seq, int(flight.forward), len(flight.rows)] for flight in core.flights],
        "next_request": core.next_request,
        "frontends": sorted(core.frontend_index),
        "queue": [request.number for request in core.queue],
        "resident": core.resident.number if core.resident is not None else 0,
        "requests": requests,
        "known_ids": len(core.groups),
        "share_ppm": core.expected.mean_ppm(),
        "throttled_steps": core.throttled_steps,
        "relief": {kind: [told.reason, told.numbers] for kind, told in sorted(core.relief.items())},
        "degraded": core.degraded,
        "gauges": gauges(core),
    }


def _describe(core: CoreState, request: Request, now_ns: int | None, ahead: int) -> dict[str, Any]:
    row, rows = request.row, core.rows
    on_row = row >= 0
    reason, numbers = waits_for(core, request, ahead)
    return {
        "request": request.number,
        "id": request.group.id,
        "frontend": core.frontends[request.group.frontend],
        "choice": request.choice,
        "stage": request.state.value,
        "age_ms": 0 if now_ns is None else (now_ns - request.arrived_ns) // 1_000_000,
        "row": row,
        "generation": int(rows.generation[row]) if on_row else 0,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": int(rows.output[row]) if on_row else request.output_tokens,
        "max_output": request.max_output,
        "extent": [request.scheduled_tokens, request.target_tokens],
        "pages": int(rows.pages[row]) if on_row else 0,
        "shared_pages": int(rows.shared[row]) if on_row else 0,
        "held_units": _held(core, row) if on_row else {},
        "cached_tokens": request.cached_tokens,
        "hit_cut": request.hit_cut,
        "retractions": request.retractions,
        "losses": request.losses,
        "waits_for": reason,
        "waits_numbers": numbers,
    }


def _held(core: CoreState, row: int) -> dict[str, int]:
    """Units that a row owns, by band; what it reads of the prefix cache is not among them."""
    assert core.memory is not None, "only an epoch has rows"
    return {band.name: len(ids) for band, ids in zip(core.memory.chain.bands, core.rows.held(row), strict=True)}
