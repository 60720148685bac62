"""Causal depthwise convolution over rows whose last inputs are kept in slots: single tokens, and chunks of any length.

Owns the torch form, which a CPU rank runs and the kernel is compared with. Must never let a row's result depend on how
it was cut: the sum runs from the oldest input to the newest, in float32, for both kinds of rows.

    y[t, c] = act(bias[c] + sum_k weight[c, k] * x[t - K + 1 + k, c]),   inputs before the row's first token are 0
    state[slot, c, :] = x[t - K + 2 .. t, c] of the row's newest token t
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.state_rows import Chunks, Singles, load_states


def conv_update(x: Tensor, states: Tensor, rows: Singles, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """One token of each row: `x` [b, c], `states` [slots, c, K - 1], `weight` [c, K]; [b, c] like `x`."""
    past = load_states(states, rows.slots, rows.fresh)
    window = torch.cat((past, x[..., None].to(past.dtype)), -1)
    states[rows.slots] = window[..., 1:]
    return _finish(_taps(window.unbind(-1), weight), bias, silu).to(x.dtype)


def conv_chunks(
    x: Tensor, states: Tensor, rows: Chunks, weight: Tensor, bias: Tensor | None, silu: bool, out: Tensor
) -> None:
    """Whole chunks: `x` [T, c]; writes the chunk tokens of `out` [T, c] and the rows' `states` [slots, c, K - 1]."""
    kept = weight.shape[1] - 1
    count, blocks = rows.slots.numel(), rows.cut()
    # Each row's inputs with its `kept` earlier ones before them, all rows one after the other.
    places = torch.arange(blocks.tokens.numel(), device=x.device) + (blocks.rows + 1) * kept
    ends = blocks.ends + torch.arange(1, count + 1, device=x.device) * kept
    lane = torch.arange(kept, device=x.device)
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))[:, None] + lane
    inputs = states.new_empty(blocks.tokens.numel() + count * kept, x.shape[1])
    inputs[places] = x[blocks.tokens].to(states.dtype)
    inputs[begins] = load_states(states, rows.slots, rows.fresh).transpose(1, 2)
    states[rows.slots] = inputs[ends[:, None] - kept + lane].transpose(1, 2)
    wide, reach = inputs.float(), inputs.shape[0] - kept
    summed = _finish(_taps([wide[k : k + reach] for k in range(kept + 1)], weight), bias, silu)
    out[blocks.tokens] = summed[places - kept].to(out.dtype)


def _taps(shifted: Sequence[Tensor], weight: Tensor) -> Tensor:
    """sum_k weight[:, k] * shifted[k], float32 [rows, c], of K tensors [rows, c]."""
    wide = weight.float()
    total = shifted[0].float() * wide[:, 0]
    for k in range(1, wide.shape[1]):
        total.addcmul_(shifted[k].float(), wide[:, k])
    return total


def _finish(total: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """act(total + bias), in place."""
    if bias is not None:
        total += bias.float()
    return F.silu(total, inplace=True) if silu else total
