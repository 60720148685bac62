"""A simulated rank: a real step worker over a modeled device whose streams lag behind as its seed says.

Owns the inbox of one rank, its step worker and what it has launched. Must never decide when it runs: the group does.
Invariant: steps are launched and reported in order; a forward runs behind all that its device orders it behind, and
reads the bytes that are there at that moment.
"""

from __future__ import annotations

from collections import deque
from typing import cast

import msgspec
import numpy as np

from allocator.geometry import Geometry
from daemon.rank.batch import Batch, check_tokens
from daemon.rank.device import Device
from daemon.rank.layout import Layout
from daemon.rank.modeled import ModeledRunner
from daemon.rank.modeled_device import Delays, ModeledDevice
from daemon.rank.modeled_hash import ToyStage
from daemon.rank.runner import Outcome
from daemon.rank.sampling_table import SamplingTable
from daemon.rank.step_worker import InFlight, StepWorker
from ipc.messages import Begin, RankSettings, Ready, Report, Step
from tools.groups.exchange import ALL, Forward, Hub

EAGER = Delays(1.0, 1.0, 1.0, 1.0)


class StreamedDevice(ModeledDevice):
    """A modeled device that runs the toy's forwards over its own bytes, when its streams get there."""

    stage: ToyStage  # the toy's words in this memory
    running: dict[int, Forward]  # forwards that may not be over

    def compute(self, seq: int, forward: Forward) -> None:
        """Launch forward `seq` behind all schedule work and forwards so far."""
        self.running[seq] = forward
        self._queue(self._forward, lambda memory: forward.run(self.stage), ((self._schedule, self._schedule.issued),))
        self._forward_at[seq] = self._forward.issued
        self._newest = seq

    def reach(self, seq: int, calls: int) -> None:
        """Run forward `seq` until it has published so many calls, and before it all that it is behind."""
        at, stream = self._forward_at.get(seq), self._forward
        if at is None or stream.done >= at:
            return
        if calls == ALL:
            self._run_through(stream, at)
            return
        self._run_through(stream, at - 1)
        if stream.done < at:
            for need, until in stream.queue[0].needs:
                self._run_through(need, until)
            self.running[seq].run(self.stage, calls)

    def eager(self) -> None:
        """No stream lags behind when the device may choose."""
        self._delays = EAGER
        self._schedule.speed, self._forward.speed = EAGER.schedule, EAGER.forward


class LaunchedLater:
    """A forward that runs when its tokens are asked for, or before."""

    def __init__(self, device: StreamedDevice, seq: int, forward: Forward) -> None:
        self._device, self._seq, self._forward = device, seq, forward

    def due_in_s(self) -> float:
        """Asking makes it run."""
        return 0.0

    def outcome(self) -> Outcome:
        """Its tokens, after whatever it needs has run."""
        self._device.reach(self._seq, ALL)
        del self._device.running[self._seq]
        assert self._forward.outcome is not None, "it ran to its end"
        return self._forward.outcome


class StreamedRunner(ModeledRunner):
    """The modeled runner over streams: `launch` queues, and the arithmetic runs when the streams get there."""

    streamed: StreamedDevice

    def __init__(self, settings: RankSettings, layout: Layout, hub: Hub, seed: int) -> None:
        super().__init__(settings, layout)
        self._hub, self._seed = hub, seed

    def begin(self, geometry: Geometry, stage: int) -> None:
        """Open a device whose delays are drawn from the seed; seed 0: nothing lags."""
        self.streamed = StreamedDevice(geometry.stages[stage], self._seed)
        self.streamed.stage, self.streamed.running = self.view(self.streamed.memory.data), {}
        if not self._seed:
            self.streamed.eager()
        self.device = cast(Device, self.streamed)

    def launch(self, batch: Batch) -> LaunchedLater:
        """Queue the forward, with the sampling columns as they are now."""
        check_tokens(batch, self._options.vocab_size)
        kept = batch._replace(sampling=_copied(batch.sampling))
        forward = Forward(self._hub, self.layout, batch.seq, lambda stage: self.compute(kept, stage))
        self.streamed.compute(batch.seq, forward)
        return LaunchedLater(self.streamed, batch.seq, forward)


def _copied(table: SamplingTable) -> SamplingTable:
    """The table as it is now: rows change while forwards wait in the stream."""
    twin = SamplingTable.__new__(type(table))
    for name, value in vars(table).items():
        setattr(twin, name, value.copy() if isinstance(value, np.ndarray | dict | list) else value)
    return twin


class SimulatedRank:
    """One rank of a group, from its offer to its last report."""

    def __init__(self, settings: RankSettings, layout: Layout, hub: Hub, seed: int) -> None:
        self.layout, self.settings = layout, settings
        self.place = (layout.stage, layout.rank)
        self.runner = StreamedRunner(settings, layout, hub, seed)
        self.prepared = self.runner.prepare()
        self.worker: StepWorker
        self.inbox: deque[Step] = deque()
        self.flights: deque[InFlight] = deque()
        self.launched = 0
        hub.peers[self.place] = self

    def ready(self) -> Ready:
        """What this rank tells the daemon that it can hold."""
        made = self.prepared
        return Ready(
            *self.place, made.geometry, made.virtual_pages, made.virtual_slots, made.facts, made.versions, made.table
        )

    def begin(self, begin: Begin) -> None:
        """The epoch begins."""
        self.worker = StepWorker(self.runner, begin, self.settings, self.prepared.facts.max_model_len, *self.place)

    def launch(self) -> None:
        """Apply the next step of the inbox and launch its forward."""
        step = self.inbox.popleft()
        self.flights.append(self.worker.launch(step))
        self.launched = step.seq

    def finish(self) -> Report:
        """Report the oldest step that was launched."""
        return self.worker.finish(self.flights.popleft())

    def drift(self) -> None:
        """The device gets on with its work, or not."""
        self.runner.streamed.drift()

    def reach(self, seq: int, calls: int) -> None:
        """Somebody waits for this rank: it launches what it was sent, and its device runs that far."""
        while self.launched < seq:
            self.launch()
        self.runner.streamed.reach(seq, calls)


def encoded(step: Step) -> bytes:
    """The bytes that the ranks would get."""
    return msgspec.msgpack.encode(step)
