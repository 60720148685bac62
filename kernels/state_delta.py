"""Gated delta rule: the recurrent update of single tokens, and chunks block by block.

Owns the torch form, which a CPU rank runs and the kernels are compared with. Must never let a row's result depend on
how it was cut, beyond rounding: all arithmetic is float32, sums of log decays float64, whatever the model's dtype. Keys
and queries arrive normalized, queries scaled; each serves v_heads / k_heads consecutive value heads. Per row, value
head and token t, with decay exp(g_t), g_t <= 0:

    S'  = exp(g_t) S_(t-1)                               S [k_dim, v_dim], kept in the row's slot
    S_t = S' + k_t (beta_t (v_t - S'^T k_t))^T
    o_t = S_t^T q_t

In a block of L tokens, with c_t the sum of g up to t and D_ts = exp(c_t - c_s) for s <= t, else 0:

    (I + strictly lower(beta_t (k_t . k_s) D_ts)) V = beta_t (v_t - exp(c_t) S_0^T k_t)    V: the corrections written
    o_t = exp(c_t) S_0^T q_t + sum_(s <= t) (q_t . k_s) D_ts V_s
    S_L = exp(c_L) S_0 + sum_s exp(c_L - c_s) k_s V_s^T
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.state_mamba2 import block_decay
from kernels.state_rows import Chunks, Singles, block_pieces, load_states, passes


def delta_update(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, rows: Singles) -> Tensor:
    """One token of each row: `q`, `k` float32[n, hk, K], `v` [n, hv, V], `g`, `beta` float32[n, hv], `states`
    float32[slots, hv, K, V]; float32[n, hv, V]."""
    count, heads, value_dim = v.shape
    size = heads // k.shape[1]
    q, k = (tensor.repeat_interleave(size, 1)[:, :, None] for tensor in (q, k))  # [n, hv, 1, K]
    v, beta, kept = v.float()[:, :, None], beta[..., None, None], torch.exp(g)[..., None, None]
    out = torch.empty(count, heads, 1, value_dim, device=v.device)
    for own, slots, fresh in passes(states, rows):
        state = load_states(states, slots, fresh)
        state *= kept[own]
        correction = (v[own] - k[own] @ state) * beta[own]
        flat = state.view(-1, *state.shape[2:])
        flat.baddbmm_(k[own].flatten(0, 1).transpose(1, 2), correction.flatten(0, 1))
        states[slots] = state
        out[own] = q[own] @ state
    return out[:, :, 0]


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, rows: Chunks, out: Tensor
) -> None:
    """Whole chunks: `q`, `k` float32[T, hk, K], `v` [T, hv, V], `g`, `beta` float32[T, hv]; writes the chunk tokens of
    `out` float32[T, hv, V] and the rows' `states`."""
    state = load_states(states, rows.slots, rows.fresh)
    blocks = rows.cut()
    token_bytes = v.shape[1] * (blocks.places.shape[1] * 20 + (q.shape[2] + v.shape[2]) * 8)  # decays and products
    for own, places, inside in block_pieces(blocks, token_bytes):
        padded = ~inside[..., None]
        qs, ks, vs = (tensor[places].float() for tensor in (q, k, v))
        gs, betas = (tensor[places].masked_fill(padded, 0) for tensor in (g, beta))
        out[places[inside]] = _block(qs, ks, vs, gs, betas, state[own])[inside]
    states[rows.slots] = state


def _block(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One block of each of n rows: `q`, `k` [n, L, hk, K], `v` [n, L, hv, V], `g`, `beta` [n, L, hv], both 0 where a
    token is padding; [n, L, hv, V]. Moves `state` [n, hv, K, V] on."""
    size = v.shape[2] // k.shape[2]
    q, k, v, g, beta = (tensor.transpose(1, 2) for tensor in (q, k, v, g, beta))  # [n, heads, L, ...]
    log = g.double().cumsum(-1)
    decay, beta = block_decay(log), beta[..., None]
    grown = torch.exp(log).float()[..., None]
    system = (k @ k.transpose(2, 3)).repeat_interleave(size, 1) * decay * beta
    mixing = (q @ k.transpose(2, 3)).repeat_interleave(size, 1) * decay
    q, k = q.repeat_interleave(size, 1), k.repeat_interleave(size, 1)
    right = (v - (k @ state) * grown) * beta
    written = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    y = (q @ state) * grown + mixing @ written
    ended = (k * torch.exp(log[..., -1:] - log).float()[..., None]).transpose(2, 3)
    state.mul_(grown[:, :, -1:]).add_(ended @ written)
    return y.transpose(1, 2)
