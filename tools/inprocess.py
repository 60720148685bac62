"""One daemon in one process: a real core and a real step worker, no socket and no clock, driven by the caller.

Owns the loop between them: when a tick is fed and when a report comes back is a seeded choice, so that results arrive
late in every way that one step late allows. Must never change what the core or the worker decide, and is no server.
Every step is checked as the shell checks it (digests), and at rest nothing may be held beyond what the cache holds.

    engine = InProcess(config, settings, runner)
    a = engine.submit(prompt, 32)
    engine.run()
    a.tokens, a.finished
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from allocator.checks import Checks
from allocator.columns import Int32s, pack_i64
from allocator.geometry import Geometry
from daemon.core import inputs, pressure
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided, Outputs
from daemon.core.scheduler import SchedulerCore
from daemon.core.state import CoreState
from daemon.rank.batch import Batch
from daemon.rank.device import Device
from daemon.rank.runner import Launched, Prepared, Runner, open_runner
from daemon.rank.step_worker import InFlight, StepWorker
from ipc.messages import Accepted, Begin, Continued, Finished, Generate, RankSettings, Refused, Sampling, Step
from tools.balloon import Balloon

TICK_NS = 1_000_000
GREEDY = Sampling(temperature=0.0, seed=0)
FRONTEND = "in-process"


class NeverRests(Exception):
    """The engine still wants to go on after the most turns it was allowed."""


def turn_until_rest(turn: Callable[[], bool], core: SchedulerCore, turns_max: int) -> None:
    """Turn until nothing is left to do; raises NeverRests."""
    for _ in range(turns_max):
        if not turn():
            return
    raise NeverRests(f"after {turns_max} turns: {core.gauges()}")


def check_rank_at_rest(worker: StepWorker, geometry: Geometry, live: tuple[int, ...]) -> None:
    """At rest a rank's books hold what the core's do, and nothing pends."""
    rank = f"rank {worker.stage}.{worker.rank}"
    assert worker.diverged_at == 0, f"{rank}: the digests differ from step {worker.diverged_at} on"
    assert tuple(worker.mirror.live_units()) == live, f"{rank}: {worker.mirror.live_units()} is not {live}"
    physical = worker.chain.band_counts().reshape(-1, 4)
    for index, band in enumerate(geometry.stages[worker.stage].bands):
        if band.unit_bytes:
            counts = physical[index].tolist()
            where = f"{rank}, band {band.name}"
            assert counts[0] == live[index], f"{where}: {counts[0]} units live, the core counts {live}"
            assert counts[2] == 0, f"{where}: {counts[2]} units pend at rest"


class CountingDevice:
    """A device that counts the units copied per band and passes everything on."""

    def __init__(self, inner: Device) -> None:
        self._inner = inner
        self.copied: Counter[int] = Counter()

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Count, then copy."""
        self.copied[band] += sources.size
        self._inner.copy(band, sources, targets)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class CountingRunner:
    """A runner whose device counts copies; the model is the inner runner's."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.device: Device
        self.counting: CountingDevice

    def prepare(self) -> Prepared:
        """As the inner runner."""
        return self.inner.prepare()

    def begin(self, geometry: Geometry, stage: int) -> None:
        """A fresh arena, and counts from zero."""
        self.inner.begin(geometry, stage)
        self.counting = CountingDevice(self.inner.device)
        self.device = cast(Device, self.counting)

    def expect(self, tokens: int) -> None:
        """As the inner runner."""
        self.inner.expect(tokens)

    def launch(self, batch: Batch) -> Launched:
        """As the inner runner."""
        return self.inner.launch(batch)


@dataclass
class Sent:
    """One request and all that its front end was told. `number` is 0 when it was refused."""

    id: str
    prompt: list[int]
    number: int = 0
    max_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None
    refused: Refused | None = None
    admissions: list[Decided] = field(default_factory=list)

    @property
    def cached(self) -> list[int]:
        """Tokens that each admission found in the cache, first admission first."""
        return [decision.numbers.get("cached_tokens", 0) for decision in self.admissions]

    @property
    def cuts(self) -> list[str]:
        """What ended the usable hit at each admission."""
        return [decision.reason for decision in self.admissions]


class InProcess:
    """A core, a worker and their front end. `rng` decides when reports are delivered; `late` how likely they wait.

    `arena_bytes` overrides what the runner's sizing gave (0: as sized), so that a world can be as tight as one likes.
    """

    def __init__(
        self,
        config: CoreConfig,
        settings: RankSettings,
        runner: Runner | None = None,
        *,
        prepared: Prepared | None = None,
        arena_bytes: int = 0,
        seed: int = 0,
        late: float = 0.5,
    ) -> None:
        self.settings = settings
        self.runner = CountingRunner(runner or open_runner(settings, 0, 0))
        self.prepared = prepared or self.runner.prepare()
        stage = self.prepared.geometry
        if arena_bytes:
            stage = msgspec.structs.replace(stage, arena_bytes=arena_bytes)
        geometry = Geometry(settings.page_size, self.prepared.virtual_pages, self.prepared.virtual_slots, [stage])
        facts = self.prepared.facts
        self.worker = StepWorker(self.runner, Begin(1, geometry), settings, facts.max_model_len, 0, 0)
        self._open(config, geometry, seed, late)

    def _open(self, config: CoreConfig, geometry: Geometry, seed: int, late: float) -> None:
        """A core and a front end before the ranks that are there; the epoch begins."""
        self.rng = random.Random(seed)
        self.late = late
        self.config = config
        self.geometry = geometry
        self.bands = geometry.stages[0].bands
        self.core = SchedulerCore(config, Checks(self.settings.invariants))
        self.now_ns = TICK_NS
        self.sent: dict[str, Sent] = {}
        self.decisions: list[Decided] = []
        self.steps: list[Step] = []
        self.keep_steps = True
        self.flights: deque[InFlight] = deque()
        self.wants_tick = False
        self._by_number: dict[int, Sent] = {}
        self._arriving: Sent | None = None
        self.feed(inputs.EpochBegan(self.now_ns, 1, self.geometry, self.prepared.facts))
        self.balloon = Balloon(self.state)

    # --- what a front end and an operator can do -------------------------------------------------------------------

    def submit(
        self, prompt: list[int], max_tokens: int, namespace: str = "", sampling: Sampling = GREEDY, **fields: Any
    ) -> Sent:
        """A request arrives; it is accepted or refused at once, and runs when the engine does."""
        sent = Sent(f"r{len(self.sent)}", list(prompt))
        self.sent[sent.id] = self._arriving = sent
        generate = Generate(
            id=sent.id,
            prompt=pack_i64(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            namespace=namespace,
            **fields,
        )
        self.feed(inputs.Arrived(self.now_ns, FRONTEND, generate, 1))
        self._arriving = None
        return sent

    def abort(self, sent: Sent) -> None:
        """End a request from outside; harmless when it has ended."""
        self.feed(inputs.Aborted(self.now_ns, FRONTEND, sent.id, "client"))

    def finish_at(self, sent: Sent) -> None:
        """A front end found a stop string behind the newest token it was given."""
        self.feed(inputs.FinishAsked(self.now_ns, FRONTEND, sent.id, 0, len(sent.tokens)))

    def retract(self, sent: Sent) -> bool:
        """Take a running request's memory away and queue it again, as the relief ladder does under pressure.

        False when it holds no row now.
        """
        request = self.state.requests.get(sent.number)
        if request is None or request.row < 0:
            return False
        out = Outputs()
        pressure.retract(self.state, request, 0, {"forced": 1}, self.now_ns, out)
        assert self.state.memory is not None, "only an epoch has rows"
        self.state.memory.settle()
        self._absorb(out)
        self.wants_tick = True
        return True

    def churn(self, seed: int) -> None:
        """The balloon takes or gives back something; its ops go with the next step."""
        self.balloon.churn(random.Random(seed))

    def flush(self, moves_max: int) -> None:
        """Ask for opportunistic compaction."""
        self.feed(inputs.FlushAsked(self.now_ns, moves_max))

    def flush_cache(self) -> None:
        """Drop everything of the prefix cache that nobody reads."""
        self.feed(inputs.Controlled(self.now_ns, "flush_cache"))

    def evict_only(self, band: int, parts: int = 1) -> None:
        """The cache loses, of one band alone, a `parts`-th of what nobody reads, oldest first."""
        memory = self.state.memory
        if memory is not None and memory.cache is not None:
            enough = memory.cache.reclaimable()[band] // parts
            memory.give_back(memory.cache.evict(lambda freed: parts > 1 and freed[band] >= enough, band))
            memory.settle()

    # --- the loop --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> CoreState:
        """The core's own state, to look at."""
        return self.core._state

    @property
    def live(self) -> int:
        """Accepted requests that have not ended."""
        return self.state.live

    def feed(self, item: inputs.Input) -> Outputs:
        """Feed the core; its step is launched at once, its report waits."""
        out = self.core.feed(item)
        self.wants_tick = out.wants_tick
        self._absorb(out)
        if out.step is not None:
            self._launch(out.step)
        return out

    def tick(self) -> Outputs:
        """One scheduler iteration, a millisecond later."""
        self.now_ns += TICK_NS
        self.balloon.settle_before_tick()
        return self.feed(inputs.Ticked(self.now_ns))

    def report(self) -> Outputs:
        """Deliver the oldest report that waits."""
        return self.feed(self._finish(self.flights.popleft()))

    def turn(self) -> bool:
        """A tick or a report, whichever the seeded choice falls on; False when there is neither."""
        tick = self.wants_tick or (not self.flights and self._owes())
        if tick and (not self.flights or self.rng.random() < self.late):
            self.tick()
        elif self.flights:
            self.report()
        elif tick:
            self.tick()
        else:
            return False
        return True

    def run(self, turns_max: int = 100_000) -> None:
        """Turn until nothing is left to do; raises NeverRests."""
        turn_until_rest(self.turn, self.core, turns_max)

    def generate(self, prompt: list[int], max_tokens: int, **fields: Any) -> Sent:
        """Submit one request and run until rest."""
        sent = self.submit(prompt, max_tokens, **fields)
        self.run()
        return sent

    # --- checks ----------------------------------------------------------------------------------------------------

    def live_units(self) -> tuple[int, ...]:
        """Live units per band, as the core counts them."""
        assert self.state.memory is not None, "the epoch has begun"
        return self.state.memory.live_units()

    def copied(self) -> dict[str, int]:
        """Units copied so far per band: moves, and in the state band also copies of states."""
        counted = self.runner.counting.copied
        return {band.name: counted[index] for index, band in enumerate(self.bands)}

    def check_rest(self) -> None:
        """At rest: every request has ended, nothing waits, both sides of the allocator hold the same units."""
        assert not self.live, f"{self.live} requests are live"
        assert not self.flights, f"{len(self.flights)} reports wait"
        for sent in self.sent.values():
            assert sent.refused or sent.finished, f"{sent.id} was accepted and has no end"
        memory = self.state.memory
        cache = memory.cache if memory is not None else None
        live = self.live_units()
        if cache is not None:
            cache.check()
            assert live == cache.held(), f"{live} units are live at rest, the cache holds {cache.held()}"
            assert not any(cache.locked()), f"{cache.locked()} units of the cache are locked at rest"
        else:
            assert not any(live), f"{live} units are live at rest, without a cache"
        for worker in self._workers():
            check_rank_at_rest(worker, self.geometry, live)

    def check_free(self) -> None:
        """Without a cache, or after it was flushed: everything is free."""
        self.check_rest()
        assert not any(self.live_units()), f"still held: {self.live_units()}"
        for worker in self._workers():
            worker.chain.check_idle()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _workers(self) -> Sequence[StepWorker]:
        """Of every rank that there is."""
        return [self.worker]

    def _apply(self, step: Step) -> InFlight:
        return self.worker.launch(step)

    def _finish(self, flight: InFlight) -> inputs.Reported:
        report = self.worker.finish(flight)
        return inputs.Reported(
            self.now_ns, report.epoch, report.seq, report.rows, report.generations, report.tokens, report.logprobs
        )

    def _owes(self) -> bool:
        memory = self.state.memory
        return memory is not None and memory.has_ops

    def _launch(self, step: Step) -> None:
        flight = self._apply(step)
        assert flight.logical == step.logical, f"step {step.seq}: the worker's logical digest is another"
        if self.keep_steps:
            self.steps.append(step)
        self.flights.append(flight)

    def _absorb(self, out: Outputs) -> None:
        for decision in out.decisions:
            self.decisions.append(decision)
            sent = self._by_number.get(decision.request)
            if sent is not None and decision.verdict == "admitted":
                sent.admissions.append(decision)
        if out.tokens is not None:
            numbers, tokens = out.tokens.requests.tolist(), out.tokens.tokens.tolist()
            for number, token in zip(numbers, tokens, strict=True):
                sent = self._by_number[number]
                assert sent.finished is None, f"{sent.id} got a token after its end"
                sent.tokens.append(token)
        for reply in out.replies:
            self._reply(reply.message)

    def _reply(self, message: Accepted | Refused | Finished | Continued) -> None:
        sent = self.sent[message.id]
        if isinstance(message, Accepted):
            assert message.n == 1, "one choice per request here"
            sent.number, sent.max_tokens = message.first_request, message.max_tokens
            self._by_number[sent.number] = sent
        elif isinstance(message, Refused):
            sent.refused = message
        else:
            assert isinstance(message, Finished), "nobody here loses what it was told"
            assert sent.finished is None, f"{sent.id} ended twice"
            sent.finished = message
