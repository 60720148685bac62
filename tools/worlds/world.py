"""A simulated world for the core: one rank that checks every step, one front end that checks every message.

Owns the loop between them, as an engine would have it, and the books of every client. Must never decide anything for
the core: it feeds inputs and compares. The rank's tokens are a pure function of seed, choice, position and history, so
what a client must receive is known beforehand whatever was batched, retracted or aborted in between. `watchers` see
every input and what came of it: the checks of `tools.worlds.checks` and the log of scenarios hang there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from allocator.checks import STRICT, Checks
from allocator.columns import i32, i64, pack_i64
from daemon.core import inputs
from daemon.core.kept_logprobs import NOT_KNOWN
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided, Outputs
from daemon.core.scheduler import SchedulerCore
from daemon.snapshots import core_state, restore_core
from ipc.messages import (
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
from tools.worlds.rank_double import FULL_ONLY, RankDouble, Shape, geometry, next_token

encode = msgspec.msgpack.encode
NAMES_OF_LOG_LINES = {"request", "reason", "by", "event"}
NEUTRAL = Sampling(temperature=0.0)
START_NS = 1_000_000_000
STEP_NS = 1_000_000


def facts(vocab_size: int = 97, max_model_len: int = 512) -> ModelFacts:
    """A small model."""
    return ModelFacts("toy", "toy", vocab_size, max_model_len, "float32")


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
class Client:
    """What one request's front end was told, per choice, as far as it reached it."""

    generate: Generate
    accepted: Accepted
    frontend: str
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[int]]
    prompt_logprobs: dict[int, list[int]]
    told: dict[int, list[int]]  # what the core said of each choice's output, whoever was there to hear it
    finished: dict[int, Finished] = field(default_factory=dict)
    brought: dict[int, int] = field(default_factory=dict)  # how much of a choice's output only the client had
    away: set[int] = field(default_factory=set)  # choices whose client hears nothing until it comes back


def _through_the_journal(item: inputs.Input) -> inputs.Input:
    """The same, written and read again."""
    return msgspec.msgpack.decode(encode(item), type=type(item))


