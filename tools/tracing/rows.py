"""Rows of a recorded trace: what was asked of the allocator and what it decided, one JSON object a line.

Owns the format. Must never need the code that recorded it: arguments are plain numbers, ops and effects their canonical
bytes. A file is, per run: one `Run`, then `Call`, `Stage` and `Launch` rows in the order in which things happened. The
last row is `End`: a file without it was cut, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from allocator.columns import i32
from allocator.effects import (
    Bind,
    Copy,
    Effect,
    HostRead,
    HostWait,
    HostWrite,
    PublishUnits,
    SendUnits,
    WaitCopy,
    WaitForward,
    Zero,
)
from allocator.geometry import BandGeometry, Geometry
from allocator.ops import CopyState, Fix, Flush, Op, Rebind

VERSION = 1


class Run(msgspec.Struct, tag="run", tag_field="row"):
    """A run begins: which program it was, and its geometry."""

    version: int
    shape: str
    page_size: int
    seed: int
    length: int
    geometry: Geometry


class Call(msgspec.Struct, tag="call", tag_field="row"):
    """The logical chain was asked something; `answer` as `answer_of` writes it."""

    name: str
    arguments: list[Any]
    answer: Any


class Stage(msgspec.Struct, tag="stage", tag_field="row"):
    """A stage's physical chain applied a step; then its spans (bytes) and counts (live, hole, pending, beyond)."""

    stage: int
    seq: int
    processed: int
    released: list[int]
    ops: bytes
    effects: bytes
    layout: bytes
    spans: list[tuple[int, int] | None]
    counts: list[int]


class Launch(msgspec.Struct, tag="launch", tag_field="row"):
    """A stage's forward was launched: the ids it writes per band (null: unknown), and the waits before it."""

    stage: int
    seq: int
    writes: dict[int, list[int] | None]
    waits: bytes


class End(msgspec.Struct, tag="end", tag_field="row"):
    """The recording is complete: so many runs, and so many rows before this one."""

    runs: int
    rows: int


Row = Run | Call | Stage | Launch | End

_effects = msgspec.msgpack.Decoder(list[Effect])
_ops = msgspec.msgpack.Decoder(list[Op])
_rows = msgspec.json.Decoder(Row)
_encoder = msgspec.json.Encoder()


class BadTrace(Exception):
    """A file that is no trace, or one of another version."""


def encode(row: Row) -> bytes:
    """One line."""
    return _encoder.encode(row) + b"\n"


def read(path: Path) -> Iterator[tuple[int, Row]]:
    """Line number and row of every line but the end; raises BadTrace for anything but a complete trace."""
    runs, number = 0, 0
    end: End | None = None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if end is not None:
                raise BadTrace(f"{path}, line {number}: there is more behind the end row; record the trace again")
            try:
                row: Row = _rows.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise BadTrace(f"{path}, line {number}: no row of a trace ({error}); record it again") from error
            if isinstance(row, End):
                end = row
                continue
            if isinstance(row, Run):
                runs += 1
                if row.version != VERSION:
                    raise BadTrace(f"{path}, line {number}: version {row.version}; this command reads {VERSION}")
            elif not runs:
                raise BadTrace(f"{path}, line {number}: a {type(row).__name__.lower()} before the first run")
            yield number, row
    if end is None:
        where = f"ends after line {number}" if number else "is empty"
        raise BadTrace(f"{path} {where}, without its end row: the recording was cut; record the trace again")
    if (end.runs, end.rows) != (runs, number - 1):
        raise BadTrace(f"{path}: {runs} runs and {number - 1} rows, the end row counts {end.runs} and {end.rows}")


def effects_of(column: bytes) -> list[Effect]:
    """Effects from their canonical bytes."""
    return _effects.decode(column)


def ops_of(column: bytes) -> list[Op]:
    """Ops from their canonical bytes."""
    return _ops.decode(column)


# --- arguments of the logical chain --------------------------------------------------------------------------------

