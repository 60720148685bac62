"""Paged attention on a CPU: vectorized torch over gathered pages, no Python per token.

Owns the arithmetic of attention over paged K/V for host memory, for decode rows and for prefill chunks in one ragged
batch. Must never write the pages, nor gather one that no query sees. The plan (index tensors, masks) depends on the
batch, the band and the window only and is built once per step; `attend` is called by every layer. Formula, for the
query at position p of a row and head h, over keys j with p - window < j <= p (without a window: all j <= p):

    s_j = cap(scale * <q[h], k[j, h // group]>),   cap(s) = softcap * tanh(s / softcap), or s
    out[h] = sum_j exp(s_j) v[j, h // group] / (sum_j exp(s_j) + exp(sink_h)),   the sink's term only where there is one

Pages are gathered, because torch's fused kernel takes contiguous keys. It gets the heads of a group as query rows, so
each key is read once per group. In bfloat16 with single queries that kernel makes small products, one per K/V head; one
dense product per row, with the queries spread over a block diagonal, replaces them where K/V heads are few and the work
is large enough. For prompts in bfloat16 plain products are twice as fast as it. Both of these round scores to bfloat16
before a softmax in float32, as the reference's own unfused attention does.
`bandmaster bench model --dtype ...` measures whole steps; set SPREAD_COST_MIN high to compare.
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
SCORES_MAX = 1 << 18  # scores held at once where the fused kernel does not make them: they stay in the cache
SCRATCH_MIN = 1 << 18  # elements: what is smaller is taken from the allocator, which keeps it
GROWTH = 4  # scratch memory grows by this part of what it needs, so that it does not grow at every step
QUERY_TILE = 64  # prefill queries per call: keys after a tile's last query are not read


class DecodeGroup(NamedTuple):
    """Rows with one query each: `queries` int64[b] or a slice of T; `pages` int64[b * n] that they see.

    Without a bias every row sees exactly the keys [begin, end) of its pages; with one, it masks what a row does not.
    """

    queries: Tensor | slice
    pages: Tensor
    begin: int
    end: int
    bias: Tensor | None  # [b, 1, n * page_size] float32: 0, or -inf for a key that is not seen


class PrefillTile(NamedTuple):
    """Queries [begin, end) of a chunk, gathered keys [low, high), and their mask [queries, keys]: 0 or -inf."""

    begin: int
    end: int
    low: int
    high: int
    mask: Tensor


class PrefillChunk(NamedTuple):
    """One row with several queries: its first one in the batch, the pages it sees, and tiles."""

    first: int
    pages: Tensor
    tiles: list[PrefillTile]


class Scratch:
    """Memory that pages are gathered into, kept from layer to layer and from step to step.

    Blocks of this size are given back to the system and taken again, page by page, when each layer allocates its own;
    `bandmaster bench model --concurrency 32 --dtype float32` shows it.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, torch.dtype], Tensor] = {}

    def gather(self, plane: str, pages: Tensor, chosen: Tensor) -> Tensor:
        """[n, elements] of `pages` [units, elements] at `chosen` int64[n]; void at the next call for this plane."""
        count = chosen.numel() * pages.shape[1]
        if count < SCRATCH_MIN:
            return pages.index_select(0, chosen)
        block = self._blocks.get((plane, pages.dtype))
        if block is None or block.numel() < count:
            block = torch.empty(count + count // GROWTH, dtype=pages.dtype)
            self._blocks[plane, pages.dtype] = block
        return torch.index_select(pages, 0, chosen, out=block[:count].view(chosen.numel(), pages.shape[1]))


class HostPlan(NamedTuple):
    """What every layer of one band needs in one step: write positions int64[T], decode groups and prefill chunks."""

    write_pages: Tensor
    write_slots: Tensor
    groups: list[DecodeGroup]
    chunks: list[PrefillChunk]


def plan_attention(
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    offsets: NDArray[np.int64],
    first: NDArray[np.int32],
    tables: NDArray[np.int32],
    write: tuple[NDArray[np.int64], NDArray[np.int64]],
    page_size: int,
    window: int,
    dtype: torch.dtype,
) -> HostPlan:
    """Plan of one ragged batch in one band; the columns as in `daemon.rank.batch`, `window` 0 where there is none.

    `tables` int32[n, pages]: entry j of row r is the physical page of positions from (first[r] + j) * page_size on.
    """
    starts, base = starts.astype(np.int64), first.astype(np.int64)
    visible = np.maximum(starts + 1 - window, 0) if window else np.zeros_like(starts)  # the first key of query 0
    skipped = np.maximum(visible // page_size - base, 0)  # pages in the table that no query sees
    base = (base + skipped) * page_size
    lead, lengths = visible - base, starts + counts - base  # in keys from `base` on
    single = np.flatnonzero(counts == 1)
    groups = [
        _decode_group(rows, lead, lengths, offsets, tables, skipped, page_size, whole=rows.size == single.size)
        for rows in _split_by_length(single, lengths)
    ]
    chunks = []
    for row in np.flatnonzero(counts > 1).tolist():
        pages = tables[row, skipped[row] : skipped[row] - (-lengths[row] // page_size)].astype(np.int64)
        start = int(starts[row] - base[row])
        tiles = _tiles(start, int(counts[row]), window, dtype)
        chunks.append(PrefillChunk(int(offsets[row]), torch.from_numpy(pages), tiles))
    return HostPlan(torch.from_numpy(write[0]), torch.from_numpy(write[1]), groups, chunks)


def _split_by_length(rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Rows in groups whose padding is small and whose padded size is bounded; `lengths` of all rows, in keys."""
    if rows.size == 0:
        return []
    own = lengths[rows]
    padded = int(own.max()) * rows.size
    if padded <= PADDING_MAX * int(own.sum()) and padded <= GROUP_TOKENS_MAX:
        return [rows]
    order = rows[np.argsort(-own, kind="stable")]
    groups: list[NDArray[np.int64]] = []
    begin = 0
    for end in range(1, order.size + 1):
        longest = int(lengths[order[begin]])
        full = longest * (end - begin + 1) > GROUP_TOKENS_MAX
        if end == order.size or full or int(lengths[order[end]]) * PADDING_MAX < longest:
            groups.append(order[begin:end])
            begin = end
    return groups


def _decode_group(
    rows: NDArray[np.int64],
    lead: NDArray[np.int64],
    lengths: NDArray[np.int64],
    offsets: NDArray[np.int64],
    tables: NDArray[np.int32],
    skipped: NDArray[np.int64],
    page_size: int,
    whole: bool,
) -> DecodeGroup:
    """Rows `rows`, whose queries see keys [lead, lengths) of their pages behind the `skipped` ones."""
    leads, ends, skips = lead[rows], lengths[rows], skipped[rows]
    end = int(ends.max())
    pages = (end + page_size - 1) // page_size
    if skips.any():
        places = np.minimum(skips[:, None] + np.arange(pages), tables.shape[1] - 1)
        listed = tables[rows[:, None], places]
    else:
        listed = tables[rows, :pages]
    flat = torch.from_numpy(listed.astype(np.int64).reshape(-1))
    at = offsets[rows]
    in_order = whole and int(at[-1]) - int(at[0]) == rows.size - 1 and bool((np.diff(at) == 1).all())
    queries = slice(int(at[0]), int(at[0]) + rows.size) if in_order else torch.from_numpy(at)
    # Cut keys of one row cost nothing, those of several leave gaps between the rows: then a mask is cheaper.
    if rows.size == 1 or (not leads.any() and int(ends.min()) == pages * page_size):
        return DecodeGroup(queries, flat, int(leads[0]), end, None)
    key = np.arange(pages * page_size)
    unseen = (key < leads[:, None]) | (key >= ends[:, None])
    bias = torch.zeros(rows.size, 1, key.size).masked_fill_(torch.from_numpy(unseen)[:, None], -math.inf)
    return DecodeGroup(queries, flat, 0, key.size, bias)


def _tiles(start: int, count: int, window: int, dtype: torch.dtype) -> list[PrefillTile]:
    """Tiles of `count` queries from key `start` on: keys that none of a tile's queries sees are left out."""
    tiles = []
    for begin in range(0, count, QUERY_TILE):
        end = min(begin + QUERY_TILE, count)
        low = max(start + begin + 1 - window, 0) if window else 0
        key, query = torch.arange(low, start + end), torch.arange(start + begin, start + end)[:, None]
        unseen = key > query
        if window:
            unseen |= key <= query - window
        mask = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -math.inf)
        tiles.append(PrefillTile(begin, end, low, start + end, mask))
    return tiles


def attend(
    plan: HostPlan,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_heads: int,
    scratch: Scratch,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a whole ragged batch: `q` [T, heads, d], pages [units, page elements], sinks [heads].

    `scratch` is overwritten. Returns [T, heads, d_v] of q's dtype.
    """
    value_dim = v_pages.shape[1] * q.shape[2] // k_pages.shape[1]
    out = q.new_empty(q.shape[0], q.shape[1], value_dim)
    rules = Rules(scale, softcap, None if sinks is None else sinks.float())
    for group in plan.groups:
        k, v = scratch.gather("k", k_pages, group.pages), scratch.gather("v", v_pages, group.pages)
        out[group.queries] = _decode(group, q[group.queries], k, v, kv_heads, rules)
    for chunk in plan.chunks:
        k, v = scratch.gather("k", k_pages, chunk.pages), scratch.gather("v", v_pages, chunk.pages)
        _prefill(chunk, q, k, v, kv_heads, rules, out)
    return out


class Rules(NamedTuple):
    """From products to weights: scale, soft cap (0: none), and sinks float32[heads] or None."""

    scale: float
    softcap: float
    sinks: Tensor | None

    @property
    def plain(self) -> bool:
        """Whether torch's fused kernel covers them."""
        return not self.softcap and self.sinks is None

    def weights(self, products: Tensor, bias: Tensor | None, behind: int = 2) -> Tensor:
        """float32 weights of `products` [..., heads, t, n], or without the t where one dimension is `behind` heads.

        `bias` broadcasts against them, whose memory may be used for the result.
        """
        scores = products.float().mul_(self.scale) if products.dtype != torch.float32 else products.mul_(self.scale)
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if bias is not None:
            scores += bias
        if self.sinks is None:
            return torch.softmax(scores, -1)
        sinks = self.sinks.view(-1, *[1] * behind)
        peak = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        weights = scores.sub_(peak).exp_()
        return weights.div_(weights.sum(-1, keepdim=True).add_(torch.exp(sinks - peak)))


def _decode(group: DecodeGroup, q: Tensor, k: Tensor, v: Tensor, kv_heads: int, rules: Rules) -> Tensor:
    """Single queries [b, heads, d] over their gathered pages [b * n, elements]; [b, heads, d_v]."""
    rows, heads, dim = q.shape
    k = k.view(rows, -1, kv_heads, dim)
    v = v.view(rows, k.shape[1], kv_heads, -1)
    if group.bias is None:
        k, v = k[:, group.begin : group.end], v[:, group.begin : group.end]
    grouped = q.view(rows, kv_heads, heads // kv_heads, dim)
    few = kv_heads <= SPREAD_KV_HEADS_MAX
    if q.dtype == torch.bfloat16 and few and rows * (k.shape[1] + ROW_COST) >= SPREAD_COST_MIN:
        return _spread(grouped, k, v, group.bias, rules)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if rules.plain:
        bias = None if group.bias is None else group.bias.to(q.dtype).unsqueeze(1)
        attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=rules.scale)
    else:
        products = (grouped @ k.transpose(2, 3)).view(rows, heads, 1, -1)
        bias = None if group.bias is None else group.bias.unsqueeze(1)
        attended = rules.weights(products, bias).to(q.dtype).view(rows, kv_heads, heads // kv_heads, -1) @ v
    return attended.reshape(rows, heads, -1)


def _spread(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rules: Rules) -> Tensor:
    """Single queries as one dense product per row: q [b, kv, g, d] on the diagonal blocks of [b, kv * g, kv * d]."""
    rows, kv_heads, size, dim = q.shape
    wide = q.new_zeros(rows, kv_heads, size, kv_heads, dim)
    for head in range(kv_heads):
        wide[:, head, :, head] = q[:, head]
    products = torch.bmm(wide.view(rows, kv_heads * size, kv_heads * dim), k.flatten(2).transpose(1, 2))
    weights = rules.weights(products, bias, behind=1)
    mixed = torch.bmm(weights.to(q.dtype), v.flatten(2)).view(rows, kv_heads, size, kv_heads, -1)
    out = q.new_empty(rows, kv_heads, size, v.shape[-1])
    for head in range(kv_heads):
        out[:, head] = mixed[:, head, :, head]
    return out.flatten(1, 2)


def _prefill(chunk: PrefillChunk, q: Tensor, k: Tensor, v: Tensor, kv_heads: int, rules: Rules, out: Tensor) -> None:
    """The queries of one chunk over its gathered pages [n, elements], tile by tile, into `out`."""
    dim = q.shape[2]
    k = k.view(-1, kv_heads, dim)
    v = v.view(k.shape[0], kv_heads, -1)
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    for begin, end, low, high, mask in chunk.tiles:
        queries = q[chunk.first + begin : chunk.first + end].transpose(0, 1)
        own_k, own_v = k[:, :, low:high], v[:, :, low:high]
        if rules.plain and q.dtype != torch.bfloat16:
            attended = F.scaled_dot_product_attention(
                queries[None], own_k, own_v, attn_mask=mask, scale=rules.scale, enable_gqa=True
            )[0]
        else:
            attended = _tile(queries, own_k[0], own_v[0], mask, rules)
        out[chunk.first + begin : chunk.first + end] = attended.transpose(0, 1)


def _tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rules: Rules) -> Tensor:
    """[heads, t, d_v] of queries [heads, t, d] over keys [kv, n, d], without the fused kernel."""
    heads, count, dim = q.shape
    kv_heads, keys = k.shape[:2]
    parts = []
    step = max(SCORES_MAX // (heads * keys), 1)
    for begin in range(0, count, step):
        own = q[:, begin : begin + step]
        products = (own.reshape(kv_heads, -1, dim) @ k.transpose(1, 2)).view(heads, -1, keys)
        weights = rules.weights(products, mask[begin : begin + step]).to(q.dtype)
        parts.append((weights.view(kv_heads, -1, keys) @ v).view(heads, own.shape[1], -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
