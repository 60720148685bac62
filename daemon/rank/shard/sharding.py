"""Sharding: which rule each module of a loaded model falls under, and which parameters stay whole.

Owns the plan of one rank. Must never guess: a module that no rule knows is replicated, its storage with it, and said so
(`described`). Invariants: all ranks of a stage make the same plan from the same model definition; the plan is made from
shapes alone, before a weight is read.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor, nn

from daemon.rank.group import Group
from daemon.rank.layout import Layout
from daemon.rank.shard.attention import attention_rule
from daemon.rank.shard.cuts import Cut, Part, Take
from daemon.rank.shard.feed_forward import experts_rule, mlp_rule
from daemon.rank.shard.recurrent import RECURRENT
from daemon.rank.shard.rules import Rule, fit, join
from daemon.rank.shard.vocabulary import embed, gathered_logits, vocabulary_cut


class Ruled(NamedTuple):
    """A module and its rule."""

    module: nn.Module
    rule: Rule


class Sharding:
    """The part of a `transformers` model that one tensor rank holds."""

    def __init__(self, model: Any, layout: Layout) -> None:
        self._part = Part(layout.rank, layout.ranks)
        self._ruled: list[Ruled] = []
        self._cuts: dict[str, Cut] = {}
        self._embedding: tuple[Any, Take] | None = None
        self._head: tuple[Any, Take, int] | None = None
        self._whole: Counter[str] = Counter()  # elements, by what holds them
        self._all = 0
        self.attending: set[int] = set()
        """Layers whose attention is split; the others, if they attend, store all K/V heads on every rank."""
        if layout.ranks > 1:
            self._plan(model)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of the parameter `name`."""
        known = self._cuts.get(name)
        return tensor if known is None else known(tensor)

    def fit(self, model: nn.Module) -> None:
        """Set the sizes that modules keep beside their weights; before mixers are bound."""
        for module, rule in self._ruled:
            fit(module, rule)
        if self._embedding is not None:
            self._embedding[0].padding_idx = None  # of training; it may lie outside a part

    def join(self, group: Group) -> None:
        """Put the collectives in place; behind all other changes of forwards."""
        for module, rule in self._ruled:
            join(module, rule, group, self._part)
        if self._embedding is not None:
            module, cut = self._embedding
            module.forward = embed(module.forward, cut, group)
        if self._head is not None:
            module, _, rows = self._head
            module.forward = gathered_logits(module.forward, rows, group)

    def described(self) -> str:
        """What is split and what is not, for people; empty for one rank."""
        if self._part.ranks == 1:
            return ""
        split = sorted({rule.what for _, rule in self._ruled})
        split += [name for name, has in (("embedding", self._embedding), ("head", self._head)) if has is not None]
        whole = ", ".join(name for name, _ in self._whole.most_common())
        filled = "".join(sorted({f"; {rule.filled}" for _, rule in self._ruled if rule.filled}))
        return (
            f"{', '.join(split) or 'nothing'} over {self._part.ranks} ranks; whole on each: {whole or 'nothing'} "
            f"({100 * self._whole.total() / max(self._all, 1):.1f} % of the weights){filled}"
        )

    # --- the plan ---------------------------------------------------------------------------------------------------

    def _plan(self, model: Any) -> None:
        config, under = model.config, ""
        for name, module in model.named_modules():
            if under and name.startswith(under):
                continue
            rule = self._rule(module, config)
            if rule is None:
                continue
            under = f"{name}."
            self._ruled.append(Ruled(module, rule))
            self._cuts |= {f"{name}.{tensor}": cut for tensor, cut in rule.cuts.items()}
            if rule.what == "attention":
                self.attending.add(int(module.layer_idx))
        self._plan_vocabulary(model)
        self._weigh(model)

    def _rule(self, module: nn.Module, config: Any) -> Rule | None:
        recurrent = RECURRENT.get(type(module).__name__)
        if recurrent is not None:
            return recurrent(module, config.model_type, self._part)
        return (
            attention_rule(module, config, self._part)
            or experts_rule(module, self._part)
            or mlp_rule(module, self._part)
        )

    def _plan_vocabulary(self, model: Any) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if isinstance(embedding, nn.Embedding):
            cut = vocabulary_cut(embedding.weight.shape[0], self._part)
            self._embedding = (embedding, cut)
            self._cuts[f"{names[id(embedding)]}.weight"] = cut
        if type(head) is nn.Linear:
            rows = head.weight.shape[0]
            cut = vocabulary_cut(rows, self._part)
            self._head = (head, cut, rows)
            self._cuts[f"{names[id(head)]}.weight"] = cut
            if head.bias is not None:
                self._cuts[f"{names[id(head)]}.bias"] = cut

    def _weigh(self, model: nn.Module) -> None:
        """Count what stays whole."""
        modules = dict(model.named_modules())
        for name, parameter in model.named_parameters():
            self._all += parameter.numel()
            if name not in self._cuts:
                path = name.rpartition(".")[0]
                kind = type(modules[path])
                self._whole[path.rpartition(".")[2] if kind is nn.Linear else kind.__name__] += parameter.numel()
