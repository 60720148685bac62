"""Recording: a simulated run as a journal, as the daemon and ranks that agree would have written it.

Owns the order of records within one iteration (digests, input, decisions, step, one write) and the ranks' digests, made
by a replica of each stage. Must never decide anything, and never sync: it is a result, not a promise.
"""

from __future__ import annotations

import uuid
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from allocator.geometry import Geometry
from allocator.logical.mirror import LogicalMirror
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from daemon.core.scheduler import SchedulerCore
from ipc.digests import SAMPLED_START, sampled_digest
from ipc.messages import ModelFacts
from journal.opening import open_journal
from journal.records import DECISION_VERSION, SCHEMA_VERSION, Closed, Digested, Opened
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tools.replica import StageReplica

VERSIONS = {"recorded_by": "bandmaster simulate"}


class Recording:
    """One life of a journal in a directory, new or of earlier lives.

    `settings` help to understand the run and are kept in `Opened`. Raises what `open_journal` raises.
    """

    def __init__(
        self, directory: Path, config: CoreConfig, settings: dict[str, str] | None = None, segment_bytes: int = 0
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        how = JournalSettings(policy="os")
        if segment_bytes:
            how = JournalSettings(policy="os", segment_bytes=segment_bytes)
        self._storage = DiskStorage(directory)
        self._config = config
        self._writer, _ = open_journal(self._storage, how, uuid.uuid4().bytes)
        life = uuid.uuid4().hex
        self._writer.append(
            Opened(0, life, SCHEMA_VERSION, DECISION_VERSION, config, dict(VERSIONS), dict(settings or {}))
        )
        self._mirror: LogicalMirror | None = None
        self._stages: list[StageReplica] = []
        self._said: deque[tuple[int, int, bytes, list[tuple[bytes, bytes]]]] = deque()  # epoch, step, logical,
        # and by stage: layout, what was performed
        self._sampled = SAMPLED_START

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The files are closed, and the lock is free; without `close` the life looks cut off."""
        self._writer.flush()
        self._writer.close()
        self._storage.unlock()

    def before(self, item: inputs.Input) -> None:
        """An input, in front of what it leads to."""
        if isinstance(item, inputs.EpochBegan):
            self._begin(item.geometry, item.facts)
        elif isinstance(item, inputs.Reported):
            self._digest(item)
        self._writer.append(item)

    def after(self, out: Outputs) -> None:
        """What an input led to; then all of it is written."""
        self._writer.append_all(out.decisions)
        if out.step is not None:
            step = out.step
            assert self._mirror is not None, "only an epoch has steps"
            self._writer.append(step)
            logical = self._mirror.apply_step(step.seq, step.ops, step.released)
            said = [(stage.apply_step(step), stage.effects) for stage in self._stages]
            self._said.append((step.epoch, step.seq, logical, said))
        self._writer.flush()

    def close(self, now_ns: int, why: str, core: SchedulerCore) -> None:
        """The life ends in order."""
        totals = {name: count for name, count in core.gauges().items() if name.endswith("_total")}
        self._writer.append(Closed(now_ns, why, totals, core.state_digest()))
        self._writer.flush()

    def _begin(self, geometry: Geometry, facts: ModelFacts) -> None:
        self._mirror = LogicalMirror(geometry)
        self._stages = [StageReplica(geometry, at, self._config, facts) for at in range(len(geometry.stages))]
        self._said.clear()
        self._sampled = SAMPLED_START

    def _digest(self, item: inputs.Reported) -> None:
        """What the ranks of every stage said of a step with its report."""
        epoch, seq, logical, layouts = self._said.popleft()
        assert (epoch, seq) == (item.epoch, item.seq), "reports come in the order of steps"
        self._sampled = sampled_digest(self._sampled, seq, item.rows, item.generations, item.tokens)
        last = len(layouts) - 1
        self._writer.append_all(
            Digested(epoch, seq, stage, 0, logical, layout, self._sampled if stage == last else b"", effects)
            for stage, (layout, effects) in enumerate(layouts)
        )
