"""Packing: large byte strings inside messages, compressed.

Owns how they are compressed, and the bound on what comes out. Must never look into them. Invariant: what does not say
how long it is, or says more than it may, is refused before a byte of it is made.
"""

from __future__ import annotations

import zstandard

PACKED_BYTES_MAX = 128 << 20  # of one state in a report: half of what a message may have
LEVEL = 1  # canonical states shrink to a few percent; more effort takes longer than what it saves


class PackingError(Exception):
    """Bytes that were not packed here, or are more than allowed."""


def pack(data: bytes) -> bytes:
    """The bytes compressed, with their length and a checksum."""
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(data)


def unpack(packed: bytes, bytes_max: int) -> bytes:
    """The bytes again; raises PackingError, also when they are more than `bytes_max`."""
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= bytes_max:
            raise PackingError(f"packed bytes that say they are {size} bytes; the limit is {bytes_max}")
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
    except zstandard.ZstdError as error:
        raise PackingError(f"{len(packed)} packed bytes cannot be unpacked: {error}") from error
