"""Ranks: the supervisor that boots an epoch with its ranks, passes steps and reports, and notices when one is gone.

Owns the daemon's end of the rank streams, and the rank processes where they are started here. Must never decide from
what one rank says alone, nor start a second epoch by itself (`daemon.epochs` does). Invariants: a rank that exits,
freezes, breaks its stream or reports a fault ends the epoch, with the name of the one that failed first, within a
stated time; no rank that was started here outlives `end` or `close`.

    spawn (or wait) -> Join -> Hello -> (the model loads) -> Ready from all -> Begin -> steps and reports -> Stop
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from allocator.geometry import Geometry
from daemon.agreement import RanksDisagree, agree
from daemon.blame import Mark, RankLost, judge
from daemon.endpoints import RanksServer, ranks_server
from daemon.exits import DaemonError, Exit
from daemon.gateway_hostile import Complaints
from daemon.processes import TOKEN_VARIABLE, Child, exit_text
from daemon.rank_processes import RankProcesses
from daemon.rank_settings import rank_ids, rank_settings
from daemon.rank_watch import RankWatch
from daemon.results import DigestMismatch
from daemon.run_dir import RunDir
from daemon.settings_table import Settings
from ipc.errors import IpcError, PeerGone, RankGone, RankStalled
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
from ipc.rank_id import RankId, number
from ipc.streams import RankServer

CHECK_EVERY_S = 1.0
LATE_LOOP_S = 2.0  # the check itself came so late: this process was stopped, the ranks get a fresh start
STOP_WITHIN_S = 5.0
FAREWELL_S = 5.0  # for placed ranks on their way to another epoch: a new process takes a second or two
HURRIED_S = 1.0  # for all of that, where whoever ends us will not wait
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
        self._watch = RankWatch(settings)
        self.stopping = False  # the end was ordered, and ranks are told

    @property
    def stats(self) -> dict[str, int]:
        """Counters of the streams."""
        return self._server.stats

    @property
    def losing(self) -> str:
        """Why the present epoch is over, while it is found out whose fault that is; else empty."""
        return self._watch.losing

    @property
    def missing(self) -> list[RankId]:
        """Ranks that have not joined; while they are started elsewhere, nothing but them is waited for."""
        return sorted(set(self.ranks) - self._watch.heard.keys())

    # --- the epoch

    async def run(self, epoch: int, arenas: tuple[int, ...], began: Callable[[Epoch], None]) -> Loss:
        """One epoch, from the start of its ranks until one is lost; `began` is called once all of them are ready.

        `arenas` are the bytes of the arena of each stage, as an earlier epoch agreed on them; empty: ranks measure.
        """
        self._watch = watch = RankWatch(self._settings, epoch, self.ranks, arenas)
        self._server.begin_epoch(epoch)
        async with trio.open_nursery() as nursery:
            if self.spawns:
                self._processes.start(self.ranks)
            for rank, child in self._processes.children.items():
                nursery.start_soon(self._watch_exit, watch, rank, child)
            nursery.start_soon(self._receive, watch)
            nursery.start_soon(self._watch_silence, watch)
            nursery.start_soon(self._boot, watch, began)
            loss = await self._judge(watch)
            nursery.cancel_scope.cancel()
        return loss

    async def _boot(self, watch: RankWatch, began: Callable[[Epoch], None]) -> None:
        """Wait until all are ready, agree, begin."""
        if not self.spawns:
            self._log.info(
                "WaitingForRanks", endpoint=self._server.endpoint, ranks=[number(rank) for rank in self.ranks]
            )
        limit_s = self._settings.boot_timeout_s
        while not watch.all_ready.is_set():
            joined = len(watch.heard)
            with trio.move_on_after(limit_s):
                await watch.all_ready.wait()
                break
            if not self.spawns and (self.missing or joined < len(watch.heard)):
                continue  # they are placed by somebody who may take longer: the time counts from the last that joined
            late = sorted(set(self.ranks) - watch.ready.keys())[0]
            what = f"was not ready within --boot-timeout {limit_s:g} s{self._processes.said_last(late)}"
            watch.sign(Mark.LATE, RankLost(late, what, Exit.BOOT))
            return
        try:
            geometry, facts = agree(watch.ready, self._settings.page_size)
            self._server.broadcast(Begin(watch.epoch, geometry))
        except RanksDisagree as error:
            watch.sign(Mark.DISAGREED, error)
            return
        except (RankGone, RankStalled) as error:
            watch.unreachable(error.what, error.rank)
            return
        watch.heard = dict.fromkeys(self.ranks, trio.current_time())
        if not watch.over.is_set():
            versions = {rank: watch.ready[rank].versions for rank in self.ranks}
            began(Epoch(watch.epoch, geometry, facts, versions))

    def send_step(self, step: Step, data: bytes) -> None:
        """Send one encoded step to every rank; a rank that is gone is noticed here and ends `run`, not the caller."""
        watch = self._watch
        if watch.over.is_set() or step.epoch != watch.epoch:
            return
        watch.note_sent(step.seq, trio.current_time())
        try:
            self._server.send_step(step.seq, data)
        except (RankGone, RankStalled) as error:
            watch.unreachable(error.what, error.rank)

    def accuse(self, error: DaemonError) -> None:
        """Reports of the present epoch contradict each other or the daemon: it is over."""
        self._watch.sign(Mark.DIVERGED, error)

    # --- messages

    async def _receive(self, watch: RankWatch) -> None:
        while True:
            try:
                messages = await self._server.recv_batch(RECV_BATCH_MAX)
            except IpcError as error:
                watch.unreachable(f"broke its stream: {error}")
                continue
            for message in messages:
                await self._take(watch, message)

    async def _take(self, watch: RankWatch, message: FromRank) -> None:
        rank = (message.stage, message.rank)
        watch.heard[rank] = trio.current_time()
        if isinstance(message, Report):
            watch.note_report(rank, message.seq)
            await self._reports.send(message)
        elif isinstance(message, Join):
            self._log.info("RankJoined", epoch=watch.epoch, stage=rank[0], rank=rank[1], pid=message.pid)
            settings = rank_settings(self._settings, watch.epoch, self._life, self._run_dir.path)
            if watch.arenas:
                settings.arena_bytes = watch.arenas[rank[0]]
            try:
                await self._server.send(*rank, Hello(watch.epoch, settings))
            except PeerGone:  # where it runs elsewhere another one may join in its place; here its exit says more
                self._server.forget(*rank)
                del watch.heard[rank]
        elif isinstance(message, Ready):
            self._note_ready(watch, rank, message)
        elif isinstance(message, Explained):
            watch.note_explained(rank, message)
        elif isinstance(message, Fault):
            trace = {"trace": message.trace} if message.trace else {}  # a refused setting says it all
            self._log.error("RankFault", stage=rank[0], rank=rank[1], step=message.seq, what=message.what, **trace)
            watch.fault(rank, message)
        else:
            assert isinstance(message, Heartbeat), f"unexpected {type(message).__name__}"

    def _note_ready(self, watch: RankWatch, rank: RankId, message: Ready) -> None:
        self._log.info(
            "RankReady",
            epoch=watch.epoch,
            stage=rank[0],
            rank=rank[1],
            arena_bytes=message.geometry.arena_bytes,
            virtual_pages=message.virtual_pages,
            model=message.facts.name,
            versions=message.versions,
        )
        for line in message.table:
            self._log.info("Sizing", stage=rank[0], rank=rank[1], line=line)
        watch.note_ready(rank, message)

    # --- watching

    async def _watch_exit(self, watch: RankWatch, rank: RankId, child: Child) -> None:
        code = await child.wait()
        if self.stopping:
            return
        what = f"(pid {child.pid}) {exit_text(code)}"
        if code >= 0:
            await trio.sleep(LAST_WORDS_S / 2)  # the last lines of its log
        mark = Mark.KILLED if code < 0 else Mark.EXITED
        watch.sign(mark, RankLost(rank, what + self._processes.said_last(rank), watch.code))

    async def _watch_silence(self, watch: RankWatch) -> None:
        checked = trio.current_time()
        while True:
            await trio.sleep(CHECK_EVERY_S)
            now = trio.current_time()
            late = now - checked - CHECK_EVERY_S
            checked = now
            if late > LATE_LOOP_S:
                watch.forgive(now)
            elif not watch.over.is_set():
                watch.check(now, self._processes.stopped() if watch.booting else ())

    async def _judge(self, watch: RankWatch) -> Loss:
        """After the first sign a moment for further ones; then the cause, and of a divergence both sides."""
        await watch.over.wait()
        await trio.sleep(LAST_WORDS_S)
        gone = {rank for rank, child in self._processes.children.items() if child.code is not None}
        watch.check_among_failing(trio.current_time(), watch.heard.keys() - gone)
        cause = judge(watch.signs)
        if cause.mark == Mark.PEER_GONE and not self.spawns:
            self._look_for_the_gone(watch)
            cause = judge(watch.signs)
        if isinstance(cause.error, DigestMismatch):
            watch.forget_explained()  # whatever was asked before
            await self._explain(watch, cause.error.step.seq)
        mine = _rank_of(cause.error)
        others = [
            str(sign.error)
            for sign in watch.signs
            if sign is not cause and (sign.mark != cause.mark or mine is None or _rank_of(sign.error) != mine)
        ]
        return Loss(cause.error, cause.mark, watch.noticed_at, others, watch.explained)

    def _look_for_the_gone(self, watch: RankWatch) -> None:
        """Ranks that run elsewhere have no exit that is seen here: whoever cannot be written to is the one."""
        try:
            self._server.broadcast(Explain(1))  # whatever is sent; the answers of the others count for nothing
        except (RankGone, RankStalled) as error:
            watch.unreachable(error.what, error.rank)

    async def _explain(self, watch: RankWatch, seq: int) -> None:
        with contextlib.suppress(PeerGone, RankStalled):  # those that hear it answer
            self._server.broadcast(Explain(seq))
        with trio.move_on_after(EXPLAIN_WITHIN_S):
            await watch.all_explained.wait()

    # --- the end

    async def end(self, why: str) -> None:
        """After a loss: nothing of the epoch is left when this returns, and another one can be run."""
        if not self.spawns:
            self._tell(Stop(why, again=True))
        await self._processes.reap(0)

    async def stop(
        self, why: str, patience_s: float = STOP_WITHIN_S, again: bool = False, hurried: bool = False
    ) -> None:
        """Tell the ranks to stop, wait, and kill those that do not; every process is reaped when this returns.

        `again`: another life of the daemon will want those that are started elsewhere. If none will, each of them is
        told, also those that are between two epochs: nobody tells them later. `hurried`: nobody waits for long.
        """
        self.stopping = True
        if self.spawns or again:
            self._tell(Stop(why, again))
        else:
            await self._dismiss(Stop(why), HURRIED_S if hurried else FAREWELL_S)
        await self._processes.reap(patience_s if self._watch.ready and not hurried else 0)

    async def _dismiss(self, stop: Stop, within_s: float) -> None:
        with trio.move_on_after(within_s) as scope:
            await self._server.dismiss(stop)
        if scope.cancelled_caught:
            effect = "they look for another life of this daemon until their --join-timeout"
            untold = [number(rank) for rank in self._server.untold]
            self._log.warning("RanksNotTold", ranks=untold, within_s=within_s, effect=effect)

    def _tell(self, stop: Stop) -> None:
        with contextlib.suppress(PeerGone, RankStalled):  # they are killed, or leave by themselves, if they cannot hear
            self._server.broadcast(stop)

    async def close(self) -> None:
        """Kill what is left and close the socket."""
        self.stopping = True
        self._processes.close()
        await self._server.aclose()


def _rank_of(error: DaemonError) -> RankId | None:
    return error.rank if isinstance(error, RankLost) else None
