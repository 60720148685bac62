"""Small records, journals made of them, and what a reader finds."""

from __future__ import annotations

from daemon.core.inputs import Ticked
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided
from journal.opening import Found, open_journal
from journal.reader import read_records
from journal.records import Closed, Opened
from journal.storage import Storage
from journal.writer import JournalSettings, JournalWriter
from tests.journal.modeled_disk import ModeledDisk

ID = bytes(range(16))
SETTINGS = JournalSettings()


def opened(life: str = "a") -> Opened:
    """First record of a life."""
    return Opened(1, life, 1, 1, CoreConfig(), {}, {})


def closed() -> Closed:
    """Last record of a life that ended in order."""
    return Closed(9, "test", {}, bytes(16))


def decided(verdict: str, request: int, **numbers: int) -> Decided:
    """A decision about a request."""
    return Decided(1, verdict, request, "", numbers)


def start(storage: Storage, settings: JournalSettings = SETTINGS, life: str = "a") -> JournalWriter:
    """A writer whose life has its first record, flushed and synced."""
    writer, _ = begin(storage, settings, life)
    return writer


def begin(storage: Storage, settings: JournalSettings = SETTINGS, life: str = "a") -> tuple[JournalWriter, Found]:
    """`start`, with what opening found."""
    writer, found = open_journal(storage, settings, ID)
    writer.append(opened(life))
    writer.flush()
    writer.sync()
    return writer, found


def tick(writer: JournalWriter, count: int = 1) -> None:
    """One iteration per tick: append and flush. The record's time is its sequence number."""
    for _ in range(count):
        writer.append(Ticked(writer.last_sequence + 1))
        writer.flush()


def _first_bytes() -> int:
    """How many bytes a segment has whose life wrote its first record alone; it grows with the configuration."""
    disk = ModeledDisk()
    begin(disk)
    return sum(len(inode.data) for inode in disk.files.values())


SMALL = JournalSettings(segment_bytes=_first_bytes() + 8)
"""A segment is full when one tick followed the first record of a life."""
FULL_TICKS = SMALL.segment_bytes // 40
"""Ticks that fill a segment without a first record."""


def sequences(storage: Storage) -> list[int]:
    """Sequence numbers of the records that a reader finds."""
    return [record.sequence for record in read_records(storage)]
