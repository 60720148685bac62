"""Ragged batches over a paged arena whose other bytes are poison, and dense attention in float64 to compare with.

Every unit that no row lists, and every byte between the planes, is NaN or noise; only a row's own pages hold its keys,
with zeros behind its end, as the allocator leaves them. What a kernel reads beyond that shows in its result.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from allocator.columns import Int32s, Int64s


class Shape(NamedTuple):
    """Heads, sizes and type of a layer, and its page size."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    page: int


class Scene(NamedTuple):
    """A batch's columns as `daemon.rank.batch` makes them, its views and queries, and each row's dense keys, values."""

    starts: Int32s
    counts: Int32s
    offsets: Int64s
    first: Int32s
    tables: Int32s
    k_view: Tensor
    v_view: Tensor
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def make_scene(rows: list[tuple[int, int]], shape: Shape, window: int, seed: int = 0) -> Scene:
    """A batch of (start, count) rows in a band with this window (0: full); pages lie scattered over the arena."""
    chance = torch.Generator().manual_seed(seed)
    starts, counts = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    page = shape.page
    first = (np.maximum(starts + 1 - window, 0) // page if window else 0 * starts).astype(np.int32)
    pages = -(-(starts + counts) // page) - first
    units = int(pages.sum()) * 2 + 2
    order = (torch.randperm(units - 1, generator=chance) + 1).tolist()
    tables = np.zeros((len(rows), int(pages.max())), dtype=np.int32)
    k_view, v_view = planes(units, shape, chance)
    keys, values = [], []
    for row, (start, count) in enumerate(rows):
        own = [order.pop() for _ in range(int(pages[row]))]
        tables[row, : len(own)] = own
        dense = [_random((start + count, shape.kv_heads, dim), shape, chance) for dim in (shape.k_dim, shape.v_dim)]
        for view, data in zip((k_view, v_view), dense, strict=True):
            stored = data[int(first[row]) * page :]
            view[own] = 0
            flat = torch.zeros(len(own) * page, *data.shape[1:], dtype=shape.dtype)
            flat[: stored.shape[0]] = stored
            view[own] = flat.unflatten(0, (len(own), page))
        keys.append(dense[0])
        values.append(dense[1])
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    q = _random((int(offsets[-1]), shape.heads, shape.k_dim), shape, chance)
    return Scene(starts, counts, offsets, first, tables, k_view, v_view, q, keys, values)


def planes(units: int, shape: Shape, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """K and V views over one uint8 arena with a gap between units, as a rank lays them out; the sink is zero, all else
    NaN, and what belongs to no plane is noise."""
    item = shape.dtype.itemsize
    sizes = [shape.page * shape.kv_heads * dim * item for dim in (shape.k_dim, shape.v_dim)]
    unit = -(-sum(sizes) // 256) * 256 + 256
    arena = torch.randint(0, 255, (units * unit,), dtype=torch.uint8, generator=chance)
    views = []
    for offset, dim in ((0, shape.k_dim), (sizes[0], shape.v_dim)):
        strides = (unit // item, shape.kv_heads * dim, dim, 1)
        size = (units, shape.page, shape.kv_heads, dim)
        view = torch.as_strided(arena.view(shape.dtype), size, strides, offset // item)
        view.fill_(math.nan)
        view[0] = 0
        views.append(view)
    return views[0], views[1]


def dense_attention(scene: Scene, scale: float, window: int, softcap: float, sinks: Tensor | None) -> Tensor:
    """float64 [T, heads, d_v] of the definition, every row alone over its dense keys; no page is looked at."""
    parts = []
    for row, (start, count) in enumerate(zip(scene.starts.tolist(), scene.counts.tolist(), strict=True)):
        q = scene.q[int(scene.offsets[row]) : int(scene.offsets[row + 1])].double()
        size = q.shape[1] // scene.keys[row].shape[1]
        k, v = (data[row].double().repeat_interleave(size, 1) for data in (scene.keys, scene.values))
        scores = torch.einsum("thd,jhd->htj", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(start, start + count)[:, None]
        key = torch.arange(start + count)
        seen = (key <= position) & ((key > position - window) if window else True)
        weights = torch.exp(scores) * seen
        total = weights.sum(-1)
        if sinks is not None:
            total = total + torch.exp(sinks.double())[:, None]
        parts.append(torch.einsum("htj,jhd->thd", weights / total[..., None], v))
    return torch.cat(parts)


def _random(size: tuple[int, ...], shape: Shape, chance: torch.Generator) -> Tensor:
    return torch.randn(size, generator=chance).to(shape.dtype)
