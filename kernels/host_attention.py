"""Paged attention on a CPU: vectorized torch over gathered pages, no Python per token.

Owns the arithmetic of full attention over paged K/V for host memory, for decode rows and for prefill chunks in one
ragged batch. Must never write the pages. The plan (index tensors, masks) depends on the batch only and is built once
per step; `attend` is called by every layer. Formula, per row r and head h, with keys 0..c-1 of the row:

    out[t, h] = sum_j softmax_j(scale * <q[t, h], k[j, h // group]>) v[j, h // group],   j <= position(t)

Pages are gathered, because torch's fused kernel takes contiguous keys. It gets the heads of a group as query rows, so
each key is read once per group. In bfloat16 with single queries that kernel makes small products, one per K/V head; one
dense product per row, with the queries spread over a block diagonal, replaces them where K/V heads are few and the work
is large enough. `bandmaster bench model --dtype ...` measures whole steps; set SPREAD_COST_MIN high to compare.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

GROUP_TOKENS_MAX = 1 << 16  # most padded key positions gathered at once: bounds the memory of a step
PADDING_MAX = 1.25  # split decode rows by length when padding to the longest costs more than this
SPREAD_KV_HEADS_MAX = 4  # block-diagonal products waste a factor of the number of K/V heads
SPREAD_COST_MIN = 900  # padded keys plus ROW_COST per row, below which the fused kernel is used
ROW_COST = 64
QUERY_TILE = 128  # prefill queries per call: keys after a tile's last query are not read


class DecodeGroup(NamedTuple):
    """Rows with one query each: `queries` int64[b] or a slice of T; `pages` int64[b * n]; the longest `length`."""

    queries: Tensor | slice
    pages: Tensor
    length: int
    bias: Tensor | None  # [b, 1, n * page_size] float32: 0, or -inf behind a row's end; None where no key is masked


class PrefillChunk(NamedTuple):
    """One row with several queries: tiles of (first query, last query + 1, keys read, mask [queries, keys])."""

    first: int
    pages: Tensor
    length: int
    tiles: list[tuple[int, int, int, Tensor]]


class HostPlan(NamedTuple):
    """What every layer of one step needs: write positions int64[T], decode groups and prefill chunks."""

    write_pages: Tensor
    write_slots: Tensor
    groups: list[DecodeGroup]
    chunks: list[PrefillChunk]


def plan_attention(
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    offsets: NDArray[np.int64],
    tables: NDArray[np.int32],
    write: tuple[NDArray[np.int64], NDArray[np.int64]],
    page_size: int,
    dtype: torch.dtype,
) -> HostPlan:
    """Plan of one ragged batch; `tables` int32[n, pages] are physical pages, the columns as in `daemon.rank.batch`."""
    contexts = starts.astype(np.int64) + counts
    single = np.flatnonzero(counts == 1)
    groups = [
        _decode_group(rows, contexts, offsets, tables, page_size, whole=rows.size == single.size)
        for rows in _split_by_length(single, contexts)
    ]
    chunks = [
        _prefill_chunk(int(starts[r]), int(counts[r]), int(offsets[r]), tables[r], page_size, dtype)
        for r in np.flatnonzero(counts > 1)
    ]
    return HostPlan(torch.from_numpy(write[0]), torch.from_numpy(write[1]), groups, chunks)


def _split_by_length(rows: NDArray[np.int64], contexts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Rows in groups whose padding is small and whose padded size is bounded."""
    if rows.size == 0:
        return []
    lengths = contexts[rows]
    padded = int(lengths.max()) * rows.size
    if padded <= PADDING_MAX * int(lengths.sum()) and padded <= GROUP_TOKENS_MAX:
        return [rows]
    order = rows[np.argsort(-lengths, kind="stable")]
    groups: list[NDArray[np.int64]] = []
    begin = 0
    for end in range(1, order.size + 1):
        longest = int(contexts[order[begin]])
        full = longest * (end - begin + 1) > GROUP_TOKENS_MAX
        if end == order.size or full or int(contexts[order[end]]) * PADDING_MAX < longest:
            groups.append(order[begin:end])
            begin = end
    return groups


