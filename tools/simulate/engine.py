"""Engine of a simulation: the real scheduler core with its chain and prefix tree, and a device that only takes time.

Owns the simulated clock, the device that runs one forward after the other, the reports, and an account of every request
that is held against the core's own. Must never decide anything, read a clock that matters to a decision, or skip a
report. Invariants: time never runs backwards; reports come in step order, one per step; a request that was submitted is
refused, or accepted and ends exactly once, with as many tokens as were delivered.

    engine = Engine(CoreConfig(), geometry, facts, Times())
    engine.submit(Generate("a", prompt, GREEDY, max_tokens=32))       # at engine.now_ns
    engine.advance(2 * NS_PER_S)                                      # everything due until then happens
    engine.run()                                                      # until rest
    engine.sent["a"].finished, engine.core.gauges()

    host       tick -> step k      tick -> step k+1        report k -> tick -> step k+2
    device     |-- forward k ------------------------------|-- forward k+1 --------------|
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from allocator.capacity import Demand, StageWalk
from allocator.checks import Checks
from allocator.columns import Int64s, i32, pack_i64
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided, Outputs
from daemon.core.scheduler import SchedulerCore
from daemon.core.state import CoreState
from ipc.messages import (
    EXPLICIT,
    SAMPLE,
    Accepted,
    Continued,
    Finished,
    Forward,
    Generate,
    ModelFacts,
    Refused,
    Sampling,
    Step,
)
from tools.simulate.recording import Recording

NS_PER_S = 1_000_000_000
FRONTEND = "simulate"
GREEDY = Sampling(temperature=0.0)
FACTS = ModelFacts("simulated", "simulated", 1 << 20, 1 << 20, "none")
FOREVER_NS = 1 << 62
ACKNOWLEDGE_EACH = 256  # ended ids that are acknowledged at once
IDLE_TICKS_MAX = 1000  # ticks in a row without a step, nothing else to come, after which a run is stuck


class Stuck(Exception):
    """Requests are live, and nothing that could still happen lets them go on. The text has the core's gauges."""


class Miscounted(Exception):
    """What the engine saw of a request is not what the core says of it."""


class Times(NamedTuple):
    """What a forward takes: a fixed part, so much per prompt token computed and so much per decoding request.

    Attention's growth with the context is in neither: both are means over the contexts of the traffic.
    """

    step_ns: int = 5_000_000
    prefill_ns: int = 10_000
    decode_ns: int = 40_000

    def forward_ns(self, prompt_tokens: int, decoding: int) -> int:
        """Nanoseconds of one forward."""
        return self.step_ns + prompt_tokens * self.prefill_ns + decoding * self.decode_ns


TokenRule = Callable[[Int64s, Int64s], Int64s]
"""From the rows' seeds and the positions of the sampled tokens (int64 each) to token ids (int64)."""


def seed_tokens(seeds: Int64s, positions: Int64s) -> Int64s:
    """Every output token of a request is its seed: requests of different seeds never share output."""
    return seeds


@dataclass(slots=True, eq=False)
class Sent:
    """One request and what became of it; times in nanoseconds, -1: it never came to that. Its prompt is not kept.

    Of several choices `finished` is the last one's to end, and the other times are the first one's.
    """

    id: str
    n: int
    prompt_tokens: int
    arrived_ns: int
    accepted: Accepted | None = None
    refused: Refused | None = None
    finished: Finished | None = None
    admitted_ns: int = -1
    first_token_ns: int = -1
    ended_ns: int = -1
    tokens: int = 0  # output tokens delivered
    cached_tokens: int = -1  # at its first admission
    retractions: int = 0
    recomputed_tokens: int = 0  # scheduled before and taken back by retractions, beside what a new start found cached
    ends: dict[int, str] = field(default_factory=dict)  # reason by choice


class _Due(NamedTuple):
    """A report that comes at `at_ns`."""

    at_ns: int
    report: inputs.Reported


