"""Batching: one scheduler iteration, planned and then committed as one step.

Owns the order of the pass (decode rows, resident chunk, new requests, one token budget) and the columns of the forward.
Must never fail between the first change and the finished step: everything that can say no was asked while planning.
Invariants: decode rows come first and ascend; a row appears once; starts are contiguous per row; table entries are
only appended; the sampled rows of a step are reported in the order of its forward.
"""

from __future__ import annotations

import msgspec
import numpy as np

from allocator.columns import Int32s, pack_i32
from daemon.core import caching, checkpoints, microbatches, passes, pressure
from daemon.core.admission import admit
from daemon.core.memory import plus
from daemon.core.outputs import Decided, Outputs
from daemon.core.preempt import preempt
from daemon.core.reasons import Verdict
from daemon.core.requests import Event, Request, State
from daemon.core.retirement import retire
from daemon.core.rows import Rows
from daemon.core.state import NOBODY, CoreState, Flight
from daemon.core.step_plan import Chunk, StepPlan
from ipc.messages import EXPLICIT, SAMPLE, Forward, RowSampling, Sampling, Step

NO_IDS = np.zeros(0, np.int32)


class Columns:
    """The parts of a forward that grow entry by entry: prefill rows and new page-table entries."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.generations: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.flags = bytearray()
        self.tokens: list[bytes] = []
        self.sampling: list[RowSampling] = []
        self.slots: list[bytes] = []
        self.chunks: list[tuple[int, int, int]] = []  # row, generation and end of every chunk
        self.copied: list[tuple[int, int]] = []  # state slots of the cache and of rows that start from them
        self.hits: list[tuple[int, int]] = []  # those rows and their generations
        self.table_rows: list[bytes] = []
        self.table_indexes: list[bytes] = []
        self.table_pages: list[bytes] = []
        self.sampled: list[int] = []  # rows of this step's chunks that sample, in order
        self.final: list[int] = []  # positions in `sampled` whose token is the last by length
        self.scored: list[tuple[int, int]] = []  # rows and generations that end with this step without sampling

    def add_entries(self, rows: Int32s | Rows, indexes: Int32s, pages: Int32s) -> None:
        """Page-table entries, one per element."""
        self.table_rows.append(pack_i32(rows))
        self.table_indexes.append(pack_i32(indexes))
        self.table_pages.append(pack_i32(pages))


def form(core: CoreState, now_ns: int, out: Outputs) -> Step | None:
    """The next step of the micro-batch `core.forming`, or None when no token can be scheduled in it now."""
    assert core.memory is not None, "only an epoch schedules"
    passes.begin(core)
    if core.memory.owner:  # bands beside that of full pages
        checkpoints.keep(core)
        caching.give_launched(core)
        retire(core)
    with core.memory.deciding():
        first = preempt(core, now_ns, out) if core.config.priority_preemption else None
        batch, starts, needy = pressure.plan_decode(core, now_ns, out)
        budget = core.config.max_batched_tokens - len(batch)
        assert budget >= 0, "running rows never pass the token budget"
        plan = StepPlan(batch, starts, needy, budget, len(needy), core.resident is not None)
        if plan.partial or core.relief:
            pressure.plan_resident(core, plan, now_ns, out)
        if len(core.queue) and not pressure.parks(core):
            admit(core, plan, first, now_ns, out)
        elif len(core.queue):
            parked = {"requests": core.counts[State.PARKED_ROW] + core.counts[State.PARKED_CHUNK]}
            passes.skip(core, core.queue.head(), "parked", parked, now_ns, out)
    if not len(plan.batch) and not plan.chunks:
        return None
    pressure.relax(core)
    return _commit(core, plan, now_ns, out)


def _packed(values: list[int]) -> bytes:
    """An int32 column; most steps have no chunk and so nothing to pack."""
    return pack_i32(values) if values else b""


def bare_step(core: CoreState) -> Step:
    """A step without a forward: it carries ops and progress, and does not count as in flight."""
    return _seal(core, None, Flight(core.seq + 1, False, core.rows.releases))


def _commit(core: CoreState, plan: StepPlan, now_ns: int, out: Outputs) -> Step:
    memory, rows, batch = core.memory, core.rows, plan.batch
    assert memory is not None, "only an epoch schedules"
    wanted = memory.demand(plan.pages, plan.slots)
    taken = memory.take(wanted) if any(wanted) else (NO_IDS,) * len(wanted)
    ids, slots, used = taken[memory.owner], taken[memory.state] if plan.slots else NO_IDS, 0
    columns = Columns()
    if rows.explicit:
        columns.tokens.append(rows.newest_tokens(batch.rows))
    given = len(plan.needy)
    if given:
        columns.add_entries(plan.needy, rows.append_page_each(plan.needy, ids[:given]), ids[:given])
    starts = plan.starts
    rows.scheduled[batch.rows] = starts + 1
    left = rows.left[batch.rows] - 1
    rows.left[batch.rows] = left
    final = np.flatnonzero(left == 0)
    if len(final):
        rows.stop_decoding(batch.rows[final], core.forming)
    for chunk in plan.chunks:
        if chunk.request.row < 0:
            _start(core, chunk, slots[used : used + chunk.slots], columns, now_ns, out)
            used += chunk.slots
        _commit_chunk(core, chunk, ids[given : given + chunk.pages], columns)
        given += chunk.pages
    assert given == len(ids), "every page taken has a place"
    assert used == len(slots), "every slot taken has an owner"
    if columns.copied:
        sources, targets = zip(*columns.copied, strict=True)
        memory.copy_state(np.array(sources, np.int32), np.array(targets, np.int32))
    if core.changed:
        _resend_entries(core, batch.rows, columns)
    flight = _flight(core, plan, final, columns)
    forward = Forward(
        rows=batch.rows_column + _packed(columns.rows),
        generations=batch.generations_column + _packed(columns.generations),
        starts=starts.tobytes() + _packed(columns.starts),
        counts=batch.counts_column + _packed(columns.counts),
        flags=batch.flags_column + bytes(columns.flags),
        tokens=b"".join(columns.tokens),
        table_rows=b"".join(columns.table_rows),
        table_indexes=b"".join(columns.table_indexes),
        table_pages=b"".join(columns.table_pages),
        sampling=columns.sampling,
        slots=batch.slots_column + b"".join(columns.slots),
    )
    core.totals.forwards += 1
    flight.launched_ns = now_ns
    if plan.chunks:
        flight.prompt_tokens = sum(chunk.count for chunk in plan.chunks)
    core.in_flight += 1
    if core.microbatches > 1:
        microbatches.launched(core, flight)
    assert core.in_flight <= core.in_flight_max, "no more forwards are in flight than stages keep busy"
    core.busy = True
    return _seal(core, forward, flight)


def _commit_chunk(core: CoreState, chunk: Chunk, pages: Int32s, columns: Columns) -> None:
    request, rows = chunk.request, core.rows
    assert core.memory is not None, "only an epoch schedules"
    row = request.row
    assert chunk.start == request.scheduled_tokens == int(rows.scheduled[row]), "chunks are contiguous"
    assert request.sequence is not None, "a request is prefilled from its sequence"
    generation = int(rows.generation[row])
    if len(pages):
        first = rows.append_pages(row, pages)
        indexes = np.arange(first, first + len(pages), dtype=np.int32)
        columns.add_entries(np.full(len(pages), row, np.int32), indexes, pages)
    end = chunk.start + chunk.count
    request.scheduled_tokens = end
    request.chunk_seq = core.seq + 1
    rows.scheduled[row] = end
    checkpoints.chunk_ends(core, request, end)
    columns.chunks.append((row, generation, end))
    core.totals.prompt_tokens += chunk.count
    core.totals.recomputed_tokens += max(0, min(end, request.reached_tokens) - chunk.start)
    columns.rows.append(row)
    columns.generations.append(generation)
    columns.starts.append(chunk.start)
    columns.counts.append(chunk.count)
    columns.slots.append(rows.slots[row, :1].tobytes())
    columns.tokens.append(request.sequence[chunk.start : end].tobytes())
    samples = end == request.target_tokens and bool(rows.left[row])
    columns.flags.append(EXPLICIT | SAMPLE if samples else EXPLICIT)
    if end == request.target_tokens:
        _finish_prefill(core, request, samples, columns)


def _resend_entries(core: CoreState, decoding: Rows, columns: Columns) -> None:
    """Entries of this forward's rows whose pages became the cache's equal ones."""
    rows, going = core.rows, {*decoding.tolist(), *columns.rows}
    for row in sorted(core.changed.keys() & going):
        indexes = np.array(core.changed.pop(row), np.int32)
        columns.add_entries(np.full(len(indexes), row, np.int32), indexes, rows.table[row, indexes])


def _start(core: CoreState, chunk: Chunk, slots: Int32s, columns: Columns, now_ns: int, out: Outputs) -> None:
    """The request leaves the queue and gets a row and its slots; it is the resident until its prompt is covered."""
    request = chunk.request
    core.queue.began(request, chunk.charged_tokens, overtakes=request is not core.trial)
    kept = b"".join(request.kept)
    assert len(kept) == 8 * request.output_tokens, "all output so far is kept"
    row = core.rows.assign(request, slots)
    core.move(request, Event.ADMIT)
    prompt = request.group.prompt
    request.sequence = np.concatenate([prompt, np.frombuffer(kept, np.int64)]) if kept else prompt
    request.target_tokens = len(request.sequence)
    request.scheduled_tokens = 0
    request.last_wait = ""
    caching.begin(core, request, chunk.hit)
    request.started = True
    _first_columns(core, chunk, columns)
    core.steady = plus(core.steady, request.steady)
    request.began_output = request.output_tokens
    core.expected.began(request.group.namespace, request.max_output - request.began_output)
    if not chunk.last:
        assert core.resident is None, "one request at a time is partly prefilled"
        core.resident = request
    core.admit_interval_ns += (now_ns - core.queue_moved_ns - core.admit_interval_ns) // 8
    core.queue_moved_ns = now_ns
    numbers = {
        "row": row,
        "generation": int(core.rows.generation[row]),
        "tokens": request.target_tokens,
        "chunk_tokens": chunk.count,
        "chunk_pages": chunk.pages,
        "waited_ms": (now_ns - request.arrived_ns) // 1_000_000,
    }
    if request is core.trial:
        numbers["losses"] = request.losses
    cut = ""
    if chunk.hit is not None:
        match, cut = chunk.hit.match, chunk.hit.match.cut
        numbers |= {"cached_tokens": match.tokens, "matched_tokens": match.matched_tokens}
        numbers["queried_tokens"] = match.asked_tokens
    if chunk.left_tokens:
        numbers["left_tokens"] = chunk.left_tokens
    out.decisions.append(Decided(now_ns, Verdict.ADMITTED, request.number, cut, numbers))


def _first_columns(core: CoreState, chunk: Chunk, columns: Columns) -> None:
    """What the ranks learn of a row's new generation: its sampling, and what it starts from in the cache."""
    rows, row = core.rows, chunk.request.row
    generation, pages = int(rows.generation[row]), int(rows.pages[row])
    columns.sampling.append(_row_sampling(chunk.request, generation))
    if pages:
        indexes = np.arange(pages, dtype=np.int32)
        columns.add_entries(np.full(pages, row, np.int32), indexes, rows.table[row, :pages])
    if chunk.hit is not None and chunk.hit.match.slot:
        columns.copied.append((chunk.hit.match.slot, int(rows.slots[row, 0])))
        columns.hits.append((row, generation))


