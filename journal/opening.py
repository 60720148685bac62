"""Opening: from a directory in any state to a writer for a new life, or a refusal that says where and why.

Owns what is done about a torn tail, and where the last life stands that left something. Must never discard bytes: what
is cut off is kept beside. Invariants: repair can be interrupted at any point and repeated; after it a strict walk meets
nothing to cut; sequence numbers go on over lives.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from daemon.core.inputs import Recovered
from journal import frame, segment, snapshots
from journal.errors import JournalDamaged
from journal.reader import Finding, Walk, readable_segments
from journal.records import INPUT_KINDS, Kind
from journal.recovery import Decision
from journal.storage import Storage, write_all
from journal.writer import TEMPORARY_SUFFIX, JournalSettings, JournalWriter, Start

CUT_SUFFIX = ".cut"
IN_ORDER = ("clean_end", "superseded_tail", "trimmed")  # rows of the recovery table that nobody needs to hear of


@dataclass(frozen=True, slots=True)
class Found:
    """What opening found: `notes` has one line for everything that was cut or passed over.

    `life_segment` is the first segment of the last life that took over what was left before it, or of the journal;
    lives behind it died before they had. 0: no life has a record.
    """

    last_sequence: int
    lives: int
    clean: bool  # the last life ended with `Closed`, or there was none
    life_segment: int
    notes: list[str]


def open_journal(storage: Storage, settings: JournalSettings, journal_id: bytes) -> tuple[JournalWriter, Found]:
    """Lock, recover, repair, and start the segment of a new life; the first record appended must be `Opened`.

    `journal_id` (16 random bytes) names the journal when the directory holds none. Raises JournalBusy, JournalDamaged
    (nothing was changed), JournalFailed or OSError; the lock is free again then.
    """
    assert len(journal_id) == segment.JOURNAL_ID_BYTES, f"a journal id has {segment.JOURNAL_ID_BYTES} bytes"
    storage.lock()
    try:
        start, found = recover(storage, journal_id)
        return JournalWriter(storage, settings, start), found
    except BaseException:
        storage.unlock()
        raise


def recover(storage: Storage, journal_id: bytes) -> tuple[Start, Found]:
    """Repair what may be repaired and find where the next life begins."""
    notes: list[str] = []
    while True:
        walk, first, lives = _walk_last_life(storage)
        cuts = walk.cuts()
        if not cuts:
            break
        notes.extend(_cut(storage, cut) for cut in cuts)
    _remove_temporaries(storage)
    notes.extend(found.text() for found in walk.findings if found.row.label not in IN_ORDER)
    start = _start(storage, walk, journal_id)
    clean = walk.at.closed or walk.at.sequence == 0
    return start, Found(walk.at.sequence, lives, clean, first if walk.at.sequence else 0, notes)


def _remove_temporaries(storage: Storage) -> None:
    """Files that never got their name: all they hold is elsewhere, or was never promised."""
    for name in storage.names():
        if name.endswith(TEMPORARY_SUFFIX):
            storage.remove(name)


def _walk_last_life(storage: Storage) -> tuple[Walk, int, int]:
    """Read the last life that took over what was left, and those behind it, to the end; from its newest snapshot on.

    Also the life's first segment, 0 without one, and how many lives there are.
    """
    firsts = _life_segments(storage)
    oldest = next(iter(readable_segments(storage)), 0)
    # The first life has nothing to take over; or it was trimmed, and its beginning is gone.
    first = next((one for one in reversed(firsts) if _inherited(storage, one)), oldest)
    walk = Walk(storage, first=max(first, _snapshot_segment(storage, first)))
    for _ in walk.records():
        continue  # what the walk meets is what counts
    return walk, first, max(len(firsts), int(walk.at.sequence > 0))


def _life_segments(storage: Storage) -> list[int]:
    """Numbers of the segments that begin a life; unreadable headers are left to the walk."""
    firsts = []
    for number, name in readable_segments(storage).items():
        header = segment.load_header(storage, name)
        if header is not None and header.life_first == header.first_sequence:
            firsts.append(number)
    return firsts


def _inherited(storage: Storage, first: int) -> bool:
    """Whether the life that begins in a segment said all that it took over, before anything else."""
    lives = 0
    for record in Walk(storage, first=first).records():
        lives += record.kind == Kind.OPENED
        if lives > 1:
            return False
        if record.kind in INPUT_KINDS:
            taken_over = record.decode()
            if not isinstance(taken_over, Recovered) or not taken_over.left:
                return isinstance(taken_over, Recovered)
    return False


def _snapshot_segment(storage: Storage, first: int) -> int:
    """The segment behind the newest snapshot of the life that begins in segment `first`; 0 without one."""
    name = segment.segment_names(storage.names()).get(first)
    header = segment.load_header(storage, name) if name is not None else None
    for sequence, file in reversed(snapshots.snapshot_names(storage.names()).items()):
        if header is None or sequence < header.first_sequence:
            return 0
        with contextlib.suppress(snapshots.SnapshotUnusable):  # recovery says what is wrong with it
            snapshots.load_header(storage, file)
            return segment.segment_behind(storage, sequence)
    return 0


def _cut(storage: Storage, cut: Finding) -> str:
    """Keep the bytes from the cut on beside, sync them, then cut the file; returns the line that says so."""
    assert cut.row.decision is Decision.CUT_TORN, f"{cut.row.label} does not cut"
    assert not cut.file.endswith(segment.ARCHIVE_SUFFIX), f"{cut.file} is finished and cannot be torn"
    tail = storage.read(cut.file)[cut.offset :]
    assert tail or not cut.offset, f"nothing stands behind byte {cut.offset} of {cut.file}"
    kept = f"{cut.file}.{cut.offset}{CUT_SUFFIX}"
    if kept in storage.names():
        storage.remove(kept)  # of a repair that was interrupted: the file itself still has the bytes
    handle = storage.create(kept)
    try:
        write_all(storage, handle, tail)
        storage.sync(handle)
    finally:
        storage.close(handle)
    storage.sync_directory()
    if cut.offset:
        assert cut.offset % frame.ALIGNMENT_BYTES == 0, f"a cut within a frame, at byte {cut.offset}"
        storage.truncate(cut.file, cut.offset)
    else:
        storage.remove(cut.file)
    storage.sync_directory()
    return f"cut {len(tail)} bytes behind sequence {cut.sequence - 1}, kept in {kept}: {cut.text()}"


def _start(storage: Storage, walk: Walk, journal_id: bytes) -> Start:
    """Where the next life begins; the end of the last one is synced first, for it may stand in the page cache only."""
    at = walk.at
    if at.number == 0:
        return Start(journal_id)
    assert walk.header is not None
    assert walk.header.first_sequence <= at.sequence + 1, "the last segment begins behind the last record"
    name = segment.segment_names(storage.names())[at.number]
    last = segment.load(storage, name)
    if at.offset != len(last.data):
        raise JournalDamaged("clean_end", name, at.offset, at.sequence + 1, "the file grew while it was read")
    if not name.endswith(segment.ARCHIVE_SUFFIX):
        storage.truncate(name, at.offset)
    storage.sync_directory()
    return Start(walk.header.journal_id, at.sequence, at.crc, at.number, at.offset, segment.digest(last.data))
