"""Recovery: what the last life of the daemon left, read out of its journal.

Owns the replay of one life's inputs through a core, from its newest snapshot or from its start, and what is done when
that is not possible. Must never write into the journal or talk to anybody: it runs in a thread while the daemon already
answers pings. Invariants: the replayed core must decide, byte for byte, what was recorded, or nothing of it is used; an
input at which it raises is never fed again, so that no input can end one life after the other.

    replayed    the core is as it was: every request goes on behind its output, ends stay known until acknowledged
    records     another version decided, or replay differs: what was accepted and not acknowledged starts from its
                prompt again, and goes on behind the tokens that its client sends back
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from allocator.graph import GraphError
from daemon.core.inputs import (
    Aborted,
    Acknowledged,
    Arrived,
    FrontEndLost,
    Recovered,
    RecoveredChoice,
    RecoveredGroup,
)
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided
from daemon.core.reasons import Verdict
from daemon.core.scheduler import SchedulerCore
from daemon.recovered_parts import PART_BYTES, parts_of
from daemon.snapshots import restore_core
from ipc.messages import Accepted
from journal import records, segment, snapshots
from journal.errors import JournalError
from journal.opening import Found
from journal.reader import Record, Walk
from journal.records import DECISION_VERSION, INPUT_KINDS, Kind, Opened
from journal.snapshots import Body, SnapshotUnusable
from journal.storage import Storage
from journal.succession import Core as Recoverable

OUTPUT_KINDS = frozenset((Kind.DECIDED, Kind.STEPPED))
RAISES_MAX = 8  # inputs of one life that may be passed over because a core raises at them


class Core(Recoverable, Protocol):
    """What recovery needs of a scheduler core."""

    def feed(self, item: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Recovery:
    """What goes on, and how that was found: `notes` has a line for everything that is not as it should be."""

    groups: list[RecoveredGroup] = field(default_factory=list)
    next_request: int = 1
    how: str = "replayed"  # or "records"
    snapshot: int = 0  # the sequence that a snapshot covers from which was replayed; 0: from the life's start
    records: int = 0
    steps: int = 0
    notes: list[str] = field(default_factory=list)

    def taken_over(self, now_ns: int, part_bytes: int = PART_BYTES) -> list[Recovered]:
        """The first inputs of the new life, as a reader of the journal will see them: plain values, nothing shared."""
        items, notes = parts_of(self.groups, self.next_request, now_ns, part_bytes)
        self.notes.extend(notes)
        return items


class Differs(Exception):
    """The replayed core decided otherwise than the recorded one."""


class Raised(Exception):
    """The replayed core raised at record `sequence`."""

    def __init__(self, sequence: int, what: str) -> None:
        self.sequence = sequence
        super().__init__(what)


class Gone(Exception):
    """The life's beginning was trimmed and no snapshot can be used."""


class Unreadable(Exception):
    """A snapshot is sound, but its state cannot be made again."""


def recover(storage: Storage, found: Found, make: Callable[[CoreConfig], Core] = SchedulerCore) -> Recovery:
    """What the journal behind `found` says is to go on. Blocks for as long as replay takes; raises JournalDamaged."""
    if not found.life_segment:
        return Recovery()
    life = _Life(storage, found, make)
    try:
        return life.replayed()
    except (Differs, Gone) as error:
        life.notes.append(f"{error}; what was accepted and not acknowledged starts again from its prompt")
        return life.from_records()


