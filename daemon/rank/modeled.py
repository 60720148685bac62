"""The modeled runner: a device without weights, so that the whole daemon runs where no model and no GPU is.

Owns a tiny arena that holds running hashes of each sequence, in any mixture of full attention, windows and recurrent
state (options `full`, `windows`, `state`), and tokens drawn from a hash of everything a real model would read through
its page tables and slots. Must never import torch. Invariant: a stale, foreign or missing byte in any page or slot of a
row changes every later token of that row, so wrong memory is seen as wrong text. `modeled_hash` has the arithmetic.

    token at p+1:   mix(draw at p + key), key from (seed, choice, p+1), or 0 when the row is greedy
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from allocator.columns import Int64s, pack_i32, pack_i64
from allocator.decl import MHA, Full, Layer, Part, State, StateLife, StateTensor, Window
from allocator.geometry import Geometry
from allocator.plan import PlaneView, StoragePlan
from daemon.rank.arena import HostArena
from daemon.rank.batch import Batch, check_tokens
from daemon.rank.device import Device, HostDevice
from daemon.rank.errors import BadOption
from daemon.rank.modeled_hash import STATE_WORDS, StateBand, TokenBand, forward, inputs_of
from daemon.rank.noise import Hashes, mix, row_keys
from daemon.rank.runner import Outcome, Prepared
from daemon.rank.sizes import plan_and_size
from ipc.messages import Logprobs, ModelFacts, RankSettings, RowLogprobs

ARENA_BYTES_DEFAULT = 64 << 20
OPTIONS = {
    "vocab_size": "49152",
    "max_model_len": "8192",
    "first_token": "32",  # sampled ids run from here to vocab_size - 1, so that no special token appears by chance
    "eos_id": "2",
    "eos_ppm": "0",  # how often, in a million tokens, a row ends itself
    "delay_us": "0",  # time from launch to tokens, per forward
    "token_delay_us": "0",  # and per computed token on top
    "full": "1",  # 0: no band of full attention stores anything
    "windows": "",  # window bands, as tokens joined by "," or "+": 64+128
    "state": "0",  # 1: recurrent state
}
WINDOW_MIN = 2  # a position's hashes continue from the one before it, which its window must still show


class ModeledOptions(NamedTuple):
    """The options above as numbers."""

    vocab_size: int
    max_model_len: int
    first_token: int
    eos_id: int
    eos_ppm: int
    delay_us: int
    token_delay_us: int
    full: int
    windows: tuple[int, ...]
    state: int

    @property
    def one_layer(self) -> bool:
        """Full attention alone: one word per token."""
        return bool(self.full) and not self.windows and not self.state


def read_options(options: dict[str, str]) -> ModeledOptions:
    """Options with defaults filled in; raises BadOption for an unknown name, a non-number or an impossible range."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise BadOption(f"unknown option {unknown[0]!r} of the modeled runner; it has {', '.join(sorted(OPTIONS))}")
    numbers = {}
    for name, default in OPTIONS.items():
        text = options.get(name, default)
        if name == "windows":
            continue
        if not text.isdecimal():
            raise BadOption(f"option {name}={text!r} of the modeled runner is not a whole number")
        numbers[name] = int(text)
    read = ModeledOptions(**numbers, windows=_windows(options.get("windows", "")))
    if not read.first_token < read.vocab_size:
        raise BadOption(f"option first_token={read.first_token} must be below vocab_size={read.vocab_size}")
    if read.full > 1 or read.state > 1 or not (read.full or read.windows or read.state):
        raise BadOption(
            f"options full={read.full} and state={read.state} are 0 or 1, and one band must store something"
        )
    return read


def _windows(text: str) -> tuple[int, ...]:
    """Window lengths, longest first."""
    parts = text.replace("+", ",").split(",") if text else []
    if not all(part.isdecimal() and int(part) >= WINDOW_MIN for part in parts) or len(set(parts)) != len(parts):
        raise BadOption(f"option windows={text!r} of the modeled runner: distinct numbers from {WINDOW_MIN} up")
    return tuple(sorted(map(int, parts), reverse=True))


def toy_layers(options: ModeledOptions, checkpoint_interval: int) -> list[Layer]:
    """What each layer stores: one layer per band. Windows store two words and more per token, so that units differ."""

    def kv(copies: int, dtype: str) -> MHA:
        return MHA(copies, 1, 1, dtype)

    if options.one_layer:
        return [Layer((Part(kv(1, "float32"), Full()),))]
    layers = [Layer((Part(kv(1, "float64"), Full()),))] if options.full else []
    for number, window in enumerate(options.windows):
        layers.append(Layer((Part(kv(2 + number, "float64"), Window(window)),)))
    if options.state:
        tensors = (StateTensor("near", (STATE_WORDS,), "float64"), StateTensor("deep", (1,), "float64"))
        layers.append(Layer((Part(State(tensors), StateLife(checkpoint_interval)),)))
    return layers


