"""Declarations: what each layer of a `transformers` config stores per request, in the allocator's words.

Owns the table of layer kinds (what `transformers` calls a layer, and which parts that means) and the table of recurrent
families (which tensors their state is made of). Must never read a weight. Invariants: the shapes are those that one of
`tp` tensor ranks stores; a family without a row is refused by name; at boot the declared layers are compared with the
tensors of the loaded model (`check_declared`), so that a wrong row stops the boot instead of corrupting memory.

    attention      K and V planes [kv_heads, head_dim] per token, kept for ever or for a window of tokens
    Mamba-2        conv [heads * head_dim + 2 * groups * d_state, K - 1], scan [heads, head_dim, d_state] float32
    gated delta    conv [2 * k_heads * k_dim + v_heads * v_dim, K - 1], scan [v_heads, k_dim, v_dim] float32
    short conv     conv [hidden, K - 1]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from allocator.decl import MHA, Full, Layer, Part, State, StateLife, StateTensor, Window
from daemon.rank.errors import RankError, UnsupportedModel

TENSOR_RANKS_MAX = 64
SCAN_DTYPE = "float32"
"""Scan states are sums over the whole sequence: they keep float32 whatever the model computes in."""


class Kind(NamedTuple):
    """What a layer kind stores: K/V (`full`, `window` or nothing) and whether it has recurrent state."""

    attention: str
    state: bool


KINDS: dict[str, Kind] = {
    "full_attention": Kind("full", False),
    "sliding_attention": Kind("window", False),
    "linear_attention": Kind("", True),
    "conv": Kind("", True),
    "hybrid": Kind("full", True),
    "dummy": Kind("", False),  # a layer of experts or of an MLP alone
}
"""By the name that `transformers` gives the kind of a layer."""


def layer_types(config: Any) -> list[str]:
    """The kind of each layer, as `transformers` itself decides it for its own caches."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    types, _ = get_layer_types_and_kwargs(config)
    return list(types)


def declare(
    config: Any, dtype_name: str, checkpoint_interval: int, tp: int = 1, split: Container[int] | None = None
) -> list[Layer]:
    """What each layer stores on one of `tp` tensor ranks.

    `config` is a `transformers` config, `dtype_name` the model's dtype. `checkpoint_interval` in tokens; 0: states are
    kept only where a sequence ends, which is a grid of one token. `split`: layers whose attention is split over ranks,
    None for all; the others store all heads on each. Raises UnsupportedModel naming layer and reason.
    """
    life = StateLife(checkpoint_interval or 1)
    layers = []
    for index, name in enumerate(layer_types(config)):
        if name not in KINDS:
            raise UnsupportedModel(
                f"{config.model_type}: layer {index} is {name}, which is not supported; supported: {', '.join(KINDS)}"
            )
        own = config.per_layer_config[index]
        parts: list[Part] = []
        if KINDS[name].attention:
            lifetime = Full() if KINDS[name].attention == "full" else _window(own, index)
            ranks = tp if split is None or index in split else 1
            parts.append(Part(_attention(own, dtype_name, ranks), lifetime))
        if KINDS[name].state:
            parts.append(Part(_state(own, index, name, dtype_name, tp), life))
        layers.append(Layer(tuple(parts)))
    return layers


def _window(config: Any, index: int) -> Window:
    tokens = getattr(config, "sliding_window", None)
    if not tokens:
        raise UnsupportedModel(f"{config.model_type}: layer {index} slides, but the config names no sliding_window")
    return Window(int(tokens))


# --- attention -----------------------------------------------------------------------------------------------------


def _attention(config: Any, dtype_name: str, tp: int) -> MHA:
    heads, kv_heads = head_counts(config)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    _, kv_local = split_heads(config.model_type, "attention heads", heads, kv_heads, tp, fill_up=True)
    return MHA(kv_local, dim, int(getattr(config, "v_head_dim", None) or dim), dtype_name)


def check_tensor_ranks(config: Any, tp: int) -> None:
    """Raise UnsupportedModel where `tp` ranks cannot share what the layers hold, with the numbers that can."""
    try:
        declare(config, "float32", 0, tp)
        return
    except UnsupportedModel as error:
        why = str(error).partition("; tp may be")[0]
    able = []
    for ranks in range(1, TENSOR_RANKS_MAX + 1):
        with contextlib.suppress(UnsupportedModel):
            declare(config, "float32", 0, ranks)
            able.append(str(ranks))
    raise UnsupportedModel(f"--tp {tp}: {why}; --tp may be {', '.join(able)}")


def head_counts(config: Any) -> tuple[int, int]:
    """Query heads and K/V heads of a layer's config."""
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    if not heads:
        raise UnsupportedModel(
            f"{config.model_type}: the config names no num_attention_heads; what it stores is unknown"
        )
    # `multi_query` is how GPT-BigCode says one K/V head.
    kv_heads = int(getattr(config, "num_key_value_heads", None) or (1 if getattr(config, "multi_query", 0) else heads))
    return heads, kv_heads


