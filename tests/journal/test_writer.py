"""The writer: one write per iteration, marks that tell the truth, segments that follow each other."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from daemon.core.inputs import Ticked
from journal import frame, records, segment
from journal.errors import JournalBusy
from journal.frame import Frame
from journal.opening import open_journal
from journal.reader import Walk, read_records
from journal.records import Digested, Kind
from journal.segment import segment_name, segment_names
from journal.storage import DiskStorage
from journal.writer import JournalSettings, JournalWriter
from tests.journal.helpers import FULL_TICKS, SMALL, begin, closed, opened, sequences, start, tick
from tests.journal.modeled_disk import ModeledDisk


def test_one_write_per_flush() -> None:
    """Everything appended since the last flush goes to the file in one write; nothing is written before."""
    disk = ModeledDisk()
    writer = start(disk)
    before = len(disk.log)
    for _ in range(50):
        writer.append(Ticked(1))
    assert len(disk.log) == before
    assert writer.written_through == 1
    writer.flush()
    assert disk.log[before:] == ["write"]
    assert (writer.last_sequence, writer.written_through, writer.synced_through) == (51, 51, 1)
    writer.flush()
    assert disk.log[before:] == ["write"], "a flush of nothing writes"


def test_encoded_payload_is_the_same_record() -> None:
    """A payload that was encoded elsewhere gives the record that its struct would."""
    disk = ModeledDisk()
    writer = start(disk)
    record = Ticked(1 << 60)
    writer.append(record)
    writer.append_encoded(Kind.TICKED, records.encode(record))
    writer.append_all([record, record])
    writer.flush()
    found = list(read_records(disk))[1:]
    assert [(item.kind, item.payload) for item in found] == [(Kind.TICKED, records.encode(record))] * 4
    assert found[0].decode() == record


def test_sync_moves_the_mark_and_lets_frames_go() -> None:
    """What is held in memory is what was written and not synced; frames tell the mark at their append."""
    disk = ModeledDisk()
    writer = start(disk)
    tick(writer, 3)
    held = writer.unsynced_bytes
    assert held > 0
    writer.sync()
    assert (writer.synced_through, writer.unsynced_bytes) == (4, 0)
    tick(writer)
    here = segment.load(disk, segment_name(1))
    marks = [found.synced_through for found in segment.frames(here.data, here.start) if isinstance(found, Frame)]
    assert marks == [0, 1, 1, 1, 4]


def test_short_writes_are_completed() -> None:
    """A write that takes only a part is followed by another for the rest, in the same file."""

    class Short(ModeledDisk):
        def write(self, handle: int, data: bytes) -> int:
            return super().write(handle, data[: max(1, len(data) // 3)])

    disk = Short()
    writer = start(disk)
    tick(writer, 5)
    assert sequences(disk) == [1, 2, 3, 4, 5, 6]
    assert writer.degraded == ""
    assert len(segment_names(disk.names())) == 1


def test_rotation_by_size() -> None:
    """Full segments are left at a sync; each names the one before, and sequence and links go on across them."""
    disk = ModeledDisk()
    writer = start(disk, SMALL)
    for _ in range(4):
        tick(writer, FULL_TICKS)
        writer.sync()
    writer.close()
    names = segment_names(disk.names())
    assert list(names) == list(range(1, len(names) + 1))
    assert len(names) > 3
    walk = Walk(disk)
    assert [record.sequence for record in walk.records()] == list(range(1, 4 * FULL_TICKS + 2))
    assert [found.row.label for found in walk.findings] == ["clean_end"]
    assert all(len(disk.read(name)) < 3 * SMALL.segment_bytes for name in names.values())


def test_rotation_while_the_loop_writes() -> None:
    """Records written between the fsync and the change of segments stand in the new one, and are read once."""
    disk = ModeledDisk()
    writer = start(disk, SMALL)
    tick(writer, 10)

    class Meanwhile:
        """Writes behind the worker's back at each fsync, as the loop does."""

        def __init__(self) -> None:
            self.sync = disk.sync

        def __call__(self, handle: int) -> None:
            self.sync(handle)
            tick(writer)

    disk.sync = Meanwhile()  # type: ignore[method-assign]
    writer.sync()
    assert len(segment_names(disk.names())) == 2
    assert sequences(disk) == list(range(1, writer.last_sequence + 1))
    assert writer.unsynced_bytes > 0
    walk = Walk(disk)
    list(walk.records())
    assert [found.row.label for found in walk.findings] == ["clean_end"], "the old segment keeps a superseded tail"
    killed = disk.killed()
    _, recovered = begin(killed)
    assert recovered.last_sequence == writer.written_through


