"""The generic model path: any supported decoder of `transformers`, with our attention and memory underneath.

Owns the loading of a whole model and the ragged forward over it. Must never keep K/V of its own. The registered
attention function receives a ragged batch as one sequence, [1, heads, T, d], stores K and V into the arena and attends
over pages. Invariant: what a layer stores is read from the tensors that its attention is called with (`probe`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from daemon.rank.convert import quiet_transformers
from daemon.rank.errors import UnsupportedModel
from daemon.rank.paged_attention import AttentionSpec, PagedAttention
from daemon.rank.sizes import KVShape

ATTENTION_NAME = "paged_arena"
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Model(Protocol):
    """A loaded model: what it stores per layer, and its forward."""

    name: str  # "native" or "generic"
    dtype: torch.dtype
    shapes: list[KVShape]

    def forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor, attention: PagedAttention) -> Tensor:
        """Logits [len(wanted), vocab] at batch indexes `wanted` int64; `tokens`, `positions` int64[T]."""

    def layer_work(self, batch: int) -> object:
        """Work of one real layer's size for `batch` tokens: what thread counts are measured with."""


class _Probe:
    """Records what each layer would store; attends to nothing."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}

    def begin(self, batch: object) -> None:
        """Nothing to plan."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Note the shapes of one call; the output has the right shape and no meaning."""
        assert layer not in self.shapes, f"layer {layer} attends twice in one forward"
        self.shapes[layer] = KVShape(k.shape[1], k.shape[2], v.shape[2], DTYPE_NAMES[k.dtype])
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    paged: PagedAttention | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function given to `transformers`: query [1, heads, T, d], key and value [1, kv_heads, T, d] after rope."""
    assert paged is not None, "the ragged forward passes its attention"
    assert mask is None, "causality is the paged attention's"
    for name in ("sliding_window", "s_aux", "softcap", "position_bias"):
        if options.get(name) is not None:
            raise UnsupportedModel(f"layer {module.layer_idx} asks for {name} in attention, which is not supported yet")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = paged.run(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionSpec(scale),
    )
    return out[None], None


def _no_mask(*_: object, **__: object) -> None:
    """The mask function given to `transformers`: causality is the paged attention's."""


class GenericModel:
    """A model definition of `transformers`, run on ragged batches."""

    name = "generic"

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        quiet_transformers()
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

        AttentionInterface.register(ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
        self.dtype = dtype
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, attn_implementation=ATTENTION_NAME
        ).eval()
        self._model.to(device)
        self._device = device
        self.shapes = self._probe()

    def _probe(self) -> list[KVShape]:
        probe = _Probe()
        one = torch.zeros(1, dtype=torch.int64, device=self._device)
        self.forward(one, one, one, probe)
        layers = sorted(probe.shapes)
        if layers != list(range(len(layers))):
            raise UnsupportedModel(f"layers {layers} attend; every layer must, or what it stores is unknown")
        return [probe.shapes[layer] for layer in layers]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor, attention: PagedAttention) -> Tensor:
        """Logits [len(wanted), vocab] at batch indexes `wanted`."""
        out = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            paged=attention,
        )
        return out.logits[0]

    @torch.inference_mode()
    def layer_work(self, batch: int) -> object:
        """A few forwards' worth of work: the whole model on `batch` positions of one row, nothing stored."""
        tokens = torch.zeros(batch, dtype=torch.int64, device=self._device)
        return self.forward(tokens, torch.arange(batch, device=self._device), tokens[:1], _Probe())
