"""Segments: files of a journal that is made of another one, record for record.

Owns frames, headers and the border of two segments, as `journal.segment` has them. Must never renumber a record. What
is written here was never promised to anybody, so nothing is synced and no record claims that another one was.
"""

from __future__ import annotations

from hashlib import blake2b
from types import TracebackType
from typing import Self

from journal import frame
from journal.records import MAY_SKIP, Kind
from journal.segment import (
    DIGEST_BYTES,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    SegmentHeader,
    encode_header,
    segment_name,
)
from journal.storage import Storage, write_all

SEGMENT_BYTES = 64 << 20
WRITE_BYTES = 1 << 20


class SegmentFiles:
    """Writes segments into a storage; `behind` is the record that a snapshot covers at which the journal begins.

    `life_first` is the first record of the life that it begins in.
    """

    def __init__(self, storage: Storage, journal_id: bytes, behind: int, life_first: int) -> None:
        self.bytes_written = 0
        self.last_sequence = behind
        self._storage = storage
        self.journal_id = journal_id
        self._life_first = max(life_first, 1)
        self._crc = 0
        # A row of files that begins above 1 says that what was older is covered by a snapshot.
        self._number, self._bytes, self._digest = (1, 8, bytes(DIGEST_BYTES)) if behind else (0, 0, b"")
        self._handle: int | None = None
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()

    def append(self, sequence: int, kind: Kind, payload: bytes) -> None:
        """One record; a life, and what no longer fits, begins in a new file."""
        assert sequence == self.last_sequence + 1, f"record {sequence} behind {self.last_sequence}"
        if kind is Kind.OPENED:
            self._life_first = sequence
        if kind is Kind.OPENED or self._handle is None or self._bytes >= SEGMENT_BYTES:
            self._begin(sequence)
        flags = frame.MAY_SKIP if kind in MAY_SKIP else 0
        data, self._crc = frame.encode(sequence, kind, flags, 0, self._crc, payload)
        self._put(data)
        self.last_sequence = sequence

    def _begin(self, sequence: int) -> None:
        self._leave()
        self._number += 1
        header = SegmentHeader(
            FORMAT_MAJOR,
            FORMAT_MINOR,
            self.journal_id,
            self._number,
            sequence,
            min(self._life_first, sequence),
            self._bytes,
            self._digest,
        )
        self._handle = self._storage.create(segment_name(self._number))
        self._hash, self._bytes = blake2b(digest_size=DIGEST_BYTES), 0
        self._put(encode_header(header, self._crc))

    def _put(self, data: bytes) -> None:
        self._hash.update(data)
        self._bytes += len(data)
        self.bytes_written += len(data)
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        assert self._handle is not None, "a file is being written"
        write_all(self._storage, self._handle, b"".join(self._pending))
        self._pending, self._pending_bytes = [], 0

    def _leave(self) -> None:
        if self._handle is None:
            return
        self._write()
        self._storage.close(self._handle)
        self._handle, self._digest = None, self._hash.digest()
