"""Results: many ranks' reports become one input per step, in step order, after their digests were compared.

Owns the reports that are not complete yet. Must never let a step pass whose digests differ: no token of it or of a
later step leaves the daemon. Invariants: one `Collated` per step, dense in seq, complete over all ranks; a report of
another epoch is dropped.

What is compared for step N: every rank's logical digest with the one that the step carried; layout digests between the
tensor ranks of a stage; the sampled digest of each last-stage rank with the tokens that the core will be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import trio

from allocator.columns import i32
from daemon.clock import Clock
from daemon.core.inputs import Input, Reported
from daemon.exits import DaemonError, Exit
from daemon.mailbox import BandCounts, BecameIdle, Collated, StepSent
from ipc.digests import SAMPLED_START, sampled_digest
from ipc.messages import Report, Step
from journal.records import Digested

RankId = tuple[int, int]  # stage, tensor rank


class DigestMismatch(DaemonError):
    """Two sides of the decide-once contract disagree about step `seq`; `digests` are all that it was reported with."""

    def __init__(self, seq: int, what: str, left: str, right: str, digests: list[Digested]) -> None:
        super().__init__(Exit.RANK, f"{what} digests differ at step {seq}: {left} against {right}")
        self.seq = seq
        self.digests = digests


class ReportRefused(DaemonError):
    """A rank reported something that no correct rank can."""

    def __init__(self, report: Report, what: str) -> None:
        super().__init__(Exit.RANK, f"{_who(report)} reported step {report.seq}: {what}")


class Pending(NamedTuple):
    """A step that was sent: its logical digest, and the reports so far."""

    logical: bytes
    reports: dict[RankId, Report]


class Collator:
    """Collects the reports of one epoch; plain calls, no tasks."""

    def __init__(self, epoch: int, ranks: Sequence[RankId]) -> None:
        assert ranks, "an epoch has at least one rank"
        self._epoch = epoch
        self._ranks = sorted(ranks)
        last_stage = self._ranks[-1][0]
        self._last_stage = [rank for rank in self._ranks if rank[0] == last_stage]
        self._pending: dict[int, Pending] = {}
        self._next_seq = 1
        self._sampled = SAMPLED_START

    def expect(self, step: Step) -> None:
        """A step goes to the ranks."""
        assert step.epoch == self._epoch, f"step of epoch {step.epoch} in epoch {self._epoch}"
        self._pending[step.seq] = Pending(step.logical, {})

    def add(self, report: Report, now_ns: int) -> list[Collated]:
        """Take one report; returns the steps that are complete with it, in order. Raises DigestMismatch."""
        if report.epoch != self._epoch:
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
            Digested(self._epoch, seq, report.stage, report.rank, report.logical, report.layout, report.sampled)
            for report in reports
        ]
        speaker = pending.reports[self._last_stage[0]]
        self._sampled = sampled_digest(self._sampled, seq, speaker.rows, speaker.generations, speaker.tokens)
        difference = next(self._differences(pending, speaker), None)
        if difference is not None:
            raise DigestMismatch(seq, *difference, digests)
        reported = Reported(
            now_ns, self._epoch, seq, speaker.rows, speaker.generations, speaker.tokens, speaker.logprobs
        )
        return Collated(digests, reported, _bands(reports), max(report.forward_us for report in reports))

    def _differences(self, pending: Pending, speaker: Report) -> Iterator[tuple[str, str, str]]:
        """What differs, and both sides by name and digest; the chained sampled digest is over what the core is told."""
        leaders: dict[int, Report] = {}
        for rank in self._ranks:
            report = pending.reports[rank]
            if report.logical != pending.logical:
                yield "logical", f"the daemon {pending.logical.hex()}", f"{_who(report)} {report.logical.hex()}"
            leader = leaders.setdefault(rank[0], report)
            if report.layout != leader.layout:
                yield "layout", f"{_who(leader)} {leader.layout.hex()}", f"{_who(report)} {report.layout.hex()}"
            if rank in self._last_stage and report.sampled != self._sampled:
                told = f"the tokens told by {_who(speaker)} {self._sampled.hex()}"
                yield "sampled", told, f"{_who(report)} {report.sampled.hex()}"


def _who(report: Report) -> str:
    return f"rank {report.stage}.{report.rank}"


def _bands(reports: list[Report]) -> list[tuple[int, int, int, int]]:
    """Band counts summed over the first tensor rank of each stage."""
    columns = {report.stage: i32(report.bands) for report in reversed(reports) if report.bands}
    if not columns:
        return []
    total = np.sum(list(columns.values()), axis=0).reshape(-1, 4)
    return [(int(live), int(hole), int(pending), int(beyond)) for live, hole, pending, beyond in total]


class ResultProcessor:
    """The task around a collator: reports in, collated steps to the engine, band counts to the compaction worker."""

    def __init__(
        self,
        clock: Clock,
        reports: trio.MemoryReceiveChannel[Report],
        mailbox: trio.MemorySendChannel[Input | Collated],
        hints: trio.MemorySendChannel[StepSent | BecameIdle | BandCounts],
    ) -> None:
        self.collator: Collator | None = None  # of the epoch that runs
        self._clock = clock
        self._reports = reports
        self._mailbox = mailbox
        self._hints = hints

    def expect(self, step: Step) -> None:
        """A step is about to be sent to the ranks."""
        assert self.collator is not None, "a step before the epoch began"
        self.collator.expect(step)

    async def run(self) -> None:
        """Collate until cancelled; raises DigestMismatch or ReportRefused, which end the epoch."""
        async for report in self._reports:
            assert self.collator is not None, "a report came before the epoch began"
            for collated in self.collator.add(report, self._clock.now_ns()):
                self._hint(collated)  # first: at idle the worker must judge by these counts
                await self._mailbox.send(collated)

    def _hint(self, collated: Collated) -> None:
        try:
            self._hints.send_nowait(BandCounts(collated.reported.seq, collated.bands))
        except trio.WouldBlock:
            return
