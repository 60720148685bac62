"""The rank double: it checks every step as a real rank would have to, and reports tokens that are known beforehand.

Owns what a rank must hold: tables, histories, KV and states as hashes, sampling. Must never realize anything, nor run a
step that a real rank could not run: it fails with an assertion about the step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from allocator.checks import STRICT, Checks
from allocator.columns import i32, i64, pack_i32, pack_i64
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.logical.mirror import LogicalMirror
from allocator.ops import CopyState, Free, Op, Rebind, Take
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from ipc.messages import EXPLICIT, SAMPLE, Forward, Logprobs, ModelFacts, RowLogprobs, RowSampling, Step

MASK = 2**64 - 1
UNIT_BYTES = 256


@dataclass(frozen=True)
class Shape:
    """Bands beside full attention: tokens of each window, longest first, and whether there is recurrent state."""

    windows: tuple[int, ...] = ()
    state: bool = False
    full_bytes: int = UNIT_BYTES
    window_bytes: int = UNIT_BYTES // 2
    slot_bytes: int = 5 * UNIT_BYTES // 2


FULL_ONLY = Shape()


def geometry(pages: int, page_size: int = 4, shape: Shape = FULL_ONLY, stages: int = 1) -> Geometry:
    """A first stage with room for exactly `pages` pages of full attention, shared by all bands of the shape.

    A second one has twice the full attention, no windows, and an arena a little too small for it; a third one has no
    full attention where the shape has anything else; later ones are like the first.
    """
    first = _stage(pages, shape)
    more = [
        _stage(2 * pages - 1, replace(shape, full_bytes=2 * shape.full_bytes, window_bytes=0))
        if shape.full_bytes
        else first,
        _stage(pages, replace(shape, full_bytes=0)) if shape.windows or shape.state else first,
    ]
    smallest = min(band.unit_bytes for band in first.bands if band.unit_bytes and band.kind != "state")
    virtual_pages = 2 * pages * max(1, UNIT_BYTES // smallest)
    return Geometry(
        page_size, virtual_pages, 2 * pages if shape.state else 0, [first, *more, *[first] * stages][:stages]
    )


def _stage(pages: int, shape: Shape) -> StageGeometry:
    bands = [BandGeometry(f"window:{tokens}", "window", shape.window_bytes, tokens) for tokens in shape.windows]
    bands.append(BandGeometry("full", "full", shape.full_bytes))
    if shape.state:
        bands.insert(0, BandGeometry("state", "state", shape.slot_bytes))
    start = max(UNIT_BYTES, *(band.unit_bytes for band in bands))
    return StageGeometry(UNIT_BYTES * pages + start, start, bands)


def next_token(seed: int, choice: int, history: list[int], vocab_size: int, banned: frozenset[int]) -> int:
    """The rank double's sampler: a hash of seed, choice, position and the two newest tokens."""
    mixed = (seed * 6364136223846793005 + choice * 1442695040888963407 + len(history) * 2654435761) & MASK
    for token in history[-2:]:
        mixed = ((mixed ^ token) * 0x9E3779B97F4A7C15) & MASK
        mixed ^= mixed >> 29
    token = mixed % vocab_size
    while token in banned and len(banned) < vocab_size:
        token = (token + 1) % vocab_size
    return token


@dataclass
class RankRow:
    """What a rank holds of one row in its present generation. `prefixes[i]` is a hash of the first i tokens."""

    generation: int
    table: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=lambda: [0])
    computed: int = 0
    sampling: RowSampling | None = None
    microbatch: int = -1  # that of the step with its first sampled token
    sampled_seq: int = 0  # the step with its newest one

    def extend(self, tokens: list[int]) -> None:
        """Tokens that are known from now on."""
        for token in tokens:
            self.history.append(token)
            self.prefixes.append((self.prefixes[-1] * 6364136223846793005 + token + 1) & MASK)


