"""The work thread: what has come is expected before it is launched, and as much is in flight as the stages allow."""

from __future__ import annotations

import queue
from typing import Any

from daemon.rank.runner import Outcome
from daemon.rank.step_worker import InFlight
from daemon.rank.work_thread import BeginWork, Begun, Product, WorkThread
from ipc.messages import Report, Step
from tools.rank_driver import Driver, settings


class Later:
    """A forward that ends when it is asked for."""

    def due_in_s(self) -> float:
        return 3600.0

    def outcome(self) -> Outcome:
        raise AssertionError("the double below reports instead")


class Worker:
    """A step worker's double that writes down what it is asked to do; steps with a forward never end by themselves."""

    diverged_at = 0

    def __init__(self, in_flight_max: int) -> None:
        self.in_flight_max = in_flight_max
        self.asked: list[str] = []

    def expect(self, step: Step) -> None:
        self.asked.append(f"expect {step.seq}")

    def launch(self, step: Step) -> InFlight:
        self.asked.append(f"launch {step.seq}")
        return InFlight(step, b"", b"", b"", None, Later(), 0, b"")

    def finish(self, flight: InFlight) -> Report:
        self.asked.append(f"finish {flight.step.seq}")
        return Report(1, flight.step.seq, 0, 0, b"", b"", b"", b"", b"", b"")


def steps(count: int) -> list[Step]:
    """Steps with a forward of one token."""
    driver = Driver(settings())
    driver.generate(0, [40], count)
    return driver.steps[:count]


def test_what_has_come_is_expected_in_order_before_the_first_is_launched() -> None:
    """A stage's inputs may arrive while it computes: also those of steps that came before there was a worker."""
    worker: Any = Worker(in_flight_max=5)
    made: queue.SimpleQueue[Product] = queue.SimpleQueue()
    thread = WorkThread(made.put)
    for work in (BeginWork(lambda: worker), *steps(4), None):
        thread.put(work)
    while thread._turn():
        pass
    assert isinstance(made.get_nowait(), Begun)
    assert worker.asked == [*(f"expect {seq}" for seq in (1, 2, 3, 4)), *(f"launch {seq}" for seq in (1, 2, 3, 4))]


def test_each_step_is_expected_once_and_the_oldest_finished_when_no_more_may_fly() -> None:
    """Three in flight on two stages: the third launch waits for nobody, the fourth for the oldest report."""
    worker: Any = Worker(in_flight_max=3)
    made: queue.SimpleQueue[Product] = queue.SimpleQueue()
    thread = WorkThread(made.put)
    thread.put(BeginWork(lambda: worker))
    thread._turn()
    for step in steps(4):
        thread.put(step)
        while step.seq not in [flight.step.seq for flight in thread._flights]:
            thread._turn()
    assert worker.asked == [
        *("expect 1", "launch 1", "expect 2", "launch 2", "expect 3", "launch 3"),
        *("finish 1", "expect 4", "launch 4"),
    ]
