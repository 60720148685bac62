"""Archive: compresses segments that will not be written again.

Owns the replacement of a plain file by a compressed one. Must never remove a plain file before its archive is on disk
and was read back equal. Invariant: at every moment the plain file, the archive, or both are there; readers prefer the
plain one.
"""

from __future__ import annotations

import zstandard

from journal.segment import ARCHIVE_SUFFIX, segment_names
from journal.storage import Storage, write_all

LEVEL = 3
TEMPORARY_SUFFIX = ".zst.tmp"


def compress_segments(storage: Storage, below: int) -> int:
    """Compress each plain segment numbered below `below`; returns how many. Raises OSError, having lost nothing."""
    assert below >= 1, f"segments are numbered from 1, not below {below}"
    done = 0
    for number, name in segment_names(storage.names()).items():
        if number < below and not name.endswith(ARCHIVE_SUFFIX):
            _compress(storage, name)
            done += 1
    return done


def _compress(storage: Storage, name: str) -> None:
    """One segment: temporary file, sync, rename, sync of the directory, removal of the plain file."""
    plain = storage.read(name)
    assert plain, f"{name} is empty: a segment has at least its header"
    packed = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(plain)
    assert zstandard.ZstdDecompressor().decompress(packed) == plain, f"{name} does not decompress to itself"
    temporary = name + TEMPORARY_SUFFIX
    if temporary in storage.names():
        storage.remove(temporary)  # of an attempt that failed
    handle = storage.create(temporary)
    try:
        write_all(storage, handle, packed)
        storage.sync(handle)
    finally:
        storage.close(handle)
    storage.rename(temporary, name + ARCHIVE_SUFFIX)
    storage.sync_directory()
    try:
        storage.remove(name)
    except FileNotFoundError:  # a trim deleted it meanwhile; its archive alone would stand in front of a gap
        storage.remove(name + ARCHIVE_SUFFIX)
