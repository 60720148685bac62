"""Checks: what must hold in every world after every input and at rest, each by its own name.

Owns the table `CHECKS`. A check recounts from what was said (messages, decisions, steps) or asks a copy of the core's
memory; it must never change the world, nor believe a number that it could count itself. The world and the rank double
assert besides on their own: what a client is told, and that every step could run.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np

from allocator.columns import i32, i64
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from daemon.core.requests import ENOUGH_TOKENS
from ipc.messages import Accepted, Finished, Refused
from tools.smallscope.copies import clone
from tools.worlds.world import Client, World

ONE_PPM = 1_000_000
COPY_EVERY = 7  # inputs between questions that need a copy of the memory
REPLAY_EVERY = 4  # seeds between worlds that are replayed


class Broken(AssertionError):
    """A check does not hold."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(text)
        self.check = check


class Checker:
    """One check of one world. `after` follows every input, `rest` the last one when the world has come to rest."""

    name: ClassVar[str]

    def __init__(self, config: CoreConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Look at what an input led to."""

    def rest(self, world: World) -> None:
        """Look at a world in which nothing happens any more."""

    def demand(self, holds: bool, text: str) -> None:
        """Raise Broken when something does not hold."""
        if not holds:
            raise Broken(self.name, text)


class Requests(Checker):
    """Received is refused and accepted; accepted is finished, aborted, failed and live: counted from the messages."""

    name = "requests"

    def __init__(self, config: CoreConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.told: Counter[str] = Counter()
        self.known: Counter[int] = Counter()

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Count the replies and compare with the counters."""
        told, decided = self.told, {one.request for one in out.decisions if one.verdict == "ended"}
        for reply in out.replies:
            message = reply.message
            if isinstance(message, Refused) and isinstance(item, inputs.Arrived):
                told["received"] += item.generate.n
                told["refused"] += item.generate.n
            elif isinstance(message, Accepted) and not self.known[message.first_request]:
                self.known[message.first_request] = message.n
                told["received"] += message.n
                told["accepted"] += message.n
                told["live"] += message.n
            elif isinstance(message, Finished) and message.request in decided:
                told[{"stop": "finished", "length": "finished", "abort": "aborted"}.get(message.reason, "failed")] += 1
                told["live"] -= 1
        gauges = world.numbers
        for name in ("received", "refused", "accepted", "finished", "aborted", "failed"):
            counted, kept = told[name], gauges[f"{name}_total"]
            self.demand(counted == kept, f"{counted} choices were {name} by the messages, {kept} by the counter")
        self.demand(told["live"] == gauges["live"], f"{told['live']} choices live, the gauge says {gauges['live']}")


class Owners(Checker):
    """Every live unit has one owner, a row or the cache, and the cache's books are those of its readers."""

    name = "owners"

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Recount all units."""
        try:
            world.check_owners()
        except AssertionError as error:
            raise Broken(self.name, f"units and owners do not add up: {error}") from error


class Reclaimable(Checker):
    """What the cache says that it could give back is what it gives when all of it is asked for."""

    name = "reclaimable"

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Every few inputs, on a copy."""
        if len(world.inputs) % COPY_EVERY == 0:
            self._ask(world)

    def rest(self, world: World) -> None:
        """Once more, when nobody reads."""
        self._ask(world)

    def _ask(self, world: World) -> None:
        memory = world.core._state.memory
        if memory is None or memory.cache is None:
            return
        said, held = memory.cache.reclaimable(), memory.cache.held()
        other = clone(memory.cache)
        given = tuple(len(ids) for ids in other.evict(lambda units: False))
        self.demand(
            given == said, f"the cache says that it can give {said} units of its {held}; asked for all: {given}"
        )
        left = other.reclaimable()
        self.demand(not any(left), f"after it gave all, the cache says that it can give {left}")


class Promises(Checker):
    """What memory says fits can be taken, and one page more it refuses; on a copy, with the cache in it."""

    name = "promises"

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Every few inputs ask for the most there is, and take it."""
        memory = world.core._state.memory
        if memory is None or len(world.inputs) % COPY_EVERY:
            return
        room = memory.room_pages(memory.none)
        over = memory.refusal(memory.demand(room + 1))
        self.demand(over is not None, f"there is room for {room} pages, and one more is not refused")
        other = clone(memory)
        self.demand(other.refusal(other.demand(room)) is None, f"there is room for {room} pages, and they are refused")
        if room:
            try:
                taken = other.take(other.demand(room))
            except Exception as error:
                raise Broken(self.name, f"{room} pages fit and cannot be taken: {error}") from error
            self.demand(len(set(taken[other.owner].tolist())) == room, f"{room} pages were asked for: {taken}")


class Endings(Checker):
    """Each accepted choice ends exactly once, for a reason that its input can have, and then it is gone."""

    name = "endings"

    REASONS: ClassVar[dict[type, frozenset[str]]] = {
        inputs.Reported: frozenset({"stop", "length"}),
        inputs.FinishAsked: frozenset({"stop"}),
        inputs.Aborted: frozenset({"abort"}),
        inputs.FrontEndLost: frozenset({"abort"}),
        inputs.Ticked: frozenset({"deadline", "memory", "unschedulable"}),
        inputs.Resumed: frozenset({"stop", "length"}),
        inputs.EpochEnded: frozenset({"fault"}),
        inputs.Controlled: frozenset({"drained"}),
    }

    def __init__(self, config: CoreConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.ended: dict[int, str] = {}
        self.losses: Counter[int] = Counter()  # epochs in a row that died under a request and gave it few tokens
        self.got: Counter[int] = Counter()  # tokens that each got in this epoch

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Decisions and messages agree, and nothing is said of what has ended but to whom asks again."""
        decided = {one.request: one.reason for one in out.decisions if one.verdict == "ended"}
        told = {message.request: message.reason for message in _ends(out)}
        if isinstance(item, inputs.Arrived | inputs.Resumed):
            again = {number: reason for number, reason in told.items() if number not in decided}
            self.demand(again.items() <= self.ended.items(), f"told again are {again}, they ended as {self.ended}")
            told = {number: reason for number, reason in told.items() if number in decided}
        elif isinstance(item, inputs.EpochEnded) and item.recovers:
            self._count_losses(world, [one.request for one in out.decisions if one.verdict == "requeued"], decided)
        elif isinstance(item, inputs.Recovered):
            self._begin_anew()
        if out.tokens is not None:
            self.got.update(out.tokens.requests.tolist())
        self.demand(decided == told, f"decided ends {decided}, told ends {told}")
        for number, reason in decided.items():
            allowed = self.REASONS.get(type(item), frozenset())
            self.demand(reason in allowed, f"request {number} ended with {reason} on {type(item).__name__}")
            self.demand(number not in self.ended, f"request {number} ended twice: {self.ended.get(number)}, {reason}")
            self.demand(world.core.request_view(number) is None, f"request {number} ended and is still there")
        self.ended |= decided
        live = sorted(world.core._state.requests)
        wanted = sorted(number for number in world.by_request if number not in self.ended)
        self.demand(live == wanted, f"live are {live}, accepted and not ended {wanted}")

    def _count_losses(self, world: World, running: list[int], decided: dict[int, str]) -> None:
        """With an epoch that another follows only what died of its prompt, again and at last alone, may end."""
        for number in running:
            self.losses[number] += 1
        self._begin_anew()
        most = self.config.epoch_losses_max
        guilty = [number for number in running if len(running) == 1 and self.losses[number] >= most > 0]
        groups = [world.by_request[number][0] for number in guilty]
        innocent = [number for number in decided if world.by_request[number][0] not in groups]
        self.demand(not innocent, f"{innocent} ended with an epoch that another follows; it died under {running}")

    def _begin_anew(self) -> None:
        """Who got enough in the epoch that is over is not what it died of."""
        for number, tokens in self.got.items():
            if tokens >= ENOUGH_TOKENS:
                self.losses[number] = 0
        self.got.clear()

    def rest(self, world: World) -> None:
        """Every choice has its end."""
        missing = sorted(set(world.by_request) - set(self.ended))
        self.demand(not missing, f"requests {missing} have no end")


def _ends(out: Outputs) -> list[Finished]:
    """The terminal messages of one input."""
    return [reply.message for reply in out.replies if isinstance(reply.message, Finished)]


class Liveness(Checker):
    """Something is always on its way to somebody who waits, and a tick with nothing in flight moves something."""

    name = "liveness"

    def __init__(self, config: CoreConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.idle_ticks = 0

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Count ticks without progress, and look whether anybody would ever be served."""
        stalled = [one.numbers for one in out.decisions if one.verdict == "stalled"]
        self.demand(not stalled, f"a livelock was reported: {stalled}")
        gauges = world.numbers
        if isinstance(item, inputs.Ticked):
            moved = out.step is not None or any(one.verdict in ("ended", "retracted") for one in out.decisions)
            self.idle_ticks = 0 if moved or gauges["in_flight"] or not gauges["live"] else self.idle_ticks + 1
        most = self.config.stall_steps
        self.demand(self.idle_ticks < most, f"{self.idle_ticks} ticks moved nothing, and {gauges['live']} choices wait")
        forgotten = gauges["live"] and gauges["ready"] and not (world.wants_tick or world.reports_waiting)
        self.demand(not forgotten, f"{gauges['live']} choices are live, nothing is in flight, no tick is wanted")

    def rest(self, world: World) -> None:
        """Nobody waits."""
        live = world.numbers["live"]
        self.demand(not live, f"{live} choices are live when nothing happens any more")


class Tokens(Checker):
    """A client got the tokens of a lone run of its request, or the first of them."""

    name = "tokens"

    def rest(self, world: World) -> None:
        """Compare every client's output."""
        for number, (client, choice) in world.by_request.items():
            try:
                world.check_client(client, choice)
            except AssertionError as error:
                raise Broken(self.name, f"request {number} was told other tokens than a lone run: {error}") from error


class Counters(Checker):
    """The counters are what a reader of steps, decisions and tokens counts."""

    name = "counters"

    def __init__(self, config: CoreConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.counted: Counter[str] = Counter()
        self.reached: dict[int, int] = {}  # the highest position that a request ever had scheduled in this life
        self.targets: dict[int, int] = {}  # tokens that its prefill covers

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Count what this input led to, and compare."""
        counted = self.counted
        self.targets |= {one.request: one.numbers["tokens"] for one in out.decisions if one.verdict == "admitted"}
        if isinstance(item, inputs.Recovered):
            self.reached.clear()
            counted["recovered"] += sum(one.ended is None for group in item.groups for one in group.choices)
        if out.tokens is not None:
            counted["output_tokens"] += len(out.tokens.tokens)
        if out.step is not None:
            counted["steps"] += 1
            counted["forwards"] += out.step.forward is not None
            self._count_forward(world, out)
        for one in out.decisions:
            if one.verdict == "requeued":
                counted["requeued"] += 1
            elif one.verdict == "admitted":
                counted["cached_tokens"] += one.numbers.get("cached_tokens", 0)
            elif one.verdict == "retracted":
                counted["retractions"] += 1
                counted["preemptions"] += one.reason == "priority"
                counted["retracted_tokens"] += one.numbers["lost_tokens"]
            elif one.verdict in ("parked", "stalled", "flushed"):
                counted[{"parked": "parks", "stalled": "stalls", "flushed": "cache_flushes"}[one.verdict]] += 1
        gauges = world.numbers
        names = ("output_tokens", "steps", "prompt_tokens", "forwards", "cached_tokens", "retractions")
        more = (
            "recovered",
            "requeued",
            "retracted_tokens",
            "recomputed_tokens",
            "preemptions",
            "parks",
            "stalls",
            "cache_flushes",
        )
        for name in (*names, *more):
            said = gauges[f"{name}_total"]
            self.demand(counted[name] == said, f"{name}: {counted[name]} were seen, the counter says {said}")

    def _count_forward(self, world: World, out: Outputs) -> None:
        """Prompt tokens of the step's chunks, and those of them that their request had been through before."""
        forward = out.step.forward if out.step is not None else None
        if forward is None:
            return
        columns = (i32(forward.rows), i32(forward.starts), i32(forward.counts))
        for row, start, count in zip(*(column.tolist() for column in columns), strict=True):
            number, end = int(world.core._state.rows.request[row]), start + count
            if start < self.targets[number]:
                self.counted["prompt_tokens"] += count
                self.counted["recomputed_tokens"] += max(0, min(end, self.reached.get(number, 0)) - start)
            self.reached[number] = max(self.reached.get(number, 0), end)


class Deadlines(Checker):
    """Who has a deadline ends at it at the latest; who has none, or time left, does not end by one."""

    name = "deadlines"

    def __init__(self, config: CoreConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.due: dict[int, int] = {}

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Note new deadlines; on a tick, see that those that passed have been kept."""
        if isinstance(item, inputs.Arrived) and item.generate.deadline_ms:
            for first in [one.request for one in out.decisions if one.verdict == "accepted"]:
                for number in range(first, first + item.generate.n):
                    self.due[number] = item.now_ns + item.generate.deadline_ms * 1_000_000
        for one in out.decisions:
            if one.verdict != "ended":
                continue
            due = self.due.pop(one.request, None)
            if one.reason == "deadline":
                self.demand(due is not None, f"request {one.request} has no deadline and ended by one")
                early = self.config.deadline_check or (due is not None and due <= item.now_ns)
                self.demand(early, f"request {one.request} ended by a deadline {due} at {item.now_ns}")
        if isinstance(item, inputs.Ticked):
            late = sorted(number for number, due in self.due.items() if due <= item.now_ns)
            self.demand(not late, f"the deadlines of requests {late} passed before {item.now_ns}, and they live")


class Hits(Checker):
    """What is found in the cache was computed, in the same namespace, by somebody who let it be stored."""

    name = "hits"

    def __init__(self, config: CoreConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.givers: dict[str, list[tuple[Client, int]]] = {}

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Look behind every admission with a hit."""
        if isinstance(item, inputs.EpochEnded | inputs.Recovered):
            self.givers.clear()
        for one in out.decisions:
            if one.verdict != "admitted":
                continue
            client, choice = world.by_request[one.request]
            givers = self.givers.setdefault(client.generate.namespace, [])
            cached = one.numbers.get("cached_tokens", 0)
            found = _said(client, choice)[:cached]
            known = not cached or any(_said(giver, which)[:cached] == found for giver, which in givers)
            space = client.generate.namespace
            self.demand(known, f"request {one.request} found {cached} tokens in namespace {space!r} that nobody stored")
            if client.generate.store and (client, choice) not in givers:
                givers.append((client, choice))


def _said(client: Client, choice: int) -> list[int]:
    """Prompt and output so far."""
    return [*i64(client.generate.prompt).tolist(), *client.told[choice]]


class Retractions(Checker):
    """Nobody is retracted more often than the configuration allows, and each time counts."""

    name = "retractions"

    def __init__(self, config: CoreConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.times: Counter[int] = Counter()

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Count per request."""
        for one in out.decisions:
            if one.verdict == "retracted":
                self.times[one.request] += 1
                times, most = self.times[one.request], self.config.retracts_max
                self.demand(one.numbers["times"] == times, f"request {one.request}: {one.numbers} the {times}th time")
                self.demand(times <= most, f"request {one.request} was retracted {times} times, {most} are allowed")


class Preemptions(Checker):
    """Who gives way by priority has a lower one, and whom it gave way to starts in that very step."""

    name = "preemptions"

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Look at every retraction for somebody's priority."""
        started = {one.request for one in out.decisions if one.verdict == "admitted"}
        for one in out.decisions:
            if one.verdict != "retracted" or one.reason != "priority":
                continue
            self.demand(self.config.priority_preemption, f"request {one.request} gave way, and preemption is off")
            mine, theirs = (world.by_request[number][0].generate.priority for number in (one.request, one.by))
            self.demand(mine < theirs, f"request {one.request} of priority {mine} gave way to {one.by} of {theirs}")
            self.demand(one.by in started, f"request {one.request} gave way to {one.by}, which does not start")


class Overtaking(Checker):
    """A waiting request is overtaken by at most so many that came later, under every policy of the queue."""

    name = "overtaking"

    def __init__(self, config: CoreConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.passed_by: dict[int, set[int]] = {}

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Whoever is admitted overtakes all that wait and came before."""
        if isinstance(item, inputs.Recovered):
            self.passed_by.clear()
        admitted = [one.request for one in out.decisions if one.verdict == "admitted" and "losses" not in one.numbers]
        if not admitted:  # who is tried alone overtakes nobody
            return
        waiting = world.core.view()["queue"]
        for number in admitted:
            self.passed_by.pop(number, None)
        for number in waiting:
            passed = self.passed_by.setdefault(number, set())
            passed.update(later for later in admitted if later > number)
            most = self.config.overtaken_max
            self.demand(len(passed) <= most, f"request {number} waits, overtaken by {len(passed)}, {most} are allowed")


class Quotas(Checker):
    """A namespace that nobody reads in holds no more of the cache than it may."""

    name = "quotas"

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Recount the namespaces with a limit that have no reader."""
        memory, config = world.core._state.memory, self.config
        if memory is None or memory.cache is None:
            return
        readers = {owner.group.namespace for owner in world.core._state.rows.owners if owner is not None}
        stages = memory.geometry.stages
        most_bytes = sum(stage.arena_bytes - stage.chain_start_bytes for stage in stages)
        for name in sorted({client.generate.namespace for client in world.clients.values()} - readers):
            held = memory.cache.held_by(name)
            took = sum(units * stage.bands[band].unit_bytes for band, units in enumerate(held) for stage in stages)
            ppm = config.cache_quotas.get(name, config.cache_quota_ppm)
            most = most_bytes * ppm // ONE_PPM
            self.demand(
                took <= most, f"namespace {name!r} holds {held} units, {took} bytes of {most}, and nobody reads"
            )


class Pins(Checker):
    """What a request pinned is found until the pin ends, unless pins were given up for want of memory, or by order."""

    name = "pins"

    def __init__(self, config: CoreConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.held: list[tuple[int, str, list[int], int]] = []  # until when, namespace, tokens, how many are found
        self.refused = self.dropped = 0
        self.running: set[int] = set()

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Note what was pinned; every few inputs see that it is still found."""
        if isinstance(item, inputs.EpochEnded | inputs.Recovered):
            self.running.clear()
        memory, ran = world.core._state.memory, set(self.running)
        for one in out.decisions:
            if one.verdict in ("admitted", "retracted"):
                (self.running.add if one.verdict == "admitted" else self.running.discard)(one.request)
        if memory is None or memory.cache is None:
            self.held.clear()
            return
        cache = memory.cache
        dropped = (
            cache.pins_dropped != self.dropped
        )  # of which pin is not told; one that ends up in parts holds nothing
        if dropped or isinstance(item, inputs.EpochBegan):
            self.held.clear()
            self.dropped = cache.pins_dropped
        self.held = [pin for pin in self.held if pin[0] > item.now_ns]
        if len(world.inputs) % COPY_EVERY == 0:
            for until, space, tokens, found in self.held:
                now = cache.match(space, np.array(tokens, np.int64), found).tokens
                self.demand(now >= found, f"{now} of {found} tokens are left of a prefix pinned until {until}")
        refused, self.refused = cache.pins_refused != self.refused, cache.pins_refused
        if dropped or refused:
            return
        for message in () if isinstance(item, inputs.Arrived | inputs.Resumed) else _ends(out):
            client, choice = world.by_request[message.request]
            if client.generate.pin_ms and message.reason in ("stop", "length") and message.request in ran:
                said = _said(client, choice)[: message.prompt_tokens + message.output_tokens]
                found = cache.match(client.generate.namespace, np.array(said, np.int64), len(said)).tokens
                until = item.now_ns + client.generate.pin_ms * 1_000_000
                self.held.append((until, client.generate.namespace, said, found))


class Closed(Checker):
    """Nothing is accepted while the daemon drains, or while the journal promises nothing."""

    name = "closed"

    def __init__(self, config: CoreConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.draining = self.degraded = False

    def after(self, world: World, item: inputs.Input, out: Outputs) -> None:
        """Follow the orders, and look at every answer to an arrival."""
        if isinstance(item, inputs.Controlled) and item.order not in ("flush_cache", "snapshot"):
            self.draining = True
        elif isinstance(item, inputs.Recovered):
            self.draining = self.degraded = False
        elif isinstance(item, inputs.JournalDegraded):
            self.degraded = not item.durable
        elif isinstance(item, inputs.Arrived) and (self.draining or self.degraded):
            accepted = [one.request for one in out.decisions if one.verdict == "accepted"]
            self.demand(not accepted, f"requests {accepted} were accepted behind closed doors")


class MemoryEnds(Checker):
    """Nobody ends for want of memory that would fit the empty arena."""

    name = "memory_ends"

    def rest(self, world: World) -> None:
        """Look at every end."""
        try:
            world.check_memory_ends()
        except AssertionError as error:
            raise Broken(self.name, str(error)) from error


class Replay(Checker):
    """A fresh core makes the same bytes of the same inputs, and ends in the same state."""

    name = "replay"

    def rest(self, world: World) -> None:
        """Every few seeds."""
        if self.seed % REPLAY_EVERY:
            return
        log, core = world.replayed()
        self.demand(log == bytes(world.log), "the replay decides otherwise")
        self.demand(core.state_digest() == world.core.state_digest(), "the replay ends in another state")
        self.demand(core.gauges() == world.core.gauges(), "the replay counts otherwise")


_ALL: tuple[type[Checker], ...] = (
    Requests,
    Endings,
    Liveness,
    Closed,
    Deadlines,
    Hits,
    Retractions,
    Preemptions,
    Overtaking,
    Quotas,
    Pins,
    Counters,
    Reclaimable,
    Promises,
    Owners,
    Tokens,
    MemoryEnds,
    Replay,
)
CHECKS: dict[str, type[Checker]] = {check.name: check for check in _ALL}
"""Every check by name, in the order in which they look."""
