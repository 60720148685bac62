"""Workers: several runs at a time, a process each, or one after the other in this one.

Owns the processes of `bandmaster simulate --jobs`. Must never leave one behind: they ask the kernel to be killed with
their parent, and every way out of `run_all` kills those that still run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from daemon.processes import signal_at_parents_death
from tools.processes import start_deaf
from tools.simulate.errors import SimulateError
from tools.simulate.run import Job, Run, simulate
from tools.simulate.traffic import Trace

Watch = Callable[[int, int], None]
"""Called with the index of a job and how many of its requests have their answer."""


def run_all(trace: Trace, jobs: Sequence[Job], at_a_time: int, watch: Watch) -> list[Run]:
    """Every job's run, in the order of the jobs. Raises SimulateError when a process is lost."""
    if at_a_time <= 1 or len(jobs) <= 1:
        return [_here(trace, job, index, watch) for index, job in enumerate(jobs)]
    context = multiprocessing.get_context("spawn")
    waiting = list(enumerate(jobs))
    running: dict[Connection, tuple[int, Any]] = {}
    runs: dict[int, Run] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                index, job = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(trace, job, theirs, os.getpid()), daemon=True)
                start_deaf(process)
                theirs.close()
                running[ours] = (index, process)
            for connection in wait(list(running)):
                assert isinstance(connection, Connection), "only pipes are waited for"
                index, process = running[connection]
                news = _news(connection, process, jobs[index])
                if isinstance(news, int):
                    watch(index, news)
                    continue
                runs[index] = news
                del running[connection]
                connection.close()
                process.join()
    finally:
        for connection, (_, process) in running.items():
            process.kill()
            process.join()
            connection.close()
    return [runs[index] for index in range(len(jobs))]


def _here(trace: Trace, job: Job, index: int, watch: Watch) -> Run:
    return simulate(trace, job, lambda answered: watch(index, answered))


def _news(connection: Connection, process: Any, job: Job) -> int | Run:
    try:
        news: int | Run = connection.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        raise SimulateError(f"the process of {job.arena} {job.policy} {how}; fewer --jobs need less memory") from None
    return news


def _work(trace: Trace, job: Job, news: Connection, parent: int) -> None:
    """A process: one run. The terminal's Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_at_parents_death()
    if os.getppid() != parent:
        return
    news.send(simulate(trace, job, news.send))
