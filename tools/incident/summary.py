"""Summary: what happened, told from the archive's own journal, so that it holds no more than that does.

Owns the counting and the text. Must never hold more than counts and the newest few of each thing.
"""

from __future__ import annotations

import io
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemon.core.inputs import EpochBegan, EpochEnded, JournalDegraded, Recovered
from daemon.core.outputs import Decided
from daemon.core.reasons import END_TEXT, EndReason, Verdict
from journal.reader import Record
from journal.records import Closed, Divergence, Kind, Opened
from tools.output import counted
from tools.why import command as why
from tools.why.ends import FAILED

LIVES_TOLD = 8
FAILED_TOLD = 10
STALLS_TOLD = 5
OF_ARRIVALS = frozenset((Verdict.ACCEPTED, Verdict.REFUSED))


@dataclass(slots=True)
class Epoch:
    """One epoch of a life: its number, model and end; `steps` that were sent in it."""

    number: int
    model: str
    steps: int = 0
    ended: str = ""


@dataclass(slots=True)
class Life:
    """One life of the daemon."""

    name: str
    opened_ns: int
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    epochs: list[Epoch] = field(default_factory=list)
    ended: str = ""
    verdicts: Counter[str] = field(default_factory=Counter)  # by choices
    arrivals: Counter[str] = field(default_factory=Counter)  # that those of a verdict came as
    refusals: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    taken_over: int = 0
    last_ns: int = 0


@dataclass(slots=True)
class Told:
    """What a reading of the journal found."""

    lives: deque[Life] = field(default_factory=lambda: deque(maxlen=LIVES_TOLD))
    lives_seen: int = 0
    failed: deque[int] = field(default_factory=lambda: deque(maxlen=FAILED_TOLD))
    failed_seen: int = 0
    drained_seen: int = 0  # of them, when the daemon ended
    divergences: list[str] = field(default_factory=list)
    trouble: deque[str] = field(default_factory=lambda: deque(maxlen=STALLS_TOLD))


def read(journal: Iterable[Record], seen: Callable[[Record], None]) -> Told:
    """Read a journal once."""
    told = Told()
    for record in journal:
        seen(record)
        if record.kind == Kind.STEPPED:
            if told.lives and told.lives[-1].epochs:
                told.lives[-1].epochs[-1].steps += 1
        elif record.kind in _TAKEN:
            _take(told, record.decode())
    return told


_TAKEN = frozenset(
    (
        Kind.OPENED,
        Kind.DECIDED,
        Kind.EPOCH_BEGAN,
        Kind.EPOCH_ENDED,
        Kind.RECOVERED,
        Kind.DIVERGED,
        Kind.JOURNAL_DEGRADED,
        Kind.CLOSED,
    )
)


def _take(told: Told, payload: Any) -> None:
    if isinstance(payload, Opened):
        told.lives.append(Life(payload.life, payload.now_ns, payload.versions, payload.settings))
        told.lives_seen += 1
        return
    if not told.lives:  # the archive begins within a life
        told.lives.append(Life("one whose beginning is not in the archive", payload.now_ns))
        told.lives_seen += 1
    life = told.lives[-1]
    life.last_ns = max(life.last_ns, payload.now_ns)
    if isinstance(payload, Decided):
        _decided(told, life, payload)
    elif isinstance(payload, EpochBegan):
        life.epochs.append(Epoch(payload.epoch, payload.facts.name))
    elif isinstance(payload, EpochEnded):
        epochs = [one for one in life.epochs if one.number == payload.epoch]
        for epoch in epochs or [Epoch(payload.epoch, "")]:
            epoch.ended = payload.why
            life.epochs += [] if epochs else [epoch]
    elif isinstance(payload, Recovered):
        life.taken_over += len(payload.groups)
    elif isinstance(payload, Divergence):
        told.divergences.append(
            f"step {payload.seq} of epoch {payload.epoch}: {payload.what} of {payload.left} and {payload.right} differ"
            + (f"; op {payload.op}, {payload.kind} of {payload.band}" if payload.op >= 0 else "")
        )
    elif isinstance(payload, JournalDegraded):
        told.trouble.append(f"{_time(payload.now_ns)} the journal {'is' if payload.durable else 'is not'} durable")
    elif isinstance(payload, Closed):
        life.ended = f"in order: {payload.why}"


