"""Worlds explored at a time, a process each: started, watched, and ended with the command whatever ends it.

Owns the processes of `bandmaster explore`. Must never outlive the command or leave one of them behind: they ask the
kernel to be killed with their parent, and every way out of `explore_all` kills those that run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from daemon.processes import signal_at_parents_death
from tools.processes import start_deaf
from tools.smallscope.search import Walk, explore
from tools.smallscope.world import Limits, Shape


class Job(NamedTuple):
    """One world to explore."""

    shape: Shape
    limits: Limits
    depth: int
    kinds: frozenset[str] | None
    findings_max: int


class Progress(NamedTuple):
    """How far one world is: the depth it works at, what it saw, and percent of that depth."""

    depth: int
    states: int
    transitions: int
    percent: int


class WorkerLost(Exception):
    """A process ended without its result."""


Watch = Callable[[int, Progress], None]


def explore_all(jobs: Sequence[Job], at_a_time: int, watch: Watch, done: Callable[[int, Walk], None]) -> None:
    """Explores every world; `watch` and `done` get its number. Raises WorkerLost when a process is killed."""
    context = multiprocessing.get_context("spawn")
    waiting = list(enumerate(jobs))
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                number, job = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(job, theirs, os.getpid()), daemon=True)
                start_deaf(process)
                theirs.close()
                running[ours] = (number, process)
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                number, process = running[connection]
                try:
                    news = connection.recv()
                except EOFError:
                    process.join()
                    raise WorkerLost(_how_lost(jobs[number], process.exitcode)) from None
                if isinstance(news, Progress):
                    watch(number, news)
                elif isinstance(news, Walk):
                    done(number, news)
                    del running[connection]
                    connection.close()
                    process.join()
                else:
                    raise WorkerLost(f"{jobs[number].shape.name}: {news}")
    finally:
        for connection, (_, process) in running.items():
            process.kill()
            process.join()
            connection.close()


def _how_lost(job: Job, code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process that explored {job.shape.name} was killed by {signal.Signals(-code).name}"
    return f"the process that explored {job.shape.name} ended with exit code {code}"


def _work(job: Job, news: Connection, parent: int) -> None:
    """A process: one world. The terminal's Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_at_parents_death()
    if os.getppid() != parent:
        return

    def tell(*progress: int) -> None:
        news.send(Progress(*progress))

    try:
        news.send(explore(job.shape, job.limits, job.depth, job.kinds, job.findings_max, tell))
    except Exception as error:  # the command's own: it ends the command, with its name
        news.send(f"{type(error).__name__}: {error}")
