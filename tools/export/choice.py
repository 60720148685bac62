"""Choice: which records of a journal an export holds.

Owns the filters: kinds, a range of sequences, one request. Must never change a record but `Recovered`, of which only
the group that was asked for is left. Invariant: an arrival is chosen by what was decided about it, so it waits for the
decision that follows it; records keep their order.

A request's records are its arrival, what its front end sent about its id, the decisions about it or for it, and what a
life took over of it. Steps and reports are of many requests at once and are chosen by kind or range only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from daemon.core.inputs import Aborted, Acknowledged, Arrived, FinishAsked, Recovered, RecoveredGroup, Resumed
from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from journal.reader import Record
from journal.records import PAYLOADS, Kind
from tools.ends import Refused

NAMES: dict[str, Kind] = {
    **{payload.__name__.lower(): kind for kind, payload in PAYLOADS.items()},
    **{kind.name.lower(): kind for kind in Kind},
}
"""Kinds by their own names and by those of their payloads, in small letters."""

OF_REQUESTS = frozenset(
    (
        Kind.ARRIVED,
        Kind.ABORTED,
        Kind.FINISH_ASKED,
        Kind.RESUMED,
        Kind.ACKNOWLEDGED,
        Kind.RECOVERED,
        Kind.DECIDED,
    )
)


class UnknownKind(Refused):
    """A kind that no record has, or none at all."""


class Missing(Refused):
    """The journal does not have what was asked for."""


@dataclass(slots=True)
class Sought:
    """Whether a request is in the records that were seen; 0 asks for none."""

    request: int
    found: bool = False
    highest: int = 0  # number of a request that was met
    begins: int = 0  # the first record

    def take(self, record: Record) -> None:
        """Called with every record."""
        self.begins = self.begins or record.sequence
        if self.found or not self.request or record.kind not in (Kind.DECIDED, Kind.RECOVERED):
            return
        said: Any = record.decode()
        if isinstance(said, Recovered):
            self.groups(said.groups)
        elif said.verdict == Verdict.ACCEPTED:
            self._numbers(said.request, said.numbers.get("n", 1))
        else:
            self.found = self.request in (said.request, said.by)

    def groups(self, groups: Sequence[RecoveredGroup]) -> None:
        """What a life took over, or a snapshot holds."""
        for group in groups:
            self._numbers(group.accepted.first_request, group.accepted.n)

    def require(self, read_through: int) -> None:
        """Raise Missing where it was not there up to that record."""
        if self.request and not self.found:
            there = f"the highest there is {self.highest}" if self.highest else "none was accepted there"
            raise Missing(f"the journal has no request {self.request} up to record {read_through}; {there}")

    def _numbers(self, first: int, n: int) -> None:
        self.highest = max(self.highest, first + n - 1)
        self.found |= first <= self.request < first + n


def kinds_named(names: list[str]) -> frozenset[Kind]:
    """The kinds that were asked for, each argument one or several with commas between; raises UnknownKind."""
    asked = [name.strip().lower() for argument in names for name in argument.split(",") if name.strip()]
    if not all(argument.strip(" ,") for argument in names):
        raise UnknownKind(f"--kind names no kind; there are {', '.join(sorted(set(NAMES)))}")
    strange = [name for name in asked if name not in NAMES]
    if strange:
        raise UnknownKind(f"no record is of kind {', '.join(strange)}; there are {', '.join(sorted(set(NAMES)))}")
    return frozenset(NAMES[name] for name in asked)


@dataclass(slots=True)
class Choice:
    """Filters; 0 and the empty set choose everything. `take` is called with every record in order."""

    kinds: frozenset[Kind] = frozenset()
    first: int = 0
    last: int = 0
    request: int = 0
    _arrived: tuple[Record, Arrived] | None = None
    _ids: set[tuple[str, str]] = field(default_factory=set)  # front end and id of the request that is asked for

    def beyond(self, record: Record) -> bool:
        """Nothing from this record on is chosen."""
        return 0 < self.last < record.sequence

    def take(self, record: Record) -> Iterator[tuple[Record, msgspec.Struct]]:
        """The records that are chosen now, decoded: this one, none, or an earlier arrival before it."""
        if not self.request:
            if self._in_range(record) and self._of_kind(record):
                yield record, record.decode()
        elif record.kind in OF_REQUESTS:
            for chosen, payload in self._about(record, record.decode()):
                if self._in_range(chosen) and self._of_kind(chosen):
                    yield chosen, payload

    def _in_range(self, record: Record) -> bool:
        return record.sequence >= self.first and not self.beyond(record)

    def _of_kind(self, record: Record) -> bool:
        return not self.kinds or record.kind in self.kinds

    def _about(self, record: Record, payload: Any) -> Iterator[tuple[Record, msgspec.Struct]]:
        """This record if it is about the request, behind the arrival that it decides."""
        if isinstance(payload, Arrived):
            self._arrived = record, payload
        elif isinstance(payload, Decided):
            yield from self._decided(record, payload)
        elif isinstance(payload, Recovered):
            groups = [group for group in payload.groups if self._is_in(group)]
            if groups:
                self._ids |= {(group.frontend, group.accepted.id) for group in groups}
                yield record, msgspec.structs.replace(payload, groups=groups)
        elif isinstance(payload, Acknowledged):
            known = [id for id in payload.ids if (payload.frontend, id) in self._ids]
            if known:
                yield record, msgspec.structs.replace(payload, ids=known)
                self._ids -= {(payload.frontend, id) for id in known}
        elif isinstance(payload, Aborted | FinishAsked | Resumed) and (payload.frontend, payload.id) in self._ids:
            yield record, payload

    def _decided(self, record: Record, decided: Decided) -> Iterator[tuple[Record, msgspec.Struct]]:
        accepted = decided.verdict == Verdict.ACCEPTED
        if accepted and self._arrived is not None:
            n = decided.numbers.get("n", 1)
            if decided.request <= self.request < decided.request + n:
                arrived = self._arrived[1]
                self._ids.add((arrived.frontend, arrived.generate.id))
                yield self._arrived
                yield record, decided
        elif not accepted and self.request in (decided.request, decided.by):
            yield record, decided

    def _is_in(self, group: RecoveredGroup) -> bool:
        first = group.accepted.first_request
        return first <= self.request < first + group.accepted.n
