"""The generic model path: any supported decoder of `transformers`, with our attention, states and memory underneath.

Owns the loading of a rank's part of a model and the ragged forward over it. Must never keep K/V or recurrent state of
its own. The registered attention function receives a ragged batch as one sequence, [1, heads, T, d], stores K and V
into the arena and attends over pages; the mixers of recurrent layers are replaced by ours (`mixers`). Invariant: what a
layer stores is read from the tensors that its attention and its mixer are called with (`probe`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from allocator.decl import Layer
from daemon.rank.convert import quiet_transformers
from daemon.rank.errors import UnsupportedModel
from daemon.rank.group import Group, SoloGroup
from daemon.rank.mixers.table import bind_mixers
from daemon.rank.paged_attention import AttentionSpec, PagedAttention
from daemon.rank.probe import Probe
from daemon.rank.products import Product, can_pack
from daemon.rank.shard.load import load_parts
from daemon.rank.stages import StagePart, move, skeleton, whole
from daemon.rank.states import States

ATTENTION_NAME = "paged_arena"
# Options of an attention call that change its result and are not implemented, unless they are None.
UNKNOWN_OPTIONS = ("position_bias", "indices", "head_mask")
PROBE_TOKENS = 16
SOLO_GROUP = SoloGroup()
# How far a token's logits may be from those in another batch, relative to their norm, by rounding alone.
ALIKE = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}


class Model(Protocol):
    """A rank's part of a loaded model: what it stores per layer, and its forward."""

    name: str  # "native" or "generic"
    dtype: torch.dtype
    layers: list[Layer]  # of the whole model, states on a grid of one token; those of other stages store nothing
    hidden_size: int
    hidden_dtype: torch.dtype  # of the hidden states between stages
    split: str  # what tensor ranks share and what each has, in words
    attending: set[int]  # layers whose attention heads are split over tensor ranks

    def forward(
        self, x: Tensor, positions: Tensor, wanted: Tensor, attention: PagedAttention, states: States
    ) -> Tensor:
        """One stage of a ragged batch of T tokens; `positions` int64[T].

        `x`: tokens int64[T] on the first stage, else hidden states [T, hidden size] of the stage before. Logits
        [len(wanted), vocab] at batch indexes `wanted` int64 on the last stage, else hidden states [T, hidden size].
        """

    def layer_work(self, batch: int) -> object:
        """Work of one real layer's size for `batch` tokens: what thread counts are measured with."""


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged: PagedAttention | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function given to `transformers`: query [1, heads, T, d], key and value [1, kv_heads, T, d] after rope."""
    name = type(module).__name__
    if paged is None:
        raise UnsupportedModel(f"{name} is not handed the ragged batch that the forward passes down")
    if attention_mask is not None:
        raise UnsupportedModel(f"{name} masks keys by rules of its own, which paged attention does not know")
    for option in UNKNOWN_OPTIONS:
        if options.get(option) is not None:
            raise UnsupportedModel(f"{name} asks for {option} in attention, which is not supported yet")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = paged.run(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionSpec(scale, sliding_window or 0, softcap or 0.0, s_aux),
    )
    return out[None], None


def _no_mask(*_: object, **__: object) -> None:
    """The mask function given to `transformers`: causality is the paged attention's."""


def pack_linears(model: torch.nn.Module) -> None:
    """Give the linear layers of a CPU model their packed form (`products`), in place of the plain weights.

    A placeholder without memory keeps each weight's dtype and shape; code that reads more of it fails in the probe.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear and can_pack(module.weight):
            weight, bias = module.weight.detach(), module.bias
            module.forward = Product(weight, None if bias is None else bias.detach())  # type: ignore[assignment]
            module.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)


def _none(name: str) -> bool:
    """Every parameter is this rank's."""
    return False


class GenericModel:
    """A model definition of `transformers`, run on ragged batches."""

    name = "generic"

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = SOLO_GROUP,
        layers: range | None = None,
    ) -> None:
        """`layers`: those of this rank's stage, None for all."""
        quiet_transformers()
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
        self.dtype = dtype
        self._layout = group.layout
        self._device = device
        stage = None if group.layout.stages == 1 else StagePart(skeleton(directory), layers, group.layout)
        foreign = _none if stage is None else stage.foreign
        self._model, sharding = load_parts(directory, dtype, ATTENTION_NAME, group.layout, foreign)
        move(self._model, device)
        bind_mixers(self._model)
        pack_linears(self._model)
        sharding.join(group)
        self._run = whole(self._model) if stage is None else stage.bind(self._model)
        self.split = sharding.described()
        self.attending = sharding.attending
        self.hidden_size = int(self._model.config.hidden_size)
        self.hidden_dtype = dtype
        group.meet("the weights are loaded")
        self.layers = self._probe()

    def _probe(self) -> list[Layer]:
        """What the layers store; raises UnsupportedModel when a token's neighbours in the batch change its logits."""
        config = self._model.config
        probe, again = Probe(), Probe()
        index = torch.arange(PROBE_TOKENS, device=self._device)
        x = 1 + index % (config.vocab_size - 1)
        if not self._layout.first:  # any hidden states, each token's its own
            x = torch.sin(x[:, None] * (1.0 + torch.arange(self.hidden_size, device=self._device))).to(self.dtype)
        positions = (index * 37 + 5) % min(64, getattr(config, "max_position_embeddings", 0) or 64)
        out = self.forward(x, positions, index, probe, probe)
        if not self._layout.last:
            self.hidden_dtype = out.dtype
        first = out.float()
        # The same tokens in another order, without one: experts see as many, so that hardly a bit differs.
        order = index.flip(0)[1:]
        second = self.forward(x[order], positions[order], index[:-1], again, again).float()
        changed = (second - first[order]).norm(dim=1) > ALIKE[self.dtype] * first[order].norm(dim=1)
        if 2 * int(changed.sum()) > len(order):  # a few may differ where rounding made a router choose otherwise
            raise UnsupportedModel(
                f"{config.model_type}: outside its attention a token's output depends on where in the batch it stands; "
                "only models that read each token's own position, and mix tokens in attention and mixers alone, can run"
            )
        return probe.layers(config.num_hidden_layers)

    @torch.inference_mode()
    def forward(
        self, x: Tensor, positions: Tensor, wanted: Tensor, attention: PagedAttention, states: States
    ) -> Tensor:
        """Logits [len(wanted), vocab] at batch indexes `wanted`, or the stage's hidden states [T, hidden size]."""
        return self._run(
            x,
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            paged=attention,
            states=states,
        )

    @torch.inference_mode()
    def layer_work(self, batch: int) -> object:
        """A few forwards' worth of work: the whole stage on `batch` positions of one row, nothing stored."""
        tokens = torch.zeros(batch, dtype=torch.int64, device=self._device)
        hidden = torch.zeros(batch, self.hidden_size, dtype=self.hidden_dtype, device=self._device)
        x = tokens if self._layout.first else hidden
        return self.forward(x, torch.arange(batch, device=self._device), tokens[:1], Probe(), Probe())
