"""Cut and changed files: booting works after any cut, and a changed byte is never taken for what was written."""

from __future__ import annotations

import pytest

from journal import segment
from journal.errors import JournalDamaged
from journal.reader import Walk, read_records
from journal.segment import segment_name
from tests.journal.helpers import SMALL, begin, closed, sequences, start, tick
from tests.journal.modeled_disk import Inode, ModeledDisk


def disk_of(files: dict[str, bytes]) -> ModeledDisk:
    """A disk that holds these files, all of them durable."""
    disk = ModeledDisk()
    disk.files = {name: Inode(bytearray(data), data) for name, data in files.items()}
    disk.durable_entries = dict(disk.files)
    return disk


def journal(records: int, closing: bool = False) -> tuple[str, bytes, list[int]]:
    """A journal of one segment: its name, its bytes, and the offset behind each record."""
    disk = ModeledDisk()
    writer = start(disk)
    tick(writer, records - 1)
    if closing:
        writer.append(closed())
        writer.flush()
    here = segment.load(disk, segment_name(1))
    ends = [found.end for found in segment.frames(here.data, here.start)]  # type: ignore[union-attr]
    return here.name, here.data, [here.start, *ends]


@pytest.mark.parametrize("closing", [False, True])
def test_cut_at_every_byte(closing: bool) -> None:
    """Wherever the file ends, the whole records before are kept, the rest lies beside, and one line says so."""
    name, data, ends = journal(5, closing)
    for length in range(len(data) + 1):
        disk = disk_of({name: data[:length]})
        whole = sum(end <= length for end in ends) - 1  # -1: not even the segment's header
        _, recovered = begin(disk, life="next")
        assert recovered.last_sequence == max(whole, 0)
        torn = length not in (ends if whole >= 0 else [])
        assert len(recovered.notes) == torn
        if torn:
            kept = [held for held in disk.files if held.endswith(".cut")]
            sound = ends[whole] if whole >= 0 else 0
            assert [bytes(disk.files[held].data) for held in kept] == [data[sound:length]]
            assert kept[0] in recovered.notes[0]
            assert f"cut {length - sound} bytes" in recovered.notes[0]
        assert sequences(disk) == list(range(1, recovered.last_sequence + 2))
        assert recovered.clean == (whole <= 0 or (closing and length == len(data)))


@pytest.mark.parametrize("synced", [False, True])
def test_flip_every_byte(synced: bool) -> None:
    """A changed byte costs at most what was not promised, and never gives a record that was not written.

    Synced: the records behind prove that the changed place was on disk, so opening refuses and says where.
    """
    disk = ModeledDisk()
    writer = start(disk)
    tick(writer, 3)
    if synced:
        writer.sync()
    tick(writer, 3)
    name = segment_name(1)
    data = disk.read(name)
    written = {record.sequence: record.payload for record in read_records(disk)}
    here = segment.load(disk, name)
    ends = [found.end for found in segment.frames(here.data, here.start)]  # type: ignore[union-attr]
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x41
        damaged = disk_of({name: bytes(changed)})
        record = sum(end <= at for end in ends) + 1
        promised = at < here.start or record <= writer.synced_through
        if promised:
            with pytest.raises(JournalDamaged) as caught:
                begin(damaged)
            assert caught.value.file == name
            assert caught.value.offset <= at
            assert not damaged.locked, "a refused journal is left locked"
            continue
        _, recovered = begin(damaged, life="next")
        assert recovered.last_sequence == record - 1
        found = {item.sequence: item.payload for item in read_records(damaged)}
        assert all(found[sequence] == written[sequence] for sequence in range(1, record))


def test_flip_every_byte_of_a_finished_segment() -> None:
    """In a segment that was left, any changed byte is refused: it was synced before the next one began."""
    disk = ModeledDisk()
    writer = start(disk, SMALL)
    tick(writer, 8)
    writer.sync()
    tick(writer, 2)
    first, second = disk.read(segment_name(1)), disk.read(segment_name(2))
    for at in range(len(first)):
        changed = bytearray(first)
        changed[at] ^= 0x41
        with pytest.raises(JournalDamaged):
            begin(disk_of({segment_name(1): bytes(changed), segment_name(2): second}))


def test_refusal_says_what_is_sound() -> None:
    """The error names file, offset and sequence number, the rule, and where sound records go on."""
    disk = ModeledDisk()
    writer = start(disk)
    tick(writer, 3)
    writer.sync()
    tick(writer)
    name = segment_name(1)
    data = bytearray(disk.read(name))
    here = segment.load(disk, name)
    third = list(segment.frames(here.data, here.start))[2]
    data[third.offset + 33] ^= 1
    with pytest.raises(JournalDamaged) as caught:
        begin(disk_of({name: bytes(data)}))
    assert (caught.value.rule, caught.value.file, caught.value.offset) == ("bad_inside", name, third.offset)
    assert caught.value.sequence == 3
    assert f"sound through sequence 2, and again at byte {third.end}, sequence 4 to 5" in str(caught.value)  # type: ignore[union-attr]


def test_interrupted_repair_can_be_repeated() -> None:
    """Opening that fails at any operation of its repair leaves a journal that the next opening repairs to the same."""
    name, data, ends = journal(4)
    for fail_at in range(1, 100):
        disk = disk_of({name: data[: ends[-1] - 3]})
        disk.fail_at = fail_at
        try:
            begin(disk)
        except Exception:
            disk = disk.killed()
            _, recovered = begin(disk)
            assert recovered.last_sequence in (3, 4)  # 4: the failed opening had come to write its `Opened`
        assert sequences(disk)[:3] == [1, 2, 3]
        assert data[ends[-2] : ends[-1] - 3] in [bytes(inode.data) for inode in disk.files.values()]
        if disk.operations < fail_at and disk.fail_at:
            return
    raise AssertionError("no opening passed untouched")


def test_tolerant_walk_reads_on() -> None:
    """`verify` yields every sound record on both sides of each damage, and one finding per damage."""
    disk = ModeledDisk()
    writer = start(disk)
    tick(writer, 9)
    name = segment_name(1)
    data = bytearray(disk.read(name))
    frames = list(segment.frames(bytes(data), segment.load(disk, name).start))
    for broken in (2, 3, 6):
        data[frames[broken].offset + 8] ^= 0xFF
    walk = Walk(disk_of({name: bytes(data)}), tolerant=True)
    assert [record.sequence for record in walk.records()] == [1, 2, 5, 6, 8, 9, 10]
    assert [found.offset for found in walk.findings if found.row.label != "clean_end"] == [
        frames[2].offset,
        frames[6].offset,
    ]
