"""A simulated world for the core: one rank that checks every step, one front end that checks every message.

The rank double realizes nothing; it holds what a rank must hold (tables, histories, sampling) and fails on any step
that a real one could not run. Its tokens are a pure function of seed, choice, position and history, so what a client
must receive is known beforehand whatever was batched, retracted or aborted in between.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from allocator.checks import STRICT, Checks
from allocator.columns import i32, i64, pack_i32, pack_i64
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.logical.mirror import LogicalMirror
from allocator.ops import Free, Op, Take
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided, Outputs
from daemon.core.scheduler import SchedulerCore
from ipc.messages import (
    EXPLICIT,
    SAMPLE,
    Accepted,
    Finished,
    Forward,
    Generate,
    Logprobs,
    ModelFacts,
    Refused,
    RowLogprobs,
    RowSampling,
    Sampling,
    Step,
)

MASK = 2**64 - 1
UNIT_BYTES = 256
NEUTRAL = Sampling(temperature=0.0)


def geometry(pages: int, page_size: int = 4) -> Geometry:
    """One stage, one band of full attention with room for exactly `pages` pages."""
    stage = StageGeometry(UNIT_BYTES * (pages + 1), UNIT_BYTES, [BandGeometry("full", "full", UNIT_BYTES)])
    return Geometry(page_size, 2 * pages, 0, [stage])


def facts(vocab_size: int = 97, max_model_len: int = 512) -> ModelFacts:
    """A small model."""
    return ModelFacts("toy", "toy", vocab_size, max_model_len, "float32")


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


def expected_output(generate: Generate, accepted: Accepted, choice: int, vocab_size: int) -> tuple[list[int], str]:
    """What one choice must produce when nothing cuts it short, and the reason it ends with."""
    history = i64(generate.prompt).tolist()
    stops = frozenset(i64(generate.stop_ids).tolist())
    output: list[int] = []
    while len(output) < accepted.max_tokens:
        banned = stops if len(output) < generate.min_tokens else frozenset[int]()
        token = next_token(accepted.seed, choice, history, vocab_size, banned)
        history.append(token)
        output.append(token)
        if token in stops and len(output) > generate.min_tokens:
            return output, "stop"
    return output, "length"


@dataclass
class RankRow:
    """What a rank holds of one row in its present generation."""

    generation: int
    table: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    computed: int = 0
    sampling: RowSampling | None = None


class RankDouble:
    """Applies steps and reports them; every check is an assertion about the step."""

    def __init__(self, geometry: Geometry, config: CoreConfig, facts: ModelFacts, epoch: int) -> None:
        self.mirror = LogicalMirror(geometry, Checks(STRICT))
        self.page_size, self.config, self.facts, self.epoch = geometry.page_size, config, facts, epoch
        self.rows: dict[int, RankRow] = {}
        self.holder: dict[int, tuple[int, int]] = {}  # live page -> row and generation whose table names it
        self.live: set[int] = set()
        self.seq = 0
        self.launched: list[int] = []  # seqs with a forward
        self.reports: deque[inputs.Reported] = deque()
        self.most_rows = 0

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
            assert sum(seq > processed for seq in self.launched) < (2 if self.config.overlap else 1)
            self.launched.append(step.seq)
            rows, tokens, logprobs = self._run(step.forward)
        generations = [self.rows[row].generation for row in rows]
        report = inputs.Reported(
            0, step.epoch, step.seq, pack_i32(rows), pack_i32(generations), pack_i64(tokens), logprobs
        )
        self.reports.append(report)

    def _apply_op(self, op: Op) -> None:
        for part in op.parts if isinstance(op, Take | Free) else []:
            ids = i32(part.ids).tolist()
            if isinstance(op, Take):
                assert not self.live & set(ids), "a live page was taken again"
                self.live |= set(ids)
            else:
                assert self.live >= set(ids), "a free page was freed again"
                self.live -= set(ids)
                for page in ids:
                    self.holder.pop(page, None)

    def _run(self, forward: Forward) -> tuple[list[int], list[int], list[RowLogprobs]]:
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
        self._append_entries(forward, dict(zip(rows, i32(forward.generations).tolist(), strict=True)))
        for sampling in forward.sampling:
            assert self.rows[sampling.row].generation == sampling.generation
            assert self.rows[sampling.row].computed == 0, "sampling comes with the first forward of a generation"
            self.rows[sampling.row].sampling = sampling
        return self._advance(forward, rows, counts, flags)

    def _append_entries(self, forward: Forward, generations: dict[int, int]) -> None:
        entries = zip(
            i32(forward.table_rows).tolist(),
            i32(forward.table_indexes).tolist(),
            i32(forward.table_pages).tolist(),
            strict=True,
        )
        for row, index, page in entries:
            assert row in generations, "entries belong to rows of the forward"
            assert index == len(self.rows[row].table), "entries are appended"
            assert page in self.live, "a table names a live page"
            assert page not in self.holder, "a live page has one owner"
            self.rows[row].table.append(page)
            self.holder[page] = (row, generations[row])

    def _advance(
        self, forward: Forward, rows: list[int], counts: list[int], flags: list[int]
    ) -> tuple[list[int], list[int], list[RowLogprobs]]:
        given = i64(forward.tokens).tolist()
        sampled: list[int] = []
        tokens: list[int] = []
        logprobs: list[RowLogprobs] = []
        for row, start, count, flag in zip(rows, i32(forward.starts).tolist(), counts, flags, strict=True):
            state = self.rows[row]
            assert start == state.computed, "starts are contiguous"
            if flag & EXPLICIT:
                assert len(state.history) == start
                state.history += given[:count]
                given = given[count:]
            assert len(state.history) >= start + count, "the input of a row is known"
            assert len(state.table) * self.page_size >= start + count, "the table covers the forward"
            assert len(state.table) == -(-(start + count) // self.page_size), "no page is held too early"
            for page in state.table:
                assert self.holder.get(page) == (row, state.generation), "a row reads only pages it holds"
            state.computed = start + count
            sampling = state.sampling
            assert sampling is not None
            if flag & EXPLICIT and sampling.sampling.prompt_logprobs >= 0:
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

    def _sample(self, state: RankRow, sampling: RowSampling) -> int:
        position = len(state.history)
        banned = frozenset(i64(sampling.banned).tolist()) if position < sampling.ban_before else frozenset[int]()
        seed = sampling.sampling.seed
        assert seed is not None
        token = next_token(seed, sampling.choice, state.history, self.facts.vocab_size, banned)
        state.history.append(token)
        return token


def logprobs_of(tokens: list[int]) -> Logprobs:
    """Log probabilities whose chosen values are the tokens themselves, so that a shift would be seen."""
    values = np.array(tokens, "<f4").tobytes()
    return Logprobs(1, values, pack_i32([1] * len(tokens)), pack_i64(tokens), values)


@dataclass
class Client:
    """What one request's front end was told, per choice."""

    generate: Generate
    accepted: Accepted
    frontend: str
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[int]]
    prompt_logprobs: dict[int, list[int]]
    finished: dict[int, Finished] = field(default_factory=dict)