# Method -> how each argument is written: number, numbers, column (int32), columns (per band int32 or null), columns64,
# extents, ops.
CALLS: dict[str, tuple[str, ...]] = {
    "refusal": ("numbers",),
    "never_fits": ("numbers",),
    "take": ("numbers", "columns", "columns"),
    "free": ("columns",),
    "hold": ("number", "columns"),
    "publish": ("number", "columns"),
    "send": ("number", "columns"),
    "fix": ("number",),
    "backup": ("number", "columns", "columns64"),
    "load": ("number", "columns", "columns64"),
    "end_uses": ("numbers",),
    "extents_fixed": ("extents", "number"),
    "rebind": ("number", "column", "column"),
    "copy_state": ("column", "column"),
    "step_digest": ("number", "ops", "numbers"),
}
"""Every call that decides or changes something; what only reads for metrics is not recorded."""


def write_argument(kind: str, value: Any) -> Any:
    """An argument as plain data."""
    if value is None or kind == "number":
        return value if value is None else int(value)
    if kind in ("numbers", "column"):
        return [int(number) for number in value]
    if kind in ("columns", "columns64"):
        return [None if column is None else [int(number) for number in column] for column in value]
    if kind == "ops":
        return msgspec.msgpack.encode(value).hex()
    assert kind == "extents", kind
    return [[None if extent is None else [int(extent[0]), int(extent[1])] for extent in row] for row in value]


def read_argument(kind: str, value: Any) -> Any:
    """An argument as the chain takes it."""
    if value is None or kind == "number":
        return value
    if kind == "numbers":
        return tuple(value)
    if kind == "column":
        return np.array(value, dtype=np.int32)
    if kind in ("columns", "columns64"):
        dtype = np.int32 if kind == "columns" else np.int64
        return [None if column is None else np.array(column, dtype=dtype) for column in value]
    if kind == "ops":
        return ops_of(bytes.fromhex(value))
    return tuple(tuple(None if extent is None else (extent[0], extent[1]) for extent in row) for row in value)


def answer_of(answer: Any) -> Any:
    """An answer of the logical chain as plain data: an op's words, a digest in hex, a refusal's sentence, or null."""
    if answer is None:
        return None
    if isinstance(answer, bytes):
        return answer.hex()
    if hasattr(answer, "text"):
        return answer.text()
    return op_text(getattr(answer, "op", answer))


# --- words ---------------------------------------------------------------------------------------------------------


def op_text(op: Op) -> str:
    """An op in words: bands by index, ids as they are."""
    name = type(op).__name__.lower()
    if isinstance(op, Flush):
        return f"flush {op.moves_max}"
    if isinstance(op, (Rebind, CopyState)):
        return f"{name} band {op.band}: {_pairs(op.sources, op.targets)}"
    use = f" use {op.use}" if hasattr(op, "use") else ""
    if isinstance(op, Fix):
        return f"fix{use}"
    parts = [f"band {part.band} ids {_ids(part.ids)}" for part in op.parts]
    return f"{name}{use} {', '.join(parts)}".rstrip()


def effect_text(effect: Effect, bands: list[BandGeometry]) -> str:
    """An effect in words."""
    if isinstance(effect, WaitForward):
        return f"wait for forward {effect.seq}"
    if isinstance(effect, WaitCopy):
        return f"wait for host copy {effect.use}"
    if isinstance(effect, HostWait):
        return f"host waits for transfer {effect.use}"
    name = bands[effect.band].name
    if isinstance(effect, Zero):
        return f"zero {name} units {_ids(effect.units)}"
    if isinstance(effect, Copy):
        return f"copy {name} units {_pairs(effect.sources, effect.targets)}"
    if isinstance(effect, Bind):
        return f"bind {name} ids to units {_pairs(effect.virtual, effect.physical)}"
    if isinstance(effect, (HostRead, HostWrite)):
        what = "read by" if isinstance(effect, HostRead) else "written by"
        return f"{name} units {_ids(effect.units)} {what} host copy {effect.use}"
    assert isinstance(effect, (SendUnits, PublishUnits))
    what = "sent for" if isinstance(effect, SendUnits) else "published for"
    return f"{name} units {_ids(effect.units)} {what} use {effect.use} after forward {effect.after}"


def _ids(column: bytes) -> str:
    return " ".join(map(str, i32(column).tolist()))


def _pairs(sources: bytes, targets: bytes) -> str:
    pairs = zip(i32(sources).tolist(), i32(targets).tolist(), strict=True)
    return " ".join(f"{source}->{target}" for source, target in pairs)
