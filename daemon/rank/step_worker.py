"""One step on one rank: ops to effects to forward to report, in the one order that `workers` allows.

Owns this rank's physical chain, logical mirror, id tables and rows for one epoch. Must never talk to a socket or read a
clock to decide. Invariants: steps come with dense seq; effects are executed before the forward of the same step is
launched; a report carries this rank's own digests, whatever the daemon claimed.

What this version's columns do not say: a report names no host copies and transfers that this rank has finished, so the
daemon orders none.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from allocator.checks import WARN, Checks
from allocator.columns import i32, pack_i32, pack_i64
from allocator.logical.mirror import LogicalMirror
from allocator.physical.chain import PhysicalChain
from daemon.rank.batch import Batch, build_batch
from daemon.rank.errors import StepRefused
from daemon.rank.executor import Executor
from daemon.rank.rows import RowTable
from daemon.rank.runner import Launched, Outcome, Runner
from daemon.rank.stage_state import stage_state
from daemon.rank.traces import Trace, Traces
from ipc.digests import SAMPLED_START, effects_column, sampled_digest
from ipc.messages import Begin, RankSettings, Report, Step
from ipc.packing import PACKED_BYTES_MAX, pack


class InFlight(NamedTuple):
    """A step that was applied, with its forward launched if it has one."""

    step: Step
    logical: bytes
    layout: bytes
    bands: bytes
    batch: Batch | None
    launched: Launched | None
    launched_ns: int
    snapshot: bytes  # of the stage behind this step, packed, where it was asked for
    effects: bytes = b""  # what was performed for each op


class StepWorker:
    """Applies steps in seq order. `launch` then `finish` for each; the next `launch` may come before that `finish`."""

    def __init__(
        self, runner: Runner, begin: Begin, settings: RankSettings, max_model_len: int, stage: int, rank: int
    ) -> None:
        geometry = begin.geometry
        runner.begin(geometry, stage)
        self.runner = runner
        self.epoch, self.stage, self.rank = begin.epoch, stage, rank
        checks = Checks(settings.invariants)
        self.chain = PhysicalChain(geometry, stage, checks)
        self.mirror = LogicalMirror(geometry, checks)
        bands = geometry.stages[stage].bands
        resting = [self.chain.resting_unit(band) for band in range(len(bands))]
        self.executor = Executor(geometry, stage, runner.device, resting, notes=True)
        pages = (max_model_len + geometry.page_size - 1) // geometry.page_size + 1  # one more for a surplus token
        self.rows = RowTable(settings.max_running_requests, pages)
        self._page_size = geometry.page_size
        self._bands = bands
        self._sampled = SAMPLED_START  # chained; only the last stage samples
        self._samples = stage == len(geometry.stages) - 1
        self.in_flight_max = 2 if len(geometry.stages) == 1 else len(geometry.stages) + 1
        self.traces = Traces(bands)
        self._seq = 0
        self._newest_forward = 0
        self.diverged_at = 0  # first seq whose logical digest was not the daemon's; 0: none

    def expect(self, step: Step) -> None:
        """A step will be launched behind those expected before: its forward's input may arrive from now on."""
        if step.forward is not None:
            self.runner.expect(int(i32(step.forward.counts).sum()))

    def launch(self, step: Step) -> InFlight:
        """Apply a step and launch its forward; raises when the step contradicts what this rank holds."""
        if step.epoch != self.epoch or step.seq != self._seq + 1:
            raise StepRefused(
                f"step {step.seq} of epoch {step.epoch} came after step {self._seq} of epoch {self.epoch}"
            )
        self._seq = step.seq
        self.chain.begin_step(step.seq, step.processed_through, step.released)
        device = self.runner.device
        device.release(step.released)
        device.retire_through(step.processed_through)
        logical = self.mirror.apply_step(step.seq, step.ops, step.released)
        if logical != step.logical and not self.diverged_at:
            self.diverged_at = step.seq
        ends: list[int] = []
        effects = self.chain.apply(step.ops, ends)
        self.executor.execute(effects)
        performed = effects_column(self.executor.take_performed(), ends)
        applied = self.chain.applied
        layout = self.chain.end_step()
        self.traces.add(Trace(step.seq, logical, layout, step.ops, applied, ends))
        bands = pack_i32(self.chain.band_counts())
        start_ns = time.monotonic_ns()
        batch, launched = None, None
        if step.forward is not None:
            tables = self.executor.tables
            batch = build_batch(step.seq, step.forward, self.rows, tables, self._bands, self._page_size)
            written = self.rows.written_ids(step.forward, self._bands, self._page_size)
            self.executor.execute(self.chain.launched(step.seq, written))
            launched = self.runner.launch(batch)
            device.record_forward(step.seq)
            self._newest_forward = step.seq
        elif step.processed_through == self._newest_forward:
            self._check_idle()
        return InFlight(step, logical, layout, bands, batch, launched, start_ns, self._snapshot(step), performed)

    def _snapshot(self, step: Step) -> bytes:
        """The stage packed, where the step asks this rank for it; nothing when a report could not carry it."""
        if not step.snapshot or self.rank != 0:
            return b""
        packed = pack(stage_state(self.chain, self.mirror, self.rows))
        return packed if len(packed) <= PACKED_BYTES_MAX else b""

    def _check_idle(self) -> None:
        """With no forward in flight and nothing live or in use by the ops: the layout is recounted, and holds nothing.

        By the mirror's count, not the layout's own, so that a unit lost here is found. Raises InvariantBroken; not at
        invariant level 0.
        """
        if self.chain.checks.level >= WARN and not any(self.mirror.live_units()) and not self.chain.open_uses:
            self.chain.check_idle()

    def finish(self, flight: InFlight) -> Report:
        """The report of a launched step, waiting for its tokens."""
        rows, generations = b"", b""
        tokens, logprobs = Outcome(np.zeros(0, dtype=np.int64), [])
        if flight.batch is not None and flight.launched is not None:
            tokens, logprobs = flight.launched.outcome()
        if flight.batch is not None and self._samples:
            rows = pack_i32(flight.batch.rows[flight.batch.sampled])
            generations = pack_i32(flight.batch.generations[flight.batch.sampled])
        packed = pack_i64(tokens)
        if self._samples:
            self._sampled = sampled_digest(self._sampled, flight.step.seq, rows, generations, packed)
        return Report(
            epoch=self.epoch,
            seq=flight.step.seq,
            stage=self.stage,
            rank=self.rank,
            rows=rows,
            generations=generations,
            tokens=packed,
            logical=flight.logical,
            layout=flight.layout,
            sampled=self._sampled if self._samples else b"",
            logprobs=logprobs,
            forward_us=(time.monotonic_ns() - flight.launched_ns) // 1000 if flight.launched is not None else 0,
            bands=flight.bands,
            snapshot=flight.snapshot,
            effects=flight.effects,
        )
