"""Attention by heads: each tensor rank has some of the query heads and the K/V heads that they read.

Owns the rule for attention modules, by their structure: separate or joined projections, norms of heads or of whole
projections, a gate, sinks. Must never match a module with a weight that it does not know: that one stays whole.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from daemon.rank.declare import head_counts, split_heads
from daemon.rank.shard.cuts import Block, Cut, Part, Range, Take, rows_of, share_heads
from daemon.rank.shard.norms import PLAIN, Spread
from daemon.rank.shard.rules import Rule, input_columns, linear, output_rows, own_weights, with_weights

SEPARATE = ("q_proj", "k_proj", "v_proj")
JOINED = "qkv_proj"
BY_HEAD = "query_key_value"  # joined too, but Q, K and V of each head lie together
BY_HEAD_CLASSES = ("GPTNeoXAttention", "PersimmonAttention")
OUTPUTS = ("o_proj", "out_proj", "dense")
QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm")
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")
GATES = ("g_proj", "gate_proj")  # one value, or one row, for each query head
SINKS = "sinks"


def attention_rule(module: nn.Module, config: Any, part: Part) -> Rule | None:
    """The rule of an attention module; None for any other. Raises UnsupportedModel where heads do not divide."""
    children = with_weights(module)
    output = next((name for name in OUTPUTS if name in children), None)
    inputs = next(((name,) for name in (JOINED, BY_HEAD) if name in children), SEPARATE)
    known = {*inputs, output, *GATES, *QUERY_NORMS, *KEY_NORMS}
    layer = getattr(module, "layer_idx", None)
    if layer is None or output is None or not set(inputs) <= children <= known or own_weights(module) - {SINKS}:
        return None
    if any(linear(module, name) is None for name in (*inputs, output, *GATES) if name in children):
        return None
    own = config.per_layer_config[layer]
    heads, kv_heads = head_counts(own)
    local, kv_local = split_heads(config.model_type, "attention heads", heads, kv_heads, part.ranks, fill_up=True)
    cuts = _projections(module, inputs, heads, kv_heads, part)
    norms = _norms(module, children, heads, kv_heads, part)
    if cuts is None or norms is None:
        return None
    mine, _ = share_heads(heads, kv_heads, part)
    taken = rows_of([Block(heads, getattr(module, output).in_features // heads, mine)])
    cuts |= norms[0] | input_columns(module, output, taken, part)
    for gate in set(GATES) & children:
        if getattr(module, gate).out_features % heads:
            return None
        cuts |= _heads(module, gate, heads, mine)
    if SINKS in own_weights(module):
        cuts[SINKS] = Take(0, rows_of([Block(heads, 1, mine)]))
    sizes = {"num_heads": local, "num_attention_heads": local, "num_key_value_heads": kv_local}
    return Rule("attention", cuts, sizes, sizes, (output,), norms[1], filled_up(kv_heads, kv_local, part))


def filled_up(kv_heads: int, local: int, part: Part) -> str:
    """What was filled up, in words; empty where heads divide."""
    total = local * part.ranks
    return f"K/V heads filled up from {kv_heads} to {total}" if part.ranks < kv_heads < total else ""


def _projections(
    module: nn.Module, inputs: tuple[str, ...], heads: int, kv_heads: int, part: Part
) -> dict[str, Cut] | None:
    mine, kv_mine = share_heads(heads, kv_heads, part)
    if inputs == SEPARATE:
        counts = (heads, kv_heads, kv_heads)
        cuts: dict[str, Cut] = {}
        for name, units, own in zip(inputs, counts, (mine, kv_mine, kv_mine), strict=True):
            if getattr(module, name).out_features % units:
                return None
            cuts |= _heads(module, name, units, own)
        return cuts
    if inputs == (BY_HEAD,):
        whole = type(module).__name__ not in BY_HEAD_CLASSES or heads != kv_heads
        return None if whole else _heads(module, BY_HEAD, heads, mine)
    outputs = int(getattr(module, JOINED).out_features)
    if outputs % (heads + 2 * kv_heads):
        return None  # heads of K and V of other sizes
    width = outputs // (heads + 2 * kv_heads)
    blocks = (Block(heads, width, mine), Block(kv_heads, width, kv_mine), Block(kv_heads, width, kv_mine))
    return output_rows(module, JOINED, Take(0, rows_of(blocks)))


def _heads(module: nn.Module, name: str, units: int, own: Range) -> dict[str, Cut]:
    """The outputs of a projection that belong to the units `own`."""
    width = getattr(module, name).out_features // units
    return output_rows(module, name, Take(0, rows_of([Block(units, width, own)])))


def _norms(
    module: nn.Module, children: set[str], heads: int, kv_heads: int, part: Part
) -> tuple[dict[str, Cut], dict[str, Spread]] | None:
    """Cuts and spread norms of the norms of Q and K; None for one that is not understood."""
    cuts: dict[str, Cut] = {}
    spread: dict[str, Spread] = {}
    mine, kv_mine = share_heads(heads, kv_heads, part)
    for names, units, own in ((QUERY_NORMS, heads, mine), (KEY_NORMS, kv_heads, kv_mine)):
        for name in set(names) & children:
            norm: Any = getattr(module, name)
            if not {"weight"} <= own_weights(norm) <= {"weight", "bias"}:
                return None
            shape = tuple(norm.weight.shape)
            width = _head_width(module, units, name in QUERY_NORMS)
            if shape == (width,):
                continue  # of one head: whole
            if "bias" in own_weights(norm):
                return None
            if shape == (units, width):
                cuts[f"{name}.weight"] = Take(0, rows_of([Block(units, 1, own)]))
            elif shape == (units * width,) and type(norm).__name__ in PLAIN:
                cuts[f"{name}.weight"] = Take(0, rows_of([Block(units, width, own)]))
                filled = max((own[1] - own[0]) * part.ranks / units, 1.0) if units > part.ranks else 1.0
                spread[name] = Spread(part.ranks, filled)
            else:
                return None
    return cuts, spread


def _head_width(module: nn.Module, units: int, query: bool) -> int:
    own: Any = module
    layer = linear(module, SEPARATE[0] if query else SEPARATE[1])
    if layer is None or getattr(own, "head_dim", None):
        return int(own.head_dim)
    return layer.out_features // units
