"""Segments: the files of a journal, their names, and the header that ties each to the one before.

Owns file names, the segment header and reading a file whether compressed or not. Must never change a file.

A segment's first frame is its header, of kind `SEGMENT`. It has no sequence number of its own and stands outside the
chain of `prev_crc`: the record behind it links to the last record before the segment. The header names how many bytes
of the previous file hold, and their digest; what lies behind them there was never synced and is superseded by the
records of this segment, which begin right after the last one known on disk:

    0000000007.kvj  | header | 101 ... 180 | 181 182 tail |        previous_bytes ends before 181
    0000000008.kvj  | header | 181 182 183 ...                     first_sequence is 181
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import zstandard

from journal import frame
from journal.frame import BadFrame, Frame
from journal.storage import Storage

FORMAT_MAJOR = 1  # raised when an older reader would misread a frame
FORMAT_MINOR = 0
SEGMENT = 0  # frame kind of a segment header; record kinds are above
DIGEST_BYTES = 16
JOURNAL_ID_BYTES = 16
ARCHIVE_SUFFIX = ".zst"
HEADER_READ_BYTES = 256 << 10  # holds the first block of an archive, and so the header
_NAME = re.compile(r"(\d{10})\.kvj(\.zst)?")


class SegmentHeader(msgspec.Struct, array_like=True, frozen=True):
    """First frame of a segment. `life_first` is the sequence of this life's `Opened`."""

    major: int
    minor: int
    journal_id: bytes
    number: int
    first_sequence: int
    life_first: int
    previous_bytes: int  # 0 and b"" for segment 1
    previous_digest: bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as read: its bytes, and its header with the CRC its first record links to, or what is wrong with it."""

    name: str
    number: int
    data: bytes
    header: SegmentHeader | None
    start: int  # offset of the first record
    prev_crc: int
    damage: BadFrame | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SegmentHeader)


def segment_name(number: int) -> str:
    """File name of segment `number`, from 1."""
    assert 1 <= number < 10**10, f"segment number {number} does not fit a name"
    return f"{number:010d}.kvj"


def segment_names(names: list[str]) -> dict[int, str]:
    """Segment files by number, ascending; of a plain and a compressed one the plain, which is removed last."""
    found: dict[int, str] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match:
            found.setdefault(int(match[1]), name)
    return dict(sorted(found.items()))


def segment_numbers(names: list[str]) -> list[tuple[str, int]]:
    """Every segment file with its number, ascending, the plain and the compressed one where both are there."""
    found = [(name, int(match[1])) for name in names if (match := _NAME.fullmatch(name))]
    return sorted(found, key=lambda entry: (entry[1], entry[0]))


def segment_behind(storage: Storage, sequence: int) -> int:
    """Number of the segment in which the record behind `sequence` stands, or would; 0 without one."""
    chosen = 0
    for number, name in segment_names(storage.names()).items():
        header = load_header(storage, name)
        if header is not None and header.first_sequence <= sequence + 1:
            chosen = number
    return chosen


def encode_header(header: SegmentHeader, prev_crc: int) -> bytes:
    """The header's frame. Its sequence field repeats `first_sequence`."""
    assert len(header.journal_id) == JOURNAL_ID_BYTES, f"journal id of {len(header.journal_id)} bytes"
    assert 0 < header.life_first <= header.first_sequence, f"life begins at {header.life_first}, after the segment"
    assert (header.number == 1) == (header.previous_bytes == 0), "only segment 1 has none before it"
    sequence = header.first_sequence
    data, _ = frame.encode(sequence, SEGMENT, 0, sequence - 1, prev_crc, _encoder.encode(header))
    return data


def digest(data: bytes | memoryview) -> bytes:
    """The digest by which a header names the file before it, or the body of a snapshot: BLAKE2b, 16 bytes."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def load(storage: Storage, name: str) -> Segment:
    """Read one segment file. A header that cannot be read is returned as damage, never raised."""
    match = _NAME.fullmatch(name)
    assert match, f"{name} is not a segment's name"
    number = int(match[1])
    try:
        data = storage.read(name)
    except FileNotFoundError:
        # Between listing and reading, a running daemon compressed it.
        name = segment_name(number) + ARCHIVE_SUFFIX
        data = storage.read(name)
    if name.endswith(ARCHIVE_SUFFIX):
        try:
            data = zstandard.ZstdDecompressor().decompress(data)
        except zstandard.ZstdError as error:
            return Segment(name, number, b"", None, 0, 0, BadFrame(0, "bad_archive", f"not decompressible: {error}"))
    return _parse(name, number, data)


def load_header(storage: Storage, name: str) -> SegmentHeader | None:
    """Only the header of a segment file; None when it cannot be read."""
    data = storage.read_start(name, HEADER_READ_BYTES)
    if name.endswith(ARCHIVE_SUFFIX):
        try:
            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        except zstandard.ZstdError:
            return None
    return _parse(name, 0, data).header


def _parse(name: str, number: int, data: bytes) -> Segment:
    """A segment from its bytes: the header is decoded, records are not."""
    head = frame.decode(data, 0)
    if isinstance(head, BadFrame):
        return Segment(name, number, data, None, 0, 0, head)
    if head.kind != SEGMENT:
        return Segment(name, number, data, None, 0, 0, BadFrame(0, "bad_frame", "the file begins without a header"))
    try:
        header = _decoder.decode(head.payload)
    except msgspec.MsgspecError as error:
        # The CRC holds, so it was written like this: by a format that this reader does not know.
        return Segment(name, number, data, None, 0, 0, BadFrame(0, "newer_format", f"unreadable header: {error}"))
    return Segment(name, number, data, header, head.end, head.prev_crc, None)


def frames(data: bytes, start: int) -> Iterator[Frame | BadFrame]:
    """Frames from `start` to the end of the bytes; a bad one is the last that is yielded."""
    offset = start
    while offset < len(data):
        found = frame.decode(data, offset)
        yield found
        if isinstance(found, BadFrame):
            return
        offset = found.end
