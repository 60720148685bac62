"""Fault hooks of a rank: a stream and a runner that do wrong where a specification says so.

Owns the wrappers around the rank's stream and its runner. Must never be in the way without a fault for this rank. What
happens in the stream happens on the loop (heartbeats go on while a step is delayed), what happens in a forward happens
in the work thread.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import trio

from daemon.faults import Faults
from daemon.rank.batch import Batch
from daemon.rank.runner import Launched, Runner
from ipc.messages import Begin, Explain, FromRank, Report, Step, Stop
from ipc.rank_stream import RankStream


class FaultyStream(RankStream):
    """A rank's stream that delays, drops or spoils chosen steps and reports."""

    faults: Faults

    async def recv(self) -> Begin | Step | Explain | Stop:
        """The next message that is not dropped."""
        while True:
            message = await super().recv()
            if not (isinstance(message, Step) and "drop" in await self._struck("step", message.seq)):
                return message

    async def send(self, message: FromRank) -> None:
        """Send a message, a report perhaps late, spoilt or never."""
        if isinstance(message, Report):
            struck = await self._struck("report", message.seq)
            if "drop" in struck:
                self.skip_report(message.seq)
                return
            for action in struck:
                if action.startswith("corrupt_"):
                    message = spoil(message, action.removeprefix("corrupt_"))
        await super().send(message)

    def share(self) -> bool:
        """What may be delayed goes by `recv` and `send`, on the loop: the way of streams that are not shared."""
        return False

    async def _struck(self, point: str, seq: int) -> list[str]:
        """The actions of the faults that strike here, once its delays are over."""
        struck = []
        for spec in self.faults.hit(point, seq):
            if spec.action == "delay":
                await trio.sleep(self.faults.delay_s(spec))
            struck.append(spec.action)
        return struck

    def skip_report(self, seq: int) -> None:
        """The daemon never gets this one, and we go on as if it had."""
        self._reported = seq


def spoil(report: Report, digest: str) -> Report:
    """The report with one bit of a digest turned; a digest that this rank does not make stays empty."""
    value: bytes = getattr(report, digest)
    return msgspec.structs.replace(report, **{digest: bytes([value[0] ^ 1]) + value[1:]}) if value else report


class FaultyRunner:
    """A runner whose forwards are late or raise."""

    def __init__(self, inner: Runner, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, batch: Batch) -> Launched:
        """Launch a forward, unless a fault is in its place."""
        for spec in self._faults.hit("forward", batch.seq):
            if spec.action == "delay":
                time.sleep(self._faults.delay_s(spec))
        return self._inner.launch(batch)


def faulty_runner(runner: Runner, faults: Faults) -> Runner:
    """The runner, with a faulty one around it if a fault strikes there."""
    if not faults.at("forward"):
        return runner
    faulty: Runner = FaultyRunner(runner, faults)  # every other operation by delegation
    return faulty
