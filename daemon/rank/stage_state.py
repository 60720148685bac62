"""Stage state: what the ranks of a stage know behind one step, as canonical bytes for a snapshot.

Owns what belongs to it: the layout, the mirror of the logical chain, and which pages each row has, which a forward's
writes are known by. Must never hold what lies on the device or what sampling needs: replay has neither. Invariant: a
rank and a replay that applied the same steps have the same bytes, so no width or capacity of a table is in them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from allocator import graph
from allocator.checks import Checks
from allocator.columns import Int32s
from allocator.logical.mirror import LogicalMirror
from allocator.physical.chain import PhysicalChain
from daemon.rank.rows import RowTable

EXTERNAL: dict[type, str] = {Checks: "checks"}


def stage_state(chain: PhysicalChain, mirror: LogicalMirror, rows: RowTable) -> bytes:
    """The state behind a step whose forward, if it has one, was launched."""
    columns = [rows.generations, rows.lengths, _used(rows.tables)]
    # Apart from each other, so that nothing depends on what the two happen to share in one process.
    return msgspec.msgpack.encode([graph.encode(part, EXTERNAL) for part in (chain, mirror, columns)])


def restore_stage(
    data: bytes, find: graph.Find, checks: Checks, rows: RowTable
) -> tuple[PhysicalChain, LogicalMirror, RowTable]:
    """Chain and mirror out of the bytes, and `rows`, which is empty, filled from them; raises GraphError."""
    parts: list[Any] = [
        graph.decode(part, find, {"checks": checks}) for part in msgspec.msgpack.decode(data, type=list[bytes])
    ]
    chain, mirror, (generations, lengths, tables) = parts
    assert generations.shape == rows.generations.shape, "the rows of another configuration"
    assert tables.shape[1] <= rows.tables.shape[1], "pages of a longer context than the model's"
    rows.generations[:] = generations
    rows.lengths[:] = lengths
    rows.tables[:, : tables.shape[1]] = tables
    return chain, mirror, rows


def _used(tables: Int32s) -> Int32s:
    """The columns up to the last that names a page."""
    columns = np.flatnonzero(tables.any(axis=0))
    return tables[:, : int(columns[-1]) + 1 if columns.size else 0].copy()
