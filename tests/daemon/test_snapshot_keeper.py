"""The keeper with copies of the process on a real disk: the same bytes, and a copy that fails costs one snapshot."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import trio

from daemon.core.scheduler import SchedulerCore
from daemon.snapshot_draft import Begin, ForkedDraft, Moment
from ipc.packing import PackingError, pack, unpack
from journal import snapshots
from journal.reader import read_records
from journal.replay import check
from journal.snapshots import snapshot_names
from journal.storage import DiskStorage, Storage
from tests.journal.test_snapshots import EVERY_BYTES, SMALL
from tests.journal.world import InPlace, World
from tools.replica import factories

ITERATIONS = 110
HERE = os.getpid()
BAD = 2  # copies that come to nothing


def lived(storage: Storage, begin: Begin) -> World:
    """A world that made several snapshots in this way."""
    world = World(storage, 3, "life", SMALL, snapshot_bytes=EVERY_BYTES, begin=begin)
    for _ in range(ITERATIONS):
        world.iterate()
    world.writer.flush()
    return world


def directory(path: Path) -> DiskStorage:
    path.mkdir()
    return DiskStorage(path)


def files(storage: Storage) -> dict[str, bytes]:
    return {name: storage.read(name) for name in snapshot_names(storage.names()).values()}


def test_a_copy_writes_what_the_process_would(tmp_path: Path) -> None:
    """Byte for byte, though the process goes on beside it; and replay makes the same again."""
    ours, theirs = directory(tmp_path / "copies"), directory(tmp_path / "itself")
    world, other = lived(ours, ForkedDraft), lived(theirs, InPlace)
    assert world.keeper.written == other.keeper.written >= 3
    assert files(ours) == files(theirs)
    assert len(files(ours)) == snapshots.KEPT
    verdict = check(read_records(ours), factories())
    assert verdict.divergence is None, verdict.divergence
    assert verdict.counts.snapshots == world.keeper.written


class BadDisk(DiskStorage):
    """A disk that does something to the first two copies of the process that use it."""

    def __init__(self, path: Path, what: str) -> None:
        path.mkdir()
        super().__init__(path)
        self.what = what
        self.drafts: list[ForkedDraft] = []

    def begin(self, core: SchedulerCore, storage: Storage, moment: Moment) -> ForkedDraft:
        """One more copy; one that will hang has little time for it."""
        hangs = self.what == "hangs" and len(self.drafts) < BAD
        self.drafts.append(ForkedDraft(core, storage, moment, 0.1 if hangs else 60.0))
        return self.drafts[-1]

    def sync(self, handle: int) -> None:
        """Goes wrong in a copy that was made early."""
        if os.getpid() == HERE or len(self.drafts) >= BAD:
            super().sync(handle)
        elif self.what == "hangs":
            signal.pause()  # every signal is blocked
        elif self.what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("what", ["hangs", "killed", "fails"])
def test_a_copy_that_comes_to_nothing_costs_one_snapshot(tmp_path: Path, what: str) -> None:
    """Told once each, as a failed snapshot; the journal goes on, the next one succeeds, and nothing is left of it."""
    disk = BadDisk(tmp_path / "disk", what)
    world = lived(disk, disk.begin)
    told = Counter(world.lines.events)
    assert told["SnapshotFailed"] == BAD
    assert told["Snapshotted"] == world.keeper.written >= 1
    assert all(draft.gone() for draft in disk.drafts)
    assert not [name for name in disk.names() if name.endswith(snapshots.TEMPORARY_SUFFIX)]
    for name in files(disk):
        snapshots.load(disk, name)
    verdict = check(read_records(disk), factories())
    assert verdict.divergence is None, verdict.divergence


def test_no_room_for_a_process_costs_one_snapshot(tmp_path: Path) -> None:
    """The system has no process to spare: told, and the steps go on."""
    disk = directory(tmp_path / "disk")

    def full(core: SchedulerCore, storage: Storage, moment: Moment) -> ForkedDraft:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    world = lived(disk, full)
    assert world.keeper.written == 0
    assert "SnapshotFailed" in world.lines.events
    assert world.steps > 50


def test_an_epoch_that_ends_takes_the_copy_along(tmp_path: Path) -> None:
    """Nobody will say what the stages held: the copy goes, nothing is told, and the next epoch makes one."""
    disk = directory(tmp_path / "disk")
    drafts: list[ForkedDraft] = []

    def begin(core: SchedulerCore, storage: Storage, moment: Moment) -> ForkedDraft:
        drafts.append(ForkedDraft(core, storage, moment))
        return drafts[-1]

    world = World(disk, 3, "life", SMALL, snapshot_bytes=EVERY_BYTES, begin=begin)
    while not drafts:
        world.iterate()
    assert not drafts[0].gone()
    world.end_epoch(1)
    trio.run(drafts[0].reap)
    assert drafts[0].gone()
    world.begin_epoch(2)
    for _ in range(ITERATIONS):
        world.iterate()
    assert world.keeper.written >= 1
    assert "SnapshotFailed" not in world.lines.events


@pytest.mark.parametrize("data", [b"x", bytes(100_000), bytes(range(256))])
def test_what_is_packed_comes_out_again(data: bytes) -> None:
    """Whole, within its limit; and nothing comes out of what is damaged, cut or too large."""
    packed = pack(data)
    assert unpack(packed, len(data)) == data
    broken = [packed[:-1], packed[: len(packed) // 2], b"", b"no such thing", bytes([*packed[:-1], packed[-1] ^ 1])]
    for wrong in broken:
        with pytest.raises(PackingError):
            unpack(wrong, len(data))
    with pytest.raises(PackingError, match=f"the limit is {len(data) - 1}"):
        unpack(packed, len(data) - 1)
