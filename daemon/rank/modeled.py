"""The modeled runner: a device without weights, so that the whole daemon runs where no model and no GPU is.

Owns a tiny arena whose pages hold a running hash of each sequence, and tokens drawn from a hash of everything a real
model would read through its page table. Must never import torch. Invariant: a stale, foreign or missing byte in any
page of a row changes every later token of that row, so wrong memory is seen as wrong text.

    stored at position p:   S[p] = S[p-1] + mix(token[p] + p * GOLDEN)          (uint64, 8 bytes per token)
    context of position p:  C[p] = sum over i <= p of mix(S[i] + i * GOLDEN)    (every page is read)
    token at p+1:           mix(C[p] + key), key from (seed, choice, p+1), or 0 when the row is greedy
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from allocator.columns import Int64s, pack_i32, pack_i64
from allocator.geometry import Geometry
from daemon.rank.batch import BandPages, Batch, check_tokens
from daemon.rank.device import Device, HostDevice
from daemon.rank.errors import BadOption
from daemon.rank.noise import GOLDEN, Hashes, mix, row_keys
from daemon.rank.runner import Outcome, Prepared
from daemon.rank.sizes import KVShape, plan_and_size
from ipc.messages import Logprobs, ModelFacts, RankSettings, RowLogprobs

TOKEN_BYTES = 8
ARENA_BYTES_DEFAULT = 64 << 20
OPTIONS = {
    "vocab_size": "49152",
    "max_model_len": "8192",
    "first_token": "32",  # sampled ids run from here to vocab_size - 1, so that no special token appears by chance
    "eos_id": "2",
    "eos_ppm": "0",  # how often, in a million tokens, a row ends itself
    "delay_us": "0",  # time from launch to tokens, per forward
    "token_delay_us": "0",  # and per computed token on top
}


class ModeledOptions(NamedTuple):
    """The options above as numbers."""

    vocab_size: int
    max_model_len: int
    first_token: int
    eos_id: int
    eos_ppm: int
    delay_us: int
    token_delay_us: int


def read_options(options: dict[str, str]) -> ModeledOptions:
    """Options with defaults filled in; raises BadOption for an unknown name, a non-number or an impossible range."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise BadOption(f"unknown option {unknown[0]!r} of the modeled runner; it has {', '.join(sorted(OPTIONS))}")
    numbers = {}
    for name, default in OPTIONS.items():
        text = options.get(name, default)
        if not text.isdecimal():
            raise BadOption(f"option {name}={text!r} of the modeled runner is not a whole number")
        numbers[name] = int(text)
    read = ModeledOptions(**numbers)
    if not read.first_token < read.vocab_size:
        raise BadOption(f"option first_token={read.first_token} must be below vocab_size={read.vocab_size}")
    return read


class _Launched(NamedTuple):
    result: Outcome
    due_ns: int

    def due_in_s(self) -> float:
        return max(self.due_ns - time.monotonic_ns(), 0) / 1e9

    def outcome(self) -> Outcome:
        time.sleep(self.due_in_s())
        return self.result


