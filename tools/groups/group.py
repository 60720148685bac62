"""A simulated group: one core, all its ranks, and the reports between them, each as late as a seed says.

Owns who moves next. Must never change what the core or a rank decides. Two paces:

    steady    the core is fed as if ranks had no delays: it ticks as long as it wants to, then takes the oldest report;
              the step stream is the same whatever the ranks' delays are
    random    ticks and reports are fed whenever the seed says, so results are late in every way

Invariants: every step goes to every rank; reports reach the core through the daemon's own collator, which compares the
digests; nothing of a step that does not agree reaches the core.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from allocator.checks import Checks
from allocator.columns import pack_i64
from daemon.agreement import agree
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from daemon.core.scheduler import SchedulerCore
from daemon.mailbox import Collated
from daemon.rank.layout import Layout
from daemon.results import Collator
from ipc.messages import Accepted, Begin, Explained, Finished, Generate, RankSettings, Refused, Report, Sampling, Step
from journal.records import Digested
from tools.groups.exchange import Hub, Place
from tools.groups.rank import SimulatedRank, encoded
from tools.inprocess import check_rank_at_rest, turn_until_rest

TICK_NS = 1_000_000
EPOCH = 1
FRONTEND = "group"
GREEDY = Sampling(temperature=0.0, seed=0)


@dataclass
class Client:
    """One request and what its front end was told."""

    prompt: list[int]
    number: int = 0
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None
    refused: Refused | None = None


class SimulatedGroup:
    """`stages` x `ranks` ranks behind one core. `seed` draws the ranks' delays; 0: nobody lags."""

    def __init__(
        self,
        config: CoreConfig,
        settings: Sequence[RankSettings],
        ranks: int,
        seed: int,
        *,
        steady: bool = True,
        change: Callable[[SimulatedRank], None] | None = None,
    ) -> None:
        """`settings` of each stage's ranks; `change` may do something to a rank before its epoch begins."""
        stages = len(settings)
        self.rng = random.Random(seed)
        self.steady = steady
        self.hub = Hub(ranks)
        self.ranks: dict[Place, SimulatedRank] = {}
        for number in range(stages * ranks):
            layout = Layout(number // ranks, stages, number % ranks, ranks)
            own_seed = seed and seed * 1000 + number
            rank = SimulatedRank(settings[layout.stage], layout, self.hub, own_seed)
            self.ranks[rank.place] = rank
        self.geometry, facts = agree({place: rank.ready() for place, rank in self.ranks.items()}, config.page_size)
        self._haste = {place: (self.rng.choice((0.02, 0.2, 0.6, 1.0)) if seed else 1.0) for place in self.ranks}
        for rank in self.ranks.values():
            rank.begin(Begin(EPOCH, self.geometry))
            if change is not None:
                change(rank)
        self.collator = Collator(EPOCH, list(self.ranks))
        self.core = SchedulerCore(config, Checks(settings[0].invariants))
        self.now_ns = TICK_NS
        self.clients: list[Client] = []
        self.steps: list[bytes] = []
        self.digests: list[Digested] = []
        self.told: list[tuple[int, int]] = []  # step, tokens that left the daemon with its report
        self.in_flight_most = 0
        self._by_number: dict[int, Client] = {}
        self._travelling: dict[Place, deque[Report]] = {place: deque() for place in self.ranks}
        self._collated: deque[Collated] = deque()
        self._unreported = 0
        self._wants_tick = False
        self.feed(inputs.EpochBegan(self.now_ns, EPOCH, self.geometry, facts))

    # --- what a front end and an operator can do

    def submit(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY) -> Client:
        """A request arrives."""
        client = Client(list(prompt))
        self.clients.append(client)
        name = str(len(self.clients) - 1)
        self.feed(inputs.Arrived(self.now_ns, FRONTEND, Generate(name, pack_i64(prompt), sampling, max_tokens), 1))
        return client

    def abort(self, client: Client) -> None:
        """The client hangs up; harmless when the request has ended."""
        self.feed(inputs.Aborted(self.now_ns, FRONTEND, str(self.clients.index(client)), "client"))

    def control(self, order: str) -> None:
        """An operator's order."""
        self.feed(inputs.Controlled(self.now_ns, order))

    def flush(self, moves_max: int) -> None:
        """Opportunistic compaction."""
        self.feed(inputs.FlushAsked(self.now_ns, moves_max))

    # --- the loop

    def feed(self, item: inputs.Input) -> Outputs:
        """Feed the core; what it decides goes to every rank."""
        out = self.core.feed(item)
        self._wants_tick = out.wants_tick
        if out.step is not None:
            self._send(out.step)
        self._tell(out, item.seq if isinstance(item, inputs.Reported) else 0)
        return out

    def tick(self) -> None:
        """One scheduler iteration, a millisecond later."""
        self.now_ns += TICK_NS
        self.feed(inputs.Ticked(self.now_ns))

    def turn(self) -> bool:
        """One thing happens; False when nothing can."""
        if self.steady:
            return self._turn_steadily()
        moves = list(self._moves())
        if self._wants_tick:
            moves.append(self.tick)
        if self._collated:
            moves.append(self._report)
        if not moves:
            return False
        self.rng.choice(moves)()
        return True

    def run(self, turns_max: int = 1_000_000) -> None:
        """Turn until nothing is left to do; raises NeverRests."""
        turn_until_rest(self.turn, self.core, turns_max)

    def _turn_steadily(self) -> bool:
        if self._wants_tick:
            self.tick()
        elif not self._unreported:
            return False
        else:
            while not self._collated:
                self.rng.choice(list(self._moves()))()
            self._report()
        return True

    def _moves(self) -> Iterator[Callable[[], None]]:
        """What the ranks and what they sent can do now; a slow rank is passed over most of the time."""
        idle = True
        while idle:
            busy = False
            for place, rank in self.ranks.items():
                if not (rank.inbox or rank.flights or self._travelling[place]):
                    continue
                busy = True
                if self.rng.random() >= self._haste[place]:
                    continue
                idle = False
                yield rank.drift
                if rank.inbox:
                    yield rank.launch
                if rank.flights:
                    yield partial(self._finish, place)
                if self._travelling[place]:
                    yield partial(self._arrive, place)
            if not busy:
                return

    def _finish(self, place: Place) -> None:
        """A rank reports its oldest step; the report is on its way."""
        self._travelling[place].append(self.ranks[place].finish())

    def _arrive(self, place: Place) -> None:
        """The oldest report of a rank reaches the daemon."""
        self._collated.extend(self.collator.add(self._travelling[place].popleft(), self.now_ns))

    def _report(self) -> None:
        collated = self._collated.popleft()
        self._unreported -= 1
        self.digests.extend(collated.digests)
        self.hub.forget(collated.reported.seq - 8)
        self.feed(collated.reported)

    def _send(self, step: Step) -> None:
        self.collator.expect(step)
        self.steps.append(encoded(step))
        self._unreported += 1
        self.in_flight_most = max(self.in_flight_most, self._unreported)
        for rank in self.ranks.values():
            rank.inbox.append(step)

    def _tell(self, out: Outputs, seq: int) -> None:
        if out.tokens is not None:
            numbers, tokens = out.tokens.requests.tolist(), out.tokens.tokens.tolist()
            self.told += [(seq, token) for token in tokens]
            for number, token in zip(numbers, tokens, strict=True):
                client = self._by_number[number]
                assert client.finished is None, f"request {number} got a token after its end"
                client.tokens.append(token)
        for reply in out.replies:
            message = reply.message
            client = self.clients[int(message.id)]
            if isinstance(message, Accepted):
                client.number = message.first_request
                self._by_number[client.number] = client
            elif isinstance(message, Refused):
                client.refused = message
            else:
                assert isinstance(message, Finished), "nobody here resumes"
                assert client.finished is None, f"request {client.number} ended twice"
                client.finished = message

    # --- checks

    def check_rest(self) -> None:
        """At rest every request has ended, and every rank holds what the cache holds, as its own books say."""
        for client in self.clients:
            assert client.refused or client.finished, f"request {client.number} has no end"
        memory = self.core._state.memory
        assert memory is not None, "the epoch has begun"
        held = memory.cache.held() if memory.cache is not None else (0,) * len(self.geometry.stages[0].bands)
        assert memory.live_units() == held, f"{memory.live_units()} units are live at rest, the cache holds {held}"
        for rank in self.ranks.values():
            check_rank_at_rest(rank.worker, self.geometry, held)
            rank.worker.chain.check()

    def explained(self) -> dict[Place, Explained]:
        """What every rank answers to `Explain`."""
        return {place: Explained(*place, rank.worker.traces.explain()) for place, rank in self.ranks.items()}

    def group_calls(self) -> Iterator[tuple[int, int, list[list[str]]]]:
        """Step, stage and the calls that each tensor rank of the stage made, of every forward."""
        for seq, by_place in self.hub.calls.items():
            for stage in sorted({place[0] for place in by_place}):
                yield seq, stage, [calls for place, calls in sorted(by_place.items()) if place[0] == stage]
