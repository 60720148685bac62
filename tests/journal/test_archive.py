"""Compression of finished segments: the same records at every moment, and never the segment being written."""

from __future__ import annotations

import contextlib
import random

import pytest

from journal.archive import compress_segments
from journal.reader import Walk
from journal.segment import segment_name
from journal.writer import JournalWriter
from tests.journal.helpers import FULL_TICKS, SMALL, begin, sequences, start, tick
from tests.journal.modeled_disk import ModeledDisk


def three_segments(disk: ModeledDisk) -> JournalWriter:
    writer = start(disk, SMALL)
    for _ in range(2):
        tick(writer, FULL_TICKS)
        writer.sync()
    tick(writer, 2)
    assert sorted(disk.files) == [segment_name(number) for number in (1, 2, 3)]
    return writer


def test_only_finished_segments_are_compressed() -> None:
    """The current segment stays plain; reading, verifying and the next life find the same records."""
    disk = ModeledDisk()
    writer = three_segments(disk)
    before = sequences(disk)
    assert writer.compress_finished() == 2
    assert writer.compress_finished() == 0
    assert sorted(disk.files) == [segment_name(1) + ".zst", segment_name(2) + ".zst", segment_name(3)]
    assert sequences(disk) == before
    tick(writer)
    _, recovered = begin(disk.killed(), life="b")
    assert recovered.last_sequence == before[-1] + 1


def test_archives_outlive_the_machine() -> None:
    """A plain file is removed only when its archive and the archive's name are on disk."""
    rng = random.Random(1)
    for seed in range(60):
        rng.seed(seed)
        disk = ModeledDisk()
        writer = three_segments(disk)
        writer.sync()
        before = sequences(disk)
        disk.fail_at, disk.forever = disk.operations + rng.randint(1, 20), True
        with contextlib.suppress(OSError):
            writer.compress_finished()
        assert sequences(disk.crashed(rng)) == before


def test_every_operation_of_compression_fails_once() -> None:
    """Wherever it is interrupted, all records are there, and the next attempt finishes it."""
    for fail_at in range(1, 100):
        disk = ModeledDisk()
        writer = three_segments(disk)
        before = sequences(disk)
        disk.fail_at = disk.operations + fail_at
        try:
            writer.compress_finished()
        except OSError:
            assert sequences(disk) == before
            writer.compress_finished()
        done = disk.operations < disk.fail_at
        assert sorted(disk.files) == [segment_name(1) + ".zst", segment_name(2) + ".zst", segment_name(3)]
        assert sequences(disk) == before
        if done:
            assert fail_at > 10
            return
    raise AssertionError("no attempt passed untouched")


@pytest.mark.parametrize("name", [segment_name(1), segment_name(2)])
def test_plain_and_archive_side_by_side(name: str) -> None:
    """Between the rename and the removal both are there: the segment is read once."""
    disk = ModeledDisk()
    three_segments(disk)
    before = sequences(disk)
    plain = disk.files[name]
    compress_segments(disk, 3)
    disk.files[name] = plain
    walk = Walk(disk)
    assert [record.sequence for record in walk.records()] == before
    assert [found.row.label for found in walk.findings] == ["clean_end"]


def test_archive_appears_while_reading() -> None:
    """A reader that listed the plain file finds the archive in its place."""

    class Racing(ModeledDisk):
        def names(self) -> list[str]:
            found = super().names()
            if self.racing:
                self.racing = False
                compress_segments(self, 3)
            return found

        racing = False

    disk = Racing()
    three_segments(disk)
    before = sequences(disk)
    disk.racing = True
    assert sequences(disk) == before
    assert not disk.racing
