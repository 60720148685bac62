"""Gated delta nets of `transformers` over ragged batches: qwen3_next, qwen3_5 and lara_mini.

Owns the order of a mixer's products around the state ops; weights stay the module's. Must never keep a state.

    q, k, v = silu(conv(qkv));  q = l2(q) / sqrt(K), k = l2(k);  beta = sigmoid(b)
    g = -exp(A_log) * softplus(a + bias);  out = W_out norm(delta(q, k, v, g, beta), z)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daemon.rank.mixers.activation import require_silu
from daemon.rank.states import States

NORM_EPS = 1e-6


class Projected(NamedTuple):
    """A mixer's inputs: `qkv` [T, c], `z` [T, v_heads * V], `b`, `a` [T, v_heads]."""

    qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


class DeltaMixer:
    """lara_mini, qwen3_5: one projection for each input. Called as the module was, with the batch's `states`."""

    def __init__(self, module: Any) -> None:
        require_silu(module)
        self._module = module
        self._layer: int = module.layer_idx
        self._key_dim: int = module.head_k_dim
        self._value_dim: int = module.head_v_dim
        self._widths = [module.key_dim, module.key_dim, module.value_dim]
        self._rate = -torch.exp(module.A_log.detach().float())
        self._dt_bias = module.dt_bias.detach().float()
        self._taps = module.conv1d.weight.detach().squeeze(1)

    def __call__(self, hidden_states: Tensor, states: States, **_: Any) -> Tensor:
        """[1, T, hidden] of `hidden_states` [1, T, hidden]."""
        module = self._module
        qkv, z, b, a = self._project(hidden_states)
        q, k, v = states.conv(self._layer, qkv, self._taps, module.conv1d.bias, True).split(self._widths, -1)
        q = _normalized(q.unflatten(1, (-1, self._key_dim))) * self._key_dim**-0.5
        k = _normalized(k.unflatten(1, (-1, self._key_dim)))
        g = self._rate * F.softplus(a.float() + self._dt_bias)
        beta = b.sigmoid().float()
        out = states.delta(self._layer, q, k, v.unflatten(1, (-1, self._value_dim)), g, beta).to(hidden_states.dtype)
        normed = module.norm(out.reshape(-1, self._value_dim), z.reshape(-1, self._value_dim))
        mixed: Tensor = module.out_proj(normed.view(z.shape[0], -1))
        return mixed[None]

    def _project(self, hidden_states: Tensor) -> Projected:
        module, x = self._module, hidden_states[0]
        return Projected(module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x))


class InterleavedDeltaMixer(DeltaMixer):
    """qwen3_next: two projections whose outputs are grouped by key head."""

    def _project(self, hidden_states: Tensor) -> Projected:
        module = self._module
        qkvz, ba = module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
        q, k, v, z, b, a = (part[0] for part in module.fix_query_key_value_ordering(qkvz, ba))
        return Projected(torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), -1), z.flatten(1), b, a)


def _normalized(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last dimension, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)