def test_closed_life_and_next_life() -> None:
    """Sequence numbers go on over lives, each life begins a segment, and a clean end is told from a cut."""
    disk = ModeledDisk()
    writer = start(disk, life="a")
    tick(writer, 2)
    writer.append(closed())
    writer.close()
    writer, recovered = begin(disk, life="b")
    assert (recovered.last_sequence, recovered.clean, recovered.lives, recovered.notes) == (4, True, 1, [])
    assert writer.last_sequence == 5
    tick(writer)
    _, recovered = begin(disk.killed(), life="c")
    assert (recovered.last_sequence, recovered.clean, recovered.lives) == (6, False, 2)
    assert sequences(disk) == [1, 2, 3, 4, 5, 6]
    assert list(segment_names(disk.names())) == [1, 2]


def test_life_begins_with_opened() -> None:
    """A record before `Opened` is refused where it is appended."""
    disk = ModeledDisk()
    start(disk).close()
    writer, _ = begin(disk)
    writer.close()
    writer, _ = open_journal(disk, JournalSettings(), bytes(16))
    with pytest.raises(AssertionError, match="begins with Opened"):
        writer.append(Ticked(1))


def test_checks_may_be_skipped_by_older_readers() -> None:
    """Digests carry the flag; inputs and steps do not."""
    disk = ModeledDisk()
    writer = start(disk)
    writer.append(Digested(1, 1, 0, 0, bytes(16), bytes(16), bytes(16)))
    writer.append(Ticked(1))
    writer.flush()
    here = segment.load(disk, segment_name(1))
    flags = {found.kind: found.flags for found in segment.frames(here.data, here.start) if isinstance(found, Frame)}
    assert flags == {Kind.OPENED: 0, Kind.DIGESTED: frame.MAY_SKIP, Kind.TICKED: 0}


def test_policy_os_syncs_by_bytes() -> None:
    """With `os` the promise is what was written, and an fsync comes only when enough is held in memory."""
    disk = ModeledDisk()
    settings = JournalSettings(policy="os", os_sync_bytes=SMALL.segment_bytes)
    writer = start(disk, settings)
    assert disk.log.count("sync") == 1, "only the header"
    tick(writer)
    assert writer.synced_through == writer.written_through == 2
    tick(writer, 10)
    writer.sync()
    assert disk.log.count("sync") == 2
    assert writer.unsynced_bytes == 0


def test_flush_bounds_what_is_held() -> None:
    """When nobody syncs, flush does it itself before memory grows without bound."""
    disk = ModeledDisk()
    writer = start(disk, JournalSettings(unsynced_max_bytes=500))
    for _ in range(100):
        tick(writer)
        assert writer.unsynced_bytes <= 500
    assert writer.synced_through > 1


def test_real_disk_with_a_worker(tmp_path: Path) -> None:
    """On the real disk, with a thread that syncs and compresses all the time, every record is there once, in order."""
    storage = DiskStorage(tmp_path / "journal")
    writer = start(storage, JournalSettings(segment_bytes=8 << 10))
    stop = threading.Event()
    errors: list[BaseException] = []
    worker = threading.Thread(target=_work, args=(writer, stop, errors))
    worker.start()
    marks = []
    while len(segment_names(storage.names())) < 6 and writer.last_sequence < 500_000:
        tick(writer, 50)
        marks.append(writer.synced_through)
    stop.set()
    worker.join()
    writer.close()
    writer.compress_finished()
    assert not errors
    assert marks == sorted(marks)
    assert sequences(storage) == list(range(1, writer.last_sequence + 1))
    names = segment_names(storage.names())
    assert len(names) >= 6
    assert all(name.endswith(".zst") for name in list(names.values())[:-1])


def _work(writer: JournalWriter, stop: threading.Event, errors: list[BaseException]) -> None:
    try:
        while not stop.is_set():
            writer.sync()
            writer.compress_finished()
    except BaseException as error:
        errors.append(error)


def test_second_writer_is_refused(tmp_path: Path) -> None:
    """A directory has one writer; the error names its process, and the directory is free when it has closed."""
    writer = start(DiskStorage(tmp_path))
    with pytest.raises(JournalBusy) as caught:
        start(DiskStorage(tmp_path))
    assert caught.value.pid == os.getpid()
    assert str(os.getpid()) in str(caught.value)
    writer.close()
    start(DiskStorage(tmp_path)).close()


def test_files_are_private(tmp_path: Path) -> None:
    """The directory and its files can be read by their owner only: prompts are in them."""
    storage = DiskStorage(tmp_path / "journal")
    start(storage).close()
    assert storage.directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in storage.directory.iterdir()} == {0o600}


def test_opened_is_readable_while_writing(tmp_path: Path) -> None:
    """A reader sees what was flushed while the writer goes on, and takes nothing from it."""
    storage = DiskStorage(tmp_path)
    writer = start(storage)
    tick(writer, 4)
    first = list(read_records(DiskStorage(tmp_path)))
    tick(writer, 4)
    assert len(first) == 5
    assert first[0].decode() == opened()
    assert sequences(storage) == list(range(1, 10))
    writer.close()
