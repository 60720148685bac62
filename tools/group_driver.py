"""A small daemon for a group of ranks: the steps of `rank_driver` to every rank of a layout, each in a thread.

Owns the threads' workers and the check that their reports agree. Must never be used to serve.
"""

from __future__ import annotations

from allocator.columns import pack_i32
from allocator.geometry import Geometry
from allocator.logical.chain import LogicalChain
from daemon.rank.runner import Prepared, Runner
from daemon.rank.step_worker import InFlight, StepWorker
from ipc.messages import Begin, RankSettings, Report, Step
from tools.rank_driver import Driver, RowState
from tools.thread_group import Open, ThreadGroup, open_torch, run_ranks, thread_groups, threaded


class GroupDriver(Driver):
    """`Driver` over `stages` x `ranks`; `report` is the one of the last stage's first rank.

    With several stages each decode step brings its token, as the daemon's do.
    """

    def __init__(self, config: RankSettings, stages: int = 1, ranks: int = 1, opened: Open = open_torch) -> None:
        config = threaded(config, stages, ranks)
        self.groups = thread_groups(stages, ranks)
        self.runners = [opened(config, group.layout, group) for group in self.groups]
        self.all_prepared: list[Prepared] = run_ranks(self.groups, lambda group: self._runner(group).prepare())
        at_stage = [self.all_prepared[stage * ranks].geometry for stage in range(stages)]
        self.geometry = Geometry(
            config.page_size,
            min(prepared.virtual_pages for prepared in self.all_prepared),
            min(prepared.virtual_slots for prepared in self.all_prepared),
            at_stage,
        )
        self.prepared = self.all_prepared[0]
        self.workers: list[StepWorker] = run_ranks(self.groups, lambda group: self._worker(group, config))
        self.worker = self  # type: ignore[assignment]  # launch and finish, for all
        self._open_books(config)

    def _runner(self, group: ThreadGroup) -> Runner:
        return self.runners[group.layout.number]

    def _worker(self, group: ThreadGroup, config: RankSettings) -> StepWorker:
        length = self.prepared.facts.max_model_len
        begin = Begin(1, self.geometry)
        return StepWorker(self._runner(group), begin, config, length, group.layout.stage, group.layout.rank)

    def _open_books(self, config: RankSettings) -> None:
        self.chain = LogicalChain(self.geometry)
        self.bands = self.geometry.stages[0].bands
        self.owner = len(self.bands) - 1
        self.state = next((index for index, band in enumerate(self.bands) if band.kind == "state"), -1)
        self.windows = [index for index, band in enumerate(self.bands) if band.kind == "window"]
        self.rows = {row: RowState() for row in range(config.max_running_requests)}
        self.seq = self.newest_forward = 0
        self.steps, self.reports, self._ops, self._fresh = [], [], [], []

    def make(self, work: list[tuple[int, list[int] | None, bool]], processed: int | None = None) -> Step:
        """As `Driver`; with several stages a row goes on from its last sampled token by telling it."""
        if len(self.geometry.stages) == 1:
            return super().make(work, processed)
        told: list[tuple[int, list[int] | None, bool]]
        told = [(row, self.rows[row].tokens[-1:] if given is None else given, sample) for row, given, sample in work]
        step = super().make(told, processed)
        for row, given, _ in work:
            if given is None:  # it is in the row's tokens already
                self.rows[row].tokens.pop()
        return step

    def launch(self, step: Step) -> list[InFlight]:
        """Launch a step on every rank."""
        return run_ranks(self.groups, lambda group: self.workers[group.layout.number].launch(step))

    def finish(self, flights: list[InFlight]) -> Report:
        """The report that speaks for all, after they were compared as the daemon compares them."""
        reports = [worker.finish(flight) for worker, flight in zip(self.workers, flights, strict=True)]
        last = len(self.geometry.stages) - 1
        speaker = next(report for report in reports if report.stage == last)
        leaders: dict[int, Report] = {}
        for report in reports:
            leader = leaders.setdefault(report.stage, report)
            assert report.logical == speaker.logical, f"rank {report.stage}.{report.rank}: logical"
            assert report.layout == leader.layout, f"rank {report.stage}.{report.rank}: layout"
            told = (speaker.rows, speaker.tokens, speaker.sampled) if report.stage == last else (pack_i32([]), b"", b"")
            assert (report.rows, report.tokens, report.sampled) == told, f"rank {report.stage}.{report.rank}: tokens"
        return speaker
