"""Faults of the files: damage to a journal that was written in order.

Owns the changes to bytes and names. Must never touch the newest bytes of a life where that is what a crash leaves, but
for the torn tail, which is one. The truth is the rule of the recovery table, the file, the byte and the sequence.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from journal import frame
from journal.frame import Frame
from journal.records import Kind
from tools.planted.scene import Fault, Scene, Truth

PREV_CRC_AT = 24
CRC_AT = 28


class Place(NamedTuple):
    """A record in its file."""

    path: Path
    found: Frame


def frames(path: Path) -> Iterator[Place]:
    """The records of a segment, without its header."""
    data, offset = path.read_bytes(), 0
    while offset < len(data):
        found = frame.decode(data, offset)
        assert isinstance(found, Frame), "the file is sound before it is damaged"
        if offset:
            yield Place(path, found)
        offset = found.end


class FileFault(Fault):
    """Damages a file of the finished journal."""

    turns = 44

    def segments(self, directory: Path) -> list[Path]:
        """The segments, oldest first."""
        return sorted(directory.glob("*.kvj"))

    def tell(self, rule: str, path: Path, offset: int, sequence: int) -> None:
        """What was damaged."""
        self.truth = Truth(rule=rule, file=path.name, offset=offset, sequence=sequence)


class BitFlip(FileFault):
    """One bit of a record's payload in a finished segment is another."""

    rule, segment = "damaged_inside", 1

    def files(self, scene: Scene, directory: Path) -> None:
        """See Fault."""
        places = list(frames(self.segments(directory)[self.segment]))
        path, found = places[len(places) // 2]
        data = bytearray(path.read_bytes())
        data[found.offset + frame.HEADER_BYTES + 3] ^= 16
        path.write_bytes(data)
        self.tell(self.rule, path, found.offset, found.sequence)


class BitFlipClosed(BitFlip):
    """The same in the last segment of a life that was closed."""

    rule, segment = "closed_damaged", -1


class MissingSegment(FileFault):
    """A segment's file is gone."""

    def files(self, scene: Scene, directory: Path) -> None:
        """See Fault."""
        path = self.segments(directory)[1]
        path.unlink()
        self.tell("segment_missing", path, 0, 1)


class TornTail(FileFault):
    """The last record was written in part: not damage, but what a crash leaves."""

    tolerated = True

    def files(self, scene: Scene, directory: Path) -> None:
        """See Fault."""
        path, found = list(frames(self.segments(directory)[-1]))[-1]
        with path.open("r+b") as file:
            file.truncate(found.offset + frame.HEADER_BYTES + 5)
        self.tell("short_payload", path, found.offset, found.sequence)


class StrangeSegment(FileFault):
    """A segment of another journal stands in the place of one of this."""

    def files(self, scene: Scene, directory: Path) -> None:
        """See Fault."""
        other = directory.parent / f"{directory.name}-other"
        Scene(Nothing(), other).make()
        path = self.segments(directory)[1]
        first = next(frames(path)).found.sequence
        shutil.copy(self.segments(other)[1], path)
        shutil.rmtree(other)
        self.tell("other_journal", path, 0, first)


class Nothing(Fault):
    """No fault at all; a snapshot is asked for, and a second life takes over."""

    snapshot = True
    lives = 2
    turns = 44

    def files(self, scene: Scene, directory: Path) -> None:
        """See Fault."""
        self.truth = Truth()


class RecordTwice(FileFault):
    """The bytes of a record stand twice."""

    def files(self, scene: Scene, directory: Path) -> None:
        """See Fault."""
        path, found = list(frames(self.segments(directory)[-1]))[4]
        data = path.read_bytes()
        path.write_bytes(data[: found.end] + data[found.offset : found.end] + data[found.end :])
        self.tell("sequence_gap", path, found.end, found.sequence + 1)


class RecordCutOut(FileFault):
    """The bytes of a record are gone, those behind it moved up."""

    def files(self, scene: Scene, directory: Path) -> None:
        """See Fault."""
        path, found = list(frames(self.segments(directory)[-1]))[4]
        data = path.read_bytes()
        path.write_bytes(data[: found.offset] + data[found.end :])
        self.tell("sequence_gap", path, found.offset, found.sequence)


class ForgedRecord(FileFault):
    """A record's payload was changed, and its checksum with it."""

    def files(self, scene: Scene, directory: Path) -> None:
        """See Fault."""
        places = list(frames(self.segments(directory)[-1]))
        path, found = next(place for place in places if place.found.kind == Kind.TICKED)
        data = bytearray(path.read_bytes())
        at = found.offset + frame.HEADER_BYTES
        data[at + len(found.payload) - 1] ^= 1
        payload = bytes(data[at : at + len(found.payload)])
        crc = google_crc32c.extend(google_crc32c.value(bytes(data[found.offset : found.offset + CRC_AT])), payload)
        data[found.offset + CRC_AT : at] = crc.to_bytes(4, "little")
        path.write_bytes(data)
        self.tell("link_mismatch", path, found.end, found.sequence + 1)


class BehindTheEnd(FileFault):
    """Bytes stand behind the last record of a life that was closed."""

    def files(self, scene: Scene, directory: Path) -> None:
        """See Fault."""
        path, found = list(frames(self.segments(directory)[-1]))[-1]
        with path.open("ab") as file:
            file.write(path.read_bytes()[-64:])
        self.tell("after_footer", path, found.end, found.sequence + 1)


FAULTS: tuple[type[Fault], ...] = (
    BitFlip,
    BitFlipClosed,
    MissingSegment,
    TornTail,
    StrangeSegment,
    RecordTwice,
    RecordCutOut,
    ForgedRecord,
    BehindTheEnd,
)
