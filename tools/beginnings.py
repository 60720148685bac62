"""Beginnings: where the reading of a journal starts, at its first record or at a snapshot.

Owns the choice of the snapshot. Must never take one that cannot be used, nor begin at the start of a trimmed journal.
"""

from __future__ import annotations

from journal.errors import JournalError
from journal.reader import readable_segments
from journal.segment import load_header
from journal.snapshots import Body, Header, SnapshotUnusable, decode_body, load, snapshot_names
from journal.storage import DiskStorage

Start = tuple[Header, Body]


def start_of(
    storage: DiskStorage, until: int | None = None, from_snapshot: bool = False, what: str = "reading"
) -> tuple[Start | None, list[str]]:
    """The snapshot at which to begin, None: at the start; and notes about it and those that cannot be used.

    It is the oldest where what is older was trimmed; `from_snapshot`: the newest, of those behind records before
    `until`. Raises JournalError where there must be one and none can be used.
    """
    row, notes = readable_segments(storage), list[str]()
    oldest = load_header(storage, next(iter(row.values())))
    trimmed = next(iter(row)) > 1 and oldest is not None and bool(snapshot_names(storage.names()))
    if not trimmed and not from_snapshot:
        return None, notes
    least = oldest.first_sequence - 1 if trimmed and oldest is not None else 0
    names = [
        (at, name) for at, name in snapshot_names(storage.names()).items() if at >= least and at < (until or at + 1)
    ]
    for sequence, name in reversed(names) if from_snapshot else names:
        try:
            header, body = load(storage, name)
        except SnapshotUnusable as error:
            notes.append(f"not used: {error}")
            continue
        why = "what is older was trimmed" if trimmed and not from_snapshot else "as asked"
        notes.append(f"{what} begins at the snapshot behind record {sequence}: {why}")
        return (header, decode_body(body)), notes
    if trimmed:
        sought = f" behind a record below {until}" if until else ""
        raise JournalError("; ".join([f"what is older was trimmed, and no snapshot{sought} can be used", *notes]))
    return None, notes
