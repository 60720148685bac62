"""Short convolutions of `transformers` over ragged batches: lfm2, lfm2_moe and lfm3.

Owns the order of a mixer's products around the state op; weights stay the module's. Must never keep a state.

    B, C, x = W_in u;  out = W_out (C * conv(B * x))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from daemon.rank.states import States


class ShortConvMixer:
    """The forward of one mixer module; called as the module was, with the batch's `states`."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._layer: int = module.layer_idx
        self._taps = module.conv.weight.detach().squeeze(1)

    def __call__(self, hidden_states: Tensor, states: States, **_: Any) -> Tensor:
        """[1, T, hidden] of `hidden_states` [1, T, hidden]."""
        module = self._module
        b, c, x = module.in_proj(hidden_states[0]).chunk(3, -1)
        mixed = states.conv(self._layer, b * x, self._taps, module.conv.bias, False)
        out: Tensor = module.out_proj(c * mixed)
        return out[None]
