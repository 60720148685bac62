"""Torch twins of the kernels: the plainest correct form of each op, on any device and in any float dtype.

Owns the definitions that kernels are compared with; the noise is also what a CPU rank
runs. Must never be clever. Shapes and formulas are those of the kernels of the same name.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HASH_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
UNIFORM_STEP = 2.0**-24


def paged_attention(
    q: Tensor,
    k_view: Tensor,
    v_view: Tensor,
    tables: Tensor,
    first: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a ragged batch, row by row, with a window, a soft cap and sinks or without.

    `q` [T, heads, d]; `k_view`, `v_view` [units, page_size, kv_heads, d]; row r has `counts[r]` queries at positions
    from `starts[r]`, and entry j of `tables` int[n, pages] holds its keys from position (first[r] + j) * page_size on,
    with every key that a query sees. `sinks` [heads]. Returns [T, heads, d_v].
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_view.shape[-1])
    size, page_size = q.shape[1] // k_view.shape[2], k_view.shape[1]
    at = 0
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        base = int(first[row]) * page_size
        length = start + count - base
        pages = tables[row, : -(-length // page_size)].long()
        k = k_view[pages].flatten(0, 1)[:length].repeat_interleave(size, 1).to(q.dtype)
        v = v_view[pages].flatten(0, 1)[:length].repeat_interleave(size, 1).to(q.dtype)
        scores = torch.einsum("thd,jhd->htj", q[at : at + count], k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        query = torch.arange(start, start + count, device=q.device)[:, None]
        key = torch.arange(base, base + length, device=q.device)
        unseen = key > query
        if window:
            unseen |= key <= query - window
        scores = scores.masked_fill(unseen, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(q.dtype)[:, None, None].expand(-1, count, 1)), -1)
        weights = torch.softmax(scores, -1)[..., :length]
        out[at : at + count] = torch.einsum("htj,jhd->thd", weights, v)
        at += count
    return out


def store_rows(view: Tensor, values: Tensor, pages: Tensor, slots: Tensor) -> None:
    """view[pages[t], slots[t]] = values[t]; `view` [units, page_size, kv_heads, d], `values` [T, kv_heads, d]."""
    view[pages.long(), slots.long()] = values


def zero_units(arena: Tensor, units: Tensor, unit_bytes: int) -> None:
    """Zero whole units of a uint8 arena; unit u is bytes [u * unit_bytes, (u + 1) * unit_bytes)."""
    count = arena.numel() // unit_bytes
    arena[: count * unit_bytes].view(count, unit_bytes)[units.long()] = 0


def copy_units(arena: Tensor, sources: Tensor, targets: Tensor, unit_bytes: int) -> None:
    """Copy whole units pair by pair; sources and targets are disjoint, a source may repeat."""
    count = arena.numel() // unit_bytes
    units = arena[: count * unit_bytes].view(count, unit_bytes)
    units[targets.long()] = units[sources.long()]


def update_table(table: Tensor, virtual: Tensor, physical: Tensor) -> None:
    """table[virtual] = physical; int32 columns, `virtual` distinct."""
    table[virtual.long()] = physical


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def hash32(x: Tensor) -> Tensor:
    """A 32-bit bijection that spreads every bit, on int32 with wrap-around; overwrites and returns `x`."""
    x ^= _shifted(x, 16)
    x *= HASH_MULTIPLIERS[0]
    x ^= _shifted(x, 15)
    x *= HASH_MULTIPLIERS[1]
    x ^= _shifted(x, 16)
    return x


def gumbel(keys: Tensor, vocab: int) -> Tensor:
    """Gumbel noise float32[n, vocab] of int32 key pairs [n, 2]: -log(-log(u)), u from hash(hash(token + a) ^ b)."""
    tokens = torch.arange(vocab, dtype=torch.int32, device=keys.device)
    x = hash32(hash32(tokens + keys[:, :1]) ^ keys[:, 1:])
    uniform = _shifted(x, 8).float().add_(0.5).mul_(UNIFORM_STEP)
    return uniform.log_().neg_().log_().neg_()


def keep_best(scaled: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """bool[n, vocab]: what min-p, then top-k, then top-p keep of `scaled` [n, vocab]; equal values together."""
    kept = torch.ones_like(scaled, dtype=torch.bool)
    vocab = scaled.shape[1]
    for row, (floor, k, p) in enumerate(zip(min_p.tolist(), top_k.tolist(), top_p.tolist(), strict=True)):
        x = scaled[row]
        mass = torch.exp(x.double() - x.max().double())
        if floor > 0:
            kept[row] &= x >= x.max() + math.log(floor)
        if 0 < k < min(vocab, int(kept[row].sum()) + 1):
            kept[row] &= x >= x[kept[row]].topk(k).values[-1]
        if p < 1:
            order = x.argsort(descending=True)
            order = order[kept[row][order]]
            reached = mass[order].cumsum(0)
            last = min(int((reached < p * reached[-1]).sum()), order.numel() - 1)
            kept[row] &= x >= x[order[last]]
    return kept


def sample(
    logits: Tensor,
    keys: Tensor,
    temperatures: Tensor,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """int64[n]: argmax of logits / temperature + gumbel(key) over what the limits keep; at temperature 0 the argmax."""
    drawn = temperatures > 0
    divisors = torch.where(drawn, temperatures, torch.ones_like(temperatures))
    scaled = logits.float() / divisors[:, None]
    if min_p is not None and top_k is not None and top_p is not None:
        kept = keep_best(scaled, min_p, top_k, top_p) | ~drawn[:, None]
        scaled = scaled.masked_fill(~kept, -math.inf)
    return (scaled + gumbel(keys, logits.shape[1]) * drawn[:, None]).argmax(-1)
