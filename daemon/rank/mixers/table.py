"""Which of our forwards runs which mixer class of `transformers`, and putting them in place.

Owns the table. Must never bind a class that no test compares with `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from daemon.rank.mixers.delta import DeltaMixer, InterleavedDeltaMixer
from daemon.rank.mixers.mamba2 import FalconMixer, Mamba2Mixer
from daemon.rank.mixers.short_conv import ShortConvMixer

MIXERS: dict[str, Callable[[Any], Callable[..., torch.Tensor]]] = {
    "BambaMixer": Mamba2Mixer,
    "GraniteMoeHybridMambaLayer": Mamba2Mixer,
    "NemotronHMamba2Mixer": Mamba2Mixer,
    "FalconH1Mixer": FalconMixer,
    "Qwen3NextGatedDeltaNet": InterleavedDeltaMixer,
    "LaraMiniGatedDeltaNet": DeltaMixer,
    "Lfm2ShortConv": ShortConvMixer,
    "Lfm3ShortConv": ShortConvMixer,
}
"""By the name of the module's class."""


def bind_mixers(model: torch.nn.Module) -> list[int]:
    """Replace the forward of every mixer of `MIXERS` in a model that is on its device; the layers bound, ascending."""
    bound = []
    for module in model.modules():
        make = MIXERS.get(type(module).__name__)
        if make is not None:
            module.forward = make(module)
            bound.append(int(module.layer_idx))  # type: ignore[arg-type]
    return sorted(bound)