class ModeledRunner:
    """Tokens from a hash of what the pages hold. Bytes move at launch; tokens are due after the modeled delay."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._options = read_options(settings.options)
        self.device: Device
        self._stored: Hashes
        self._last: Int64s = np.full(settings.max_running_requests, -1, dtype=np.int64)
        self._due_ns = 0

    def prepare(self) -> Prepared:
        """Size the arena for one layer whose K and V are one float32 each: the 8 bytes of a token's hash."""
        options, settings = self._options, self._settings
        length = min(settings.max_model_len or options.max_model_len, options.max_model_len)
        facts = ModelFacts(
            name=settings.model_name or "modeled",
            architecture="modeled",
            vocab_size=options.vocab_size,
            max_model_len=length,
            dtype="uint64",
            eos_ids=[options.eos_id],
        )
        budget = settings.arena_bytes or ARENA_BYTES_DEFAULT
        sizing = plan_and_size([KVShape(1, 1, 1, "float32")], settings, length, budget).sizing
        versions = {"numpy": np.__version__}
        return Prepared(sizing.geometry, sizing.virtual_pages, sizing.virtual_slots, facts, versions, sizing.lines())

    def begin(self, geometry: Geometry, stage: int) -> None:
        """Open a device with a zeroed arena; `_stored` is uint64[units, page_size] over it."""
        mine = geometry.stages[stage]
        device = HostDevice(mine)
        self.device = device
        units = device.arena.units(len(mine.bands) - 1)
        self._stored = units[:, : geometry.page_size * TOKEN_BYTES].view(np.uint64)

    def launch(self, batch: Batch) -> _Launched:
        """Store the hashes of the batch's tokens, read every page of every sampling row, and choose tokens."""
        check_tokens(batch, self._options.vocab_size)
        tokens = batch.tokens.copy()
        tokens[batch.offsets[:-1][batch.carried]] = self._last[batch.rows[batch.carried]]
        self._store(batch, tokens)
        ends = batch.starts[batch.sampled].astype(np.int64) + batch.counts[batch.sampled]
        draws = self._draw(batch, ends)
        sampled = self._choose(batch, draws, ends)
        self._last[batch.rows[batch.sampled]] = sampled
        now = time.monotonic_ns()
        delay_us = self._options.delay_us + self._options.token_delay_us * tokens.size
        self._due_ns = max(now, self._due_ns) + delay_us * 1000
        logprobs = self._output_logprobs(batch, sampled, draws) + self._prompt_logprobs(batch, tokens)
        return _Launched(Outcome(sampled, logprobs), self._due_ns)

    def _store(self, batch: Batch, tokens: Int64s) -> None:
        """Running hashes of each row's new positions, continued from the page that holds its last stored one."""
        steps = mix(tokens.astype(np.uint64) + batch.positions.astype(np.uint64) * GOLDEN)
        sums = np.cumsum(steps, dtype=np.uint64)
        firsts = batch.offsets[:-1]
        before = np.maximum(batch.starts.astype(np.int64) - 1, 0)
        n = np.arange(batch.rows.size)
        pages = _owner_pages(batch)
        carry = self._stored[pages.tables[n, before // batch.page_size], before % batch.page_size]
        carry = np.where(batch.starts > 0, carry, np.uint64(0))
        base = carry - (sums[firsts] - steps[firsts])
        self._stored[pages.write_pages, batch.write_slots] = sums + np.repeat(base, batch.counts)

    def _draw(self, batch: Batch, ends: Int64s) -> Hashes:
        """uint64[k] for the sampling rows: the context hash through the page table, then the row's key."""
        k = batch.sampled
        if k.size == 0:
            return np.zeros(0, dtype=np.uint64)
        cuts = np.zeros(k.size, dtype=np.int64)
        np.cumsum(ends[:-1], out=cuts[1:])
        owner = np.repeat(k, ends)
        positions = np.arange(int(ends.sum())) - np.repeat(cuts, ends)
        pages = _owner_pages(batch).tables[owner, positions // batch.page_size]
        read = self._stored[pages, positions % batch.page_size]
        contexts = np.add.reduceat(mix(read + positions.astype(np.uint64) * GOLDEN), cuts)
        table, rows = batch.sampling, batch.rows[k]
        keys = row_keys(table.seed[rows], table.choice[rows], ends)
        return mix(contexts + np.where(table.temperature[rows] > 0, keys, np.uint64(0)))

    def _choose(self, batch: Batch, draws: Hashes, ends: Int64s) -> Int64s:
        """Token ids int64[k] of the draws; a banned id gives way to the next one that is not banned."""
        options = self._options
        span = np.uint64(options.vocab_size - options.first_token)
        tokens = (draws % span).astype(np.int64) + options.first_token
        stops = (draws >> np.uint64(32)) % np.uint64(1_000_000) < np.uint64(options.eos_ppm)
        tokens[stops] = options.eos_id
        table = batch.sampling
        for at, row in enumerate(batch.rows[batch.sampled].tolist()):
            if ends[at] < table.ban_before[row]:
                banned = set(table.banned[row].tolist())
                while int(tokens[at]) in banned:
                    tokens[at] = (int(tokens[at]) + 1) % options.vocab_size
        return tokens

    def _values(self, chosen: Int64s, draws: Hashes, k: int) -> Logprobs:
        """Modeled log probabilities: the chosen token first, then its neighbours in the vocabulary, -1/8 per rank."""
        steps = np.arange(max(k, 1))
        top_ids = (chosen[:, None] + steps[None, :k]) % self._options.vocab_size
        base = -((draws >> np.uint64(40)).astype(np.float32) + 1.0) / np.float32(1 << 24)
        top_values = base[:, None] - steps[None, :k].astype(np.float32) / 8
        return Logprobs(
            k=k,
            chosen=base.astype("<f4").tobytes(),
            ranks=pack_i32(np.ones(chosen.size)),
            top_ids=pack_i64(top_ids.ravel()),
            top_values=top_values.astype("<f4").tobytes(),
        )

    def _output_logprobs(self, batch: Batch, sampled: Int64s, draws: Hashes) -> list[RowLogprobs]:
        found = []
        for at, i in enumerate(batch.sampled.tolist()):
            k = int(batch.sampling.logprobs[batch.rows[i]])
            if k >= 0:
                values = self._values(sampled[at : at + 1], draws[at : at + 1], k)
                found.append(RowLogprobs(int(batch.rows[i]), int(batch.generations[i]), -1, values))
        return found

    def _prompt_logprobs(self, batch: Batch, tokens: Int64s) -> list[RowLogprobs]:
        """Of every explicit position but the first of the sequence, for rows that want them."""
        found = []
        carried = set(batch.carried.tolist())
        for i in np.flatnonzero(batch.sampling.prompt_logprobs[batch.rows] >= 0).tolist():
            first = max(int(batch.starts[i]), 1)
            own = slice(int(batch.offsets[i]) + first - int(batch.starts[i]), int(batch.offsets[i + 1]))
            if i in carried or own.start >= own.stop:
                continue
            draws = mix(tokens[own].astype(np.uint64) + batch.positions[own].astype(np.uint64) * GOLDEN)
            values = self._values(tokens[own], draws, int(batch.sampling.prompt_logprobs[batch.rows[i]]))
            found.append(RowLogprobs(int(batch.rows[i]), int(batch.generations[i]), first, values))
        return found


def _owner_pages(batch: Batch) -> BandPages:
    """Where the batch's hashes are."""
    pages = batch.bands[-1]
    assert pages is not None, "the modeled runner stores every token in the owner"
    return pages
