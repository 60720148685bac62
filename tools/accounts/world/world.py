"""World: the daemon's own shell on a clock that jumps, life after life, until so many requests have passed.

Owns the lives and how each of them ends. Must never look into what a life counts: scrapes are asked for by a client, as
anybody would, and journal and log are files. The seed fixes what is sent and what happens, not how tasks take turns.

    killed   the process is gone between two turns of its loop, and its log's queue with it
    crashed  the machine is gone: of the journal, what was not synced
    drained  told to end when what runs has ended, stopped: told to end at once
    raised   the core raises at an input
    full     the journal's disk takes nothing more
    given_up ranks die again and again until the daemon gives them up, and with them every request
    rest     the last one: everything ends, then the daemon is told to
"""

from __future__ import annotations

import math
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from daemon.app import Daemon, Outside
from daemon.clock import NS_PER_S
from daemon.core.inputs import Reported
from daemon.endpoints import front_server
from daemon.exits import DaemonError, Exit
from daemon.logs import logger_of
from daemon.run_dir import RunDir
from daemon.settings_table import Settings
from ipc.client import DaemonClient
from ipc.errors import DaemonLost
from journal.errors import JournalError
from journal.opening import open_journal
from journal.writer import JournalSettings
from tools.accounts.metrics_side import Scrape, read_scrape
from tools.accounts.world.disk import Nowhere, WorldDisk, WorldLines
from tools.accounts.world.ranks import Machine, WorldRanks
from tools.accounts.world.traffic import LENGTH_MAX, VOCABULARY, BareClient, Tally, ask
from tools.accounts.world.wire import Switchboard

FATES = ("killed", "drained", "crashed", "raised", "given_up", "full", "stopped", "rest")
EPOCH_DEATHS = 3  # in the middle of each life, on average
EPOCH_LEAST_S = 1.5  # between two of them, on average
RATE = 150.0  # requests a second of the world
OPEN_MAX = 110  # requests that clients have open at once: with their choices at times more than the queue takes
SCRAPE_S = 0.1
BARE_EACH = 240  # one bare client, with some 40 requests, for so many others, and one soon
BARE_FIRST = 10
MARGIN = 0.05  # of a life's requests that come once its end has begun, at most
DOWN_S = 0.3  # between two lives
EPOCH_NS = 1_700_000_000 * NS_PER_S

Plant = Callable[[Daemon], None]


