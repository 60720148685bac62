"""Snapshots: replay that begins at one ends like replay from the start, and none is used that does not hold."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest

from daemon.recovery import recover
from journal import segment, snapshots
from journal.errors import JournalDamaged
from journal.opening import open_journal
from journal.reader import read_records
from journal.records import Kind
from journal.replay import Verdict, check
from journal.segment import segment_behind, segment_names
from journal.snapshots import Body, Header, SnapshotUnusable, decode_body, snapshot_names
from journal.writer import JournalSettings
from tests.journal.helpers import ID
from tests.journal.modeled_disk import ModeledDisk
from tests.journal.test_lives import live, reopened
from tests.journal.world import World
from tools.replica import factories

SMALL = JournalSettings(segment_bytes=16 << 10)
EVERY_BYTES = 18_000


def lived(iterations: int = 110, seed: int = 1, disk: ModeledDisk | None = None) -> tuple[ModeledDisk, World]:
    """A world that made several snapshots."""
    disk = disk or ModeledDisk()
    world = World(disk, seed, f"life {seed}", SMALL, snapshot_bytes=EVERY_BYTES)
    for _ in range(iterations):
        world.iterate()
    return disk, world


def replayed(disk: ModeledDisk, start: tuple[Header, Body] | None = None) -> Verdict:
    return check(read_records(disk), factories(), start=start)


def start_of(disk: ModeledDisk, name: str) -> tuple[Header, Body]:
    header, data = snapshots.load(disk, name)
    return header, decode_body(data)


@pytest.mark.parametrize("seed", range(2))
def test_replay_reproduces_every_snapshot(seed: int) -> None:
    """The state behind each step that asked for one comes out byte for byte; two files are kept, under new segments."""
    disk, world = lived(seed=seed)
    world.writer.flush()
    verdict = replayed(disk)
    assert verdict.divergence is None, verdict.divergence
    recorded: list[Any] = [record.decode() for record in read_records(disk) if record.kind == Kind.SNAPSHOTTED]
    assert verdict.counts.snapshots == len(recorded) == world.keeper.written >= 3
    names = snapshot_names(sorted(disk.files))
    assert list(names) == [said.sequence for said in recorded[-2:]]
    for said in recorded[-2:]:
        header, data = snapshots.load(disk, said.file)
        assert (header.sequence, header.digest, header.life) == (said.sequence, said.digest, f"life {seed}")
        assert len(disk.files[said.file].data) == said.size_bytes
        assert segment.digest(data) == said.digest


@pytest.mark.parametrize("seed", range(2))
def test_replay_from_a_snapshot_ends_like_replay_from_the_start(seed: int) -> None:
    """Every step, decision and digest behind it, over a lost epoch and another life, and the same state at the end."""
    disk, world = lived(seed=seed)
    names = list(snapshot_names(sorted(disk.files)).values())
    kept = {name: disk.files[name] for name in names}
    world.end_epoch(1)
    world.begin_epoch(2)
    for _ in range(30):
        world.iterate()
    world.writer.flush()
    disk = disk.killed()
    _, second = lived(50, seed + 50, disk)
    second.writer.flush()
    whole = replayed(disk)
    assert whole.divergence is None, whole.divergence
    for name in names:
        disk.files[name] = kept[name]
        part = replayed(disk, start_of(disk, name))
        assert part.divergence is None, part.divergence
        assert 0 < part.counts.steps < whole.counts.steps
        assert part.replay.core is not None
        assert whole.replay.core is not None
        assert part.replay.core.state_digest() == whole.replay.core.state_digest()
        assert part.replay.core.view() == whole.replay.core.view()


@pytest.mark.parametrize("seed", range(2))
def test_a_restart_reads_only_what_is_behind_the_newest_snapshot(seed: int) -> None:
    """And finds exactly what the core knew."""
    disk, world = lived(100, seed)
    recovery = reopened(disk)
    assert recovery.snapshot == max(snapshot_names(sorted(disk.files)))
    assert recovery.records == world.writer.written_through - recovery.snapshot
    assert (recovery.how, recovery.notes) == ("replayed", [])
    assert recovery.groups == world.core.recoverable()
    assert recovery.next_request == world.core.next_request


@pytest.mark.parametrize("segment_bytes", [4 << 10, 16 << 10, 64 << 20])
def test_a_snapshot_may_stand_in_any_segment_of_its_life(segment_bytes: int) -> None:
    """Also in the one that the life begins in: what was written behind it there is not passed over."""
    settings, in_the_first = JournalSettings(segment_bytes=segment_bytes), 0
    disk = ModeledDisk()
    world = World(disk, 0, "a", settings, snapshot_bytes=8 << 10)
    for at in range(60):
        world.iterate()
        if at % 5 == 4:
            recovery = reopened(disk)
            assert recovery.groups == world.core.recoverable()
            assert recovery.next_request == world.core.next_request
            assert recovery.records == world.writer.written_through - recovery.snapshot
            in_the_first += bool(recovery.snapshot) and segment_behind(disk, recovery.snapshot) == 1
    assert in_the_first or segment_bytes < 8 << 10, "no snapshot stood in the first segment"


def damaged(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def torn(data: bytearray) -> None:
    del data[-10:]


def of_another_life(data: bytearray) -> None:
    rewritten(data, life="somebody else's")


def of_another_version(data: bytearray) -> None:
    rewritten(data, decision_version=999)


def rewritten(data: bytearray, **changes: Any) -> None:
    """The same body under another header."""
    disk = ModeledDisk()
    handle = disk.create("x")
    disk.write(handle, bytes(data))
    start = snapshots._START.unpack_from(data)
    header = msgspec.msgpack.decode(bytes(data[16 : 16 + start[1]]), type=Header)
    packed = bytes(data[16 + start[1] :])
    body = snapshots._body("x", header, packed)
    name, _ = snapshots.write(disk, msgspec.structs.replace(header, **changes), body)
    data[:] = disk.files[name].data


@pytest.mark.parametrize("change", [damaged, torn, of_another_life, of_another_version])
def test_a_snapshot_that_does_not_hold_is_not_used(change: Any) -> None:
    """The one before it is, then the start of the life; what goes on is the same."""
    disk, world = lived(100)
    older, newer = snapshot_names(sorted(disk.files)).values()
    for name, expected in ((newer, older), (older, "")):
        change(disk.files[name].data)
        recovery = reopened(disk)
        assert recovery.snapshot == (next(iter(snapshot_names([expected])), 0) if expected else 0)
        assert recovery.groups == world.core.recoverable()
        assert bool(recovery.notes) == (change is not of_another_life), "whose it is is no fault"


def test_without_its_beginning_and_without_a_snapshot_only_records_are_left() -> None:
    """A trimmed life whose snapshots are of another version: their lists of what was accepted are used, and lose
    nothing."""
    disk, world = lived(100)
    older, newer = snapshot_names(sorted(disk.files)).values()
    for name in (older, newer):
        of_another_version(disk.files[name].data)
    del disk.files["0000000001.kvj"]
    assert "0000000002.kvj" in disk.files
    recovery = reopened(disk)
    assert recovery.how == "records"
    assert len(recovery.notes) >= 3
    assert set(live(recovery.groups)) >= set(live(world.core.recoverable()))
    assert recovery.next_request == world.core.next_request


def test_a_disk_that_takes_no_snapshot_costs_only_the_snapshot() -> None:
    """Whatever operation fails, the journal goes on, a later snapshot succeeds, and no file is half there."""
    failed = 0
    for operation in range(0, 120, 7):
        disk, world = lived(30)
        written = world.keeper.written
        disk.fail_at = disk.operations + operation
        for _ in range(70):
            world.iterate()
        world.writer.flush()
        failed += "SnapshotFailed" in world.lines.events
        assert world.keeper.written > written
        for name in snapshot_names(sorted(disk.files)).values():
            snapshots.load(disk, name)
        verdict = replayed(disk)
        assert verdict.divergence is None, verdict.divergence
    assert failed, "no operation of a snapshot was met"


def test_a_false_snapshot_is_found() -> None:
    """A digest that differs is a divergence at the record that names it."""
    disk, _ = lived()
    records = list(read_records(disk))
    at = next(at for at, record in enumerate(records) if record.kind == Kind.SNAPSHOTTED)
    said: Any = records[at].decode()
    payload = msgspec.msgpack.encode(msgspec.structs.replace(said, digest=bytes(16)))
    records[at] = records[at]._replace(payload=payload)
    verdict = check(records, factories())
    assert verdict.divergence is not None
    assert verdict.divergence.sequence == records[at].sequence
    assert f"behind record {said.sequence}" in verdict.divergence.what


def test_a_killed_writer_leaves_no_half_snapshot() -> None:
    """Killed at each operation of writing one: the file is whole or not there, and the next life finds the same."""
    disk, world = lived(100)
    header, data = snapshots.load(disk, max(snapshot_names(sorted(disk.files)).values()))
    expected = world.core.recoverable()
    later = msgspec.structs.replace(header, sequence=world.writer.last_sequence)
    for operation in range(1, 8):
        copy = disk.killed()
        copy.fail_at, copy.forever = copy.operations + operation, True
        with contextlib.suppress(OSError):
            snapshots.write(copy, later, data)
        after = copy.killed()
        _, found = open_journal(after, SMALL, ID)
        for name in snapshot_names(after.names()).values():
            snapshots.load(after, name)
        assert not any(name.endswith(".tmp") for name in after.names())
        if snapshots.snapshot_name(later.sequence) not in after.names():
            assert recover(after, found).groups == expected


def test_a_file_that_is_no_snapshot_is_refused() -> None:
    """Shorter than a header, without its magic, under another name."""
    disk, _ = lived()
    name, content = next((name, disk.files[name].data) for name in disk.files if name.startswith("snapshot"))
    for data, other in ((content[:7], name), (b"x" + content[1:], name), (content, snapshots.snapshot_name(1))):
        copy = ModeledDisk()
        copy.write(copy.create(other), bytes(data))
        with pytest.raises(SnapshotUnusable):
            snapshots.load(copy, other)


def test_a_start_does_not_read_what_the_snapshot_covers() -> None:
    """However long a life was: only its first records, and what is behind its newest snapshot. Damage before is
    `verify`'s to find, and cannot keep a daemon from starting."""
    disk, world = lived(100)
    newest = max(snapshot_names(sorted(disk.files)))
    between = [name for number, name in segment_names(sorted(disk.files)).items() if number in (2, 3)]
    assert max(between) < segment_names(sorted(disk.files))[segment_behind(disk, newest)]
    for name in between:
        disk.files[name].data[1000] ^= 1
    recovery = reopened(disk)
    assert recovery.groups == world.core.recoverable()
    assert recovery.notes == []
    with pytest.raises(JournalDamaged, match="damaged_inside"):
        list(read_records(disk))
