"""Paged decode attention, split over the sequence: one query per row, long contexts spread over many programs.

Owns two kernels: `_partial` computes one split of one row for all heads of one K/V head, `_combine` joins the splits.
Must never read a key behind a row's end, nor one in front of its window. Formula, for head h of row r with c keys, over
the visible ones, j from max(c - window, 0) (without a window: 0) to c - 1:

    s_j = cap(scale * <q[r, h], k[j, h // G]>),   cap(s) = softcap * tanh(s / softcap), or s
    out[r, h] = sum_j exp(s_j) v[j, h // G] / (sum_j exp(s_j) + exp(sink[h])),   the sink's term only where there is one

A split keeps (m, sum, unnormalized out); splits join by rescaling to the largest m. What changes from batch to batch,
strides of one row's q and alignment of slices too, is never part of what is compiled: a layer's kernels serve every
batch once they served one. Twin: `reference.paged_attention`.
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_block import attend_keys, blocks, lanes, rules, strides

SPLIT_TOKENS = 512  # keys of one program
SPLITS = 16  # splits joined at a time


@triton.jit(
    do_not_specialize=["window", "q_row", "q_head", "table_row", "splits"],
    do_not_specialize_on_alignment=["q_ptr", "tables_ptr", "first_ptr", "lengths_ptr"],
)
def _partial(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    first_ptr,
    lengths_ptr,
    part_ptr,
    peak_ptr,
    sum_ptr,
    scale,
    window,
    softcap,
    q_row,
    q_head,
    table_row,
    splits,
    HEADS: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_UNIT: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One split: q [heads, K_DIM] of a row, KEYS keys at a time; part [V_DIM], peak, sum per head in float32."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    group = tl.arange(0, GROUP_BLOCK)
    head = kv_head * GROUP + group
    k_lane = tl.arange(0, K_BLOCK)
    v_lane = tl.arange(0, V_BLOCK)
    q_at = q_ptr + row.to(tl.int64) * q_row + head[:, None] * q_head + k_lane[None, :]
    q = tl.load(q_at, mask=(group[:, None] < GROUP) & (k_lane[None, :] < K_DIM), other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    peak = tl.full([GROUP_BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, V_BLOCK], tl.float32)
    begin = split * SPLIT
    if WINDOWED:
        begin += tl.maximum(length - window, 0)
    end = tl.minimum(begin + SPLIT, length)
    table_at = tables_ptr + row.to(tl.int64) * table_row - tl.load(first_ptr + row)
    position = tl.full([GROUP_BLOCK], 0, tl.int32) + (length - 1)
    for first in range(begin, end, KEYS):
        peak, total, acc = attend_keys(
            q, position, first + tl.arange(0, KEYS), end, table_at, k_ptr + kv_head * K_HEAD, v_ptr + kv_head * V_HEAD,
            scale, window, softcap, peak, total, acc,
            K_UNIT, K_SLOT, V_UNIT, V_SLOT, PAGE, K_DIM, V_DIM, K_BLOCK, V_BLOCK, WINDOWED, CAPPED, UPCAST,
        )  # fmt: skip
    place = (row.to(tl.int64) * HEADS + head) * splits + split
    used = group < GROUP
    tl.store(peak_ptr + place, peak, mask=used)
    tl.store(sum_ptr + place, total, mask=used)
    part_at = part_ptr + place[:, None] * V_DIM + v_lane[None, :]
    tl.store(part_at, acc, mask=used[:, None] & (v_lane[None, :] < V_DIM))


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["sinks_ptr"])
def _combine(
    part_ptr,
    peak_ptr,
    sum_ptr,
    sinks_ptr,
    out_ptr,
    splits,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the splits of one row and head, and its sink, SPLITS at a time: rescale to the largest peak, add, divide."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    lane = tl.arange(0, V_BLOCK)
    highest = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([V_BLOCK], tl.float32)
    if SINKS:
        highest = tl.load(sinks_ptr + head).to(tl.float32)
        total += 1.0
    place = row.to(tl.int64) * HEADS + head
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        alive = split < splits
        at = place * splits + split
        peak = tl.load(peak_ptr + at, mask=alive, other=-float("inf"))
        # Split 0 holds a key of every row, so from the first turn on this is a number.
        higher = tl.maximum(highest, tl.max(peak, 0))
        share = tl.exp(peak - higher)
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(tl.load(sum_ptr + at, mask=alive, other=0.0) * share, 0)
        parts_at = part_ptr + at[:, None] * V_DIM + lane[None, :]
        parts = tl.load(parts_at, mask=alive[:, None] & (lane[None, :] < V_DIM), other=0.0)
        acc = acc * shrink + tl.sum(parts * share[:, None], 0)
        highest = higher
    out_at = out_ptr + place * V_DIM + lane
    tl.store(out_at, (acc / total).to(out_ptr.dtype.element_ty), mask=lane < V_DIM)


def attention_decode(
    q: Tensor,
    k_view: Tensor,
    v_view: Tensor,
    tables: Tensor,
    first: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    upcast: bool = False,
    split_tokens: int = SPLIT_TOKENS,
) -> Tensor:
    """Attention of single queries over pages; returns [n, heads, d_v] of q's dtype.

    `q` [n, heads, d]; `k_view`, `v_view` [units, page_size, kv_heads, d]; `tables` int32[n, pages] physical pages of
    positions from `first` int32[n] pages on; `lengths` int32[n] keys per row, at least 1; `longest` their maximum,
    known on the host; `window` 0 for none; `sinks` [heads]; `upcast` computes the products in float32 (the
    interpreter's bfloat16 arithmetic is wrong).
    """
    rows, heads, k_dim = q.shape
    page_size, kv_heads, v_dim = v_view.shape[1:]
    group = heads // kv_heads
    seen = min(longest, window) if window else longest
    splits = triton.cdiv(seen, split_tokens)
    part = torch.empty(rows, heads, splits, v_dim, dtype=torch.float32, device=q.device)
    peak = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    total = torch.empty_like(peak)
    out = torch.empty(rows, heads, v_dim, dtype=q.dtype, device=q.device)
    chosen = rules(window, softcap, sinks, upcast)
    with_sinks = chosen.pop("SINKS")
    _partial[(rows, kv_heads, splits)](
        q,
        k_view,
        v_view,
        tables,
        first,
        lengths,
        part,
        peak,
        total,
        scale,
        window,
        softcap,
        *q.stride()[:2],
        tables.stride(0),
        splits,
        HEADS=heads,
        **strides("K", k_view),
        **strides("V", v_view),
        PAGE=page_size,
        SPLIT=split_tokens,
        GROUP=group,
        GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_BLOCK=lanes(k_dim),
        V_BLOCK=lanes(v_dim),
        KEYS=blocks(k_view, v_view)[0],
        **chosen,
    )
    _combine[(rows, heads)](
        part,
        peak,
        total,
        q if sinks is None else sinks,
        out,
        splits,
        HEADS=heads,
        V_DIM=v_dim,
        V_BLOCK=triton.next_power_of_2(v_dim),
        SPLITS=SPLITS,
        SINKS=with_sinks,
    )
    return out
