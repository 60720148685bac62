"""Difference: where two records of one kind first differ, in words a person can act on.

Owns the knowledge which byte fields are columns and of what type. Must never decide whether two records are equal:
their bytes do that; this only explains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from allocator.columns import I32, I64, U8

COLUMNS: dict[tuple[str, str], np.dtype[Any]] = {
    ("Part", "ids"): I32,
    ("Forward", "rows"): I32,
    ("Forward", "generations"): I32,
    ("Forward", "starts"): I32,
    ("Forward", "counts"): I32,
    ("Forward", "flags"): U8,
    ("Forward", "tokens"): I64,
    ("Forward", "table_rows"): I32,
    ("Forward", "table_indexes"): I32,
    ("Forward", "table_pages"): I32,
    ("Forward", "slots"): I32,
    ("RowSampling", "banned"): I64,
    ("RowSampling", "prompt_ids"): I64,
    ("RowSampling", "output_ids"): I64,
    ("Reported", "rows"): I32,
    ("Reported", "generations"): I32,
    ("Reported", "tokens"): I64,
    ("Generate", "prompt"): I64,
    ("Generate", "stop_ids"): I64,
    ("Resumed", "tokens"): I64,
    ("RecoveredChoice", "tokens"): I64,
}
SHOWN_MAX = 16  # column entries and list items in one line
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first differing place: a path such as `ops[3].parts[0].ids[5]`, and both values there."""

    path: str
    recorded: str
    replayed: str

    def op(self) -> int | None:
        """Index of the op that the path leads through, or None."""
        return int(self.path[4 : self.path.index("]")]) if self.path.startswith("ops[") else None


def first_difference(recorded: object, replayed: object) -> Difference | None:
    """The first place, in field order, where two structs, lists or values differ; None when nothing does."""
    return _walk("", recorded, replayed)


def _walk(path: str, recorded: object, replayed: object) -> Difference | None:
    if type(recorded) is not type(replayed):
        return Difference(path or "kind", describe(recorded), describe(replayed))
    if isinstance(recorded, msgspec.Struct):
        for name in recorded.__struct_fields__:
            left, right = getattr(recorded, name), getattr(replayed, name)
            kind = COLUMNS.get((type(recorded).__name__, name))
            if kind is not None:
                left, right = column(left, kind), column(right, kind)
            found = _walk(f"{path}.{name}" if path else name, left, right)
            if found is not None:
                return found
        return None
    if isinstance(recorded, list) and isinstance(replayed, list):
        for place, (left, right) in enumerate(zip(recorded, replayed, strict=False)):
            found = _walk(f"{path}[{place}]", left, right)
            if found is not None:
                return found
        if len(recorded) != len(replayed):
            place = min(len(recorded), len(replayed))
            sides = [describe(side[place]) if place < len(side) else ABSENT for side in (recorded, replayed)]
            return Difference(f"{path}[{place}]", *sides)
        return None
    return None if recorded == replayed else Difference(path, describe(recorded), describe(replayed))


def column(data: bytes, kind: np.dtype[Any]) -> list[int] | bytes:
    """A column's entries, or its bytes when their number does not fit the type."""
    if len(data) % kind.itemsize:
        return data
    entries: list[int] = np.frombuffer(data, dtype=kind).tolist()
    return entries


def describe(value: object) -> str:
    """A value in one line: structs by field name, columns as numbers, other bytes in hexadecimal, long lists cut."""
    if isinstance(value, msgspec.Struct):
        fields = []
        for name in value.__struct_fields__:
            held = getattr(value, name)
            kind = COLUMNS.get((type(value).__name__, name))
            fields.append(f"{name}={describe(column(held, kind) if kind is not None else held)}")
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, bytes):
        return value.hex() or "empty"
    if isinstance(value, list):
        shown = ", ".join(describe(item) for item in value[:SHOWN_MAX])
        more = f", ... {len(value)} in all" if len(value) > SHOWN_MAX else ""
        return f"[{shown}{more}]"
    return repr(value)
