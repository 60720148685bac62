"""Gated delta rule: the recurrent update of single tokens, and chunks block by block.

Owns the torch form, which a CPU rank runs and the kernels are compared with. Must never let a row's result depend on
how it was cut, beyond rounding: all arithmetic is float32, sums of log decays float64, whatever the model's dtype. Keys
and queries arrive normalized, queries scaled; each serves v_heads / k_heads consecutive value heads. Per row, value
head and token t, with decay exp(g_t), g_t <= 0:

    S'  = exp(g_t) S_(t-1)                               S [k_dim, v_dim], kept in the row's slot
    S_t = S' + k_t (beta_t (v_t - S'^T k_t))^T
    o_t = S_t^T q_t

In a block of L tokens, with c_t the sum of g up to t and D_ts = exp(c_t - c_s) for s <= t, else 0:

    (I + strictly lower(beta_t (k_t . k_s) D_ts)) [U, W] = [beta v, beta exp(c) k]
    V = U - W S_0                                        the corrections that are written
    o_t = exp(c_t) S_0^T q_t + sum_(s <= t) (q_t . k_s) D_ts V_s
    S_L = exp(c_L) S_0 + sum_s exp(c_L - c_s) k_s V_s^T
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.state_mamba2 import block_decay
from kernels.state_rows import Chunks, Singles, load_states


def delta_update(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, rows: Singles) -> Tensor:
    """One token of each row: `q`, `k` float32[n, hk, K], `v` [n, hv, V], `g`, `beta` float32[n, hv], `states`
    float32[slots, hv, K, V]; float32[n, hv, V]."""
    count, heads, value_dim = v.shape
    size = heads // k.shape[1]
    q, k = (tensor.repeat_interleave(size, 1).flatten(0, 1)[:, None] for tensor in (q, k))  # [n * hv, 1, K]
    state = load_states(states, rows.slots, rows.fresh)
    state *= torch.exp(g)[..., None, None]
    flat = state.flatten(0, 1)
    known = torch.bmm(k, flat)
    correction = (v.float().reshape(-1, 1, value_dim) - known) * beta.reshape(-1, 1, 1)
    flat.baddbmm_(k.transpose(1, 2), correction)
    states[rows.slots] = state
    return torch.bmm(q, flat).view(count, heads, value_dim)


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, rows: Chunks, out: Tensor
) -> None:
    """Whole chunks: `q`, `k` float32[T, hk, K], `v` [T, hv, V], `g`, `beta` float32[T, hv]; writes the chunk tokens of
    `out` float32[T, hv, V] and the rows' `states`."""
    size = v.shape[1] // k.shape[1]
    q, k, v = (tensor[rows.places].float().transpose(1, 2) for tensor in (q, k, v))  # [n, heads, L, dim]
    padded = ~rows.inside[..., None]
    g, beta = (tensor[rows.places].masked_fill(padded, 0).transpose(1, 2) for tensor in (g, beta))  # [n, hv, L]
    log = g.double().cumsum(-1)
    decay = block_decay(log)
    grown = torch.exp(log).float()[..., None]
    kk, qk = (left @ k.transpose(2, 3) for left in (k, q))
    system = kk.repeat_interleave(size, 1) * decay * beta[..., None]
    mixing = qk.repeat_interleave(size, 1) * decay
    q, k = q.repeat_interleave(size, 1), k.repeat_interleave(size, 1)
    right = torch.cat((v * beta[..., None], k * (beta[..., None] * grown)), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, read = solved.split((v.shape[-1], k.shape[-1]), -1)
    ended = (k * torch.exp(log[..., -1:] - log).float()[..., None]).transpose(2, 3)
    kept = grown[:, :, -1:]
    queries = q * grown
    y = torch.empty_like(v)
    state = load_states(states, rows.slots, rows.fresh)
    for blocks in rows.steps:
        active = state[: blocks.numel()]
        written = new[blocks] - read[blocks] @ active
        y[blocks] = queries[blocks] @ active + mixing[blocks] @ written
        active.mul_(kept[blocks]).add_(ended[blocks] @ written)
    states[rows.slots] = state
    out[rows.tokens] = y.transpose(1, 2)[rows.inside]
