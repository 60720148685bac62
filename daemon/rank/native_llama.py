"""The native definition of llama-like decoders: the same arithmetic as `transformers`, with fewer and larger calls.

Owns the weights of the families in `FAMILIES`, Q, K and V joined into one product and gate and up into another. Must
never differ from the generic path by more than rounding: it is checked against it token for token.

    x = E[tokens];  per layer:  q, k, v = W_qkv norm(x);  rope(q), rope(k);  x += W_o attend(q, k, v)
                                g, u = W_gu norm(x);      x += W_d (silu(g) * u)
    logits = W_head norm(x[wanted])
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from allocator.decl import MHA, Full, Layer, Part
from daemon.rank.declare import layer_types
from daemon.rank.dtypes import DTYPE_NAMES
from daemon.rank.errors import RankError
from daemon.rank.paged_attention import AttentionSpec, PagedAttention
from daemon.rank.products import Product
from daemon.rank.row_ops import row_ops
from daemon.rank.states import States
from kernels.host_library import HostLibrary

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def why_not_native(config: Any) -> str:
    """Empty when this definition covers the model, else what it does not cover."""
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if set(layer_types(config)) != {"full_attention"}:
        return "windowed attention"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        return f"rope type {rope.get('rope_type')!r} is not one of {', '.join(ROPE_TYPES)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "rope on a part of the head only"
    return ""


class LayerWeights(NamedTuple):
    """Weights of one decoder layer; `q_norm` and `k_norm` are None where the family has none."""

    norm_in: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Product
    norm_mlp: Tensor
    gate_up: Product
    down: Product


class Weights:
    """Tensors of a safetensors directory by name, read as `dtype`; knows which nobody asked for."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        from safetensors import safe_open

        index = directory / "model.safetensors.index.json"
        if index.is_file():
            files = {directory / name for name in json.loads(index.read_text())["weight_map"].values()}
        else:
            files = set(directory.glob("*.safetensors"))
        self._dtype = dtype
        self._device = device
        self._places = {}
        for file in sorted(files):
            opened = safe_open(str(file), "pt")
            self._places.update(dict.fromkeys(opened.keys(), opened))
        self._unread = set(self._places)

    def get(self, name: str) -> Tensor:
        """One tensor; raises RankError when it is missing."""
        tensor = self.find(name)
        if tensor is None:
            raise RankError(f"the weights have no tensor {name}; the directory is not a complete model")
        return tensor

    def find(self, name: str) -> Tensor | None:
        """One tensor, or None when the model has none of this name."""
        if name not in self._places:
            return None
        self._unread.discard(name)
        return self._places[name].get_tensor(name).to(self._device, self._dtype).contiguous()

    def join(self, names: list[str]) -> Tensor | None:
        """Several tensors joined along their output rows; None when none of them exists."""
        found = [self.find(name) for name in names]
        if all(tensor is None for tensor in found):
            return None
        missing = [name for name, tensor in zip(names, found, strict=True) if tensor is None]
        if missing:
            raise RankError(f"the weights have no tensor {missing[0]}, but have others of {names}")
        return torch.cat([tensor for tensor in found if tensor is not None]).contiguous()

    def unread(self) -> list[str]:
        """Names that nobody asked for, without buffers that are recomputed."""
        return sorted(name for name in self._unread if not name.endswith("rotary_emb.inv_freq"))


