"""Upload: a host tensor on the device that the kernels run on.

Owns that one copy. Must never make the host wait for a GPU: a copy out of pageable memory would wait for all work that
its stream holds, so the host's tensor is pinned first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def upload(column: Tensor, device: torch.device) -> Tensor:
    """`column` on `device`, enqueued on the current stream; itself where it lies there."""
    if device.type == "cuda":
        column = column.pin_memory()
    return column.to(device, non_blocking=True)