def _decided(told: Told, life: Life, decided: Decided) -> None:
    choices = decided.numbers.get("n", 1) if decided.verdict in OF_ARRIVALS else 1
    life.verdicts[decided.verdict] += choices
    life.arrivals[decided.verdict] += 1
    if decided.verdict == Verdict.REFUSED:
        life.refusals[decided.reason] += choices
    elif decided.verdict == Verdict.ENDED:
        life.ends[decided.reason] += 1
        if decided.reason in FAILED:
            told.failed_seen += 1
            if decided.reason == EndReason.DRAINED:  # of them there is nothing else to tell
                told.drained_seen += 1
            else:
                told.failed.append(decided.request)
    elif decided.verdict == Verdict.STALLED:
        told.trouble.append(f"{_time(decided.now_ns)} nothing could be scheduled: {decided.reason}")


def _time(ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(ns / 1e9)) + "Z"


# --- text ----------------------------------------------------------------------------------------------------------


def text(told: Told, journal: Path, notes: list[str], checked: str) -> Iterator[str]:
    """The lines of the summary."""
    yield "What this archive is"
    yield "  journal/ is a journal: bandmaster replay check journal, why journal, view journal, export journal"
    yield f"  {checked}"
    yield from (f"  {note}" for note in notes)
    if told.divergences:
        yield ""
        yield "Ranks that parted"
        yield from (f"  {line}" for line in told.divergences)
    if told.trouble:
        yield ""
        yield "Trouble"
        yield from (f"  {line}" for line in told.trouble)
    left_out = told.lives_seen - len(told.lives)
    for life in reversed(told.lives):
        yield ""
        yield from _life(life, newest=life is told.lives[-1])
    if left_out:
        yield f"(and {left_out} earlier lives)"
    yield ""
    drained = f", {told.drained_seen} of them drained as the daemon ended" if told.drained_seen else ""
    newest = f"; the newest{' of the others' if drained else ''}:" if told.failed else ""
    yield f"Requests that failed: {told.failed_seen}{drained}{newest}"
    for number in dict.fromkeys(reversed(told.failed)):
        yield from (f"  {line}" for line in _why(number, journal))


def _life(life: Life, newest: bool) -> Iterator[str]:
    cut = "it was cut off, or goes on" if newest else "it was cut off: the daemon was killed, or it crashed"
    yield f"Life {life.name}, from {_time(life.opened_ns)}" + (f" to {_time(life.last_ns)}" if life.last_ns else "")
    yield f"  ended {life.ended or f'by no record: {cut}'}"
    if life.versions:
        yield "  " + ", ".join(f"{name} {version}" for name, version in life.versions.items())
    if life.taken_over:
        yield f"  took over {counted(life.taken_over, 'request')} of the life before"
    last = "until the life ended" if life.ended else cut
    for epoch in life.epochs:
        model = f" of {epoch.model}" if epoch.model else ""
        yield f"  epoch {epoch.number}{model}, {counted(epoch.steps, 'step')}: {epoch.ended or last}"
    yield f"  decided: {', '.join(_counts(life)) or 'nothing'}"
    for code, count in life.refusals.most_common():
        yield f"  refused {count}: {code}"
    for reason, count in life.ends.most_common():
        words = END_TEXT[EndReason(reason)] if reason in END_TEXT else ""
        yield f"  ended {count}: {reason}{f' ({words})' if words else ''}"


def _counts(life: Life) -> Iterator[str]:
    """How often each verdict was, by choices, as accounts and metrics count."""
    for name, count in life.verdicts.most_common():
        arrivals = life.arrivals[name]
        yield f"{name} {count}" + (f" (choices of {counted(arrivals, 'arrival')})" if arrivals != count else "")


def _why(request: int, journal: Path) -> list[str]:
    """The life of one request, as `bandmaster why` tells it."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = why.main([str(request), str(journal)])
    if code:
        return [f"request {request}: {err.getvalue().strip() or 'it cannot be told'}"]
    return out.getvalue().splitlines()
