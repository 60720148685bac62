"""Engine: the task that owns the core, and the one order in which things happen.

Owns the core, the writing side of the journal and the numbering of steps. Must never let anything leave that is not
written: a step reaches the ranks, and tokens and replies the gateway, only after the one write of their iteration.
Invariants: every input is appended before the core is fed it; at most one tick per iteration, none at idle; a step is
encoded once, and the bytes in the journal are the bytes the ranks get; what ranks reported never waits behind what
clients ask, however many do.

    one iteration:  take orders, reports among them, and some of the mailbox
                    -> append input, feed, append decisions and step (for each) -> one write
                    -> step to ranks -> tokens and replies to the gateway -> hints and metrics
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import trio

from allocator.columns import i32
from daemon.clock import NS_PER_S, Clock
from daemon.core.account import Account
from daemon.core.inputs import Controlled, EpochBegan, EpochEnded, Input, Ticked
from daemon.core.outputs import Outputs
from daemon.exits import DaemonError, Exit
from daemon.mailbox import ITERATION_INPUTS_MAX, BandCounts, BecameIdle, Collated, Iteration, StepSent
from ipc.messages import Accepted, Step
from journal import records
from journal.errors import JournalFailed
from journal.records import Closed, Digested, Divergence, Kind, Readied, Snapshotted
from journal.writer import JournalWriter

FINISH_WAIT_S = 2.0  # how long an ordered end waits for the reports of steps in flight

Noted = Digested | Readied | Divergence | Snapshotted  # records that nothing is fed
Taken = Input | Collated | Noted


class Core(Protocol):
    """The scheduler core, as the engine uses it (`daemon.core.scheduler.SchedulerCore`)."""

    def feed(self, item: Input) -> Outputs: ...
    def gauges(self) -> dict[str, int]: ...
    def account(self) -> Account: ...
    def state_digest(self) -> bytes: ...


class StepSink(Protocol):
    """Where steps go: the rank supervisor."""

    def send_step(self, step: Step, data: bytes) -> None:
        """Send one encoded step to every rank, in seq order, without waiting."""


class Expecter(Protocol):
    """Who waits for the reports of steps: the result processor."""

    def expect(self, step: Step) -> None:
        """A step is about to be sent."""


class ReplySink(Protocol):
    """Where tokens and replies go: the gateway."""

    def deliver(self, outputs: Outputs, sequence: int) -> None:
        """Queue what `outputs` has for front ends, written through `sequence`; never waits."""


class JournalWaker(Protocol):
    """Who makes written records durable: the journal actor."""

    def written(self, urgent: bool) -> None:
        """Records were written; `urgent`: an acceptance waits for them to be on disk."""


class SnapshotSink(Protocol):
    """Who makes snapshots: the snapshot keeper."""

    def flushed(self) -> None:
        """An iteration was written."""

    def stepped(self, step: Step, sequence: int, core: Any) -> None:
        """A step that asks for a snapshot was appended as record `sequence`; nothing was fed since."""

    def collated(self, item: Collated) -> None:
        """A step is complete over its ranks."""

    def epoch_changed(self) -> None:
        """An epoch began or ended."""


class CoreFailed(DaemonError):
    """The core raised: an invariant is broken and nothing it says can be trusted any more."""

    def __init__(self, item: Input, error: Exception) -> None:
        super().__init__(Exit.INTERNAL, f"the scheduler core failed on {type(item).__name__}: {error!r}")


class Engine:
    """Feeds the core and carries out what it says. `run` returns once an order to end was carried out."""

    def __init__(
        self,
        core: Core,
        writer: JournalWriter,
        clock: Clock,
        *,
        mailbox: trio.MemoryReceiveChannel[Input],
        observed: trio.MemorySendChannel[Iteration],
        hints: trio.MemorySendChannel[StepSent | BecameIdle | BandCounts],
        ranks: StepSink,
        results: Expecter,
        gateway: ReplySink,
        journal: JournalWaker,
        drain_timeout_s: float,
        snapshots: SnapshotSink | None = None,
    ) -> None:
        self.core = core
        self.ending = ""  # the order being carried out: drain, stop or fault; or failed
        self.epoch = 0  # the one that runs; 0 while none does
        self.sent_seq = 0
        self.reported_seq = 0
        self.scheduled_tokens = 0  # the progress counter
        self._writer = writer
        self._clock = clock
        self._mailbox = mailbox
        self._observed = observed
        self._hints = hints
        self._ranks = ranks
        self._results = results
        self._gateway = gateway
        self._journal = journal
        self._snapshots = snapshots
        self._drain_timeout_ns = int(drain_timeout_s * NS_PER_S)
        self._newest_epoch = 1  # that began, or is about to
        self._orders: deque[Taken] = deque()  # they overtake the mailbox
        self._waiting: trio.CancelScope | None = None
        self._wants_tick = False
        self._due_ns: int | None = None
        self._drain_until_ns: int | None = None
        self._finish_until_ns: int | None = None
        self._idle_hinted = True

    # --- orders, from other tasks of the same loop

    def order(self, item: Taken) -> None:
        """Put an item in front of the mailbox and wake the loop."""
        self._orders.append(item)
        self._wake()

    def order_first(self, item: Taken) -> None:
        """Put an item in front of everything that was ordered."""
        self._orders.appendleft(item)
        self._wake()

    def drain(self) -> None:
        """Admit nothing new, let what runs go on until the drain timeout, then end it."""
        if not self.ending:
            self.ending = "drain"
            now_ns = self._clock.now_ns()
            self._drain_until_ns = now_ns + self._drain_timeout_ns
            self.order(Controlled(now_ns, "drain"))

    def stop(self) -> None:
        """End everything now."""
        if self.ending in ("", "drain"):
            self.ending, self._drain_until_ns = "stop", None
            self.order(Controlled(self._clock.now_ns(), "stop"))

    def begin_epoch(self, began: EpochBegan, readied: list[Readied]) -> None:
        """The ranks are ready for steps."""
        self._orders.extend(readied)
        self._newest_epoch = began.epoch
        self.order(began)

    def end_epoch(self, epoch: int, why: str, records: Sequence[Digested | Divergence]) -> None:
        """The ranks are lost and others will come: what runs waits for them with what it has."""
        self._orders.extend(records)
        self.order(EpochEnded(self._clock.now_ns(), epoch, why, recovers=True))

    def fault(self, why: str, records: Sequence[Digested | Divergence] = ()) -> None:
        """Nothing can go on: record what the ranks said last, end the epoch and with it every request."""
        if self.ending in ("fault", "failed"):
            return
        self.ending, self._drain_until_ns = "fault", None
        self._orders.extend(records)
        self.order(EpochEnded(self._clock.now_ns(), self._newest_epoch, why))

    def leave(self) -> None:
        """Something failed that is no request's end: take nothing more, all of them go on in the next life."""
        if self.ending in ("", "drain"):
            self.ending = "failed"
            self._wake()

    def live(self) -> int:
        """Requests that would be lost if the daemon ended now."""
        return self.core.gauges()["live"]

    def hurry(self) -> None:
        """End everything now and do not wait for reports either."""
        self._finish_until_ns = 0
        self.stop()
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    # --- the loop

    async def run(self) -> None:
        """Iterate until an order to end was carried out; raises CoreFailed, or DaemonError when the disk is lost."""
        while not self._finished():
            items = await self._gather()
            if self.ending != "failed":
                await self.iterate(items)

    @property
    def in_flight(self) -> int:
        """Steps sent and not reported, with or without a forward."""
        return self.sent_seq - self.reported_seq

    def _finished(self) -> bool:
        if self.ending == "failed":
            return True
        if not self.ending or self._orders or self.live():
            return False
        if self._mailbox.statistics().current_buffer_used and self.ending != "fault":
            return False  # whoever asks now is still refused in words
        if self.ending == "fault" or not (self.in_flight or self._wants_tick):
            return True
        if self._finish_until_ns is None:
            self._finish_until_ns = self._clock.now_ns() + int(FINISH_WAIT_S * NS_PER_S)
        return self._clock.now_ns() >= self._finish_until_ns

    async def _gather(self) -> list[Taken]:
        """What this iteration takes: orders first, then a bounded batch of the mailbox; waits when there is nothing."""
        items: list[Taken] = []
        if self._orders or self._wants_tick:
            await trio.lowlevel.checkpoint()
        else:
            with trio.CancelScope(deadline=trio.current_time() + self._wait_s()) as self._waiting:
                items.append(await self._mailbox.receive())
            self._waiting = None
        items[:0] = self._orders
        self._orders.clear()
        while len(items) < ITERATION_INPUTS_MAX:
            try:
                items.append(self._mailbox.receive_nowait())
            except trio.WouldBlock:
                break
        now_ns = self._clock.now_ns()
        if self._drain_until_ns is not None and now_ns >= self._drain_until_ns:
            self._drain_until_ns = None
            items.append(Controlled(now_ns, "drain_expired"))
        return items

    def _wait_s(self) -> float:
        """Seconds until the earliest timer: the core's, the drain's or that of the last reports."""
        times = [at for at in (self._due_ns, self._drain_until_ns, self._finish_until_ns) if at is not None]
        return max(0, min(times) - self._clock.now_ns()) / NS_PER_S if times else math.inf

    async def iterate(self, items: list[Taken]) -> None:
        """One iteration over `items`, whose order is kept."""
        now_ns = self._clock.now_ns()
        seen = Iteration(now_ns)
        steps: list[tuple[Step, bytes]] = []
        try:
            self._take(items, now_ns, seen, steps)
        except Exception:  # what was said before the failure stands in the journal, so clients and the log get it too
            await self._write(seen)
            self._deliver(seen)
            await self._observed.send(seen)
            raise
        fed_ns = self._clock.now_ns()
        await self._write(seen)
        seen.core_ns, seen.flush_ns = fed_ns - now_ns, self._clock.now_ns() - fed_ns
        for step, data in steps:
            self._results.expect(step)
            self._ranks.send_step(step, data)
        self._deliver(seen)
        self._hint(bool(steps))
        await self._observed.send(seen)

    def _take(self, items: list[Taken], now_ns: int, seen: Iteration, steps: list[tuple[Step, bytes]]) -> None:
        """Append and feed everything, then tick if it is time to."""
        for item in items:
            if isinstance(item, Noted):
                self._writer.append(item)
            elif isinstance(item, Collated):
                self._take_collated(item, seen, steps)
            else:
                self._feed(item, seen, steps)
        if self._wants_tick or (self._due_ns is not None and now_ns >= self._due_ns):
            self._feed(Ticked(now_ns), seen, steps)

    def _deliver(self, seen: Iteration) -> None:
        """Tokens and replies of a written iteration to the gateway."""
        for outputs in seen.outputs:
            if outputs.tokens is not None or outputs.replies:
                self._gateway.deliver(outputs, seen.sequence)

    def _take_collated(self, item: Collated, seen: Iteration, steps: list[tuple[Step, bytes]]) -> None:
        """The digests of a step stand in the journal in front of the report that they vouch for."""
        if item.reported.epoch != self.epoch:
            return
        self._writer.append_all(item.digests)
        self.reported_seq = item.reported.seq
        if self._snapshots is not None:
            self._snapshots.collated(item)
        seen.collated.append(item)
        self._feed(item.reported, seen, steps)

    def _feed(self, item: Input, seen: Iteration, steps: list[tuple[Step, bytes]]) -> None:
        """Append an input, feed it, append what it led to; raises CoreFailed."""
        if isinstance(item, EpochBegan):
            self.epoch, self.sent_seq, self.reported_seq = item.epoch, 0, 0
        if self._snapshots is not None and isinstance(item, EpochBegan | EpochEnded):
            self._snapshots.epoch_changed()
        self._writer.append(item)
        try:
            outputs = self.core.feed(item)
        except Exception as error:
            raise CoreFailed(item, error) from error
        self._writer.append_all(outputs.decisions)
        if outputs.step is not None:
            steps.append(self._append_step(outputs.step))
            if outputs.step.snapshot and self._snapshots is not None:
                self._snapshots.stepped(outputs.step, self._writer.last_sequence, self.core)
        self._wants_tick, self._due_ns = outputs.wants_tick, outputs.due_ns
        if isinstance(item, EpochEnded):
            self.epoch, self.sent_seq, self.reported_seq = 0, 0, 0
        seen.inputs.append(item)
        seen.outputs.append(outputs)
        seen.account = self.core.account()  # of what was fed well: a core that raises has counted half

    def _append_step(self, step: Step) -> tuple[Step, bytes]:
        assert step.seq == self.sent_seq + 1, f"step {step.seq} follows step {self.sent_seq}"
        assert step.epoch == self.epoch, f"step of epoch {step.epoch} in epoch {self.epoch}"
        data = records.encode(step)
        self._writer.append_encoded(Kind.STEPPED, data)
        self.sent_seq = step.seq
        if step.forward is not None:
            self.scheduled_tokens += int(i32(step.forward.counts).sum())
        return step, data

    async def _write(self, seen: Iteration) -> None:
        """The one write. When neither the segment nor a new one takes it the daemon ends; nothing of it was sent."""
        try:
            self._writer.flush()
            if self._writer.policy == "always":
                await trio.to_thread.run_sync(self._writer.sync)
        except JournalFailed as error:
            raise DaemonError(Exit.JOURNAL, f"the journal cannot be written, nothing more was sent: {error}") from error
        if self._snapshots is not None:
            self._snapshots.flushed()
        seen.sequence = self._writer.last_sequence
        self._journal.written(urgent=any(isinstance(reply.message, Accepted) for reply in seen.replies()))

    def _hint(self, stepped: bool) -> None:
        """Tell the compaction worker where the loop stands; a hint that finds its mailbox full is dropped."""
        hint: StepSent | BecameIdle
        if stepped:
            hint, self._idle_hinted = StepSent(self.sent_seq), False
        elif self.in_flight or self._wants_tick or self._idle_hinted:
            return
        else:
            hint, self._idle_hinted = BecameIdle(self.sent_seq), True
        try:
            self._hints.send_nowait(hint)
        except trio.WouldBlock:
            return

    # --- the end

    def close(self, why: str) -> None:
        """Write the life's last record; called once, after `run` returned."""
        gauges = self.core.gauges()
        totals = {name: count for name, count in gauges.items() if name.endswith("_total")}
        self._writer.append(Closed(self._clock.now_ns(), why, totals, self.core.state_digest()))
        self._writer.flush()
