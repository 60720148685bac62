"""Faults: what a process is told to do wrong, when, and how often; read from one environment variable.

Owns the grammar, the table of points and actions, and the firing. Must never fire without BANDMASTER_FAULTS, nor for a
process or point that no specification names. Invariants: what a wrong text means is said before anything starts; every
firing is on stderr and, where BANDMASTER_FAULTS_DIR names a directory, a file there: a fault that was claimed by one
process is not repeated by the one that takes its place.

    BANDMASTER_FAULTS   specification[;specification...]
    specification       PROCESS:POINT=NUMBER:ACTION[:OPTION=VALUE...]      NUMBER may be LOW..HIGH, drawn with `seed`
    PROCESS             daemon | rank-STAGE-RANK | rank-*
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from daemon.exits import DaemonError, Exit

VARIABLE = "BANDMASTER_FAULTS"
DIRECTORY_VARIABLE = "BANDMASTER_FAULTS_DIR"
MS_MAX = 86_400_000
PROCESS = re.compile(r"daemon|rank-(\d+-\d+|\*)")
KINDS = ("daemon", "rank")


class Point(NamedTuple):
    """A place in a process where a fault may strike."""

    kind: str  # of process
    about: str


class Action(NamedTuple):
    """What a fault does, at which points it can, and what must come of it."""

    points: tuple[str, ...]
    about: str
    then: str


POINTS: dict[str, Point] = {
    "step": Point("rank", "a step has come from the daemon and is not applied yet; NUMBER is its seq"),
    "forward": Point("rank", "the forward of a step is about to be launched; NUMBER is the step's seq"),
    "report": Point("rank", "the report of a step is about to be sent; NUMBER is the step's seq"),
    "journal.write": Point("daemon", "bytes are about to be written to the journal, the NUMBERth time in this process"),
    "journal.written": Point("daemon", "they were written, and nothing that follows from them was sent yet"),
    "journal.fsync": Point("daemon", "the journal is about to be made durable, the NUMBERth time in this process"),
    "clock": Point("daemon", "the clock is read, the NUMBERth time in this process"),
}
_RANK = ("step", "forward", "report")
_DISK = ("journal.write", "journal.fsync")
_DIGEST = "the epoch ends before a token of that step leaves; step, rank and digest are named; a new epoch goes on"
_RANK_LOST = "the epoch ends, a new one goes on with every request"
ACTIONS: dict[str, Action] = {
    "kill": Action(
        (*_RANK, "journal.write", "journal.written", "journal.fsync"),
        "SIGKILL to itself",
        "the process is replaced; every request goes on where its client stands",
    ),
    "stop": Action(
        (*_RANK, "journal.write", "journal.written"),
        "SIGSTOP to itself",
        "its silence is noticed within the timeout of its kind, it is killed and replaced; every request goes on",
    ),
    "raise": Action(("forward",), "an exception out of the model", f"the rank names it and ends; {_RANK_LOST}"),
    "oom": Action(("forward",), "MemoryError out of the model", f"the rank names it and ends; {_RANK_LOST}"),
    "delay": Action(
        _RANK,
        "every NUMBER from there on waits `ms=LOW..HIGH`, drawn with `seed`",
        "slower, nothing else: digests and outputs are the same",
    ),
    "drop": Action(("step", "report"), "the message is thrown away", f"the gap is noticed at the next; {_RANK_LOST}"),
    "corrupt_logical": Action(("report",), "one bit of the logical digest is wrong", _DIGEST),
    "corrupt_layout": Action(("report",), "one bit of the layout digest is wrong", _DIGEST),
    "corrupt_sampled": Action(("report",), "one bit of the digest of sampled tokens is wrong", _DIGEST),
    "fail": Action(
        _DISK, "an I/O error (EIO)", "the same records go into a new segment; nothing is acknowledged before that"
    ),
    "full": Action(
        ("journal.write",),
        "no space left (ENOSPC), `times` in a row",
        "the records are kept and written in a new segment; if that fails too, the daemon ends and is restarted",
    ),
    "short": Action(("journal.write",), "half of the bytes are written", "the rest follows; no record is cut"),
    "skew": Action(
        ("clock",), "from there on this process's clock differs by `ms=AMOUNT`", "no output and no decision changes"
    ),
}
OPTIONS = ("seed", "times", "ms")


class FaultInjected(Exception):
    """An error that was asked for by a fault specification; it must end what it would end if it were real."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One specification: `number` is where it strikes; `low_ms` to `high_ms` are the bounds of a delay or a skew."""

    text: str
    process: str
    point: str
    number: int
    action: str
    seed: int = 0
    times: int = 1
    low_ms: int = 0
    high_ms: int = 0

    def strikes(self, count: int) -> bool:
        """Whether it strikes at this count of its point."""
        if self.action == "delay":
            return count >= self.number
        return self.number <= count < self.number + self.times


def _refuse(text: str, why: str) -> DaemonError:
    return DaemonError(Exit.USAGE, f"{VARIABLE}: {text!r}: {why}")


def _range(text: str, value: str, low: int) -> tuple[int, int]:
    first, dots, last = value.partition("..")
    try:
        bounds = int(first), int(last if dots else first)
    except ValueError:
        raise _refuse(text, f"{value!r} is neither a whole number nor LOW..HIGH") from None
    if not low <= bounds[0] <= bounds[1] <= MS_MAX:
        raise _refuse(text, f"{value!r} must lie between {low} and {MS_MAX}, the lower bound first")
    return bounds