class Engine:
    """One core on a simulated device; see the module.

    `tokens` says what is sampled, `checks` how much the core checks itself. With `clock` (nanoseconds of CPU time) the
    time of the core is taken: `core_ns` has one entry per step with a forward, with all that was fed since the last.
    `on_step` is called with every step, after the core formed it. `decided` counts decisions by verdict and reason;
    `decisions` keeps them all with `keep_decisions`. `recording` gets all that is fed and what it led to.
    """

    def __init__(
        self,
        config: CoreConfig,
        geometry: Geometry,
        facts: ModelFacts = FACTS,
        times: Times | None = None,
        *,
        tokens: TokenRule = seed_tokens,
        checks: Checks | None = None,
        clock: Callable[[], int] | None = None,
        keep_decisions: bool = False,
        on_step: Callable[[Step], None] | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.config, self.geometry, self.facts, self.times = config, geometry, facts, times or Times()
        self.core = SchedulerCore(config, checks)
        self.now_ns = 0
        self.sent: dict[str, Sent] = {}
        self.decided: Counter[tuple[str, str]] = Counter()
        self.decisions: list[Decided] = []
        self.core_ns: list[int] = []
        self.prompt_tokens = 0  # scheduled, recomputed ones among them
        self.output_tokens = 0  # delivered
        self.answered = 0  # requests that were refused, or all of whose choices ended
        self.busy_ns = 0  # the device's
        self._tokens, self._clock, self.on_step = tokens, clock, on_step
        self._keep_decisions, self._recording = keep_decisions, recording
        self._device_free_ns = 0
        self._due: deque[_Due] = deque()
        self._out = Outputs()
        self._spent_ns = 0
        self._idle_ticks = 0
        self._by_number: dict[int, Sent] = {}
        self._lost: dict[int, int] = {}  # by request, tokens that its retractions took back and no start found again
        self._acknowledge: list[str] = []
        self._seeds = np.zeros(config.max_running_requests, np.int64)
        self.feed(inputs.EpochBegan(0, 1, geometry, facts))

    # --- what a client and an operator can do ---------------------------------------------------------------------

    def submit(self, generate: Generate, seed: int | None = None) -> Accepted | Refused:
        """A request arrives now. `seed` (the next number by default) is used where it names none."""
        if generate.id in self.sent:
            raise ValueError(f"id {generate.id!r} was submitted before; every request needs its own")
        sent = Sent(generate.id, generate.n, len(generate.prompt) // 8, self.now_ns)
        self.sent[generate.id] = sent
        self.feed(inputs.Arrived(self.now_ns, FRONTEND, generate, len(self.sent) if seed is None else seed))
        answer = sent.accepted or sent.refused
        if answer is None:
            raise Miscounted(f"request {generate.id!r} was neither accepted nor refused")
        return answer

    def abort(self, id: str) -> None:
        """The client hangs up now; harmless when the request has ended."""
        self.feed(inputs.Aborted(self.now_ns, FRONTEND, id, "client"))

    def control(self, order: str) -> None:
        """An operator's order: `drain`, `stop`, `flush_cache`."""
        self.feed(inputs.Controlled(self.now_ns, order))

    # --- time -----------------------------------------------------------------------------------------------------

    def advance(self, until_ns: int) -> None:
        """Everything that is due until then happens; afterwards it is `until_ns`. Raises Stuck."""
        if until_ns < self.now_ns:
            raise ValueError(f"it is {self.now_ns} ns; time does not go back to {until_ns}")
        while True:
            while self._out.wants_tick:
                self.tick()
            due_ns = self._out.due_ns
            report_ns = self._due[0].at_ns if self._due else None
            coming = [at for at in (report_ns, due_ns) if at is not None]
            if until_ns == FOREVER_NS and (not coming or self._idle_ticks > IDLE_TICKS_MAX):
                self._check_not_stuck()
                break
            if not coming or min(coming) > until_ns:
                self.now_ns = until_ns
                break
            self.now_ns = max(self.now_ns, min(coming))
            if report_ns is not None and report_ns <= self.now_ns:
                self.report()
            else:
                self.tick()

    def run(self) -> None:
        """Go on until rest: nothing is live and nothing is in flight. Raises Stuck."""
        self.advance(FOREVER_NS)
        if self._acknowledge:
            self._acknowledge_ended()

    def tick(self) -> Step | None:
        """One scheduler iteration now."""
        if len(self._acknowledge) >= ACKNOWLEDGE_EACH:
            self._acknowledge_ended()
        step = self.feed(inputs.Ticked(self.now_ns)).step
        self._idle_ticks = self._idle_ticks + 1 if step is None else 0
        return step

    def report(self) -> None:
        """Deliver the oldest report that waits, whatever the time; the caller has seen that there is one."""
        due = self._due.popleft()
        self._idle_ticks = 0
        self.feed(due.report)

    @property
    def reports_waiting(self) -> int:
        """Steps that were launched and not reported."""
        return len(self._due)

    @property
    def state(self) -> CoreState:
        """The core's own state, to look at."""
        return self.core._state

    def live_units(self) -> Demand:
        """Live units per band, in chain order, what the cache holds among them."""
        assert self.state.memory is not None, "the epoch has begun"
        return self.state.memory.chain.live_units()

    def cached_units(self) -> Demand:
        """Units per band that the prefix cache holds."""
        assert self.state.memory is not None, "the epoch has begun"
        cache = self.state.memory.cache
        return cache.held() if cache is not None else self.state.memory.none

    def idle_units(self) -> Demand:
        """Units per band that only the prefix cache holds: nobody reads them, and they are not pinned."""
        assert self.state.memory is not None, "the epoch has begun"
        cache = self.state.memory.cache
        return cache.reclaimable() if cache is not None else self.state.memory.none

    # --- checks ---------------------------------------------------------------------------------------------------

    def check_counts(self) -> None:
        """What the core counts and what was seen here agree; raises Miscounted. At any time."""
        gauges = self.core.gauges()
        count = {name: gauges[f"{name}_total"] for name in ("received", "refused", "accepted")}
        ended = {name: gauges[f"{name}_total"] for name in ("finished", "aborted", "failed")}
        if count["received"] != count["refused"] + count["accepted"]:
            raise Miscounted(f"received is not refused + accepted: {count}")
        if count["accepted"] != sum(ended.values()) + gauges["live"]:
            raise Miscounted(f"accepted {count['accepted']} is not ended + live: {ended}, live {gauges['live']}")
        seen = [sum(self._choices(sent) for sent in self.sent.values())]
        seen += [sum(self._choices(sent) for sent in self.sent.values() if sent.refused is not None)]
        seen += [sum(len(sent.ends) for sent in self.sent.values()), sum(sent.tokens for sent in self.sent.values())]
        told = [count["received"], count["refused"], sum(ended.values()), gauges["output_tokens_total"]]
        if seen != told:
            raise Miscounted(f"received, refused, ended and output tokens: {seen} seen here, {told} by the core")

    def check_rest(self) -> None:
        """At rest every request has its answer and its one end, and only the cache holds units. Raises Miscounted."""
        self.check_counts()
        if self._due or self.state.live:
            raise Miscounted(f"{self.state.live} requests live and {len(self._due)} reports wait: that is no rest")
        for id, sent in self.sent.items():
            if sent.accepted is not None and len(sent.ends) != sent.accepted.n:
                raise Miscounted(f"request {id!r} has {sent.accepted.n} choices and {len(sent.ends)} ends")
        live, cached = self.live_units(), self.cached_units()
        if live != cached:
            raise Miscounted(f"at rest {live} units are live and the cache holds {cached}")
        assert self.state.memory is not None, "the epoch has begun"
        self.state.memory.chain.check()

    # --- inside ---------------------------------------------------------------------------------------------------

    def feed(self, item: inputs.Input) -> Outputs:
        """Feed the core any input; what it says is carried out at once, its step launched on the device."""
        clock = self._clock
        if self._recording is not None:
            self._recording.before(item)
        began = clock() if clock is not None else 0
        out = self._out = self.core.feed(item)
        if clock is not None:
            self._spent_ns += clock() - began
        if self._recording is not None:
            self._recording.after(out)
        for decision in out.decisions:
            self._take_decision(decision)
        if out.tokens is not None and len(out.tokens.requests):
            self._take_tokens(out.tokens.requests)
        for reply in out.replies:
            self._take_reply(reply.message)
        if out.step is not None:
            self._launch(out.step)
        return out

    def _launch(self, step: Step) -> None:
        forward = step.forward
        rows, generations, tokens = b"", b"", b""
        if forward is not None:
            rows, generations, tokens = self._run(forward)
            self.core_ns.append(self._spent_ns)
            self._spent_ns = 0
        done_ns = max(self.now_ns, self._device_free_ns)
        self._due.append(_Due(done_ns, inputs.Reported(done_ns, step.epoch, step.seq, rows, generations, tokens)))
        if self.on_step is not None:
            self.on_step(step)

    def _run(self, forward: Forward) -> tuple[bytes, bytes, bytes]:
        """Let a forward take its time; the columns of its report."""
        for sampling in forward.sampling:
            assert sampling.sampling.seed is not None, "the core draws no seed and passes on the one it was given"
            self._seeds[sampling.row] = sampling.sampling.seed
        flags = np.frombuffer(forward.flags, np.uint8)
        rows, counts = i32(forward.rows), i32(forward.counts)
        explicit = (flags & EXPLICIT) != 0
        prompt = int(counts[explicit].sum())
        cost_ns = self.times.forward_ns(prompt, len(rows) - int(np.count_nonzero(explicit)))
        self._device_free_ns = max(self.now_ns, self._device_free_ns) + cost_ns
        self.busy_ns += cost_ns
        self.prompt_tokens += prompt
        sampled = (flags & SAMPLE) != 0
        rows = rows[sampled]
        positions = i32(forward.starts)[sampled].astype(np.int64) + counts[sampled]
        tokens = self._tokens(self._seeds[rows], positions) % self.facts.vocab_size
        return rows.tobytes(), i32(forward.generations)[sampled].tobytes(), pack_i64(tokens)

    def _take_decision(self, decision: Decided) -> None:
        self.decided[decision.verdict, decision.reason] += 1
        if self._keep_decisions:
            self.decisions.append(decision)
        sent = self._by_number.get(decision.request)
        if sent is None:
            return
        if decision.verdict == "admitted":
            found = decision.numbers.get("cached_tokens", 0)
            if sent.admitted_ns < 0:
                sent.admitted_ns, sent.cached_tokens = self.now_ns, found
            sent.recomputed_tokens += max(0, self._lost.pop(decision.request, 0) - found)
        elif decision.verdict == "retracted":
            sent.retractions += 1
            self._lost[decision.request] = decision.numbers["tokens"]

    def _take_tokens(self, numbers: Int64s) -> None:
        for number in numbers.tolist():
            sent = self._by_number.get(number)
            if sent is None:
                raise Miscounted(f"request {number} got a token and is not live")
            sent.tokens += 1
            if sent.first_token_ns < 0:
                sent.first_token_ns = self.now_ns
        self.output_tokens += len(numbers)

    def _take_reply(self, message: Accepted | Refused | Finished | Continued) -> None:
        sent = self.sent[message.id]
        if isinstance(message, Refused):
            sent.refused = message
            self.answered += 1
        elif isinstance(message, Accepted):
            sent.accepted = message
            for number in range(message.first_request, message.first_request + message.n):
                self._by_number[number] = sent
        else:
            assert isinstance(message, Finished), "nobody here comes back for what it has"
            assert sent.accepted is not None, "only what was accepted ends"
            if message.choice in sent.ends:
                raise Miscounted(f"request {message.id!r} choice {message.choice} ended twice")
            sent.ends[message.choice] = message.reason
            sent.finished, sent.ended_ns = message, self.now_ns
            del self._by_number[message.request]
            self._lost.pop(message.request, None)
            if len(sent.ends) == sent.accepted.n:
                self._acknowledge.append(message.id)
                self.answered += 1

    def _acknowledge_ended(self) -> None:
        ids, self._acknowledge = self._acknowledge, []
        self.feed(inputs.Acknowledged(self.now_ns, FRONTEND, ids))

    def _choices(self, sent: Sent) -> int:
        """For how many choices the core counts this arrival, whatever became of it."""
        return sent.n if 1 <= sent.n <= self.config.n_max else 1

    def _check_not_stuck(self) -> None:
        if self.state.live:
            raise Stuck(f"{self.state.live} requests are live and nothing is to come: {self.core.gauges()}")


# --- arenas -----------------------------------------------------------------------------------------------------------


def chain_start_bytes(bands: list[BandGeometry]) -> int:
    """Bytes before the chain: the sinks of the token bands, and behind them a padding slot of a state band."""
    start = max((band.unit_bytes for band in bands if band.kind != "state"), default=0)
    for band in bands:
        if band.kind == "state" and band.unit_bytes:
            start = (-(-start // band.unit_bytes) + 1) * band.unit_bytes
    return start


def arena_bytes_for(bands: list[BandGeometry], units: Demand) -> int:
    """The smallest one-stage arena that holds so many units of each band (chain order) at once, sink included."""
    start, last = chain_start_bytes(bands), bands[-1].unit_bytes
    end = StageWalk(StageGeometry(0, start, bands)).overlap_bytes([*units[:-1], 0])
    return (-(-end // last) + units[-1]) * last if last else end


def one_stage(bands: list[BandGeometry], page_size: int, arena_bytes: int) -> Geometry:
    """One stage of so many bytes, ids for all that they can hold. Bands in chain order: state, windows, full.

    Raises ValueError where not one unit of each band fits.
    """
    start = chain_start_bytes(bands)
    least = arena_bytes_for(bands, (1,) * len(bands))
    if arena_bytes < least:
        raise ValueError(f"an arena of {arena_bytes:,d} bytes does not hold one unit of each band: {least:,d} bytes do")
    chain = arena_bytes - start
    paged = [band.unit_bytes for band in bands if band.kind != "state" and band.unit_bytes]
    pages = chain // bands[-1].unit_bytes if bands[-1].unit_bytes else sum(chain // unit for unit in paged)
    slots = [band.unit_bytes for band in bands if band.kind == "state"]
    virtual_slots = 0
    if slots:  # a state of no bytes here: one behind every page is all that there can be
        virtual_slots = chain // slots[0] if slots[0] else 2 * pages
    return Geometry(page_size, pages, virtual_slots, [StageGeometry(arena_bytes, start, bands)])
