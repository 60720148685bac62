"""Batches: one forward as a runner sees it, with every virtual page translated.

Owns the translation from a step's columns to physical tables and write positions: one per band per step. Must never be
kept beyond the launch it was built for: physical units move between steps. Invariant: no live row writes to or reads
its own positions from the sink.

    row i of the batch:   positions starts[i] .. starts[i]+counts[i]-1 are computed now; all before them are stored
    its tokens:           tokens[offsets[i] : offsets[i+1]]
    its pages:            tables[i, p // page_size] holds position p
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int32s, Int64s, i32, i64
from daemon.rank.errors import StepRefused
from daemon.rank.rows import RowTable
from daemon.rank.sampling_table import SamplingTable
from ipc.messages import EXPLICIT, SAMPLE, Forward


class Batch(NamedTuple):
    """Ragged batch of n rows and T tokens.

    `rows`, `generations`, `starts`, `counts` int32[n]; `offsets` int64[n+1]; `tokens`, `positions` int64[T];
    `write_pages` and `write_slots` int64[T]: physical page of each token and its slot there; `tables` int32[n, pages]:
    physical pages; `sampled` int64[k]: indexes of the rows that sample; `carried` int64[c]: indexes of the rows whose
    one input token is their last sampled one (`tokens` holds -1 there until the runner fills it).
    """

    seq: int
    rows: Int32s
    generations: Int32s
    starts: Int32s
    counts: Int32s
    offsets: Int64s
    tokens: Int64s
    positions: Int64s
    write_pages: Int64s
    write_slots: Int64s
    tables: Int32s
    sampled: Int64s
    carried: Int64s
    sampling: SamplingTable
    page_size: int


def build_batch(seq: int, forward: Forward, rows: RowTable, id_table: Int32s, page_size: int) -> Batch:
    """Apply a forward to the rows and translate it; `id_table` int32[ids + 1] maps owner pages to physical units."""
    rows.apply(forward)
    row, starts, counts = i32(forward.rows), i32(forward.starts), i32(forward.counts)
    flags = np.frombuffer(forward.flags, dtype=np.uint8)
    if flags.size != row.size:
        raise StepRefused(f"{flags.size} flags for {row.size} rows")
    offsets = np.zeros(row.size + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    owner = np.repeat(np.arange(row.size), counts)
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, counts)
    pages_used = (int((starts + counts).max()) + page_size - 1) // page_size
    tables = id_table.take(rows.tables[row, :pages_used])
    write_pages = tables[owner, positions // page_size].astype(np.int64)
    if not write_pages.all():
        at = int(np.flatnonzero(write_pages == 0)[0])
        raise StepRefused(f"row {row[owner[at]]} has no page for position {positions[at]}")
    explicit = (flags & EXPLICIT) != 0
    carried = np.flatnonzero(~explicit)
    sampled = np.flatnonzero(flags & SAMPLE)
    rows.sample(row[carried], row[sampled])
    return Batch(
        seq=seq,
        rows=row,
        generations=i32(forward.generations),
        starts=starts,
        counts=counts,
        offsets=offsets,
        tokens=_tokens(i64(forward.tokens), explicit[owner], counts[carried]),
        positions=positions,
        write_pages=write_pages,
        write_slots=positions % page_size,
        tables=tables,
        sampled=sampled,
        carried=carried,
        sampling=rows.sampling,
        page_size=page_size,
    )


def check_tokens(batch: Batch, vocab_size: int) -> None:
    """Raise StepRefused for an explicit token that no embedding has."""
    wrong = (batch.tokens < 0) | (batch.tokens >= vocab_size)
    wrong[batch.offsets[batch.carried]] = False
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        row = batch.rows[int(np.searchsorted(batch.offsets, at, side="right")) - 1]
        raise StepRefused(f"row {row} position {batch.positions[at]}: token {batch.tokens[at]} of {vocab_size} ids")


def _tokens(explicit_tokens: Int64s, explicit: NDArray[np.bool_], carried_counts: Int32s) -> Int64s:
    """Tokens int64[T]: explicit ones in order, -1 where a row's last sampled token goes."""
    if (carried_counts != 1).any():
        raise StepRefused(f"a row without explicit tokens has {int(carried_counts.max())} positions; it must have one")
    if int(explicit.sum()) != explicit_tokens.size:
        raise StepRefused(f"{explicit_tokens.size} explicit tokens for {int(explicit.sum())} positions")
    tokens = np.full(explicit.size, -1, dtype=np.int64)
    tokens[explicit] = explicit_tokens
    return tokens
