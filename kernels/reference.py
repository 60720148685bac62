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
    starts: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    """Full causal attention of a ragged batch, row by row.

    `q` [T, heads, d]; `k_view`, `v_view` [units, page_size, kv_heads, d]; `tables` int[n, pages]; row r has `counts[r]`
    queries at positions from `starts[r]`, and its keys 0..start+count-1 lie in its pages. Returns [T, heads, d_v].
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_view.shape[-1])
    size = q.shape[1] // k_view.shape[2]
    first = 0
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        length = start + count
        pages = tables[row, : -(-length // k_view.shape[1])].long()
        k = k_view[pages].flatten(0, 1)[:length].repeat_interleave(size, 1).to(q.dtype)
        v = v_view[pages].flatten(0, 1)[:length].repeat_interleave(size, 1).to(q.dtype)
        scores = torch.einsum("thd,jhd->htj", q[first : first + count], k) * scale
        ahead = torch.arange(length, device=q.device) > torch.arange(start, length, device=q.device)[:, None]
        weights = torch.softmax(scores.masked_fill(ahead, -math.inf), -1)
        out[first : first + count] = torch.einsum("htj,jhd->thd", weights, v)
        first += count
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


def sample(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """int64[n]: argmax of logits / temperature + gumbel(key); plain argmax where the temperature is 0."""
    drawn = temperatures > 0
    divisors = torch.where(drawn, temperatures, torch.ones_like(temperatures))
    noise = gumbel(keys, logits.shape[1]) * drawn[:, None]
    return (logits.float() / divisors[:, None] + noise).argmax(-1)
