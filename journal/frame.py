"""Frames: one record on disk, a 32-byte header and a payload, padded to 8 bytes.

Owns the byte layout and the two checks that nobody else repeats: the frame's own CRC32C, and that its bounds lie
inside the file. Must never look into a payload. Invariants: every frame starts at a multiple of 8; a frame's CRC
covers its header (but the CRC itself) and its payload, the padding is zero; `prev_crc` is the CRC of the record before
it, also over the border of two segments, so that the bytes of a record do not depend on the segment it stands in.

      0        4        8                16     18      20            24         28     32
      | magic  | length | sequence       | kind | flags | synced_lag  | prev_crc | crc  | payload ... | 0-7 zeros |
        u32      u32      u64              u16    u16     u32           u32        u32    length bytes
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c

MAGIC = 0x314A4D42  # b"BMJ1" on disk
MAGIC_BYTES = MAGIC.to_bytes(4, "little")
HEADER_BYTES = 32
ALIGNMENT_BYTES = 8
PAYLOAD_BYTES_MAX = 64 << 20
MAY_SKIP = 1  # flag: a reader that does not know the kind may pass over the record
LAG_MAX = (1 << 32) - 1

_CHECKED = struct.Struct("<IIQHHII")  # the header but its CRC
_CRC = struct.Struct("<I")
_HEADER = struct.Struct("<IIQHHIII")
_PADDING = [bytes(-n % ALIGNMENT_BYTES) for n in range(ALIGNMENT_BYTES)]

assert _HEADER.size == HEADER_BYTES
assert _CHECKED.size + _CRC.size == HEADER_BYTES


class Frame(NamedTuple):
    """One whole, checked frame. `synced_through` is the last sequence known on disk when it was appended."""

    offset: int
    end: int  # offset of the next frame
    sequence: int
    kind: int
    flags: int
    synced_through: int
    prev_crc: int
    crc: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class BadFrame:
    """Bytes that are not a frame: `condition` is what is wrong with them, `what` the same with numbers."""

    offset: int
    condition: str  # "short_header", "short_payload" or "bad_frame"
    what: str


def encode(
    sequence: int, kind: int, flags: int, synced_through: int, prev_crc: int, payload: bytes
) -> tuple[bytes, int]:
    """The frame's bytes, padding included, and its CRC."""
    length = len(payload)
    if length > PAYLOAD_BYTES_MAX:
        raise ValueError(f"a record of {length} bytes exceeds the journal's limit of {PAYLOAD_BYTES_MAX}")
    assert sequence > 0, f"sequence {sequence}; the first record is 1"
    lag = sequence - synced_through
    assert lag >= 0, f"sequence {sequence} is below the synced mark {synced_through}"
    header = _CHECKED.pack(MAGIC, length, sequence, kind, flags, min(lag, LAG_MAX), prev_crc)
    crc = google_crc32c.extend(google_crc32c.value(header), payload)
    return b"".join((header, _CRC.pack(crc), payload, _PADDING[length % ALIGNMENT_BYTES])), crc


def decode(data: bytes, offset: int) -> Frame | BadFrame:
    """The frame at `offset` of a segment's bytes, or what is wrong there. Nothing is read beyond the end."""
    assert offset % ALIGNMENT_BYTES == 0, f"frame offset {offset} is not a multiple of {ALIGNMENT_BYTES}"
    left = len(data) - offset
    if left < HEADER_BYTES:
        return BadFrame(offset, "short_header", f"{left} bytes are left, a header has {HEADER_BYTES}")
    magic, length, sequence, kind, flags, lag, prev_crc, crc = _HEADER.unpack_from(data, offset)
    if magic != MAGIC:
        return BadFrame(offset, "bad_frame", f"magic 0x{magic:08x}, not 0x{MAGIC:08x}")
    if length > PAYLOAD_BYTES_MAX:
        return BadFrame(offset, "bad_frame", f"length {length} exceeds the limit {PAYLOAD_BYTES_MAX}")
    start = offset + HEADER_BYTES
    stop = start + length
    end = stop + -length % ALIGNMENT_BYTES
    if end > len(data):
        return BadFrame(offset, "short_payload", f"{len(data) - start} bytes are left, the payload has {end - start}")
    payload = data[start:stop]
    found = google_crc32c.extend(google_crc32c.value(data[offset : offset + _CHECKED.size]), payload)
    if found != crc:
        return BadFrame(offset, "bad_frame", f"CRC32C 0x{found:08x}, the header says 0x{crc:08x}")
    if data[stop:end] != _PADDING[length % ALIGNMENT_BYTES]:
        return BadFrame(offset, "bad_frame", "padding is not zero")
    assert end % ALIGNMENT_BYTES == 0, f"a frame that ends at byte {end}"
    return Frame(offset, end, sequence, kind, flags, max(sequence - lag, 0), prev_crc, crc, payload)


def sound_frames(data: bytes, offset: int, above: int, plausible: bool = True) -> Iterator[Frame]:
    """Every whole frame at or behind `offset` whose sequence may follow `above`, found by its magic.

    With `plausible`, a sequence below `above`, or too far above it to fit the bytes between, is taken for the image of
    a frame inside a payload.
    """
    at = data.find(MAGIC_BYTES, offset)
    while at >= 0:
        step = 1
        if at % ALIGNMENT_BYTES == 0:
            frame = decode(data, at)
            most = above + (at - offset) // HEADER_BYTES + 1
            if isinstance(frame, Frame) and (not plausible or above <= frame.sequence <= most):
                yield frame
                step = frame.end - at
        at = data.find(MAGIC_BYTES, at + step)
