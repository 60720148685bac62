"""Listing: which requests of a journal are worth asking for: refused, failed, those that waited or were retracted most.

Owns what is kept of each request while it lives, and of the worst ones behind that. Reads decisions alone, feeds no
core, and so names a cause of waiting only where a decision about the request itself does. Must never hold more than the
live requests and the `most` worst of each kind, however long the journal is.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from daemon.core.inputs import Arrived, EpochBegan, EpochEnded, Recovered, RecoveredGroup
from daemon.core.outputs import Decided
from daemon.core.reasons import EndReason, Verdict
from journal.reader import Record
from journal.records import INPUT_KINDS, Kind
from tools.why.causes import cause_of
from tools.why.ends import ENDS, FAILED, Asks, asks_of, narrow_stages, refused_because
from tools.why.nouns import CLOCK_FROM_NS, Bands, joined, milliseconds, short_of, units
from tools.why.summary import BACK
from tools.why.waits import for_what

LEFT = "left"  # the end of a request that the next life did not take over
STOPS = frozenset({"memory", "protected", "rows", "budget", "throttled", "parked"})
"""What a pass ends for: everybody behind waits for its turn."""
UNSAID = "queue"
"""What it waited for where no decision says it: its turn, whatever for, or the next step. Only passes know."""


@dataclass(slots=True)
class Entry:
    """One request in numbers; `end` is empty while it lives.

    `waits` are nanoseconds by what it waited for, as decisions about itself say it.
    """

    request: int
    id: str
    came_ns: int
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    retractions: int = 0
    parks: int = 0
    requeued: int = 0
    matched_tokens: int = 0
    cut: str = ""  # the kind of memory that cut its first hit short, empty where it was nothing or the prompt was new
    took_ns: int = 0
    end: str = ""
    cause: str = ""
    why: str = UNSAID  # what it waits for now; empty while it has its place
    since_ns: int = 0
    started: bool = False  # `cached_tokens` and `cut` are of its first start: later ones find its own tokens too

    @property
    def waited_ns(self) -> int:
        """All its waiting."""
        return self.waits.total()

    def until(self, now_ns: int) -> None:
        """Time passed."""
        if self.why:
            self.waits[self.why] += max(now_ns - self.since_ns, 0)
        self.since_ns = max(now_ns, self.since_ns)

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "request": self.request,
            "id": self.id,
            "came_ns": self.came_ns,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "matched_tokens": self.matched_tokens,
            "hit_cut": self.cut,
            "output_tokens": self.output_tokens,
            "waited_ns": self.waited_ns,
            "waits_ns": dict(self.waits),
            "retractions": self.retractions,
            "parks": self.parks,
            "requeued": self.requeued,
            "took_ns": self.took_ns,
            "end": self.end,
            "cause": self.cause,
        }


@dataclass(frozen=True, slots=True)
class RefusedOne:
    """A request that was refused: its id, the code and the numbers, what it asked for, and the names of bands."""

    id: str
    now_ns: int
    code: str
    numbers: dict[str, int]
    asks: Asks
    bands: Bands

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        short = {"short": short_of(self.numbers, self.bands)} if "units_short" in self.numbers else {}
        return {"id": self.id, "now_ns": self.now_ns, "code": self.code, "numbers": self.numbers, **short}


def cut_of(reason: str) -> str:
    """The kind of memory that cut a hit short of what full attention had; what was never seen is no cut."""
    return "" if reason == "full" else reason


class Worst:
    """The `most` entries with the highest rank; an entry of rank 0 is none."""

    def __init__(self, most: int, rank: Callable[[Entry], int]) -> None:
        self._most, self._rank = most, rank
        self._heap: list[tuple[int, int, Entry]] = []

    def add(self, entry: Entry) -> None:
        """It ended, or the journal did."""
        rank = self._rank(entry)
        if rank > 0 and self._most:
            push = heapq.heappush if len(self._heap) < self._most else heapq.heappushpop
            push(self._heap, (rank, -entry.request, entry))

    def entries(self) -> list[Entry]:
        """Highest first; of equals the one that came first."""
        return [entry for _, _, entry in sorted(self._heap, key=lambda one: one[:2], reverse=True)]


KINDS: dict[str, tuple[str, Callable[[Entry], int]]] = {
    "failed": ("failed, newest first", lambda one: one.request if one.end in FAILED or one.end == LEFT else 0),
    "waited": ("waited longest", lambda one: one.waited_ns),
    "retracted": ("retracted (preempted) most often", lambda one: one.retractions),
    "parked": ("parked most often", lambda one: one.parks),
    "cut": (
        "prefix-cache hit cut short by a missing window or state, most tokens first",
        lambda one: one.matched_tokens - one.cached_tokens if one.cut else 0,
    ),
    "slowest": ("took longest from arrival to end", lambda one: one.took_ns),
    "requeued": ("thrown back most often by lost ranks or restarts", lambda one: one.requeued),
}
"""Lists by name: title, and what ranks a request in it."""


class Listing:
    """Takes the records of a journal in order; `end` is to be called behind the last one."""

    def __init__(self, most: int) -> None:
        self.worst = {name: Worst(most, rank) for name, (_, rank) in KINDS.items()}
        self.refused: deque[RefusedOne] = deque(maxlen=most or None) if most else deque(maxlen=0)
        self.refusals: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.accepted = self.records = 0
        self.live: dict[int, Entry] = {}
        self._looked_at: set[int] = set()  # requests that passes came to, and left for a reason of their own
        self._arrived: Arrived | None = None
        self._input: Any = None
        self._now_ns = 0
        self._newest: Record | None = None  # an input that was not read
        self._orphans: set[int] = set()
        self._bands: Bands = ()
        self._narrow: tuple[int, ...] = ()

    def begin_at(self, groups: Sequence[RecoveredGroup]) -> None:
        """The journal begins at a snapshot, which these lived at."""
        for group in groups:
            for choice, left in enumerate(group.choices):
                if left.ended is None:
                    number = group.accepted.first_request + choice
                    tokens = len(group.generate.prompt) // 8
                    entry = Entry(number, group.generate.id, group.arrived_ns, tokens, since_ns=group.arrived_ns)
                    entry.retractions, entry.cached_tokens = left.retractions, left.cached_tokens
                    entry.matched_tokens, entry.cut = left.matched_tokens, cut_of(left.hit_cut)
                    entry.why, entry.started = "" if left.started else UNSAID, left.started
                    self.live[number] = entry

    def take(self, record: Record) -> None:
        """One record."""
        self.records += 1
        if record.kind == Kind.OPENED:
            self._opened(record)
        elif record.kind == Kind.DECIDED:
            decided: Any = record.decode()
            self._decided(decided)
        elif record.kind in INPUT_KINDS:
            self._take_input(record)

    def end(self) -> None:
        """The journal ends here; what lives is ranked as it stands."""
        self._catch_up()
        for entry in self.live.values():
            entry.until(self._now_ns)
            entry.took_ns = max(self._now_ns - entry.came_ns, 0)
            self._rank(entry)

    # --- inside --------------------------------------------------------------------------------------------------

    def _opened(self, record: Record) -> None:
        """What lived waits for the daemon. The clock of the new life may be behind that of the old one."""
        self._catch_up()
        self._orphans = set(self.live)
        for entry in self.live.values():
            entry.until(self._now_ns)
            entry.why = "daemon"
        opened: Any = record.decode()
        if opened.now_ns < self._now_ns:
            self._now_ns = opened.now_ns
            for entry in self.live.values():
                entry.since_ns = opened.now_ns

    def _catch_up(self) -> None:
        """The newest input says how late it is; most are not read."""
        if self._newest is not None:
            newest: Any = self._newest.decode()
            self._now_ns, self._newest = max(self._now_ns, newest.now_ns), None

    def _take_input(self, record: Record) -> None:
        if record.kind in (Kind.REPORTED, Kind.TICKED):  # nearly all there are; they name no cause
            self._input, self._newest = None, record
            return
        item: Any = record.decode()
        self._input, self._now_ns = item, max(self._now_ns, item.now_ns)
        if isinstance(item, Arrived):
            self._arrived = item
        elif isinstance(item, Recovered):
            for group in item.groups:
                for choice, left in enumerate(group.choices):
                    number = group.accepted.first_request + choice
                    self._orphans.discard(number)
                    if left.ended is not None and number in self.live:
                        self._ended(self.live[number], left.ended.reason, item.now_ns, left.ended.output_tokens)
        elif isinstance(item, EpochEnded):
            for entry in self.live.values():
                if entry.why:  # what has its place is told by a decision that it lost it
                    entry.until(item.now_ns)
                    entry.why = "ranks"
        elif isinstance(item, EpochBegan):
            self._bands = [[band.name for band in stage.bands] for stage in item.geometry.stages]
            self._narrow = narrow_stages(item.geometry)
            for number in sorted(self._orphans & set(self.live)):
                self._ended(self.live[number], LEFT, item.now_ns, 0)
            self._orphans = set()
            for entry in self.live.values():
                if entry.why in ("ranks", "daemon"):
                    entry.until(item.now_ns)
                    entry.why = UNSAID

    def _decided(self, told: Decided) -> None:
        self._now_ns = max(self._now_ns, told.now_ns)
        if told.verdict == Verdict.ACCEPTED and self._arrived is not None:
            generate = self._arrived.generate
            for choice in range(told.numbers.get("n", 1)):
                number = told.request + choice
                entry = Entry(number, generate.id, told.now_ns, told.numbers["prompt_tokens"], since_ns=told.now_ns)
                self.live[number] = entry
                self.accepted += 1
        elif told.verdict == Verdict.REFUSED and self._arrived is not None:
            self.refusals[told.reason] += told.numbers.get("n", 1)
            generate = self._arrived.generate
            asks, bands = asks_of(generate, self._narrow), self._bands
            self.refused.append(RefusedOne(generate.id, told.now_ns, told.reason, told.numbers, asks, bands))
        elif told.request in self.live:
            self._orphans.discard(told.request)
            self._lived(self.live[told.request], told)

    def _lived(self, entry: Entry, told: Decided) -> None:
        entry.until(told.now_ns)
        n = told.numbers
        if told.verdict == Verdict.WAITS:
            entry.why = told.reason
            if told.reason not in STOPS:
                self._looked_at.add(entry.request)
                return
            for number in sorted(self._looked_at):
                if number in self.live and number != entry.request and self.live[number].why:
                    self.live[number].until(told.now_ns)
                    self.live[number].why = UNSAID  # passes end before it again
            self._looked_at.clear()
        elif told.verdict == Verdict.ADMITTED:
            entry.why = ""
            self._looked_at.discard(entry.request)
            if not entry.started:
                entry.started, entry.cached_tokens = True, n.get("cached_tokens", 0)
                entry.matched_tokens = n.get("matched_tokens", 0)
                entry.cut = cut_of(told.reason)
        elif told.verdict == Verdict.PARKED:
            entry.parks += 1
        elif told.verdict in BACK:
            entry.why = BACK[Verdict(told.verdict)] or UNSAID
            entry.retractions += told.verdict == Verdict.RETRACTED
            entry.requeued += told.verdict in (Verdict.REQUEUED, Verdict.RECOVERED)
        elif told.verdict == Verdict.ENDED:
            self._ended(entry, told.reason, told.now_ns, n["output_tokens"])

    def _ended(self, entry: Entry, reason: str, now_ns: int, output_tokens: int) -> None:
        entry.until(now_ns)
        entry.end, entry.output_tokens = reason, output_tokens
        entry.cause = cause_of(self._input) if reason in (EndReason.ABORT, EndReason.FAULT) else ""
        entry.took_ns = max(now_ns - entry.came_ns, 0)
        self.ends[reason] += 1
        del self.live[entry.request]
        self._rank(entry)

    def _rank(self, entry: Entry) -> None:
        for worst in self.worst.values():
            worst.add(entry)


# --- text ------------------------------------------------------------------------------------------------------------


def totals(found: Listing) -> list[str]:
    """What there is, in a few sentences."""
    refused = found.refusals.total()
    came = f"{units(found.accepted, 'request')} accepted, {refused:,} refused"
    lines = [f"{came}; {len(found.live):,} of the accepted ones have no end in this journal."]
    if found.ends:
        ended = ", ".join(f"{count:,} {_end(reason)}" for reason, count in found.ends.most_common())
        lines.append(f"Ends: {ended}.")
    if refused:
        codes = ", ".join(f"{count:,} {code}" for code, count in found.refusals.most_common())
        lines.append(f"Refusals: {codes}.")
    return lines


def _end(reason: str) -> str:
    text = ENDS[EndReason(reason)] if reason in set(EndReason) else "not taken over by the next process of the daemon"
    return f"{reason} ({text})"


def row(entry: Entry) -> dict[str, str]:
    """One request as cells of a table."""
    kind = entry.cut.partition(":")[0]
    return {
        "request": str(entry.request),
        "came (UTC)": clock(entry.came_ns),
        "id": entry.id,
        "prompt": f"{entry.prompt_tokens:,}",
        "cached": f"{entry.cached_tokens:,}" + (f" of {entry.matched_tokens:,}, no {kind}" if entry.cut else ""),
        "output": f"{entry.output_tokens:,}" if entry.end else "-",
        "waited": milliseconds(entry.waited_ns),
        "mostly for": _cause(entry),
        "retracted": str(entry.retractions),
        "took": milliseconds(entry.took_ns),
        "end": entry.end + (f": {entry.cause}" if entry.cause else "") if entry.end else "lives",
    }


def _cause(entry: Entry) -> str:
    """What it waited for mostly; where no decision about it says, whom to ask: a guess may not be what passes did."""
    (why, ns), *_ = entry.waits.most_common(1) or [("", 0)]
    if not ns:
        return "-"
    return f"ask why {entry.request}" if why == UNSAID else for_what(why)


def refusal(one: RefusedOne) -> dict[str, str]:
    """One refusal as cells of a table."""
    why = joined(*refused_because(one.code, one.numbers, one.asks, one.bands))
    return {"came (UTC)": clock(one.now_ns), "id": one.id, "code": one.code, "why": why}


def clock(now_ns: int) -> str:
    """The time of day in UTC, where it is one."""
    return f"{datetime.fromtimestamp(now_ns / 1e9, UTC):%H:%M:%S}" if now_ns >= CLOCK_FROM_NS else "-"


def as_plain(found: Listing) -> dict[str, Any]:
    """The lists as plain values."""
    return {
        "accepted": found.accepted,
        "live": len(found.live),
        "ends": dict(found.ends),
        "refusals": dict(found.refusals),
        "refused": [one.plain() for one in found.refused],
        **{name: [entry.plain() for entry in worst.entries()] for name, worst in found.worst.items()},
    }
