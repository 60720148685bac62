"""The recovery table: one journal on disk per row, made so that exactly that row is met."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import pytest

from journal import frame, records, segment
from journal.errors import JournalDamaged
from journal.reader import Walk, read_records
from journal.records import Kind
from journal.recovery import DAMAGE, TABLE, Case, Condition, Decision, judge
from journal.segment import encode_header, segment_name
from journal.snapshots import snapshot_name
from tests.journal.helpers import FULL_TICKS, SMALL, begin, closed, opened, start, tick
from tests.journal.modeled_disk import Inode, ModeledDisk

Files = dict[str, bytes]
ONE, TWO, THREE = segment_name(1), segment_name(2), segment_name(3)


def files_of(disk: ModeledDisk) -> Files:
    return {name: bytes(inode.data) for name, inode in disk.files.items()}


def single(synced: bool = False) -> Files:
    """One segment with records 1 to 6; synced through 4 or not at all behind 1."""
    disk = ModeledDisk()
    writer = start(disk)
    tick(writer, 3)
    if synced:
        writer.sync()
    tick(writer, 2)
    return files_of(disk)


def several(count: int = 3) -> Files:
    """So many segments, the last of them with records."""
    disk = ModeledDisk()
    writer = start(disk, SMALL)
    for _ in range(count - 1):
        tick(writer, FULL_TICKS)
        writer.sync()
    tick(writer, 3)
    assert sorted(disk.files) == [segment_name(number) for number in range(1, count + 1)]
    return files_of(disk)


def offsets(data: bytes) -> list[int]:
    """Offsets of the frames of a segment, its header first."""
    return [found.offset for found in segment.frames(data, 0)]


def reframed(data: bytes, place: int, **changes: int) -> bytes:
    """The segment with one frame made anew, sound by its CRC, with other fields."""
    found = frame.decode(data, offsets(data)[place])
    assert isinstance(found, frame.Frame)
    found = found._replace(**changes)
    fresh, _ = frame.encode(
        found.sequence,
        found.kind,
        found.flags,
        min(found.synced_through, found.sequence),
        found.prev_crc,
        found.payload,
    )
    return data[: found.offset] + fresh + data[found.end :]


def with_last(files: Files, name: str, change: Callable[[bytes], bytes]) -> Files:
    return {**files, name: change(files[name])}


def with_unknown(flags: int) -> Files:
    """Record 6 is of a kind from the future."""
    return with_last(single(), ONE, lambda data: reframed(data, 6, kind=99, flags=flags))


def with_header(files: Files, name: str, **changes: object) -> Files:
    """The segment's header says something else, soundly."""
    data = files[name]
    old = frame.decode(data, 0)
    assert isinstance(old, frame.Frame)
    header = segment._decoder.decode(old.payload)
    fields = {field: getattr(header, field) for field in header.__struct_fields__}
    fresh = encode_header(segment.SegmentHeader(**{**fields, **changes}), old.prev_crc)  # type: ignore[arg-type]
    return {**files, name: fresh + data[old.end :]}


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]


def closed_life() -> Files:
    """One segment of a closed life, as short as its records: nothing in it says what was synced before."""
    disk = ModeledDisk()
    writer = start(disk)
    tick(writer, 3)
    writer.append(closed())
    writer.flush()
    return files_of(disk)


def closed_with_more() -> Files:
    disk = ModeledDisk()
    writer = start(disk)
    writer.append(closed())
    writer.flush()
    tick(writer)
    return files_of(disk)


def superseded() -> Files:
    """An fsync failed: the first segment's tail was written again in the second."""
    disk = ModeledDisk()
    writer = start(disk)
    tick(writer, 2)
    disk.fail_at = disk.operations + 1
    writer.sync()
    assert sorted(disk.files) == [ONE, TWO]
    return files_of(disk)


def foreign_segment() -> Files:
    files = several()
    return with_header(files, THREE, journal_id=bytes(16))


def trimmed(covered: int = 0) -> Files:
    """The oldest segment is gone; a snapshot covers what stood in it, or a record more or less."""
    files = several()
    del files[ONE]
    found = frame.decode(files[TWO], 0)
    assert isinstance(found, frame.Frame)
    return {**files, snapshot_name(found.sequence - 1 + covered): b"its contents are for who reads it"}