def _finish_prefill(core: CoreState, request: Request, samples: bool, columns: Columns) -> None:
    core.move(request, Event.PREFILLED)
    request.sequence = None
    if core.resident is request:
        core.resident = None
    if not samples:
        columns.scored.append((request.row, int(core.rows.generation[request.row])))
        return
    row = request.row
    core.rows.bind(row, core.forming)
    core.rows.left[row] -= 1
    if core.rows.left[row] == 0:
        columns.final.append(len(columns.sampled))
    else:
        core.rows.start_decoding(row)
    columns.sampled.append(row)


def _row_sampling(request: Request, generation: int) -> RowSampling:
    """Sampling of a row's new generation; prompt log probabilities that were delivered are not asked for again."""
    group, sampling = request.group, request.group.sampling
    if sampling.prompt_logprobs >= 0 and request.prompt_logprobs_next >= request.prompt_tokens:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
    penalized = _penalized(sampling)
    output = request.sequence[request.prompt_tokens :] if request.sequence is not None else group.prompt[:0]
    banned = request.min_output > 0 and len(group.stop_ids) > 0
    return RowSampling(
        row=request.row,
        generation=generation,
        sampling=sampling,
        choice=request.choice,
        ban_before=request.prompt_tokens + request.min_output if banned else 0,
        banned=group.stop_ids.tobytes() if banned else b"",
        prompt_ids=group.prompt.tobytes() if penalized else b"",
        output_ids=output.tobytes() if penalized else b"",
    )


