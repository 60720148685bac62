"""One stage of a `transformers` model: what of it a rank holds, and the way through its layers only.

Owns which parameters are foreign, and the forwards of the layers at the stage's edges. Must never change what a layer
computes. The model keeps its full list of layers, since many definitions read their config by a layer's place in it;
foreign ones have no memory and hand on what they get. What a definition does before its layers, like scaling its
embeddings, does not reach a later stage: the first local layer is given what the stage before sent; and the forward
ends with the last local layer, so nothing after it runs. Invariant: a foreign parameter is never on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from daemon.rank.errors import UnsupportedModel
from daemon.rank.layout import Layout
from daemon.rank.shard.load import LOADING

Run = Callable[..., Tensor]
"""A forward: `x`, tokens int64[T] on the first stage, else hidden states [T, hidden size] of the stage before, and by
name what the model's own forward takes. Logits [n, vocab] on the last stage, else hidden states [T, hidden size]."""


def skeleton(directory: Path) -> nn.Module:
    """The model of a directory without its weights, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with LOADING, torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def whole(model: nn.Module) -> Run:
    """The forward of a model that is one stage."""

    def run(x: Tensor, **named: Any) -> Tensor:
        logits: Tensor = model(input_ids=x[None], **named).logits[0]
        return logits

    return run


class StageDone(Exception):
    """The last local layer of a stage that is not the last one has run; `hidden` [T, hidden size]."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the stage's last layer has run")
        self.hidden = hidden


class WrongForm(Exception):
    """A layer was given something that is no hidden state, because the layers before it hand on in another form."""


class StagePart:
    """The `layers` of a model that a rank of a layout holds; made before any weight is read."""

    def __init__(self, bare: nn.Module, layers: range | None, layout: Layout) -> None:
        """`bare`: the model's `skeleton`. Raises UnsupportedModel for one whose layers are not found."""
        assert layers is not None, "a stage has layers of its own"
        self.layers = layers
        self.layout = layout
        self._path = layers_path(bare)
        count = len(_layers(bare, self._path))
        assert 0 <= layers.start < layers.stop <= count, f"layers {layers} of {count}"
        kept = set(layers)
        self._foreign = [f"{self._path}.{index}." for index in range(count) if index not in kept]
        embed, head = _name_of(bare, "get_input_embeddings"), _name_of(bare, "get_output_embeddings")
        tied = head != "" and bare.get_parameter(f"{embed}.weight") is bare.get_parameter(f"{head}.weight")
        if not layout.first and not (layout.last and tied):
            self._foreign.append(f"{embed}.")
        if not layout.last and head and not (tied and layout.first):
            self._foreign.append(f"{head}.")

    def foreign(self, name: str) -> bool:
        """Whether the parameter or buffer of this name belongs to other stages only."""
        return name.startswith(tuple(self._foreign))

    def bind(self, model: nn.Module) -> Run:
        """Put the edges in place in the loaded model; returns its forward."""
        return _Stage(model, _layers(model, self._path), self)


class _Stage:
    """The forward through the local layers."""

    def __init__(self, model: nn.Module, layers: nn.ModuleList, part: StagePart) -> None:
        self._model = model
        self._layout = part.layout
        self._pairs = False  # whether layers hand on (hidden, something) instead of hidden
        self._received: Tensor | None = None
        here = set(part.layers)
        for index, layer in enumerate(layers):
            if index not in here:
                layer.forward = self._hand_on
        first, last = layers[part.layers.start], layers[part.layers.stop - 1]
        if not part.layout.first:
            first.forward = self._entering(first.forward)
        if not part.layout.last:
            last.forward = self._leaving(last.forward)

    def __call__(self, x: Tensor, **named: Any) -> Tensor:
        try:
            return self._run(x, named)
        except (WrongForm, IndexError, TypeError, ValueError):
            if self._pairs or self._layout.first:
                raise
            self._pairs = True  # learnt once, in the first forward
            return self._run(x, named)

    def _run(self, x: Tensor, named: dict[str, Any]) -> Tensor:
        given = {"input_ids": x[None]} if self._layout.first else {"inputs_embeds": x[None]}
        self._received = None if self._layout.first else x[None]
        try:
            logits: Tensor = self._model(**given, **named).logits[0]
        except StageDone as done:
            return done.hidden
        finally:
            self._received = None
        assert self._layout.last, "the stage's last layer has not run"
        return logits

    def _hand_on(self, hidden_states: Any, *_: Any, **__: Any) -> Any:
        """The forward of a foreign layer."""
        return (hidden_states, None) if self._pairs else hidden_states

    def _entering(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The first local layer: it reads what was received, whatever the layers before made of it."""

        def enter(hidden_states: Any, *given: Any, **named: Any) -> Any:
            received = self._received
            assert received is not None, "the stage's first layer runs without what the stage before sent"
            if not isinstance(hidden_states, Tensor) or hidden_states.shape != received.shape:
                raise WrongForm
            return forward(received, *given, **named)

        return enter

    def _leaving(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The last local layer: its output is the stage's."""

        def leave(*given: Any, **named: Any) -> Any:
            out = forward(*given, **named)
            hidden = out if isinstance(out, Tensor) else out[0]
            raise StageDone(hidden[0])

        return leave


def layers_path(model: nn.Module) -> str:
    """The name of the model's list of decoder layers; raises UnsupportedModel where no single list has them all."""
    config: Any = model.config
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    found = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(found) != 1:
        raise UnsupportedModel(
            f"{config.model_type}: its {config.num_hidden_layers} layers cannot be told apart from the rest "
            f"({len(found)} lists of modules have that length), so it runs on one stage only; pass --pp 1"
        )
    return found[0]


def _layers(model: nn.Module, path: str) -> nn.ModuleList:
    layers = model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList), f"{path} is {type(layers).__name__}"
    return layers


def _name_of(model: nn.Module, getter: str) -> str:
    """The name of the module that a getter of the model returns; empty when it returns none."""
    wanted = getattr(model, getter)()
    return next((name for name, module in model.named_modules() if module is wanted), "")


def move(model: nn.Module, device: torch.device) -> None:
    """Put everything that is held on a device; what is foreign stays without memory."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
