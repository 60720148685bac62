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

from kernels.state_rows import Chunks, Singles, load_states


def mamba2_update(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, rows: Singles
) -> Tensor:
    """One token of each row: `x` [n, h, p], `dt` float32[n, h] (> 0), `a`, `d` [h], `b`, `c` [n, g, s], `states`
    float32[slots, h, p, s]; float32[n, h, p]."""
    count, heads, dim = x.shape
    groups, width = b.shape[1:]
    wide = x.float()
    state = load_states(states, rows.slots, rows.fresh)
    state *= torch.exp(dt * a.float())[..., None, None]
    grouped = state.view(count * groups, heads // groups * dim, width)
    added = (wide * dt[..., None]).reshape(count * groups, -1, 1)
    grouped.baddbmm_(added, b.float().reshape(count * groups, 1, width))
    states[rows.slots] = state
    read = torch.bmm(grouped, c.float().reshape(count * groups, width, 1)).view(count, heads, dim)
    return read.addcmul_(wide, d.float()[:, None])


def mamba2_chunks(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, rows: Chunks, out: Tensor
) -> None:
    """Whole chunks: `x` [T, h, p], `dt` float32[T, h], `b`, `c` [T, g, s]; writes the chunk tokens of `out`
    float32[T, h, p] and the rows' `states`."""
    heads, dim = x.shape[1:]
    groups = b.shape[1]
    inputs, b, c = (tensor[rows.places].float().transpose(1, 2) for tensor in (x, b, c))  # [n, h or g, L, ...]
    step = dt[rows.places].masked_fill(~rows.inside[..., None], 0).transpose(1, 2)  # [n, h, L]
    log = (step * a.float()[:, None]).double().cumsum(-1)
    scaled = inputs * step[..., None]
    weights = (c @ b.transpose(2, 3))[:, :, None] * block_decay(log).unflatten(1, (groups, -1))
    y = weights @ scaled.unflatten(1, (groups, -1))  # [n, g, h/g, L, p]
    ended = scaled * torch.exp(log[..., -1:] - log).float()[..., None]
    ended = ended.unflatten(1, (groups, -1)).transpose(3, 4).flatten(2, 3) @ b  # [n, g, h/g * p, s]
    before = _carry(ended.unflatten(2, (-1, dim)).flatten(1, 2), torch.exp(log[..., -1]).float(), states, rows)
    read = c @ before.unflatten(1, (groups, -1)).flatten(2, 3).transpose(2, 3)  # [n, g, L, h/g * p]
    y += read.unflatten(3, (-1, dim)).transpose(2, 3) * torch.exp(log).float().unflatten(1, (groups, -1))[..., None]
    y = y.flatten(1, 2).addcmul_(inputs, d.float()[:, None, None])
    out[rows.tokens] = y.transpose(1, 2)[rows.inside].view(-1, heads, dim)


def block_decay(log: Tensor) -> Tensor:
    """exp(log_t - log_s) float32[..., L, L] for s <= t, else 0, of float64 sums `log` [..., L]."""
    length = log.shape[-1]
    ahead = torch.ones(length, length, dtype=torch.bool, device=log.device).triu(1)
    return (log[..., :, None] - log[..., None, :]).float().masked_fill_(ahead, -torch.inf).exp_()


def _carry(ended: Tensor, decay: Tensor, states: Tensor, rows: Chunks) -> Tensor:
    """Every block's first state [n, h, p, s], from what each adds, `ended` [n, h, p, s], and keeps, `decay` [n, h]."""
    state = load_states(states, rows.slots, rows.fresh)
    before = torch.empty_like(ended)
    for blocks in rows.steps:
        active = state[: blocks.numel()]
        before[blocks] = active
        active.mul_(decay[blocks][..., None, None]).add_(ended[blocks])
    states[rows.slots] = state
    return before
