"""Norms over more than one rank holds: root mean squares of groups that reach over neighbouring ranks.

Owns the formula, after the classes in `PLAIN` and the gated norms of Mamba-2 mixers. Must never be used for another
class: what a norm makes of its weight is its own.

    out = x / sqrt(mean over all ranks of the group of (x^2) + eps) * weight;  gated: x * silu(gate) first, or out *
    silu(gate), as the class has it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daemon.rank.group import Group
from daemon.rank.shard.cuts import Part

PLAIN = ("Olmo2RMSNorm", "Olmo3RMSNorm", "OlmoeRMSNorm", "FlexOlmoRMSNorm", "MiniMaxM2RMSNorm")
"""Norms of whole projections: weight times the normalized row."""
GATED = (
    "BambaRMSNormGated",
    "GraniteMoeHybridRMSNormGated",
    "NemotronHRMSNormGated",
    "FalconH1RMSNormGated",
)


class Spread(NamedTuple):
    """A norm over what `ranks` neighbouring ranks hold, which are `filled` times as many elements as the model has."""

    ranks: int
    filled: float = 1.0


def spread_norm(module: nn.Module, spread: Spread, group: Group, part: Part) -> Callable[..., Tensor]:
    """The forward of a norm whose local row is the same share of one group on neighbouring ranks."""
    assert type(module).__name__ in PLAIN + GATED, f"no rule for {type(module).__name__} over several ranks"
    own: Any = module
    eps = float(own.variance_epsilon if hasattr(own, "variance_epsilon") else own.eps)
    gate_last = bool(getattr(module, "norm_before_gate", False))

    def forward(x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = x.float()
        if gate is not None and not gate_last:
            wide = wide * F.silu(gate.float())
        mean = _mean(wide.square().mean(-1, keepdim=True), spread.ranks, group, part) * spread.filled
        out = (wide * torch.rsqrt(mean + eps)) * own.weight.float()
        if gate is not None and gate_last:
            out = out * F.silu(gate.float())
        return out.to(x.dtype)

    return forward


def _mean(local: Tensor, ranks: int, group: Group, part: Part) -> Tensor:
    """The mean [..., 1] over the part's `ranks` neighbours of what each has [..., 1]; summed in rank order."""
    every = group.all_gather(local.contiguous(), local.ndim - 1)
    return every.unflatten(-1, (-1, ranks))[..., part.rank // ranks, :].mean(-1, keepdim=True)
