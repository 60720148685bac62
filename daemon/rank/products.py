"""Products with fixed weights, in the layout that this machine multiplies fastest.

Owns the packed weights of a CPU model. oneDNN reorders a plain weight within each product; packed once at load, it is
read as it lies. Where torch has no such operator, or on a GPU, the plain product is used. `bandmaster bench model` has
`transformers`, whose products are plain, beside ours. Invariant: packing changes speed, not meaning.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_DTYPES = (torch.float32, torch.bfloat16)
PACKED_FOR_ROWS = 16  # the batch size that the layout is chosen for


def can_pack(weight: Tensor) -> bool:
    """Whether this torch can pack this weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in PACKED_DTYPES
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Product:
    """x W^T + b for `weight` [out, in] and `bias` [out] or None; x [T, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._bias = bias
        self._weight, self._linear = weight, None
        if can_pack(weight):
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
            self._linear = torch.ops.mkldnn._linear_pointwise.default  # the overload itself: nothing to look up

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out]."""
        if self._linear is not None:
            return self._linear(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)