class RankDouble:
    """Applies steps and reports them; every check is an assertion about the step.

    A token's KV and a state are modeled by the hash of all tokens up to there, so what is stale or another row's shows.
    """

    def __init__(self, geometry: Geometry, config: CoreConfig, facts: ModelFacts, epoch: int) -> None:
        self.mirror = LogicalMirror(geometry, Checks(STRICT))
        self.page_size, self.config, self.facts, self.epoch = geometry.page_size, config, facts, epoch
        self.bands = geometry.stages[0].bands
        self.rows: dict[int, RankRow] = {}
        self.live: list[set[int]] = [set() for _ in self.bands]  # ids per band
        self.kv: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}  # band and page -> offset -> prefix and token
        self.states: dict[int, int] = {}  # slot -> prefix
        self.seq = 0
        stages, overlap = len(geometry.stages), config.overlap
        self.microbatches = stages + 1 if stages > 1 and overlap else 1
        self.explicit = stages > 1
        self.in_flight_max = max(self.microbatches, 1 + overlap)
        self.launched: list[int] = []  # seqs with a forward
        self.launched_of = [0] * self.microbatches  # the newest of each micro-batch
        self.reports: deque[inputs.Reported] = deque()

    def apply(self, step: Step, processed: int) -> None:
        """Check and run one step; its report waits in `reports`. `processed` is the newest forward fed back."""
        assert step.epoch == self.epoch
        assert step.seq == self.seq + 1
        assert step.processed_through == processed
        self.seq = step.seq
        assert self.mirror.apply_step(step.seq, list(step.ops)) == step.logical
        for op in step.ops:
            self._apply_op(op)
        rows: list[int] = []
        tokens: list[int] = []
        logprobs: list[RowLogprobs] = []
        if step.forward is not None:
            assert sum(seq > processed for seq in self.launched) < self.in_flight_max
            self._enter_microbatch(step.microbatch, step.seq, processed)
            self.launched.append(step.seq)
            rows, tokens, logprobs = self._run(step.forward, processed)
            for row in rows:
                state = self.rows[row]
                assert state.microbatch in (-1, step.microbatch), "a row stays with its micro-batch"
                state.microbatch, state.sampled_seq = step.microbatch, step.seq
        generations = [self.rows[row].generation for row in rows]
        report = inputs.Reported(
            0, step.epoch, step.seq, pack_i32(rows), pack_i32(generations), pack_i64(tokens), logprobs
        )
        self.reports.append(report)

    def _enter_microbatch(self, microbatch: int, seq: int, processed: int) -> None:
        """Stages of a pipeline see one forward of a micro-batch at a time."""
        assert 0 <= microbatch < self.microbatches, "there is such a micro-batch"
        if self.microbatches > 1:
            assert self.launched_of[microbatch] <= processed, "a micro-batch has one forward in flight"
        self.launched_of[microbatch] = seq

    def _apply_op(self, op: Op) -> None:
        if isinstance(op, Rebind):
            for source, target in zip(i32(op.sources).tolist(), i32(op.targets).tolist(), strict=True):
                self.live[op.band].remove(source)
                self.live[op.band].add(target)
                self.kv[op.band, target] = self.kv.pop((op.band, source), {})
        if isinstance(op, CopyState):
            states = [self.states.get(source) for source in i32(op.sources).tolist()]
            for target, state in zip(i32(op.targets).tolist(), states, strict=True):
                assert state is not None, "a copied state was written"
                self.states[target] = state
        for part in op.parts if isinstance(op, Take | Free) else []:
            ids, live = set(i32(part.ids).tolist()), self.live[part.band]
            if isinstance(op, Take):
                assert not live & ids, "a live unit was taken again"
                live |= ids
            else:
                assert live >= ids, "a free unit was freed again"
                live -= ids
                for unit in ids:
                    self.kv.pop((part.band, unit), None)
                    if self.bands[part.band].kind == "state":
                        self.states.pop(unit, None)

    def _run(self, forward: Forward, processed: int) -> tuple[list[int], list[int], list[RowLogprobs]]:
        rows = i32(forward.rows).tolist()
        assert rows, "a forward without rows"
        assert len(set(rows)) == len(rows), "a row twice in one forward"
        assert all(0 <= row < self.config.max_running_requests for row in rows)
        counts, flags = i32(forward.counts).tolist(), list(forward.flags)
        assert sum(counts) <= self.config.max_batched_tokens
        assert min(counts) > 0
        explicit = [bool(flag & EXPLICIT) for flag in flags]
        assert explicit == sorted(explicit), "decode rows come first"
        for row, generation in zip(rows, i32(forward.generations).tolist(), strict=True):
            state = self.rows.get(row)
            if state is None or generation > state.generation:
                self.rows[row] = RankRow(generation)
            else:
                assert generation == state.generation, "a generation never falls"
        self._set_entries(forward, dict(zip(rows, i32(forward.generations).tolist(), strict=True)))
        for sampling in forward.sampling:
            assert self.rows[sampling.row].generation == sampling.generation
            assert self.rows[sampling.row].sampling is None, "sampling comes with the first forward of a generation"
            self.rows[sampling.row].sampling = sampling
        return self._advance(forward, rows, counts, flags, processed)

    def _set_entries(self, forward: Forward, generations: dict[int, int]) -> None:
        entries = zip(
            i32(forward.table_rows).tolist(),
            i32(forward.table_indexes).tolist(),
            i32(forward.table_pages).tolist(),
            strict=True,
        )
        for row, index, page in entries:
            assert row in generations, "entries belong to rows of the forward"
            table = self.rows[row].table
            assert index <= len(table), "entries are appended, or replace others"
            assert page in self.live[-1], "a table names a live page"
            table[index : index + 1] = [page]

    def _slots(self, forward: Forward, rows: list[int]) -> list[int]:
        """The working slot of each row, 0 for a model without state."""
        slots = i32(forward.slots).tolist()
        if self.bands[0].kind != "state":
            assert not slots
            return [0] * len(rows)
        assert len(slots) == len(rows) == len(set(slots)), "every row has a working slot of its own"
        assert self.live[0] >= set(slots), "a working slot is live"
        return slots

    def _advance(
        self, forward: Forward, rows: list[int], counts: list[int], flags: list[int], processed: int
    ) -> tuple[list[int], list[int], list[RowLogprobs]]:
        given = i64(forward.tokens).tolist()
        sampled: list[int] = []
        tokens: list[int] = []
        logprobs: list[RowLogprobs] = []
        entries = zip(rows, i32(forward.starts).tolist(), counts, flags, self._slots(forward, rows), strict=True)
        for row, start, count, flag, slot in entries:
            state = self.rows[row]
            if start and not state.computed:
                self._recall(state, start)
            assert start == state.computed, "starts are contiguous"
            chunk = len(state.history) == start
            assert chunk or bool(flag & EXPLICIT) == self.explicit, "a later stage's token is no earlier one's to know"
            if chunk:
                assert flag & EXPLICIT, "the tokens of a chunk come with it"
                state.extend(given[:count])
            elif self.explicit:
                assert state.sampled_seq <= processed, "a token is known when its step was reported"
                assert given[:count] == [state.history[start]], "a row goes on from the token that it sampled last"
            given = given[count:] if flag & EXPLICIT else given
            assert len(state.history) >= start + count, "the input of a row is known"
            assert len(state.table) == -(-(start + count) // self.page_size), "the table covers the forward, no more"
            self._compute(state, start, count, slot)
            sampling = state.sampling
            assert sampling is not None
            if chunk and sampling.sampling.prompt_logprobs >= 0:
                first = max(1, start)
                values = logprobs_of(state.history[first : start + count])
                if first < start + count:
                    logprobs.append(RowLogprobs(row, state.generation, first, values))
            if flag & SAMPLE:
                assert len(state.history) == state.computed, "only the newest position samples"
                sampled.append(row)
                tokens.append(self._sample(state, sampling))
                if sampling.sampling.logprobs >= 0:
                    logprobs.append(RowLogprobs(row, state.generation, -1, logprobs_of([tokens[-1]])))
        assert not given, "all explicit tokens belong to a row"
        return sampled, tokens, logprobs

    def _recall(self, state: RankRow, start: int) -> None:
        """A row that starts behind a cached prefix: its tokens are what the pages hold."""
        for position in range(start):
            page = state.table[position // self.page_size]
            _, token = self.kv[len(self.bands) - 1, page][position % self.page_size]
            state.extend([token])
        state.computed = start

    def _compute(self, state: RankRow, start: int, count: int, slot: int) -> None:
        """Read what the positions [start, start + count) see in every band, then write them."""
        end = start + count
        for band, geometry in enumerate(self.bands):
            if geometry.kind == "state":
                assert start == 0 or self.states.get(slot) == state.prefixes[start], "the state before the first token"
                self.states[slot] = state.prefixes[end]
                continue
            first = max(0, start - geometry.window_tokens + 1) if geometry.kind == "window" else 0
            for position in range(first, end):
                page, offset = state.table[position // self.page_size], position % self.page_size
                assert page in self.live[band], "what is read and written is live"
                held = self.kv.setdefault((band, page), {})
                content = (state.prefixes[position + 1], state.history[position])
                if position >= start:
                    assert offset not in held, "a position is written once"
                    held[offset] = content
                assert held.get(offset) == content, "a row reads what its own tokens, or equal ones, wrote"
        state.computed = end

    def _sample(self, state: RankRow, sampling: RowSampling) -> int:
        position = len(state.history)
        banned = frozenset(i64(sampling.banned).tolist()) if position < sampling.ban_before else frozenset[int]()
        seed = sampling.sampling.seed
        assert seed is not None
        token = next_token(seed, sampling.choice, state.history, self.facts.vocab_size, banned)
        state.extend([token])
        return token


def logprobs_of(tokens: list[int]) -> Logprobs:
    """Log probabilities whose chosen values are the tokens themselves, so that a shift would be seen."""
    values = np.array(tokens, "<f4").tobytes()
    return Logprobs(1, values, pack_i32([1] * len(tokens)), pack_i64(tokens), values)
