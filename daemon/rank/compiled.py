"""Whether the CPU's compiled kernels are used: found or built at boot, or why the torch ones serve.

Owns the choice only; the build is `kernels.host_library`'s.
"""

from __future__ import annotations

import torch

from daemon.rank.convert import cache_root
from daemon.rank.errors import BadOption
from kernels.host_library import SUFFIXES, HostLibrary, Unavailable, load

CHOICES = ("auto", "torch", "compiled")


def choose_library(asked: str, dtype: torch.dtype) -> tuple[HostLibrary | None, str]:
    """The library, or None, and one sentence on it. Raises BadOption when `compiled` is asked for and cannot be had."""
    if asked not in CHOICES:
        raise BadOption(f"host_kernels={asked!r} is not one of {', '.join(CHOICES)}")
    if asked == "torch":
        return None, "torch: asked for"
    try:
        if dtype not in SUFFIXES:
            raise Unavailable(f"the compiled kernels have no {dtype}".replace("torch.", ""))
        return load(cache_root() / "kernels"), "compiled"
    except Unavailable as error:
        if asked == "compiled":
            raise BadOption(f"host_kernels=compiled: {error}") from error
        return None, f"torch: {error}"