def split_heads(model: str, what: str, heads: int, groups: int, tp: int, fill_up: bool = False) -> tuple[int, int]:
    """Heads and groups of one of `tp` ranks; groups fewer than ranks are replicated, one on each.

    A group is what several heads share: K/V heads, Mamba's B and C, the key heads of a delta net. With `fill_up` groups
    that do not divide are filled up with heads of zeros, if each rank still has a real one. Raises UnsupportedModel
    with the values of `tp` that are possible.
    """

    def divides(ranks: int) -> bool:
        return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)

    def fills(ranks: int) -> bool:
        return fill_up and ranks < groups and (ranks - 1) * -(-groups // ranks) < groups and heads % groups == 0

    if tp < 1 or not (divides(tp) or fills(tp)):
        able = [ranks for ranks in range(1, heads + 1) if divides(ranks) or fills(ranks)]
        raise UnsupportedModel(
            f"{model}: {heads} {what} in {groups} groups cannot be split over tp={tp}; tp may be "
            f"{', '.join(map(str, able))}"
        )
    if divides(tp):
        return heads // tp, max(groups // tp, 1)
    each = -(-groups // tp)
    return each * (heads // groups), each


# --- recurrent state -----------------------------------------------------------------------------------------------


class Mamba2(NamedTuple):
    """The names under which a family's config keeps the sizes of its Mamba-2 mixer."""

    heads: str
    head_dim: str
    groups: str
    d_state: str
    kernel: str

    def state(self, config: Any, dtype_name: str, tp: int) -> State:
        """Conv and scan state; heads are split over ranks, and groups with them."""
        heads, groups = split_heads(
            config.model_type, "Mamba heads", int(getattr(config, self.heads)), int(getattr(config, self.groups)), tp
        )
        head_dim, d_state = int(getattr(config, self.head_dim)), int(getattr(config, self.d_state))
        channels = heads * head_dim + 2 * groups * d_state
        conv = _conv(config.model_type, channels, int(getattr(config, self.kernel)), dtype_name)
        return State((conv, StateTensor("scan", (heads, head_dim, d_state), SCAN_DTYPE)))


def _delta_state(config: Any, dtype_name: str, tp: int) -> State:
    """Gated delta net: one matrix [k_dim, v_dim] per value head."""
    v_heads, k_heads = split_heads(
        config.model_type, "value heads", int(config.linear_num_value_heads), int(config.linear_num_key_heads), tp
    )
    k_dim, v_dim = int(config.linear_key_head_dim), int(config.linear_value_head_dim)
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    conv = _conv(config.model_type, channels, int(config.linear_conv_kernel_dim), dtype_name)
    return State((conv, StateTensor("scan", (v_heads, k_dim, v_dim), SCAN_DTYPE)))


def _short_conv_state(config: Any, dtype_name: str, tp: int) -> State:
    """The last inputs of a short convolution, nothing else; its channels are split over ranks."""
    channels = int(config.hidden_size)
    if channels % tp:
        raise UnsupportedModel(f"{config.model_type}: {channels} conv channels cannot be split over tp={tp}")
    return State((_conv(config.model_type, channels // tp, int(config.conv_L_cache), dtype_name),))


def _conv(model: str, channels: int, kernel: int, dtype_name: str) -> StateTensor:
    """The K - 1 inputs that a causal convolution of width K still reads."""
    if kernel < 2:
        raise UnsupportedModel(f"{model}: a convolution of width {kernel} keeps no inputs; widths from 2 are supported")
    return StateTensor("conv", (channels, kernel - 1), dtype_name)


StateRule = Callable[[Any, str, int], State]

_MAMBA = Mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_NEMOTRON = Mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")

STATE_RULES: dict[str, StateRule] = {
    "bamba": _MAMBA.state,
    "granitemoehybrid": _MAMBA.state,
    "falcon_h1": _MAMBA.state,
    "nemotron_h": _NEMOTRON.state,
    "qwen3_next": _delta_state,
    "qwen3_5_text": _delta_state,
    "qwen3_5_moe_text": _delta_state,
    "lara_mini": _delta_state,
    "lfm2": _short_conv_state,
    "lfm2_moe": _short_conv_state,
    "lfm3": _short_conv_state,
}
"""Recurrent families by `model_type`."""


def _state(config: Any, index: int, kind: str, dtype_name: str, tp: int) -> State:
    rule = STATE_RULES.get(config.model_type)
    if rule is None:
        raise UnsupportedModel(
            f"{config.model_type}: layer {index} is {kind}; the recurrent state of this family is not implemented. "
            f"Those of {', '.join(STATE_RULES)} are"
        )
    return rule(config, dtype_name, tp)


# --- the check at boot ---------------------------------------------------------------------------------------------


def check_declared(layers: Sequence[Layer], probed: Sequence[Layer]) -> None:
    """Raise RankError for the first layer whose tensors are not what was declared; intervals of state do not count."""
    if len(layers) != len(probed):
        raise RankError(f"{len(layers)} layers are declared from the config, but the loaded model has {len(probed)}")
    for index, (declared, found) in enumerate(zip(layers, probed, strict=True)):
        if _stored(declared) != _stored(found):
            raise RankError(
                f"layer {index}: declared from the config as {describe(declared)}, but the loaded model stores "
                f"{describe(found)}; the memory planned for it would be wrong, so it is not served"
            )


def _stored(layer: Layer) -> list[Part]:
    """The parts in a fixed order, state on a grid of one token."""
    parts = [Part(p.geometry, StateLife(1)) if isinstance(p.geometry, State) else p for p in layer.parts]
    return sorted(parts, key=repr)


def describe(layer: Layer) -> str:
    """What a layer stores, in words: `K/V 8x128 bfloat16 for a window of 1024`."""
    return " and ".join(_describe_part(part) for part in layer.parts) or "nothing"


def _describe_part(part: Part) -> str:
    geometry = part.geometry
    if isinstance(geometry, State):
        tensors = (f"{t.name} {'x'.join(map(str, t.shape))} {t.dtype}" for t in geometry.tensors)
        return f"state ({', '.join(tensors)})"
    assert isinstance(geometry, MHA)
    dims = f"{geometry.k_dim}" if geometry.k_dim == geometry.v_dim else f"({geometry.k_dim}, {geometry.v_dim})"
    kept = f"a window of {part.lifetime.tokens}" if isinstance(part.lifetime, Window) else "every token"
    return f"K/V {geometry.kv_heads}x{dims} {geometry.dtype} for {kept}"
