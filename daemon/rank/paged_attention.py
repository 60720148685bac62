"""Attention of one step for every layer: the arena's typed views, row stores, and the plans of the batch.

Owns the views of each layer's K and V planes. Must never see a virtual id. Invariants: a layer's new rows are stored
before that layer attends; a view is float data only where this layer's own plane lies; a layer's window is never wider
than what its band keeps.

    plane of layer l in unit u:  arena byte u * unit_bytes + offset_l, shape [page_size, kv_heads, dim]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from allocator.plan import PlaneView, StoragePlan
from daemon.rank.batch import BandPages, Batch
from kernels.host_attention import HostPlan, Scratch, attend, plan_attention


class AttentionSpec(NamedTuple):
    """How one layer attends: query at position p to keys j with p - `window` < j <= p (window 0: all j <= p).

    Scores are `scale` * <q, k>, and with a `softcap` c then c * tanh(score / c). `sinks` [heads] are one more logit of
    every query, without a value.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


class PagedAttention(Protocol):
    """What a model calls: `begin` once per batch, `run` once per layer."""

    def begin(self, batch: Batch) -> None:
        """Take the batch whose layers run next; what they share is built when the first of them needs it."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Store `k` [T, kv, d] and `v` [T, kv, dv], attend with `q` [T, heads, d]; returns [T, heads, dv]."""


class LayerViews(NamedTuple):
    """One layer's planes: `k`, `v` [units, page_size, kv_heads, dim], the same as [units, page elements]; its band."""

    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    kv_heads: int
    band: int


def typed_view(arena: Tensor, plane: PlaneView, dtype: torch.dtype) -> Tensor:
    """Strided view [units, *shape] of a plane over the uint8 arena; unit u starts at byte u * unit_bytes + offset."""
    item = dtype.itemsize
    places = [plane.unit_bytes, plane.offset_bytes, *plane.strides_bytes]
    assert all(place % item == 0 for place in places), f"plane {plane} is not aligned to {dtype}"
    units = arena.numel() // plane.unit_bytes
    typed = arena[: units * plane.unit_bytes].view(dtype)
    strides = [plane.unit_bytes // item, *(stride // item for stride in plane.strides_bytes)]
    return torch.as_strided(typed, (units, *plane.shape), strides, plane.offset_bytes // item)


def layer_views(arena: Tensor, plan: StoragePlan, dtype: torch.dtype) -> dict[int, LayerViews]:
    """Views of every layer that stores K and V here, by its number."""
    views = {}
    for layer in sorted(view.layer for band in plan.bands for view in band.planes if view.plane == "k"):
        plane = plan.layer_view(layer, "k")
        k, v = typed_view(arena, plane, dtype), typed_view(arena, plan.layer_view(layer, "v"), dtype)
        views[layer] = LayerViews(k, v, k.flatten(1), v.flatten(1), k.shape[2], plane.band)
    return views


def pages_for(batch: Batch, band: int, window: int) -> BandPages:
    """The batch's pages in a band, for a layer with this window; raises ValueError where they do not reach so far."""
    pages = batch.bands[band]
    if pages is None:
        raise ValueError(f"band {band} of this batch stores no K and V")
    kept = pages.window_tokens
    if kept and not 0 < window <= kept:
        raise ValueError(f"a layer with window {window or 'unlimited'} in band {band}, which keeps {kept} tokens")
    return pages


class HostAttention:
    """Paged attention in host memory, by `kernels.host_attention`; one plan per band and window of a batch."""

    def __init__(self, views: Mapping[int, LayerViews]) -> None:
        self._views = views
        self._batch: Batch
        self._plans: dict[tuple[int, int], HostPlan] = {}
        self._scratch = Scratch()

    def begin(self, batch: Batch) -> None:
        """Take the batch; its plans are built by the first layer of each band."""
        self._batch = batch
        self._plans = {}

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Store `k` [T, kv, d] and `v` [T, kv, dv], attend with `q` [T, heads, d]; returns [T, heads, dv]."""
        view = self._views[layer]
        plan = self._plans.get((view.band, spec.window)) or self._plan(view, spec.window)
        view.k[plan.write_pages, plan.write_slots] = k
        view.v[plan.write_pages, plan.write_slots] = v
        places = (view.k_pages, view.v_pages, view.kv_heads, self._scratch)
        return attend(plan, q, *places, spec.scale, spec.softcap, spec.sinks)

    def _plan(self, view: LayerViews, window: int) -> HostPlan:
        batch = self._batch
        pages = pages_for(batch, view.band, window)
        places = (batch.starts, batch.counts, batch.offsets, pages.first, pages.tables)
        write = (pages.write_pages, batch.write_slots)
        plan = plan_attention(*places, write, batch.page_size, window, view.k.dtype)
        self._plans[view.band, window] = plan
        return plan
