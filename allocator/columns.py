"""Columns: one-dimensional little-endian arrays as they travel in messages and records.

Owns the only two conversions between numpy arrays and message bytes. Must never copy on the way in: a decoded column
is a read-only view of the message. Invariant: every column is little-endian and C-contiguous, so equal columns are
equal bytes on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I32 = np.dtype("<i4")
I64 = np.dtype("<i8")
F32 = np.dtype("<f4")
U8 = np.dtype("u1")

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Bytes8s = NDArray[np.uint8]


def pack_i32(values: object) -> bytes:
    """int32 column bytes of a sequence or array of ids, counts or positions."""
    return np.ascontiguousarray(values, dtype=I32).tobytes()


def pack_i64(values: object) -> bytes:
    """int64 column bytes of a sequence or array of token ids or request numbers."""
    return np.ascontiguousarray(values, dtype=I64).tobytes()


def i32(column: bytes) -> Int32s:
    """Read-only int32 view of a column; raises ValueError when its length is not a multiple of 4."""
    return np.frombuffer(column, dtype=I32)


def i64(column: bytes) -> Int64s:
    """Read-only int64 view of a column; raises ValueError when its length is not a multiple of 8."""
    return np.frombuffer(column, dtype=I64)


def f32(column: bytes) -> Float32s:
    """Read-only float32 view of a column; raises ValueError when its length is not a multiple of 4."""
    return np.frombuffer(column, dtype=F32)
