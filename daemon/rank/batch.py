"""Batches: one forward as a runner sees it, with every virtual page and slot translated.

Owns the translation from a step's columns to physical tables, write positions and state slots: one per band per step.
Must never be kept beyond the launch it was built for: physical units move between steps. Invariant: no live row writes
to or reads its own positions from the sink, nor its state from the padding slot.

    row i of the batch:   positions starts[i] .. starts[i]+counts[i]-1 are computed now; all before them are stored
    its tokens:           tokens[offsets[i] : offsets[i+1]]
    its pages in a band:  tables[i, p // page_size - first[i]] holds position p; a window lists only visible pages
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int32s, Int64s, i32, i64
from allocator.geometry import BandGeometry
from daemon.rank.errors import StepRefused
from daemon.rank.rows import RowTable
from daemon.rank.sampling_table import SamplingTable
from ipc.messages import EXPLICIT, SAMPLE, Forward

NONE: Int64s = np.zeros(0, dtype=np.int64)


class BandPages(NamedTuple):
    """Where one token band stores the positions of a batch of n rows and T tokens.

    `first` int32[n]: index, in the row's own table, of its first page listed here; `tables` int32[n, k]: physical page
    of positions from (first[i] + j) * page_size, the sink behind a row's end; `write_pages` int64[T]: physical page of
    each new token; `window_tokens`: how far back a query sees, itself counted; 0: to the row's beginning.
    """

    first: Int32s
    tables: Int32s
    write_pages: Int64s
    window_tokens: int


class Batch(NamedTuple):
    """Ragged batch of n rows and T tokens.

    `rows`, `generations`, `starts`, `counts` int32[n]; `offsets` int64[n+1]; `tokens`, `positions` int64[T];
    `write_slots` int64[T]: each token's slot in its page; `bands`: per band in chain order its pages, None for state
    and for a band that stores nothing on this stage; `slots` int64[n]: physical working state slots (empty without
    state); `sampled` int64[k]: indexes of the rows that sample; `carried` int64[c]: indexes of the rows whose one input
    token is their last sampled one (`tokens` holds -1 there until the runner fills it); `decoding` int64[d]: indexes of
    the rows that have sampled in this generation, whose input is what they sampled last, carried or told.
    """

    seq: int
    rows: Int32s
    generations: Int32s
    starts: Int32s
    counts: Int32s
    offsets: Int64s
    tokens: Int64s
    positions: Int64s
    write_slots: Int64s
    bands: tuple[BandPages | None, ...]
    slots: Int64s
    sampled: Int64s
    carried: Int64s
    sampling: SamplingTable
    page_size: int
    decoding: Int64s = NONE


def build_batch(
    seq: int,
    forward: Forward,
    rows: RowTable,
    id_tables: Sequence[Int32s],
    bands: Sequence[BandGeometry],
    page_size: int,
) -> Batch:
    """Apply a forward to the rows and translate it; `id_tables[band]` int32[ids + 1] maps virtual ids to units.

    Raises StepRefused for a forward that contradicts itself, the rows, or what is bound.
    """
    _check_pages(forward, id_tables[-1].size)
    rows.apply(forward)
    row, starts, counts = i32(forward.rows), i32(forward.starts), i32(forward.counts)
    flags = np.frombuffer(forward.flags, dtype=np.uint8)
    if flags.size != row.size:
        raise StepRefused(f"{flags.size} flags for {row.size} rows")
    offsets, owner, positions = _spread(starts, counts)
    explicit = (flags & EXPLICIT) != 0
    carried = np.flatnonzero(~explicit)
    sampled = np.flatnonzero(flags & SAMPLE)
    batch = Batch(
        seq=seq,
        rows=row,
        generations=i32(forward.generations),
        starts=starts,
        counts=counts,
        offsets=offsets,
        tokens=_tokens(i64(forward.tokens), explicit[owner], counts[carried]),
        positions=positions,
        write_slots=positions % page_size,
        bands=_translate(rows, Span(row, starts, counts, owner, positions), id_tables, bands, page_size),
        slots=_working_slots(forward, row, id_tables, bands),
        sampled=sampled,
        carried=carried,
        sampling=rows.sampling,
        page_size=page_size,
        decoding=np.flatnonzero(rows.has_sampled[row]),
    )
    rows.sample(row[carried], row[sampled])
    return batch


def check_tokens(batch: Batch, vocab_size: int) -> None:
    """Raise StepRefused for an explicit token that no embedding has."""
    wrong = (batch.tokens < 0) | (batch.tokens >= vocab_size)
    wrong[batch.offsets[batch.carried]] = False
    if np.count_nonzero(wrong):
        at = int(np.flatnonzero(wrong)[0])
        row = batch.rows[int(np.searchsorted(batch.offsets, at, side="right")) - 1]
        raise StepRefused(f"row {row} position {batch.positions[at]}: token {batch.tokens[at]} of {vocab_size} ids")


def _check_pages(forward: Forward, ids: int) -> None:
    """New table entries name ids of the owner's space, `ids` with the sink."""
    pages = i32(forward.table_pages)
    if pages.size and (int(pages.min()) < 0 or int(pages.max()) >= ids):
        raise StepRefused(f"table entries name pages {pages.min()}..{pages.max()}; page ids run from 1 to {ids - 1}")


