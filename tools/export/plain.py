"""Plain: records as values that JSON has, with columns as lists and the names of the code.

Owns which byte fields are columns beside those that `journal.difference` knows. Must never drop a field: bytes that are
no column are written in hexadecimal digits. Invariant: equal records give equal values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from allocator.columns import F32, I32, I64
from journal.difference import COLUMNS as COMPARED

COLUMNS: dict[tuple[str, str], np.dtype[Any]] = {
    **COMPARED,
    ("Rebind", "sources"): I32,
    ("Rebind", "targets"): I32,
    ("CopyState", "sources"): I32,
    ("CopyState", "targets"): I32,
    ("Backup", "slots"): I64,
    ("Load", "slots"): I64,
    ("RecoveredChoice", "tokens"): I64,
    ("Logprobs", "chosen"): F32,
    ("Logprobs", "ranks"): I32,
    ("Logprobs", "top_ids"): I64,
    ("Logprobs", "top_values"): F32,
}

TYPE = "type"  # the key under which a value of a union says which of its types it is

_writers: dict[type, Callable[[Any], dict[str, Any]]] = {}


def plain(value: Any) -> Any:
    """A struct, list, dict or scalar as JSON values; see the module."""
    if isinstance(value, msgspec.Struct):
        return _writer(type(value))(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def fields(record: msgspec.Struct) -> dict[str, Any]:
    """A record's fields by name; its type is the record's kind already."""
    values: dict[str, Any] = plain(record)
    values.pop(TYPE, None)
    return values


def _writer(kind: type[msgspec.Struct]) -> Callable[[Any], dict[str, Any]]:
    """How structs of a type are written, worked out once."""
    found = _writers.get(kind)
    if found is None:
        parts = [(name, _part(COLUMNS.get((kind.__name__, name)))) for name in kind.__struct_fields__]
        tag = kind.__struct_config__.tag
        head = {} if tag is None else {TYPE: tag}

        def write(value: Any) -> dict[str, Any]:
            return head | {name: part(getattr(value, name)) for name, part in parts}

        found = _writers[kind] = write
    return found


def _part(column: np.dtype[Any] | None) -> Callable[[Any], Any]:
    if column is None:
        return plain

    def entries(data: Any) -> Any:
        """A column's entries, or its bytes where they are no whole number of them; of a list each column's."""
        if isinstance(data, list):
            return [entries(one) for one in data]
        return data.hex() if len(data) % column.itemsize else np.frombuffer(data, column).tolist()

    return entries