CASES: dict[str, Callable[[], Files]] = {
    "clean_end": single,
    "superseded_tail": superseded,
    "damaged_inside": lambda: with_last(several(), TWO, lambda data: flip(data, len(data) - 20)),
    "short_header": lambda: with_last(single(), ONE, lambda data: data + bytes(5)),
    "short_payload": lambda: with_last(single(), ONE, lambda data: data[:-8]),
    "bad_tail": lambda: with_last(single(), ONE, lambda data: flip(data, len(data) - 20)),
    "bad_inside": lambda: with_last(single(synced=True), ONE, lambda data: flip(data, offsets(data)[3] + 30)),
    "closed_damaged": lambda: with_last(closed_life(), ONE, lambda data: flip(data, offsets(data)[3] + 30)),
    "lost_write": lambda: with_last(single(), ONE, lambda data: flip(data, offsets(data)[3] + 30)),
    "link_mismatch": lambda: with_last(single(), ONE, lambda data: reframed(data, 6, prev_crc=1)),
    "sequence_gap": lambda: with_last(single(), ONE, lambda data: reframed(data, 6, sequence=7)),
    "after_footer": closed_with_more,
    "unknown_skippable": lambda: with_unknown(frame.MAY_SKIP),
    "unknown_needed": lambda: with_unknown(0),
    "trimmed": trimmed,
    "segment_missing": lambda: {name: data for name, data in several().items() if name != TWO},
    "predecessor_mismatch": lambda: with_header(several(), THREE, previous_digest=bytes(16)),
    "newer_format": lambda: with_header(several(), THREE, major=segment.FORMAT_MAJOR + 1),
    "other_journal": foreign_segment,
    "bad_archive": lambda: {(name + ".zst" if name == ONE else name): data for name, data in several().items()},
}


def test_only_a_snapshot_that_covers_it_excuses_what_is_missing() -> None:
    """One record short, and the oldest segment is missing; any more, and it was trimmed."""
    for covered, rules in ((-1, {"segment_missing"}), (0, {"trimmed"}), (1, {"trimmed"})):
        disk = ModeledDisk()
        disk.files = {name: Inode(bytearray(data), data) for name, data in trimmed(covered).items()}
        walk = Walk(disk, tolerant=True)
        list(walk.records())
        assert {found.row.label for found in walk.findings} - {"clean_end"} >= rules


def test_every_row_has_a_case() -> None:
    """The table and these cases name the same rows, each label once."""
    assert sorted(row.label for row in TABLE) == sorted(CASES)


@pytest.mark.parametrize("label", CASES)
def test_row(label: str) -> None:
    """The row is met, alone; a strict walk does what it decides, and what is kept is a prefix."""
    row = next(row for row in TABLE if row.label == label)
    disk = ModeledDisk()
    disk.files = {name: Inode(bytearray(data), data) for name, data in CASES[label]().items()}
    before = files_of(disk)
    walk = Walk(disk)
    if row.decision is Decision.REFUSE:
        with pytest.raises(JournalDamaged) as caught:
            list(walk.records())
        assert caught.value.rule == label
        with pytest.raises(JournalDamaged):
            begin(disk)
        assert files_of(disk) == before, "a refusal changed a file"
        return
    found = [record.sequence for record in walk.records()]
    labels = [finding.row.label for finding in walk.findings]
    goes_on = row.decision is Decision.SKIP or label == "trimmed"
    assert labels == ([label, "clean_end"] if goes_on else [label])
    assert found == list(range(found[0] if label == "trimmed" else 1, found[-1] + 1))
    _, opening = begin(disk, life="next")
    assert opening.last_sequence >= len(found)
    assert bool(opening.notes) == (row.decision is Decision.CUT_TORN or label == "unknown_skippable")


def refused(files: Files) -> list[tuple[str, str]]:
    """What a tolerant walk finds that is refused: rules and files."""
    disk = ModeledDisk()
    disk.files = {name: Inode(bytearray(data), data) for name, data in files.items()}
    walk = Walk(disk, tolerant=True)
    list(walk.records())
    return [(one.row.label, one.file) for one in walk.findings if one.row.decision is Decision.REFUSE]


@pytest.mark.parametrize("label", [row.label for row in TABLE if row.decision is Decision.REFUSE])
def test_one_cause_is_one_finding(label: str) -> None:
    """What follows from it, a digest or a predecessor that cannot be right, is not told beside it."""
    assert [rule for rule, _ in refused(CASES[label]())] == [label]


