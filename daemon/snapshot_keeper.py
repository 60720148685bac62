"""Snapshot keeper: from the wish for a snapshot to its file and record, beside the loop.

Owns when one is due and the draft of the one that is being made. Must never delay a step: the core is encoded by a copy
of the process, forked in the iteration whose step asks the ranks for their parts; the loop waits for nothing.
Invariants: a snapshot is of one moment, right behind its step, on the core and on every stage; the records that it
covers are on disk before it is; one is made at a time; an epoch that ends takes an unfinished one along; whatever a
copy comes to, it is one snapshot less and told once.

    due -> Controlled("snapshot") -> a step that asks for it: fork, the core's part -> its reports: the stages' parts
        -> sync, file, record Snapshotted, a new segment; all but the newest two files go
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio

from daemon.clock import NS_PER_MS, Clock
from daemon.core.inputs import Controlled
from daemon.core.scheduler import SchedulerCore
from daemon.forked import ForkedFailed
from daemon.mailbox import Collated
from daemon.snapshot_draft import Begin, Draft, ForkedDraft, Moment
from ipc.digests import SAMPLED_START
from ipc.messages import Step
from ipc.packing import PACKED_BYTES_MAX
from journal import snapshots
from journal.errors import JournalFailed
from journal.records import Snapshotted
from journal.writer import JournalWriter

RETRY_BYTES = 8  # a snapshot that failed is tried again after this part of the usual distance


@dataclass(frozen=True, slots=True)
class Begun:
    """A snapshot that waits for the reports of its step, or for its file."""

    moment: Moment
    pause_us: int  # what it cost the loop


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
        begin: Begin = ForkedDraft,
    ) -> None:
        self.written = 0  # snapshots of this life
        self._writer = writer
        self._order = order
        self._clock = clock
        self._log = log
        self._life = life
        self._every_bytes = every_bytes
        self._in_thread = in_thread
        self._begin = begin
        self._due_bytes = every_bytes
        self._asked = False
        self._draft: Draft | None = None  # begun, and neither written nor abandoned
        self._begun: Begun | None = None
        self._complete: tuple[Begun, list[bytes]] | None = None
        self._leaving: list[Draft] = []  # abandoned, and not known to be gone
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
        assert self._draft is None, "one snapshot is made at a time"
        self._asked = True
        self._leaving = [draft for draft in self._leaving if not draft.gone()]
        if self._leaving:
            self._put_off("the process of the one before has not ended")
            return
        stages = len(core.state.memory.geometry.stages)
        moment = Moment(self._writer.journal_id, self._life, sequence, step.epoch, step.seq, *self._sampled, stages)
        started_ns = self._clock.now_ns()
        try:
            draft = self._begin(core, self._writer.storage, moment)
        except OSError as error:
            self._put_off(f"no process for it: {error}")
            return
        self._draft = draft
        self._begun = Begun(moment, (self._clock.now_ns() - started_ns) // 1000)

    def collated(self, item: Collated) -> None:
        """A step was reported; with it may come what its ranks had behind it."""
        self._sampled = (item.reported.seq, item.digests[-1].sampled)
        begun = self._begun
        if begun is None or (item.reported.epoch, item.reported.seq) != (begun.moment.epoch, begun.moment.seq):
            return
        self._begun = None
        stages = begun.moment.stages
        if len(item.snapshots) != stages:
            self._abandon()
            limit = f"a rank leaves out what is over {PACKED_BYTES_MAX >> 20} MiB packed"
            self._put_off(f"{len(item.snapshots)} of {stages} stages said what they hold; {limit}")
            return
        self._complete = (begun, [item.snapshots[stage] for stage in range(stages)])
        self._news.set()

    def epoch_changed(self) -> None:
        """An epoch began or ended: nothing was sampled in the new one, and nobody answers for the old one."""
        self._sampled = (0, SAMPLED_START)
        if self._begun is not None:
            self._abandon()
            self._asked = False

    def _abandon(self) -> None:
        """What was begun and is not written comes to nothing."""
        if self._draft is not None:
            self._draft.abandon()
            self._leaving.append(self._draft)
            self._draft, self._begun = None, None
            self._news.set()

    # --- beside it

    async def run(self) -> None:
        """Write snapshots until cancelled."""
        try:
            while True:
                await self._news.wait()
                self._news = trio.Event()
                await self.write_complete()
                await self._reap()
        finally:
            self._abandon()
            with trio.CancelScope(shield=True):
                await self._reap()

    async def _reap(self) -> None:
        for draft in self._leaving:
            await draft.reap()
        self._leaving = [draft for draft in self._leaving if not draft.gone()]

    @property
    def complete(self) -> bool:
        """All parts of a snapshot are there, and it is not written."""
        return self._complete is not None

    async def write_complete(self) -> None:
        """Write the snapshot whose parts are all there, if there is one."""
        complete, self._complete = self._complete, None
        if complete is not None:
            await self._write(*complete)

    async def _write(self, begun: Begun, stages: list[bytes]) -> None:
        started_ns, moment = self._clock.now_ns(), begun.moment
        assert self._draft is not None, "only what was begun is complete"
        try:
            # What is covered must be on disk first, or a lost tail could be written over.
            await self._in_thread(lambda: self._writer.sync(at_once=True))
            file = await self._draft.finish(stages)
            await self._in_thread(lambda: snapshots.prune(self._writer.storage))
        except (OSError, JournalFailed, ForkedFailed) as error:
            self._abandon()
            self._put_off(str(error))
            return
        self._draft = None
        self._order(Snapshotted(file.name, file.size_bytes, file.digest, moment.sequence))
        self._writer.leave_segment()
        self.written += 1
        self._asked, self._due_bytes = False, self._writer.life_bytes + self._every_bytes
        took_ms = (self._clock.now_ns() - started_ns) // NS_PER_MS
        self._log.info(
            "Snapshotted",
            file=file.name,
            bytes=file.size_bytes,
            sequence=moment.sequence,
            pause_us=begun.pause_us,
            took_ms=took_ms,
        )

    def _put_off(self, why: str) -> None:
        """No snapshot this time: the journal is whole without it, and a restart reads more."""
        self._log.warning("SnapshotFailed", error=why)
        self._asked = False
        self._due_bytes = self._writer.life_bytes + max(1, self._every_bytes // RETRY_BYTES)
