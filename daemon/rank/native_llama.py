"""The native definition of llama-like decoders: the same arithmetic as `transformers`, with fewer and larger calls.

Owns the weights of the families in `FAMILIES`, Q, K and V joined into one product and gate and up into another. Must
never differ from the generic path by more than rounding: it is checked against it token for token.

    x = E[tokens];  per layer:  q, k, v = W_qkv norm(x);  rope(q), rope(k);  x += W_o attend(q, k, v)
                                g, u = W_gu norm(x);      x += W_d (silu(g) * u)
    logits = W_head norm(x[wanted])
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from allocator.decl import MHA, Full, Layer
from allocator.decl import Part as Stored
from daemon.rank.declare import head_counts, layer_types, split_heads
from daemon.rank.dtypes import DTYPE_NAMES
from daemon.rank.errors import RankError
from daemon.rank.group import Group, SoloGroup
from daemon.rank.paged_attention import AttentionSpec, PagedAttention
from daemon.rank.products import Product
from daemon.rank.row_ops import row_ops
from daemon.rank.shard.attention import filled_up
from daemon.rank.shard.cuts import Block, Once, Part, Take, rows_of, share_heads, spread
from daemon.rank.shard.vocabulary import embed, gathered_logits, vocabulary_cut
from daemon.rank.states import States
from daemon.rank.weights import Weights
from kernels.host_library import HostLibrary

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SOLO_GROUP = SoloGroup()
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


class Cuts(NamedTuple):
    """What a tensor rank has of each weight; nothing is cut for one rank.

    Rows of Q, of K and V, of gate and up; columns of the output and the down projection; biases of those; rows of the
    vocabulary.
    """

    heads: Take | None
    kv_heads: Take | None
    hidden: Take | None
    out: Take | None
    down: Take | None
    bias: Once | None
    vocabulary: Take


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
        group: Group = SOLO_GROUP,
        layers: range | None = None,
    ) -> None:
        """`layers`: those of this rank's stage, None for all. Raises UnsupportedModel for ranks that do not divide."""
        self.dtype = dtype
        self.hidden_size: int = config.hidden_size
        self.hidden_dtype = dtype
        self.attending = set(range(config.num_hidden_layers))
        self._group, self._layout = group, group.layout
        self._here = range(config.num_hidden_layers) if layers is None else layers
        heads, kv_heads = head_counts(config)
        self._heads, self._kv_heads = split_heads(
            config.model_type, "attention heads", heads, kv_heads, self._layout.ranks, fill_up=True
        )
        self._dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._spec = AttentionSpec(self._dim**-0.5)
        self._eps: float = config.rms_norm_eps
        part = Part(self._layout.rank, self._layout.ranks)
        cuts = _cuts(config, self._dim, part)
        self.split = _split(part, filled_up(kv_heads, self._kv_heads, part))
        intermediate = config.intermediate_size if cuts.hidden is None else cuts.hidden.size
        self._rows = row_ops(library, dtype, (config.hidden_size, intermediate), self._dim)
        weights = Weights(directory, dtype, device)
        self._load(weights, config, cuts)
        self._cos, self._sin = (table.to(device) for table in rope_tables(config, dtype))
        stored = Layer((Stored(MHA(self._kv_heads, self._dim, self._dim, DTYPE_NAMES[dtype]), Full()),))
        self.layers = [stored if index in self._here else Layer() for index in range(config.num_hidden_layers)]
        group.meet("the weights are loaded")

    def _load(self, weights: Weights, config: Any, cuts: Cuts) -> None:
        """Read what this rank holds; what stays unread must belong to other stages."""
        layout, tied = self._layout, config.tie_word_embeddings
        embedding = None
        if layout.first or (layout.last and tied):
            embedding = weights.get("model.embed_tokens.weight", cuts.vocabulary)
        if layout.first:
            assert embedding is not None
            self._embed = embed(partial(_look_up, embedding), cuts.vocabulary, self._group)
        self._layers = [(i, self._layer(weights, f"model.layers.{i}.", cuts)) for i in self._here]
        if layout.last:
            self._norm = weights.get("model.norm.weight")
            head = embedding if tied else weights.get("lm_head.weight", cuts.vocabulary)
            assert head is not None
            self._head = gathered_logits(Product(head), config.vocab_size, self._group)
        ours = tuple(f"model.layers.{index}." for index in self._here)

        def foreign(name: str) -> bool:
            of_layer = name.startswith("model.layers.")
            if name == "lm_head.weight" and tied:
                return True
            return not name.startswith(ours) if of_layer else layout.stages > 1

        unread = weights.unread(foreign)
        if unread:
            raise RankError(f"the native definition does not use {len(unread)} tensors: {unread[0]}")

    def _layer(self, weights: Weights, at: str, cuts: Cuts) -> LayerWeights:
        qkv = [f"{at}self_attn.{name}_proj." for name in "qkv"]
        gate_up = [f"{at}mlp.{name}_proj." for name in ("gate", "up")]
        qkv_cuts, hidden = [cuts.heads, cuts.kv_heads, cuts.kv_heads], [cuts.hidden] * 2
        joined_qkv = weights.join([f"{name}weight" for name in qkv], qkv_cuts)
        joined_gate_up = weights.join([f"{name}weight" for name in gate_up], hidden)
        if joined_qkv is None or joined_gate_up is None:
            raise RankError(f"the weights have no attention or MLP projections under {at}")
        out, down = f"{at}self_attn.o_proj.", f"{at}mlp.down_proj."
        return LayerWeights(
            norm_in=weights.get(f"{at}input_layernorm.weight"),
            qkv=Product(joined_qkv, weights.join([f"{name}bias" for name in qkv], qkv_cuts)),
            q_norm=weights.find(f"{at}self_attn.q_norm.weight"),
            k_norm=weights.find(f"{at}self_attn.k_norm.weight"),
            out=Product(weights.get(f"{out}weight", cuts.out), weights.find(f"{out}bias", cuts.bias)),
            norm_mlp=weights.get(f"{at}post_attention_layernorm.weight"),
            gate_up=Product(joined_gate_up, weights.join([f"{name}bias" for name in gate_up], hidden)),
            down=Product(weights.get(f"{down}weight", cuts.down), weights.find(f"{down}bias", cuts.bias)),
        )

    @torch.inference_mode()
    def forward(
        self, x: Tensor, positions: Tensor, wanted: Tensor, attention: PagedAttention, states: States
    ) -> Tensor:
        """See `model.Model`; there are no recurrent layers."""
        rows, reduce = self._rows, self._group.all_reduce
        if self._layout.first:
            x = self._embed(x)
        added: Tensor | None = None  # what the layer before adds to x
        for index, layer in self._layers:
            attended = self._attend(
                index, layer, rows.add_norm(x, added, layer.norm_in, self._eps), positions, attention
            )
            normed = rows.add_norm(x, reduce(attended), layer.norm_mlp, self._eps)
            added = reduce(layer.down(rows.gate(layer.gate_up(normed))))
        if not self._layout.last:
            return x if added is None else x + added
        last = None if added is None else added[wanted]
        return self._head(rows.add_norm(x[wanted], last, self._norm, self._eps))

    @torch.inference_mode()
    def layer_work(self, batch: int) -> object:
        """The products of the first layers on `batch` tokens, enough of them to leave the caches; no collective."""
        x = torch.ones(batch, self.hidden_size, dtype=self.dtype, device=self._cos.device)
        for _, layer in self._layers[:8]:
            x = layer.down(layer.gate_up(x)[:, : layer.down.inputs]) + layer.qkv(x).mean()
        return x

    def _attend(
        self, index: int, layer: LayerWeights, normed: Tensor, positions: Tensor, attention: PagedAttention
    ) -> Tensor:
        """What the attention of a layer adds to its input: this rank's term of the sum."""
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


def _look_up(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


def _cuts(config: Any, dim: int, part: Part) -> Cuts:
    """Whole heads, hidden units and vocabulary rows."""
    vocabulary = vocabulary_cut(config.vocab_size, part)
    if part.ranks == 1:
        return Cuts(None, None, None, None, None, None, vocabulary)
    heads, kv_heads = head_counts(config)
    mine, kv_mine = share_heads(heads, kv_heads, part)
    own, kv = rows_of([Block(heads, dim, mine)]), rows_of([Block(kv_heads, dim, kv_mine)])
    hidden = (spread(config.intermediate_size, part),)
    return Cuts(Take(0, own), Take(0, kv), Take(0, hidden), Take(1, own), Take(1, hidden), Once(part), vocabulary)


def _split(part: Part, filled: str) -> str:
    """What is split, for people; empty for one rank."""
    if part.ranks == 1:
        return ""
    return f"attention, MLPs, embedding, head over {part.ranks} ranks; whole on each: norms{filled and f'; {filled}'}"


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
