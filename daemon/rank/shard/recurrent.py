"""Recurrent mixers by heads or channels: each tensor rank keeps the state of its own heads.

Owns the rules of the mixer classes that have a forward of ours (`mixers.table`). Groups that several heads share (B and
C of Mamba-2, key heads of a delta net) are split with the heads, or kept by every rank that has a head of theirs.

    Mamba-2        in [gate | x | B | C | dt], conv [x | B | C]
    gated delta    in qkv [q | k | v], z, b, a; or for each key head [q | k | v | z] and [b | a]; conv [q | k | v]
    short conv     in [B | C | x], each of the hidden size
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from daemon.rank.declare import split_heads
from daemon.rank.errors import UnsupportedModel
from daemon.rank.shard.cuts import Block, Part, Range, Take, rows_of, share
from daemon.rank.shard.norms import GATED, Spread
from daemon.rank.shard.rules import Rule, input_columns, linear, output_rows, own_weights


def mamba2_rule(module: nn.Module, model: str, part: Part) -> Rule:
    """Heads with their groups."""
    own: Any = module
    heads, groups, width, state = own.num_heads, own.n_groups, own.head_dim, own.ssm_state_size
    local, groups_local = split_heads(model, "Mamba heads", heads, groups, part.ranks)
    mine, group = share(heads, part), share(groups, part)
    values = Block(heads, width, mine)
    shared = [Block(groups, state, group)] * 2
    whole_in = Take(0, rows_of([values, values, *shared, Block(heads, 1, mine)]))
    conv, per_head, inner = Take(0, rows_of([values, *shared])), Take(0, (mine,)), Take(0, rows_of([values]))
    cuts = output_rows(module, "in_proj", whole_in) | output_rows(module, "conv1d", conv)
    cuts |= input_columns(module, "out_proj", inner.ranges, part)
    cuts |= dict.fromkeys(("A_log", "D", "dt_bias"), per_head)
    cuts["mup_vector"] = Take(2, whole_in.ranges)  # a buffer of falcon_h1
    sizes = {
        "num_heads": local,
        "n_groups": groups_local,
        "intermediate_size": local * width,
        "conv_dim": conv.size,
        "groups_time_state_size": groups_local * state,
    }
    norm = getattr(own, "norm", None)
    norms: dict[str, Spread] = {}
    if norm is not None and own_weights(norm):
        if type(norm).__name__ not in GATED:
            raise UnsupportedModel(f"{model}: tensor ranks cannot share the norm {type(norm).__name__}; use --tp 1")
        cuts["norm.weight"] = inner
        sizes["norm.n_groups"] = groups_local
        norms["norm"] = Spread(max(part.ranks // groups, 1))
    return Rule("Mamba-2 mixers", cuts, sizes, summed=("out_proj",), norms=norms)


def delta_rule(module: nn.Module, model: str, part: Part) -> Rule:
    """Value heads with their key heads."""
    own: Any = module
    heads, groups, k_dim, v_dim = own.num_v_heads, own.num_k_heads, own.head_k_dim, own.head_v_dim
    local, groups_local = split_heads(model, "value heads", heads, groups, part.ranks)
    mine, group = share(heads, part), share(groups, part)
    keys, values = Block(groups, k_dim, group), Block(heads, v_dim, mine)
    qkv, inner = Take(0, rows_of([keys, keys, values])), rows_of([values])
    if linear(module, "in_proj_qkvz") is not None:
        cuts = output_rows(module, "in_proj_qkvz", Take(0, _by_key_head((k_dim, k_dim), (v_dim, v_dim), own, part)))
        cuts |= output_rows(module, "in_proj_ba", Take(0, _by_key_head((), (1, 1), own, part)))
    else:
        cuts = output_rows(module, "in_proj_qkv", qkv) | output_rows(module, "in_proj_z", Take(0, inner))
        for name in ("in_proj_b", "in_proj_a"):
            cuts |= output_rows(module, name, Take(0, (mine,)))
    cuts |= output_rows(module, "conv1d", qkv) | input_columns(module, "out_proj", inner, part)
    cuts |= dict.fromkeys(("A_log", "dt_bias"), Take(0, (mine,)))
    key_dim, value_dim = groups_local * k_dim, local * v_dim
    sizes = {
        "num_v_heads": local,
        "num_k_heads": groups_local,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "conv_dim": 2 * key_dim + value_dim,
    }
    return Rule("gated delta nets", cuts, sizes, summed=("out_proj",))


def _by_key_head(whole: tuple[int, ...], split: tuple[int, ...], own: Any, part: Part) -> tuple[Range, ...]:
    """Ranges in rows that are grouped by key head: of each, blocks of `whole` elements for the key head itself, then
    blocks of `split` elements for each of its value heads."""
    groups, each = own.num_k_heads, own.num_v_heads // own.num_k_heads
    sharing = max(part.ranks // groups, 1)  # ranks that have value heads of the same key head
    mine = share(each, Part(part.rank % sharing, sharing))
    blocks = [Block(1, width, (0, 1)) for width in whole] + [Block(each, width, mine) for width in split]
    size = sum(block.units * block.width for block in blocks)
    first, end = share(groups, part)
    return tuple((at * size + a, at * size + b) for at in range(first, end) for a, b in rows_of(blocks))


def short_conv_rule(module: nn.Module, model: str, part: Part) -> Rule:
    """Channels."""
    own: Any = module
    channels = int(own.conv.weight.shape[0])
    if channels % part.ranks:
        raise UnsupportedModel(f"{model}: {channels} conv channels cannot be split over tp={part.ranks}")
    mine = share(channels, part)
    cuts = output_rows(module, "in_proj", Take(0, rows_of([Block(channels, 1, mine)] * 3)))
    cuts |= output_rows(module, "conv", Take(0, (mine,))) | input_columns(module, "out_proj", (mine,), part)
    return Rule("short convolutions", cuts, summed=("out_proj",))


RecurrentRule = Callable[[nn.Module, str, Part], Rule]

RECURRENT: dict[str, RecurrentRule] = {
    "BambaMixer": mamba2_rule,
    "GraniteMoeHybridMambaLayer": mamba2_rule,
    "NemotronHMamba2Mixer": mamba2_rule,
    "FalconH1Mixer": mamba2_rule,
    "Qwen3NextGatedDeltaNet": delta_rule,
    "Qwen3_5GatedDeltaNet": delta_rule,
    "Qwen3_5MoeGatedDeltaNet": delta_rule,
    "LaraMiniGatedDeltaNet": delta_rule,
    "Lfm2ShortConv": short_conv_rule,
    "Lfm2MoeShortConv": short_conv_rule,
    "Lfm3ShortConv": short_conv_rule,
}
"""By the name of the module's class, for every class of `mixers.table`."""
