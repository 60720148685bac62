"""The modeled runner: a device without weights, so that the whole daemon runs where no model and no GPU is.

Owns a tiny arena that holds running hashes of each sequence, in any mixture of full attention, windows and recurrent
state (options `full`, `windows`, `state`), and tokens drawn from a hash of everything a real model would read through
its page tables and slots. Must never import torch. Invariant: a stale, foreign or missing byte in any page or slot of a
row changes every later token of that row, so wrong memory is seen as wrong text. `modeled_hash` has the arithmetic.

With several stages each has some layers of the toy (option `depth` makes more of them), with several tensor ranks each
stores everything; what they exchange goes over `modeled_link`. The tokens are those of one rank with the same depth.

    token at p+1:   mix(draw at p + key), key from (seed, choice, p+1), or 0 when the row is greedy
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from allocator.columns import Bytes8s, Int64s, pack_i32, pack_i64
from allocator.decl import MLA, Full, Layer, Lifetime, Part, State, StateLife, StateTensor, Window
from allocator.geometry import Geometry
from allocator.plan import PlaneView, StoragePlan
from daemon.layers import split_layers
from daemon.rank.batch import Batch, check_tokens
from daemon.rank.device import Device, HostDevice
from daemon.rank.errors import BadOption, StepRefused
from daemon.rank.layout import SOLO, Layout
from daemon.rank.modeled_hash import STATE_WORDS, Exchange, StateLayer, TokenLayer, ToyStage, forward, inputs_of
from daemon.rank.modeled_link import SocketLink
from daemon.rank.noise import Hashes, mix, row_keys
from daemon.rank.runner import Launched, Outcome, Prepared
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
    "depth": "0",  # blocks of one layer per band; 0: 1 of full attention alone, else 2; more where stages need them
    "deadly_id": "0",  # a forward that computes this token kills the process, as a broken kernel would; 0: none does
    "blind": "0",  # 1: tokens come from their positions alone; nothing is stored, read, or passed between ranks
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
    depth: int
    deadly_id: int
    blind: int

    @property
    def bands(self) -> int:
        """Bands that store something: layers of a block."""
        return bool(self.full) + len(self.windows) + bool(self.state)

    def blocks(self, stages: int) -> int:
        """Blocks of the model when it is split over so many stages."""
        natural = 1 if self.full and self.bands == 1 else 2
        return self.depth or max(natural, -(-stages // self.bands))


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
    if max(read.full, read.state, read.blind) > 1 or not read.bands:
        raise BadOption(
            f"options full={read.full}, state={read.state} and blind={read.blind} are 0 or 1, and one band must store "
            "something"
        )
    return read


def _windows(text: str) -> tuple[int, ...]:
    """Window lengths, longest first."""
    parts = text.replace("+", ",").split(",") if text else []
    if not all(part.isdecimal() and int(part) >= WINDOW_MIN for part in parts) or len(set(parts)) != len(parts):
        raise BadOption(f"option windows={text!r} of the modeled runner: distinct numbers from {WINDOW_MIN} up")
    return tuple(sorted(map(int, parts), reverse=True))


class ToyLayerPlan(NamedTuple):
    """One layer of the toy: its block, counted from 1, and what it stores."""

    block: int
    layer: Layer


def toy_layers(options: ModeledOptions, checkpoint_interval: int, stages: int = 1) -> list[ToyLayerPlan]:
    """The model's layers in order, block by block. Windows store two words and more, so that units differ."""
    made = []
    for block in range(1, options.blocks(stages) + 1):
        kinds: list[tuple[int, Lifetime]] = [(1, Full())] if options.full else []
        kinds += [(2 + number, Window(tokens)) for number, tokens in enumerate(options.windows)]
        made += [ToyLayerPlan(block, Layer((Part(MLA(copies, 0, "float64"), life),))) for copies, life in kinds]
        if options.state:
            words = StateTensor("words", (STATE_WORDS if block == 1 else 1,), "float64")
            made.append(ToyLayerPlan(block, Layer((Part(State((words,)), StateLife(checkpoint_interval)),))))
    return made


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

    def __init__(self, settings: RankSettings, layout: Layout = SOLO, epoch: int = 1) -> None:
        self._settings = settings
        self._options = read_options(settings.options)
        self.layout = layout
        self._epoch = epoch
        self.device: Device
        self._plan: StoragePlan
        self._stage: ToyStage
        self._link: SocketLink | None = None
        self._last: Int64s = np.full(settings.max_running_requests, -1, dtype=np.int64)
        self._due_ns = 0

    def prepare(self) -> Prepared:
        """Size the arena for this stage's layers of the toy."""
        options, settings, layout = self._options, self._settings, self.layout
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
        self._layers = toy_layers(options, settings.checkpoint_interval or max(256, settings.page_size), layout.stages)
        self._mine = split_layers(len(self._layers), settings.stage_layers or [0] * layout.stages)[layout.stage]
        layers = [entry.layer for entry in self._layers]
        self._plan, sizing = plan_and_size(layers, settings, length, budget, self._mine)
        versions = {"numpy": np.__version__}
        return Prepared(sizing.geometry, sizing.virtual_pages, sizing.virtual_slots, facts, versions, sizing.lines())

    def begin(self, geometry: Geometry, stage: int) -> None:
        """Open a device with a zeroed arena, views of its words, and the links to the other ranks."""
        assert stage == self.layout.stage, f"stage {stage} of a runner of stage {self.layout.stage}"
        device = HostDevice(geometry.stages[stage])
        self.device = device
        self._stage = self.view(device.arena.data)
        if self.layout.total > 1 and not self._options.blind:
            settings = self._settings
            self._link = SocketLink(self.layout, self._epoch, settings.rendezvous, settings.collective_timeout_ms)

    def view(self, data: Bytes8s) -> ToyStage:
        """This stage's layers over the words of an arena."""
        views = {(plane.layer, plane.band): plane for band in self._plan.bands for plane in band.planes}
        layers: list[TokenLayer | StateLayer] = []
        for (number, band), plane in sorted(views.items()):
            block, window = self._layers[number].block, self._plan.bands[band].geometry.window_tokens
            kind = self._plan.bands[band].geometry.kind
            words = _words(data, plane)
            layers.append(StateLayer(block, words) if kind == "state" else TokenLayer(block, band, window, words))
        first = self._mine.start
        opens = first == 0 or self._layers[first - 1].block < self._layers[first].block
        blocks = self._layers[-1].block
        return ToyStage(self.layout, blocks, opens, bare=blocks == 1 and len(self._layers) == 1, layers=layers)

    def expect(self, tokens: int) -> None:
        """What the stage before sends waits in its socket until it is asked for."""

    def launch(self, batch: Batch) -> Launched:
        """Store the hashes of the batch's tokens, read all that its rows see, and choose tokens."""
        check_tokens(batch, self._options.vocab_size)
        if self._options.deadly_id and bool((batch.tokens == self._options.deadly_id).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        delay_us = self._options.delay_us + self._options.token_delay_us * batch.tokens.size
        work = self.compute(batch, self._stage)
        answer: Hashes | None = None
        while True:
            try:
                exchange = work.send(answer) if answer is not None else next(work)
            except StopIteration as end:
                return _Launched(end.value, self._started(delay_us))
            answer = self._exchange(exchange, delay_us)

    def compute(self, batch: Batch, stage: ToyStage) -> Generator[Exchange, Hashes, Outcome]:
        """One forward on this rank, over the words of `stage`; yields what it exchanges with the other ranks."""
        if batch.carried.size and self.layout.stages > 1:
            raise StepRefused(f"row {batch.rows[batch.carried[0]]} carries its token, which only the last stage knows")
        tokens = batch.tokens.copy()
        tokens[batch.offsets[:-1][batch.carried]] = self._last[batch.rows[batch.carried]]
        ends = batch.starts[batch.sampled].astype(np.int64) + batch.counts[batch.sampled]
        if self._options.blind:
            span = self._options.vocab_size - self._options.first_token
            return Outcome(ends % span + self._options.first_token if self.layout.last else ends[:0], [])
        found = yield from forward(batch, tokens, stage)
        if not self.layout.last:
            return Outcome(np.zeros(0, dtype=np.int64), [])
        draws = self._keyed(batch, found, ends)
        sampled = self._choose(batch, draws, ends)
        if self.layout.ranks > 1:
            told = yield Exchange("broadcast", sampled.astype(np.uint64))
            sampled = told.astype(np.int64)
        self._last[batch.rows[batch.sampled]] = sampled
        logprobs = self._output_logprobs(batch, sampled, draws) + self._prompt_logprobs(batch, tokens)
        return Outcome(sampled, logprobs)

    def close(self) -> None:
        """Leave the other ranks; harmless twice."""
        if self._link is not None:
            self._link.close()

    def _started(self, delay_us: int) -> int:
        """A forward that can start now, or when its input is due, takes so long: when it is over."""
        self._due_ns = max(time.monotonic_ns(), self._due_ns) + delay_us * 1000
        return self._due_ns

    def _exchange(self, exchange: Exchange, delay_us: int) -> Hashes:
        assert self._link is not None, "one rank alone exchanges nothing"
        call, values = exchange
        if call == "receive":
            values, due_in_ns = self._link.receive_previous(values.shape)
            self._due_ns = max(self._due_ns, time.monotonic_ns() + due_in_ns)
        elif call == "send":
            over_ns = max(time.monotonic_ns(), self._due_ns) + delay_us * 1000
            self._link.send_next(values, over_ns - time.monotonic_ns())
        elif call == "reduce":
            values = self._link.reduce(values)
        else:
            values = self._link.broadcast(values)
        return values

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
        table, rows = batch.sampling, batch.rows[batch.sampled]
        for at in np.flatnonzero(ends < table.ban_before[rows]).tolist():
            banned = set(table.banned[int(rows[at])].tolist())
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
        wanted = batch.sampling.logprobs[batch.rows[batch.sampled]]
        for at in np.flatnonzero(wanted >= 0).tolist():
            i = batch.sampled[at]
            values = self._values(sampled[at : at + 1], draws[at : at + 1], int(wanted[at]))
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


def _words(data: Bytes8s, plane: PlaneView) -> Hashes:
    """uint64[units, *shape] of a plane of 8-byte elements."""
    count = data.size // plane.unit_bytes
    units = data[: count * plane.unit_bytes].view(np.uint64)
    strides = (plane.unit_bytes, *plane.strides_bytes)
    return np.lib.stride_tricks.as_strided(units[plane.offset_bytes // 8 :], (count, *plane.shape), strides)