def test_damage_that_loses_records_is_one_finding_each() -> None:
    """A segment that is cut, one that is empty, two gaps: as many findings, each of its file."""
    files = several(5)
    names = sorted(files)
    for cut in (-20, 200, 0):
        assert refused(with_last(files, names[2], lambda data, cut=cut: data[:cut])) == [("damaged_inside", names[2])]
    gaps = {name: data for name, data in files.items() if name not in (names[1], names[3])}
    assert refused(gaps) == [("segment_missing", names[1]), ("segment_missing", names[3])]
    both = with_last({name: files[name] for name in (names[0], *names[2:])}, names[3], lambda data: data[:-20])
    assert refused(both) == [("segment_missing", names[1]), ("damaged_inside", names[3])]


def test_every_case_has_a_row() -> None:
    """No combination of facts that can be met is without a verdict, and only the last segment is ever cut."""
    for condition, last, behind, promised, shut, skip in product(Condition, *[(False, True)] * 5):
        if (promised or shut) and not behind:
            continue
        case = Case(condition, last, behind, promised, shut, skip)
        row = judge(case)
        if row.decision is Decision.CUT_TORN:
            assert last
            assert not promised
            assert not shut
            assert condition in DAMAGE


def test_missing_first_segment() -> None:
    """Without its first segment a journal cannot be replayed, and is refused."""
    files = several()
    del files[ONE]
    disk = ModeledDisk()
    disk.files = {name: Inode(bytearray(data), data) for name, data in files.items()}
    with pytest.raises(JournalDamaged, match="segment_missing"):
        list(read_records(disk))


def test_torn_segment_header() -> None:
    """A last segment whose header was torn holds no record: it is put aside, and the one before is the last."""
    files = several()
    for length in range(segment_header_bytes(files[THREE])):
        disk = ModeledDisk()
        disk.files = {name: Inode(bytearray(data), data) for name, data in files.items()}
        del disk.files[THREE].data[length:]
        _, recovered = begin(disk, life="next")
        kept = len(list(Walk(disk).records()))
        assert recovered.last_sequence == kept - 1
        assert any(THREE in note and "segment header" in note for note in recovered.notes)


def segment_header_bytes(data: bytes) -> int:
    found = frame.decode(data, 0)
    assert isinstance(found, frame.Frame)
    return found.end


def test_every_byte_of_a_closed_life_counts() -> None:
    """A changed byte before a sound `Closed` is refused, with place and what is sound on both sides; no byte is cut."""
    files = closed_life()
    data = files[ONE]
    records_at, last = offsets(data)[1], offsets(data)[-1]
    for at in range(len(data)):
        disk = ModeledDisk()
        changed = flip(data, at)
        disk.files = {ONE: Inode(bytearray(changed), changed)}
        if at >= last:
            _, recovered = begin(disk, life="next")
            assert recovered.last_sequence == 4
            continue
        with pytest.raises(JournalDamaged, match=rf"{ONE} at byte \d+, sequence \d+: ") as caught:
            begin(disk)
        assert caught.value.offset <= at
        if at >= records_at:
            sound = rf"sound through sequence {caught.value.sequence - 1}, and again at byte \d+, sequence \d to 5"
            assert re.search(sound, str(caught.value))
        assert files_of(disk) == {ONE: changed}


def test_case_facts_decide() -> None:
    """The same damage is cut or refused by one fact: whether records behind it prove that it was on disk."""
    torn = Case(Condition.BAD_FRAME, last=True, sound_behind=True)
    assert judge(torn).label == "lost_write"
    assert judge(replace(torn, promised=True)).label == "bad_inside"
    assert judge(replace(torn, closed_behind=True)).label == "closed_damaged"
    assert judge(replace(torn, last=False)).label == "damaged_inside"


def test_payload_that_does_not_fit_its_type() -> None:
    """A sound frame with a payload of another shape is an error of its reader, where it is decoded."""
    data, _ = frame.encode(2, Kind.TICKED, 0, 1, 0, records.encode(opened()))
    found = frame.decode(data, 0)
    assert isinstance(found, frame.Frame)
    with pytest.raises(msgspec.ValidationError, match="Opened"):
        records.decode(Kind.TICKED, found.payload)


def test_the_documentation_has_the_table() -> None:
    """`docs/journal_format.md` lists every row with its decision, in the order in which rows are tried."""
    text = (Path(__file__).parents[2] / "docs" / "journal_format.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (accept|skip|cut_torn|refuse) \|", text, re.MULTILINE)
    assert listed == [(row.label, row.decision.value) for row in TABLE]