def _penalized(sampling: Sampling) -> bool:
    return bool(
        sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    )


def _flight(core: CoreState, plan: StepPlan, final: Rows, columns: Columns) -> Flight:
    batch, rows = plan.batch, core.rows
    if not columns.sampled:
        return Flight(
            seq=core.seq + 1,
            forward=True,
            releases=rows.releases,
            rows=batch.rows,
            generations=batch.generations,
            frontends=batch.frontends,
            requests=batch.requests,
            rows_column=batch.rows_column,
            generations_column=batch.generations_column,
            final=final,
            scored=tuple(columns.scored),
            chunks=tuple(columns.chunks),
            hits=tuple(columns.hits),
        )
    fresh = rows.batch_of(np.array(columns.sampled, np.intp))
    late = np.array(columns.final, np.intp) + len(batch) if columns.final else NOBODY
    return Flight(
        seq=core.seq + 1,
        forward=True,
        releases=rows.releases,
        rows=np.concatenate([batch.rows, fresh.rows]),
        generations=np.concatenate([batch.generations, fresh.generations]),
        frontends=np.concatenate([batch.frontends, fresh.frontends]),
        requests=np.concatenate([batch.requests, fresh.requests]),
        rows_column=batch.rows_column + fresh.rows_column,
        generations_column=batch.generations_column + fresh.generations_column,
        final=np.concatenate([final, late]),
        scored=tuple(columns.scored),
        chunks=tuple(columns.chunks),
        hits=tuple(columns.hits),
    )


def _seal(core: CoreState, forward: Forward | None, flight: Flight) -> Step:
    assert core.memory is not None, "only an epoch has steps"
    core.seq += 1
    assert flight.seq == core.seq, "seq is dense"
    ops, logical = core.memory.seal(core.seq)
    core.flights.append(flight)
    core.told_through = core.processed_through
    core.totals.steps += 1
    return Step(
        epoch=core.epoch,
        seq=core.seq,
        microbatch=flight.microbatch,
        processed_through=core.processed_through,
        released=[],
        ops=ops,
        forward=forward,
        logical=logical,
    )
