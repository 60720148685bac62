"""The activation behind a mixer's convolution: what the ops implement, and the refusal of any other.

Owns that check only.
"""

from __future__ import annotations

from typing import Any

from daemon.rank.errors import UnsupportedModel


def require_silu(module: Any) -> None:
    """Raise UnsupportedModel unless the mixer's convolution is followed by silu."""
    if module.activation not in ("silu", "swish"):
        raise UnsupportedModel(
            f"layer {module.layer_idx}: activation {module.activation!r} behind the convolution of "
            f"{type(module).__name__}; silu is implemented"
        )
