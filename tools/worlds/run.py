"""Runs: one case on one world, action by action, judged by every check.

Owns what each action of a case means, and how what goes wrong is named. Must never let an error through: whatever a
case leads to is its failure, told with the action that it happened at.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePath

import msgspec

from allocator.errors import InvariantBroken
from daemon.core import inputs
from daemon.core.outputs import Outputs
from ipc.messages import Generate
from tools.worlds.cases import MODEL_LEN, VOCAB_SIZE, Case, prompt_of
from tools.worlds.checks import CHECKS, Broken
from tools.worlds.world import Client, World, facts

OTHERS = ("rank", "world", "core", "exception")
"""What fails beside the checks: an assertion of the rank double, of the world's books, of the core; any other error."""

TURNS_MAX = 20_000
FINISH_TOKENS = 20
WAIT_MS = (1, 3, 10, 60)


class Failure(msgspec.Struct, frozen=True):
    """What went wrong: the check, what it said, and at which action (as many as there are: at rest)."""

    check: str
    text: str
    at: int


class Ran(msgspec.Struct):
    """What one run did: how often things happened, and why it failed (None: it did not)."""

    failure: Failure | None = None
    happened: Counter[str] = msgspec.field(default_factory=Counter)


def run(case: Case, checks: Sequence[str] = tuple(CHECKS)) -> Ran:
    """Run a case to its end under these checks."""
    ran, done = Ran(), 0
    try:
        player = Player(case, checks)
        for action in case.actions:
            player.act(*action)
            done += 1
        player.rest()
        ran.happened = player.happened
        _count(player.world, ran.happened)
    except Exception as error:
        ran.failure = Failure(_name(error), _text(error), done)
    return ran


def _name(error: Exception) -> str:
    """The check that an error belongs to."""
    if isinstance(error, Broken):
        return error.check
    if isinstance(error, InvariantBroken):
        return "core"
    if isinstance(error, AssertionError):
        file = PurePath(traceback.extract_tb(error.__traceback__)[-1].filename)
        if file.name in ("rank_double.py", "world.py"):
            return {"rank_double.py": "rank", "world.py": "world"}[file.name]
        return "core"
    return "exception"


