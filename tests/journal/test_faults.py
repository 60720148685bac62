"""Failing disks: what was promised is never lost, and what is found is a prefix with no hole.

Each run fails the Nth operation, for N = 1, 2, ... until a run passes untouched; the journal is then read as the next
process finds it, and as a machine that lost its unsynced pages finds it.
"""

from __future__ import annotations

import contextlib
import errno
import random
from dataclasses import dataclass, field

import pytest

from daemon.core.inputs import Ticked
from journal.errors import JournalFailed
from journal.opening import open_journal
from journal.reader import read_records
from journal.writer import JournalSettings, JournalWriter
from tests.journal.helpers import ID, SMALL, begin, closed, opened, sequences, start, tick
from tests.journal.modeled_disk import ModeledDisk

SETTINGS = JournalSettings(segment_bytes=SMALL.segment_bytes + 250)
ITERATIONS = 24


@dataclass
class Run:
    """What a workload was told: payloads in order, and how far they were written and promised."""

    payloads: list[bytes] = field(default_factory=list)
    written: int = 0
    promised: int = 0
    failures: int = 0


def work(disk: ModeledDisk) -> Run:
    """One life: iterations of two records, a sync after every third, a clean end; JournalFailed ends it."""
    run = Run()
    try:
        writer, _ = open_journal(disk, SETTINGS, ID)
    except (JournalFailed, OSError):
        run.failures += 1
        return run
    try:
        writer.append(opened())
        run.payloads.append(b"")
        flush(writer, run)
        for iteration in range(ITERATIONS):
            for _ in range(2):
                tick_only(writer, run)
            flush(writer, run)
            if iteration % 3 == 2:
                writer.sync()
                run.promised = max(run.promised, writer.synced_through)
        writer.append(closed())
        run.payloads.append(b"")
        flush(writer, run)
        writer.close()
        run.promised = max(run.promised, writer.synced_through)
    except JournalFailed:
        run.failures += 1
    run.promised = max(run.promised, writer.synced_through)
    return run


def tick_only(writer: JournalWriter, run: Run) -> None:
    run.payloads.append(b"%d" % writer.append(Ticked(writer.last_sequence + 1)))


def flush(writer: JournalWriter, run: Run) -> None:
    writer.flush()
    run.written = writer.written_through


def check_found(run: Run, disk: ModeledDisk, at_least: int) -> None:
    """Opening works, keeps a prefix of at least so many records without a hole, and writing goes on behind it."""
    writer, recovered = begin(disk, SETTINGS, life="next")
    kept = recovered.last_sequence
    assert at_least <= kept <= len(run.payloads), f"kept {kept}, promised {at_least}, of {len(run.payloads)}"
    tick(writer, 2)
    writer.close()
    found = list(read_records(disk))
    assert [record.sequence for record in found] == list(range(1, kept + 4))
    for record, payload in zip(found[:kept], run.payloads, strict=False):
        if payload:
            assert record.decode().now_ns == int(payload)  # type: ignore[attr-defined]


def check_survivors(run: Run, disk: ModeledDisk, seed: int) -> None:
    """The next process finds everything written; a machine that crashed, everything promised."""
    rng = random.Random(seed)
    for _ in range(3):
        check_found(run, disk.crashed(rng), run.promised)
    check_found(run, disk.killed(), run.written)


MODES = [
    pytest.param({"code": errno.EIO}, id="once"),
    pytest.param({"code": errno.ENOSPC, "short": True}, id="once-short"),
    pytest.param({"code": errno.ENOSPC, "forever": True, "short": True}, id="disk-full"),
    pytest.param({"code": errno.EIO, "forever": True}, id="disk-dead"),
]


@pytest.mark.parametrize("mode", MODES)
def test_every_operation_fails_once(mode: dict[str, int]) -> None:
    """Whichever operation fails, nothing promised is lost, and no record is found that was not appended."""
    for fail_at in range(1, 10_000):
        disk = ModeledDisk(fail_at, **mode)  # type: ignore[arg-type]
        run = work(disk)
        check_survivors(run, disk, fail_at)
        if disk.operations < fail_at:
            assert run.failures == 0
            assert run.promised == len(run.payloads)
            assert fail_at > 50, "the workload reaches few operations"
            return
    raise AssertionError("no run passed untouched")


def test_one_failure_is_survived() -> None:
    """One failed write, fsync, creation or rename in a life costs nothing: a new segment takes over."""
    untouched = ModeledDisk()
    work(untouched)
    first = untouched.log.index("write", untouched.log.index("sync_directory") + 1)
    for fail_at in range(first, untouched.operations + 1):
        disk = ModeledDisk(fail_at, short=True)
        run = work(disk)
        assert run.failures == 0, f"operation {fail_at}, {disk.log[fail_at - 1]}, ended the journal"
        assert run.promised == len(run.payloads)


