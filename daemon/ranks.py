"""Ranks: the supervisor that boots an epoch with its ranks, passes steps and reports, and notices when one is gone.

Owns the daemon's end of the rank streams, and the rank processes where they are started here. Must never decide from
what one rank says alone, nor start a second epoch by itself (`daemon.epochs` does). Invariants: a rank that exits,
freezes, breaks its stream or reports a fault ends the epoch, with the name of the one that failed first, within a
stated time; no rank that was started here outlives `end` or `close`.

    spawn (or wait) -> Join -> Hello -> (the model loads) -> Ready from all -> Begin -> steps and reports -> Stop
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from allocator.geometry import Geometry
from daemon.agreement import RanksDisagree, agree
from daemon.blame import Mark, RankId, RankLost, Sign, fault_mark, judge
from daemon.endpoints import RanksServer, ranks_server
from daemon.exits import DaemonError, Exit
from daemon.gateway_hostile import Complaints
from daemon.processes import Child, exit_text
from daemon.rank_processes import TOKEN_VARIABLE, RankProcesses
from daemon.rank_settings import rank_ids, rank_settings
from daemon.results import DigestMismatch
from daemon.run_dir import RunDir
from daemon.settings_table import Settings
from ipc.errors import IpcError, PeerGone, RankStalled
from ipc.messages import (
    Begin,
    Explain,
    Explained,
    Fault,
    FromRank,
    Heartbeat,
    Hello,
    Join,
    ModelFacts,
    Ready,
    Report,
    Step,
    Stop,
)
from ipc.streams import RankServer

CHECK_EVERY_S = 1.0
LATE_LOOP_S = 2.0  # the check itself came so late: this process was stopped, the ranks get a fresh start
SILENT_S = 3.5  # three heartbeats missed: of ranks that fail together the silent one is to blame
BOOT_SILENCE_S = 60.0  # while a model loads its process may be busy for long
STOP_WITHIN_S = 5.0
LAST_WORDS_S = 0.3  # a Fault that a rank sent last says more than its exit code or a closed connection
EXPLAIN_WITHIN_S = 2.0
RECV_BATCH_MAX = 64


@dataclass(frozen=True, slots=True)
class Epoch:
    """What the ranks agreed on."""

    number: int
    geometry: Geometry
    facts: ModelFacts
    versions: dict[RankId, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Loss:
    """How an epoch ended: its cause, when its first sign came (trio time), and what ranks said of a divergence."""

    error: DaemonError
    mark: Mark
    noticed_at: float
    others: list[str] = field(default_factory=list)
    explained: dict[RankId, Explained] = field(default_factory=dict)


class _State:
    """What is known of the ranks of one epoch."""

    def __init__(self, epoch: int, ranks: tuple[RankId, ...], arenas: tuple[int, ...]) -> None:
        self.epoch = epoch
        self.arenas = arenas
        self.ready: dict[RankId, Ready] = {}
        self.all_ready = trio.Event()
        self.heard: dict[RankId, float] = {}
        self.sent_at: dict[int, float] = {}  # step -> when, until every rank reported it
        self.reported: dict[RankId, int] = dict.fromkeys(ranks, 0)
        self.signs: list[Sign] = []
        self.noticed_at = math.inf
        self.over = trio.Event()  # there is a sign
        self.explained: dict[RankId, Explained] = {}
        self.all_explained = trio.Event()

    def sign(self, mark: Mark, error: DaemonError) -> None:
        """Note a sign that this epoch is over."""
        self.signs.append(Sign(mark, error))
        if not self.over.is_set():
            self.noticed_at = trio.current_time()
            self.over.set()


class RankSupervisor:
    """Boots and watches the ranks of one epoch after the other."""

    def __init__(
        self,
        settings: Settings,
        run_dir: RunDir,
        token: str,
        log: Any,
        reports: trio.MemorySendChannel[Report],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`token` proves to us that a rank was started by us; ranks started elsewhere bring that of the environment."""
        environ = os.environ if environ is None else environ
        self.ranks = rank_ids(settings)
        self._settings = settings
        self._run_dir = run_dir
        self._log = log
        self._reports = reports
        self.spawns = settings.rank_launch == "spawn"
        self._token = token if self.spawns else environ.get(TOKEN_VARIABLE, "")
        self._life = token
        complaints = Complaints(log, trio.current_time)
        place: RanksServer = ranks_server(settings, run_dir)
        if place.endpoint.startswith("tcp://") and place.keys is None:
            what = "what passes between daemon and ranks can be read, and who knows the token can pose as a rank"
            log.warning("InsecureEndpoint", endpoint=place.endpoint, effect=what)
        self._server = RankServer(
            place.endpoint,
            token=self._token,
            ranks=self.ranks,
            keys=place.keys,
            insecure=place.insecure,
            replaced=not self.spawns,
            complain=lambda counter, text: complaints.note("StrangeRankMessage", counter, peer="", text=text),
        )
        arguments = ["--endpoint", self._server.endpoint, *place.rank_arguments]
        self._processes = RankProcesses(run_dir, arguments, {**environ, TOKEN_VARIABLE: self._token}, log)
        self._state = _State(0, self.ranks, ())
        self._stopping = False

    @property
    def stats(self) -> dict[str, int]:
        """Counters of the streams."""
        return self._server.stats

    @property
    def losing(self) -> str:
        """Why the present epoch is over, while it is found out whose fault that is; else empty."""
        signs = self._state.signs
        return str(judge(signs).error) if signs else ""

    @property
    def missing(self) -> list[RankId]:
        """Ranks that have not joined; while they are started elsewhere, nothing but them is waited for."""
        return sorted(set(self.ranks) - self._state.heard.keys())

    # --- the epoch

    async def run(self, epoch: int, arenas: tuple[int, ...], began: Callable[[Epoch], None]) -> Loss:
        """One epoch, from the start of its ranks until one is lost; `began` is called once all of them are ready.

        `arenas` are the bytes of the arena of each stage, as an earlier epoch agreed on them; empty: ranks measure.
        """
        self._state = state = _State(epoch, self.ranks, arenas)
        self._server.begin_epoch(epoch)
        async with trio.open_nursery() as nursery:
            if self.spawns:
                self._processes.start(self.ranks)
            for rank, child in self._processes.children.items():
                nursery.start_soon(self._watch_exit, state, rank, child)
            nursery.start_soon(self._receive, state)
            nursery.start_soon(self._watch_silence, state)
            nursery.start_soon(self._boot, state, began)
            loss = await self._judge(state)
            nursery.cancel_scope.cancel()
        return loss

    async def _boot(self, state: _State, began: Callable[[Epoch], None]) -> None:
        """Wait until all are ready, agree, begin."""
        if not self.spawns:
            self._log.info("WaitingForRanks", endpoint=self._server.endpoint, ranks=[f"{s}.{r}" for s, r in self.ranks])
        limit_s = self._settings.boot_timeout_s
        while not state.all_ready.is_set():
            joined = len(state.heard)
            with trio.move_on_after(limit_s):
                await state.all_ready.wait()
                break
            if not self.spawns and (self.missing or joined < len(state.heard)):
                continue  # they are placed by somebody who may take longer: the time counts from the last that joined
            late = sorted(set(self.ranks) - state.ready.keys())[0]
            what = f"was not ready within --boot-timeout {limit_s:g} s{self._processes.said_last(late)}"
            state.sign(Mark.LATE, RankLost(late, what, Exit.BOOT))
            return
        try:
            geometry, facts = agree(state.ready, self._settings.page_size)
            self._server.broadcast(Begin(state.epoch, geometry))
        except RanksDisagree as error:
            state.sign(Mark.DISAGREED, error)
            return
        except (PeerGone, RankStalled) as error:
            state.sign(Mark.UNREACHABLE, RankLost(None, f"cannot be told to begin: {error}", Exit.BOOT))
            return
        state.heard = dict.fromkeys(self.ranks, trio.current_time())
        if not state.over.is_set():
            versions = {rank: state.ready[rank].versions for rank in self.ranks}
            began(Epoch(state.epoch, geometry, facts, versions))

    def send_step(self, step: Step, data: bytes) -> None:
        """Send one encoded step to every rank; a rank that is gone is noticed here and ends `run`, not the caller."""
        state = self._state
        if state.over.is_set() or step.epoch != state.epoch:
            return
        state.sent_at[step.seq] = trio.current_time()
        try:
            self._server.send_step(step.seq, data)
        except (PeerGone, RankStalled) as error:
            state.sign(Mark.UNREACHABLE, RankLost(None, f"cannot be reached: {error}"))

    def accuse(self, error: DaemonError) -> None:
        """Reports of the present epoch contradict each other or the daemon: it is over."""
        self._state.sign(Mark.DIVERGED, error)

    # --- messages

    async def _receive(self, state: _State) -> None:
        while True:
            try:
                messages = await self._server.recv_batch(RECV_BATCH_MAX)
            except IpcError as error:
                state.sign(Mark.UNREACHABLE, RankLost(None, f"broke its stream: {error}", self._code(state)))
                continue
            for message in messages:
                await self._take(state, message)

    async def _take(self, state: _State, message: FromRank) -> None:
        rank = (message.stage, message.rank)
        state.heard[rank] = trio.current_time()
        if isinstance(message, Report):
            self._note_report(state, rank, message.seq)
            await self._reports.send(message)
        elif isinstance(message, Join):
            self._log.info("RankJoined", epoch=state.epoch, stage=rank[0], rank=rank[1], pid=message.pid)
            settings = rank_settings(self._settings, state.epoch, self._life, self._run_dir.path)
            if state.arenas:
                settings.arena_bytes = state.arenas[rank[0]]
            try:
                await self._server.send(*rank, Hello(state.epoch, settings))
            except PeerGone:  # where it runs elsewhere another one may join in its place; here its exit says more
                self._server.forget(*rank)
                del state.heard[rank]
        elif isinstance(message, Ready):
            self._note_ready(state, rank, message)
        elif isinstance(message, Explained):
            state.explained[rank] = message
            if len(state.explained) == len(self.ranks):
                state.all_explained.set()
        elif isinstance(message, Fault):
            self._log.error(
                "RankFault", stage=rank[0], rank=rank[1], step=message.seq, what=message.what, trace=message.trace
            )
            what = f"failed at step {message.seq}: {message.what}"
            state.sign(fault_mark(message.what), RankLost(rank, what, self._code(state)))
        else:
            assert isinstance(message, Heartbeat), f"unexpected {type(message).__name__}"

    def _note_ready(self, state: _State, rank: RankId, message: Ready) -> None:
        self._log.info(
            "RankReady",
            epoch=state.epoch,
            stage=rank[0],
            rank=rank[1],
            arena_bytes=message.geometry.arena_bytes,
            virtual_pages=message.virtual_pages,
            model=message.facts.name,
            versions=message.versions,
        )
        for line in message.table:
            self._log.info("Sizing", stage=rank[0], rank=rank[1], line=line)
        state.ready[rank] = message
        if len(state.ready) == len(self.ranks):
            state.all_ready.set()

    def _note_report(self, state: _State, rank: RankId, seq: int) -> None:
        state.reported[rank] = seq
        done = min(state.reported.values())
        while state.sent_at and next(iter(state.sent_at)) <= done:
            del state.sent_at[next(iter(state.sent_at))]

    # --- watching

    @staticmethod
    def _code(state: _State) -> Exit:
        return Exit.RANK if state.all_ready.is_set() else Exit.BOOT

    async def _watch_exit(self, state: _State, rank: RankId, child: Child) -> None:
        code = await child.wait()
        if self._stopping:
            return
        what = f"(pid {child.pid}) {exit_text(code)}"
        if code >= 0:
            await trio.sleep(LAST_WORDS_S / 2)  # the last lines of its log
        mark = Mark.KILLED if code < 0 else Mark.EXITED
        state.sign(mark, RankLost(rank, what + self._processes.said_last(rank), self._code(state)))

    async def _watch_silence(self, state: _State) -> None:
        checked = trio.current_time()
        while True:
            await trio.sleep(CHECK_EVERY_S)
            now = trio.current_time()
            late = now - checked - CHECK_EVERY_S
            checked = now
            if late > LATE_LOOP_S:
                state.heard = dict.fromkeys(state.heard, now)
                state.sent_at = dict.fromkeys(state.sent_at, now)
            elif not state.over.is_set():
                self._check_silence(state, now)

    def _check_silence(self, state: _State, now: float) -> None:
        settings = self._settings
        booting = not state.all_ready.is_set()
        limit_s = max(settings.rank_timeout_s, BOOT_SILENCE_S) if booting else settings.rank_timeout_s
        for rank, heard in state.heard.items():
            if now - heard > limit_s:
                self._note_silent(state, rank, now - heard)
        oldest = min(state.sent_at.values(), default=math.inf)
        if now - oldest > settings.step_timeout_s:
            behind = min(state.reported.values())
            late = [rank for rank in self.ranks if state.reported[rank] == behind]
            also = f" (nor did {', '.join(f'{stage}.{rank}' for stage, rank in late[1:])})" if late[1:] else ""
            what = f"did not report step {behind + 1} within --step-timeout {settings.step_timeout_s:g} s{also}"
            state.sign(Mark.LATE, RankLost(late[0], what))

    def _note_silent(self, state: _State, rank: RankId, silent_s: float) -> None:
        timeout_s = self._settings.rank_timeout_s
        what = f"has been silent for {silent_s:.1f} s (--rank-timeout {timeout_s:g})"
        state.sign(Mark.SILENT, RankLost(rank, what, self._code(state)))

    async def _judge(self, state: _State) -> Loss:
        """After the first sign a moment for further ones; then the cause, and of a divergence both sides."""
        await state.over.wait()
        await trio.sleep(LAST_WORDS_S)
        if state.all_ready.is_set():
            now = trio.current_time()
            for rank, heard in state.heard.items():
                child = self._processes.children.get(rank)
                if now - heard > SILENT_S and (child is None or child.code is None):
                    self._note_silent(state, rank, now - heard)
        cause = judge(state.signs)
        if cause.mark == Mark.PEER_GONE and not self.spawns:
            self._look_for_the_gone(state)
            cause = judge(state.signs)
        if isinstance(cause.error, DigestMismatch):
            state.explained.clear()
            await self._explain(state, cause.error.step.seq)
        others = [str(sign.error) for sign in state.signs if sign is not cause]
        return Loss(cause.error, cause.mark, state.noticed_at, others, state.explained)

    def _look_for_the_gone(self, state: _State) -> None:
        """Ranks that run elsewhere have no exit that is seen here: whoever cannot be written to is the one."""
        try:
            self._server.broadcast(Explain(1))  # whatever is sent; the answers of the others count for nothing
        except (PeerGone, RankStalled) as error:
            state.sign(Mark.UNREACHABLE, RankLost(None, f"is gone: {error}"))

    async def _explain(self, state: _State, seq: int) -> None:
        with contextlib.suppress(PeerGone, RankStalled):  # those that hear it answer
            self._server.broadcast(Explain(seq))
        with trio.move_on_after(EXPLAIN_WITHIN_S):
            await state.all_explained.wait()

    # --- the end

    async def end(self, why: str) -> None:
        """After a loss: nothing of the epoch is left when this returns, and another one can be run."""
        if not self.spawns:
            self._tell(Stop(why, again=True))
        await self._processes.reap(0)

    async def stop(self, why: str, patience_s: float = STOP_WITHIN_S) -> None:
        """Tell the ranks to stop, wait, and kill those that do not; every process is reaped when this returns."""
        self._stopping = True
        self._tell(Stop(why))
        await self._processes.reap(patience_s if self._state.ready else 0)

    def _tell(self, stop: Stop) -> None:
        with contextlib.suppress(PeerGone, RankStalled):  # they are killed, or leave by themselves, if they cannot hear
            self._server.broadcast(stop)

    async def close(self) -> None:
        """Kill what is left and close the socket."""
        self._stopping = True
        self._processes.close()
        await self._server.aclose()