class _Life:
    """The records of one life, read as often as needed."""

    def __init__(self, storage: Storage, found: Found, make: Callable[[CoreConfig], Core]) -> None:
        self._storage = storage
        self._found = found
        self._make = make
        self.notes: list[str] = []
        self._unreadable: set[int] = set()  # sequences of snapshots

    def _records(self, behind: int = 0) -> Iterator[Record]:
        """The life's records in order, or those behind a sequence; a life that died at once may follow, with none."""
        first = self._found.life_segment
        if behind:
            first = max(first, segment.segment_behind(self._storage, behind))
        opened = int(behind > 0)  # a snapshot covers the record that its life begins with, also where it is read again
        for record in Walk(self._storage, first=first).records():
            if record.sequence <= behind:
                continue
            opened += record.kind == Kind.OPENED
            if record.sequence > self._found.last_sequence or opened > 1:
                return
            yield record

    def _head(self) -> tuple[Record | None, Opened | None]:
        """The oldest record of the life that is left, and what it says if it is the life's first."""
        head = next(self._records(), None)
        opened: Any = head.decode() if head is not None and head.kind == Kind.OPENED else None
        return head, opened

    # --- by replay -----------------------------------------------------------------------------------------------

    def replayed(self) -> Recovery:
        """Replay until no input raises; raises Differs and Gone."""
        raised: set[int] = set()
        while True:
            try:
                return self._replay(self._start(), raised)
            except Unreadable as error:
                self.notes.append(f"not used: {error}")
            except Raised as error:
                raised.add(error.sequence)
                self.notes.append(f"the core raises at record {error.sequence}, which is passed over: {error}")
                if len(raised) > RAISES_MAX:
                    raise Differs(f"the core raises at more than {RAISES_MAX} inputs") from error

    def _start(self) -> tuple[Opened | None, int, Body | None]:
        """The life's first record if it is still there, and the newest snapshot of it that can be used."""
        head, opened = self._head()
        if opened is not None and opened.decision_version != DECISION_VERSION:
            raise Differs(f"the last life decided by version {opened.decision_version}, this one is {DECISION_VERSION}")
        first = head.sequence if head is not None else 1
        for sequence, name in reversed(snapshots.snapshot_names(self._storage.names()).items()):
            if sequence in self._unreadable or not first <= sequence <= self._found.last_sequence:
                continue
            try:
                header, data = snapshots.load(self._storage, name)
            except (SnapshotUnusable, OSError) as error:
                self._unreadable.add(sequence)
                self.notes.append(f"not used: {error}")
                continue
            if opened is None or header.life == opened.life:
                return opened, sequence, snapshots.decode_body(data)
        if opened is None:
            raise Gone("the beginning of the last life was trimmed, and no snapshot of it can be used")
        return opened, 0, None

    def _replay(self, start: tuple[Opened | None, int, Body | None], raised: set[int]) -> Recovery:
        opened, snapshot, body = start
        core: Core
        if body is not None:
            try:
                core = restore_core(body.core)
            except GraphError as error:
                self._unreadable.add(snapshot)
                raise Unreadable(f"{snapshots.snapshot_name(snapshot)}: {error}") from error
        else:
            assert opened is not None, "a life is replayed from its start, or from a snapshot"
            core = self._make(opened.core)
        expected: deque[bytes] = deque()
        count = steps = 0
        for record in self._records(snapshot):
            count += 1
            if record.kind in INPUT_KINDS:
                if expected:
                    raise Differs(f"record {record.sequence} came before everything that the input before it led to")
                if record.sequence not in raised:
                    self._feed(core, record, expected)
            elif record.kind in OUTPUT_KINDS:
                steps += record.kind == Kind.STEPPED
                same = bool(expected) and expected.popleft() == record.payload
                if not same and not raised:  # behind an input that was passed over decisions may differ
                    raise Differs(f"replay differs from record {record.sequence}, a {Kind(record.kind).name}")
            if raised:
                expected.clear()
        return Recovery(core.recoverable(), core.next_request, "replayed", snapshot, count, steps, self.notes)

    def _feed(self, core: Core, record: Record, expected: deque[bytes]) -> None:
        try:
            outputs = core.feed(record.decode())
        except Exception as error:
            raise Raised(record.sequence, f"{Kind(record.kind).name}: {type(error).__name__}: {error}") from error
        expected.extend(map(records.encode, outputs.decisions))
        if outputs.step is not None:
            expected.append(records.encode(outputs.step))

    # --- by what the records say ---------------------------------------------------------------------------------

    def from_records(self) -> Recovery:
        """Accepted and not acknowledged, without output; from the newest snapshot's list where there is one."""
        known = _Accepted()
        _, opened = self._head()
        for sequence, name in reversed(snapshots.snapshot_names(self._storage.names()).items()):
            try:
                header, body = snapshots.load_groups(self._storage, name)
            except (SnapshotUnusable, OSError) as error:
                self.notes.append(f"not used: {error}")
                continue
            if sequence <= self._found.last_sequence and (opened is None or header.life == opened.life):
                known.take_over(body.groups, body.next_request)
                break
        else:
            sequence = 0
        count = 0
        for record in self._records(sequence):
            count += 1
            known.take(record)
        groups = sorted(known.groups.values(), key=lambda group: group.accepted.first_request)
        return Recovery(groups, known.next_request, "records", sequence, count, 0, self.notes)


class _Accepted:
    """What was accepted and not acknowledged, followed through records whatever version decided."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str], RecoveredGroup] = {}
        self.next_request = 1
        self._ended: set[int] = set()
        self._arrived: Arrived | None = None

    def take_over(self, groups: list[RecoveredGroup], next_request: int) -> None:
        """What an earlier record says whole."""
        self.groups |= {(group.frontend, group.accepted.id): group for group in groups}
        self.next_request = max(self.next_request, next_request)
        for group in groups:
            first = group.accepted.first_request
            self._ended.update(first + at for at, choice in enumerate(group.choices) if choice.ended is not None)

    def take(self, record: Record) -> None:
        """Follow one record."""
        if record.kind not in INPUT_KINDS and record.kind != Kind.DECIDED:
            return
        try:
            item: Any = record.decode()
        except msgspec.ValidationError as error:
            raise JournalError(f"record {record.sequence} of another version cannot be read: {error}") from error
        if isinstance(item, Decided):
            self._decided(item)
        elif isinstance(item, Recovered):
            self.take_over(item.groups, item.next_request)
        elif isinstance(item, Arrived):
            self._arrived = item
        elif isinstance(item, Aborted):
            self.groups.pop((item.frontend, item.id), None)
        elif isinstance(item, Acknowledged):
            for id in item.ids:
                self._acknowledged((item.frontend, id))
        elif isinstance(item, FrontEndLost):
            self.groups = {key: group for key, group in self.groups.items() if key[0] != item.frontend}

    def _decided(self, item: Decided) -> None:
        if item.verdict == Verdict.ENDED:
            self._ended.add(item.request)
        if item.verdict != Verdict.ACCEPTED:
            return
        arrived = self._arrived
        assert arrived is not None, "an acceptance follows what arrived"
        generate = arrived.generate
        n, drawn = item.numbers.get("n", 1), generate.sampling.seed
        seed = arrived.seed if drawn is None else drawn
        accepted = Accepted(generate.id, item.request, n, item.numbers.get("max_tokens", 0), seed)
        group = RecoveredGroup(arrived.frontend, generate, seed, accepted, arrived.now_ns, [RecoveredChoice(b"")] * n)
        self.groups[arrived.frontend, generate.id] = group
        self.next_request = max(self.next_request, item.request + n)

    def _acknowledged(self, key: tuple[str, str]) -> None:
        group = self.groups.get(key)
        if group is not None:
            first = group.accepted.first_request
            if all(first + at in self._ended for at in range(group.accepted.n)):
                del self.groups[key]
