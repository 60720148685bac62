"""Paged decode attention, split over the sequence: one query per row, long contexts spread over many programs.

Owns two kernels: `_partial` computes one split of one row for all heads of one K/V head, `_combine` joins the splits.
Must never read a key behind a row's end. Formula, for head h of row r with keys 0..c-1 in its pages:

    s_j = scale * <q[r, h], k[j, h // G]>,   out[r, h] = sum_j exp(s_j - m) v[j, h // G] / sum_j exp(s_j - m)

A split keeps (m, sum, unnormalized out); splits join by rescaling to the largest m. Twin: `reference.paged_attention`.
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT_TOKENS = 512  # keys of one program
KEYS_BLOCK = 32


@triton.jit
def _partial(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lengths_ptr,
    part_ptr,
    peak_ptr,
    sum_ptr,
    scale,
    q_row,
    q_head,
    k_unit,
    k_slot,
    k_head,
    v_unit,
    v_slot,
    v_head,
    table_row,
    splits,
    heads,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
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
    end = tl.minimum(begin + SPLIT, length)
    for first in range(begin, end, KEYS):
        position = first + tl.arange(0, KEYS)
        alive = position < end
        page = tl.load(tables_ptr + row.to(tl.int64) * table_row + position // PAGE, mask=alive, other=0).to(tl.int64)
        slot = position % PAGE
        k_at = k_ptr + (page * k_unit + slot * k_slot)[:, None] + kv_head * k_head + k_lane[None, :]
        k = tl.load(k_at, mask=alive[:, None] & (k_lane[None, :] < K_DIM), other=0.0)
        v_at = v_ptr + (page * v_unit + slot * v_slot)[:, None] + kv_head * v_head + v_lane[None, :]
        v = tl.load(v_at, mask=alive[:, None] & (v_lane[None, :] < V_DIM), other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(alive[None, :], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        # The products take the pages' own type: on a GPU that is what its matrix units multiply.
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = higher
    place = (row.to(tl.int64) * heads + head) * splits + split
    used = group < GROUP
    tl.store(peak_ptr + place, peak, mask=used)
    tl.store(sum_ptr + place, total, mask=used)
    part_at = part_ptr + place[:, None] * V_DIM + v_lane[None, :]
    tl.store(part_at, acc, mask=used[:, None] & (v_lane[None, :] < V_DIM))


@triton.jit
def _combine(
    part_ptr,
    peak_ptr,
    sum_ptr,
    out_ptr,
    out_row,
    out_head,
    splits,
    heads,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
):
    """Join the splits of one row and head: rescale to the largest peak, add, divide."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    lane = tl.arange(0, V_BLOCK)
    split = tl.arange(0, SPLITS_BLOCK)
    place = (row.to(tl.int64) * heads + head) * splits + split
    alive = split < splits
    peak = tl.load(peak_ptr + place, mask=alive, other=-float("inf"))
    share = tl.exp(peak - tl.max(peak, 0))
    total = tl.sum(tl.load(sum_ptr + place, mask=alive, other=0.0) * share, 0)
    parts_at = part_ptr + place[:, None] * V_DIM + lane[None, :]
    parts = tl.load(parts_at, mask=alive[:, None] & (lane[None, :] < V_DIM), other=0.0)
    value = tl.sum(parts * share[:, None], 0) / total
    out_at = out_ptr + row.to(tl.int64) * out_row + head * out_head + lane
    tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=lane < V_DIM)


def attention_decode(
    q: Tensor,
    k_view: Tensor,
    v_view: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    longest: int,
    upcast: bool = False,
    split_tokens: int = SPLIT_TOKENS,
) -> Tensor:
    """Attention of single queries over pages; returns [n, heads, d_v] of q's dtype.

    `q` [n, heads, d]; `k_view`, `v_view` [units, page_size, kv_heads, d]; `tables` int32[n, pages] physical pages;
    `lengths` int32[n] keys per row, at least 1; `longest` their maximum, known on the host; `upcast` computes the
    products in float32 (the interpreter's bfloat16 arithmetic is wrong).
    """
    rows, heads, k_dim = q.shape
    page_size, kv_heads, v_dim = v_view.shape[1:]
    group = heads // kv_heads
    splits = triton.cdiv(longest, split_tokens)
    part = torch.empty(rows, heads, splits, v_dim, dtype=torch.float32, device=q.device)
    peak = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    total = torch.empty_like(peak)
    out = torch.empty(rows, heads, v_dim, dtype=q.dtype, device=q.device)
    _partial[(rows, kv_heads, splits)](
        q,
        k_view,
        v_view,
        tables,
        lengths,
        part,
        peak,
        total,
        scale,
        *q.stride()[:2],
        *k_view.stride()[:3],
        *v_view.stride()[:3],
        tables.stride(0),
        splits,
        heads,
        PAGE=page_size,
        SPLIT=split_tokens,
        GROUP=group,
        GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_BLOCK=max(16, triton.next_power_of_2(k_dim)),
        V_BLOCK=max(16, triton.next_power_of_2(v_dim)),
        KEYS=KEYS_BLOCK,
        UPCAST=upcast,
    )
    _combine[(rows, heads)](
        part,
        peak,
        total,
        out,
        *out.stride()[:2],
        splits,
        heads,
        V_DIM=v_dim,
        V_BLOCK=triton.next_power_of_2(v_dim),
        SPLITS_BLOCK=triton.next_power_of_2(splits),
    )
    return out
