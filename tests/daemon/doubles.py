"""Doubles for the engine's neighbours: they note what they get in one shared list, so that order can be asserted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from daemon.clock import NS_PER_S
from daemon.core.account import Account
from daemon.core.inputs import Input
from daemon.core.outputs import Outputs
from daemon.engine import Engine
from daemon.mailbox import BandCounts, BecameIdle, Iteration, StepSent
from ipc.messages import Step
from journal.opening import open_journal
from journal.records import DECISION_VERSION, SCHEMA_VERSION, Opened
from journal.storage import Storage
from journal.writer import JournalSettings, JournalWriter
from tests.journal.modeled_disk import ModeledDisk

Event = tuple[str, Any]


class TrioClock:
    """The mocked trio clock as the daemon's clock; seeds and tokens count up."""

    def __init__(self) -> None:
        self.drawn = 0

    def now_ns(self) -> int:
        return NS_PER_S + int(trio.current_time() * NS_PER_S)

    def seed(self) -> int:
        self.drawn += 1
        return self.drawn

    def token(self) -> str:
        self.drawn += 1
        return f"{self.drawn:032x}"


class NotedDisk(ModeledDisk):
    """A modeled disk that notes each write and sync in the shared list."""

    def __init__(self, events: list[Event], **faults: Any) -> None:
        super().__init__(**faults)
        self.events = events

    def write(self, handle: int, data: bytes) -> int:
        taken = super().write(handle, data)
        self.events.append(("write", data))
        return taken

    def sync(self, handle: int) -> None:
        super().sync(handle)
        self.events.append(("sync", handle))


class Neighbours:
    """Ranks, gateway, results and journal actor in one: everything is noted."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    def expect(self, step: Step) -> None:
        self.events.append(("expect", step.seq))

    def send_step(self, step: Step, data: bytes) -> None:
        self.events.append(("step", data))

    def deliver(self, outputs: Outputs, sequence: int) -> None:
        self.events.append(("deliver", (outputs, sequence)))

    def written(self, urgent: bool) -> None:
        self.events.append(("written", urgent))


class ScriptedCore:
    """A core whose answer to each input is a function of it; `live` is set by the test."""

    def __init__(self, answer: Callable[[Input], Outputs]) -> None:
        self.answer = answer
        self.fed: list[Input] = []
        self.live = 0

    def feed(self, item: Input) -> Outputs:
        self.fed.append(item)
        return self.answer(item)

    def gauges(self) -> dict[str, int]:
        return {"live": self.live, "accepted_total": 0}

    def account(self) -> Account:
        return Account(live=self.live, waiting=self.live)

    def state_digest(self) -> bytes:
        return b"\7" * 16


def writer_on(storage: Storage, settings: JournalSettings | None = None) -> JournalWriter:
    """A journal in its first life, with `Opened` written."""
    from daemon.core.limits import CoreConfig

    writer, _ = open_journal(storage, settings or JournalSettings(), b"j" * 16)
    writer.append(Opened(1, "life", SCHEMA_VERSION, DECISION_VERSION, CoreConfig(), {}, {}))
    writer.flush()
    return writer


class Bench:
    """An engine with doubles around it; `send` is its mailbox."""

    def __init__(
        self,
        answer: Callable[[Input], Outputs],
        drain_timeout_s: float = 30.0,
        faults: dict[str, Any] | None = None,
        settings: JournalSettings | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.disk = NotedDisk(self.events)
        self.writer = writer_on(self.disk, settings)
        if faults:
            self.disk.fail_at = self.disk.operations + 1
            self.disk.forever = faults.get("forever", False)
        self.events.clear()
        self.core = ScriptedCore(answer)
        self.clock = TrioClock()
        neighbours = Neighbours(self.events)
        self.send, mailbox = trio.open_memory_channel[Input](64)
        observed_in, self.observed = trio.open_memory_channel[Iteration](1024)
        hints_in, self.hints = trio.open_memory_channel[StepSent | BecameIdle | BandCounts](16)
        self.engine = Engine(
            self.core,
            self.writer,
            self.clock,
            mailbox=mailbox,
            observed=observed_in,
            hints=hints_in,
            ranks=neighbours,
            results=neighbours,
            gateway=neighbours,
            journal=neighbours,
            drain_timeout_s=drain_timeout_s,
        )

    def names(self) -> list[str]:
        """What happened, in order."""
        return [name for name, _ in self.events]