def _decode_group(
    rows: NDArray[np.int64],
    contexts: NDArray[np.int64],
    offsets: NDArray[np.int64],
    tables: NDArray[np.int32],
    page_size: int,
    whole: bool,
) -> DecodeGroup:
    lengths = contexts[rows]
    length = int(lengths.max())
    pages = (length + page_size - 1) // page_size
    flat = torch.from_numpy(tables[rows, :pages].astype(np.int64).reshape(-1))
    at = offsets[rows]
    in_order = whole and int(at[-1]) - int(at[0]) == rows.size - 1 and bool((np.diff(at) == 1).all())
    queries = slice(int(at[0]), int(at[0]) + rows.size) if in_order else torch.from_numpy(at)
    bias = None
    if rows.size > 1 and int(lengths.min()) != pages * page_size:
        bias = torch.zeros(rows.size, 1, pages * page_size)
        bias.masked_fill_(torch.arange(bias.shape[2]) >= torch.from_numpy(lengths)[:, None, None], -math.inf)
    return DecodeGroup(queries, flat, length, bias)


def _prefill_chunk(
    start: int, count: int, first: int, table: NDArray[np.int32], page_size: int, dtype: torch.dtype
) -> PrefillChunk:
    length = start + count
    pages = torch.from_numpy(table[: (length + page_size - 1) // page_size].astype(np.int64))
    tiles = []
    for begin in range(0, count, QUERY_TILE):
        end = min(begin + QUERY_TILE, count)
        keys = start + end
        ahead = torch.arange(keys) > torch.arange(start + begin, start + end)[:, None]
        tiles.append((begin, end, keys, torch.zeros(end - begin, keys, dtype=dtype).masked_fill_(ahead, -math.inf)))
    return PrefillChunk(first, pages, length, tiles)


def attend(plan: HostPlan, q: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, kv_heads: int) -> Tensor:
    """Attention of a whole ragged batch: `q` [T, heads, d], pages [units, page elements]; [T, heads, d_v]."""
    value_dim = v_pages.shape[1] * q.shape[2] // k_pages.shape[1]
    out = q.new_empty(q.shape[0], q.shape[1], value_dim)
    for group in plan.groups:
        out[group.queries] = _decode(group, q[group.queries], k_pages, v_pages, scale, kv_heads)
    for chunk in plan.chunks:
        _prefill(chunk, q, k_pages, v_pages, scale, kv_heads, out)
    return out


def _decode(group: DecodeGroup, q: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, kv_heads: int) -> Tensor:
    """Single queries [b, heads, d] over their gathered keys; [b, heads, d_v]."""
    rows, heads, dim = q.shape
    k = k_pages.index_select(0, group.pages).view(rows, -1, kv_heads, dim)
    v = v_pages.index_select(0, group.pages).view(rows, k.shape[1], kv_heads, -1)
    if group.bias is None:  # one row, or rows that end with their last page: no key beyond the end is looked at
        k, v = k[:, : group.length], v[:, : group.length]
    grouped = q.view(rows, kv_heads, heads // kv_heads, dim)
    if (
        q.dtype == torch.bfloat16
        and kv_heads <= SPREAD_KV_HEADS_MAX
        and rows * (group.length + ROW_COST) >= SPREAD_COST_MIN
    ):
        return _spread(grouped, k, v, scale, group.bias)
    bias = None if group.bias is None else group.bias.to(q.dtype).unsqueeze(1)
    attended = F.scaled_dot_product_attention(
        grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, scale=scale
    )
    return attended.reshape(rows, heads, -1)


def _spread(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Single queries as one dense product per row: q [b, kv, g, d] on the diagonal blocks of [b, kv * g, kv * d]."""
    rows, kv_heads, size, dim = q.shape
    wide = q.new_zeros(rows, kv_heads, size, kv_heads, dim)
    for head in range(kv_heads):
        wide[:, head, :, head] = q[:, head]
    scores = (
        torch.bmm(wide.view(rows, kv_heads * size, kv_heads * dim), k.flatten(2).transpose(1, 2)).float().mul_(scale)
    )
    if bias is not None:
        scores += bias
    mixed = torch.bmm(torch.softmax(scores, -1).to(q.dtype), v.flatten(2)).view(rows, kv_heads, size, kv_heads, -1)
    out = q.new_empty(rows, kv_heads, size, v.shape[-1])
    for head in range(kv_heads):
        out[:, head] = mixed[:, head, :, head]
    return out.flatten(1, 2)


def _prefill(
    chunk: PrefillChunk, q: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, kv_heads: int, out: Tensor
) -> None:
    dim = q.shape[2]
    k = k_pages.index_select(0, chunk.pages).view(-1, kv_heads, dim)
    v = v_pages.index_select(0, chunk.pages).view(k.shape[0], kv_heads, -1)
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    for begin, end, keys, mask in chunk.tiles:
        queries = q[chunk.first + begin : chunk.first + end].transpose(0, 1)[None]
        attended = F.scaled_dot_product_attention(
            queries, k[:, :, :keys], v[:, :, :keys], attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[chunk.first + begin : chunk.first + end] = attended[0].transpose(0, 1)
