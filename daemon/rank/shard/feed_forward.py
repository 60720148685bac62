"""Feed-forward layers by their hidden units: each tensor rank computes some, and the outputs are summed.

Owns the rules for MLPs and for stacked experts, by their structure. Hidden units need not divide: parts may differ.
Must never match a module that mixes hidden units (a norm between, a weight of its own): that one stays whole.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from daemon.rank.shard.cuts import Block, Cut, Once, Part, Take, rows_of, spread
from daemon.rank.shard.rules import Rule, input_columns, linear, output_rows, own_weights, with_weights

MLPS: tuple[tuple[tuple[str, ...], str, int], ...] = (
    (("gate_proj", "up_proj"), "down_proj", 1),
    (("w1", "w3"), "w2", 1),
    (("linear", "linear_v"), "linear_1", 1),
    (("up_proj",), "down_proj", 1),
    (("fc1",), "fc2", 1),
    (("c_fc",), "c_proj", 1),
    (("dense_h_to_4h",), "dense_4h_to_h", 1),
    (("gate_up_proj",), "down_proj", 2),
    (("input_linear",), "output_linear", 2),
)
"""Input layers, the output layer, and how many values an input layer makes of each hidden unit, one half behind the
other."""
SIZES = ("intermediate_size", "intermediate_dim", "ffn_dim", "expert_dim")


def mlp_rule(module: nn.Module, part: Part) -> Rule | None:
    """The rule of an MLP of plain linear layers; None for any other module."""
    children = with_weights(module)
    if own_weights(module):
        return None
    for inputs, output, times in MLPS:
        if children != {*inputs, output} or any(linear(module, name) is None for name in children):
            continue
        down: Any = linear(module, output)
        hidden = down.in_features
        if any(getattr(module, name).out_features != times * hidden for name in inputs):
            return None
        mine = spread(hidden, part)
        cuts = input_columns(module, output, (mine,), part)
        for name in inputs:
            cuts |= output_rows(module, name, Take(0, rows_of([Block(hidden, 1, mine)] * times)))
        return Rule("MLPs", cuts, dict.fromkeys(SIZES, mine[1] - mine[0]), summed=(output,))
    return None


def experts_rule(module: nn.Module, part: Part) -> Rule | None:
    """The rule of experts stacked in tensors [experts, ...], as `transformers` marks them; None for any other."""
    own: Any = module
    marks = [getattr(own, name, None) for name in ("is_concatenated", "is_transposed", "has_gate", "has_bias")]
    if any(type(mark) is not bool for mark in marks) or getattr(own, "has_post_expert_norm", False):
        return None
    concatenated, transposed, has_gate, has_bias = marks
    up = "gate_up_proj" if has_gate else "up_proj"
    biases = {f"{up}_bias", "down_proj_bias"} if has_bias else set()
    if own_weights(module) != {up, "down_proj"} | biases or with_weights(module):
        return None
    rows = 1 if transposed else 2  # of the down projection: where its hidden units are
    hidden = int(own.down_proj.shape[rows])
    times = 2 if has_gate else 1
    if int(getattr(own, up).shape[3 - rows]) != times * hidden:
        return None
    mine = spread(hidden, part)
    if has_gate and not concatenated:
        ranges = rows_of([Block(hidden, 2, mine)])
    else:
        ranges = rows_of([Block(hidden, 1, mine)] * times)
    cuts: dict[str, Cut] = {up: Take(3 - rows, ranges), "down_proj": Take(rows, (mine,))}
    if has_bias:
        cuts |= {f"{up}_bias": Take(1, ranges), "down_proj_bias": Once(part)}
    return Rule("experts", cuts, dict.fromkeys(SIZES, mine[1] - mine[0]), summed=("",))