def _text(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({PurePath(where.filename).name}:{where.lineno})"


class Player:
    """A case on its world. `act` does one action; `rest` ends it."""

    def __init__(self, case: Case, checks: Sequence[str] = tuple(CHECKS)) -> None:
        self.case = case
        self.world = World(
            case.config, pages=case.pages, model=facts(VOCAB_SIZE, MODEL_LEN), shape=case.shape, stages=case.stages
        )
        self.begin_in = 0  # actions until the next epoch begins, while there is none
        self.checkers = [CHECKS[name](case.config, case.seed) for name in checks]
        self.sent: dict[int, Generate] = {}
        self.happened: Counter[str] = Counter()
        self.world.watchers += [self._count_decisions, *(checker.after for checker in self.checkers)]

    def act(self, name: str, number: int) -> None:
        """One action of the case."""
        ACTS[name](self, number)
        if self.world.rank is None:
            self.begin_in -= 1
            if self.begin_in <= 0:
                self.world.begin()

    def _begin_later(self, number: int) -> None:
        """The next epoch begins some actions from now, or at once."""
        self.begin_in = (0, 0, 2, 5)[number % 4]

    def rest(self) -> None:
        """Turn until nothing happens any more, then the last checks, and those of a world that was emptied."""
        self.world.settle()
        self.world.run(TURNS_MAX)
        for checker in self.checkers:
            checker.rest(self.world)
        self.world.check_all_free()
        self.world.check_ends()

    # --- actions ------------------------------------------------------------------------------------------------

    def submit(self, number: int) -> None:
        """Send request `number` of the case, under a name that is new; its parent may still run."""
        ask = self.case.asks[number]
        said = self._said(ask.parent) if ask.parent >= 0 else []
        generate = ask.generate(number, prompt_of(self.case, number, said))
        self.sent[number] = generate
        if number == self.case.poison:
            self.world.deadly[ask.frontend, generate.id] = self.case.deadly_at
        self.world.arrive(generate, ask.frontend, seed=number + 1)

    def turn(self, _: int) -> None:
        """What an engine would do next: an iteration where one is wanted, else the oldest report."""
        self.world.turn()

    def tick(self, _: int) -> None:
        """One iteration, wanted or not."""
        self.world.tick()

    def report(self, _: int) -> None:
        """The oldest report comes back."""
        if self.world.reports_waiting:
            self.world.report()

    def wait(self, number: int) -> None:
        """Some milliseconds in which nothing is done."""
        self.world.wait(WAIT_MS[number % len(WAIT_MS)])

    def flush(self, number: int) -> None:
        """The compaction worker asks for a flush."""
        self.world.feed(inputs.FlushAsked(self.world.now_ns, number % 50))

    def flush_cache(self, number: int) -> None:
        """Now and then the cache is emptied of what nobody reads."""
        if number % 4 == 0:
            self.world.feed(inputs.Controlled(self.world.now_ns, "flush_cache"))

    def abort(self, number: int) -> None:
        """A client hangs up on one of all requests so far, ended ones too."""
        if found := self._pick(number):
            self.world.abort(found[1].id, found[0])

    def finish(self, number: int) -> None:
        """A front end finds a stop string, or claims to, in any choice."""
        if found := self._pick(number):
            frontend, generate = found
            choice, tokens = number // 7 % (generate.n + 2) - 1, number // 31 % FINISH_TOKENS - 1
            self.world.feed(inputs.FinishAsked(self.world.now_ns, frontend, generate.id, choice, tokens))

    def acknowledge(self, number: int) -> None:
        """A front end has seen an end, or names one that is none."""
        found = self._pick(number)
        client = self.world.clients.get((found[0], found[1].id)) if found else None
        if found and not (client and client.away):
            self.world.feed(inputs.Acknowledged(self.world.now_ns, found[0], [found[1].id, "nobody"]))

    def repeat(self, number: int) -> None:
        """A front end sends again what it has sent, as long as the core knows of it."""
        found = self._pick(number)
        if found and (found[0], found[1].id) in self.world.clients and self.world.knows(found[0], found[1].id):
            self.world.arrive(found[1], found[0])

    def lose(self, number: int) -> None:
        """Now and then a front end is gone."""
        if number % 10 == 0:
            self.world.feed(inputs.FrontEndLost(self.world.now_ns, ("fe", "other")[number // 10 % 2]))

    def epoch(self, _: int) -> None:
        """All is given up: whatever lives ends, and all begin again with empty memory."""
        self.world.end_epoch(recovers=False)
        self.world.begin()

    def recover(self, number: int) -> None:
        """A rank dies, and others take over, now or later; what had a row waits for them."""
        if self.world.rank is not None:
            self.world.end_epoch()
            self._begin_later(number)

    def restart(self, number: int) -> None:
        """The daemon dies; sometimes the machine with it, which loses the journal's tail."""
        lost = number // 64 % (self.world.quiet + 1) if number % 3 == 0 else 0
        self.world.restart(lost)
        self._begin_later(number)
        if number % 5:
            self.world.resume_all()

    def resume(self, number: int) -> None:
        """A front end comes back for any choice so far; some of its newest tokens had not reached it."""
        if found := self._pick(number):
            frontend, generate = found
            self.world.resume(generate.id, number // 7 % (generate.n + 1), number // 31 % 4, frontend)

    def snapshot(self, _: int) -> None:
        """The next step is to ask the ranks for their part of a snapshot."""
        self.world.feed(inputs.Controlled(self.world.now_ns, "snapshot"))

    def drain(self, _: int) -> None:
        """Nothing new is accepted from now on."""
        self.world.feed(inputs.Controlled(self.world.now_ns, "drain"))

    def stop(self, _: int) -> None:
        """Everything ends now."""
        self.world.feed(inputs.Controlled(self.world.now_ns, "stop"))

    def degrade(self, _: int) -> None:
        """The journal's disk is full."""
        self.world.feed(inputs.JournalDegraded(self.world.now_ns, False, "disk full"))

    # --- inside -------------------------------------------------------------------------------------------------

    def _pick(self, number: int) -> tuple[str, Generate] | None:
        """Front end and message of one of the requests sent so far."""
        if not self.sent:
            return None
        chosen = sorted(self.sent)[number % len(self.sent)]
        return self.case.asks[chosen].frontend, self.sent[chosen]

    def _said(self, number: int) -> list[int]:
        """What request `number` asked and was told so far; nothing when it was refused."""
        client = self._client(number)
        if client is None:
            return []
        prompt = client.generate.prompt
        asked = [int.from_bytes(prompt[at : at + 8], "little") for at in range(0, len(prompt), 8)]
        return [*asked, *client.tokens[0]]

    def _client(self, number: int) -> Client | None:
        return self.world.clients.get((self.case.asks[number].frontend, f"r{number}"))

    def _count_decisions(self, world: World, item: inputs.Input, out: Outputs) -> None:
        for one in out.decisions:
            told = one.verdict in ("ended", "refused", "retracted", "resumed", "requeued")
            reason = one.reason.partition(":")[0] if told else ""
            self.happened[f"{one.verdict} {reason}".strip()] += 1
            if one.verdict == "admitted":
                self.happened["hits"] += one.numbers.get("cached_tokens", 0) > 0


_WORKING = ("submit", "turn", "tick", "report", "wait", "flush", "flush_cache")
_LEAVING = ("abort", "finish", "acknowledge", "repeat", "lose", "epoch", "drain", "stop", "degrade")
_DYING = ("recover", "restart", "resume", "snapshot")
_ALL = (*_WORKING, *_LEAVING, *_DYING)
ACTS: dict[str, Callable[[Player, int], None]] = {name: getattr(Player, name) for name in _ALL}
"""Every action by name."""


def _count(world: World, happened: Counter[str]) -> None:
    """What the world's counters say beside the decisions."""
    gauges = world.core.gauges()
    for name in ("steps", "output_tokens", "cached_tokens", "surplus_tokens", "checkpoints_given"):
        happened[name.replace("_", " ")] += gauges[f"{name}_total"]
    happened["evicted units"] += sum(n for name, n in gauges.items() if name.startswith("evicted_units_"))