class World:
    """The core, its rank and its front ends; every input passes `feed`, every output is checked there."""

    def __init__(
        self,
        config: CoreConfig | None = None,
        pages: int = 64,
        model: ModelFacts | None = None,
        begin: bool = True,
        shape: Shape = FULL_ONLY,
        caching: bool | None = None,
        stages: int = 1,
    ) -> None:
        self.config = config or CoreConfig(page_size=4, max_running_requests=4, max_batched_tokens=32)
        if caching is not None:
            self.config = msgspec.structs.replace(self.config, enable_prefix_caching=caching)
        self.core = SchedulerCore(self.config, Checks(STRICT))
        self.pages, self.shape, self.stages, self.facts = pages, shape, stages, model or facts()
        self.now_ns = START_NS
        self.epoch = 0
        self.decisions: list[Decided] = []
        self.refusals: list[Refused] = []
        self.clients: dict[tuple[str, str], Client] = {}
        self.by_request: dict[int, tuple[Client, int]] = {}
        self.inputs: list[inputs.Input] = []
        self.life_began = 0  # how many of them earlier lives were fed
        self.earlier: Counter[str] = Counter()  # totals of those lives
        self.snapshots: list[tuple[int, bytes]] = []  # of this life: behind how many inputs, and the core's state
        self.log = bytearray()  # canonical bytes of every step and decision of this life
        self.processed = 0
        self.steps: list[Step] = []
        self.quiet = 0  # the newest inputs that a machine could lose: nobody outside was promised anything by them
        self.launched_ns: dict[int, int] = {}  # by seq, of the steps whose report waits
        self.deadly: dict[tuple[str, str], int] = {}  # requests whose rank dies when it computes this position
        self.killing: set[int] = set()  # steps of this epoch under which it will
        self.wants_tick = False
        self.due_ns: int | None = None
        self.rank: RankDouble | None = None
        self.pending: Generate | None = None
        self.watchers: list[Callable[[World, inputs.Input, Outputs], None]] = []
        self.numbers: dict[str, int] = {}  # the gauges behind the newest input
        if begin:
            self.begin()

    def begin(self) -> None:
        """A new epoch: fresh ranks."""
        self.epoch += 1
        arena = geometry(self.pages, self.config.page_size, self.shape, self.stages)
        self.rank = RankDouble(arena, self.config, self.facts, self.epoch)
        self.processed = 0
        self.launched_ns.clear()
        self.killing.clear()
        self.feed(inputs.EpochBegan(self.now_ns, self.epoch, arena, self.facts))

    def feed(self, item: inputs.Input) -> Outputs:
        """Feed the core and hand its outputs to the doubles."""
        self.inputs.append(item)
        out = self.core.feed(item)
        assert (out.step is None) or isinstance(item, inputs.Ticked), "only a tick emits a step"
        self.wants_tick, self.due_ns = out.wants_tick, out.due_ns
        for decision in out.decisions:
            self.log += encode(decision)
            self.decisions.append(decision)
            if decision.verdict == "resumed":  # what the client holds is what was said
                client, choice = self.by_request[decision.request]
                client.told[choice][:] = client.tokens[choice]
                client.brought[choice] = len(client.tokens[choice])
            assert not NAMES_OF_LOG_LINES & decision.numbers.keys(), "a log line says these names already"
        self._take_tokens(out)
        for reply in out.replies:
            self._take_reply(self.core.frontends[reply.frontend], reply.message)
        if out.step is not None:
            self.log += encode(out.step)
            self.steps.append(out.step)
            self.launched_ns[out.step.seq] = self.now_ns
            assert self.rank is not None
            self.rank.apply(out.step, self.processed)
            if self.deadly and out.step.forward is not None and self._is_deadly(out.step.forward):
                self.killing.add(out.step.seq)
            if out.step.snapshot:
                self.snapshots.append((len(self.inputs), core_state(self.core)))
        losable = isinstance(item, inputs.Ticked | inputs.Reported | inputs.FlushAsked)
        ends = any(decision.verdict == "ended" for decision in out.decisions)
        self.quiet = self.quiet + 1 if losable and not ends else 0
        self.numbers = {name: count + self.earlier[name] for name, count in self.core.gauges().items()}
        self.check_counts()
        for watcher in self.watchers:
            watcher(self, item, out)
        return out

    def _is_deadly(self, forward: Forward) -> bool:
        """Whether a rank dies of it."""
        for row, start, count in zip(i32(forward.rows), i32(forward.starts), i32(forward.counts), strict=True):
            client, _ = self.by_request[int(self.core._state.rows.request[row])]
            position = self.deadly.get((client.frontend, client.generate.id))
            if position is not None and start + count > position:
                return True
        return False

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
            client.told[choice].append(token)
            if choice not in client.away:
                client.tokens[choice].append(token)
        for entry in out.tokens.logprobs:
            client, choice = self.by_request[entry.request]
            values = np.frombuffer(entry.values.chosen, "<f4").astype(int).tolist()
            assert choice not in client.finished
            if choice in client.away:
                continue
            if entry.prompt_position < 0:
                client.logprobs[choice] += values
            else:
                assert entry.prompt_position == len(client.prompt_logprobs[choice]) + 1, "each position once"
                client.prompt_logprobs[choice] += values

    def _take_reply(self, frontend: str, message: Accepted | Refused | Finished | Continued) -> None:
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
                {k: [] for k in choices},
            )
            self.clients[frontend, message.id] = client
            for choice in choices:
                self.by_request[message.first_request + choice] = (client, choice)
        elif isinstance(message, Continued):
            self._continue(message)
        else:
            client, choice = self.by_request[message.request]
            assert client.finished.setdefault(choice, message) == message, "a choice ends once"

    def _continue(self, message: Continued) -> None:
        """A client gets what it lacks: with that it holds what was said, not a token more or less."""
        client, choice = self.by_request[message.request]
        held, more = client.tokens[choice], i64(message.tokens).tolist()
        assert message.choice == choice, "a choice is told of itself"
        assert message.output_tokens == len(held), "what comes begins where the client is"
        held += more
        client.away.discard(choice)
        ended = client.finished.get(choice)
        usage = len(client.told[choice]) if ended is None else ended.output_tokens
        assert held[:usage] == client.told[choice][:usage], "with it the client holds all that was said"
        self._continue_logprobs(client, choice, message)

    def _continue_logprobs(self, client: Client, choice: int, message: Continued) -> None:
        """Those of the prompt come all again, those of the output begin where the tokens do."""
        client.prompt_logprobs[choice].clear()
        del client.logprobs[choice][message.output_tokens :]
        for entry in message.logprobs:
            assert entry.request == message.request, "a choice is told of itself"
            of_prompt = entry.prompt_position >= 0
            values = np.frombuffer(entry.values.chosen, "<f4").astype(int).tolist()
            (client.prompt_logprobs if of_prompt else client.logprobs)[choice].extend(values)

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
        self.now_ns += STEP_NS
        return self.feed(inputs.Ticked(self.now_ns))

    def report(self) -> Outputs:
        """Feed the oldest report that waits; a step takes a millisecond at least. Or the rank died of that step."""
        assert self.rank is not None
        report = self.rank.reports.popleft()
        if report.seq in self.killing:
            out = self.end_epoch()
            self.begin()
            return out
        self.now_ns = max(self.now_ns, self.launched_ns.pop(report.seq) + STEP_NS)
        item = msgspec.structs.replace(report, now_ns=self.now_ns)
        if item.seq in self.rank.launched:
            self.processed = item.seq
        return self.feed(item)

    def turn(self) -> bool:
        """A tick where one is wanted, else the oldest report; False when there is neither."""
        if self.wants_tick:
            self.tick()
        elif self.reports_waiting:
            self.report()
        else:
            return False
        return True

    def wait(self, ms: int) -> None:
        """Time passes; an engine would tick when it reaches what the core asked to be woken for."""
        self.now_ns += ms * 1_000_000
        if self.due_ns is not None and self.due_ns <= self.now_ns:
            self.feed(inputs.Ticked(self.now_ns))

    @property
    def reports_waiting(self) -> int:
        """Steps launched and not reported."""
        return len(self.rank.reports) if self.rank is not None else 0

    def run(self, limit: int = 10_000) -> None:
        """Tick and report, as an engine would, until nothing wants either."""
        for _ in range(limit):
            if not self.turn():
                return
        raise AssertionError("the world does not come to rest")

    def replayed(self) -> tuple[bytes, SchedulerCore]:
        """What a fresh core makes of this life's inputs, as the journal would carry them: the log and the core."""
        core, log = SchedulerCore(self.config, Checks(STRICT)), bytearray()
        for item in self.inputs[self.life_began :]:
            out = core.feed(_through_the_journal(item))
            for decision in out.decisions:
                log += encode(decision)
            if out.step is not None:
                log += encode(out.step)
        return bytes(log), core

    def end_epoch(self, recovers: bool = True) -> Outputs:
        """A rank died; others follow, or nothing does."""
        self.rank = None
        return self.feed(inputs.EpochEnded(self.now_ns, self.epoch, "a rank died", recovers))

    def restart(self, lost_inputs: int = 0) -> Outputs:
        """The daemon dies and comes back without ranks; its journal misses the newest `lost_inputs` inputs.

        Every client hears nothing of a choice until it comes back for it.
        """
        end = len(self.inputs) - lost_inputs
        old = self._replayed_from(SchedulerCore(self.config, Checks(STRICT)), self.life_began, end)
        for place, data in self.snapshots:
            if place <= end:
                other = self._replayed_from(restore_core(data, Checks(STRICT)), place, end)
                assert other.state_digest() == old.state_digest(), "a snapshot leads to the state that all inputs do"
                assert encode(other.recoverable()) == encode(old.recoverable()), "and leaves the same"
        left = inputs.Recovered(self.now_ns, old.recoverable(), old.next_request)
        for name, count in self.core.gauges().items():
            self.earlier[name] += count if name.endswith("_total") else 0
        self.core = SchedulerCore(self.config, Checks(STRICT))
        self.life_began = len(self.inputs)
        self.snapshots.clear()
        self.log.clear()
        self.rank, self.processed = None, 0
        self.launched_ns.clear()
        for group in left.groups:
            client = self.clients[group.frontend, group.accepted.id]
            for choice, was in enumerate(group.choices):
                client.away.add(choice)
                client.told[choice] = i64(was.tokens).tolist()
        return self.feed(_through_the_journal(left))

    def _replayed_from(self, core: SchedulerCore, first: int, end: int) -> SchedulerCore:
        """The core that was fed inputs [first, end) as the journal has them."""
        for item in self.inputs[first:end]:
            core.feed(_through_the_journal(item))
        return core

    def settle(self) -> None:
        """Every client comes back, and ranks, if there are none: what lives is served when the world runs."""
        self.resume_all()
        if not self.core.gauges()["ready"]:
            self.begin()

    def resume_all(self) -> None:
        """Every client that is away comes back, as far as the core knows of it."""
        for (frontend, id), client in sorted(self.clients.items()):
            for choice in sorted(client.away):
                if self.knows(frontend, id):
                    self.resume(id, choice, frontend=frontend)

    def resume(
        self, id: str, choice: int = 0, lost: int = 0, frontend: str = "fe", holds: list[int] | None = None
    ) -> Outputs:
        """The front end comes back for a choice; the newest `lost` tokens had not reached it, or it `holds` these."""
        client, held = self.clients.get((frontend, id)), list(holds or [])
        if client is not None and choice in client.tokens:
            tokens = client.tokens[choice]
            if holds is None:
                held = tokens[: max(0, len(tokens) - lost)]
            if self.knows(frontend, id):
                tokens[:] = held
        return self.feed(inputs.Resumed(self.now_ns, frontend, id, choice, pack_i64(held)))

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
        g = self.numbers
        assert g["received_total"] == g["refused_total"] + g["accepted_total"]
        assert g["accepted_total"] == g["finished_total"] + g["aborted_total"] + g["failed_total"] + g["live"]
        assert g["live"] == g["waiting"] + g["running"] + g["prefilling"]
        assert g["running"] + g["prefilling"] <= self.config.max_running_requests
        assert min(g.values()) >= 0

    def check_owners(self) -> None:
        """Every live unit has one owner, a row or the cache; the cache's own books are right for the rows' locks."""
        core = self.core._state
        if core.memory is None:
            return
        owned = [owner for owner in core.rows.owners if owner is not None]
        cache = core.memory.cache
        held = [[len(ids) for ids in core.rows.held(owner.row)] for owner in owned]
        held.append(list(cache.held()) if cache is not None else [0] * len(core.memory.none))
        assert tuple(map(sum, zip(*held, strict=True))) == core.memory.live_units()
        if cache is not None:
            cache.check([owner.lock for owner in owned if owner.lock is not None])
            for owner in owned:
                assert owner.lock is not None
                assert owner.lock.pages == core.rows.shared[owner.row], "what a row shares it locks"

    def check_rest(self, refused: bool = False) -> None:
        """At rest nothing is held, and every accepted choice has ended exactly once with what it must have produced.

        None ends for want of memory that would fit the empty arena, unless a test made memory refuse it (`refused`).
        """
        self.check_all_free()
        self.check_ends()
        for client, choice in self.by_request.values():
            self.check_client(client, choice)
        if not refused:
            self.check_memory_ends()

    def check_all_free(self) -> None:
        """At rest nobody holds anything but the cache, and after a flush nothing is held at all."""
        assert self.core.gauges()["live"] == 0, "every accepted choice has ended"
        assert self.core.gauges()["in_flight"] == 0
        assert self.rank is not None
        memory = self.core._state.memory
        assert memory is not None
        self.check_owners()
        if memory.cache is not None:
            assert memory.cache.held() == tuple(len(ids) for ids in self.rank.live), "only the cache holds units"
            self.feed(inputs.Controlled(self.now_ns, "flush_cache"))
            self.run()
        assert not any(self.rank.live), "every unit came back"
        self.rank.mirror.check_idle()

    def check_ends(self) -> None:
        """One terminal decision and one terminal message per accepted choice."""
        ended = [decision.request for decision in self.verdicts("ended")]
        assert len(set(ended)) == len(ended), "one terminal decision per choice"
        assert set(ended) == set(self.by_request), "every accepted choice has ended, and no other"
        assert all(choice in client.finished for client, choice in self.by_request.values())

    def check_memory_ends(self) -> None:
        """What fits the empty arena is served: it does not end for want of memory."""
        memory = self.core._state.memory
        assert memory is not None
        for client, choice in self.by_request.values():
            if client.finished[choice].reason in ("memory", "unschedulable"):
                most = len(i64(client.generate.prompt)) + max(client.accepted.max_tokens - 1, 0)
                assert memory.never_fits(memory.ceiling(most)) is not None, "what fits the empty arena is served"

    def check_client(self, client: Client, choice: int) -> None:
        """The client was told exactly the tokens of a lone run, or, when cut short, the first of them."""
        finished, tokens = client.finished[choice], client.tokens[choice]
        whole, reason = expected_output(client.generate, client.accepted, choice, self.facts.vocab_size)
        assert tokens == whole[: len(tokens)], "the tokens are those of a lone run"
        if choice in client.away:
            assert not self.knows(client.frontend, client.generate.id), "who may come back does, before the world rests"
            return
        assert finished.output_tokens <= len(tokens)
        if finished.reason == "length" or (finished.reason == "stop" and finished.detail.startswith("stop token")):
            assert (tokens, finished.reason, finished.output_tokens) == (whole, reason, len(whole))
        if client.generate.sampling.logprobs >= 0:
            lost = {at for at in range(client.brought.get(choice, 0)) if client.logprobs[choice][at] == NOT_KNOWN}
            given = [token for at, token in enumerate(client.logprobs[choice]) if at not in lost]
            assert given == [token for at, token in enumerate(tokens) if at not in lost], "one log probability each"
        if client.generate.sampling.prompt_logprobs >= 0 and finished.reason in ("length", "stop") and tokens:
            assert client.prompt_logprobs[choice] == i64(client.generate.prompt).tolist()[1:]
