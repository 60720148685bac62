"""Mamba-2 mixers of `transformers` over ragged batches: bamba, granitemoehybrid, nemotron_h, and falcon_h1's variants.

Owns the order of a mixer's products around the state ops; weights stay the module's. Must never keep a state. The time
step is clamped to the mixer's own limits for every token; `transformers` clamps prompts only, so its state depends on
where a prompt was cut, ours does not.

    gate, xBC, dt = W_in u;  x, B, C = silu(conv(xBC));  dt = clamp(softplus(dt + bias))
    out = W_out norm(scan(x, dt, -exp(A_log), B, C, D), gate)
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from daemon.rank.mixers.activation import require_silu
from daemon.rank.states import States


class Mamba2Mixer:
    """The forward of one mixer module; called as the module was, with the batch's `states`."""

    def __init__(self, module: Any) -> None:
        require_silu(module)
        self._module = module
        self._layer: int = module.layer_idx
        self._heads: int = module.num_heads
        self._groups: int = module.n_groups
        inner, width = module.intermediate_size, module.n_groups * module.ssm_state_size
        self._projected = [inner, inner + 2 * width, module.num_heads]
        self._mixed = [inner, width, width]
        self._a = -torch.exp(module.A_log.detach().float())
        self._dt_bias = module.dt_bias.detach().float()
        self._limits = [float(limit) for limit in module.time_step_limit or (0.0, math.inf)]
        self._taps = module.conv1d.weight.detach().squeeze(1)

    def __call__(self, hidden_states: Tensor, states: States, **_: Any) -> Tensor:
        """[1, T, hidden] of `hidden_states` [1, T, hidden]."""
        module, tokens = self._module, hidden_states.shape[1]
        gate, mixed, dt = self._project(hidden_states[0]).split(self._projected, -1)
        mixed = states.conv(self._layer, mixed, self._taps, module.conv1d.bias, True)
        x, b, c = mixed.split(self._mixed, -1)
        dt = F.softplus(dt.float() + self._dt_bias).clamp(*self._limits)
        x = x.unflatten(1, (self._heads, -1))
        b, c = b.unflatten(1, (self._groups, -1)), c.unflatten(1, (self._groups, -1))
        y = states.mamba2(self._layer, x, dt, self._a, b, c, module.D)
        y = self._gated(y.reshape(tokens, -1), gate)
        out: Tensor = module.out_proj(y.to(hidden_states.dtype))
        return out[None]

    def _project(self, x: Tensor) -> Tensor:
        projected: Tensor = self._module.in_proj(x)
        return projected

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        gated: Tensor = self._module.norm(y, gate)
        return gated


class FalconMixer(Mamba2Mixer):
    """falcon_h1: multipliers before and after the projection, and a gate without a norm where the config says so."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._multipliers = module.mup_vector.detach()[0, 0]

    def _project(self, x: Tensor) -> Tensor:
        projected: Tensor = self._module.in_proj(x * self._module.ssm_in_multiplier) * self._multipliers
        return projected

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return super()._gated(y, gate) if self._module.mamba_rms_norm else y * F.silu(gate)
