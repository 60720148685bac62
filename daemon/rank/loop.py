"""The rank's trio loop: messages in and out, heartbeats, and leaving when the daemon is gone.

Owns the stream to the daemon and the work thread's mail. Must never compute: nothing here waits for a forward.
Life: Join -> Hello -> (load in the work thread) -> Ready -> Begin -> steps and reports -> Stop. Invariants: one report
per step, in seq order; after a Fault nothing more is sent; when the daemon or the parent process is gone, the process
ends, whatever the work thread is doing.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import structlog
import trio

from allocator.geometry import Geometry
from daemon.faults import Faults
from daemon.processes import collect_seldom
from daemon.rank.command_line import (
    EXIT_AGAIN,
    EXIT_FAULT,
    EXIT_NOT_JOINED,
    EXIT_ORPHANED,
    EXIT_STOPPED,
    EXIT_USAGE,
    JOIN_TIMEOUT_S,
)
from daemon.rank.errors import BadOption, RankError, StepRefused
from daemon.rank.faults import faulty_runner
from daemon.rank.runner import Prepared, Runner, open_runner
from daemon.rank.step_worker import StepWorker
from daemon.rank.work_thread import BeginWork, Begun, Diverged, Failed, Product, WorkThread, failure
from ipc.errors import Dismissed
from ipc.messages import Begin, Explain, Explained, Fault, Heartbeat, Hello, RankSettings, Ready, Report, Step, Stop
from ipc.rank_stream import RankStream

HEARTBEAT_S = 1.0
LOOK_S, LOOK_MOST_S = 0.05, 0.2  # a Stop that comes while the work thread computes is read after so long
FAULT_LINGER_S = 1.0  # after a Fault: time for it to leave the process; a Stop or the daemon's end cuts it short

log = structlog.get_logger("rank")


class Place(NamedTuple):
    """Where this rank stands: its pipeline stage and its tensor rank within it."""

    stage: int
    rank: int


class RankLoop:
    """One epoch of one rank; `run` returns the process's exit code."""

    def __init__(
        self, stream: RankStream, place: Place, faults: Faults | None = None, join_within_s: float = JOIN_TIMEOUT_S
    ) -> None:
        self._stream = stream
        self._place = place
        self._faults = faults
        self._join_within_s = join_within_s
        self._exit_code = EXIT_STOPPED
        self._stopped = False  # a Stop was read: the exit code is what it says, whatever ends beside it
        self._settings: RankSettings
        self._prepared: Prepared
        # Bounded by the steps in flight.
        self._made, self._products = trio.open_memory_channel[Product](math.inf)
        token = trio.lowlevel.current_trio_token()

        def deliver(product: Product) -> None:
            token.run_sync_soon(self._made.send_nowait, product)

        self._thread = WorkThread(deliver)

    async def run(self) -> int:
        """Serve one epoch; the exit code is one of those of `command_line`."""
        try:
            hello = await self._stream.join(os.getpid(), self._join_within_s)
        except trio.TooSlowError:
            log.error("not joined", within_s=self._join_within_s)
            return EXIT_NOT_JOINED
        except Dismissed as dismissed:
            log.info("stopped", why=dismissed.why, reported=0, again=dismissed.again)
            return EXIT_AGAIN if dismissed.again else EXIT_STOPPED
        log.info("joined", epoch=hello.epoch, model=hello.settings.model_name, runner=hello.settings.runner)
        self._thread.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heartbeats)
            nursery.start_soon(self._stand_in)
            nursery.start_soon(self._watch_parent, nursery.cancel_scope)
            nursery.start_soon(self._watch_daemon, nursery.cancel_scope)
            try:
                await self._serve(hello)
            except* RankError as group:
                await self._fault(_failed(group, self._stream.received))  # whoever started us need not be the daemon
                if group.subgroup(BadOption):  # before anything was loaded: another try would end alike
                    self._exit_code = EXIT_USAGE
            finally:
                nursery.cancel_scope.cancel()
        return self._exit_code

    async def _serve(self, hello: Hello) -> None:
        self._settings = hello.settings
        runner = open_runner(hello.settings, *self._place, hello.epoch)
        if self._faults is not None:
            runner = faulty_runner(runner, self._faults)
        self._thread.put(runner)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deliver, nursery.cancel_scope)
            await self._receive(runner)
            nursery.cancel_scope.cancel()

    async def _receive(self, runner: Runner) -> None:
        """Messages to the work thread, until Stop."""
        while True:
            message = await self._stream.recv()
            match message:
                case Step():  # of a stream that is not shared
                    self._thread.put(message)
                case Begin():
                    self._thread.put(self._begin(message, runner))
                case Explain():
                    await self._stream.send(Explained(*self._place, self._thread.explain()))
                case Stop():
                    log.info("stopped", why=message.why, reported=self._stream.reported, again=message.again)
                    self._stopped = True
                    self._exit_code = EXIT_AGAIN if message.again else EXIT_STOPPED
                    return
                case _:
                    raise StepRefused(f"unexpected {type(message).__name__} after Hello")

    def _begin(self, begin: Begin, runner: Runner) -> BeginWork:
        check_geometry(begin.geometry, self._place.stage, self._prepared)
        length = self._prepared.facts.max_model_len
        settings = self._settings
        line = self._stream if self._stream.share() else None
        return BeginWork(lambda: StepWorker(runner, begin, settings, length, *self._place), line)

    async def _deliver(self, scope: trio.CancelScope) -> None:
        """What the work thread made, to the daemon, in order; a failure is reported once and ends the loop."""
        async for product in self._products:
            match product:
                case Report():
                    await self._stream.send(product)
                case Prepared():
                    await self._ready(product)
                case Begun():
                    collect_seldom()
                    log.info("begun")
                case Diverged():
                    log.error("logical digest differs from the daemon's", seq=product.seq)
                case Failed():
                    await self._fault(product)
                    scope.cancel()
                    return

    async def _ready(self, prepared: Prepared) -> None:
        self._prepared = prepared
        log.info("ready", virtual_pages=prepared.virtual_pages, **prepared.versions)
        for line in prepared.table:
            log.info("sizing", line=line)
        ready = Ready(
            *self._place,
            geometry=prepared.geometry,
            virtual_pages=prepared.virtual_pages,
            virtual_slots=prepared.virtual_slots,
            facts=prepared.facts,
            versions=prepared.versions,
            table=prepared.table,
        )
        await self._stream.send(ready)

    async def _fault(self, failed: Failed) -> None:
        self._exit_code = EXIT_FAULT
        log.error("fault", seq=failed.seq, what=failed.what, **({"trace": failed.trace} if failed.trace else {}))
        self._stream.stand_in(0)  # the work thread takes nothing any more
        await self._stream.send(Fault(*self._place, failed.seq, failed.what, failed.trace))
        await trio.sleep(FAULT_LINGER_S)

    async def _heartbeats(self) -> None:
        while True:
            await self._stream.send(Heartbeat(*self._place, self._stream.received, self._stream.reported))
            await trio.sleep(HEARTBEAT_S)

    async def _stand_in(self) -> None:
        """Read the stream where the work thread has not for a while; seldom looked at while no step comes."""
        pause_s, seen = LOOK_S, 0
        while True:
            await trio.sleep(pause_s)
            self._stream.stand_in(LOOK_S)
            pause_s = LOOK_S if self._stream.received > seen else min(2 * pause_s, LOOK_MOST_S)
            seen = self._stream.received

    async def _watch_parent(self, scope: trio.CancelScope) -> None:
        """Wait until the process that started this one is gone (by a descriptor of it, not by a signal)."""
        parent = os.getppid()
        try:
            descriptor = os.pidfd_open(parent)
        except ProcessLookupError:
            self._orphaned(scope, "parent")
            return
        try:
            if os.getppid() == parent:
                await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)
        self._orphaned(scope, "parent")

    async def _watch_daemon(self, scope: trio.CancelScope) -> None:
        await self._stream.wait_daemon_gone()
        self._orphaned(scope, "daemon")

    def _orphaned(self, scope: trio.CancelScope, who: str) -> None:
        if self._stopped:
            return
        log.error("orphaned", gone=who)
        self._exit_code = EXIT_ORPHANED
        scope.cancel()


def _failed(group: ExceptionGroup[RankError], seq: int) -> Failed:
    """The first of the errors, as the work thread tells of its own."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return failure(error, seq)


def check_geometry(geometry: Geometry, stage: int, prepared: Prepared) -> None:
    """Raise StepRefused unless the agreed geometry fits what this rank offered."""
    mine, offered = geometry.stages[stage], prepared.geometry
    if mine.bands != offered.bands or mine.chain_start_bytes != offered.chain_start_bytes:
        raise StepRefused(f"agreed bands {mine.bands} are not the offered ones {offered.bands}")
    if mine.arena_bytes > offered.arena_bytes:
        raise StepRefused(f"agreed arena of {mine.arena_bytes} bytes; this rank offered {offered.arena_bytes}")
