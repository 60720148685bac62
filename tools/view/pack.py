"""Pack: columns of integers as the bytes that a page carries, and back.

Owns the form: a chunk is a row of columns, deflated (zlib) and written in base 85 (RFC 1924, but `.` for `<`). Must
never lose a value. Invariant: `read_columns(columns)` gives what `pack_columns` got, in numpy, and by the same rules in
the page's `data.js`.

    column   u32 how many values | u8 bit 0: differences, bit 1: signed | u8 bytes of a value | u16 0 | planes
    planes   the lowest byte of every value, then the next byte of every value, ...

Differences are to the value before (the first one to 0); signed values are folded: 0, -1, 1, -2, ... become 0, 1, 2, 3.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HEAD = struct.Struct("<IBBH")
DIFFERENCES = 1
SIGNED = 2
TO_PAGE, FROM_PAGE = str.maketrans("<", "."), str.maketrans(".", "<")  # nothing in a script's text may look like a tag
WIDTH_MAX = 6  # bytes: the page computes in doubles, which are exact up to 53 bits
LEVEL = 6  # of zlib: at 9 columns are 2% smaller and take eight times as long
LEVEL_WORDS = 9  # at which words are 10% smaller

Numbers = NDArray[np.int64]


class Column(NamedTuple):
    """Values (anything that makes an int64 array), and whether their differences are smaller than they are."""

    values: object
    differences: bool = False


def pack_columns(columns: Iterable[Column]) -> bytes:
    """The plain bytes of a chunk; raises ValueError for a value that a page cannot hold."""
    return b"".join(_packed(column) for column in columns)


def read_columns(chunk: bytes) -> Iterator[Numbers]:
    """The columns of a chunk, in order, as int64."""
    at = 0
    while at < len(chunk):
        count, flags, width, _ = HEAD.unpack_from(chunk, at)
        at += HEAD.size
        planes = np.frombuffer(chunk, np.uint8, count * width, at).reshape(width, count)
        at += count * width
        values = np.zeros(count, np.int64)
        for place in range(width):
            values |= planes[place].astype(np.int64) << (8 * place)
        if flags & SIGNED:
            values = (values >> 1) ^ -(values & 1)
        yield np.cumsum(values) if flags & DIFFERENCES else values


def squeeze(chunk: bytes, level: int = LEVEL) -> bytes:
    """A chunk as it is kept until the page is written."""
    return zlib.compress(chunk, level)


def unsqueeze(squeezed: bytes) -> bytes:
    """The chunk again."""
    return zlib.decompress(squeezed)


def text_of(squeezed: bytes) -> str:
    """A squeezed chunk as it stands in the page."""
    return base64.b85encode(squeezed).decode("ascii").translate(TO_PAGE)


def bytes_of(text: str) -> bytes:
    """The squeezed chunk again."""
    return base64.b85decode(text.translate(FROM_PAGE))


def _packed(column: Column) -> bytes:
    values = np.asarray(column.values, dtype=np.int64).reshape(-1)
    flags = 0
    if column.differences:
        flags |= DIFFERENCES
        values = np.diff(values, prepend=0)
    if values.size and int(values.min()) < 0:
        flags |= SIGNED
        values = (values << 1) ^ (values >> 63)
    most = int(values.max()) if values.size else 0
    width = max(1, -(-most.bit_length() // 8))
    if width > WIDTH_MAX:
        raise ValueError(f"a value of {most.bit_length()} bits in a column; a page holds {8 * WIDTH_MAX}")
    planes = values.astype("<i8").view(np.uint8).reshape(-1, 8).T[:width]
    return HEAD.pack(values.size, flags, width, 0) + np.ascontiguousarray(planes).tobytes()
