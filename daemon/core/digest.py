"""Digest: 16 bytes over everything in the core's state that can influence a later decision or message.

Owns the list of what counts; a test changes every field of the state and wants another digest. Must never change
anything. Invariant: equal states have equal digests on every machine (canonical msgpack of plain values in a fixed
order, columns as little-endian bytes).

Left out because the rest says it already: a prompt and the message it came in (the group's content digest covers
them), a request's own sequence (prompt and kept output) and what the cache knows of it, the snapshot of the decoding
rows, the free rows, the heap of deadlines, and what geometry and configuration say of windows and slots.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import msgspec

from allocator.columns import pack_i32, pack_i64
from allocator.ops import canonical_bytes
from daemon.core.requests import Group, Request, State
from daemon.core.state import CoreState, Flight


def state_digest(core: CoreState) -> bytes:
    """16 bytes; states that can decide differently have different ones."""
    digest = hashlib.blake2b(digest_size=16)
    encode = msgspec.msgpack.encode
    digest.update(encode([core.config, _scalars(core), _orders(core)]))
    for key, group in core.groups.items():
        digest.update(encode([key, _group(group)]))
    for number in sorted(core.requests):
        digest.update(encode(_request(core.requests[number])))
    for flight in core.flights:
        digest.update(encode(_flight(flight)))
    digest.update(core.stop_uses.tobytes())
    for part in _rows(core):
        digest.update(part)
    if core.measure is not None:
        digest.update(encode(core.measure.geometry))
    if core.memory is not None:
        digest.update(core.memory.chain.state_digest())
        digest.update(canonical_bytes(core.memory.pending_ops()))
        digest.update(encode([core.memory.evicted, core.memory.quota_evicted]))
        if core.memory.cache is not None:
            digest.update(core.memory.cache.content())
    return digest.digest()


def _scalars(core: CoreState) -> list[Any]:
    return [
        core.epoch,
        core.seq,
        core.reported_seq,
        core.processed_through,
        core.told_through,
        [core.in_flight, core.in_flight_max, core.microbatches, core.forming, core.launched, core.flying],
        core.next_request,
        core.steady,
        core.expected.content(),
        core.pace.content(),
        core.throttled_steps,
        dataclasses.astuple(core.helpless) if core.helpless is not None else 0,
        core.flush_moves,
        core.busy,
        core.blocked,
        core.stalled_ticks,
        core.queue_moved_ns,
        core.admit_interval_ns,
        core.draining,
        core.snapshot_wanted,
        core.degraded,
        core.facts,
        core.running_max,
        dataclasses.astuple(core.totals),
        core.checkpoints_given,
        core.checkpoints_hit,
        core.kept_logprobs.content(),
        [core.counts[state] for state in State],
    ]


def _orders(core: CoreState) -> list[Any]:
    """Who comes first, wherever an order decides."""
    return [
        core.queue.content(),
        core.deadlines.content(),
        core.resident.number if core.resident is not None else 0,
        [core.trial.number if core.trial is not None else 0, *core.suspects],
        [request.number for request in core.parked_rows],
        sorted(core.relief.items()),
        [[row, *dataclasses.astuple(gift)] for row, gift in core.gifts.items()],
        sorted(core.changed.items()),
        list(core.ended_groups),
        core.frontends,
        list(core.lost_frontends),
    ]


def _group(group: Group) -> list[Any]:
    ends = sorted(group.ended.items())
    stops = group.stop_ids.tobytes()
    content = [group.frontend, group.id, group.digest, group.accepted, stops, group.sampling, group.live]
    said = [sorted(group.outputs.items()), sorted(group.logprobs.items())]
    return [*content, group.namespace, group.store, group.pin_ns, group.arrived_ns, ends, said]


def _request(request: Request) -> list[Any]:
    return [
        request.number,
        request.group.accepted.first_request,
        request.choice,
        request.prompt_tokens,
        request.max_output,
        request.min_output,
        request.ceiling,
        request.steady,
        request.priority,
        request.arrived_ns,
        request.deadline_ns,
        request.state,
        request.row,
        request.kept,
        request.output_tokens,
        request.began_output,
        request.target_tokens,
        request.scheduled_tokens,
        request.processed_tokens,
        request.chunk_seq,
        request.known_tokens,
        request.continues,
        request.lock.content() if request.lock is not None else 0,
        request.cached_tokens,
        request.matched_tokens,
        request.hit_cut,
        request.retractions,
        request.reached_tokens,
        request.prompt_logprobs_next,
        request.last_wait,
        request.started,
        request.confirmed,
        [request.losses, request.furthest_tokens, request.advanced_in, request.advanced_from],
        request.prompt_logprobs,
        request.output_logprobs,
    ]


def _flight(flight: Flight) -> list[Any]:
    columns = [pack_i32(flight.rows), pack_i32(flight.generations), pack_i32(flight.frontends)]
    columns += [pack_i64(flight.requests), flight.rows_column, flight.generations_column, pack_i32(flight.final)]
    rest = [flight.scored, flight.chunks, flight.hits, flight.launched_ns, flight.prompt_tokens, flight.microbatch]
    return [flight.seq, flight.forward, flight.releases, columns, *rest]


def _rows(core: CoreState) -> list[bytes]:
    """Every column whole, then what each owned row holds: its page table and its newest output."""
    rows = core.rows
    columns = (rows.generation, rows.request, rows.frontend, rows.scheduled, rows.covered, rows.pages, rows.left)
    owned = (rows.shared, rows.window_first, rows.retire_at, rows.floor, rows.slots, rows.grid_at, rows.microbatch)
    parts = [column.tobytes() for column in (*columns, rows.output, rows.decoding, *owned)]
    parts.append(pack_i64([rows.releases, *rows.bound]))
    for row, owner in enumerate(rows.owners):
        parts.append(pack_i64([owner.number if owner is not None else 0]))
        if owner is not None:
            parts.append(rows.newest_output(row).tobytes())
            parts.append(rows.table[row, : rows.pages[row]].tobytes())
    return parts
