"""Units, id tables and attention of a GPU: the Triton kernels behind the interfaces that the CPU's versions answer to.

Owns the upload of columns. Must never use a stream of its own: the caller's current stream orders everything.
Decode rows come first in a batch and are computed by the split kernel, the chunks behind them by the extend kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allocator.columns import Int32s, Int64s
from allocator.geometry import StageGeometry
from daemon.rank.batch import BandPages, Batch
from daemon.rank.host_pool import HostPool, no_pool
from daemon.rank.paged_attention import AttentionSpec, LayerViews, pages_for
from kernels.attention_block import blocks
from kernels.attention_decode import attention_decode
from kernels.attention_prefill import attention_prefill, tiles_of
from kernels.store_rows import store_rows
from kernels.units import copy_units, update_table, zero_units
from kernels.upload import upload as put


def upload(column: NDArray[np.integer], device: torch.device) -> Tensor:
    """An int32 copy of a host column on the device, enqueued on the current stream."""
    return put(torch.from_numpy(column.astype(np.int32)), device)


class TritonUnits:
    """Unit operations on device bytes, uint8[arena_bytes], and the id tables beside them; on the current stream.

    Host copies go unit by unit between the arena and the rows of `pool`, which must be pinned to be asynchronous.
    """

    def __init__(self, stage: StageGeometry, data: Tensor, pool: HostPool | None = None) -> None:
        self._unit_bytes = [band.unit_bytes for band in stage.bands]
        self._data = data
        self._pool = pool
        self.tables: list[Tensor] = []

    def open_tables(self, tables: Sequence[Int32s]) -> None:
        """Put every band's id table on the device, int32[ids + 1]."""
        self.tables = [upload(table, self._data.device) for table in tables]

    def zero(self, band: int, units: Int32s) -> None:
        """Zero whole units of a band."""
        if units.size:
            zero_units(self._data, self._put(units), self._unit_bytes[band])

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Copy units pair by pair; sources and targets are disjoint."""
        if sources.size:
            copy_units(self._data, self._put(sources), self._put(targets), self._unit_bytes[band])

    def bind(self, band: int, virtual: Int32s, physical: Int32s) -> None:
        """table[virtual] = physical; virtual ids are distinct."""
        if virtual.size:
            update_table(self.tables[band], self._put(virtual), self._put(physical))

    def to_host(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Units into host slots; raises StepRefused without a pool or for a slot beyond it."""
        pool = self._pool or no_pool(use)
        pool.fill(band, slots)
        for row, unit in self._rows(pool, band, units, slots):
            row.copy_(unit, non_blocking=True)

    def from_host(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Host slots into units; raises StepRefused without a pool, and for a slot beyond it or never written."""
        pool = self._pool or no_pool(use)
        pool.require(band, slots)
        for row, unit in self._rows(pool, band, units, slots):
            unit.copy_(row, non_blocking=True)

    def _rows(self, pool: HostPool, band: int, units: Int32s, slots: Int64s) -> Iterator[tuple[Tensor, Tensor]]:
        """The host row and the unit's bytes of each pair: views."""
        rows, size = torch.from_numpy(pool.rows(band)), self._unit_bytes[band]
        for unit, slot in zip(units.tolist(), slots.tolist(), strict=True):
            yield rows[slot], self._data[unit * size : (unit + 1) * size]

    def _put(self, column: Int32s) -> Tensor:
        return upload(column, self._data.device)


class _Rows(NamedTuple):
    """A batch's columns that every band shares; the first `singles` rows have one query each."""

    slots: Tensor
    singles: int
    lengths: Tensor
    longest: int
    starts: Tensor
    counts: Tensor
    offsets: Tensor


class _Pages(NamedTuple):
    """A batch's pages in one band, on the device: of each token, and of each row from its `first` one on."""

    pages: Tensor
    tables: Tensor
    first: Tensor


class TritonAttention:
    """Paged attention by Triton kernels; `upcast` only for the interpreter, whose bfloat16 arithmetic is wrong."""

    def __init__(self, views: Mapping[int, LayerViews], upcast: bool = False) -> None:
        self._views = views
        self._upcast = upcast
        self._batch: Batch
        self._rows: _Rows
        self._pages: dict[int, _Pages] = {}
        self._tiles: dict[int, tuple[Tensor, Tensor]] = {}  # by queries of a tile

    def begin(self, batch: Batch) -> None:
        """Upload what every band of this batch shares; the pages of a band follow with its first layer."""
        self._batch = batch
        self._pages = {}
        if not self._views:
            return
        device = next(iter(self._views.values())).k.device
        chunks = np.flatnonzero(batch.counts > 1)
        singles = int(chunks[0]) if chunks.size else int(batch.rows.size)
        contexts = batch.starts + batch.counts
        self._tiles = {}
        self._rows = _Rows(
            slots=upload(batch.write_slots, device),
            singles=singles,
            lengths=upload(contexts[:singles], device),
            longest=int(contexts[:singles].max()) if singles else 0,
            starts=upload(batch.starts[singles:], device),
            counts=upload(batch.counts[singles:], device),
            offsets=upload(batch.offsets[singles:-1] - singles, device),
        )

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Store `k` [T, kv, d] and `v` [T, kv, dv], attend with `q` [T, heads, d]; returns [T, heads, dv]."""
        view, shared = self._views[layer], self._rows
        pages = pages_for(self._batch, view.band, spec.window)
        here = self._pages.get(view.band) or self._upload(view, pages)
        store_rows(view.k, k, here.pages, shared.slots)
        store_rows(view.v, v, here.pages, shared.slots)
        parts, singles = [], shared.singles
        scale, window, softcap, sinks = spec
        if singles:
            places = (here.tables[:singles], here.first[:singles], shared.lengths, shared.longest)
            parts.append(
                attention_decode(q[:singles], view.k, view.v, *places, scale, window, softcap, sinks, self._upcast)
            )
        if shared.counts.numel():
            rows = (here.tables[singles:], here.first[singles:], shared.starts, shared.counts, shared.offsets)
            tiles = self._tiles_for(view)
            parts.append(
                attention_prefill(
                    q[singles:], view.k, view.v, *rows, tiles, scale, window, softcap, sinks, self._upcast
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _upload(self, view: LayerViews, pages: BandPages) -> _Pages:
        columns = (upload(column, view.k.device) for column in (pages.write_pages, pages.tables, pages.first))
        self._pages[view.band] = _Pages(*columns)
        return self._pages[view.band]

    def _tiles_for(self, view: LayerViews) -> tuple[Tensor, Tensor]:
        """The chunks' tiles, of the size that this layer's heads allow."""
        _, queries = blocks(view.k, view.v)
        if queries not in self._tiles:
            rows, firsts = tiles_of(self._batch.counts[self._rows.singles :].tolist(), queries)
            columns = (np.array(rows, dtype=np.int32), np.array(firsts, dtype=np.int32))
            self._tiles[queries] = (upload(columns[0], view.k.device), upload(columns[1], view.k.device))
        return self._tiles[queries]
