"""Declarations: what each layer of a model stores per request, as plain data.

Owns geometries (what a unit of it looks like), lifetimes (how long it is kept) and their validation. Must never know
the name of a model: a rank fills these in from the model's own configuration and its shard's actual shapes. A layer may
have several parts (attention and state together).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allocator.errors import DeclarationError

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}
"""Element sizes by dtype name, as torch spells them."""


def dtype_bytes(name: str) -> int:
    """Bytes of one element; raises DeclarationError for a dtype that cannot be stored."""
    if name not in DTYPE_BYTES:
        raise DeclarationError(f"dtype {name!r} cannot be stored; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


# --- geometries ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MHA:
    """Keys and values per token: a K plane [kv_heads, k_dim] and a V plane [kv_heads, v_dim], local to the rank."""

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class MLA:
    """A compressed latent per token with its rotary part: one plane [latent_dim + rope_dim]."""

    latent_dim: int
    rope_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent state, whole, local to the rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class State:
    """Recurrent state of one layer for one request: named tensors."""

    tensors: tuple[StateTensor, ...]


# --- lifetimes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Full:
    """Kept for every token until the request ends."""


@dataclass(frozen=True, slots=True)
class Window:
    """Kept while a later token may still attend to it: the token itself and the `tokens` - 1 before it."""

    tokens: int


@dataclass(frozen=True, slots=True)
class StateLife:
    """One working slot per request; checkpoints of it on a grid of `checkpoint_interval` tokens."""

    checkpoint_interval: int


Geometry = MHA | MLA | State
Lifetime = Full | Window | StateLife


@dataclass(frozen=True, slots=True)
class Part:
    """One thing a layer stores, and for how long."""

    geometry: Geometry
    lifetime: Lifetime


@dataclass(frozen=True, slots=True)
class Layer:
    """All a layer stores; no parts: a layer without per-request memory."""

    parts: tuple[Part, ...] = ()


def check_layers(layers: Sequence[Layer]) -> None:
    """Raises DeclarationError, naming the layer, for a declaration that cannot be laid out."""
    intervals: set[int] = set()
    for index, layer in enumerate(layers):
        lifetimes = [part.lifetime for part in layer.parts]
        if len(set(lifetimes)) != len(lifetimes):
            raise DeclarationError(f"layer {index} declares two parts of one lifetime; join them into one part")
        for part in layer.parts:
            _check_part(index, part)
            if isinstance(part.lifetime, StateLife):
                intervals.add(part.lifetime.checkpoint_interval)
    if len(intervals) > 1:
        raise DeclarationError(f"layers declare checkpoint intervals {sorted(intervals)}; one interval serves all")


def _check_part(index: int, part: Part) -> None:
    geometry, lifetime = part.geometry, part.lifetime
    if isinstance(geometry, State) != isinstance(lifetime, StateLife):
        raise DeclarationError(f"layer {index}: state lives by StateLife, and only state does")
    numbers: dict[str, int] = {}
    if isinstance(geometry, MHA):
        numbers = {"kv_heads": geometry.kv_heads, "k_dim": geometry.k_dim, "v_dim": geometry.v_dim}
        dtype_bytes(geometry.dtype)
    elif isinstance(geometry, MLA):
        numbers = {"latent_dim": geometry.latent_dim}
        if geometry.rope_dim < 0:
            raise DeclarationError(f"layer {index}: rope_dim must be at least 0, not {geometry.rope_dim}")
        dtype_bytes(geometry.dtype)
    else:
        names = [tensor.name for tensor in geometry.tensors]
        if not names or len(set(names)) != len(names):
            raise DeclarationError(f"layer {index}: state tensors need distinct names, and at least one; got {names}")
        for tensor in geometry.tensors:
            dtype_bytes(tensor.dtype)
            numbers.update({f"{tensor.name} dim {axis}": size for axis, size in enumerate(tensor.shape)})
    if isinstance(lifetime, Window):
        numbers["window tokens"] = lifetime.tokens
    elif isinstance(lifetime, StateLife):
        numbers["checkpoint_interval"] = lifetime.checkpoint_interval
    for name, value in numbers.items():
        if value < 1:
            raise DeclarationError(f"layer {index}: {name} must be at least 1, not {value}")
