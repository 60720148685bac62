"""Runs in a process of its own, without a GPU: counts the forms of a rank's attention kernels that batches ask for.

A form is what Triton compiles apart: a kernel, its types and compile-time values, and what it was told of strides and
alignments. Triton names each one that it does not hold to a hook before it compiles it; the hook here holds all of
them, so nothing is compiled or launched. Prints `kernel forms` for the two batches of a warm-up, and every form that a
later batch adds.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from daemon.rank.paged_attention import AttentionSpec, LayerViews
from daemon.rank.triton_ops import TritonAttention
from tests.kernels.interpreted import rank_batch
from tests.kernels.scenes import Shape

SHAPE = Shape(3, 1, 20, 36, torch.bfloat16, 4)  # three heads of 20: rows of q end where nothing is aligned
WINDOWS = (0, 10)
WARM_UP = [[(0, 32)], [(32, 1)]]
SERVED = [
    [(0, 1)],  # a table of one page
    [(63, 1), (15, 1)],  # a table of 16
    [(5000, 1), (3, 1), (40, 1)],  # ten splits
    [(8200, 1)],  # 17 splits
    [(12, 1), (0, 9), (20, 6)],  # chunks behind one single row: their slices begin anywhere
    [(12, 1), (9, 1), (33, 1), (0, 48)],
    [(64, 2)],
]


class _Driver:
    """What Triton asks of a driver before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> int:
    """Run every batch through three layers: full, with every rule, and with a narrower window than its band's."""
    forms: dict[str, str] = {}

    def hold(key: str, repr: str, fn: Any, **_: object) -> bool:
        forms.setdefault(fn.name + str(key), f"{fn.name} {repr}")
        return True

    triton.runtime.driver.set_active(_Driver())
    scenes, _ = rank_batch([(0, 32)], SHAPE, WINDOWS)
    views = {}
    for layer, band in enumerate((0, 1, 1)):
        k, v = scenes[band].k_view, scenes[band].v_view
        views[layer] = LayerViews(k, v, k.flatten(1), v.flatten(1), 1, band)
    specs = [AttentionSpec(0.3), AttentionSpec(0.3, 10, 4.0, torch.zeros(3)), AttentionSpec(0.3, 7)]
    attention = TritonAttention(views)
    with mock.patch.object(triton.knobs.runtime, "jit_cache_hook", hold):
        for at, rows in enumerate(WARM_UP + SERVED):
            _, batch = rank_batch(rows, SHAPE, WINDOWS)
            known, tokens = set(forms), int(batch.offsets[-1])
            attention.begin(batch)
            for layer, spec in enumerate(specs):
                # As a model's own reshapes leave them: strides that change with the tokens.
                sizes = ((SHAPE.heads, SHAPE.k_dim), (1, SHAPE.k_dim), (1, SHAPE.v_dim))
                q, k, v = (torch.zeros(heads, tokens, dim, dtype=SHAPE.dtype).transpose(0, 1) for heads, dim in sizes)
                attention.run(layer, q, k, v, spec)
            for key in forms.keys() - known if at >= len(WARM_UP) else ():
                print(f"{rows} adds {forms[key]}", flush=True)
    names = [form.split()[0] for form in forms.values()]
    for name in sorted(set(names)):
        print(f"{name} {names.count(name)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
