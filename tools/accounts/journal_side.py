"""The journal's account: what became of all choices, counted from records alone.

Owns the reading of records as events. Must never ask the core: what it decided is counted, not decided again. Memory is
bounded by what is live or not acknowledged. Invariants: every new arrival has one decision, and only an arrival whose
id is known with the same content has none; a choice ends once, in the life in which it is live; what a life takes over
is what the life before it left.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from daemon.core.account import Account
from daemon.core.arrival import content_digest
from daemon.core.inputs import Acknowledged, Arrived, FrontEndLost, Recovered
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided
from daemon.core.reasons import LOSES_ROW, EndReason, Verdict
from daemon.core.requests import END_EVENT, Event
from daemon.core.state import ENDED_GROUPS_MAX, CoreState
from journal.reader import Record
from journal.records import INPUT_KINDS, Closed, Kind, Opened
from tools.accounts.finding import Findings

ENDED_AS = {Event.FINISH: "finished", Event.ABORT: "aborted", Event.FAIL: "failed"}
DECODED = frozenset(
    {Kind.OPENED, Kind.ARRIVED, Kind.RECOVERED, Kind.ACKNOWLEDGED, Kind.FRONT_END_LOST, Kind.DECIDED, Kind.CLOSED}
)
Key = tuple[str, str]  # front end and id
ACCOUNT_TOTALS = ("received", "refused", "accepted", "recovered", "finished", "aborted", "failed", "repeated")


class Told(NamedTuple):
    """An event of which the log has a line: `accepted` or `ended` by number, `refused` by the front end's id."""

    what: str
    request: int
    id: str
    n: int
    reason: str


class Entry(NamedTuple):
    """Such an event, and the number of its record."""

    sequence: int
    told: Told


def ended_as(reason: str) -> str:
    """finished, aborted or failed; raises ValueError for what is no reason."""
    return ENDED_AS[END_EVENT[EndReason(reason)]]


@dataclass(slots=True)
class Known:
    """An id that is not forgotten: the digest of its content, its choices, and those that have not ended."""

    digest: bytes
    numbers: range
    live: set[int]


@dataclass(slots=True)
class LifeCount:
    """One life of the daemon as the journal has it. `began` is the newest record before it is counted."""

    number: int
    life: str
    config: CoreConfig
    began: int
    last: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)  # by reason
    live: set[int] = field(default_factory=set)
    holding: set[int] = field(default_factory=set)
    reopened: int = 0  # of `recovered`, those that had ended in an earlier life
    took_over: bool = False  # it has said all that goes on in it, or is the first
    closed: Closed | None = None

    def account(self) -> Account:
        """The numbers behind the newest record."""
        totals = {name: self.counts[name] for name in ACCOUNT_TOTALS}
        live, holding = len(self.live), len(self.holding)
        return Account(**totals, live=live, waiting=live - holding, holding=holding)


