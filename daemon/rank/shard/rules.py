"""Rules: how one module of a model is split over tensor ranks, as plain data, and putting a rule into force.

Owns what a rule may say: cuts of tensors, sizes that the module keeps in attributes, outputs that are summed, norms
over what several ranks hold. Must never decide how a family is split: rooms beside it do, by structure or class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from daemon.rank.group import Group
from daemon.rank.shard.cuts import Cut, Once, Part, Range, Take
from daemon.rank.shard.norms import Spread, spread_norm


class Rule(NamedTuple):
    """How one module is split. Names are those of its tensors, attributes and children, dotted, as seen from it.

    `sizes`: attributes that take a rank's own value, where the module has them. `config`: the same for the config that
    a module reads while it runs. `summed`: children (empty name: the module) whose outputs are partial sums. `norms`:
    children that normalize over what neighbouring ranks hold together. `filled`: what was filled up, in words.
    """

    what: str
    cuts: Mapping[str, Cut]
    sizes: Mapping[str, int | None] = {}
    config: Mapping[str, int] = {}
    summed: tuple[str, ...] = ()
    norms: Mapping[str, Spread] = {}
    filled: str = ""


def fit(module: nn.Module, rule: Rule) -> None:
    """Set the sizes, the config and the buffers of a module whose parameters have been cut."""
    for name, size in rule.sizes.items():
        owner, attribute = _owner(module, name)
        if hasattr(owner, attribute):
            setattr(owner, attribute, size)
    if rule.config and hasattr(module, "config"):
        own: Any = copy.copy(module.config)
        for name, value in rule.config.items():
            if hasattr(own, name):
                setattr(own, name, value)
        module.config = own
    for name, buffer in dict(module.named_buffers()).items():
        if name in rule.cuts:
            owner, attribute = _owner(module, name)
            setattr(owner, attribute, rule.cuts[name](buffer))


def join(module: nn.Module, rule: Rule, group: Group, part: Part) -> None:
    """Let the module's forward use the group; its children have their final forwards."""
    for name in rule.summed:
        child = module.get_submodule(name)
        child.forward = _summed(child.forward, group)
    for name, spread in rule.norms.items():
        if spread.ranks > 1:
            child = module.get_submodule(name)
            child.forward = spread_norm(child, spread, group, part)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _summed(inner: Callable[..., Tensor], group: Group) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return group.all_reduce(inner(*args, **kwargs).contiguous())

    return forward


def linear(module: nn.Module, name: str) -> nn.Linear | None:
    """A child that is a plain linear layer, or None."""
    child = getattr(module, name, None)
    return child if type(child) is torch.nn.Linear else None


def with_weights(module: nn.Module) -> set[str]:
    """Names of the direct children that hold parameters."""
    return {name for name, child in module.named_children() if any(True for _ in child.parameters())}


def own_weights(module: nn.Module) -> set[str]:
    """Names of the parameters that the module itself holds."""
    return {name for name, _ in module.named_parameters(recurse=False)}


def output_rows(module: nn.Module, name: str, cut: Take) -> dict[str, Cut]:
    """Cuts of some outputs of a child with a weight [outputs, ...] and perhaps a bias."""
    child: Any = getattr(module, name)
    cuts: dict[str, Cut] = {f"{name}.weight": cut}
    if child.bias is not None:
        cuts[f"{name}.bias"] = cut
    return cuts


def input_columns(module: nn.Module, name: str, ranges: tuple[Range, ...], part: Part) -> dict[str, Cut]:
    """Cuts of some inputs of a linear child whose outputs are summed over ranks."""
    child: Any = getattr(module, name)
    cuts: dict[str, Cut] = {f"{name}.weight": Take(1, ranges)}
    if child.bias is not None:
        cuts[f"{name}.bias"] = Once(part)
    return cuts
