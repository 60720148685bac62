"""Recurrent state of one step for every layer: the arena's typed views over slots, and the plan of the batch's rows.

Owns the views of each layer's state tensors and which rows of a batch are single tokens, chunks or fresh. Must never
see a virtual id, and never keep a state: it lies in the row's working slot between forwards. Invariants: a row that
starts at position 0 does not read its slot; a forward leaves in a row's slot the state after the row's last token.

    state of layer l in slot s:  arena byte s * unit_bytes + offset_l, of the tensor's own shape
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from allocator.plan import StoragePlan
from daemon.rank.batch import Batch
from daemon.rank.dtypes import BY_NAME
from daemon.rank.paged_attention import typed_view
from kernels.state_conv import conv_chunks, conv_update
from kernels.state_delta import delta_chunks, delta_update
from kernels.state_mamba2 import mamba2_chunks, mamba2_update
from kernels.state_rows import RowPlan, Singles, plan_rows


class States(Protocol):
    """What a recurrent layer calls: each method once per layer and forward, over all T tokens of the batch."""

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """Causal convolution of `x` [T, c] with `weight` [c, K]; [T, c] like `x`."""

    def mamba2(self, layer: int, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Mamba-2 of `x` [T, h, p], `dt` float32[T, h], `a`, `d` [h], `b`, `c` [T, g, s]; float32[T, h, p]."""

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Gated delta rule of normalized `k` and normalized, scaled `q`, both float32[T, hk, K].

        `v` [T, hv, V], `g` and `beta` float32[T, hv]; float32[T, hv, V].
        """


class LayerStates(NamedTuple):
    """One layer's state tensors over slots: `conv` [slots, c, K - 1]; `scan` float32[slots, ...], None without one."""

    conv: Tensor
    scan: Tensor | None


class StateOps(NamedTuple):
    """The six ops, as `kernels.state_conv`, `state_mamba2` and `state_delta` define them; `cut_blocks`: whether those
    of chunks read the plan's blocks."""

    conv_update: Callable[..., Tensor]
    conv_chunks: Callable[..., None]
    mamba2_update: Callable[..., Tensor]
    mamba2_chunks: Callable[..., None]
    delta_update: Callable[..., Tensor]
    delta_chunks: Callable[..., None]
    cut_blocks: bool


TORCH_OPS = StateOps(
    conv_update, conv_chunks, mamba2_update, mamba2_chunks, delta_update, delta_chunks, cut_blocks=True
)


def state_views(arena: Tensor, plan: StoragePlan) -> dict[int, LayerStates]:
    """Views of every layer that keeps recurrent state here, by its number."""
    found: dict[int, dict[str, Tensor]] = {}
    for band in plan.bands:
        if band.geometry.kind == "state":
            for plane in band.planes:
                view = typed_view(arena, plane, BY_NAME[plane.dtype])
                found.setdefault(plane.layer, {})[plane.plane] = view
    return {layer: LayerStates(planes["conv"], planes.get("scan")) for layer, planes in found.items()}


class RecurrentStates:
    """The states of an arena; `begin` once per batch, then each layer's calls."""

    def __init__(self, views: Mapping[int, LayerStates], device: torch.device, ops: StateOps = TORCH_OPS) -> None:
        self._views = views
        self._device = device
        self._ops = ops
        self._plan = RowPlan(None, None)

    def begin(self, batch: Batch) -> None:
        """Plan the batch's rows; nothing to do for a model without recurrent layers."""
        if not self._views:
            return
        columns = (batch.starts, batch.counts, batch.slots)
        starts, counts, slots = (torch.from_numpy(column.astype(np.int64)) for column in columns)
        self._plan = plan_rows(starts, counts, slots, self._device, self._ops.cut_blocks)

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """Causal convolution of `x` [T, c]; see `States`."""
        states = self._views[layer].conv

        def update(rows: Singles, inputs: tuple[Tensor, ...]) -> Tensor:
            return self._ops.conv_update(*inputs, states, rows, weight, bias, silu)

        out = self._singles((x,), x.dtype, update)
        if self._plan.chunks is not None:
            self._ops.conv_chunks(x, states, self._plan.chunks, weight, bias, silu, out)
        return out

    def mamba2(self, layer: int, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Mamba-2 of `x` [T, h, p]; see `States`."""
        states = self._scan(layer)

        def update(rows: Singles, inputs: tuple[Tensor, ...]) -> Tensor:
            x, dt, b, c = inputs
            return self._ops.mamba2_update(x, dt, a, b, c, d, states, rows)

        out = self._singles((x, dt, b, c), torch.float32, update)
        if self._plan.chunks is not None:
            self._ops.mamba2_chunks(x, dt, a, b, c, d, states, self._plan.chunks, out)
        return out

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Gated delta rule of `v` [T, hv, V]; see `States`."""
        states = self._scan(layer)

        def update(rows: Singles, inputs: tuple[Tensor, ...]) -> Tensor:
            v, q, k, g, beta = inputs
            return self._ops.delta_update(q, k, v, g, beta, states, rows)

        out = self._singles((v, q, k, g, beta), torch.float32, update)
        if self._plan.chunks is not None:
            self._ops.delta_chunks(q, k, v, g, beta, states, self._plan.chunks, out)
        return out

    def _scan(self, layer: int) -> Tensor:
        scan = self._views[layer].scan
        assert scan is not None, f"layer {layer} keeps no scan state"
        return scan

    def _singles(
        self, inputs: tuple[Tensor, ...], dtype: torch.dtype, update: Callable[[Singles, tuple[Tensor, ...]], Tensor]
    ) -> Tensor:
        """The output [T, ...] like `inputs[0]`, as `dtype`, with the single-token rows' part in it."""
        rows = self._plan.singles
        if rows is not None and rows.tokens is None:
            return update(rows, inputs)
        out = torch.empty(inputs[0].shape, dtype=dtype, device=inputs[0].device)
        if rows is not None:
            out[rows.tokens] = update(rows, tuple(tensor[rows.tokens] for tensor in inputs))
        return out