class World:
    """The core, its rank and its front ends; every input passes `feed`, every output is checked there."""

    def __init__(
        self, config: CoreConfig | None = None, pages: int = 64, model: ModelFacts | None = None, begin: bool = True
    ) -> None:
        self.config = config or CoreConfig(page_size=4, max_running_requests=4, max_batched_tokens=32)
        self.core = SchedulerCore(self.config, Checks(STRICT))
        self.pages, self.facts = pages, model or facts()
        self.now_ns = 1_000_000_000
        self.epoch = 0
        self.decisions: list[Decided] = []
        self.refusals: list[Refused] = []
        self.clients: dict[tuple[str, str], Client] = {}
        self.by_request: dict[int, tuple[Client, int]] = {}
        self.inputs: list[inputs.Input] = []
        self.log = bytearray()  # canonical bytes of every step and decision
        self.processed = 0
        self.steps: list[Step] = []
        self.wants_tick = False
        self.rank: RankDouble | None = None
        self.pending: Generate | None = None
        if begin:
            self.begin()

    def begin(self) -> None:
        """A new epoch: fresh ranks."""
        self.epoch += 1
        shape = geometry(self.pages, self.config.page_size)
        self.rank = RankDouble(shape, self.config, self.facts, self.epoch)
        self.processed = 0
        self.feed(inputs.EpochBegan(self.now_ns, self.epoch, shape, self.facts))

    def feed(self, item: inputs.Input) -> Outputs:
        """Feed the core and hand its outputs to the doubles."""
        self.inputs.append(item)
        out = self.core.feed(item)
        assert (out.step is None) or isinstance(item, inputs.Ticked), "only a tick emits a step"
        self.wants_tick = out.wants_tick
        for decision in out.decisions:
            self.log += msgspec.msgpack.encode(decision)
            self.decisions.append(decision)
        self._take_tokens(out)
        for reply in out.replies:
            self._take_reply(self.core.frontends[reply.frontend], reply.message)
        if out.step is not None:
            self.log += msgspec.msgpack.encode(out.step)
            self.steps.append(out.step)
            assert self.rank is not None
            self.rank.apply(out.step, self.processed)
        self.check_counts()
        return out

    def _take_tokens(self, out: Outputs) -> None:
        if out.tokens is None:
            return
        columns = zip(
            out.tokens.frontends.tolist(), out.tokens.requests.tolist(), out.tokens.tokens.tolist(), strict=True
        )
        for frontend, number, token in columns:
            client, choice = self.by_request[number]
            assert self.core.frontends[frontend] == client.frontend
            assert choice not in client.finished, "nothing after the end reaches a client"
            client.tokens[choice].append(token)
        for entry in out.tokens.logprobs:
            client, choice = self.by_request[entry.request]
            values = np.frombuffer(entry.values.chosen, "<f4").astype(int).tolist()
            assert choice not in client.finished
            if entry.prompt_position < 0:
                client.logprobs[choice] += values
            else:
                assert entry.prompt_position == len(client.prompt_logprobs[choice]) + 1, "each position once"
                client.prompt_logprobs[choice] += values

    def _take_reply(self, frontend: str, message: Accepted | Refused | Finished) -> None:
        if isinstance(message, Refused):
            self.refusals.append(message)
        elif isinstance(message, Accepted):
            known = self.clients.get((frontend, message.id))
            if known is not None and known.accepted == message:
                return
            assert known is None or len(known.finished) == known.accepted.n, "an id in use is not accepted anew"
            assert self.pending is not None
            choices = range(message.n)
            client = Client(
                self.pending,
                message,
                frontend,
                {k: [] for k in choices},
                {k: [] for k in choices},
                {k: [] for k in choices},
            )
            self.clients[frontend, message.id] = client
            for choice in choices:
                self.by_request[message.first_request + choice] = (client, choice)
        else:
            client, choice = self.by_request[message.request]
            assert client.finished.setdefault(choice, message) == message, "a choice ends once"

    # --- inputs ----------------------------------------------------------------------------------------------------

    def arrive(self, generate: Generate, frontend: str = "fe", seed: int = 7) -> Outputs:
        """A request arrives; its `Accepted` or `Refused` is among the outputs."""
        self.pending = generate
        return self.feed(inputs.Arrived(self.now_ns, frontend, generate, seed))

    def send(self, id: str, prompt: list[int] | int, max_tokens: int | None = 4, **fields: object) -> Outputs:
        """Arrive with a prompt given as tokens or as a length."""
        tokens = [(7 * k + len(id)) % 90 for k in range(prompt)] if isinstance(prompt, int) else prompt
        fields.setdefault("sampling", NEUTRAL)
        return self.arrive(Generate(id=id, prompt=pack_i64(tokens), max_tokens=max_tokens, **fields))  # type: ignore[arg-type]

    def abort(self, id: str, frontend: str = "fe", by: str = "client") -> Outputs:
        """End a request from outside."""
        return self.feed(inputs.Aborted(self.now_ns, frontend, id, by))

    def tick(self) -> Outputs:
        """One iteration, a millisecond later."""
        self.now_ns += 1_000_000
        return self.feed(inputs.Ticked(self.now_ns))

    def report(self) -> Outputs:
        """Feed the oldest report that waits."""
        assert self.rank is not None
        item = msgspec.structs.replace(self.rank.reports.popleft(), now_ns=self.now_ns)
        if item.seq in self.rank.launched:
            self.processed = item.seq
        return self.feed(item)

    @property
    def reports_waiting(self) -> int:
        """Steps launched and not reported."""
        return len(self.rank.reports) if self.rank is not None else 0

    def run(self, limit: int = 10_000) -> None:
        """Tick and report, as an engine would, until nothing wants either."""
        for _ in range(limit):
            if self.wants_tick:
                self.tick()
            elif self.reports_waiting:
                self.report()
            else:
                return
        raise AssertionError("the world does not come to rest")

    # --- checks ----------------------------------------------------------------------------------------------------

    def knows(self, frontend: str, id: str) -> bool:
        """Whether the core keeps this id: live, or ended and not acknowledged."""
        return self.core._state.group_of(frontend, id) is not None

    def verdicts(self, verdict: str) -> list[Decided]:
        """All decisions of one verdict so far."""
        return [decision for decision in self.decisions if decision.verdict == verdict]

    def finished(self, id: str, choice: int = 0, frontend: str = "fe") -> Finished:
        """The terminal message of a choice."""
        return self.clients[frontend, id].finished[choice]

    def output(self, id: str, choice: int = 0, frontend: str = "fe") -> list[int]:
        """The output tokens that a choice's client received."""
        return self.clients[frontend, id].tokens[choice]

    def expected(self, id: str, choice: int = 0, frontend: str = "fe") -> tuple[list[int], str]:
        """What the choice must produce when nothing cuts it short, and why it ends."""
        client = self.clients[frontend, id]
        return expected_output(client.generate, client.accepted, choice, self.facts.vocab_size)

    def check_counts(self) -> None:
        """Conservation of requests, after every input."""
        g = self.core.gauges()
        assert g["received_total"] == g["refused_total"] + g["accepted_total"]
        assert g["accepted_total"] == g["finished_total"] + g["aborted_total"] + g["failed_total"] + g["live"]
        assert g["live"] == g["waiting"] + g["running"] + g["prefilling"]
        assert g["running"] + g["prefilling"] <= self.config.max_running_requests
        assert min(g.values()) >= 0

    def check_rest(self) -> None:
        """At rest nothing is held, and every accepted choice has ended exactly once with what it must have produced."""
        assert self.core.gauges()["live"] == 0
        assert self.core.gauges()["in_flight"] == 0
        assert self.rank is not None
        assert not self.rank.live, "every page came back"
        self.rank.mirror.check_idle()
        ended = [decision.request for decision in self.verdicts("ended")]
        assert len(set(ended)) == len(ended), "one terminal decision per choice"
        assert set(ended) >= set(self.by_request)
        for number, (client, choice) in self.by_request.items():
            assert number in ended
            self._check_client(client, choice)

    def _check_client(self, client: Client, choice: int) -> None:
        finished, tokens = client.finished[choice], client.tokens[choice]
        whole, reason = expected_output(client.generate, client.accepted, choice, self.facts.vocab_size)
        assert tokens == whole[: len(tokens)], "the tokens are those of a lone run"
        assert finished.output_tokens <= len(tokens)
        if finished.reason == "length" or (finished.reason == "stop" and finished.detail.startswith("stop token")):
            assert (tokens, finished.reason, finished.output_tokens) == (whole, reason, len(whole))
        if client.generate.sampling.logprobs >= 0:
            assert client.logprobs[choice] == tokens, "one log probability per token"
        if client.generate.sampling.prompt_logprobs >= 0 and finished.reason in ("length", "stop") and tokens:
            assert client.prompt_logprobs[choice] == i64(client.generate.prompt).tolist()[1:]
