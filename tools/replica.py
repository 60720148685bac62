"""Replica: what a journal is replayed on, the real core and chains without an arena behind them.

Owns the wiring of core, mirror and stages into `journal.replay`. Must never write anything. Invariant: a stage is
driven in the order in which a rank drives it, so its digests are a rank's.
"""

from __future__ import annotations

from typing import Any

from allocator.columns import Int32s
from allocator.geometry import Geometry
from allocator.logical.mirror import LogicalMirror
from allocator.physical.chain import PhysicalChain
from daemon.core.limits import CoreConfig
from daemon.core.scheduler import SchedulerCore
from daemon.rank.rows import RowTable
from daemon.rank.stage_state import restore_stage, stage_state
from daemon.rank.traces import Trace, Traces
from daemon.snapshots import core_state, find, restore_core
from ipc.digests import SAMPLED_START, effects_column, sampled_digest
from ipc.messages import ModelFacts, Step, StepTrace
from journal.replay import Factories, Resumed
from journal.snapshots import Body

COUNT_NAMES = ("live", "hole", "pending", "beyond")


class StageReplica:
    """A stage's physical chain, driven in the order in which a rank drives it, without an arena behind it."""

    def __init__(self, geometry: Geometry, stage: int, config: CoreConfig, facts: ModelFacts) -> None:
        tokens = config.max_model_len or facts.max_model_len
        pages = -(-tokens // geometry.page_size) + 2  # a page for the surplus token, as the ranks have
        self._chain = PhysicalChain(geometry, stage)
        self._rows = RowTable(config.max_running_requests, pages)
        self._page_size = geometry.page_size
        self._bands = geometry.stages[stage].bands
        self._traces = Traces(self._bands)
        self.effects = b""  # of the newest step, as a rank that performed them all reports them

    def apply_step(self, step: Step) -> bytes:
        """Apply a whole step; the chained layout digest."""
        self._chain.begin_step(step.seq, step.processed_through, step.released)
        ends: list[int] = []
        self._chain.apply(step.ops, ends)
        applied = self._chain.applied
        self.effects = effects_column(applied, ends)
        layout = self._chain.end_step()
        self._traces.add(Trace(step.seq, step.logical, layout, step.ops, applied, ends))
        if step.forward is not None:
            self._rows.apply(step.forward)
            written = self._rows.written_ids(step.forward, self._bands, self._page_size)
            self._chain.launched(step.seq, written)  # its waits are for a device; there is none here
        return layout

    def state(self, mirror: LogicalMirror) -> bytes:
        """What a rank of this stage says in a snapshot."""
        return stage_state(self._chain, mirror, self._rows)

    def resume(self, data: bytes) -> LogicalMirror:
        """Go on from what a rank of this stage said in a snapshot; the mirror that belongs to it."""
        self._chain, mirror, self._rows = restore_stage(data, find, self._chain.checks, self._rows)
        return mirror

    def explain(self, seq: int) -> StepTrace | None:
        """What each op of one of the newest steps led to, in words."""
        return next((trace for trace in self._traces.explain() if trace.seq == seq), None)

    def table(self, row: int) -> Int32s:
        """The owner pages in a row's table, int32."""
        pages = self._rows.tables[row]
        return pages[pages > 0]

    def counts(self) -> list[dict[str, Any]]:
        """Per band: name, and units live, hole, pending and beyond."""
        numbers = [int(count) for count in self._chain.band_counts()]
        width = len(COUNT_NAMES)
        return [
            {"band": band.name, **dict(zip(COUNT_NAMES, numbers[at * width : (at + 1) * width], strict=True))}
            for at, band in enumerate(self._bands)
        ]


def factories() -> Factories:
    """The real core and chains."""
    return Factories(
        core=SchedulerCore,
        mirror=LogicalMirror,
        stage=StageReplica,
        sampled=sampled_digest,
        sampled_start=SAMPLED_START,
        core_state=core_state,
        resume=resume,
    )


def resume(body: Body) -> Resumed:
    """Core, mirror and stages as a snapshot has them."""
    core = restore_core(body.core)
    state = core.state
    assert state.memory is not None, "a snapshot is taken at a step"
    assert state.facts is not None, "an epoch has its model's facts"
    geometry = state.memory.geometry
    stages = [StageReplica(geometry, at, state.config, state.facts) for at in range(len(geometry.stages))]
    mirrors = [stage.resume(data) for stage, data in zip(stages, body.stages, strict=True)]
    return Resumed(core, state.config, mirrors[0], list(stages), geometry, state.facts)
