"""Rank processes behind a small daemon: started, booted, and sent steps one by one, with nothing else around.

Owns the processes, the stream to them and the collator. Must never decide anything. Invariant: leaving the context
leaves no process behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType

import msgspec
import psutil
import trio

from allocator.geometry import Geometry
from daemon.agreement import agree
from daemon.last_words import last_words
from daemon.mailbox import Collated
from daemon.processes import TOKEN_VARIABLE, Child, module_command
from daemon.results import Collator
from ipc import codec
from ipc.errors import IpcError
from ipc.messages import Begin, Fault, Hello, Join, ModelFacts, RankSettings, Ready, Report, Step, Stop
from ipc.streams import RankServer

EPOCH = 1
BOOT_TIMEOUT_S = 120.0
RECV_BATCH_MAX = 64
END_WITHIN_S = 5.0


class GroupFailed(Exception):
    """A rank did not boot, or said why it cannot go on."""


class RankProcesses:
    """`stages` x `ranks` processes of `python -m daemon.rank`; an async context manager."""

    def __init__(self, settings: RankSettings, stages: int, place: Path) -> None:
        self._settings = msgspec.structs.replace(settings, rendezvous=f"file://{place}/meeting")
        self._token = secrets.token_hex(16)
        self.ranks = [(stage, rank) for stage in range(stages) for rank in range(settings.tensor_ranks)]
        self._server = RankServer(f"ipc://{place}/ranks.sock", token=self._token, ranks=self.ranks)
        self._place = place
        self._children: list[Child] = []
        self._collator = Collator(EPOCH, self.ranks)
        self.geometry: Geometry
        self.facts: ModelFacts

    async def __aenter__(self) -> RankProcesses:
        self._server.begin_epoch(EPOCH)
        for stage, rank in self.ranks:
            command = module_command(
                "daemon.rank", "--endpoint", self._server.endpoint, "--stage", str(stage), "--rank", str(rank)
            )
            with (self._place / f"rank-{stage}-{rank}.log").open("wb") as log:
                environ = {**os.environ, TOKEN_VARIABLE: self._token}
                self._children.append(Child(f"rank {stage}.{rank}", command, environ, log))
        try:
            with trio.fail_after(BOOT_TIMEOUT_S):
                await self._boot()
        except* GroupFailed as failed:
            why = first_words(failed)
        except* trio.TooSlowError:
            why = f"the ranks were not ready within {BOOT_TIMEOUT_S:g} s"
        else:
            return self
        await self._end()
        raise GroupFailed(why)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    def processor_s(self) -> float:
        """Processor seconds of all ranks so far."""
        times = [psutil.Process(child.pid).cpu_times() for child in self._children]
        return sum(time.user + time.system for time in times)

    async def watch(self) -> None:
        """Raise GroupFailed as soon as a rank ends."""
        async with trio.open_nursery() as nursery:
            for (stage, rank), child in zip(self.ranks, self._children, strict=True):
                nursery.start_soon(self._watch_one, f"{stage}-{rank}", child)

    async def _watch_one(self, name: str, child: Child) -> None:
        code = await child.wait()
        raise GroupFailed(f"rank {name} ended with code {code}: {last_words(self._place / f'rank-{name}.log')}")

    async def _boot(self) -> None:
        ready: dict[tuple[int, int], Ready] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watch)
            async for message in self._messages():
                if isinstance(message, Join):
                    await self._server.send(message.stage, message.rank, Hello(EPOCH, self._settings))
                elif isinstance(message, Ready):
                    ready[message.stage, message.rank] = message
                if len(ready) == len(self.ranks):
                    break
            nursery.cancel_scope.cancel()
        self.geometry, self.facts = agree(ready, self._settings.page_size)
        self._server.broadcast(Begin(EPOCH, self.geometry))

    async def round_trip(self, step: Step, now_ns: int) -> Collated:
        """Send one step and wait until every rank has reported it and the reports agree."""
        self._collator.expect(step)
        self._server.send_step(step.seq, codec.encode(step))
        while True:
            for message in await self._server.recv_batch(RECV_BATCH_MAX):
                if isinstance(message, Report):
                    done = self._collator.add(message, now_ns)
                    if done:
                        return done[0]
                elif isinstance(message, Fault):
                    raise GroupFailed(f"rank {message.stage}.{message.rank}: {message.what}\n{message.trace}")

    async def _messages(self) -> AsyncIterator[object]:
        while True:
            for message in await self._server.recv_batch(RECV_BATCH_MAX):
                if isinstance(message, Fault):
                    raise GroupFailed(f"rank {message.stage}.{message.rank}: {message.what}\n{message.trace}")
                yield message

    async def _end(self) -> None:
        with trio.CancelScope(shield=True):
            with contextlib.suppress(IpcError):  # a rank that is gone is not stopped
                self._server.broadcast(Stop("the bench is over"))
            async with trio.open_nursery() as nursery:
                for child in self._children:
                    nursery.start_soon(child.end, END_WITHIN_S, None)
            await self._server.aclose()


def first_words(failed: BaseException) -> str:
    """The text of the first error in a tree of groups."""
    while isinstance(failed, BaseExceptionGroup):
        failed = failed.exceptions[0]
    return str(failed)
