"""Operations on rows between the products of a layer: norms, rotary positions, gates.

Owns both ways to compute them: torch, on any device, and the compiled library on a CPU. Must never differ between them
by more than the rounding of a sum: values are rounded to the model's dtype at the same places. `bandmaster bench model
--host-kernels torch` beside `compiled` shows what the library gives.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.host_library import LANES, SUFFIXES, HostLibrary


class RowOps(Protocol):
    """What a native definition calls between products; every tensor is [T, ...]."""

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """`x` += `y` where there is one; x / sqrt(mean(x^2) + eps) * weight, the mean and the quotient in float32."""

    def turn(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [T, heads, d] with pairs (i, i + d/2) rotated by tables [positions, d]; it may be changed in place."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(g) * u of rows [g, u]; `gate_up` [T, 2 * size] may be changed."""


class TorchRows:
    """By torch, on any device."""

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See RowOps."""
        if y is not None:
            x += y
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return (wide * scale).to(x.dtype).mul_(weight)

    def turn(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See RowOps; the sign of the first half is in `sin`."""
        half = x.shape[-1] // 2
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return (x * cos[positions][:, None]).add_(swapped.mul_(sin[positions][:, None]))

    def gate(self, gate_up: Tensor) -> Tensor:
        """See RowOps."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class CompiledRows:
    """By the compiled library."""

    def __init__(self, library: HostLibrary) -> None:
        self.add_norm = library.add_norm
        self.gate = library.silu_mul
        self._rope = library.rope

    def turn(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See RowOps; in place."""
        self._rope(x, positions, cos, sin)
        return x


def row_ops(library: HostLibrary | None, dtype: torch.dtype, sizes: tuple[int, ...], head_dim: int) -> RowOps:
    """The library's where it has the dtype and reads rows of these sizes and heads in whole vectors, else torch's."""
    whole = all(size % LANES == 0 for size in sizes) and head_dim % (2 * LANES) == 0
    return CompiledRows(library) if library is not None and dtype in SUFFIXES and whole else TorchRows()