class Span(NamedTuple):
    """Which positions of which rows are computed: `row`, `starts`, `counts` int32[n]; of each token, its row's index
    `owner` and its position, int64[T].
    """

    row: Int32s
    starts: Int32s
    counts: Int32s
    owner: Int64s
    positions: Int64s


def _spread(starts: Int32s, counts: Int32s) -> tuple[Int64s, Int64s, Int64s]:
    """Offsets int64[n+1] of each row's tokens; of each token, its row's index and its position, int64[T]."""
    n = counts.size
    if int(counts.sum()) == n:  # one token each, as in every step that only decodes
        offsets = np.arange(n + 1)
        return offsets, offsets[:-1], starts.astype(np.int64)
    offsets = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets, np.repeat(np.arange(n), counts), np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, counts)


def _translate(
    rows: RowTable, span: Span, id_tables: Sequence[Int32s], bands: Sequence[BandGeometry], page_size: int
) -> tuple[BandPages | None, ...]:
    """Pages of every token band that stores something here."""
    last = (span.starts + span.counts - 1) // page_size
    if int(last.max()) >= rows.tables.shape[1]:
        at = int(last.argmax())
        width = rows.tables.shape[1]
        end = span.starts[at] + span.counts[at]
        raise StepRefused(f"row {span.row[at]} ends at {end}; a row has {width} pages of {page_size}")
    pages = span.positions // page_size
    translated: list[BandPages | None] = []
    for band, id_table in zip(bands, id_tables, strict=True):
        if band.kind == "state" or not band.unit_bytes:
            translated.append(None)
            continue
        translated.append(_band_pages(rows, span, last, pages, id_table, band, page_size))
    return tuple(translated)


def _band_pages(
    rows: RowTable,
    span: Span,
    last: Int32s,
    pages: Int64s,
    id_table: Int32s,
    band: BandGeometry,
    page_size: int,
) -> BandPages:
    """Pages of one band; `last` int32[n]: each row's newest page, `pages` int64[T]: each token's, as table indexes."""
    window = band.window_tokens
    first = np.maximum(span.starts - window + 1, 0) // page_size if window else np.zeros_like(span.starts)
    reach = last - first if window else last
    used = np.arange(int(reach.max()) + 1, dtype=np.int32) <= reach[:, None]
    tables = id_table.take(_virtual(rows.tables, span.row, first, last, used.shape[1]))
    tables *= used  # the sink behind a row's end
    if np.count_nonzero(tables) != int(reach.sum()) + reach.size:
        at, page = (int(places[0]) for places in np.nonzero((tables == 0) & used))
        position = (int(first[at]) + page) * page_size
        raise StepRefused(f"row {span.row[at]} has no page for position {position} in band {band.name}")
    write_pages = tables[span.owner, pages - first[span.owner] if window else pages]
    return BandPages(first, tables, write_pages.astype(np.int64), window)


def _virtual(tables: Int32s, row: Int32s, first: Int32s, last: Int32s, width: int) -> Int32s:
    """Virtual pages int32[n, width] of the rows, from table index `first` on; behind `last` the last one again."""
    if not np.count_nonzero(first):
        return tables[row, :width]
    return tables[row[:, None], np.minimum(first[:, None] + np.arange(width), last[:, None])]


def _working_slots(forward: Forward, row: Int32s, id_tables: Sequence[Int32s], bands: Sequence[BandGeometry]) -> Int64s:
    """Physical slots int64[n] of the rows' states; empty where this stage stores none."""
    slots, none = i32(forward.slots), np.zeros(0, dtype=np.int64)
    state = next((index for index, band in enumerate(bands) if band.kind == "state"), None)
    if state is None:
        if slots.size:
            raise StepRefused(f"{slots.size} state slots for a model without recurrent state")
        return none
    table = id_tables[state]
    if slots.size != row.size:
        raise StepRefused(f"{slots.size} state slots for {row.size} rows; every row needs its working slot")
    if int(slots.min()) < 1 or int(slots.max()) >= table.size:
        raise StepRefused(f"state slots {slots.min()}..{slots.max()}; slot ids run from 1 to {table.size - 1}")
    order = np.argsort(slots, kind="stable")
    twice = np.flatnonzero(np.diff(slots[order]) == 0)
    if twice.size:
        one, other = row[order[twice[0]]], row[order[twice[0] + 1]]
        raise StepRefused(f"rows {one} and {other} both have working slot {slots[order[twice[0]]]}")
    if not bands[state].unit_bytes:
        return none
    physical = table.take(slots)
    unbound = np.flatnonzero(physical == table[0])
    if unbound.size:
        raise StepRefused(f"row {row[unbound[0]]} has working slot {slots[unbound[0]]}, which is not bound")
    return physical.astype(np.int64)


def _tokens(explicit_tokens: Int64s, explicit: NDArray[np.bool_], carried_counts: Int32s) -> Int64s:
    """Tokens int64[T]: explicit ones in order, -1 where a row's last sampled token goes."""
    if np.count_nonzero(carried_counts != 1):
        raise StepRefused(f"a row without explicit tokens has {int(carried_counts.max())} positions; it must have one")
    if np.count_nonzero(explicit) != explicit_tokens.size:
        raise StepRefused(f"{explicit_tokens.size} explicit tokens for {np.count_nonzero(explicit)} positions")
    tokens = np.full(explicit.size, -1, dtype=np.int64)
    if explicit_tokens.size:
        tokens[explicit] = explicit_tokens
    return tokens