class WorldClock:
    """The simulated clock as the daemon's; entropy from the seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def now_ns(self) -> int:
        """Nanoseconds of the world."""
        return EPOCH_NS + int(trio.current_time() * NS_PER_S)

    def seed(self) -> int:
        """63 bits."""
        return self._rng.getrandbits(63)

    def token(self) -> str:
        """128 bits in hexadecimal digits."""
        return f"{self._rng.getrandbits(128):032x}"


class CoreRaised(RuntimeError):
    """What the world makes a core raise."""


@contextmanager
def no_signals() -> Iterator[AsyncIterator[int]]:
    """In the place of the daemon's: what is sent to this process is meant for the command, not for a life."""

    async def never() -> AsyncIterator[int]:
        await trio.sleep_forever()
        yield 0

    yield never()


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """In the place of a thread: the world has no other."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)


@dataclass
class Outcome:
    """What the world saw: scrapes in order, what clients were told, how each life ended and with which exit code."""

    scrapes: list[Scrape] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    lives: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0  # of the world
    problems: list[str] = field(default_factory=list)


def world_settings(run_dir: Path, **changes: Any) -> Settings:
    """A small model in a small arena, so that requests wait, park, retract and are refused."""
    options = {"vocab_size": str(VOCABULARY), "max_model_len": str(LENGTH_MAX), "eos_ppm": "20000"}
    chosen: dict[str, Any] = {
        "run_dir": str(run_dir),
        "rank_runner": "modeled",
        "rank_option": options,
        "page_size": 8,
        "arena_bytes": 1 << 14,
        "max_running_requests": 48,
        "max_queued_requests": 96,
        "max_num_batched_tokens": 512,
        "chunked_prefill_size": 256,
        "frontend_timeout_s": 4.0,
        "drain_timeout_s": 0.5,
        "epoch_restarts_max": 12,
        "epoch_restart_window_s": 60.0,
        "snapshot_bytes": 0,
        "journal_segment_bytes": 1 << 20,
    }
    return Settings(**chosen | changes)


class World:
    """One run; `plant` does something wrong to each life's daemon before it begins.

    Of so many clients (`bare_each`) one is a bare one.
    """

    def __init__(
        self,
        directory: Path,
        requests: int,
        seed: int,
        fates: Sequence[str] = FATES,
        plant: Plant | None = None,
        bare_each: int = BARE_EACH,
    ) -> None:
        self.rng = random.Random(seed)
        self.settings = world_settings(directory)
        self.run_dir = RunDir(directory)
        self.run_dir.prepare()
        self.clock = WorldClock(self.rng)
        self.disk = WorldDisk(self.run_dir.journal)
        self.board = Switchboard()
        self.machine = Machine(self.settings)
        self.outcome = Outcome()
        self.daemon: Daemon | None = None
        self.requests = requests
        self._fates, self._plant, self._bare_each = fates, plant, bare_each
        self._open = trio.CapacityLimiter(OPEN_MAX)
        self._all_sent = trio.Event()
        self._quota = 0.0  # requests that may have been sent by now
        self._progress: Callable[[int], None] = lambda sent: None
        self._interrupted = False

    def run(self, progress: Callable[[int], None] | None = None) -> Outcome:
        """Run it to its end; `progress` gets how many requests were sent. SIGINT raises KeyboardInterrupt at once."""
        self._progress = progress or self._progress
        trio.run(self._run, clock=MockClock(autojump_threshold=0))
        if self._interrupted:
            raise KeyboardInterrupt
        return self.outcome

    async def _run(self) -> None:
        """The lives, until they are over or SIGINT comes; a life may be cut anywhere, as by the fate `killed`."""
        with trio.open_signal_receiver(signal.SIGINT) as interrupts:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._interrupt, interrupts, nursery.cancel_scope)
                await self._lives()
                nursery.cancel_scope.cancel()

    async def _interrupt(self, interrupts: AsyncIterator[int], world: trio.CancelScope) -> None:
        async for _ in interrupts:
            self._interrupted = True
            world.cancel()

    async def _lives(self) -> None:
        began = trio.current_time()
        async with trio.open_nursery() as nursery, self._client("fe-0") as first, self._client("fe-1") as second:
            nursery.start_soon(self._scrape)
            nursery.start_soon(self._send, (first, second))
            for index, fate in enumerate(self._fates):
                until = self.requests * (index + 1) // len(self._fates)
                await self._live(fate, until)
                await trio.sleep(DOWN_S)
            nursery.cancel_scope.cancel()
        self.outcome.seconds = trio.current_time() - began
        self.outcome.problems += self.outcome.tally.contradictions

    def _client(self, name: str, watches: bool = False) -> DaemonClient:
        return DaemonClient("world", name, return_within_s=20.0, connect=self.board.connect, watches=watches)

    # --- lives

    async def _live(self, fate: str, until: int) -> None:
        """One life, which meets its fate once so many requests were sent."""
        lines = WorldLines(self.run_dir.logs / "daemon.log", pretty=False, stream=Nowhere())  # type: ignore[arg-type]
        log = logger_of(lines, "info", process="daemon")
        rules = JournalSettings(policy="group", segment_bytes=self.settings.journal_segment_bytes)
        try:
            writer, found = open_journal(self.disk, rules, bytes.fromhex(self.clock.token()))
        except JournalError as error:
            self.outcome.problems.append(f"the journal cannot be opened: {error}")
            raise
        ranks: Any = lambda *parts: WorldRanks(self.machine, *parts)  # noqa: E731
        bind: Any = self.board.bind
        outside = Outside(ranks, bind, inline, no_signals)
        self.machine.dies_after_s = math.inf
        front = front_server(self.settings, self.run_dir)
        daemon = Daemon(self.settings, self.run_dir, front, writer, self.clock, log, lambda: lines.lost, outside)
        self.daemon = daemon
        if self._plant is not None:
            self._plant(daemon)
        codes: list[str] = []

        async def serve() -> None:
            code = await daemon.run(found)
            codes.append(code.name.lower())

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._fate, fate, until, daemon, scope, nursery.cancel_scope)
                await serve()
                nursery.cancel_scope.cancel()
        self.daemon = None
        if scope.cancelled_caught:
            lines.kill()
            if fate == "crashed":
                self.disk.crash(self.rng)
        else:
            lines.close()
        self.disk.broken = False
        self.disk.unlock()
        self.outcome.lives.append((fate, codes[0] if codes else "gone"))

    async def _fate(
        self, fate: str, until: int, daemon: Daemon, life: trio.CancelScope, nursery: trio.CancelScope
    ) -> None:
        tally = self.outcome.tally
        share_s = self.requests / len(self._fates) / RATE
        self._quota = until + MARGIN * self.requests / len(self._fates)
        while tally.sent < until and not self._all_sent.is_set():
            await trio.sleep(self.rng.expovariate(1 / max(share_s / EPOCH_DEATHS, EPOCH_LEAST_S)))
            if tally.sent < until:
                self.machine.kill()
        if fate in ("killed", "crashed"):
            while not daemon.core.account().live:  # in the midst of work
                self._quota += 1
                await trio.sleep(SCRAPE_S / 10)
            life.cancel()
        elif fate == "drained":
            daemon.engine.drain()
        elif fate == "raised":
            self._raise_once(daemon)
        elif fate == "full":
            self.disk.broken = True
        elif fate == "given_up":
            self.machine.dies_after_s = 0.01
            self.machine.kill()
        else:
            while fate == "rest" and not await self._at_rest(daemon):
                await trio.sleep(SCRAPE_S)
            await trio.sleep(2 * SCRAPE_S)
            daemon.engine.stop()
        while True:  # some ends need traffic to come about
            await trio.sleep(SCRAPE_S)
            self._quota += 1

    def _raise_once(self, daemon: Daemon) -> None:
        feed = daemon.core.feed

        def feed_and_raise(item: Any) -> Any:
            if isinstance(item, Reported):
                raise CoreRaised("by order of the world")
            return feed(item)

        daemon.core.feed = feed_and_raise  # type: ignore[method-assign]

    async def _at_rest(self, daemon: Daemon) -> bool:
        await self._all_sent.wait()
        return not daemon.core.account().live and not self._open.borrowed_tokens

    # --- clients

    async def _send(self, clients: Sequence[DaemonClient]) -> None:
        """All requests, by the product's clients and by bare ones, in bursts."""
        tally, index = self.outcome.tally, 0
        async with trio.open_nursery() as nursery:
            while tally.sent + self._open.borrowed_tokens < self.requests:
                if tally.sent + self._open.borrowed_tokens >= self._quota:
                    await trio.sleep(SCRAPE_S)
                    continue
                index += 1
                burst = 8.0 if index // 200 % 5 == 4 else 1.0
                await trio.sleep(self.rng.expovariate(RATE * burst))
                rng = random.Random(self.rng.getrandbits(64))
                await self._open.acquire_on_behalf_of(index)
                if index % self._bare_each == BARE_FIRST:
                    bare = BareClient(self.board, f"bare-{index}", rng, tally)
                    nursery.start_soon(self._client_task, index, bare.run)
                else:
                    client = clients[index % len(clients)]
                    nursery.start_soon(self._client_task, index, ask, client, rng, f"r{index}", tally)
                self._progress(tally.sent)
        self._progress(tally.sent)
        self._all_sent.set()

    async def _client_task(self, index: int, run: Callable[..., Any], *arguments: Any) -> None:
        try:
            await run(*arguments)
        finally:
            self._open.release_on_behalf_of(index)

    async def _scrape(self) -> None:
        """Somebody who scrapes all the time, whatever happens to the daemon."""
        async with self._client("scraper", watches=True) as client:
            while True:
                await trio.sleep(SCRAPE_S)
                try:
                    answer = await client.ask("metrics")
                except (DaemonLost, trio.TooSlowError):
                    continue
                if not answer.ok:
                    raise DaemonError(Exit.INTERNAL, answer.body)
                self.outcome.scrapes.append(read_scrape(answer.body))
