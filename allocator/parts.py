"""Parts of ops as columns, and back: the one place that knows their canonical form.

Owns the conversion and the check `op.canonical`. Must never look at what is live. Canonical: parts ascend strictly by
band, no part is empty, ids ascend strictly; so equal changes are equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from allocator.checks import Checks, some
from allocator.columns import I32, Int32s, i32
from allocator.ops import Part


def op_columns(parts: list[Part], bands: int, checks: Checks) -> list[tuple[int, Int32s]]:
    """(band, ids) of each part, ids a read-only int32 view; raises InvariantBroken when not in canonical form."""
    columns: list[tuple[int, Int32s]] = []
    before = -1
    for part in parts:
        if len(part.ids) % I32.itemsize:
            checks.broken("op.canonical", f"band {part.band}: {len(part.ids)} bytes are no int32 column")
        ids = i32(part.ids)
        if not before < part.band < bands or ids.size == 0:
            checks.broken("op.canonical", f"part of band {part.band} with {ids.size} ids, after band {before}")
        if ids.size > 1 and not (ids[1:] > ids[:-1]).all():
            checks.broken("op.canonical", f"band {part.band}: ids {some(ids)} do not ascend strictly")
        before = part.band
        columns.append((part.band, ids))
    return columns


def make_parts(columns: Sequence[tuple[int, Int32s]]) -> list[Part]:
    """Op parts of non-empty int32 columns in chain order."""
    return [Part(band, ids.tobytes()) for band, ids in columns]