def parse_one(text: str) -> Spec:
    """One specification; raises DaemonError (usage) that says what is wrong and what is allowed."""
    process, *parts = text.split(":")
    if not PROCESS.fullmatch(process):
        raise _refuse(text, f"there is no process {process!r}; allowed: daemon, rank-STAGE-RANK, rank-*")
    pairs = dict(part.split("=", 1) for part in parts if "=" in part)
    bare = [part for part in parts if "=" not in part]
    points = [name for name in pairs if name in POINTS]
    if len(bare) != 1 or len(points) != 1 or len(pairs) + 1 != len(parts):
        raise _refuse(text, "exactly one POINT=NUMBER and one ACTION belong in it; `bandmaster faults list` has them")
    point, action = points[0], bare[0]
    if action not in ACTIONS:
        raise _refuse(text, f"there is no action {action!r}; allowed: {', '.join(ACTIONS)}")
    unknown = sorted(pairs.keys() - {point, *OPTIONS})
    if unknown:
        raise _refuse(text, f"there is no option {unknown[0]!r}; allowed: {', '.join(OPTIONS)}")
    kind = process.partition("-")[0]
    if POINTS[point].kind != kind or point not in ACTIONS[action].points:
        places = ", ".join(name for name in ACTIONS[action].points if POINTS[name].kind == kind) or "nowhere"
        raise _refuse(text, f"{action} cannot strike a {kind} at {point}; it can at: {places}")
    needs_ms = action in ("delay", "skew")
    if needs_ms != ("ms" in pairs):
        raise _refuse(text, f"{action} {'needs' if needs_ms else 'has no'} ms=")
    low, high = _range(text, pairs.get("ms", "0"), -MS_MAX if action == "skew" else 0)
    seed, _ = _range(text, pairs.get("seed", "0"), 0)
    times, _ = _range(text, pairs.get("times", "1"), 1)
    number = random.Random(f"{seed}/{text}").randint(*_range(text, pairs[point], 1))
    return Spec(text, process, point, number, action, seed, times, low, high)


def parse(text: str) -> list[Spec]:
    """All specifications of a text, empty ones left out."""
    return [parse_one(part.strip()) for part in text.split(";") if part.strip()]


@dataclass(slots=True)
class Faults:
    """The faults of one process. Falsy without any, so that hooks are only put in where there are some."""

    specs: list[Spec]
    process: str
    directory: Path | None = None
    counts: dict[str, int] = field(default_factory=dict)
    claimed: dict[str, bool] = field(default_factory=dict)  # specification -> whether it is ours to fire
    draws: dict[str, random.Random] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.specs)

    def at(self, *points: str) -> bool:
        """Whether any fault strikes at one of these points."""
        return any(spec.point in points for spec in self.specs)

    def hit(self, point: str, number: int = 0) -> Iterator[Spec]:
        """The faults that strike here and now, those that end or stop the process done already.

        `number` 0: the point is counted here. Raises FaultInjected or MemoryError for `raise` and `oom`, OSError for
        `fail` and `full`.
        """
        if not number:
            number = self.counts[point] = self.counts.get(point, 0) + 1
        for spec in self.specs:
            if spec.point == point and spec.strikes(number) and self._claim(spec, number):
                self._strike(spec)
                yield spec

    def delay_s(self, spec: Spec) -> float:
        """The next drawn delay of a specification, in seconds."""
        draw = self.draws.setdefault(spec.text, random.Random(f"{spec.seed}/{spec.text}/{self.process}"))
        return draw.randint(spec.low_ms, spec.high_ms) / 1000

    def _claim(self, spec: Spec, number: int) -> bool:
        """Whether this process fires it: the first one that reaches it does, at its first strike and the further ones.

        A delay is everybody's; the others belong to the first process that comes there.
        """
        known = self.claimed.get(spec.text)
        if known is None:
            known = self.claimed[spec.text] = self._first(spec, number)
        return known

    def _first(self, spec: Spec, number: int) -> bool:
        told = {"spec": spec.text, "process": self.process, "pid": os.getpid(), "number": number}
        line = json.dumps(told | {"monotonic_ns": time.monotonic_ns()})
        if self.directory is not None:
            name = re.sub(r"[^\w.=-]", "_", spec.text)
            name += f".{self.process}" if "*" in spec.process or spec.action == "delay" else ""
            try:
                handle = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                return spec.action == "delay"
            with os.fdopen(handle, "w") as file:
                file.write(line + "\n")
        with suppress(OSError):  # a closed stderr is no fault that was asked for
            sys.stderr.write(json.dumps({"event": "FaultFired"} | told) + "\n")
            sys.stderr.flush()
        return True

    def _strike(self, spec: Spec) -> None:
        match spec.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise FaultInjected(f"asked for by {VARIABLE}: {spec.text}")
            case "oom":
                raise MemoryError(f"asked for by {VARIABLE}: {spec.text}")
            case "fail":
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (asked for by {VARIABLE}: {spec.text})")
            case "full":
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (asked for by {VARIABLE}: {spec.text})")


def planted(process: str, environ: Mapping[str, str]) -> Faults:
    """The faults that the environment asks of this process; raises DaemonError (usage) for a text that is none."""
    specs = [spec for spec in parse(environ.get(VARIABLE, "")) if _is(spec.process, process)]
    named = environ.get(DIRECTORY_VARIABLE, "")
    if specs and named and not Path(named).is_dir():
        raise DaemonError(Exit.USAGE, f"{DIRECTORY_VARIABLE}: {named!r} is no directory; make it first")
    return Faults(specs, process, Path(named) if named else None)


def _is(pattern: str, process: str) -> bool:
    return pattern == process or (pattern == "rank-*" and process.startswith("rank-"))
