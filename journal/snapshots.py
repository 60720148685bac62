"""Snapshots: files that each hold the whole state behind one record, so that replay may begin there.

Owns their names, their format, and how one comes to be: temporary file, sync, rename, sync of the directory. Must never
look into a state: it is bytes here, with a digest. Invariants: a file that has its name is complete; equal states give
equal bodies, byte for byte, and so an equal digest, whoever wrote them; a snapshot of another decision version, another
journal, another life or a damaged one is not used, and says why.

    0       8        12              16
    | magic | length | CRC32C of it  | header (msgpack) | body (zstd of msgpack) |
"""

from __future__ import annotations

import re
import struct

import google_crc32c
import msgspec
import zstandard

from daemon.core.inputs import RecoveredGroup
from journal.errors import JournalError
from journal.records import DECISION_VERSION
from journal.segment import digest
from journal.storage import Storage, write_all

MAGIC = b"BMSNAP1\n"
LEVEL = 3
KEPT = 2
TEMPORARY_SUFFIX = ".tmp"
HEADER_READ_BYTES = 64 << 10
BODY_BYTES_MAX = 16 << 30
_START = struct.Struct("<8sII")
_NAME = re.compile(r"snapshot-(\d{19})\.bms")


class Body(msgspec.Struct, array_like=True, frozen=True):
    """The state: the core's and one per stage as canonical bytes, and what the sampled tokens are chained from.

    `groups` and `next_request` say in the journal's own terms what a restart takes over: of use to a version whose core
    cannot read the rest.
    """

    core: bytes
    stages: list[bytes]
    reported_seq: int
    sampled: bytes
    groups: list[RecoveredGroup]
    next_request: int


class Header(msgspec.Struct, array_like=True, frozen=True):
    """What a snapshot is of: the state behind record `sequence` of a life, at step `seq` of an epoch."""

    journal_id: bytes
    life: str
    decision_version: int
    sequence: int
    epoch: int
    seq: int
    body_bytes: int
    digest: bytes


class SnapshotUnusable(JournalError):
    """A snapshot file that must not be used: torn, damaged, or of something else."""


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_body_decoder = msgspec.msgpack.Decoder(Body)


def snapshot_name(sequence: int) -> str:
    """File name of the snapshot behind a record."""
    assert 0 < sequence < 10**19, f"sequence {sequence} does not fit a name"
    return f"snapshot-{sequence:019d}.bms"


def snapshot_names(names: list[str]) -> dict[int, str]:
    """Snapshot files by the sequence that they cover, ascending."""
    found = {int(match[1]): name for name in names if (match := _NAME.fullmatch(name))}
    return dict(sorted(found.items()))


def encode_body(body: Body) -> bytes:
    """Canonical bytes: equal bodies, equal bytes."""
    return _encoder.encode(body)


def decode_body(data: bytes) -> Body:
    """A body from its bytes."""
    return _body_decoder.decode(data)


def write(storage: Storage, header: Header, body: bytes) -> tuple[str, int]:
    """Write a snapshot; its name and size in bytes. Raises OSError, and then there is none. Blocks on the disk."""
    assert header.digest == digest(body), "the header names another body"
    packed = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(body)
    head = _encoder.encode(header)
    data = _START.pack(MAGIC, len(head), google_crc32c.value(head)) + head + packed
    name = snapshot_name(header.sequence)
    temporary = name + TEMPORARY_SUFFIX
    if temporary in storage.names():
        storage.remove(temporary)  # of an attempt that failed
    handle = storage.create(temporary)
    try:
        write_all(storage, handle, data)
        storage.sync(handle)
    finally:
        storage.close(handle)
    storage.rename(temporary, name)
    storage.sync_directory()
    return name, len(data)


def prune(storage: Storage, keep: int = KEPT) -> list[str]:
    """Remove all but the newest files, and what a killed writer left; returns the names of those that went.

    While none is being written.
    """
    assert keep >= 1, "the newest snapshot stays"
    names = storage.names()
    torn = [name for name in names if _NAME.fullmatch(name.removesuffix(TEMPORARY_SUFFIX))]
    gone = list(snapshot_names(names).values())[:-keep] + [name for name in torn if name.endswith(TEMPORARY_SUFFIX)]
    for name in gone:
        storage.remove(name)
    return gone


def load_header(storage: Storage, name: str) -> Header:
    """Only what a snapshot is of; raises SnapshotUnusable."""
    header, _ = _header(name, storage.read_start(name, HEADER_READ_BYTES))
    return header


def load(storage: Storage, name: str) -> tuple[Header, bytes]:
    """A whole snapshot, checked against its digest; raises SnapshotUnusable."""
    data = storage.read(name)
    header, start = _header(name, data)
    if header.decision_version != DECISION_VERSION:
        versions = f"{header.decision_version}, this one is {DECISION_VERSION}"
        raise SnapshotUnusable(f"{name}: the state of a core of decision version {versions}")
    return header, _body(name, header, data[start:])


def load_groups(storage: Storage, name: str) -> tuple[Header, Body]:
    """A snapshot whatever the version of its core: only groups and numbers may be used then. SnapshotUnusable."""
    data = storage.read(name)
    header, start = _header(name, data)
    try:
        return header, decode_body(_body(name, header, data[start:]))
    except msgspec.MsgspecError as error:
        raise SnapshotUnusable(f"{name}: its body cannot be read: {error}") from error


def _header(name: str, data: bytes) -> tuple[Header, int]:
    """The header, and where the body begins."""
    if len(data) < _START.size:
        raise SnapshotUnusable(f"{name}: {len(data)} bytes, a snapshot begins with {_START.size}")
    magic, length, crc = _START.unpack_from(data)
    head = data[_START.size : _START.size + length]
    if magic != MAGIC or len(head) != length or google_crc32c.value(head) != crc:
        raise SnapshotUnusable(f"{name}: no sound header")
    try:
        header = _header_decoder.decode(head)
    except msgspec.MsgspecError as error:
        raise SnapshotUnusable(f"{name}: a header of another format: {error}") from error
    if name != snapshot_name(header.sequence):
        raise SnapshotUnusable(f"{name}: the header is of sequence {header.sequence}")
    return header, _START.size + length


def _body(name: str, header: Header, packed: bytes) -> bytes:
    if not 0 < header.body_bytes <= BODY_BYTES_MAX:
        raise SnapshotUnusable(f"{name}: a body of {header.body_bytes} bytes; the limit is {BODY_BYTES_MAX}")
    try:
        body = zstandard.ZstdDecompressor().decompress(packed, max_output_size=header.body_bytes)
    except zstandard.ZstdError as error:
        raise SnapshotUnusable(f"{name}: not decompressible: {error}") from error
    if len(body) != header.body_bytes or digest(body) != header.digest:
        raise SnapshotUnusable(f"{name}: the body is not the one its header names")
    return body
