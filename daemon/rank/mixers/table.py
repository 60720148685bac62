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
    "Qwen3_5GatedDeltaNet": DeltaMixer,
    "Qwen3_5MoeGatedDeltaNet": DeltaMixer,
    "LaraMiniGatedDeltaNet": DeltaMixer,
    "Lfm2ShortConv": ShortConvMixer,
    "Lfm2MoeShortConv": ShortConvMixer,
    "Lfm3ShortConv": ShortConvMixer,
}
"""By the name of the module's class."""


def bind_mixers(model: torch.nn.Module) -> None:
    """Replace the forward of every mixer of `MIXERS` in a model that is on its device."""
    for module in model.modules():
        make = MIXERS.get(type(module).__name__)
        if make is not None:
            module.forward = make(module)
