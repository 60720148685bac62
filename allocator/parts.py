"""Parts of ops as columns, and back: the one place that knows their canonical form.

Owns the conversion and the check `op.canonical`. Must never look at what is live. Canonical: parts ascend strictly by
band, no part is empty, ids ascend strictly; so equal changes are equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allocator.checks import Checks, some
from allocator.columns import I32, I64, Int32s, Int64s, i32, i64
from allocator.ops import CopyState, Part, Rebind


def ascends(ids: Int32s) -> bool:
    """Whether a column ascends strictly, so that no id is named twice."""
    return ids.size < 2 or not np.count_nonzero(ids[1:] <= ids[:-1])


def same(one: Int32s, other: Int32s) -> bool:
    """Whether two columns hold the same ids in the same order."""
    return one.size == other.size and not np.count_nonzero(one != other)


def op_columns(parts: list[Part], bands: int, checks: Checks) -> list[tuple[int, Int32s]]:
    """(band, ids) of each part, ids a read-only int32 view; raises InvariantBroken when not in canonical form."""
    columns: list[tuple[int, Int32s]] = []
    before = -1
    for part in parts:
        ids = _id_column(part.band, part.ids, checks)
        if not before < part.band < bands or ids.size == 0:
            checks.broken("op.canonical", f"part of band {part.band} with {ids.size} ids, after band {before}")
        if not ascends(ids):
            checks.broken("op.canonical", f"band {part.band}: ids {some(ids)} do not ascend strictly")
        before = part.band
        columns.append((part.band, ids))
    return columns


def slot_columns(columns: Sequence[tuple[int, Int32s]], slots: Sequence[bytes], checks: Checks) -> list[Int64s]:
    """Host slots of each part, one per unit and none negative; raises InvariantBroken otherwise."""
    if len(slots) != len(columns):
        checks.broken("op.canonical", f"{len(slots)} columns of host slots for {len(columns)} parts")
    out: list[Int64s] = []
    for (band, ids), column in zip(columns, slots, strict=True):
        if len(column) != ids.size * I64.itemsize:
            checks.broken("op.canonical", f"band {band}: {len(column)} bytes of host slots for {ids.size} units")
        values = i64(column)
        if np.count_nonzero(values < 0):
            checks.broken("op.canonical", f"band {band}: host slots {some(values[values < 0])} are negative")
        out.append(values)
    return out


def pair_columns(op: Rebind | CopyState, checks: Checks) -> tuple[Int32s, Int32s]:
    """Sources and targets of an op that names pairs: equally many, at least one."""
    sources, targets = _id_column(op.band, op.sources, checks), _id_column(op.band, op.targets, checks)
    if sources.size != targets.size or not sources.size:
        checks.broken("op.canonical", f"band {op.band}: {sources.size} sources for {targets.size} targets")
    return sources, targets


def make_parts(columns: Sequence[tuple[int, Int32s]]) -> list[Part]:
    """Op parts of non-empty int32 columns in chain order."""
    return [Part(band, ids.tobytes()) for band, ids in columns]


def _id_column(band: int, column: bytes, checks: Checks) -> Int32s:
    if len(column) % I32.itemsize:
        checks.broken("op.canonical", f"band {band}: {len(column)} bytes are no int32 column")
    return i32(column)
