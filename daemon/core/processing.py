"""Processing: what a step's report changes, in step order.

Owns the commit of sampled tokens, the detection of ends by stop id and by length, and what of a report reaches front
ends. Must never let a token of a released row through: entries are told apart by generation. Invariants: nothing after
a request's end leaves the core; a report that does not list exactly the rows launched for sampling breaks the epoch.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int64s, i64
from allocator.errors import InvariantBroken
from daemon.core import caching, microbatches, suspects
from daemon.core.checkpoints import give_ready
from daemon.core.endings import end
from daemon.core.inputs import Reported
from daemon.core.kept_logprobs import PLACE_BYTES, bound, keep, size, unknown
from daemon.core.outputs import Outputs, TokenColumns
from daemon.core.reasons import EndReason
from daemon.core.requests import Request
from daemon.core.rows import Rows
from daemon.core.state import CoreState, Flight
from ipc.messages import Logprobs, RequestLogprobs, RowLogprobs


def process(core: CoreState, item: Reported, out: Outputs) -> None:
    """Consume the report of the oldest step in flight; reports of other epochs are ignored."""
    if core.memory is None or item.epoch != core.epoch:
        return
    flight = _next_flight(core, item)
    core.reported_seq = flight.seq
    if not flight.forward:
        return
    core.in_flight -= 1
    assert core.in_flight >= 0, "a result belongs to a forward that was launched"
    if core.microbatches > 1:
        microbatches.reported(core, flight)
    assert flight.seq > core.processed_through, "progress only grows"
    core.processed_through = flight.seq
    core.pace.reported(flight.launched_ns, flight.prompt_tokens, item.now_ns)
    tokens = i64(item.tokens)
    rows, requests, frontends, final = flight.rows, flight.requests, flight.frontends, flight.final
    if core.rows.releases != flight.releases:
        valid = core.rows.generation[rows] == flight.generations
        if not valid.all():
            core.totals.surplus_tokens += int(np.count_nonzero(~valid))
            final = _surviving(final, valid)
            rows, requests, frontends, tokens = rows[valid], requests[valid], frontends[valid], tokens[valid]
    if flight.chunks:
        _enter_chunks(core, flight)
    logprobs = _logprobs(core, item.logprobs) if item.logprobs else []
    if len(rows):
        core.rows.commit(rows, tokens)
        core.totals.output_tokens += len(rows)
    if len(rows) or logprobs:
        out.tokens = TokenColumns(flight.seq, frontends, requests, tokens, logprobs)
    _end_finished(core, rows, tokens, final, item.now_ns, out)
    for row, generation in flight.scored:
        if core.rows.generation[row] == generation:
            end(core, _owner(core, row), EndReason.LENGTH, "the prompt was scored", item.now_ns, out)
    if core.gifts:
        give_ready(core)
    if core.trial is not None:
        suspects.reported(core, item.now_ns, out)


def _enter_chunks(core: CoreState, flight: Flight) -> None:
    """Prefill chunks were computed: their whole pages go to the cache, where others may know what follows."""
    memory, rows = core.memory, core.rows
    assert memory is not None, "only an epoch has steps"
    for row, generation in flight.hits:
        if rows.generation[row] == generation:
            caching.copied(core, _owner(core, row))
    for row, generation, end_tokens in flight.chunks:
        if rows.generation[row] != generation:
            continue
        request = _owner(core, row)
        request.processed_tokens = end_tokens
        request.advance(end_tokens, core.epoch)
        caching.give(core, request, end_tokens)
        if memory.checkpoint_interval:
            caching.learn(core, request)


def _next_flight(core: CoreState, item: Reported) -> Flight:
    if not core.flights or core.flights[0].seq != item.seq:
        awaited = core.flights[0].seq if core.flights else 0
        raise InvariantBroken("core.report_order", f"report of step {item.seq}, awaited is step {awaited}")
    flight = core.flights[0]
    if flight.rows_column != item.rows or flight.generations_column != item.generations:
        raise InvariantBroken(
            "core.report_rows",
            f"step {item.seq} was launched to sample {len(flight.rows)} rows; its report lists other ones",
        )
    if len(item.tokens) != 8 * len(flight.rows):
        raise InvariantBroken(
            "core.report_tokens", f"step {item.seq}: {len(item.tokens)} bytes of tokens for {len(flight.rows)} rows"
        )
    if len(flight.rows):
        assert core.facts is not None, "an epoch has a model"
        worst = int(i64(item.tokens).view(np.uint64).max())
        if worst >= core.facts.vocab_size:
            raise InvariantBroken(
                "core.report_tokens", f"step {item.seq}: a token outside the vocabulary of {core.facts.vocab_size}"
            )
    core.flights.popleft()
    return flight


def _surviving(positions: Rows, valid: NDArray[np.bool_]) -> Rows:
    """Positions among all entries -> positions among the valid ones, without those that are gone."""
    return (np.cumsum(valid) - 1)[positions[valid[positions]]]


def _end_finished(core: CoreState, rows: Rows, tokens: Int64s, final: Rows, now_ns: int, out: Outputs) -> None:
    """End by stop id first, then by length, in the order of the forward."""
    ends: dict[int, EndReason] = {}
    for at in np.flatnonzero(core.stop_uses[tokens]).tolist():
        request = _owner(core, int(rows[at]))
        enough = int(core.rows.output[rows[at]]) > request.min_output
        if enough and bool((request.group.stop_ids == tokens[at]).any()):
            ends[at] = EndReason.STOP
    for at in final.tolist():
        ends.setdefault(at, EndReason.LENGTH)
    for at in sorted(ends):
        request = _owner(core, int(rows[at]))
        reason = ends[at]
        detail = f"stop token {int(tokens[at])}" if reason is EndReason.STOP else f"{request.max_output} output tokens"
        end(core, request, reason, detail, now_ns, out)


def _owner(core: CoreState, row: int) -> Request:
    owner = core.rows.owners[row]
    assert owner is not None, "a row of the current generation is owned"
    return owner


def _logprobs(core: CoreState, reported: list[RowLogprobs]) -> list[RequestLogprobs]:
    """Log probabilities by request; stale generations and prompt positions delivered before are left out."""
    delivered: list[RequestLogprobs] = []
    for entry in reported:
        if not 0 <= entry.row < core.rows.capacity or core.rows.generation[entry.row] != entry.generation:
            continue
        request = core.rows.owners[entry.row]
        if request is None:
            continue
        values, position = entry.values, entry.prompt_position
        if position >= 0:
            count = min(len(values.ranks) // 4, request.prompt_tokens - position)
            fresh = max(position, request.prompt_logprobs_next)
            if fresh >= position + count:
                continue
            values = positions(values, fresh - position, count)
            request.prompt_logprobs_next = position + count
            position = fresh
        told = RequestLogprobs(request.number, position, values)
        delivered.append(told)
        if position >= 0:
            request.prompt_logprobs.append(told)
        else:
            kept = request.output_logprobs
            holes = unknown(request.number, int(core.rows.output[entry.row]) - len(kept))
            keep(core, request.group, request.number, PLACE_BYTES * len(holes))
            kept += holes
            kept.append(told)
        keep(core, request.group, request.number, size(told))
    bound(core)
    return delivered


def positions(values: Logprobs, first: int, end: int) -> Logprobs:
    """The same log probabilities, positions [first, end) alone."""
    if first == 0 and 4 * end == len(values.ranks):
        return values
    return msgspec.structs.replace(
        values,
        chosen=values.chosen[4 * first : 4 * end],
        ranks=values.ranks[4 * first : 4 * end],
        top_ids=values.top_ids[8 * values.k * first : 8 * values.k * end],
        top_values=values.top_values[4 * values.k * first : 4 * values.k * end],
    )
