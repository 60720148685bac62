"""Opening: the life that is to be read, files that never got their name, and the lock between processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from daemon.core.inputs import Recovered
from journal.errors import JournalBusy
from journal.opening import open_journal
from journal.storage import DiskStorage
from journal.writer import JournalSettings
from tests.journal.helpers import ID, SMALL, begin, closed, opened, sequences, start, tick
from tests.journal.modeled_disk import ModeledDisk


def test_the_last_life_that_took_over_is_found() -> None:
    """A life is read from its start; one that died before it had said what it took over leaves the one before it."""
    disk = ModeledDisk()
    _, found = begin(disk, life="a")
    assert (found.life_segment, found.lives, found.last_sequence, found.clean) == (0, 0, 0, True)
    disk = disk.killed()
    _, found = begin(disk, life="b")  # which dies right after its `Opened` ...
    assert (found.life_segment, found.lives, found.last_sequence, found.clean) == (1, 1, 1, False)
    disk = disk.killed()
    writer, found = begin(disk, life="c")
    assert (found.life_segment, found.lives) == (1, 2), "... and life c finds a all the same"
    writer.append(Recovered(1, [], 42))
    writer.append(closed())
    writer.close()
    writer, found = begin(disk, life="d")
    assert (found.life_segment, found.lives, found.clean) == (3, 3, True)
    writer.close()
    _, found = begin(disk, life="e")
    assert found.life_segment == 3, "d took nothing over"


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
