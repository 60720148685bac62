"""Paged extend attention: chunks of new queries over the stored prefix and themselves, causal.

Owns one kernel: a program computes one tile of queries of one row for one head, over all keys up to the tile's last
query. Must never read a key behind that query. Formula: that of `attention_decode` with keys 0..position(t) for query
t. Twin: `reference.paged_attention`.
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 32  # queries of one tile
KEYS_BLOCK = 32


@triton.jit
def _extend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    starts_ptr,
    counts_ptr,
    offsets_ptr,
    tile_rows_ptr,
    tile_firsts_ptr,
    scale,
    q_token,
    q_head,
    k_unit,
    k_slot,
    k_head,
    v_unit,
    v_slot,
    v_head,
    out_token,
    out_head,
    table_row,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Queries [TILE, K_DIM] of one head against keys KEYS at a time; the running softmax of one pass."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // GROUP
    row = tl.load(tile_rows_ptr + tile)
    first = tl.load(tile_firsts_ptr + tile)
    start = tl.load(starts_ptr + row)
    count = tl.load(counts_ptr + row)
    offset = tl.load(offsets_ptr + row)
    query = first + tl.arange(0, TILE)
    asked = query < count
    position = start + query
    k_lane = tl.arange(0, K_BLOCK)
    v_lane = tl.arange(0, V_BLOCK)
    token = (offset + query).to(tl.int64)
    q_at = q_ptr + token[:, None] * q_token + head * q_head + k_lane[None, :]
    q = tl.load(q_at, mask=asked[:, None] & (k_lane[None, :] < K_DIM), other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    peak = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, V_BLOCK], tl.float32)
    end = start + tl.minimum(first + TILE, count)
    for begin in range(0, end, KEYS):
        key = begin + tl.arange(0, KEYS)
        alive = key < end
        page = tl.load(tables_ptr + row.to(tl.int64) * table_row + key // PAGE, mask=alive, other=0).to(tl.int64)
        slot = key % PAGE
        k_at = k_ptr + (page * k_unit + slot * k_slot)[:, None] + kv_head * k_head + k_lane[None, :]
        k = tl.load(k_at, mask=alive[:, None] & (k_lane[None, :] < K_DIM), other=0.0)
        v_at = v_ptr + (page * v_unit + slot * v_slot)[:, None] + kv_head * v_head + v_lane[None, :]
        v = tl.load(v_at, mask=alive[:, None] & (v_lane[None, :] < V_DIM), other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        # Key 0 is before every query, so no row of the first block is all -inf and `peak` is finite from there on.
        scores = tl.where(alive[None, :] & (key[None, :] <= position[:, None]), scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = higher
    out_at = out_ptr + token[:, None] * out_token + head * out_head + v_lane[None, :]
    value = acc / total[:, None]
    tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=asked[:, None] & (v_lane[None, :] < V_DIM))


def tiles_of(counts: list[int]) -> tuple[list[int], list[int]]:
    """Row and first query of every tile of a batch whose rows have `counts` queries."""
    places = [(row, first) for row, count in enumerate(counts) for first in range(0, count, QUERIES)]
    return [row for row, _ in places], [first for _, first in places]


def attention_prefill(
    q: Tensor,
    k_view: Tensor,
    v_view: Tensor,
    tables: Tensor,
    starts: Tensor,
    counts: Tensor,
    offsets: Tensor,
    tiles: tuple[Tensor, Tensor],
    scale: float,
    upcast: bool = False,
) -> Tensor:
    """Attention of a ragged batch over pages; returns [T, heads, d_v] of q's dtype.

    `q` [T, heads, d]; `k_view`, `v_view` [units, page_size, kv_heads, d] with the new rows stored; `tables` int32[n,
    pages]; `starts`, `counts`, `offsets` int32[n]; `tiles`: two int32 columns from `tiles_of`; `upcast` as for decode.
    """
    tokens, heads, k_dim = q.shape
    page_size, kv_heads, v_dim = v_view.shape[1:]
    out = torch.empty(tokens, heads, v_dim, dtype=q.dtype, device=q.device)
    _extend[(tiles[0].numel(), heads)](
        q,
        k_view,
        v_view,
        out,
        tables,
        starts,
        counts,
        offsets,
        *tiles,
        scale,
        *q.stride()[:2],
        *k_view.stride()[:3],
        *v_view.stride()[:3],
        *out.stride()[:2],
        tables.stride(0),
        GROUP=heads // kv_heads,
        PAGE=page_size,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_BLOCK=max(16, triton.next_power_of_2(k_dim)),
        V_BLOCK=max(16, triton.next_power_of_2(v_dim)),
        TILE=QUERIES,
        KEYS=KEYS_BLOCK,
        UPCAST=upcast,
    )
    return out
