"""Mamba-2: the selective state update of single tokens, and the scan of chunks block by block.

Owns the torch form, which a CPU rank runs and the kernels are compared with. Must never let a row's result depend on
how it was cut, beyond rounding: all arithmetic is float32, sums of log decays float64, whatever the model's dtype.
Heads h of a group share B and C. Per row, head and token t:

    S_t = exp(dt_t * a) * S_(t-1) + dt_t * x_t B_t^T         S [head_dim, d_state], kept in the row's slot
    y_t = S_t C_t + D * x_t

In a block of L tokens, with c_t the sum of dt * a up to t:

    y_t = sum_(s <= t) exp(c_t - c_s) (C_t . B_s) dt_s x_s  +  exp(c_t) S_0 C_t  +  D x_t
    S_L = exp(c_L) S_0 + sum_s exp(c_L - c_s) dt_s x_s B_s^T
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.state_rows import Chunks, Singles, block_pieces, load_states, passes


def mamba2_update(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, rows: Singles
) -> Tensor:
    """One token of each row: `x` [n, h, p], `dt` float32[n, h] (> 0), `a`, `d` [h], `b`, `c` [n, g, s], `states`
    float32[slots, h, p, s]; float32[n, h, p]."""
    count, heads, dim = x.shape
    groups, width = b.shape[1:]
    wide, kept = x.float(), torch.exp(dt * a.float())
    added = (wide * dt[..., None]).reshape(count, groups, -1, 1)
    b, c = b.float()[:, :, None], c.float()[..., None]
    out = wide * d.float()[:, None]
    for own, slots, fresh in passes(states, rows):
        state = load_states(states, slots, fresh)
        state *= kept[own, :, None, None]
        grouped = state.view(-1, heads // groups * dim, width)
        grouped.baddbmm_(added[own].flatten(0, 1), b[own].flatten(0, 1))
        states[slots] = state
        out[own] += torch.bmm(grouped, c[own].flatten(0, 1)).view(-1, heads, dim)
    return out


def mamba2_chunks(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, rows: Chunks, out: Tensor
) -> None:
    """Whole chunks: `x` [T, h, p], `dt` float32[T, h], `b`, `c` [T, g, s]; writes the chunk tokens of `out`
    float32[T, h, p] and the rows' `states`."""
    state = load_states(states, rows.slots, rows.fresh)
    a, d = a.float(), d.float()
    blocks = rows.cut()
    token_bytes = x.shape[1] * (blocks.places.shape[1] * 12 + x.shape[2] * 12)  # decays and products of a token
    for own, places, inside in block_pieces(blocks, token_bytes):
        xs, bs, cs = (tensor[places].float() for tensor in (x, b, c))
        step = dt[places].masked_fill(~inside[..., None], 0)
        out[places[inside]] = _block(xs, bs, cs, step, a, d, state[own])[inside]
    states[rows.slots] = state


def _block(x: Tensor, b: Tensor, c: Tensor, dt: Tensor, a: Tensor, d: Tensor, state: Tensor) -> Tensor:
    """One block of each of n rows: `x` [n, L, h, p], `b`, `c` [n, L, g, s], `dt` [n, L, h], 0 where a token is padding;
    [n, L, h, p]. Moves `state` [n, h, p, s] on."""
    groups = b.shape[2]
    x, b, c, dt = (tensor.transpose(1, 2) for tensor in (x, b, c, dt))  # [n, h or g, L, ...]
    log = (dt * a[:, None]).double().cumsum(-1)
    scaled = (x * dt[..., None]).unflatten(1, (groups, -1))  # [n, g, h/g, L, p]
    weights = (c @ b.transpose(2, 3))[:, :, None] * block_decay(log).unflatten(1, (groups, -1))
    y = weights @ scaled
    before = state.unflatten(1, (groups, -1)).flatten(2, 3)  # [n, g, h/g * p, s]
    read = (c @ before.transpose(2, 3)).unflatten(3, (-1, x.shape[-1])).transpose(2, 3)  # [n, g, h/g, L, p]
    y += read * torch.exp(log).float().unflatten(1, (groups, -1))[..., None]
    ended = scaled * torch.exp(log[..., -1:] - log).float().unflatten(1, (groups, -1))[..., None]
    added = ended.transpose(3, 4).flatten(2, 3) @ b
    state.mul_(torch.exp(log[..., -1]).float()[..., None, None]).add_(added.view_as(state))
    return y.flatten(1, 2).addcmul_(x, d[:, None, None]).transpose(1, 2)


def block_decay(log: Tensor) -> Tensor:
    """exp(log_t - log_s) float32[..., L, L] for s <= t, else 0, of float64 sums `log` [..., L]."""
    length = log.shape[-1]
    ahead = torch.ones(length, length, dtype=torch.bool, device=log.device).triu(1)
    return (log[..., :, None] - log[..., None, :]).float().masked_fill_(ahead, -torch.inf).exp_()
