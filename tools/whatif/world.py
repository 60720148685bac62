"""World: the traffic of a recorded run once more, on the real core and ranks that only take time.

Owns the simulated clock and the order of what happens; outputs are those that were recorded. Must never decide
anything. Invariants: time never runs backwards; reports come in step order, one per step, each with the tokens that the
request said at that place, whenever it is computed; a life or an epoch that ended in the recorded run ends here too, at
the same moment.

    daemon    tick -> step k    tick -> step k+1       report k -> turn -> tick -> step k+2
    ranks        start |-- forward k -----------------|-- forward k+1 ----------------|

What came from outside comes at its time: arrivals, clients that hang up, orders. A stop string ends a choice behind the
same output token, as late as the front end was then.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from allocator.checks import Checks
from allocator.columns import Int64s, i32, pack_i64
from allocator.geometry import Geometry
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from daemon.core.scheduler import SchedulerCore
from ipc.messages import Accepted, Finished, Forward, ModelFacts, Step
from tools.whatif.account import Account
from tools.whatif.errors import WhatIfError
from tools.whatif.pace import STRETCH, Pace, work_of
from tools.whatif.traffic import NEVER, WHOLE, Event, LifeBegan, LifeEnded, Traffic, arrival_of

IDLE_TICKS_MAX = 1000
TELL_EVENTS = 256
ABOUT = 0.1  # of a run's forwards, to either side: what ran at about the same time
MADE_UP = 2_654_435_761  # spreads made-up tokens over the vocabulary


class Made(NamedTuple):
    """How a world differs from the recorded one: each life's configuration and each epoch's geometry, from its own."""

    core: Callable[[CoreConfig], CoreConfig]
    geometry: Callable[[Geometry, ModelFacts], Geometry]


class _Due(NamedTuple):
    at_ns: int
    report: inputs.Reported


class _Stop(NamedTuple):
    """A front end will say that a choice has ended."""

    at_ns: int
    number: int
    asked: inputs.FinishAsked


class World:
    """One replay; `run` it once. With a `seed` it is drawn how far forwards are off, as the fit was on the mean."""

    def __init__(self, traffic: Traffic, made: Made, pace: Pace, seed: int = 0) -> None:
        self.account = Account()
        self.made_up_tokens = 0
        self.config: CoreConfig | None = None
        self._traffic, self._made, self._pace = traffic, made, pace
        self._rng = random.Random(seed) if seed else None
        self._outputs = Said(traffic)
        self._core: SchedulerCore | None = None
        self._facts: ModelFacts | None = None
        self._left: tuple[list[inputs.RecoveredGroup], int] | None = None
        self._out = Outputs()
        self._due: deque[_Due] = deque()
        self._stops: list[_Stop] = []
        self._tick_ns = NEVER
        self._free_ns = 0  # when the ranks have nothing more to do
        self._now_ns = 0
        self._idle_ticks = 0
        self._forwards = self._drawn = 0
        self._first_ns = NEVER  # the first forward
        self._warm_ns = 0  # what the next forward takes longer

    def run(self, tell: Callable[[float], None] | None = None) -> Account:
        """Everything, until all has ended, or as far as the record goes; `tell` hears which part is done."""
        traffic = self._traffic
        for place, event in enumerate(traffic.events()):
            if tell is not None and place % TELL_EVENTS == 0:
                tell(place / max(traffic.count, 1))
            self._advance(event.now_ns)
            self._happen(event)
        self._advance(None if traffic.complete else traffic.ended_ns)
        return self.account

    # --- what comes from outside ----------------------------------------------------------------------------------

    def _happen(self, event: Event) -> None:
        if isinstance(event, LifeBegan):
            self.config = self._made.core(event.core)
            self._core = SchedulerCore(self.config, Checks(1))
            if self._left is not None:
                groups, next_request = self._left
                self._feed(inputs.Recovered(event.now_ns, groups, next_request))
        elif isinstance(event, LifeEnded):
            assert self._core is not None, "a life began before it ended"
            self._left = (self._core.recoverable(), self._core.next_request)
            self._lose()
        elif isinstance(event, inputs.EpochBegan):
            self._facts = event.facts
            self._warm_ns = self._pace.warm_ns
            geometry = self._made.geometry(event.geometry, event.facts)
            self._feed(inputs.EpochBegan(event.now_ns, event.epoch, geometry, event.facts))
        else:
            if isinstance(event, inputs.EpochEnded):
                self._lose()
            if isinstance(event, inputs.Recovered):
                self._outputs.adopt(event)
                self.account.adopt(event.groups, event.now_ns)
            self._feed(event)

    def _lose(self) -> None:
        """What is in flight never comes back."""
        self._due.clear()
        self._free_ns = 0
        self._tick_ns = NEVER

    # --- time -----------------------------------------------------------------------------------------------------

    def _advance(self, until_ns: int | None) -> None:
        """Everything that is due until then; None: until nothing is left to come."""
        while True:
            coming = self._next_ns()
            if coming is None or (until_ns is not None and coming > until_ns):
                break
            if until_ns is None and self._idle_ticks > IDLE_TICKS_MAX:
                break  # nothing but the core's own retries is to come: what lives can never go on
            self._now_ns = max(self._now_ns, coming)
            self._one()
        if until_ns is not None:
            self._now_ns = max(self._now_ns, until_ns)

    def _next_ns(self) -> int | None:
        times = [self._due[0].at_ns] if self._due else []
        times += [self._stops[0].at_ns] if self._stops else []
        times += [self._tick_ns] if self._tick_ns >= 0 else []
        times += [self._out.due_ns] if self._out.due_ns is not None else []
        return min(times, default=None)

    def _one(self) -> None:
        """The one thing that is due first. A report comes before the tick of the same moment, as in the daemon."""
        now_ns = self._now_ns
        if self._due and self._due[0].at_ns <= now_ns:
            self._idle_ticks = 0
            self._feed(self._due.popleft().report)
        elif self._stops and self._stops[0].at_ns <= now_ns:
            self._feed(heapq.heappop(self._stops).asked)
        else:
            self._tick_ns = NEVER
            step = self._feed(inputs.Ticked(now_ns)).step
            self._idle_ticks = self._idle_ticks + 1 if step is None else 0

    # --- the core and the ranks -----------------------------------------------------------------------------------

    def _feed(self, item: inputs.Input) -> Outputs:
        core = self._core
        assert core is not None, "a life began"
        if item.now_ns < self._now_ns:
            raise WhatIfError(f"the record goes back in time, from {self._now_ns} to {item.now_ns} ns")
        self._now_ns = item.now_ns
        out = self._out = core.feed(item)
        self.account.take(item, out)
        if out.tokens is not None and len(out.tokens.requests):
            self._find_stops(out.tokens.requests)
        ended = []
        for reply in out.replies:
            if isinstance(reply.message, Accepted) and isinstance(item, inputs.Arrived):
                self._outputs.accepted(reply.message, len(item.generate.prompt) // 8)
            elif isinstance(reply.message, Finished):
                ended.append((core.frontends[reply.frontend], reply.message.id))
        if out.step is not None:
            self._launch(out.step)
        if not out.wants_tick:
            self._tick_ns = NEVER
        elif self._tick_ns < 0:
            self._tick_ns = self._now_ns + self._pace.turn_ns
        for frontend, id in ended:  # what has ended is forgotten, unless another of its choices lives
            core.feed(inputs.Acknowledged(self._now_ns, frontend, [id]))
        return out

    def _launch(self, step: Step) -> None:
        core, now_ns = self._core, self._now_ns
        assert core is not None, "a step has a core"
        begins = max(now_ns + self._pace.start_ns, self._free_ns)
        rows, generations, tokens = b"", b"", b""
        forward = step.forward
        if forward is not None:
            begins += self._cost_ns(forward)
            self._free_ns = begins
            flight = core.state.flights[-1]
            rows, generations = flight.rows_column, flight.generations_column
            ends = np.zeros(len(core.state.rows.owners), np.int64)  # by row, the tokens behind this forward
            ends[i32(forward.rows)] = i32(forward.starts) + i32(forward.counts)
            positions = ends[flight.rows]
            tokens = pack_i64(self._sampled(flight.requests, positions))
        at_ns = max(begins, self._due[-1].at_ns if self._due else 0)
        self._due.append(_Due(at_ns, inputs.Reported(at_ns, step.epoch, step.seq, rows, generations, tokens)))

    def _cost_ns(self, forward: Forward) -> int:
        """What a forward takes: by the pace, and as much off it as one was that ran, in stretches that are drawn."""
        cost_ns = self._pace.forward_ns(work_of(forward)) + self._warm_ns
        self._warm_ns = 0
        off_ns = self._pace.off_ns
        if self._rng is None or not len(off_ns):
            return cost_ns
        if self._forwards % STRETCH == 0:
            self._drawn = self._like_now(self._rng)
        place = (self._drawn + self._forwards % STRETCH) % len(off_ns)
        self._forwards += 1
        return max(0, cost_ns + round(float(off_ns[place])))

    def _like_now(self, rng: random.Random) -> int:
        """The place of a forward that ran at about this time of its run, so that a machine that was slow for a while is
        slow then here too; of any, behind the last."""
        at_ns = self._pace.at_ns
        self._first_ns = self._now_ns if self._first_ns == NEVER else self._first_ns
        near = int(np.searchsorted(at_ns, self._now_ns - self._first_ns))
        if near == len(at_ns):
            return rng.randrange(near)
        apart = max(STRETCH, round(ABOUT * len(at_ns)))
        place = abs(near + rng.randint(-apart, apart))  # what lies in front of the first is as likely behind it
        return place if place < len(at_ns) else rng.randrange(len(at_ns))

    def _sampled(self, numbers: Int64s, positions: Int64s) -> Int64s:
        assert self._facts is not None, "an epoch has its model's facts"
        tokens, made_up = self._outputs.tokens(numbers, positions, self._facts)
        self.made_up_tokens += made_up
        return tokens

    def _find_stops(self, numbers: Int64s) -> None:
        core = self._core
        assert core is not None
        for number, at, lag_ns in self._outputs.delivered(numbers):
            request = core.state.requests.get(number)
            if request is not None:
                frontend = core.frontends[request.group.frontend]
                at_ns = self._now_ns + lag_ns
                asked = inputs.FinishAsked(at_ns, frontend, request.group.id, request.choice, at)
                heapq.heappush(self._stops, _Stop(at_ns, number, asked))


class Said:
    """What every choice says, by its number here: columns over numbers, which grow as requests are accepted."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._said = traffic.tokens()
        self._slot = np.full(1024, NEVER, np.int64)
        self._offset, self._count = np.zeros(1024, np.int64), np.zeros(1024, np.int64)
        self._prompt = np.zeros(1024, np.int64)
        self._delivered = np.zeros(1024, np.int64)
        self._stop_at, self._lag_ns = np.full(1024, NEVER, np.int64), np.zeros(1024, np.int64)

    def accepted(self, accepted: Accepted, prompt_tokens: int, had: tuple[int, ...] = ()) -> None:
        """A request got its numbers; `had` are the output tokens that its choices have already."""
        traffic = self._traffic
        first_slot = traffic.first_slot[arrival_of(accepted.id)]
        self._grow(accepted.first_request + accepted.n)
        for choice in range(accepted.n):
            number, slot = accepted.first_request + choice, first_slot + choice
            self._slot[number] = slot
            self._prompt[number] = prompt_tokens
            self._offset[number], self._count[number] = traffic.offset[slot], traffic.made[slot]
            self._delivered[number] = had[choice] if had else 0
            if traffic.state[slot] != WHOLE:
                self._stop_at[number] = traffic.length(slot)
            elif traffic.stop_at[slot] != NEVER:
                self._stop_at[number], self._lag_ns[number] = traffic.stop_at[slot], traffic.stop_lag_ns[slot]

    def adopt(self, item: inputs.Recovered) -> None:
        """What stood before the first record."""
        for group in item.groups:
            had = tuple(len(was.tokens) // 8 for was in group.choices)
            self.accepted(group.accepted, len(group.generate.prompt) // 8, had)

    def tokens(self, numbers: Int64s, positions: Int64s, facts: ModelFacts) -> tuple[Int64s, int]:
        """The tokens behind these positions (int64), and how many of them nobody ever said."""
        at = positions - self._prompt[numbers]
        known = at < self._count[numbers]
        tokens = (self._slot[numbers] * MADE_UP + at * 7919) % facts.vocab_size
        while facts.eos_ids and (ends := np.isin(tokens, facts.eos_ids)).any():
            tokens[ends] = (tokens[ends] + 1) % facts.vocab_size
        tokens[known] = self._said[self._offset[numbers[known]] + at[known]]
        return tokens, len(tokens) - int(np.count_nonzero(known))

    def delivered(self, numbers: Int64s) -> list[tuple[int, int, int]]:
        """Each of these got one more token: which of them end there, behind how many, and how much later."""
        self._delivered[numbers] += 1
        ends = numbers[self._delivered[numbers] == self._stop_at[numbers]]
        return [(int(number), int(self._stop_at[number]), int(self._lag_ns[number])) for number in ends.tolist()]

    def _grow(self, numbers: int) -> None:
        if numbers <= len(self._slot):
            return
        room = max(2 * len(self._slot), numbers) - len(self._slot)
        for name, value in (
            ("_slot", NEVER), ("_offset", 0), ("_count", 0), ("_prompt", 0), ("_delivered", 0), ("_stop_at", NEVER),
            ("_lag_ns", 0),
        ):  # fmt: skip
            setattr(self, name, np.concatenate([getattr(self, name), np.full(room, value, np.int64)]))
