"""Opening: what an earlier life left unfinished, files that never got their name, and the lock between processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from daemon.core.inputs import Abandoned, Arrived
from ipc.messages import Generate, Sampling
from journal.errors import JournalBusy
from journal.opening import Unfinished, open_journal
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.journal.helpers import ID, SMALL, begin, closed, decided, opened, sequences, start, tick
from tests.journal.modeled_disk import ModeledDisk


def test_unfinished_requests_are_found() -> None:
    """Accepted and not ended, choice by choice; a request that only arrived, or was refused, was never promised."""
    disk = ModeledDisk()
    writer = start(disk)
    writer.append(Arrived(1, "front", Generate("a", b"", Sampling()), 0))
    writer.append_all([decided("accepted", 1, n=1), decided("accepted", 2, n=3), decided("admitted", 2)])
    writer.append_all([decided("ended", 3), decided("refused", 0), decided("accepted", 5, n=2), decided("ended", 1)])
    writer.flush()
    _, recovered = begin(disk.killed(), life="b")
    assert recovered.unfinished == Unfinished([2, 4, 5, 6], 7)
    assert not recovered.clean


def test_unfinished_over_lives() -> None:
    """A life that ended its inherited requests leaves none; one that died before it could hands them on."""
    disk = ModeledDisk()
    writer = start(disk, life="a")
    writer.append(decided("accepted", 1, n=2))
    writer.flush()
    disk = disk.killed()
    _, recovered = begin(disk, life="b")
    assert recovered.unfinished == Unfinished([1, 2], 3)
    disk = disk.killed()  # life b died right after its `Opened` ...
    writer, recovered = begin(disk, life="c")
    assert recovered.unfinished == Unfinished([1, 2], 3), "... and life c finds them all the same"
    writer.append(Abandoned(1, [1, 2], 3))
    writer.append_all([decided("ended", 1), decided("ended", 2), decided("accepted", 3, n=1), decided("ended", 3)])
    writer.append(closed())
    writer.close()
    _, recovered = begin(disk, life="d")
    assert recovered.unfinished == Unfinished([], 4)
    assert recovered.clean
    assert recovered.lives == 3


def test_numbers_go_on_from_what_was_inherited() -> None:
    """A life that accepted nothing still knows the next free number, from its own first input."""
    disk = ModeledDisk()
    writer = start(disk)
    writer.append(Abandoned(1, [], 42))
    writer.append(closed())
    writer.close()
    _, recovered = begin(disk, life="b")
    assert recovered.unfinished == Unfinished([], 42)


def test_files_without_a_name_are_removed() -> None:
    """A segment that was being started when the process died holds nothing that is not elsewhere."""
    disk = ModeledDisk()
    writer = start(disk, SMALL)
    tick(writer, 8)
    disk.fail_at, disk.forever = disk.operations + 5, True  # sync, create, write, sync, then the frames
    writer.sync()
    assert "leaving 0000000001.kvj" in writer.degraded
    assert any(name.endswith(".tmp") for name in disk.files), "its removal failed too"
    disk = disk.killed()
    _, recovered = begin(disk, life="b")
    assert not any(name.endswith(".tmp") for name in disk.files)
    assert (recovered.last_sequence, recovered.notes) == (9, [])


def test_rotation_that_failed_is_tried_again() -> None:
    """A full segment that could not be left goes on being written, health says why, and the next sync leaves it."""
    disk = ModeledDisk()
    writer = start(disk, SMALL)
    tick(writer, 8)
    disk.fail_at = disk.operations + 2
    writer.sync()
    assert "leaving 0000000001.kvj" in writer.degraded
    assert writer.synced_through == 9, "the sync itself succeeded"
    tick(writer)
    writer.sync()
    assert writer.degraded == ""
    tick(writer)
    assert sequences(disk) == list(range(1, 12))
    assert sorted(disk.files) == ["0000000001.kvj", "0000000002.kvj"]


def test_another_process_holds_the_directory(tmp_path: Path) -> None:
    """The second daemon is refused with the pid of the first, and may start once that one is dead, however it died."""
    script = (
        "import sys; from journal.storage import DiskStorage\n"
        "DiskStorage(sys.argv[1]).lock(); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(JournalBusy) as caught:
            open_journal(DiskStorage(tmp_path), JournalSettings(), ID)
        assert caught.value.pid == other.pid
        other.kill()
    writer, _ = open_journal(DiskStorage(tmp_path), JournalSettings(), ID)
    writer.append(opened())
    writer.close()


def test_the_journal_keeps_its_id() -> None:
    """The id is drawn once per directory; a later life's is not used."""
    disk = ModeledDisk()
    start(disk).close()
    writer, _ = open_journal(disk, JournalSettings(), bytes(16))
    writer.append(opened("b"))
    writer.close()
    assert sequences(disk) == [1, 2]