class _Launched(NamedTuple):
    result: Outcome
    due_ns: int

    def due_in_s(self) -> float:
        return max(self.due_ns - time.monotonic_ns(), 0) / 1e9

    def outcome(self) -> Outcome:
        left_s = self.due_in_s()
        if left_s:  # a sleep of nothing still gives the processor away
            time.sleep(left_s)
        return self.result


class ModeledRunner:
    """Tokens from a hash of what the pages hold. Bytes move at launch; tokens are due after the modeled delay."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._options = read_options(settings.options)
        self.device: Device
        self._plan: StoragePlan
        self._bands: list[TokenBand]
        self._state: StateBand | None
        self._last: Int64s = np.full(settings.max_running_requests, -1, dtype=np.int64)
        self._due_ns = 0

    def prepare(self) -> Prepared:
        """Size the arena for the layers of `toy_layers`."""
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
        layers = toy_layers(options, settings.checkpoint_interval or max(256, settings.page_size))
        self._plan, sizing = plan_and_size(layers, settings, length, budget)
        versions = {"numpy": np.__version__}
        return Prepared(sizing.geometry, sizing.virtual_pages, sizing.virtual_slots, facts, versions, sizing.lines())

    def begin(self, geometry: Geometry, stage: int) -> None:
        """Open a device with a zeroed arena, and views of its words."""
        mine = geometry.stages[stage]
        device = HostDevice(mine)
        self.device = device
        self._bands, self._state = _views(self._plan, device.arena, self._options.one_layer)

    def launch(self, batch: Batch) -> _Launched:
        """Store the hashes of the batch's tokens, read all that its rows see, and choose tokens."""
        check_tokens(batch, self._options.vocab_size)
        tokens = batch.tokens.copy()
        tokens[batch.offsets[:-1][batch.carried]] = self._last[batch.rows[batch.carried]]
        ends = batch.starts[batch.sampled].astype(np.int64) + batch.counts[batch.sampled]
        draws = self._keyed(batch, forward(batch, tokens, self._bands, self._state), ends)
        sampled = self._choose(batch, draws, ends)
        self._last[batch.rows[batch.sampled]] = sampled
        now = time.monotonic_ns()
        delay_us = self._options.delay_us + self._options.token_delay_us * tokens.size
        self._due_ns = max(now, self._due_ns) + delay_us * 1000
        logprobs = self._output_logprobs(batch, sampled, draws) + self._prompt_logprobs(batch, tokens)
        return _Launched(Outcome(sampled, logprobs), self._due_ns)

    def _keyed(self, batch: Batch, draws: Hashes, ends: Int64s) -> Hashes:
        """uint64[k] of the sampling rows: their draws with their keys, mixed once more."""
        table, rows = batch.sampling, batch.rows[batch.sampled]
        keys = row_keys(table.seed[rows], table.choice[rows], ends)
        return mix(draws + np.where(table.temperature[rows] > 0, keys, np.uint64(0)))

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
            draws = mix(inputs_of(tokens[own], batch.positions[own]))
            values = self._values(tokens[own], draws, int(batch.sampling.prompt_logprobs[batch.rows[i]]))
            found.append(RowLogprobs(int(batch.rows[i]), int(batch.generations[i]), first, values))
        return found


def _views(plan: StoragePlan, arena: HostArena, one_layer: bool) -> tuple[list[TokenBand], StateBand | None]:
    """The words of every band that stores something."""
    bands: list[TokenBand] = []
    state: StateBand | None = None
    for index, band in enumerate(plan.bands):
        if not band.planes:
            continue
        if band.geometry.kind == "state":
            state = StateBand(*(_words(arena, plane) for plane in band.planes))
        elif one_layer:
            units = arena.units(index)[:, : plan.page_size * 8]
            bands.append(TokenBand(index, 0, [units.view(np.uint64)[:, :, None]]))
        else:
            bands.append(TokenBand(index, band.geometry.window_tokens, [_words(arena, p)[..., 0] for p in band.planes]))
    return bands, state


def _words(arena: HostArena, plane: PlaneView) -> Hashes:
    """uint64[units, *shape] of a plane of 8-byte elements."""
    units = arena.data[: arena.data.size // plane.unit_bytes * plane.unit_bytes].view(np.uint64)
    strides = (plane.unit_bytes, *plane.strides_bytes)
    shape = (arena.data.size // plane.unit_bytes, *plane.shape)
    return np.lib.stride_tricks.as_strided(units[plane.offset_bytes // 8 :], shape, strides)
