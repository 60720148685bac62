"""Reader: walks a journal's segments in order and yields its records.

Owns the making of cases for the recovery table and what each verdict means for reading on. Must never change a file:
it reads a journal that is being written just as well. Invariants: the records that a strict walk yields are a prefix of
what was appended, with no hole; a tolerant walk (`verify`) yields every sound record and one finding per damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from journal import frame, records, segment
from journal.errors import JournalDamaged
from journal.frame import BadFrame, Frame
from journal.records import Kind
from journal.recovery import Case, Condition, Decision, Row, judge
from journal.segment import Segment, SegmentHeader
from journal.snapshots import snapshot_names
from journal.storage import Storage

_KINDS = frozenset(int(kind) for kind in Kind)


class Record(NamedTuple):
    """One record as read; `payload` is its msgpack and is decoded on demand."""

    sequence: int
    kind: int
    payload: bytes
    file: str
    offset: int

    def decode(self) -> msgspec.Struct:
        """The payload as its struct; raises msgspec.ValidationError when a field does not fit its type."""
        return records.decode(Kind(self.kind), self.payload)


@dataclass(frozen=True, slots=True)
class Finding:
    """A row of the recovery table that was met: where, and what it was about."""

    row: Row
    file: str
    offset: int
    sequence: int  # the record that was expected there
    what: str

    def text(self) -> str:
        """One line for a log or a terminal."""
        return f"{self.file} at byte {self.offset}, sequence {self.sequence}: {self.row.text} ({self.what})"


@dataclass(slots=True)
class Position:
    """Where a walk stands: behind record `sequence`, whose CRC is `crc`, at byte `offset` of segment `number`."""

    sequence: int = 0
    crc: int = 0
    number: int = 0
    offset: int = 0
    closed: bool = False  # the record is `Closed`
    synced_through: int = 0  # the highest synced mark that any record carries


@dataclass(slots=True)
class Walk:
    """One reading of a journal, from segment `first` on, 0: the oldest. `findings` fills while it is iterated."""

    storage: Storage
    first: int = 0
    tolerant: bool = False
    findings: list[Finding] = field(default_factory=list)
    at: Position = field(default_factory=Position)
    header: SegmentHeader | None = None  # of the segment being read

    def records(self) -> Iterator[Record]:
        """The records in order. A strict walk ends at a cut and raises JournalDamaged where the table refuses."""
        names = readable_segments(self.storage)
        self._check_numbers(names)
        self.first = max(self.first, next(iter(names), 1))
        chosen = [name for number, name in names.items() if number >= self.first]
        if chosen and self._torn_header(chosen[-1]):
            chosen.pop()
        ahead = segment.load(self.storage, chosen[0]) if chosen else None
        previous: tuple[int, str] | None = None  # number and name, not the segment: its bytes are let go
        for place in range(len(chosen)):
            assert ahead is not None
            here = ahead
            ahead = segment.load(self.storage, chosen[place + 1]) if place + 1 < len(chosen) else None
            yield from self._segment(previous, here, ahead)
            previous = here.number, here.name

    def cuts(self) -> list[Finding]:
        """What must be cut off before the journal can be written again."""
        return [finding for finding in self.findings if finding.row.decision is Decision.CUT_TORN]

    def _find(self, case: Case, file: str, offset: int, what: str) -> Decision:
        """Judge a case and note it; a strict walk stops here when it is refused."""
        row = judge(case)
        sequence = self.at.sequence + 1
        self.findings.append(Finding(row, file, offset, sequence, what))
        if row.decision is Decision.REFUSE and not self.tolerant:
            raise JournalDamaged(row.label, file, offset, sequence, f"{row.text} ({what})")
        return row.decision

    def _check_numbers(self, names: dict[int, str]) -> None:
        """Segment files are numbered without a gap, from 1 or from where they were trimmed."""
        oldest = next(iter(names), 1)
        trimmed = oldest > 1 and self._trimmed(names[oldest])
        place = oldest if trimmed else 1
        for number in names:
            if number != place:
                header = segment.load_header(self.storage, names[number])
                begins = f", which begins with record {header.first_sequence}" if header is not None else ""
                what = f"the next segment there is {segment.segment_name(number)}{begins}{self._in_front(names, place)}"
                self._find(Case(Condition.SEGMENT_MISSING), segment.segment_name(place), 0, what)
            place = number + 1

    def _in_front(self, names: dict[int, str], missing: int) -> str:
        """What stands in front of a missing segment; a trim, which deletes the oldest first, leaves nothing there."""
        front = [name for number, name in names.items() if number < missing]
        if not front:
            return ""
        behind = names[min(number for number in names if number > missing)]
        text = f"; {front[0]} to {front[-1]} stand in front of it, so it was not trimmed: put it back"
        if _covered(self.storage, behind):
            text += ", or move those away: a snapshot covers what stood before the next one"
        return text

    def _trimmed(self, oldest: str) -> bool:
        """Note that the beginning was trimmed, if it was."""
        if not _covered(self.storage, oldest):
            return False
        covered = ", ".join(map(str, snapshot_names(self.storage.names())))
        what = f"it is the oldest; snapshots cover {covered}"
        return self._find(Case(Condition.TRIMMED), oldest, 0, what) is Decision.ACCEPT

    def _torn_header(self, name: str) -> bool:
        """Whether the last file holds no record because even its header was torn."""
        last = segment.load(self.storage, name)
        if last.damage is None or Condition(last.damage.condition) not in (
            Condition.SHORT_HEADER,
            Condition.SHORT_PAYLOAD,
            Condition.BAD_FRAME,
        ):
            return False
        # No record number can be expected here: any whole frame behind a damaged header is a record that would be lost.
        if next(frame.sound_frames(last.data, 0, 0, plausible=False), None) is not None:
            return False
        case = Case(Condition(last.damage.condition), last=True)
        return self._find(case, name, 0, f"segment header: {last.damage.what}") is Decision.CUT_TORN

    def _segment(self, previous: tuple[int, str] | None, here: Segment, ahead: Segment | None) -> Iterator[Record]:
        """The records of one segment, then whether its end is the one that the segment ahead names."""
        start = here.start
        if here.header is None:
            assert here.damage is not None
            case = Case(Condition(here.damage.condition), last=False)
            self._find(case, here.name, 0, f"segment header: {here.damage.what}")
            resumed = next(frame.sound_frames(here.data, 0, 0, plausible=False), None)
            if resumed is None:
                return
            start, self.at.sequence, self.at.crc = resumed.offset, resumed.sequence - 1, resumed.prev_crc
        elif not self._check_header(here, here.header, previous):
            return
        self.at.number, self.at.offset, self.at.closed = here.number, start, False
        limit = len(here.data)
        if ahead is not None and ahead.header is not None and not _strange(here, ahead):
            limit = min(limit, ahead.header.previous_bytes)
        yield from self._frames(here, limit, ahead is None)
        if ahead is not None and ahead.header is not None and not _strange(here, ahead):
            self._check_border(here, ahead.header)
        elif ahead is None and self.at.offset == limit:
            self._find(Case(Condition.END, last=True), here.name, limit, f"{limit} bytes")

    def _check_header(self, here: Segment, header: SegmentHeader, previous: tuple[int, str] | None) -> bool:
        """Whether the segment is one of ours, in its place; False when it cannot be read at all.

        Where what stood before it is missing or damaged, which is told, it is taken as it says.
        """
        if header.major > segment.FORMAT_MAJOR:
            what = f"format {header.major}.{header.minor}, this version reads up to {segment.FORMAT_MAJOR}"
            self._find(Case(Condition.NEWER_FORMAT), here.name, 0, what)
            return False
        before, self.header = self.header, header
        if before is not None and header.journal_id != before.journal_id:
            what = f"journal {header.journal_id.hex()}, the segment before is of {before.journal_id.hex()}"
            self._find(Case(Condition.OTHER_JOURNAL), here.name, 0, what)
        expected = (here.number, self.at.sequence + 1, self.at.crc)
        unread = here.number > 1 if previous is None else here.number > previous[0] + 1 or self._refused(previous[1])
        if unread:
            expected = (here.number, header.first_sequence, here.prev_crc)
        said = (header.number, header.first_sequence, here.prev_crc)
        if said != expected:
            what = f"number, sequence and link are {said}, expected {expected}"
            self._find(Case(Condition.PREDECESSOR_MISMATCH), here.name, 0, what)
        self.at.sequence, self.at.crc = header.first_sequence - 1, here.prev_crc
        return True

    def _check_border(self, here: Segment, next_header: SegmentHeader) -> None:
        """The segment ahead names how long this one is and its digest; more bytes are superseded, fewer are a loss."""
        named = next_header.previous_bytes
        if self._refused(here.name):  # of the same cause
            return
        if named > len(here.data):
            what = f"{len(here.data)} bytes, the next segment names {named}"
            self._find(Case(Condition.PREDECESSOR_MISMATCH), here.name, len(here.data), what)
        elif segment.digest(memoryview(here.data)[:named]) != next_header.previous_digest:
            what = f"the digest of its first {named} bytes is not the one the next segment names"
            self._find(Case(Condition.PREDECESSOR_MISMATCH), here.name, named, what)
        elif named < len(here.data):
            self._find(Case(Condition.SUPERSEDED), here.name, named, f"{len(here.data) - named} bytes")

    def _refused(self, name: str) -> bool:
        """Whether something of a segment was found that is refused."""
        return any(one.file == name and one.row.decision is Decision.REFUSE for one in self.findings)

    def _frames(self, here: Segment, limit: int, last: bool) -> Iterator[Record]:
        """Frames up to `limit`, each checked against its predecessor."""
        data = here.data if limit == len(here.data) else here.data[:limit]
        at = self.at
        while at.offset < limit:
            if at.closed:
                self._find(Case(Condition.AFTER_FOOTER), here.name, at.offset, f"{limit - at.offset} bytes")
                at.closed = False
            found = frame.decode(data, at.offset)
            if isinstance(found, BadFrame):
                resumed = self._damage(here, data, found, last)
                if resumed is None:
                    return
                found = resumed
            elif found.sequence != at.sequence + 1:
                what = f"sequence {found.sequence}, expected {at.sequence + 1}"
                self._find(Case(Condition.SEQUENCE_GAP), here.name, at.offset, what)
            elif found.prev_crc != at.crc:
                what = f"names predecessor 0x{found.prev_crc:08x}, which has 0x{at.crc:08x}"
                self._find(Case(Condition.LINK_MISMATCH), here.name, at.offset, what)
            known = found.kind in _KINDS
            if not known:
                case = Case(Condition.UNKNOWN_KIND, may_skip=bool(found.flags & frame.MAY_SKIP))
                self._find(case, here.name, found.offset, f"kind {found.kind}")
            assert at.offset < found.end <= limit, f"a frame over the end of what may be read, {limit}"
            at.sequence, at.crc, at.offset = found.sequence, found.crc, found.end
            at.closed = found.kind == Kind.CLOSED
            at.synced_through = max(at.synced_through, found.synced_through)
            if known:
                yield Record(found.sequence, found.kind, found.payload, here.name, found.offset)

    def _damage(self, here: Segment, data: bytes, bad: BadFrame, last: bool) -> Frame | None:
        """Judge damage; a tolerant walk resumes at the frame returned, a strict one ends (None) or has raised."""
        expected = self.at.sequence + 1
        behind = list(frame.sound_frames(data, bad.offset + 1, expected))
        assert all(found.offset > bad.offset for found in behind), "sound frames before the damage"
        promised = any(found.synced_through >= expected for found in behind)
        closed = any(found.kind == Kind.CLOSED for found in behind)
        case = Case(
            Condition(bad.condition), last=last, sound_behind=bool(behind), promised=promised, closed_behind=closed
        )
        what = bad.what
        if behind:
            what += f"; sound through sequence {expected - 1}, and again at byte {behind[0].offset}, "
            what += f"sequence {behind[0].sequence} to {behind[-1].sequence}"
        self._find(case, here.name, bad.offset, what)
        return behind[0] if behind and self.tolerant else None


def _strange(here: Segment, ahead: Segment) -> bool:
    """Whether what the segment ahead names as its predecessor is another file: another journal's, or a missing one."""
    if here.header is None or ahead.header is None:
        return False
    if ahead.number != here.number + 1:
        return True
    return here.header.journal_id != ahead.header.journal_id


def readable_segments(storage: Storage) -> dict[int, str]:
    """Segment files by number. A gap among them is no trim, which deletes the oldest first: a walk refuses it."""
    return segment.segment_names(storage.names())


def _covered(storage: Storage, name: str) -> bool:
    """Whether a snapshot covers everything that stood before a segment."""
    header = segment.load_header(storage, name)
    covered = snapshot_names(storage.names())
    return header is not None and any(sequence >= header.first_sequence - 1 for sequence in covered)


def read_records(storage: Storage) -> Iterator[Record]:
    """All records of a journal in order, up to its end or where it was torn; raises JournalDamaged when refused."""
    return Walk(storage).records()