def test_failed_fsync_is_not_retried_in_place() -> None:
    """After a failed fsync no byte of the old file is synced again; its unsynced records are in a new segment."""
    disk = ModeledDisk()
    writer = start(disk)
    tick(writer, 2)
    writer.sync()
    tick(writer, 2)
    disk.fail_at = disk.operations + 1
    writer.sync()
    assert disk.log[disk.fail_at - 1] == "sync"
    assert sorted(disk.files) == ["0000000001.kvj", "0000000002.kvj"]
    assert writer.synced_through == writer.last_sequence == 5
    assert writer.degraded == ""
    rng = random.Random(0)
    for _ in range(20):
        assert sequences(disk.crashed(rng)) == [1, 2, 3, 4, 5]


def test_unsynced_segment_is_replaced() -> None:
    """A segment in which nothing was synced, its own name perhaps included, is replaced under the same number."""
    disk = ModeledDisk()
    writer, _ = open_journal(disk, SETTINGS, ID)
    writer.append(opened())
    writer.flush()
    disk.fail_at = disk.operations + 2  # the sync of the file succeeds, that of the directory fails
    writer.sync()
    assert disk.log[disk.fail_at - 1] == "sync_directory"
    assert sorted(disk.files) == ["0000000001.kvj"]
    tick(writer)
    writer.sync()
    assert sequences(disk.crashed(random.Random(0))) == [1, 2]


def test_earlier_life_is_synced_before_it_is_named() -> None:
    """What a killed daemon left in the page cache is made durable before the next segment names it."""
    rng = random.Random(3)
    for _ in range(30):
        disk = ModeledDisk()
        writer = start(disk, SETTINGS)
        tick(writer, 5)
        disk = disk.killed()
        begin(disk, SETTINGS, life="b")
        assert sequences(disk.crashed(rng)) == [1, 2, 3, 4, 5, 6, 7]


def test_cut_bytes_outlive_the_machine() -> None:
    """Wherever the repair and then the machine stop, the bytes that were cut off are in one file or the other."""
    rng = random.Random(4)
    for fail_at in [*range(1, 12)] * 30:
        disk = ModeledDisk()
        writer = start(disk, SETTINGS)
        tick(writer, 3)
        writer.sync()
        name = "0000000001.kvj"
        del disk.files[name].data[-5:]
        disk.files[name].sync()
        tail = disk.read(name)[-43:]
        disk = disk.killed()
        disk.fail_at, disk.forever = fail_at, True
        with contextlib.suppress(OSError, JournalFailed):
            begin(disk, SETTINGS, life="b")
        crashed = disk.crashed(rng)
        assert any(crashed.read(held).endswith(tail) for held in crashed.names())


def test_full_disk_holds_the_step() -> None:
    """When no file takes the records they stay held; a later flush writes them once, in order, when there is room."""
    disk = ModeledDisk()
    writer = start(disk)
    tick(writer)
    writer.append(opened())
    disk.fail_at, disk.forever, disk.code = disk.operations + 1, True, errno.ENOSPC
    with pytest.raises(JournalFailed, match=r"starting segment 0000000002\.kvj failed"):
        writer.flush()
    assert writer.written_through == 2
    assert "writing 0000000001.kvj failed" in writer.degraded
    writer.append(opened())
    with pytest.raises(JournalFailed):
        writer.flush()
    with pytest.raises(JournalFailed):
        writer.sync()
    disk.fail_at = 0
    writer.flush()
    assert (writer.written_through, writer.degraded) == (4, "")
    assert sequences(disk) == [1, 2, 3, 4]
    writer.sync()
    assert writer.synced_through == 4


def test_a_failed_sync_does_not_fail_the_flush() -> None:
    """When flush syncs by itself and cannot, the records are written and flush says so; the writer is degraded."""
    disk = ModeledDisk()
    writer = start(disk, JournalSettings(unsynced_max_bytes=1))
    writer.append(opened())
    disk.fail_at, disk.forever = disk.operations + 2, True  # the write is taken, what follows is not
    writer.flush()
    assert writer.written_through == writer.last_sequence
    assert "syncing 0000000001.kvj failed" in writer.degraded
    with pytest.raises(JournalFailed):
        writer.sync()
    disk.fail_at = 0
    writer.sync()
    assert (writer.synced_through, writer.degraded) == (writer.last_sequence, "")


def test_lost_unsynced_writes() -> None:
    """Without any failure: a machine that dies keeps a prefix, at least to the mark, and boots; the cut is told."""
    rng = random.Random(7)
    told = 0
    for seed in range(300):
        rng.seed(seed)
        disk = ModeledDisk()
        writer = start(disk, SETTINGS)
        run = Run([b""] * 1)
        for _ in range(rng.randint(1, 30)):
            tick_only(writer, run)
            flush(writer, run)
            if rng.random() < 0.2:
                writer.sync()
        run.promised = writer.synced_through
        crashed = disk.crashed(rng)
        _, recovered = begin(crashed.killed(), SETTINGS, life="next")
        told += bool(recovered.notes)
        assert all("kept in" in note for note in recovered.notes)
        check_found(run, crashed, run.promised)
    assert told > 30, "hardly any crash tore the journal"
