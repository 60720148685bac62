"""Snapshot keeper: from the wish for a snapshot to its file and record, beside the loop.

Owns when one is due and the parts of the one that is being made. Must never delay a step: only the core's part is taken
on the loop, in the iteration whose step asks the ranks for theirs; what follows is a worker thread's. Invariants: a
snapshot is of one moment, right behind its step, on the core and on every stage; the records that it covers are on disk
before it is; one is made at a time; an epoch that ends takes an unfinished one along.

    due -> Controlled("snapshot") -> a step that asks for it: the core's part -> its reports: the stages' parts
        -> sync, file, record Snapshotted, a new segment; all but the newest two files go
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio

from daemon.clock import Clock
from daemon.core.inputs import Controlled, RecoveredGroup
from daemon.core.scheduler import SchedulerCore
from daemon.mailbox import Collated
from daemon.snapshots import core_state
from ipc.digests import SAMPLED_START
from ipc.messages import Step
from journal import snapshots
from journal.errors import JournalFailed
from journal.records import DECISION_VERSION, Snapshotted
from journal.snapshots import Body, Header
from journal.writer import JournalWriter

RETRY_BYTES = 8  # a snapshot that failed is tried again after this part of the usual distance


@dataclass(slots=True)
class Parts:
    """One snapshot that waits for the reports of its step."""

    sequence: int
    epoch: int
    seq: int
    core: bytes
    groups: list[RecoveredGroup]
    next_request: int
    reported_seq: int
    sampled: bytes
    stages: int


class SnapshotKeeper:
    """Makes a snapshot every `every_bytes` of journal; 0: never. `run` writes them; `order` is the engine's."""

    def __init__(
        self,
        writer: JournalWriter,
        order: Callable[[Controlled | Snapshotted], None],
        clock: Clock,
        log: Any,
        life: str,
        every_bytes: int,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = trio.to_thread.run_sync,
    ) -> None:
        self.written = 0  # snapshots of this life
        self._writer = writer
        self._order = order
        self._clock = clock
        self._log = log
        self._life = life
        self._every_bytes = every_bytes
        self._in_thread = in_thread
        self._due_bytes = every_bytes
        self._asked = False
        self._parts: Parts | None = None
        self._complete: tuple[Parts, list[bytes]] | None = None
        self._news = trio.Event()
        self._sampled = (0, SAMPLED_START)  # through which step, and the chained digest of its tokens

    # --- from the engine, on the loop

    def flushed(self) -> None:
        """An iteration was written."""
        if self._every_bytes and not self._asked and self._writer.life_bytes >= self._due_bytes:
            self._asked = True
            self._order(Controlled(self._clock.now_ns(), "snapshot"))

    def stepped(self, step: Step, sequence: int, core: SchedulerCore) -> None:
        """A step that asks for a snapshot was appended as record `sequence`; nothing was fed since."""
        assert step.snapshot, "this step asks for none"
        assert core.state.memory is not None, "only an epoch has steps"
        self._asked = True
        self._parts = Parts(
            sequence,
            step.epoch,
            step.seq,
            core_state(core),
            core.recoverable(),
            core.next_request,
            *self._sampled,
            len(core.state.memory.geometry.stages),
        )

    def collated(self, item: Collated) -> None:
        """A step was reported; with it may come what its ranks had behind it."""
        self._sampled = (item.reported.seq, item.digests[-1].sampled)
        parts = self._parts
        if parts is None or (item.reported.epoch, item.reported.seq) != (parts.epoch, parts.seq):
            return
        self._parts = None
        if len(item.snapshots) != parts.stages:
            self._put_off(f"{len(item.snapshots)} of {parts.stages} stages said what they hold")
            return
        self._complete = (parts, [item.snapshots[stage] for stage in range(parts.stages)])
        self._news.set()

    def epoch_changed(self) -> None:
        """An epoch began or ended: nothing was sampled in the new one, and nobody answers for the old one."""
        self._sampled = (0, SAMPLED_START)
        if self._parts is not None:
            self._parts, self._asked = None, False

    # --- beside it

    async def run(self) -> None:
        """Write snapshots until cancelled."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            await self.write_complete()

    @property
    def complete(self) -> bool:
        """All parts of a snapshot are there, and it is not written."""
        return self._complete is not None

    async def write_complete(self) -> None:
        """Write the snapshot whose parts are all there, if there is one."""
        complete, self._complete = self._complete, None
        if complete is not None:
            await self._write(*complete)

    async def _write(self, parts: Parts, stages: list[bytes]) -> None:
        started_ns = self._clock.now_ns()
        try:
            header, name, size = await self._in_thread(lambda: self._write_file(parts, stages))
        except (OSError, JournalFailed) as error:
            self._put_off(str(error))
            return
        self._order(Snapshotted(name, size, header.digest, header.sequence))
        self._writer.leave_segment()
        self.written += 1
        self._asked, self._due_bytes = False, self._writer.life_bytes + self._every_bytes
        took_ms = (self._clock.now_ns() - started_ns) // 1_000_000
        self._log.info("Snapshotted", file=name, bytes=size, sequence=header.sequence, took_ms=took_ms)

    def _write_file(self, parts: Parts, stages: list[bytes]) -> tuple[Header, str, int]:
        """In a worker thread: what is covered must be on disk first, or a lost tail could be written over."""
        self._writer.sync(at_once=True)
        body = snapshots.encode_body(
            Body(parts.core, stages, parts.reported_seq, parts.sampled, parts.groups, parts.next_request)
        )
        header = Header(
            self._writer.journal_id,
            self._life,
            DECISION_VERSION,
            parts.sequence,
            parts.epoch,
            parts.seq,
            len(body),
            snapshots.digest(body),
        )
        name, size = snapshots.write(self._writer.storage, header, body)
        snapshots.prune(self._writer.storage)
        return header, name, size

    def _put_off(self, why: str) -> None:
        """No snapshot this time: the journal is whole without it, and a restart reads more."""
        self._log.warning("SnapshotFailed", error=why)
        self._asked = False
        self._due_bytes = self._writer.life_bytes + max(1, self._every_bytes // RETRY_BYTES)
