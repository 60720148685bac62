"""Writer: appends records, writes them once per iteration, makes them durable, goes on in a new segment when it must.

Owns the segment being written and every frame that is not known on disk yet. Must never retry a failed write or fsync
in place: the page cache may have dropped the bytes while the next fsync reports success. Invariants: records are
written in the order of their sequence; the mark (`synced_through`) never passes a record that an fsync did not cover;
until then the frame stays in memory, so that a new segment can begin right behind the mark and hold everything since.

There is one way to start a segment, `_switch`: when a segment is full, when a write failed and when an fsync failed.
Only the frames since the mark are written twice.

    thread A (the loop)       append ... append flush                 one write, returned before anything is sent
    thread B (a worker)             sync                              fsync, switch when full
    lock order                sync_mutex, then state_mutex
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import msgspec

from journal import archive, frame, records
from journal.errors import JournalFailed
from journal.records import KIND_OF, MAY_SKIP, Kind
from journal.segment import DIGEST_BYTES, FORMAT_MAJOR, FORMAT_MINOR, SegmentHeader, encode_header, segment_name
from journal.storage import Storage, write_all

Policy = Literal["always", "group", "os"]
TEMPORARY_SUFFIX = ".tmp"


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """How the journal is written.

    `policy`: `group` syncs behind the loop and holds acceptances for it; `always` means that the engine waits for a
    sync in every iteration; `os` promises only what a dying daemon leaves behind and syncs every `os_sync_bytes`, to
    bound what is held in memory. A segment is left when it exceeds `segment_bytes`. When more than
    `unsynced_max_bytes` are held, `flush` waits for a sync itself.
    """

    policy: Policy = "group"
    segment_bytes: int = 64 << 20
    unsynced_max_bytes: int = 64 << 20
    os_sync_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True)
class Start:
    """Where a new life begins: behind record `sequence` with CRC `crc`, in the segment after `number`."""

    journal_id: bytes
    sequence: int = 0
    crc: int = 0
    number: int = 0
    previous_bytes: int = 0
    previous_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class _Mark:
    """A record, by its sequence and CRC."""

    sequence: int
    crc: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Frames of one flush, held until they are synced, and the last record in it."""

    data: bytes
    last: _Mark


@dataclass(slots=True)
class _Current:
    """The segment being written. `hash` and `sound_bytes` cover the header and the synced frames."""

    handle: int
    header: SegmentHeader
    header_frame: bytes
    hash: blake2b = field(init=False)
    sound_bytes: int = field(init=False)
    written_bytes: int = field(init=False)
    named: bool = False  # the directory was synced since it got its name

    def __post_init__(self) -> None:
        self.hash = blake2b(self.header_frame, digest_size=DIGEST_BYTES)
        self.sound_bytes = self.written_bytes = len(self.header_frame)

    @property
    def name(self) -> str:
        """File name."""
        return segment_name(self.header.number)