class NativeLlama:
    """A llama-like decoder over ragged batches."""

    name = "native"

    def __init__(
        self,
        directory: Path,
        config: Any,
        dtype: torch.dtype,
        device: torch.device,
        library: HostLibrary | None = None,
    ) -> None:
        self.dtype = dtype
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._spec = AttentionSpec(self._dim**-0.5)
        self._eps: float = config.rms_norm_eps
        sizes = (config.hidden_size, config.intermediate_size)
        self._rows = row_ops(library, dtype, sizes, self._dim)
        weights = Weights(directory, dtype, device)
        self._embed = weights.get("model.embed_tokens.weight")
        self._layers = [self._layer(weights, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self._norm = weights.get("model.norm.weight")
        head = None if config.tie_word_embeddings else weights.get("lm_head.weight")
        self._head = Product(self._embed if head is None else head)
        if config.tie_word_embeddings:
            weights.find("lm_head.weight")
        if weights.unread():
            raise RankError(
                f"the native definition does not use {len(weights.unread())} tensors: {weights.unread()[0]}"
            )
        self._cos, self._sin = (table.to(device) for table in rope_tables(config, dtype))
        stored = Part(MHA(self._kv_heads, self._dim, self._dim, DTYPE_NAMES[dtype]), Full())
        self.layers = [Layer((stored,))] * len(self._layers)

    def _layer(self, weights: Weights, at: str) -> LayerWeights:
        qkv = [f"{at}self_attn.{name}_proj." for name in "qkv"]
        gate_up = [f"{at}mlp.{name}_proj." for name in ("gate", "up")]
        joined_qkv = weights.join([f"{name}weight" for name in qkv])
        joined_gate_up = weights.join([f"{name}weight" for name in gate_up])
        if joined_qkv is None or joined_gate_up is None:
            raise RankError(f"the weights have no attention or MLP projections under {at}")
        return LayerWeights(
            norm_in=weights.get(f"{at}input_layernorm.weight"),
            qkv=Product(joined_qkv, weights.join([f"{name}bias" for name in qkv])),
            q_norm=weights.find(f"{at}self_attn.q_norm.weight"),
            k_norm=weights.find(f"{at}self_attn.k_norm.weight"),
            out=Product(weights.get(f"{at}self_attn.o_proj.weight"), weights.find(f"{at}self_attn.o_proj.bias")),
            norm_mlp=weights.get(f"{at}post_attention_layernorm.weight"),
            gate_up=Product(joined_gate_up, weights.join([f"{name}bias" for name in gate_up])),
            down=Product(weights.get(f"{at}mlp.down_proj.weight"), weights.find(f"{at}mlp.down_proj.bias")),
        )

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, attention: PagedAttention, states: States
    ) -> Tensor:
        """Logits [len(wanted), vocab] at batch indexes `wanted`; there are no recurrent layers."""
        rows = self._rows
        x = F.embedding(tokens, self._embed)
        added: Tensor | None = None  # what the layer before adds to x
        for index, layer in enumerate(self._layers):
            attended = self._attend(
                index, layer, rows.add_norm(x, added, layer.norm_in, self._eps), positions, attention
            )
            normed = rows.add_norm(x, attended, layer.norm_mlp, self._eps)
            added = layer.down(rows.gate(layer.gate_up(normed)))
        last = None if added is None else added[wanted]
        return self._head(rows.add_norm(x[wanted], last, self._norm, self._eps))

    @torch.inference_mode()
    def layer_work(self, batch: int) -> object:
        """The products of the first layers on `batch` tokens, enough of them to leave the caches."""
        x = torch.ones(batch, self._embed.shape[1], dtype=self.dtype, device=self._embed.device)
        for layer in self._layers[:8]:
            x = layer.down(layer.gate_up(x)[:, : layer.down.inputs]) + layer.qkv(x).mean()
        return x

    def _attend(
        self, index: int, layer: LayerWeights, normed: Tensor, positions: Tensor, attention: PagedAttention
    ) -> Tensor:
        """What the attention of a layer adds to its input."""
        heads, turned = self._heads, self._heads + self._kv_heads
        qkv = layer.qkv(normed).view(normed.shape[0], -1, self._dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :heads] = self._norm_heads(qkv[:, :heads], layer.q_norm)
            qkv[:, heads:turned] = self._norm_heads(qkv[:, heads:turned], layer.k_norm)
        qk = self._rows.turn(qkv[:, :turned], positions, self._cos, self._sin)
        out = attention.run(index, qk[:, :heads], qk[:, heads:], qkv[:, turned:], self._spec)
        return layer.out(out.flatten(1))

    def _norm_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._rows.add_norm(x.reshape(-1, self._dim), None, weight, self._eps).view_as(x)


def rope_tables(config: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin [max positions, d] as `dtype`; frequencies and scaling are those of `transformers`."""
    inv_freq, scaling = _frequencies(config)
    positions = torch.arange(config.max_position_embeddings + 1, dtype=torch.float32)
    angles = positions[:, None] * inv_freq[None, :]
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _frequencies(config: Any) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        init: Callable[..., tuple[Tensor, float]] = ROPE_INIT_FUNCTIONS[kind]
        inv_freq, scaling = init(config, device=torch.device("cpu"))
        return inv_freq.float(), scaling
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0
