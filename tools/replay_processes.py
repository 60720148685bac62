"""Two processes for one replay: the core's half here, the ranks' half in a copy of this process.

Owns the copy and the pipe to it. Must never decide anything. Invariants: the copy gets the records in order and each
once; it is never ahead, so of two differences the earlier record's is the first; the pipe is bounded, so neither side
holds more than a few batches; the copy ends when this process does.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from daemon.processes import collect_seldom
from ipc.messages import Step
from journal.divergence import Diverged, Divergence
from journal.ranks import Overview, RankCounts, Ranks, States
from journal.reader import Record
from journal.records import Kind, decode, encode
from tools.ends import Failed

BATCH_RECORDS = 128


class Usage(NamedTuple):
    """What a process took: processor seconds, and the most memory that it had at once."""

    cpu_s: float
    peak_rss_bytes: int


def usage() -> Usage:
    """This process's own."""
    took = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(round(took.ru_utime + took.ru_stime, 3), _peak_bytes())


def _peak_bytes() -> int:
    """The most memory since this program began; `ru_maxrss` would count what started it too, before the exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0  # a kernel that does not say


class HalfLost(Failed):
    """The copy of the process died; the text says of what."""


class RemoteRanks:
    """A `journal.ranks.Ranks` in a copy of this process."""

    def __init__(self, ranks: Ranks) -> None:
        self.counts, self.notes = RankCounts(), list[str]()
        self.usage: Usage | None = None  # the copy's, when it is over
        self._overview = Overview(0, 0, [])
        self._batch: list[tuple[Any, ...]] = []
        self._found: Divergence | None = None
        self._over = False
        copies = multiprocessing.get_context("fork")
        self._pipe, theirs = copies.Pipe()
        self._copy = copies.Process(target=_serve, args=(ranks, theirs, self._pipe), daemon=True)
        self._copy.start()
        theirs.close()

    def take(self, record: Record, payload: Any = None) -> None:
        """The copy follows a record, now or soon."""
        self._batch.append(tuple(record))
        if len(self._batch) >= BATCH_RECORDS:
            self._flush()
            if self._pipe.poll():
                self._hear()
            self._raise()

    def states(self) -> States:
        """What the ranks would say in a snapshot now."""
        return States(*self._ask("states"))

    def requests_of(self, step: Step, op: int, row: int) -> list[int]:
        """The requests that an op of a step concerns that is about to come, or the one on a row."""
        found: list[int] = self._ask("requests_of", (encode(step), op, row))
        return found

    def overview(self) -> Overview:
        """Where the ranks were at the end."""
        assert self._over, "an overview is taken at the end"
        return self._overview

    def finish(self) -> None:
        """The records end here: everything that the copy knows, then it is gone."""
        try:
            self.counts, self.notes, self._overview, self.usage = self._ask("finish", raises=False)
        finally:
            self._over = True
            self._pipe.close()
            self._copy.join(1)
            if self._copy.is_alive():
                self._copy.kill()
                self._copy.join()
        self._raise()

    def _ask(self, what: str, arguments: tuple[Any, ...] = (), raises: bool = True) -> Any:
        self._flush()
        self._send((what, arguments))
        while True:
            answer = self._hear()
            if raises:
                self._raise()
            if answer is not None:
                return answer[0]

    def _flush(self) -> None:
        if self._batch:
            self._send(("take", self._batch))
            self._batch = []

    def _send(self, message: tuple[str, Any]) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._lost() from error

    def _hear(self) -> tuple[Any] | None:
        """The answer to a question; None: what came was a difference that the copy found."""
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if kind == "diverged":
            self._found = value
            return None
        if kind == "broke":
            raise HalfLost(f"the half of the replay that stands for the ranks broke: {value}")
        return (value,)

    def _raise(self) -> None:
        if self._found is not None:
            found, self._found = self._found, None
            raise Diverged(found)

    def _lost(self) -> HalfLost:
        self._copy.join(1)
        return HalfLost(f"the half of the replay that stands for the ranks ended with code {self._copy.exitcode}")


def _serve(ranks: Ranks, pipe: Connection, theirs: Connection) -> None:
    """The copy: follows what it is sent until it is asked for the end, or nobody is there any more."""
    theirs.close()  # its other end must be the only one, so that its closing is heard here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it goes to the whole group; the other half ends this one
    collect_seldom()
    code = 0
    try:
        _follow(ranks, pipe)
    except (EOFError, BrokenPipeError):
        code = 0  # nobody asks any more
    except Exception as error:
        pipe.send(("broke", f"{type(error).__name__}: {error}"))
        code = 1
    os._exit(code)  # nothing that this process inherited is to be flushed or closed twice


def _follow(ranks: Ranks, pipe: Connection) -> None:
    over = False
    while True:
        what, arguments = pipe.recv()
        if what == "take":
            try:
                for record in [] if over else arguments:
                    ranks.take(Record(*record))
            except Diverged as found:
                over = True
                pipe.send(("diverged", found.divergence))
        elif what == "states":
            pipe.send(("answer", tuple(ranks.states())))
        elif what == "requests_of":
            step, op, row = arguments
            pipe.send(("answer", ranks.requests_of(decode(Kind.STEPPED, step), op, row)))  # type: ignore[arg-type]
        else:
            ranks.finish()
            pipe.send(("answer", (ranks.counts, ranks.notes, ranks.overview(), usage())))
            return
