"""Journal actor: the task that makes written records durable, off the loop.

Owns the calls of `sync` and `compress_finished`, which run in a worker thread. Must never run an fsync on the loop.
Invariants: an acceptance waits for one sync at most that began after it was written; with nothing to sync
the actor sleeps without a timer; a journal that cannot be synced stops admission (`JournalDegraded`) and is tried again
every second.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import trio

from daemon.clock import NS_PER_S, Clock
from daemon.core.inputs import Input, JournalDegraded
from journal.errors import JournalFailed
from journal.writer import JournalWriter

SYNC_EVERY_S = 1.0  # with nobody waiting
RETRY_EVERY_S = 1.0
COMPRESS_EVERY_S = 30.0


class DurabilitySink(Protocol):
    """Who holds acceptances until they are on disk: the gateway."""

    def durable(self, synced_through: int) -> None:
        """The journal is on disk through this record."""


class JournalActor:
    """Syncs at once when an acceptance waits, else once a second while anything is unsynced."""

    def __init__(
        self,
        writer: JournalWriter,
        mailbox: trio.MemorySendChannel[Input],
        gateway: DurabilitySink,
        clock: Clock,
        log: Any,
        observe_sync: Callable[[float], None],
        in_thread: Callable[[Callable[[], object]], Awaitable[object]] = trio.to_thread.run_sync,
    ) -> None:
        self._writer = writer
        self._mailbox = mailbox
        self._gateway = gateway
        self._clock = clock
        self._log = log
        self._observe_sync = observe_sync
        self._in_thread = in_thread
        self._news = trio.Event()
        self._urgent = False
        self._degraded = False
        self._compress_at = 0.0
        self.repairs = 0  # files that failed and were replaced, with nothing lost

    def written(self, urgent: bool) -> None:
        """The engine wrote records; with policy `os` or `always` they are already as durable as they get."""
        if self._writer.policy != "group":
            self._gateway.durable(self._writer.synced_through)
        self._urgent = self._urgent or urgent
        self._news.set()
        self._tell_repairs()

    def _tell_repairs(self) -> None:
        """The disk failed and the journal is whole all the same: whoever runs it must hear of the disk."""
        for what in self._writer.take_repairs():
            self.repairs += 1
            self._log.warning("SegmentReplaced", error=what)

    async def run(self) -> None:
        """Sync until cancelled."""
        while True:
            if not self._urgent:
                await self._wait()
            self._urgent, self._news = False, trio.Event()
            if self._writer.sync_due:
                await self._sync()
            if self._degraded:
                await trio.sleep(RETRY_EVERY_S)
                self._urgent = True
            elif trio.current_time() >= self._compress_at:
                self._compress_at = trio.current_time() + COMPRESS_EVERY_S
                await self._compress()

    async def _wait(self) -> None:
        """Until something urgent is written, or a second passed with a sync due."""
        deadline = math.inf
        while not self._urgent:
            if self._writer.sync_due and deadline == math.inf:
                deadline = trio.current_time() + SYNC_EVERY_S
            with trio.move_on_at(deadline) as scope:
                await self._news.wait()
            if scope.cancelled_caught:
                return
            self._news = trio.Event()

    async def _compress(self) -> None:
        """Finished segments; a disk too full for the compressed copy leaves the plain one, and nothing is lost."""
        try:
            await self._in_thread(self._writer.compress_finished)
        except OSError as error:
            self._log.warning("CompressFailed", error=str(error), retry_s=COMPRESS_EVERY_S)

    async def _sync(self) -> None:
        started_ns = self._clock.now_ns()
        try:
            await self._in_thread(self._writer.sync)
        except JournalFailed as error:
            if not self._degraded:
                self._degraded = True
                self._log.error("JournalDegraded", durable=False, what=str(error))
                await self._mailbox.send(JournalDegraded(self._clock.now_ns(), False, str(error)))
            return
        self._tell_repairs()
        self._observe_sync((self._clock.now_ns() - started_ns) / NS_PER_S)
        self._gateway.durable(self._writer.synced_through)
        if self._degraded:
            self._degraded = False
            self._log.warning("JournalDegraded", durable=True, what="")
            await self._mailbox.send(JournalDegraded(self._clock.now_ns(), True, ""))
