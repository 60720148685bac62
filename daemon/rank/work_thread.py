"""The one thread that computes: steps in, reports out, so that the trio loop never waits for a forward.

Owns the thread and its inbox. Where the loop has given it a `Line` to the daemon, it takes steps from there and reports
there, so that a step wakes one thread, once; all else that it makes is handed to the loop through `deliver`.
Invariants: steps are launched in the order they came; reports leave in the same order; a step that waits in the inbox
is launched before an unfinished forward is waited for, so the device always has the next forward queued; what has come
is expected before the first of it is launched, so that inputs from the stage before arrive while this one computes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from daemon.rank.errors import BadOption
from daemon.rank.runner import Prepared, Runner
from daemon.rank.step_worker import InFlight, StepWorker
from ipc.messages import Report, Step, StepTrace


class Failed(NamedTuple):
    """Work raised: what, its traceback, and the seq it happened at (0 before any step)."""

    what: str
    trace: str
    seq: int


class Line(Protocol):
    """A way to the daemon for this thread; `ipc.rank_stream.RankStream` is one once it is shared."""

    def take_steps(self, within_s: float | None) -> list[Step] | None:
        """Steps that are there, in order; waits for one for so long. None: no more will come."""

    def send_now(self, report: Report) -> bool:
        """Send a report without waiting; False: the loop must."""


class BeginWork(NamedTuple):
    """Makes the epoch's step worker (allocates the arena) in the thread that will use it."""

    make: Callable[[], StepWorker]
    line: Line | None = None  # where the steps come from; None: from the inbox


class Begun(NamedTuple):
    """The step worker exists; steps can be handed over."""


class Diverged(NamedTuple):
    """This rank's logical digest is not the daemon's from `seq` on."""

    seq: int


Work = Step | BeginWork | Runner | None


def failure(error: BaseException, seq: int) -> Failed:
    """An error as the daemon is told; a setting that is refused needs no traceback, it says what was asked for."""
    trace = "" if isinstance(error, BadOption) else "".join(traceback.format_exception(error))
    return Failed(f"{type(error).__name__}: {error}", trace, seq)


Product = Report | Prepared | Begun | Diverged | Failed


class WorkThread:
    """Daemon thread with an unbounded inbox; the daemon bounds what is in flight. `deliver` is called in the thread."""

    def __init__(self, deliver: Callable[[Product], None]) -> None:
        self._deliver = deliver
        self._line: Line | None = None  # once there is a worker for what comes over it
        self._inbox: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._next: deque[Work] = deque()  # taken out of the inbox, not done yet
        self._expected = 0  # seq of the newest step that the worker was told to expect
        self._worker: StepWorker | None = None
        self._flights: deque[InFlight] = deque()
        self._seq = 0
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, work: Work) -> None:
        """Queue work, until there is a `Line`; None ends the thread after what came before it."""
        self._inbox.put(work)

    def explain(self) -> list[StepTrace]:
        """What the newest steps did; whatever the thread is doing."""
        return [] if self._worker is None else self._worker.traces.explain()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread ended within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._deliver(failure(error, self._seq))

    def _turn(self) -> bool:
        """One piece of work or one finished forward; False when told to end."""
        due_in_s = self._due_in_s(self._flights[0]) if self._flights else None
        if due_in_s == 0 or (self._worker is not None and len(self._flights) >= self._worker.in_flight_max):
            self._finish()
            return True
        if not self._next:
            self._next.extend(self._wait(due_in_s))
            if not self._next:
                return True
        self._look_ahead()
        work = self._next.popleft()
        if work is None:
            return False
        self._do(work)
        return True

    def _wait(self, within_s: float | None) -> list[Work]:
        """What comes next, within the time."""
        if self._line is not None:
            steps = self._line.take_steps(within_s)
            return [None] if steps is None else [*steps]
        try:
            return [self._inbox.get(timeout=within_s)]
        except queue.Empty:
            return []

    def _look_ahead(self) -> None:
        """Take all that has come; the worker, once it exists, expects every step that is there, in order."""
        if self._line is not None:
            self._next.extend(self._wait(0))
        with contextlib.suppress(queue.Empty):
            while self._line is None:
                self._next.append(self._inbox.get_nowait())
        if self._worker is None:
            return
        for work in self._next:
            if isinstance(work, Step) and work.seq > self._expected:
                self._worker.expect(work)
                self._expected = work.seq

    @staticmethod
    def _due_in_s(flight: InFlight) -> float:
        return 0 if flight.launched is None else flight.launched.due_in_s()

    def _finish(self) -> None:
        assert self._worker is not None
        report = self._worker.finish(self._flights.popleft())
        if self._line is None or not self._line.send_now(report):
            self._deliver(report)

    def _do(self, work: Step | BeginWork | Runner) -> None:
        if isinstance(work, Step):
            assert self._worker is not None, "a step before Begin"
            self._seq = work.seq
            known = self._worker.diverged_at
            self._flights.append(self._worker.launch(work))
            if self._worker.diverged_at != known:
                self._deliver(Diverged(self._worker.diverged_at))
        elif isinstance(work, BeginWork):
            self._worker = work.make()
            self._line = work.line
            self._deliver(Begun())
        else:
            self._deliver(work.prepare())
