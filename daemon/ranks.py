"""Ranks: the supervisor that starts rank processes, boots an epoch with them, and notices when one is gone.

Owns the rank processes and the daemon's end of their streams. Must never decide anything from what one rank says alone.
Invariants: a rank that exits, freezes, breaks its stream or reports a fault ends the epoch, with its name, within a
stated time; no rank outlives `close`.

    spawn -> Join -> Hello -> (the model loads) -> Ready from all -> Begin -> steps and reports -> Stop
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from allocator.geometry import Geometry
from daemon.agreement import RankId, agree
from daemon.exits import DaemonError, Exit
from daemon.gateway_hostile import Complaints
from daemon.last_words import last_words
from daemon.processes import Child, exit_text, module_command
from daemon.run_dir import RunDir
from daemon.settings_table import Settings
from ipc.errors import IpcError, PeerGone, RankGone, RankStalled
from ipc.messages import (
    Begin,
    Fault,
    FromRank,
    Heartbeat,
    Hello,
    Join,
    ModelFacts,
    RankSettings,
    Ready,
    Report,
    Step,
    Stop,
)
from ipc.streams import RankServer

CHECK_EVERY_S = 1.0
LATE_LOOP_S = 2.0  # the check itself came so late: this process was stopped, the ranks get a fresh start
STOP_WITHIN_S = 5.0
LAST_WORDS_S = 0.3  # a Fault that a rank sent last says more than its exit code or a closed connection
RECV_BATCH_MAX = 64
TOKEN_VARIABLE = "BANDMASTER_RANK_TOKEN"


class RankLost(DaemonError):
    """A rank is gone, frozen or wrong; the text names it and says how that was noticed."""

    def __init__(self, rank: RankId, what: str, code: Exit = Exit.RANK) -> None:
        super().__init__(code, f"rank {rank[0]}.{rank[1]} {what}")
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Epoch:
    """What the ranks agreed on."""

    number: int
    geometry: Geometry
    facts: ModelFacts
    versions: dict[RankId, dict[str, str]]


def rank_settings(settings: Settings) -> RankSettings:
    """What `Hello` tells a rank."""
    return RankSettings(
        model_path=settings.model,
        model_name=settings.served_model_name,
        dtype=settings.dtype,
        page_size=settings.page_size,
        max_running_requests=settings.max_running_requests,
        max_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        arena_bytes=settings.arena_bytes,
        mem_fraction_ppm=round(settings.mem_fraction * 1_000_000),
        runner=settings.rank_runner,
        threads=settings.threads,
        invariants=settings.invariants,
        options=dict(settings.rank_option),
        checkpoint_interval=settings.checkpoint_interval if keeps_checkpoints(settings) else 0,
    )


def keeps_checkpoints(settings: Settings) -> bool:
    """Whether requests of a model with recurrent state own a checkpoint slot beside their working slot."""
    return settings.enable_prefix_caching and settings.state_cache == "extra_buffer"


class RankSupervisor:
    """Starts the ranks of one epoch and watches them; `run` raises RankLost when one is lost."""

    def __init__(
        self,
        settings: Settings,
        run_dir: RunDir,
        token: str,
        log: Any,
        reports: trio.MemorySendChannel[Report],
        environ: Mapping[str, str] | None = None,
        ranks: tuple[RankId, ...] = ((0, 0),),
    ) -> None:
        self.ranks = ranks
        self._settings = settings
        self._run_dir = run_dir
        self._token = token
        self._log = log
        self._reports = reports
        self._environ = os.environ if environ is None else environ
        self._complaints = Complaints(log, trio.current_time)
        self._server = RankServer(run_dir.ranks_endpoint, token=token, ranks=ranks, complain=self._complain)
        self._children: dict[RankId, Child] = {}
        self._log_starts: dict[RankId, int] = {}  # bytes that earlier lives left in a rank's log
        self._ready: dict[RankId, Ready] = {}
        self._all_ready = trio.Event()
        self._lost: RankLost | None = None
        self._loss = trio.Event()
        self._stopping = False
        self._heard: dict[RankId, float] = {}
        self._sent_at: dict[int, float] = {}  # step -> when, until every rank reported it
        self._reported: dict[RankId, int] = dict.fromkeys(ranks, 0)
        self._epoch = 0

    @property
    def stats(self) -> dict[str, int]:
        """Counters of the streams."""
        return self._server.stats

    # --- the epoch

    async def run(self, epoch: int, task_status: trio.TaskStatus[Epoch] = trio.TASK_STATUS_IGNORED) -> None:
        """Boot the ranks, report the epoch as started, then watch; raises RankLost or RanksDisagree."""
        self._epoch = epoch
        self._server.begin_epoch(epoch)
        self._spawn()
        async with trio.open_nursery() as nursery:
            for rank, child in self._children.items():
                nursery.start_soon(self._watch_exit, rank, child)
            nursery.start_soon(self._receive)
            nursery.start_soon(self._raise_loss)
            began = await self._boot(epoch)
            nursery.start_soon(self._watch_silence)
            task_status.started(began)

    def _spawn(self) -> None:
        environ = {**self._environ, TOKEN_VARIABLE: self._token}
        for stage, rank in self.ranks:
            command = module_command(
                "daemon.rank", "--endpoint", self._server.endpoint, "--stage", str(stage), "--rank", str(rank)
            )
            with self._log_path((stage, rank)).open("ab") as output:
                self._log_starts[stage, rank] = output.tell()
                self._children[stage, rank] = Child(f"rank {stage}.{rank}", command, environ, output)
            self._log.info("RankStarted", stage=stage, rank=rank, pid=self._children[stage, rank].pid)
        self._run_dir.note_ranks([child.pid for child in self._children.values()])

    async def _boot(self, epoch: int) -> Epoch:
        with trio.move_on_after(self._settings.boot_timeout_s) as scope:
            await self._all_ready.wait()
        if scope.cancelled_caught:
            missing = sorted(set(self.ranks) - self._ready.keys())
            what = f"was not ready within --boot-timeout {self._settings.boot_timeout_s:g} s"
            raise RankLost(missing[0], f"{what}; {self._last_words(missing[0])}", Exit.BOOT)
        geometry, facts = agree(self._ready, self._settings.page_size)
        versions = {rank: self._ready[rank].versions for rank in self.ranks}
        self._server.broadcast(Begin(epoch, geometry))
        self._heard = dict.fromkeys(self.ranks, trio.current_time())
        return Epoch(epoch, geometry, facts, versions)

    def send_step(self, step: Step, data: bytes) -> None:
        """Send one encoded step to every rank; a rank that is gone is noticed here and ends `run`, not the caller."""
        if self._lost is not None:
            return
        self._sent_at[step.seq] = trio.current_time()
        try:
            self._server.send_step(step.seq, data)
        except (RankGone, RankStalled) as error:
            self._lose(self.ranks[0], f"or another cannot be reached: {error}; {self._last_words(self.ranks[0])}")

    # --- watching

    async def _receive(self) -> None:
        while True:
            try:
                messages = await self._server.recv_batch(RECV_BATCH_MAX)
            except IpcError as error:
                what = f"or another broke its stream: {error}; {self._last_words(self.ranks[0])}"
                raise RankLost(self.ranks[0], what) from error
            for message in messages:
                await self._take(message)

    async def _take(self, message: FromRank) -> None:
        rank = (message.stage, message.rank)
        self._heard[rank] = trio.current_time()
        if isinstance(message, Report):
            self._note_report(rank, message.seq)
            await self._reports.send(message)
        elif isinstance(message, Join):
            self._log.info("RankJoined", stage=rank[0], rank=rank[1], pid=message.pid)
            await self._server.send(*rank, Hello(self._epoch, rank_settings(self._settings)))
        elif isinstance(message, Ready):
            self._note_ready(rank, message)
        elif isinstance(message, Fault):
            self._log.error(
                "RankFault", stage=rank[0], rank=rank[1], step=message.seq, what=message.what, trace=message.trace
            )
            code = Exit.RANK if self._all_ready.is_set() else Exit.BOOT
            raise RankLost(rank, f"failed at step {message.seq}: {message.what}", code)
        else:
            assert isinstance(message, Heartbeat), f"unexpected {type(message).__name__}"

    def _complain(self, counter: str, text: str) -> None:
        self._complaints.note("StrangeRankMessage", counter, peer="", text=text)

    def _note_ready(self, rank: RankId, message: Ready) -> None:
        self._log.info(
            "RankReady",
            stage=rank[0],
            rank=rank[1],
            arena_bytes=message.geometry.arena_bytes,
            virtual_pages=message.virtual_pages,
            model=message.facts.name,
            versions=message.versions,
        )
        for line in message.table:
            self._log.info("Sizing", stage=rank[0], rank=rank[1], line=line)
        self._ready[rank] = message
        if len(self._ready) == len(self.ranks):
            self._all_ready.set()

    def _note_report(self, rank: RankId, seq: int) -> None:
        self._reported[rank] = seq
        done = min(self._reported.values())
        while self._sent_at and next(iter(self._sent_at)) <= done:
            del self._sent_at[next(iter(self._sent_at))]

    async def _watch_exit(self, rank: RankId, child: Child) -> None:
        code = await child.wait()
        if self._stopping:
            return
        await trio.sleep(LAST_WORDS_S)
        when = Exit.RANK if self._all_ready.is_set() else Exit.BOOT
        raise RankLost(rank, f"(pid {child.pid}) {exit_text(code)}; {self._last_words(rank)}", when)

    def _log_path(self, rank: RankId) -> Path:
        return self._run_dir.logs / f"rank-{rank[0]}-{rank[1]}.log"

    def _last_words(self, rank: RankId) -> str:
        """What a rank said last in this life, and where the rest of it is."""
        log = self._log_path(rank)
        words = last_words(log, self._log_starts[rank])
        return f"it said last: {words}; its log is {log}" if words else f"it named no error; its log is {log}"

    async def _watch_silence(self) -> None:
        checked = trio.current_time()
        while True:
            await trio.sleep(CHECK_EVERY_S)
            now = trio.current_time()
            late = now - checked - CHECK_EVERY_S
            checked = now
            if late > LATE_LOOP_S:
                self._heard = dict.fromkeys(self._heard, now)
                self._sent_at = dict.fromkeys(self._sent_at, now)
                continue
            self._check_silence(now)

    def _check_silence(self, now: float) -> None:
        for rank, heard in self._heard.items():
            if now - heard > self._settings.rank_timeout_s:
                raise RankLost(
                    rank, f"has been silent for {now - heard:.1f} s (--rank-timeout {self._settings.rank_timeout_s:g})"
                )
        oldest = min(self._sent_at.values(), default=math.inf)
        if now - oldest > self._settings.step_timeout_s:
            behind = min(self._reported, key=lambda rank: self._reported[rank])
            seq = self._reported[behind] + 1
            raise RankLost(
                behind, f"did not report step {seq} within --step-timeout {self._settings.step_timeout_s:g} s"
            )

    def _lose(self, rank: RankId, what: str) -> None:
        self._lost = RankLost(rank, what)
        self._loss.set()

    async def _raise_loss(self) -> None:
        await self._loss.wait()
        await trio.sleep(LAST_WORDS_S)
        assert self._lost is not None
        if not self._stopping:
            raise self._lost

    # --- the end

    async def stop(self, why: str, patience_s: float = STOP_WITHIN_S) -> None:
        """Tell the ranks to stop, wait, and kill those that do not; every process is reaped when this returns."""
        self._stopping = True
        with contextlib.suppress(PeerGone, RankStalled):  # they are killed below if they cannot hear
            self._server.broadcast(Stop(why))
        async with trio.open_nursery() as nursery:
            for child in self._children.values():
                nursery.start_soon(child.end, patience_s if self._ready else 0.0, None)

    async def close(self) -> None:
        """Kill what is left and close the socket."""
        self._stopping = True
        for child in self._children.values():
            child.close()
        await self._server.aclose()
