"""Paged extend attention: chunks of new queries over the stored prefix and themselves, causal, windowed or not.

Owns one kernel: a program computes one tile of queries of one row for one head, over the keys that any of them sees.
Must never read a key behind the tile's last query, nor one in front of its first query's window. Formula: that of
`attention_decode` with keys 0..position(t) for query t. What is compiled depends on the layer alone, as there. Twin:
`reference.paged_attention`.
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_block import attend_keys, blocks, lanes, rules, strides


@triton.jit(
    do_not_specialize=["window", "q_token", "q_head", "out_token", "out_head", "table_row"],
    do_not_specialize_on_alignment=[
        "q_ptr", "tables_ptr", "first_ptr", "sinks_ptr", "starts_ptr", "counts_ptr", "offsets_ptr", "tile_rows_ptr",
        "tile_firsts_ptr",
    ],
)  # fmt: skip
def _extend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    first_ptr,
    sinks_ptr,
    starts_ptr,
    counts_ptr,
    offsets_ptr,
    tile_rows_ptr,
    tile_firsts_ptr,
    scale,
    window,
    softcap,
    q_token,
    q_head,
    out_token,
    out_head,
    table_row,
    GROUP: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_UNIT: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
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
    if SINKS:
        # One more logit, without a value: it is there before the first key.
        peak = tl.zeros([TILE], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32)
        total += 1.0
    end = start + tl.minimum(first + TILE, count)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(start + first + 1 - window, 0)
    table_at = tables_ptr + row.to(tl.int64) * table_row - tl.load(first_ptr + row)
    for block in range(begin, end, KEYS):
        peak, total, acc = attend_keys(
            q, position, block + tl.arange(0, KEYS), end, table_at, k_ptr + kv_head * K_HEAD, v_ptr + kv_head * V_HEAD,
            scale, window, softcap, peak, total, acc,
            K_UNIT, K_SLOT, V_UNIT, V_SLOT, PAGE, K_DIM, V_DIM, K_BLOCK, V_BLOCK, WINDOWED, CAPPED, UPCAST,
        )  # fmt: skip
    out_at = out_ptr + token[:, None] * out_token + head * out_head + v_lane[None, :]
    value = acc / tl.where(asked, total, 1.0)[:, None]
    tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=asked[:, None] & (v_lane[None, :] < V_DIM))


def tiles_of(counts: list[int], queries: int) -> tuple[list[int], list[int]]:
    """Row and first query of every tile of `queries` (`blocks`) of a batch whose rows have `counts` of them."""
    places = [(row, first) for row, count in enumerate(counts) for first in range(0, count, queries)]
    return [row for row, _ in places], [first for _, first in places]


def attention_prefill(
    q: Tensor,
    k_view: Tensor,
    v_view: Tensor,
    tables: Tensor,
    first: Tensor,
    starts: Tensor,
    counts: Tensor,
    offsets: Tensor,
    tiles: tuple[Tensor, Tensor],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    upcast: bool = False,
) -> Tensor:
    """Attention of a ragged batch over pages; returns [T, heads, d_v] of q's dtype.

    `q` [T, heads, d]; `k_view`, `v_view` [units, page_size, kv_heads, d] with the new rows stored; `tables` int32[n,
    pages], `first` int32[n], `window`, `softcap`, `sinks` [heads] and `upcast` as for decode; `starts`, `counts`,
    `offsets` int32[n]; `tiles`: two int32 columns from `tiles_of` with the queries that `blocks` names for the views.
    """
    keys, queries = blocks(k_view, v_view)
    tokens, heads, k_dim = q.shape
    page_size, kv_heads, v_dim = v_view.shape[1:]
    out = torch.empty(tokens, heads, v_dim, dtype=q.dtype, device=q.device)
    _extend[(tiles[0].numel(), heads)](
        q,
        k_view,
        v_view,
        out,
        tables,
        first,
        q if sinks is None else sinks,
        starts,
        counts,
        offsets,
        *tiles,
        scale,
        window,
        softcap,
        *q.stride()[:2],
        *out.stride()[:2],
        tables.stride(0),
        GROUP=heads // kv_heads,
        **strides("K", k_view),
        **strides("V", v_view),
        PAGE=page_size,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_BLOCK=lanes(k_dim),
        V_BLOCK=lanes(v_dim),
        TILE=queries,
        KEYS=keys,
        **rules(window, softcap, sinks, upcast),
    )
    return out
