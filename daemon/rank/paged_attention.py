"""Attention of one step for every layer: the arena's typed views, row stores, and the plan of the batch.

Owns the views of each layer's K and V planes. Must never see a virtual id. Invariants: a layer's new rows are stored
before that layer attends; a view is float data only where this layer's own plane lies.

    plane of layer l in unit u:  arena byte u * unit_bytes + offset_l, shape [page_size, kv_heads, dim]
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from allocator.plan import PlaneView, StoragePlan
from daemon.rank.batch import Batch
from kernels.host_attention import HostPlan, attend, plan_attention


class PagedAttention(Protocol):
    """What a model calls: `begin` once per batch, `run` once per layer."""

    def begin(self, batch: Batch) -> None:
        """Build what every layer of this batch shares."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store `k` [T, kv, d] and `v` [T, kv, dv], attend with `q` [T, heads, d]; returns [T, heads, dv]."""


class LayerViews(NamedTuple):
    """One layer's planes: `k`, `v` [units, page_size, kv_heads, dim], and the same as [units, page elements]."""

    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    kv_heads: int


def typed_view(arena: Tensor, plane: PlaneView, dtype: torch.dtype) -> Tensor:
    """Strided view [units, *shape] of a plane over the uint8 arena; unit u starts at byte u * unit_bytes + offset."""
    item = dtype.itemsize
    places = [plane.unit_bytes, plane.offset_bytes, *plane.strides_bytes]
    assert all(place % item == 0 for place in places), f"plane {plane} is not aligned to {dtype}"
    units = arena.numel() // plane.unit_bytes
    typed = arena[: units * plane.unit_bytes].view(dtype)
    strides = [plane.unit_bytes // item, *(stride // item for stride in plane.strides_bytes)]
    return torch.as_strided(typed, (units, *plane.shape), strides, plane.offset_bytes // item)


def layer_views(arena: Tensor, plan: StoragePlan, layers: int, dtype: torch.dtype) -> list[LayerViews]:
    """Views of every layer's K and V."""
    views = []
    for layer in range(layers):
        k = typed_view(arena, plan.layer_view(layer, "k"), dtype)
        v = typed_view(arena, plan.layer_view(layer, "v"), dtype)
        views.append(LayerViews(k, v, k.flatten(1), v.flatten(1), k.shape[2]))
    return views


class HostAttention:
    """Paged attention in host memory, by `kernels.host_attention`."""

    def __init__(self, views: list[LayerViews]) -> None:
        self._views = views
        self._plan: HostPlan

    def begin(self, batch: Batch) -> None:
        """Build what every layer of this batch shares."""
        write = (batch.write_pages, batch.write_slots)
        dtype = self._views[0].k.dtype
        self._plan = plan_attention(
            batch.starts, batch.counts, batch.offsets, batch.tables, write, batch.page_size, dtype
        )

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store `k` [T, kv, d] and `v` [T, kv, dv], attend with `q` [T, heads, d]; returns [T, heads, dv]."""
        view, plan = self._views[layer], self._plan
        view.k[plan.write_pages, plan.write_slots] = k
        view.v[plan.write_pages, plan.write_slots] = v
        return attend(plan, q, view.k_pages, view.v_pages, scale, view.kv_heads)
