"""The check: journal, log and metrics held against each other, at every scrape and at the end of every life.

Owns the walk over all three at once, in the order of records, and what is a disagreement. Must never change a file.
Memory is bounded by what is live. What one moment is: everything up to a record of a life. The journal counts its
records up to there, the log its lines whose `sequence` is not behind it, and a scrape names its record itself.

A life that was killed may lack the lines of its last records, one whose machine died the last records of its lines:
both are notes. Lines of which the log itself says that they were lost are counted as if they stood there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from daemon.core.account import Account
from daemon.core.state import CoreState
from journal.reader import Record
from journal.records import Kind
from tools.accounts.finding import Findings
from tools.accounts.journal_side import JournalCount, LifeCount, Told
from tools.accounts.log_side import Line, LogCount, LogLines
from tools.accounts.metrics_side import Scrape

IN_METRICS = Account._fields
IN_LOG = ("received", "refused", "accepted", "recovered", "finished", "aborted", "failed", "live")


@dataclass(slots=True)
class LifeResult:
    """One life: the three accounts at its end (None: nothing to count there); whether it ended in order."""

    number: int
    life: str
    account: Account
    log: Account | None
    metrics: Account | None
    ends: dict[str, int]
    scrapes: int
    closed: bool
    reopened: int
    lines_lost: int
    goes_on: bool


@dataclass(slots=True)
class Result:
    """All lives, and everything that does not agree."""

    lives: list[LifeResult] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    records: int = 0
    lines: int = 0
    scrapes: int = 0
    door: int = 0  # turned away before they were received, as the last scrape of each life has it

    @property
    def agrees(self) -> bool:
        """Nothing was found."""
        return not self.findings.count


class Checker:
    """Walks records, lines and scrapes side by side. `lines` None: there is no log; scrapes come in order.

    `alive`: the newest life goes on while it is read.
    """

    def __init__(self, lines: LogLines | None, scrapes: Iterable[Scrape] = (), alive: bool = False) -> None:
        self.result = Result()
        self.findings = self.result.findings
        self.journal = JournalCount(self.findings)
        self._source = lines
        self._alive = alive
        self._lines: Iterator[Line] = iter(lines if lines is not None else ())
        self._line = next(self._lines, None)
        self._scrapes = iter(scrapes)
        self._scrape = next(self._scrapes, None)
        self._log = LogCount()
        self._log_begins = 0  # records up to here were counted before the log is read: a snapshot's
        self._announced = 0  # lines of this life of which the log says that they were lost
        self._missing = 0  # that are in fact not there
        self._said: set[tuple[str, str]] = set()  # what was found in this life already
        self._newest: Scrape | None = None  # of this life
        self._in_life = 0  # scrapes
        self._unsure: list[Told] = []  # without a line in the last iteration that the log has of this life

    def begin_at(self, sequence: int, life: str, state: CoreState) -> None:
        """Counting begins at a snapshot behind this record, in the journal and in the log."""
        self.journal.begin_at(sequence, life, state)
        self._log_begins = sequence
        self._start_log()

    def run(self, records: Iterable[Record], seen: Callable[[Record], None]) -> Result:
        """Read everything; raises what the walk raises."""
        for record in records:
            if record.kind == Kind.OPENED:
                self._end_life(last=False)
            self.journal.take(record)
            if record.kind == Kind.OPENED:
                self._start_log()
            self._behind(record.sequence)
            self.result.records += 1
            seen(record)
        self._end_life(last=True)
        if self._line is not None:
            self.findings.note(f"the log has lines of life {self._line.life[:8]}, which the journal does not have")
        if self._source is not None and self._source.headless:
            self.findings.note(f"{self._source.headless} lines of the log are of a life whose beginning is gone")
        if self._scrape is not None:
            text = f"a scrape names record {self._scrape.sequence} of life {self._scrape.life[:8]}, which is not there"
            self.findings.add("metrics", 0, self._scrape.sequence, text)
        if self._source is not None and self._source.unreadable:
            self.findings.note(f"{self._source.unreadable} lines of the log are torn")
        return self.result

    # --- one moment

    def _behind(self, sequence: int) -> None:
        """Everything up to this record has been read."""
        while self._line is not None and self._line.life == self.journal.life.life and self._line.sequence <= sequence:
            self._take_group(self._line.sequence)
        while self._scrape is not None and self._of_this_life(self._scrape) and self._scrape.sequence <= sequence:
            self.journal.settle(sequence)
            self._at_scrape(self._scrape)
            self._scrape = next(self._scrapes, None)

    def _of_this_life(self, scrape: Scrape) -> bool:
        return scrape.life == self.journal.life.life

    def _take_group(self, sequence: int) -> None:
        """The lines of one iteration, held against the records since the iteration before."""
        life, told = self.journal.life, list[Told]()
        while self._line is not None and (self._line.life, self._line.sequence) == (life.life, sequence):
            self._announced += self._line.lost
            if self._line.told is not None and not 0 < sequence <= self._log_begins:
                told.append(self._line.told)
                self._log.take(self._line.told)
                self.result.lines += 1
            self._line = next(self._lines, None)
        matched = [one for one in told if one.what != "recovered"]
        due = self._due(sequence)
        if matched == due:
            return
        missing, extra = Counter(due) - Counter(matched), Counter(matched) - Counter(due)
        if not missing and not extra:
            self._find("log", sequence, "order", f"the lines up to record {sequence} are not in the order of decisions")
        if self._line is None or self._line.life != life.life:  # its last lines: what comes behind may be cut off
            reached = max((at for at, one in enumerate(due) if one in matched), default=-1)
            self._unsure = [one for one in due[reached + 1 :] if one in missing]
            missing -= Counter(self._unsure)
        for one in missing.elements():
            self._lack(sequence, one)
        for one in extra:
            self._find("log", sequence, "extra", f"the line of {_words(one)} has no record")

    def _due(self, sequence: int) -> list[Told]:
        """What the records up to here tell and no line has told yet."""
        due, events = list[Told](), self.journal.events
        while events and events[0].sequence <= sequence:
            due.append(events.popleft().told)
        return due

    def _lack(self, sequence: int, told: Told) -> None:
        """A record without its line. One that the log says is lost counts as if it stood there."""
        self._missing += 1
        if self._missing <= self._announced:
            self._log.take(told)
            return
        self._find("log", sequence, "missing", f"{_words(told)} has no line")

    def _at_scrape(self, scrape: Scrape) -> None:
        life = self.journal.life
        self.result.scrapes += 1
        self._in_life += 1
        if not scrape.sequence:  # nothing was written yet
            return
        account, counted = scrape.account, life.account()
        for problem in account.problems():
            self._find("metrics", scrape.sequence, problem.split(" is ")[0], problem)
        for problem in counted.problems():
            self._find("journal", scrape.sequence, problem.split(" is ")[0], problem)
        self._compare("metrics", scrape.sequence, account, counted, IN_METRICS)
        ends = {reason: count for reason, count in scrape.ends.items() if count}
        if ends != dict(life.ends) and self._counts_from_start(life):
            text = f"ends by reason are {ends} in the metrics, {dict(life.ends)} in the journal"
            self._find("metrics", scrape.sequence, "reasons", text)
        if scrape.failures and scrape.failures != (self._newest.failures if self._newest else 0):
            text = f"{scrape.failures} failures within metrics and log themselves"
            self._find("metrics", scrape.sequence, "failures", text)
        self._log_at(scrape.sequence, counted)
        self._newest = scrape

    def _counts_from_start(self, life: LifeCount) -> bool:
        return life.began < life.last and not self._log_begins

    def _log_at(self, sequence: int, counted: Account) -> None:
        """The log behind a record, where it reaches so far."""
        if self._source is None or self._line is None or self._line.life != self.journal.life.life:
            return  # it may have been cut off, which the end of the life decides
        for told in self._due(sequence):
            self._lack(sequence, told)
        account = self._log.account()
        for problem in account.problems():
            self._find("log", sequence, problem.split(" is ")[0], problem)
        self._compare("log", sequence, account, counted, IN_LOG)

    def _compare(self, side: str, sequence: int, account: Account, counted: Account, names: Iterable[str]) -> None:
        for name in names:
            told, expected = getattr(account, name), getattr(counted, name)
            if told != expected:
                self._find(side, sequence, name, f"{name} is {told} in the {side} and {expected} in the journal")

    def _find(self, side: str, sequence: int, what: str, text: str) -> None:
        """A finding; of each kind the first of a life is told, the others are counted."""
        if what not in ("missing", "extra") and (side, what) in self._said:
            self.findings.count += 1
            return
        self._said.add((side, what))
        self.findings.add(side, self.journal.life.number, sequence, text)

    # --- lives

    def _start_log(self) -> None:
        """The log's lines of the life that was opened; those of others in front of them are passed over."""
        self._log, self._announced, self._missing = LogCount(), 0, 0
        self._said, self._newest, self._in_life, self._unsure = set(), None, 0, []
        life = self.journal.life
        if self._log_begins:
            self._log = _as_if_read(life)
        if self._source is None:
            return
        passed = 0
        while life.life in self._source.lives and self._line is not None and self._line.life != life.life:
            passed += self._line.told is not None
            self._line = next(self._lines, None)
        if passed:
            self.findings.note(f"the log has {passed} lines of lives that the journal does not have")

    def _end_life(self, last: bool) -> None:
        """The end of a life: what of it is in one and not in the other."""
        if not self.journal.lives:
            return
        life = self.journal.life
        closed, goes_on = life.closed is not None, last and self._alive
        self.journal.settle(life.last) if closed else self.journal.end()
        self._behind(life.last)
        beyond = 0
        while self._line is not None and self._line.life == life.life:
            beyond += self._line.told is not None
            self._line = next(self._lines, None)
        self._scrapes_beyond(life, closed or goes_on)
        tail = self._unsure + self._due(life.last)
        log = self._log_at_end(life, tail, 0 if goes_on else beyond, closed)
        counted = life.account()
        for problem in counted.problems():
            self._find("journal", life.last, problem.split(" is ")[0], problem)
        metrics = self._newest.account if self._newest is not None else None
        lost = min(self._missing, self._announced)
        self.result.door += self._newest.door if self._newest is not None else 0
        ends, scrapes = dict(life.ends), self._in_life
        self.result.lives.append(
            LifeResult(
                life.number, life.life, counted, log, metrics, ends, scrapes, closed, life.reopened, lost, goes_on
            )
        )
        self._log_begins = 0

    def _scrapes_beyond(self, life: LifeCount, whole: bool) -> None:
        """Scrapes behind records that the journal does not have."""
        beyond = 0
        while self._scrape is not None and self._of_this_life(self._scrape):
            beyond += 1
            self._scrape = next(self._scrapes, None)
        text = f"{beyond} scrapes of life {life.number} are of records that the journal does not have"
        if beyond and whole:
            self._find("metrics", life.last, "beyond", text)
        elif beyond:
            self.findings.note(f"{text}: its machine died, or its disk failed")

    def _log_at_end(self, life: LifeCount, tail: list[Told], beyond: int, closed: bool) -> Account | None:
        """The log's account of a whole life; None where the log does not have it."""
        if self._source is None:
            return None
        if life.life not in self._source.lives and not self._log_begins:
            self.findings.note(f"life {life.number} ({life.life[:8]}) is not in the log")
            return None
        if beyond:
            text = f"{beyond} lines of life {life.number} are true behind records that the journal does not have"
            if closed:
                self._find("log", life.last, "beyond", text)
            else:
                self.findings.note(f"{text}: its machine died, or its disk failed")
        for told in tail if closed else ():
            self._lack(life.last, told)
        if tail and not closed:
            self.findings.note(f"life {life.number} has no end: the lines of its last {len(tail)} events are missing")
            return self._log.account()
        account = self._log.account()
        for problem in account.problems():
            self._find("log", life.last, problem.split(" is ")[0], problem)
        if not beyond:
            self._compare("log", life.last, account, life.account(), IN_LOG)
        return account


def _as_if_read(life: LifeCount) -> LogCount:
    """What the lines up to a snapshot would have said, had they been read."""
    counts = Counter({name: life.counts[name] for name in IN_LOG if name != "live"})
    return LogCount(counts, Counter(life.ends), set(life.live))


def _words(told: Told) -> str:
    if told.what == "refused":
        return f"the refusal of {told.id!r} ({told.reason})"
    return f"request {told.request}, {told.what}{f' ({told.reason})' if told.reason else ''}"
