"""Epochs: one life of the device memory after the other, as often as ranks are lost and may be started again.

Owns the number of the epoch, what is done between two of them, and when it is enough. Must never start ranks while
others of an earlier epoch live, nor go on for ever. Invariants: between `EpochEnded` and the next `EpochBegan` no
step is sent and no report taken; the daemon is not healthy from the first sign of a loss until the next epoch began;
what was accepted waits, and is lost only when the restarts within the window are used up.

    boot -> steps ... -> a rank is lost -> [Divergence, digests], EpochEnded -> killed, reaped -> pause -> boot again
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import trio

from daemon.blame import Mark, RankLost
from daemon.clock import Clock
from daemon.core.inputs import EpochBegan
from daemon.divergence import diverged, in_words
from daemon.exits import DaemonError, Exit
from daemon.metrics import Metrics
from daemon.ranks import Epoch, Loss, RankSupervisor
from daemon.restarts import Restarts
from daemon.results import Collator, DigestMismatch, ResultProcessor
from ipc.rank_id import numbers
from journal.records import Digested, Divergence, Readied

OWN_FAULTS = (Mark.FAULT, Mark.EXITED, Mark.PEER_GONE)  # nobody else did that
OVER = ("stop", "fault", "failed")  # ends of the engine after which no epoch is needed


class LastLoss(DaemonError):
    """A loss that no other epoch follows; `records` are to stand in the journal before the end."""

    def __init__(self, code: Exit, text: str, records: list[Digested | Divergence]) -> None:
        super().__init__(code, text)
        self.records = records


class EpochSink(Protocol):
    """Who is told of epochs: the engine."""

    ending: str
    reported_seq: int

    def begin_epoch(self, began: EpochBegan, readied: list[Readied]) -> None:
        """The ranks are ready for steps."""

    def end_epoch(self, epoch: int, why: str, records: list[Digested | Divergence]) -> None:
        """The ranks are lost, and others will come."""

    def live(self) -> int:
        """Requests that would be lost if the daemon ended."""


class Epochs:
    """Runs epochs until one cannot be followed by another."""

    def __init__(
        self,
        ranks: RankSupervisor,
        results: ResultProcessor,
        engine: EpochSink,
        restarts: Restarts,
        clock: Clock,
        metrics: Metrics,
        log: Any,
        on_began: Callable[[Epoch], None],
    ) -> None:
        """`on_began` is called once per epoch, before its first step."""
        self.number = 0
        self.epoch: Epoch | None = None  # the newest that began
        self.restarts = restarts
        self.last_loss = ""
        self._ranks, self._results, self._engine = ranks, results, engine
        self._clock, self._metrics, self._log = clock, metrics, log
        self._on_began = on_began
        self._running = False
        self._lost_at = math.inf  # trio time of the first sign of a loss that is not made good yet
        self._same_arena = True  # ask the ranks for the arena of the last epoch

    @property
    def trouble(self) -> str:
        """Why no epoch runs, or why the present one is over; empty while one runs."""
        if losing := self._ranks.losing:
            return f"recovering: {losing}"
        if self._running:
            return ""
        missing = numbers(self._ranks.missing)
        waited = f"; ranks that have not joined: {missing}" if missing else ""
        if not self.last_loss:
            return f"booting: the ranks are not ready{waited}"
        budget = f"restart {self.restarts.total}, at most {self.restarts.most} within {self.restarts.window_s:g} s"
        return f"recovering: {self.last_loss} ({budget}{waited})"

    def status(self) -> dict[str, Any]:
        """For status: the number, whether it runs, restarts and the last loss."""
        return {
            "number": self.number,
            "running": self._running,
            "restarts": self.restarts.total,
            "restarts_within_window": self.restarts.within_window(trio.current_time()),
            "restarts_max": self.restarts.most,
            "last_loss": self.last_loss,
        }

    async def run(self) -> None:
        """Until cancelled, or the daemon was told to stop anyway; raises the cause when it cannot go on."""
        while True:
            self.number += 1
            loss = await self._ranks.run(self.number, self._arenas(), self._begin)
            progressed = self._running and self._engine.reported_seq > 0
            pause_s = self._lose(loss, progressed)
            await self._ranks.end(str(loss.error))
            if self._engine.ending not in OVER:
                await trio.sleep(pause_s)
            if self._engine.ending in OVER:  # also by an order that came in the pause: nobody is started only to end
                return

    def _arenas(self) -> tuple[int, ...]:
        if self.epoch is None or not self._same_arena:
            return ()
        return tuple(stage.arena_bytes for stage in self.epoch.geometry.stages)

    # --- an epoch begins

    def _begin(self, epoch: Epoch) -> None:
        now_ns = self._clock.now_ns()
        self._results.begin_epoch(Collator(epoch.number, self._ranks.ranks))
        readied = [Readied(now_ns, epoch.number, *rank, versions) for rank, versions in epoch.versions.items()]
        self._engine.begin_epoch(EpochBegan(now_ns, epoch.number, epoch.geometry, epoch.facts), readied)
        self.epoch, self._running, self._same_arena = epoch, True, True
        self._on_began(epoch)
        values: dict[str, Any] = {}
        if self._lost_at < math.inf:
            values["recovered_s"] = round(trio.current_time() - self._lost_at, 3)
            self._metrics.recovery_time.observe(trio.current_time() - self._lost_at)
            self._lost_at = math.inf
        self._metrics.epoch.set(epoch.number)
        self._log.info("EpochBegan", epoch=epoch.number, model=epoch.facts.name, **values)

    # --- an epoch ends

    def _lose(self, loss: Loss, progressed: bool) -> float:
        """Put the loss on record and end the epoch; seconds to wait before the next. Raises the cause at the last."""
        self._results.end_epoch()
        began, self._running = self._running, False
        self._same_arena = began  # what did not fit once more is measured afresh
        self._lost_at = min(self._lost_at, loss.noticed_at)
        self._metrics.rank_losses.labels(loss.mark.name.lower()).inc()
        records = self._records(loss)
        self._log.error(
            "EpochLost",
            epoch=self.number,
            error=str(loss.error),
            mark=loss.mark.name.lower(),
            others=loss.others,
            live_requests=self._engine.live(),
        )
        pause_s = 0.0
        if self._engine.ending not in OVER:
            in_vain = not progressed and self.number == 1 and loss.mark in OWN_FAULTS
            if self.epoch is None or in_vain:
                self._give_up_a_first_boot(loss.error, records)
            pause_s = self._pause_s(loss.error, progressed, records)
        if began and self._engine.ending not in ("fault", "failed"):
            self._engine.end_epoch(self.number, self.last_loss, records)
        return pause_s

    def _records(self, loss: Loss) -> list[Digested | Divergence]:
        self.last_loss = str(loss.error)
        if not isinstance(loss.error, DigestMismatch):
            return []
        record = diverged(loss.error, loss.explained, self.number, self._clock.now_ns())
        self.last_loss = in_words(record)
        self._log.error("Diverged", **msgspec.structs.asdict(record))
        return [record, *loss.error.digests]

    def _give_up_a_first_boot(self, cause: DaemonError, records: list[Digested | Divergence]) -> None:
        """Where nothing would be lost, what is wrong with the set-up is better said at once."""
        refused = cause.refused if isinstance(cause, RankLost) else None
        if self._engine.live() or (
            refused is None and not self._ranks.spawns
        ):  # who places ranks must know of a refusal
            return
        code = refused or (Exit.BOOT if cause.code == Exit.RANK else cause.code)
        raise LastLoss(code, self.last_loss, records) from cause

    def _pause_s(self, cause: DaemonError, progressed: bool, records: list[Digested | Divergence]) -> float:
        now_s = trio.current_time()
        pause_s = self.restarts.take(now_s, progressed)
        if pause_s is None:
            limits = f"--epoch-restarts-max {self.restarts.most} within {self.restarts.window_s:g} s"
            raise LastLoss(cause.code, f"{self.last_loss}; {limits} are used up", records) from cause
        self._metrics.epoch_restarts.inc()
        self._log.warning(
            "EpochRestart",
            epoch=self.number + 1,
            pause_s=pause_s,
            restarts=self.restarts.within_window(now_s),
            restarts_max=self.restarts.most,
            why=self.last_loss,
        )
        return pause_s