class JournalWriter:
    """Appends to a journal whose lock the caller holds; `journal.opening.open_journal` makes one.

    `append`, `append_encoded`, `append_all` and `flush` belong to one thread, `sync` to another, `compress_finished`
    to any; the properties may be read from any.
    """

    def __init__(self, storage: Storage, settings: JournalSettings, start: Start) -> None:
        """Starts the segment of a new life. Raises JournalFailed."""
        self._storage = storage
        self._settings = settings
        self._sync_mutex = threading.Lock()
        self._state_mutex = threading.Lock()
        self._sequence = start.sequence
        self._crc = start.crc
        self._appended: list[bytes] = []  # frames of this iteration
        self._unsent: bytes = b""  # frames whose write is due or failed
        self._written: deque[_Chunk] = deque()  # written, not synced
        self._unsynced_bytes = 0
        self._written_through = start.sequence
        self._synced = _Mark(start.sequence, start.crc)
        self._life_first = start.sequence + 1
        self._life_bytes = 0
        self._leave = False  # the segment is to be left, full or not
        self._attempt = 0
        self._broken = ""  # why the current file must not be written again
        self._rotation_error = ""
        self._repairs: list[str] = []  # what was wrong with files that were replaced, not taken yet
        self._closed = False
        header = self._header(start.journal_id, start.number + 1, start.previous_bytes, start.previous_digest)
        with self._sync_mutex:
            self._current = self._start_segment(header, encode_header(header, start.crc), unsent=False)

    def _header(self, journal_id: bytes, number: int, previous_bytes: int, previous_digest: bytes) -> SegmentHeader:
        """Header of a segment that begins behind the synced mark."""
        first = self._synced.sequence + 1
        return SegmentHeader(
            FORMAT_MAJOR, FORMAT_MINOR, journal_id, number, first, self._life_first, previous_bytes, previous_digest
        )

    # --- marks, readable from any thread -------------------------------------------------------------------------

    @property
    def last_sequence(self) -> int:
        """Sequence of the newest appended record."""
        return self._sequence

    @property
    def written_through(self) -> int:
        """The last record that survives the death of this process."""
        return self._written_through

    @property
    def synced_through(self) -> int:
        """The last record that the policy promises to keep: known on disk; with `os`, written."""
        return self._written_through if self._settings.policy == "os" else self._synced.sequence

    @property
    def unsynced_bytes(self) -> int:
        """Bytes written and not yet synced, all held in memory."""
        return self._unsynced_bytes

    @property
    def sync_due(self) -> bool:
        """Whether `sync` would touch the disk now; with `os` only once much is held, or a file is full or broken."""
        return bool(self._written) and (not self._lazy() or bool(self._broken) or self._full())

    @property
    def life_bytes(self) -> int:
        """Bytes of all records that were appended in this life."""
        return self._life_bytes

    @property
    def journal_id(self) -> bytes:
        """The journal's name."""
        return self._current.header.journal_id

    @property
    def storage(self) -> Storage:
        """The disk that the journal is on, for readers."""
        return self._storage

    @property
    def policy(self) -> Policy:
        """The sync policy."""
        return self._settings.policy

    @property
    def degraded(self) -> str:
        """Why durability is not as promised, or why a full segment cannot be left; empty when all is well."""
        return self._broken or self._rotation_error

    def take_repairs(self) -> list[str]:
        """What was wrong with each file that a new segment replaced since this was asked last: nothing was lost."""
        with self._state_mutex:
            repairs, self._repairs = self._repairs, []
        return repairs

    # --- the loop's side -----------------------------------------------------------------------------------------

    def append(self, record: msgspec.Struct) -> int:
        """Frame one record behind the last and buffer it; returns its sequence number."""
        return self.append_encoded(KIND_OF[type(record)], records.encode(record))

    def append_encoded(self, kind: Kind, payload: bytes) -> int:
        """`append` of a payload that is msgpack already: exactly what `records.encode` makes of its struct."""
        assert not self._closed, "the journal is closed"
        sequence = self._sequence + 1
        assert sequence > self._life_first or kind is Kind.OPENED, f"a life begins with Opened, not {kind.name}"
        flags = frame.MAY_SKIP if kind in MAY_SKIP else 0
        data, self._crc = frame.encode(sequence, kind, flags, self._synced.sequence, self._crc, payload)
        self._appended.append(data)
        self._life_bytes += len(data)
        self._sequence = sequence
        return sequence

    def append_all(self, batch: Iterable[msgspec.Struct]) -> int:
        """`append` of each record in turn; returns the last sequence number."""
        for record in batch:
            self.append_encoded(KIND_OF[type(record)], records.encode(record))
        return self._sequence

    def flush(self) -> None:
        """Write everything appended with one write; when it returns, the records survive this process.

        A failed write is followed by a new segment that takes all unsynced records and these. Raises JournalFailed
        when that fails too: the records are kept, nothing of them may be sent, and `flush` may be called again.
        """
        assert not self._closed, "the journal is closed"
        if not self._appended and not self._unsent:
            return
        self._unsent = b"".join((self._unsent, *self._appended))
        self._appended.clear()
        with self._state_mutex:
            if not self._broken:
                self._write_unsent()
        if self._unsent:
            self._relieve()
        if self._unsynced_bytes > self._settings.unsynced_max_bytes:
            with contextlib.suppress(JournalFailed):  # written all the same; `degraded` says what the disk did
                self.sync()  # nobody synced for long: better late here than without bound in memory

    def _write_unsent(self) -> None:
        """The one write of an iteration. After an error the file's tail is unknown and is not written again."""
        current, data = self._current, self._unsent
        try:
            taken = self._storage.write(current.handle, data)
            if taken != len(data):
                write_all(self._storage, current.handle, data[taken:])
        except OSError as error:
            self._broken = f"writing {current.name} failed: {error}"
            return
        current.written_bytes += len(data)
        self._wrote()

    def _wrote(self) -> None:
        """The unsent frames are in a file now; they stay in memory until they are synced."""
        assert self._unsent, "nothing was written"
        assert not self._appended, "a record was appended while its iteration was being written"
        assert self._written_through < self._sequence, f"record {self._sequence} is written twice"
        self._written.append(_Chunk(self._unsent, _Mark(self._sequence, self._crc)))
        self._unsynced_bytes += len(self._unsent)
        self._written_through = self._sequence
        self._unsent = b""

    def _relieve(self) -> None:
        """The current file is broken: write the unsent frames to a new one, which the worker may have made already."""
        with self._sync_mutex:
            if not self._broken:
                with self._state_mutex:
                    self._write_unsent()
            if self._unsent:
                self._switch(unsent=True)
        assert not self._unsent, "frames are still held after a new segment took them"

    # --- the worker's side ---------------------------------------------------------------------------------------

    def leave_segment(self) -> None:
        """Go on in a new segment at the next sync that finds records: what stands before it can then be trimmed."""
        self._leave = True

    def sync(self, at_once: bool = False) -> None:
        """Make everything written durable and leave the segment when it is full. Blocks on the disk.

        With policy `os` much must be held before it does, unless `at_once` is asked. A failed fsync is followed by a
        new segment that takes all unsynced records and is synced in turn. Raises JournalFailed when that fails too;
        `synced_through` then stays where it was.
        """
        with self._sync_mutex:
            full = self._full()
            if self._lazy() and not (at_once or full or self._broken or self._closed):
                return
            self._sync_current()
            if self._broken:
                self._switch()
                self._sync_current()
            if self._broken:
                raise JournalFailed(self._broken)
            if full and not self._closed:
                self._rotate()

    def _lazy(self) -> bool:
        """The policy leaves what is held to the system's own pace."""
        return self._settings.policy == "os" and self._unsynced_bytes < self._settings.os_sync_bytes

    def _full(self) -> bool:
        """The segment is to be left."""
        return self._leave or self._current.written_bytes >= self._settings.segment_bytes

    def _sync_current(self) -> None:
        """fsync what was written when the call began, then move the mark over it and let it go."""
        with self._state_mutex:
            if self._broken:
                return
            chunks = list(self._written)
            current = self._current
        if not chunks:
            return
        try:
            self._storage.sync(current.handle)
            if not current.named:
                self._storage.sync_directory()
                current.named = True
        except OSError as error:
            with self._state_mutex:
                self._broken = f"syncing {current.name} failed: {error}"
            return
        for chunk in chunks:
            current.hash.update(chunk.data)
            current.sound_bytes += len(chunk.data)
        with self._state_mutex:
            for chunk in chunks:
                assert self._written[0] is chunk, "the synced frames are not the oldest"
                self._written.popleft()
                self._unsynced_bytes -= len(chunk.data)
            assert self._synced.sequence < chunks[-1].last.sequence, "the synced mark moves back"
            assert self._unsynced_bytes == sum(len(chunk.data) for chunk in self._written), "held bytes are miscounted"
            self._synced = chunks[-1].last

    def _rotate(self) -> None:
        """Leave a full segment. When that fails, the segment is sound and writing goes on in it."""
        old = self._current
        try:
            self._switch()
            self._storage.truncate(old.name, old.sound_bytes)
        except (JournalFailed, OSError) as error:
            self._rotation_error = f"leaving {old.name}: {error}"
        else:
            self._rotation_error, self._leave = "", False

    def _switch(self, unsent: bool = False) -> None:
        """Go on in a new segment that holds every frame since the synced mark; with `unsent`, those held back too.

        A segment in which nothing was ever synced is replaced, not followed: whether its own name is durable may be
        just what failed. Raises JournalFailed; then all is as before.
        """
        old = self._current
        header, header_frame = old.header, old.header_frame
        if self._synced.sequence >= header.first_sequence:
            header = self._header(header.journal_id, header.number + 1, old.sound_bytes, old.hash.digest())
            header_frame = encode_header(header, self._synced.crc)
        assert header.first_sequence == self._synced.sequence + 1, "the new segment begins behind the mark"
        self._current = self._start_segment(header, header_frame, unsent)
        assert self._current is not old, "the broken file is still being written"
        with contextlib.suppress(OSError):  # everything in it that counts was synced, or is in the new segment
            self._storage.close(old.handle)

    def _start_segment(self, header: SegmentHeader, header_frame: bytes, unsent: bool) -> _Current:
        """A new segment file with its header synced and all unsynced frames written, as the current one.

        The header is synced under a temporary name. Then the loop cannot write until the frames have followed and the
        file has its name: at every moment one file holds everything that was written.
        """
        name = segment_name(header.number)
        self._attempt += 1
        temporary = f"{name}.{self._attempt}{TEMPORARY_SUFFIX}"
        handle = -1
        try:
            handle = self._storage.create(temporary)
            fresh = _Current(handle, header, header_frame)
            write_all(self._storage, handle, header_frame)
            self._storage.sync(handle)
            with self._state_mutex:
                held = b"".join(chunk.data for chunk in self._written) + (self._unsent if unsent else b"")
                write_all(self._storage, handle, held)
                self._storage.rename(temporary, name)
                fresh.written_bytes += len(held)
                self._current = fresh
                if self._broken:
                    self._repairs.append(f"{self._broken}; {name} holds everything since the last sync")
                self._broken = ""
                if unsent and self._unsent:
                    self._wrote()
        except OSError as error:
            with contextlib.suppress(OSError):  # the next opening removes what is left of it
                if handle >= 0:
                    self._storage.close(handle)
                self._storage.remove(temporary)
            why = f"{self._broken}; " if self._broken else ""
            raise JournalFailed(f"{why}starting segment {name} failed: {error}") from error
        return fresh

    def compress_finished(self) -> int:
        """Compress the segments before the current one; returns how many. Blocks; for any worker thread."""
        with self._sync_mutex:
            below = self._current.header.number
        return archive.compress_segments(self._storage, below)

    def close(self) -> None:
        """Write and sync what is left, and give the directory back. Raises JournalFailed when it could not."""
        assert not self._closed, "the journal is closed already"
        self.flush()
        self._closed = True
        try:
            self.sync()
        finally:
            with contextlib.suppress(OSError):  # synced, or reported as failed, already
                self._storage.close(self._current.handle)
            self._storage.unlock()
