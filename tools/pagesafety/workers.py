"""Processes of a sweep: started, fed one task at a time, watched, and ended with the command whatever ends it.

Owns the processes of `bandmaster stress --jobs`. Must never outlive the command or wait for one that is gone: they ask
the kernel to be killed with their parent, and every way out of `over_processes` kills those that run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from daemon.processes import signal_at_parents_death
from tools.processes import start_deaf

Task = TypeVar("Task")
Answer = TypeVar("Answer")


class WorkerLost(Exception):
    """A process ended without its answer; `task` is what it was given."""

    def __init__(self, how: str, task: object) -> None:
        super().__init__(how)
        self.task = task


def over_processes(
    work: Callable[[Task], Answer], tasks: Sequence[Task], jobs: int
) -> Generator[tuple[int, Answer], None, None]:
    """(number of the task, answer) as they come, from `jobs` processes (1: this one, in order).

    Raises WorkerLost when a process is killed or fails. Closing the iterator ends all processes.
    """
    if jobs <= 1:
        for number, task in enumerate(tasks):
            yield number, work(task)
        return
    running: dict[Connection, Any] = {}
    given: dict[Connection, int] = {}
    left = iter(range(len(tasks)))
    try:
        for _ in range(min(jobs, len(tasks))):
            ours = _start(work, running)
            given[ours] = next(left)
            ours.send(tasks[given[ours]])
        while given:
            for connection in wait(list(given)):
                assert isinstance(connection, Connection)
                number = given.pop(connection)
                answer = _receive(connection, running[connection], tasks[number])
                following = next(left, None)
                if following is not None:
                    given[connection] = following
                    connection.send(tasks[following])
                yield number, answer
    finally:
        for connection, process in running.items():
            process.kill()
            process.join()
            connection.close()


def _start(work: Callable[[Task], Answer], running: dict[Connection, Any]) -> Connection:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(work, theirs, os.getpid()), daemon=True)
    start_deaf(process)
    theirs.close()
    running[ours] = process
    return ours


def _receive(connection: Connection, process: Any, task: object) -> Any:
    try:
        good, answer = connection.recv()
    except (EOFError, OSError):
        process.join()
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        raise WorkerLost(f"a process {how}", task) from None
    if not good:
        raise WorkerLost(f"a process failed: {answer}", task)
    return answer


def _serve(work: Callable[[Any], Any], connection: Connection, parent: int) -> None:
    """A process: task after task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_at_parents_death()
    if os.getppid() != parent:
        return
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, work(task))
        except Exception as error:  # the command's own: it ends the command, with its name
            answer = (False, f"{type(error).__name__}: {error}")
        connection.send(answer)
