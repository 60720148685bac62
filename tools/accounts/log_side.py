"""The log's account: what became of all choices, counted from its lines alone.

Owns the reading of `daemon.log`. Must never look into the journal. A line that is torn or is no JSON is passed over and
counted; lines in front of the first `Opened` are of a life whose beginning is gone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from daemon.core.account import Account
from tools.accounts.journal_side import ACCOUNT_TOTALS, Told, ended_as

MARKS = (b'"Accepted"', b'"Refused"', b'"Finished"', b'"Opened"', b'"Recovered"', b'"lines_dropped"')


class Line(NamedTuple):
    """One line that counts: of which life, true behind which record, what it tells, and lines lost before it."""

    life: str
    sequence: int
    told: Told | None  # None: it only says that lines were lost, or that a life began
    lost: int = 0


class LogLines:
    """Iterates the lines that count; `read` opens the log afresh. `lives` are those whose beginning it has, in order.

    `unreadable` lines are torn, `headless` ones stand before the beginning of the first life.
    """

    def __init__(self, read: Callable[[], Iterable[bytes]]) -> None:
        self.unreadable = 0
        self.headless = 0
        self.lives = [line["life"] for line in map(_parsed, read()) if line is not None and _begins(line)]
        self._read = read

    def __iter__(self) -> Iterator[Line]:
        life, newest = "", 0
        for raw in self._read():
            if not any(mark in raw for mark in MARKS):
                continue
            line = _parsed(raw)
            if line is None:
                self.unreadable += 1
                continue
            lost = int(line.get("lines_dropped", 0))
            if _begins(line):
                life, newest = line["life"], int(line["sequence"])
            told = told_by(line)
            if not life:
                self.headless += told is not None
            elif told is not None or lost or _begins(line):
                newest = int(line.get("sequence", newest)) if told is not None else newest
                yield Line(life, newest, told, lost)


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """A line that may count as its values; None for one that is torn."""
    if not any(mark in raw for mark in MARKS):
        return {}
    try:
        line: Any = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else {}


def _begins(line: dict[str, Any]) -> bool:
    return line.get("event") == "Opened" and "life" in line and "sequence" in line


def told_by(line: dict[str, Any]) -> Told | None:
    """What a line tells; None for one that is about something else."""
    event = line.get("event")
    if event == "Recovered" and "next_request" in line:
        return Told("recovered", 0, "", line["live"], "")
    if "sequence" not in line:  # the line of a front end, or of a version that did not say
        return None
    if event == "Accepted":
        return Told("accepted", line["request"], line["id"], line["n"], "")
    if event == "Refused":
        return Told("refused", 0, line["id"], line["n"], line["code"])
    if event == "Finished":
        return Told("ended", line["request"], "", 1, line["reason"])
    return None


@dataclass(slots=True)
class LogCount:
    """One life as its lines have it. Of what it took over they give no numbers, only how many choices that are."""

    counts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    live: set[int] = field(default_factory=set)  # accepted in this life
    older: int = 0  # of what was taken over, how many choices have not ended

    def take(self, told: Told) -> None:
        """Count a line."""
        if told.what == "ended":
            self.counts[ended_as(told.reason)] += 1
            self.ends[told.reason] += 1
            if told.request in self.live:
                self.live.discard(told.request)
            else:
                self.older -= 1
            return
        self.counts[told.what] += told.n
        if told.what == "recovered":
            self.older += told.n
            return
        self.counts["received"] += told.n
        if told.what == "accepted":
            self.live.update(range(told.request, told.request + told.n))

    def account(self) -> Account:
        """The numbers so far; lines do not say who has a row, so all that lives waits here."""
        live = len(self.live) + self.older
        return Account(**{name: self.counts[name] for name in ACCOUNT_TOTALS}, live=live, waiting=live)
