"""Ranks of a layout as threads of one process, in the place of one step worker.

Owns the runners and step workers of every stage and tensor rank, and their threads. Must never be used to serve, or
pass on a report that the daemon's collator would refuse: it is asked. Invariant: `launch` returns when every rank has
launched, so nobody's memory is touched by two steps at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from allocator.geometry import Geometry
from daemon.agreement import agree
from daemon.core.inputs import Reported
from daemon.core.limits import CoreConfig
from daemon.mailbox import Collated
from daemon.rank.runner import Prepared
from daemon.rank.step_worker import InFlight, StepWorker
from daemon.results import Collator
from ipc.messages import Begin, RankSettings, Ready, Step
from tools.inprocess import CountingRunner, InProcess
from tools.thread_group import Open, ThreadGroup, open_torch, run_ranks, thread_groups, threaded

EPOCH = 1


class ThreadedRanks:
    """`stages` x `ranks` ranks whose models are loaded once; `begin` starts an epoch of them."""

    def __init__(self, settings: RankSettings, stages: int, ranks: int, opened: Open = open_torch) -> None:
        self.settings = threaded(settings, stages, ranks)
        self._groups = thread_groups(stages, ranks)
        self.runners = [CountingRunner(opened(self.settings, group.layout, group)) for group in self._groups]
        self.prepared: list[Prepared] = run_ranks(self._groups, lambda group: self._runner(group).prepare())
        self.workers: list[StepWorker] = []
        self._collator: Collator

    @property
    def geometry(self) -> Geometry:
        """What all ranks can hold, as the daemon agrees on it."""
        ready = {}
        for group, made in zip(self._groups, self.prepared, strict=True):
            place = (group.layout.stage, group.layout.rank)
            ready[place] = Ready(*place, made.geometry, made.virtual_pages, made.virtual_slots, made.facts)
        return agree(ready, self.settings.page_size)[0]

    def begin(self, geometry: Geometry) -> None:
        """A new epoch: every arena is empty."""
        length = self.prepared[0].facts.max_model_len

        def make(group: ThreadGroup) -> StepWorker:
            place = (group.layout.stage, group.layout.rank)
            return StepWorker(self._runner(group), Begin(EPOCH, geometry), self.settings, length, *place)

        self.workers = run_ranks(self._groups, make)
        self._collator = Collator(EPOCH, [(group.layout.stage, group.layout.rank) for group in self._groups])

    def launch(self, step: Step) -> list[InFlight]:
        """Launch a step on every rank."""
        self._collator.expect(step)
        return run_ranks(self._groups, lambda group: self.workers[group.layout.number].launch(step))

    def finish(self, flights: list[InFlight], now_ns: int) -> Reported:
        """What the reports of a step say, after they were compared; raises DigestMismatch."""
        found: list[Collated] = []
        for worker, flight in zip(self.workers, flights, strict=True):
            found += self._collator.add(worker.finish(flight), now_ns)
        (collated,) = found
        return collated.reported

    def _runner(self, group: ThreadGroup) -> CountingRunner:
        return self.runners[group.layout.number]


class GroupInProcess(InProcess):
    """`InProcess` with a group of ranks in the place of its one worker; `arena_bytes` of each stage, none: as sized."""

    def __init__(
        self,
        config: CoreConfig,
        ranks: ThreadedRanks,
        *,
        arena_bytes: Sequence[int] = (),
        seed: int = 0,
        late: float = 0.5,
    ) -> None:
        self.settings, self.ranks = ranks.settings, ranks
        self.prepared, self.runner = ranks.prepared[0], ranks.runners[0]
        geometry = ranks.geometry
        if arena_bytes:
            sized = [
                msgspec.structs.replace(stage, arena_bytes=size)
                for stage, size in zip(geometry.stages, arena_bytes, strict=True)
            ]
            geometry = msgspec.structs.replace(geometry, stages=sized)
        ranks.begin(geometry)
        self.worker = ranks.workers[0]
        self._open(config, geometry, seed, late)

    def _workers(self) -> Sequence[StepWorker]:
        return self.ranks.workers

    def _apply(self, step: Step) -> Any:
        return _Applied(self.ranks.launch(step))

    def _finish(self, flight: Any) -> Reported:
        return self.ranks.finish(cast(_Applied, flight).flights, self.now_ns)


class _Applied:
    """A step that every rank has applied; `logical` is its digest on the first one."""

    def __init__(self, flights: list[InFlight]) -> None:
        self.flights, self.logical = flights, flights[0].logical
