"""App: one nursery of supervised actors, their boot and their end.

Owns the wiring of the actors and the order in which they come and go. Must never outlive a failed actor: the first
failure is kept on disk and ends this life, and the exit code says what it was. Invariants: the exit code is 0 only when
the journal was closed with everything ended and synced; requests end with a life only where the ranks are given up
(`LastLoss`), all others stand in the journal and go on in the next one.

    boot   journal -> gateway bound -> what was left -> engine, results, compaction, journal actor, observer, health
           -> epochs
    end    engine (order carried out) -> Closed -> sync -> gateway drained -> ranks stopped -> journal closed
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import trio

from allocator.checks import Checks
from daemon.answers import Answers
from daemon.boot_notes import boot_notes
from daemon.clock import NS_PER_S, Clock
from daemon.compaction import CompactionWorker
from daemon.config import recorded
from daemon.core.inputs import Input
from daemon.core.scheduler import SchedulerCore
from daemon.core_settings import core_config
from daemon.endpoints import FrontServer
from daemon.engine import Engine
from daemon.epochs import OVER, Epochs, LastLoss
from daemon.exits import DaemonError, Exit
from daemon.gateway import Gateway
from daemon.health import Health, Vitals
from daemon.journal_actor import JournalActor
from daemon.logs import crash_file
from daemon.mailbox import (
    HINTS_MAX,
    INPUTS_MAX,
    OBSERVED_MAX,
    REPORTS_MAX,
    BandCounts,
    BecameIdle,
    Iteration,
    StepSent,
)
from daemon.metrics import Metrics
from daemon.observe import Observer
from daemon.processes import take_signals
from daemon.ranks import Epoch, RankSupervisor
from daemon.recovery import recover
from daemon.restarts import Restarts
from daemon.results import ResultProcessor
from daemon.run_dir import RunDir
from daemon.settings_table import Settings
from daemon.snapshot_keeper import SnapshotKeeper
from daemon.versions import versions
from ipc.errors import EndpointError, EndpointInUse
from ipc.handshake import Limits
from ipc.messages import Report
from ipc.sockets import Socket, bind_router
from journal.errors import JournalFailed
from journal.opening import Found
from journal.records import DECISION_VERSION, SCHEMA_VERSION, Opened
from journal.writer import JournalWriter

FINISH_WITHIN_S = 15.0
GATEWAY_DRAIN_S = 3.0
FAULT_PATIENCE_S = 1.0  # for ranks, once nothing that they say counts any more
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def root_cause(error: BaseException) -> BaseException:
    """What a tree of exception groups is about: its first error with an exit code, else its first error."""
    leaves: list[BaseException] = []
    stack = [error]
    while stack:
        entry = stack.pop()
        if isinstance(entry, BaseExceptionGroup):
            stack.extend(reversed(entry.exceptions))
        else:
            leaves.append(entry)
    return next((leaf for leaf in leaves if isinstance(leaf, DaemonError)), leaves[0])


def exit_code_of(error: BaseException) -> Exit:
    """The exit code that an error stands for."""
    if isinstance(error, DaemonError):
        return error.code
    if isinstance(error, EndpointInUse):
        return Exit.IN_USE
    return Exit.USAGE if isinstance(error, EndpointError) else Exit.INTERNAL


@dataclass(frozen=True, slots=True)
class Outside:
    """What a life reaches beyond its loop: ranks, front ends, threads, signals. A simulated world has others."""

    ranks: Callable[..., RankSupervisor] = RankSupervisor
    bind: Callable[..., Socket] = bind_router
    in_thread: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync
    signals: Callable[[], AbstractContextManager[Any]] = lambda: trio.open_signal_receiver(*SIGNALS)


class Daemon:
    """One life of the daemon, from an open journal to its exit code."""

    def __init__(
        self,
        settings: Settings,
        run_dir: RunDir,
        front: FrontServer,
        writer: JournalWriter,
        clock: Clock,
        log: Any,
        lines_lost: Callable[[], int] = int,
        outside: Outside | None = None,
    ) -> None:
        """`lines_lost` says how many lines of the log were lost so far."""
        self._outside = outside or Outside()
        self._lines_lost = lines_lost
        self._settings = settings
        self._front = front
        self._run_dir = run_dir
        self._writer = writer
        self.clock = clock
        self._log = log
        self._failure: BaseException | None = None
        self._ended = trio.Event()
        self._hurried = False
        self.life = clock.token()
        self._checks = Checks(settings.invariants)
        self.core_config = core_config(settings)  # as recorded in the journal
        self.core = SchedulerCore(self.core_config, self._checks)
        self.metrics = Metrics()
        self.metrics.set_life(self.life, self.core_config)
        self._wire()

    def _wire(self) -> None:
        """Make the actors and the mailboxes between them; nothing runs yet."""
        settings, clock, log = self._settings, self.clock, self._log
        to_engine, mailbox = trio.open_memory_channel[Input](INPUTS_MAX)
        to_observer, observed = trio.open_memory_channel[Iteration](OBSERVED_MAX)
        to_compaction, hints = trio.open_memory_channel[StepSent | BecameIdle | BandCounts](HINTS_MAX)
        to_results, reports = trio.open_memory_channel[Report](REPORTS_MAX)
        self.observer = Observer(self.metrics, clock, log, observed, self._checks.found)
        self.health = Health(clock, self._vitals, settings.stall_timeout_s, log)
        self.ranks = self._outside.ranks(settings, self._run_dir, clock.token(), log, to_results)
        front = self._front
        if front.endpoint.startswith("tcp://") and front.keys is None:
            log.warning(
                "InsecureEndpoint", endpoint=front.endpoint, effect="anyone who connects reads prompts and outputs"
            )
        answers = Answers(self)
        self.gateway = Gateway(
            endpoint=front.endpoint,
            keys=front.keys,
            insecure=front.insecure,
            life=self.life,
            limits=Limits(message_bytes_max=settings.request_size_limit_bytes),
            mailbox=to_engine,
            names=self.core.frontends,
            now_ns=clock.now_ns,
            draw_seed=clock.seed,
            log=log,
            asks=answers.questions(),
            orders=answers.orders(),
            silence_s=settings.frontend_timeout_s,
            trouble=lambda: self.epochs.trouble,
            bind=self._outside.bind,
        )
        in_thread = self._outside.in_thread
        self.journal = JournalActor(self._writer, to_engine, self.gateway, clock, log, self.observer.synced, in_thread)
        self.results = ResultProcessor(
            clock, reports, lambda item: self.engine.order(item), to_compaction, self.ranks.accuse
        )
        self.compaction = CompactionWorker(clock, hints, to_engine, self.core_config.flush_moves_max)
        self.snapshots = SnapshotKeeper(
            self._writer,
            lambda item: self.engine.order(item),
            clock,
            log,
            self.life,
            settings.snapshot_bytes,
            in_thread,
        )
        self.engine = Engine(
            self.core,
            self._writer,
            clock,
            mailbox=mailbox,
            observed=to_observer,
            hints=to_compaction,
            ranks=self.ranks,
            results=self.results,
            gateway=self.gateway,
            journal=self.journal,
            drain_timeout_s=settings.drain_timeout_s,
            snapshots=self.snapshots,
        )
        restarts = Restarts(settings.epoch_restarts_max, settings.epoch_restart_window_s)
        self.epochs = Epochs(
            self.ranks, self.results, self.engine, restarts, clock, self.metrics, log, on_began=self._epoch_began
        )

    def bands(self) -> dict[str, tuple[int, ...]]:
        """Live, hole, pending and beyond units by band name, summed over stages, as the ranks reported them last."""
        epoch, stages = self.epochs.epoch, self.observer.bands
        names = [band.name for band in epoch.geometry.stages[0].bands] if epoch else []
        rows = zip(*stages, strict=True)
        return {name: tuple(map(sum, zip(*row, strict=True))) for name, row in zip(names, rows, strict=False)}

    def stage_bands(self) -> list[dict[str, tuple[int, int, int, int]]]:
        """The same of each stage, without bands of which it stores nothing."""
        epoch = self.epochs.epoch
        stages = zip(epoch.geometry.stages, self.observer.bands, strict=False) if epoch else ()
        return [
            {band.name: row for band, row in zip(stage.bands, rows, strict=True) if band.unit_bytes}
            for stage, rows in stages
        ]

    def journal_state(self) -> dict[str, Any]:
        """How far the journal is, for status."""
        writer = self._writer
        return {
            "last_sequence": writer.last_sequence,
            "synced_through": writer.synced_through,
            "unsynced_bytes": writer.unsynced_bytes,
            "degraded": writer.degraded,
            "policy": writer.policy,
        }

    def refresh_metrics(self) -> None:
        """Set every gauge to what it is now."""
        metrics = self.metrics
        metrics.set_core(self.core.gauges())
        metrics.set_bands(self.stage_bands())
        metrics.set_events(self.gateway.stats, self.ranks.stats)
        metrics.journal_unsynced.set(self._writer.unsynced_bytes)
        metrics.journal_repairs.set(self.journal.repairs)
        metrics.snapshots.set(self.snapshots.written)
        metrics.flushes_asked.set(self.compaction.asked)
        metrics.log_lines_lost.set(self._lines_lost())

    def _vitals(self) -> Vitals:
        engine = self.engine
        faults = (str(self._failure),) if self._failure is not None else ()
        live = self.core.state.live
        trouble = "" if faults else self.epochs.trouble
        return Vitals(
            engine.epoch, engine.ending, self._writer.degraded, live, engine.scheduled_tokens, faults, trouble
        )

    # --- a life

    def open_life(self) -> None:
        """Write the life's first record; the lines of the log behind this one are its own."""
        now_ns = self.clock.now_ns()
        self._writer.append(
            Opened(
                now_ns,
                self.life,
                SCHEMA_VERSION,
                DECISION_VERSION,
                self.core_config,
                versions(),
                recorded(self._settings),
            )
        )
        self._writer.flush()
        self._log.info("Opened", life=self.life, sequence=self._writer.last_sequence)

    async def _take_over(self, found: Found) -> None:
        """Read what the last life left, in a thread while pings are answered, and open a life that goes on with it.

        After a failure the life is opened without: then what was left still stands in the journal for the next one.
        """
        recovery, started_ns = None, self.clock.now_ns()
        if self._failure is None and found.life_segment:
            recovery = await self._outside.in_thread(recover, self._writer.storage, found)
        self.open_life()
        if recovery is None or self._failure is not None:
            return
        for part in reversed(recovery.taken_over(self.clock.now_ns())):
            self.engine.order_first(part)
        self.gateway.expect(sorted({group.frontend for group in recovery.groups}), recovery.next_request)
        for note in recovery.notes:
            self._log.warning("RecoveryNote", note=note)
        live = sum(1 for group in recovery.groups for choice in group.choices if choice.ended is None)
        self._log.info(
            "Recovered",
            how=recovery.how,
            live=live,
            known=len(recovery.groups),
            next_request=recovery.next_request,
            snapshot=recovery.snapshot,
            records=recovery.records,
            steps=recovery.steps,
            seconds=round((self.clock.now_ns() - started_ns) / NS_PER_S, 3),
        )

    async def run(self, found: Found) -> Exit:
        """Serve until an order or a failure ended it; returns the exit code."""
        with self._outside.signals() as signals:
            take_signals()
            try:
                await self._live(signals, found)
            finally:
                with trio.CancelScope(shield=True):
                    await self.ranks.close()
        try:
            self._writer.close()
        except JournalFailed as error:
            self._log.error("JournalNotClosed", error=str(error))
            self._failure = self._failure or DaemonError(Exit.JOURNAL, str(error))
        return self._exit_code()

    async def _live(self, signals: Any, found: Found) -> None:
        """All actors, from their start until everything that must be told at the end is told."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._gateway_task)
            nursery.start_soon(self._signals, signals)
            await self._supervise("recovery", lambda: self._take_over(found))
            for name, task in (
                ("journal", self.journal.run),
                ("results", self.results.run),
                ("snapshots", self.snapshots.run),
                ("compaction", self.compaction.run),
                ("observer", self.observer.run),
                ("health", self._health_task),
                ("ranks", self.epochs.run),
                ("engine", self._engine_task),
            ):
                nursery.start_soon(self._supervise, name, task)
            await self._ended.wait()
            await self._finish()
            self.observer.catch_up()
            nursery.cancel_scope.cancel()

    async def _supervise(self, name: str, task: Callable[[], Awaitable[None]]) -> None:
        """Run one actor; whatever it raises ends the daemon. `Cancelled` passes."""
        try:
            await task()
        except Exception as error:
            self._fail(name, error)

    async def _gateway_task(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """As `_supervise`; started once the socket is bound, or has failed to be."""
        bound = False
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.gateway.run)
                bound = True
                task_status.started()
        except Exception as error:
            self._fail("gateway", error)
            if not bound:
                task_status.started()

    async def _health_task(self) -> None:
        await self.health.run(self._run_dir.logs / "hang.txt")

    async def _engine_task(self) -> None:
        try:
            await self.engine.run()
        finally:
            self._ended.set()

    def _epoch_began(self, epoch: Epoch) -> None:
        """The door opens with the first epoch, and stays open."""
        self.compaction.begin_epoch()
        self.gateway.open(epoch.facts)
        for note in boot_notes(self._settings, epoch.geometry, epoch.facts):
            (self._log.warning if note.warns else self._log.info)(note.event, **note.values)

    async def _signals(self, signals: Any) -> None:
        """The first signal is an order, each further one makes it faster. SIGHUP: whoever started us is gone."""
        async for number in signals:
            self._log.info("Signal", signal=signal.Signals(number).name, ending=self.engine.ending)
            if number == signal.SIGHUP:
                self._fail("parent", DaemonError(Exit.CHILD, "the process that started this one is gone"))
            elif self.engine.ending in OVER:
                self._hurried = True
                self.engine.hurry()
            elif number == signal.SIGTERM and not self.engine.ending:
                self.engine.drain()
            else:
                self.engine.stop()

    # --- a failure

    def _fail(self, name: str, error: Exception) -> None:
        """The first failure counts: keep it on disk and end this life; see above for what becomes of the requests."""
        cause = root_cause(error)
        if self._failure is not None:
            self._log.error("FailedToo", actor=name, error=repr(cause))
            return
        self._failure = cause
        expected = exit_code_of(cause) != Exit.INTERNAL  # its sentence says it all; the trace is in the crash file
        self._log.error("Failed", actor=name, error=str(cause), exc_info=None if expected else error)
        if exit_code_of(cause) != Exit.USAGE:  # a refused setting is no crash
            self._dump(name, error)
        if isinstance(cause, LastLoss):
            self.engine.fault(str(cause), cause.records)
        else:
            self.engine.leave()

    def _dump(self, name: str, error: Exception) -> None:
        state: dict[str, Any] = {"life": self.life, "settings": recorded(self._settings)}
        try:
            state["core"] = self.core.view()
        except Exception as second:  # the core may be what broke; the trace is worth keeping without it
            state["core"] = repr(second)
        try:
            path = crash_file(self._run_dir.logs, name, error, state)
        except OSError as second:
            self._log.error("CrashFileFailed", error=str(second))
        else:
            self._log.error("CrashFile", path=str(path))

    # --- the end

    async def _finish(self) -> None:
        """Close in order, bounded in time; a step that fails makes the end a failure."""
        with trio.move_on_after(0 if self._hurried else FINISH_WITHIN_S) as scope:
            await self._supervise("finish", self._close_in_order)
        if scope.cancelled_caught and not self._hurried and self._failure is None:
            self._failure = DaemonError(Exit.INTERNAL, f"the end took more than {FINISH_WITHIN_S:g} s")
        if not self.ranks.stopping:  # those that run elsewhere would look for another life of ours
            await self._supervise("farewell", lambda: self._stop_ranks(hurried=True))

    async def _close_in_order(self) -> None:
        if self._failure is None:
            # `Closed` promises that all before it is on disk: recovery takes damage before it for corruption.
            with trio.CancelScope(shield=True):  # also when hurried: without `Closed` the end would be no clean one
                await self._outside.in_thread(self._writer.sync)
            self.engine.close(self.engine.ending)
        await self._outside.in_thread(self._writer.sync)
        self.gateway.durable(self._writer.synced_through)
        await self.gateway.drain(GATEWAY_DRAIN_S)
        await self._stop_ranks()

    async def _stop_ranks(self, hurried: bool = False) -> None:
        if self._failure is None:
            await self.ranks.stop(self.engine.ending, hurried=hurried)
        else:
            given_up = isinstance(self._failure, LastLoss)  # all else goes on in the next life
            await self.ranks.stop(str(self._failure), FAULT_PATIENCE_S, again=not given_up, hurried=hurried)

    def _exit_code(self) -> Exit:
        return Exit.CLEAN if self._failure is None else exit_code_of(self._failure)
