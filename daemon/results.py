"""Results: many ranks' reports become one input per step, in step order, after their digests were compared.

Owns the reports that are not complete yet. Must never let a step pass whose digests differ: no token of it or of a
later step leaves the daemon. Invariants: one `Collated` per step, dense in seq, complete over all ranks; a report of
another epoch is dropped.

What is compared for step N: every rank's logical digest with the one that the step carried; layout digests between the
tensor ranks of a stage; the sampled digest of each last-stage rank with the tokens that the core will be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import trio

from allocator.columns import i32
from daemon.clock import Clock
from daemon.core.inputs import Reported
from daemon.exits import DaemonError, Exit
from daemon.mailbox import BandCounts, BecameIdle, Collated, StepSent
from ipc.digests import SAMPLED_START, sampled_digest
from ipc.messages import Report, Step
from ipc.rank_id import RankId, rank_name
from journal.records import Digested


class Difference(NamedTuple):
    """What differs (`logical`, `layout` or `sampled`), and both sides in words; `left` None stands for the daemon."""

    what: str
    left: RankId | None
    right: RankId
    words: tuple[str, str]


class DigestMismatch(DaemonError):
    """Two sides of the decide-once contract disagree about `step`; `digests` are all that it was reported with."""

    def __init__(self, step: Step, difference: Difference, digests: list[Digested]) -> None:
        left, right = difference.words
        super().__init__(Exit.RANK, f"{difference.what} digests differ at step {step.seq}: {left} against {right}")
        self.step = step
        self.difference = difference
        self.digests = digests


class ReportRefused(DaemonError):
    """A rank reported something that no correct rank can."""

    def __init__(self, report: Report, what: str) -> None:
        super().__init__(Exit.RANK, f"{_who(report)} reported step {report.seq}: {what}")


class Pending(NamedTuple):
    """A step that was sent, and the reports so far."""

    step: Step
    reports: dict[RankId, Report]


class Collator:
    """Collects the reports of one epoch; plain calls, no tasks."""

    def __init__(self, epoch: int, ranks: Sequence[RankId]) -> None:
        assert ranks, "an epoch has at least one rank"
        self.epoch = epoch
        self._ranks = sorted(ranks)
        last_stage = self._ranks[-1][0]
        self._last_stage = [rank for rank in self._ranks if rank[0] == last_stage]
        self._pending: dict[int, Pending] = {}
        self._next_seq = 1
        self._sampled = SAMPLED_START

    def expect(self, step: Step) -> None:
        """A step goes to the ranks."""
        assert step.epoch == self.epoch, f"step of epoch {step.epoch} in epoch {self.epoch}"
        self._pending[step.seq] = Pending(step, {})

    def add(self, report: Report, now_ns: int) -> list[Collated]:
        """Take one report; returns the steps that are complete with it, in order. Raises DigestMismatch."""
        if report.epoch != self.epoch:
            return []
        pending = self._pending.get(report.seq)
        rank = (report.stage, report.rank)
        if pending is None:
            raise ReportRefused(report, "the step was never sent, or its reports were complete")
        if rank not in self._ranks:
            raise ReportRefused(report, "no such rank takes part")
        if rank in pending.reports:
            raise ReportRefused(report, "a second time")
        pending.reports[rank] = report
        done = []
        while self._complete(self._next_seq):
            done.append(self._collate(self._next_seq, now_ns))
        return done

    def _complete(self, seq: int) -> bool:
        pending = self._pending.get(seq)
        return pending is not None and len(pending.reports) == len(self._ranks)

    def _collate(self, seq: int, now_ns: int) -> Collated:
        pending = self._pending.pop(seq)
        self._next_seq += 1
        reports = [pending.reports[rank] for rank in self._ranks]
        digests = [
            Digested(
                self.epoch,
                seq,
                report.stage,
                report.rank,
                report.logical,
                report.layout,
                report.sampled,
                report.effects,
            )
            for report in reports
        ]
        speaker = pending.reports[self._last_stage[0]]
        self._sampled = sampled_digest(self._sampled, seq, speaker.rows, speaker.generations, speaker.tokens)
        difference = next(self._differences(pending, speaker), None)
        if difference is not None:
            raise DigestMismatch(pending.step, difference, digests)
        reported = Reported(
            now_ns, self.epoch, seq, speaker.rows, speaker.generations, speaker.tokens, speaker.logprobs
        )
        snapshots = {report.stage: report.snapshot for report in reports if report.snapshot}
        return Collated(digests, reported, _bands(reports), max(report.forward_us for report in reports), snapshots)

    def _differences(self, pending: Pending, speaker: Report) -> Iterator[Difference]:
        """What differs; the chained sampled digest is over what the core is told."""
        leaders: dict[int, Report] = {}
        logical, sampled = pending.step.logical, self._sampled
        for rank in self._ranks:
            report = pending.reports[rank]
            who = _who(report)
            if report.logical != logical:
                words = (f"the daemon {logical.hex()}", f"{who} {report.logical.hex()}")
                yield Difference("logical", None, rank, words)
            leader = leaders.setdefault(rank[0], report)
            if report.layout != leader.layout:
                words = (f"{_who(leader)} {leader.layout.hex()}", f"{who} {report.layout.hex()}")
                yield Difference("layout", (leader.stage, leader.rank), rank, words)
            if rank in self._last_stage and report.sampled != sampled:
                words = (f"the tokens told by {_who(speaker)} {sampled.hex()}", f"{who} {report.sampled.hex()}")
                yield Difference("sampled", (speaker.stage, speaker.rank), rank, words)


def _who(report: Report) -> str:
    return rank_name((report.stage, report.rank))


def _bands(reports: list[Report]) -> list[list[tuple[int, int, int, int]]]:
    """Band counts of the first tensor rank of each stage, in the order of stages; empty where a stage told none."""
    columns = {report.stage: i32(report.bands) for report in reversed(reports) if report.bands}
    if len(columns) < len({report.stage for report in reports}):
        return []
    rows = [columns[stage].reshape(-1, 4).tolist() for stage in sorted(columns)]
    return [[(live, hole, pending, beyond) for live, hole, pending, beyond in stage] for stage in rows]


class ResultProcessor:
    """The task around a collator: reports in, collated steps to the engine, band counts to the compaction worker."""

    def __init__(
        self,
        clock: Clock,
        reports: trio.MemoryReceiveChannel[Report],
        deliver: Callable[[Collated], None],
        hints: trio.MemorySendChannel[StepSent | BecameIdle | BandCounts],
        accuse: Callable[[DaemonError], None],
    ) -> None:
        """`deliver` never waits; no more comes than is in flight. `accuse` is told of reports that end the epoch."""
        self._collator: Collator | None = None  # of the epoch that runs
        self._clock = clock
        self._reports = reports
        self._deliver = deliver
        self._hints = hints
        self._accuse = accuse

    def begin_epoch(self, collator: Collator) -> None:
        """The ranks of an epoch are ready; what comes of older ones is dropped."""
        self._collator = collator

    def end_epoch(self) -> None:
        """The ranks are lost: nothing that they reported and that was not passed on counts any more."""
        self._collator = None

    def expect(self, step: Step) -> None:
        """A step is about to be sent to the ranks; one of an epoch that is over is not waited for."""
        if self._collator is not None and self._collator.epoch == step.epoch:
            self._collator.expect(step)

    async def run(self) -> None:
        """Collate until cancelled. After a mismatch or an impossible report nothing of that epoch is passed on."""
        async for report in self._reports:
            if self._collator is None:
                continue
            try:
                done = self._collator.add(report, self._clock.now_ns())
            except (DigestMismatch, ReportRefused) as error:
                self._collator = None
                self._accuse(error)
                continue
            for collated in done:
                self._hint(collated)  # first: at idle the worker must judge by these counts
                self._deliver(collated)

    def _hint(self, collated: Collated) -> None:
        try:
            self._hints.send_nowait(BandCounts(collated.reported.seq, list(chain.from_iterable(collated.bands))))
        except trio.WouldBlock:
            return