class JournalCount:
    """Takes records in order; `life` is the one that they are of, `events` what is to stand in the log."""

    def __init__(self, findings: Findings) -> None:
        self.lives: list[LifeCount] = []
        self.events: deque[Entry] = deque()
        self._findings = findings
        self._known: dict[Key, Known] = {}
        self._ended: dict[Key, None] = {}  # keys of `_known` of which nothing lives, the oldest first
        self._key_of: dict[int, Key] = {}  # of every choice of what is known
        self._known_before: dict[int, Key] = {}  # the same at the end of the life before
        self._arrived: Arrived | None = None  # and not decided about
        self._taking_over: set[int] = set()  # numbers whose RECOVERED is still to come
        self._taken: set[int] = set()  # all that is taken over
        self._left: set[int] = set()  # live at the end of the life before
        self._newest_input = 0
        self._cut_behind = 0  # the kind of the newest input of the life before
        self._next_request = 1

    @property
    def life(self) -> LifeCount:
        """The life that is read."""
        return self.lives[-1]

    def begin_at(self, sequence: int, life: str, state: CoreState) -> None:
        """Go on from a snapshot behind a record: what the core had counted by then is taken as it is."""
        count = LifeCount(1, life, state.config, sequence, sequence, took_over=True)
        for name in ACCOUNT_TOTALS:
            count.counts[name] = getattr(state.totals, name)
        count.live = set(state.requests)
        count.holding = {number for number, request in state.requests.items() if request.row >= 0}
        self.lives.append(count)
        self._next_request = state.next_request
        for group in state.groups.values():
            first = group.accepted.first_request
            numbers = range(first, first + group.accepted.n)
            live = count.live.intersection(numbers)
            self._know((state.frontends[group.frontend], group.id), group.digest, numbers, live)

    def take(self, record: Record) -> None:
        """Count one record."""
        if record.kind not in DECODED:
            if record.kind in INPUT_KINDS:
                self._input(record)
        else:
            item: Any = record.decode()
            if isinstance(item, Opened):
                self._opened(record, item)
            elif isinstance(item, Decided):
                self._decided(record, item)
            elif isinstance(item, Closed):
                self.settle(record.sequence)
                self._closed(record, item)
            else:
                self._input(record)
                self._take_input(record, item)
        if self.lives:
            self.life.last = record.sequence

    def settle(self, sequence: int) -> None:
        """All that the newest input led to has been read: an arrival without a decision was a repetition."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return
        known = self._known.get((arrived.frontend, arrived.generate.id))
        if known is not None and known.digest == content_digest(arrived.generate):
            self.life.counts["repeated"] += 1
            return
        self._find(sequence, f"request {arrived.generate.id!r} of {arrived.frontend} arrived and was not decided about")

    def end(self) -> None:
        """The journal ends here. An input whose decisions were never written is no disagreement: nobody was told."""
        self._arrived = None

    # --- inputs

    def _input(self, record: Record) -> None:
        self.settle(record.sequence - 1)
        if self._taking_over and record.kind != Kind.RECOVERED:
            self._find(record.sequence, f"{len(self._taking_over)} choices were taken over without a decision")
            self._taking_over = set()
        self._newest_input = record.kind

    def _take_input(self, record: Record, item: Any) -> None:
        if isinstance(item, Arrived):
            self._arrived = item
        elif isinstance(item, Recovered):
            self._recovered(record, item)
        elif isinstance(item, Acknowledged):
            for id in item.ids:
                known = self._known.get((item.frontend, id))
                if known is not None and not known.live:
                    self._forget((item.frontend, id))
        elif isinstance(item, FrontEndLost):  # what of it lives ends by decisions that follow
            for key in [key for key in self._known if key[0] == item.frontend]:
                self._forget(key)

    def _recovered(self, record: Record, item: Recovered) -> None:
        """The choices that go on, held against what the life before left; `left` parts follow."""
        if not self._taken and not self._known_before:
            self._known_before, self._key_of, self._known, self._ended = self._key_of, {}, {}, {}
        for group in item.groups:
            first = group.accepted.first_request
            live = {first + at for at, choice in enumerate(group.choices) if choice.ended is None}
            digest = group.digest or content_digest(group.generate)
            numbers = range(first, first + group.accepted.n)
            self._know((group.frontend, group.accepted.id), digest, numbers, set(live))
            self._taking_over |= live
        self._taken |= self._taking_over
        if not item.left:
            self.life.took_over = True
            self._next_request = max(self._next_request, item.next_request)
            if len(self.lives) > 1:
                self._compare_with_before(record, self._taken)

    def _compare_with_before(self, record: Record, taken: set[int]) -> None:
        before = self.lives[-2]
        again = {number for number in taken - self._left if number in self._known_before}
        self.life.reopened = len(again)
        if again:
            self._findings.note(
                f"life {self.life.number}: {len(again)} choices that had ended start again: what the life before had"
                " said was not believed"
            )
        new, gone = taken - self._left - again, self._left - taken
        if not new and not gone:
            return
        text = f"takes over {_some(new)} that the life before did not leave, and lacks {_some(gone)} that it left"
        if before.closed is not None or (new and self._cut_behind != Kind.ARRIVED):
            self._find(record.sequence, text)
        else:
            self._findings.note(f"life {self.life.number} {text}: decisions about the last input were never written")

    # --- decisions

    def _decided(self, record: Record, item: Decided) -> None:
        life, number = self.life, item.request
        if item.verdict in (Verdict.ACCEPTED, Verdict.REFUSED):
            self._answered(record, item)
        elif item.verdict == Verdict.RECOVERED:
            if number not in self._taking_over or number in life.live:
                self._find(record.sequence, f"request {number} is recovered and was not taken over")
            self._taking_over.discard(number)
            life.live.add(number)
            life.counts["recovered"] += 1
        elif item.verdict == Verdict.ENDED:
            self._ends(record, item)
        elif item.verdict == Verdict.ADMITTED:
            life.holding.add(number)
        elif item.verdict in LOSES_ROW:
            life.holding.discard(number)

    def _answered(self, record: Record, item: Decided) -> None:
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            self._find(record.sequence, f"{item.verdict} stands behind no arrival")
            return
        generate, life = arrived.generate, self.life
        choices = generate.n if 1 <= generate.n <= life.config.n_max else 1
        if item.numbers.get("n") != choices:
            text = f"request {generate.id!r} has {choices} choices, its decision says {item.numbers.get('n')}"
            self._find(record.sequence, text)
        life.counts["received"] += choices
        life.counts[item.verdict] += choices
        first = item.request
        if item.verdict == Verdict.ACCEPTED:
            if first != self._next_request:
                self._find(record.sequence, f"request {first} is accepted, {self._next_request} is the next number")
            self._next_request = first + choices
            numbers = range(first, first + choices)
            life.live.update(numbers)
            self._know((arrived.frontend, generate.id), content_digest(generate), numbers, set(numbers))
        self._tell(record, Told(item.verdict, first, generate.id, choices, item.reason))

    def _ends(self, record: Record, item: Decided) -> None:
        life, number = self.life, item.request
        if number not in life.live:
            self._find(record.sequence, f"request {number} ends and is not live")
            return
        life.live.discard(number)
        life.holding.discard(number)
        life.counts[ended_as(item.reason)] += 1
        life.ends[item.reason] += 1
        self._tell(record, Told("ended", number, "", 1, item.reason))
        key = self._key_of.get(number)
        if key is None:  # of a front end that was lost
            return
        known = self._known[key]
        known.live.discard(number)
        if not known.live:
            self._ended[key] = None
            while len(self._ended) > ENDED_GROUPS_MAX:
                self._forget(next(iter(self._ended)))

    def _tell(self, record: Record, told: Told) -> None:
        self.events.append(Entry(record.sequence, told))

    # --- lives

    def _opened(self, record: Record, item: Opened) -> None:
        self.end()
        if not self.lives:
            pass
        elif self.life.took_over:
            self._left, self._cut_behind = set(self.life.live), self._newest_input
        else:  # it died before it took over what was left to it, which goes on behind it
            self._key_of = self._known_before | self._key_of
        self._taking_over, self._taken, self._known_before = set(), set(), {}
        self._newest_input = 0
        first = not self.lives
        self.lives.append(LifeCount(len(self.lives) + 1, item.life, item.core, record.sequence - 1, took_over=first))

    def _closed(self, record: Record, item: Closed) -> None:
        self.life.closed = item
        counted = self.life.account()
        for name in ACCOUNT_TOTALS:
            said = item.totals.get(f"{name}_total", 0)
            if said != getattr(counted, name):
                self._find(record.sequence, f"Closed says {name} {said}, the records say {getattr(counted, name)}")

    # --- known ids

    def _know(self, key: Key, digest: bytes, numbers: range, live: set[int]) -> None:
        self._forget(key)
        self._known[key] = Known(digest, numbers, live)
        self._key_of.update(dict.fromkeys(numbers, key))
        if not live:
            self._ended[key] = None

    def _forget(self, key: Key) -> None:
        known = self._known.pop(key, None)
        self._ended.pop(key, None)
        for number in known.numbers if known is not None else ():
            self._key_of.pop(number, None)

    def _find(self, sequence: int, text: str) -> None:
        self._findings.add("journal", self.life.number if self.lives else 0, sequence, text)


def _some(numbers: set[int]) -> str:
    """A few numbers of a set, in words."""
    if not numbers:
        return "none"
    shown = ", ".join(map(str, sorted(numbers)[:5]))
    return f"{len(numbers)} ({shown}{', ...' if len(numbers) > 5 else ''})"
