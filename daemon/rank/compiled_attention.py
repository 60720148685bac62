"""Paged attention in host memory by the compiled library: single queries, and the weights of prompt chunks.

Owns the arguments of the library's calls, and the products of chunks, which are torch's: in bfloat16 their scores are
rounded once, as in the eager attention of `transformers`. Must never keep a pointer beyond the batch whose tensors it
points into. Invariant: the new rows of a layer are stored before any query of it attends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daemon.rank.batch import BandPages, Batch
from daemon.rank.paged_attention import AttentionSpec, HostAttention, LayerViews, pages_for
from kernels.host_attention import QUERY_TILE, Scratch
from kernels.host_library import LANES, SUFFIXES, Attention, HostLibrary, scratch_floats

SCORES_MAX = 1 << 22  # of a tile, held at once; smaller pieces would have the keys packed for a product more often
COLUMNS = ("write_pages", "write_slots", "queries", "begins", "ends", "tables")


class Chunk(NamedTuple):
    """One row with several queries: its first token in the batch, how many, the pages that any of them sees, and the
    place of its first query among the keys of those pages."""

    first: int
    queries: int
    pages: Tensor
    start: int


@dataclass(slots=True)
class Rows:
    """One band's and window's single queries as the library takes them, the tensors behind its pointers, and chunks.

    `form` is that of the layer whose sizes and strides the arguments have: most layers share them.
    """

    arguments: Attention
    tensors: tuple[Tensor, ...]
    chunks: list[Chunk]
    form: tuple[object, ...] = ()


class CompiledAttention:
    """One plan per band and window of a batch; layers whose heads are no whole vectors go to `HostAttention`."""

    def __init__(self, library: HostLibrary, views: Mapping[int, LayerViews]) -> None:
        self._library = library
        self._views = views
        self._pointers = {layer: (view.k.data_ptr(), view.v.data_ptr()) for layer, view in views.items()}
        self._torch = HostAttention(views)
        self._batch: Batch
        self._plans: dict[tuple[int, int], Rows] = {}
        self._scratch = torch.empty(0)
        self._gathered = Scratch()  # the chunks' pages

    def begin(self, batch: Batch) -> None:
        """Take the batch; its plans are built by the first layer of each band."""
        self._batch = batch
        self._plans = {}
        self._torch.begin(batch)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Store `k` [T, kv, d] and `v` [T, kv, dv], attend with `q` [T, heads, d]; returns [T, heads, dv]."""
        view = self._views[layer]
        same = q.dtype == k.dtype == v.dtype == view.k.dtype == view.v.dtype
        if not same or q.dtype not in SUFFIXES or q.shape[2] % LANES or v.shape[2] % LANES:
            return self._torch.run(layer, q, k, v, spec)
        q, k, v = _heads_together(q), _heads_together(k), _heads_together(v)
        plan = self._plans.get((view.band, spec.window)) or self._plan(view, spec.window)
        arguments = plan.arguments
        form = (q.shape, v.shape[2], q.stride(0), k.stride(0), v.stride(0), view.kv_heads)
        if form != plan.form:
            self._take_form(arguments, view, q, k, v)
            plan.form = form
        arguments.q, arguments.k, arguments.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        arguments.k_pages, arguments.v_pages = self._pointers[layer]
        arguments.scratch = self._scratch.data_ptr()  # another plan's layer may have taken a larger one
        arguments.scale, arguments.softcap = spec.scale, spec.softcap
        sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        arguments.tokens = q.shape[0]
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        arguments.out = out.data_ptr()
        self._library.attend(arguments, q.dtype)
        for chunk in plan.chunks:
            self._chunk(chunk, q, view, spec, sinks, out)
        return out

    def _chunk(
        self, chunk: Chunk, q: Tensor, view: LayerViews, spec: AttentionSpec, sinks: Tensor | None, out: Tensor
    ) -> None:
        """The queries of one prompt chunk over its gathered pages, tile by tile, by two products each."""
        heads, dim = q.shape[1:]
        k = self._gathered.gather("k", view.k_pages, chunk.pages).view(-1, view.kv_heads, dim).transpose(0, 1)
        v = self._gathered.gather("v", view.v_pages, chunk.pages).view(k.shape[1], view.kv_heads, -1).transpose(0, 1)
        step = min(QUERY_TILE, max(SCORES_MAX // (heads * (chunk.start + chunk.queries)), 1))
        for begin in range(0, chunk.queries, step):
            end = min(begin + step, chunk.queries)
            high = chunk.start + end  # keys [low, high) are those that a query of the tile sees
            low = max(chunk.start + begin + 1 - spec.window, 0) if spec.window else 0
            own = slice(chunk.first + begin, chunk.first + end)
            queries = q[own].transpose(0, 1).reshape(view.kv_heads, -1, dim)
            weights = torch.bmm(queries, k[:, low:high].transpose(1, 2))
            scores, seen = weights.view(heads, end - begin, high - low), chunk.start + begin + 1 - low
            self._library.soften(scores, seen, spec.window, spec.scale, spec.softcap, sinks)
            out[own] = torch.bmm(weights, v[:, low:high]).view(heads, end - begin, -1).transpose(0, 1)

    def _take_form(self, arguments: Attention, view: LayerViews, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Sizes and strides of a layer, and scratch memory for them."""
        (_, heads, dim), value_dim = q.shape, v.shape[2]
        arguments.heads, arguments.kv_heads = heads, view.kv_heads
        arguments.dim, arguments.value_dim = dim, value_dim
        arguments.q_stride, arguments.k_stride, arguments.v_stride = q.stride(0), k.stride(0), v.stride(0)
        arguments.k_unit_stride, arguments.v_unit_stride = view.k.stride(0), view.v.stride(0)
        floats, threads = scratch_floats(heads, dim, value_dim), arguments.threads
        if self._scratch.numel() < threads * floats:
            self._scratch = torch.empty(threads * floats)
        arguments.scratch_floats = floats

    def _plan(self, view: LayerViews, window: int) -> Rows:
        batch = self._batch
        pages = pages_for(batch, view.band, window)
        single = np.flatnonzero(batch.counts == 1)
        ends = batch.starts[single].astype(np.int64) + 1
        begins = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
        base = pages.first[single].astype(np.int64) * batch.page_size
        columns = (pages.write_pages, batch.write_slots, batch.offsets[single], begins - base, ends - base)
        tensors = tuple(_tensor(column) for column in (*columns, pages.tables[single]))
        arguments = Attention(page_size=batch.page_size, rows=single.size, table_stride=pages.tables.shape[1])
        arguments.threads = torch.get_num_threads()
        for name, tensor in zip(COLUMNS, tensors, strict=True):
            setattr(arguments, name, tensor.data_ptr())
        plan = Rows(arguments, tensors, self._chunks(pages, window))
        self._plans[view.band, window] = plan
        return plan

    def _chunks(self, pages: BandPages, window: int) -> list[Chunk]:
        """Rows with several queries; pages that no query of theirs sees are left out."""
        batch, size = self._batch, self._batch.page_size
        found = []
        for row in np.flatnonzero(batch.counts > 1).tolist():
            start, count, first = int(batch.starts[row]), int(batch.counts[row]), int(pages.first[row])
            visible = max(start + 1 - window, 0) if window else 0
            skipped = max(visible // size - first, 0)
            base = (first + skipped) * size
            listed = pages.tables[row, skipped : skipped - (base - start - count) // size].astype(np.int64)
            found.append(Chunk(int(batch.offsets[row]), count, torch.from_numpy(listed), start - base))
        return found


def _tensor(column: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(column))


def _heads_together(x: Tensor) -> Tensor:
    """`x` [T, heads, d] itself when a token's heads lie together, else a copy."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
