"""Ranks: modeled ranks in the process of the daemon, with real chains, rows and digests, that the world may take away.

Owns the epoch's step worker and the simulated time of its forwards. Must never report a step twice or out of order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import trio

from allocator.geometry import Geometry
from daemon.blame import Mark, RankLost
from daemon.exits import DaemonError
from daemon.rank.runner import Prepared, Runner, open_runner
from daemon.rank.step_worker import InFlight, StepWorker
from daemon.rank_settings import rank_ids, rank_settings
from daemon.ranks import Epoch, Loss
from daemon.settings_table import Settings
from ipc.messages import Begin, Report, Step
from journal import records
from journal.records import Kind

BOOT_S = 0.2
STEP_S = 0.002


class Machine:
    """What outlives the daemon's lives: the model, loaded once, and what the world does to its ranks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = rank_settings(settings)
        self.runner: Runner = open_runner(self.settings, 0, 0)
        self.prepared: Prepared = self.runner.prepare()
        self.dies_after_s = math.inf  # how long an epoch lasts from now on
        self._die = trio.Event()

    def kill(self) -> None:
        """The ranks of the present epoch die now."""
        self._die.set()

    def death(self) -> trio.Event:
        """Set when they die."""
        self._die = trio.Event()
        return self._die


class WorldRanks:
    """In the place of `daemon.ranks.RankSupervisor`."""

    def __init__(
        self,
        machine: Machine,
        settings: Settings,
        run_dir: Any,
        token: str,
        log: Any,
        reports: trio.MemorySendChannel[Report],
    ) -> None:
        self.ranks = rank_ids(settings)
        self.spawns = True
        self.losing = ""
        self.stopping = False
        self.missing: list[Any] = []
        self.stats: dict[str, int] = {}
        self._machine, self._reports = machine, reports
        self._worker: StepWorker | None = None
        self._flights, self._launched = trio.open_memory_channel[InFlight](math.inf)
        self._accused: DaemonError | None = None
        self._over = trio.Event()

    async def run(self, epoch: int, arenas: tuple[int, ...], began: Callable[[Epoch], None]) -> Loss:
        """One epoch until the world, or the daemon's judgement, ends it."""
        machine, self._accused = self._machine, None
        self._over = machine.death()
        await trio.sleep(BOOT_S)
        prepared = machine.prepared
        pages, slots = prepared.virtual_pages, prepared.virtual_slots
        geometry = Geometry(machine.settings.page_size, pages, slots, [prepared.geometry])
        length = prepared.facts.max_model_len
        worker = self._worker = StepWorker(machine.runner, Begin(epoch, geometry), machine.settings, length, 0, 0)
        self._flights, self._launched = trio.open_memory_channel[InFlight](math.inf)
        began(Epoch(epoch, geometry, prepared.facts, {(0, 0): {"runner": "in process"}}))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report, worker)
            with trio.move_on_after(machine.dies_after_s):
                await self._over.wait()
            nursery.cancel_scope.cancel()
        self._worker = None
        error = self._accused or RankLost((0, 0), "was killed by the world")
        return Loss(error, Mark.DIVERGED if self._accused else Mark.KILLED, trio.current_time())

    async def _report(self, worker: StepWorker) -> None:
        async for flight in self._launched:
            await trio.sleep(STEP_S)
            await self._reports.send(worker.finish(flight))

    def send_step(self, step: Step, data: bytes) -> None:
        """Apply what a rank would read from the wire."""
        worker = self._worker
        if worker is None or step.epoch != worker.epoch:
            return
        read: Any = records.decode(Kind.STEPPED, data)
        worker.expect(read)
        self._flights.send_nowait(worker.launch(read))

    def accuse(self, error: DaemonError) -> None:
        """Reports contradict the daemon: it is over."""
        self._accused = error
        self._over.set()

    async def end(self, why: str) -> None:
        """Nothing outlives an epoch."""

    async def stop(self, *_: Any, **__: Any) -> None:
        """Nor a life."""
        self.stopping, self._worker = True, None

    async def close(self) -> None:
        """There is nothing to close."""
