"""The probe: stands in for attention and states in one forward, and writes down what each layer would store.

Owns that record. Must never store anything, nor let one token see another: its outputs have the right shapes and no
meaning, but each token's depends on all that the layer computed for that token, and on nothing else. So what a model
makes of a token with a probe underneath may depend on that token and its position only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allocator.decl import MHA, Full, Layer, Part, State, StateLife, StateTensor, Window
from daemon.rank.dtypes import DTYPE_NAMES
from daemon.rank.errors import UnsupportedModel
from daemon.rank.paged_attention import AttentionSpec


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """K or V [T, kv_heads, d] for every head of q [T, heads, ...]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


class Probe:
    """`PagedAttention` and `States` at once."""

    def __init__(self) -> None:
        self._attending: dict[int, Part] = {}
        self._tensors: dict[int, list[StateTensor]] = {}

    def layers(self, count: int) -> list[Layer]:
        """What each of `count` layers stores, states on a grid of one token."""
        beyond = [layer for layer in (*self._attending, *self._tensors) if not 0 <= layer < count]
        if beyond:
            raise UnsupportedModel(f"layer {beyond[0]} stores something, but the model has {count} layers")
        return [Layer(tuple(self._parts(layer))) for layer in range(count)]

    def _parts(self, layer: int) -> list[Part]:
        parts = [self._attending[layer]] if layer in self._attending else []
        if layer in self._tensors:
            parts.append(Part(State(tuple(self._tensors[layer])), StateLife(1)))
        return parts

    def begin(self, batch: object) -> None:
        """Nothing to plan."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Note the K and V of one call."""
        assert layer not in self._attending, f"layer {layer} attends twice in one forward"
        life = Window(spec.window) if spec.window else Full()
        self._attending[layer] = Part(MHA(k.shape[1], k.shape[2], v.shape[2], DTYPE_NAMES[k.dtype]), life)
        seen = q.mean(-1, keepdim=True).tanh() + _per_head(k.mean(-1, keepdim=True), q).tanh()
        return _per_head(v, q) * (1 + 0.5 * seen)

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """Note the inputs that a convolution keeps."""
        self._note(layer, StateTensor("conv", (x.shape[1], weight.shape[1] - 1), DTYPE_NAMES[x.dtype]))
        return x

    def mamba2(self, layer: int, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Note the scan state of a Mamba-2 mixer."""
        self._note(layer, StateTensor("scan", (*x.shape[1:], b.shape[2]), "float32"))
        return x.float()

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Note the scan state of a gated delta net."""
        self._note(layer, StateTensor("scan", (v.shape[1], k.shape[2], v.shape[2]), "float32"))
        return v.to(torch.float32)

    def _note(self, layer: int, tensor: StateTensor) -> None:
        known = self._tensors.setdefault(layer, [])
        assert tensor.name not in [one.name for one in known], f"layer {layer} keeps two states {tensor.name}"
        known.append(tensor)
