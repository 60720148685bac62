"""The storage plan: declarations grouped into bands, and where each layer's planes lie inside a band's unit.

Owns chain order and the unit envelope. Must never know how many units there will be (that is `sizing`). Invariants:
bands come in chain order (state, windows from the longest, full attention); the owner, full attention, is always there,
if only with zero unit bytes; planes do not overlap, start at multiples of 16 bytes and lie inside the unit, whose size
is a multiple of 256 bytes.

    unit = page_size tokens (a page) or one slot:
    | layer 0: K plane | V plane | layer 1: K plane | V plane | ... | padding |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from allocator.decl import MHA, MLA, Full, Layer, Part, State, Window, check_layers, dtype_bytes
from allocator.errors import DeclarationError
from allocator.geometry import BandGeometry, BandKind

PLANE_ALIGN_BYTES = 16
UNIT_ALIGN_BYTES = 256


def align_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    assert multiple > 0
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class PlaneView:
    """One plane of one layer as a typed strided view over the arena.

    Element [u, i, ...] of the view is at byte u * `unit_bytes` + `offset_bytes` + sum(index * stride): u is the
    physical unit, `shape` and `strides_bytes` describe one unit's plane (a page: [page_size, heads, dim] or
    [page_size, dim]; a slot: the tensor's own shape).
    """

    band: int
    layer: int
    plane: str
    offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    unit_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class BandPlan:
    """One band: its geometry on this stage, its planes, and for state the checkpoint grid."""

    geometry: BandGeometry
    planes: tuple[PlaneView, ...]
    checkpoint_interval: int = 0


@dataclass(frozen=True)
class StoragePlan:
    """All bands of one stage in chain order."""

    page_size: int
    bands: list[BandPlan]

    def layer_view(self, layer: int, plane: str) -> PlaneView:
        """The view of a layer's plane: `k`, `v`, `latent` or a state tensor's name; raises DeclarationError."""
        for band in self.bands:
            for view in band.planes:
                if view.layer == layer and view.plane == plane:
                    return view
        have = [view.plane for band in self.bands for view in band.planes if view.layer == layer]
        raise DeclarationError(f"layer {layer} stores no plane {plane!r} on this stage; it stores {have}")

    def band_geometries(self) -> list[BandGeometry]:
        """The bands as a stage's geometry lists them."""
        return [band.geometry for band in self.bands]


def plan_storage(layers: Sequence[Layer], page_size: int, local: Iterable[int] | None = None) -> StoragePlan:
    """Groups the parts of all `layers` into bands; the units hold those of the `local` layers (default: all).

    Every stage of a pipeline is given all layers, so that all stages have the same bands. Raises DeclarationError.
    """
    if page_size < 1:
        raise DeclarationError(f"page_size must be at least 1 token, not {page_size}")
    check_layers(layers)
    here = set(range(len(layers))) if local is None else set(local)
    if not here <= set(range(len(layers))):
        raise DeclarationError(f"local layers {sorted(here)} go beyond the model's {len(layers)} layers")
    everything = [(index, part) for index, layer in enumerate(layers) for part in layer.parts]
    groups: dict[tuple[int, int], list[tuple[int, Part]]] = {_FULL: []}
    for index, part in everything:
        groups.setdefault(_rank(part), []).append((index, part))
    bands = []
    for number, rank in enumerate(sorted(groups)):
        stored = [(index, part) for index, part in groups[rank] if index in here]
        bands.append(_lay_out(number, rank, groups[rank], stored, page_size))
    assert bands[-1].geometry.kind == "full", "the owner comes last"
    return StoragePlan(page_size, bands)


_STATE_RANK, _WINDOW_RANK, _FULL_RANK = 0, 1, 2
_FULL = (_FULL_RANK, 0)


def _rank(part: Part) -> tuple[int, int]:
    """Sorts into chain order: state, windows from the longest, full."""
    if isinstance(part.lifetime, Full):
        return _FULL
    if isinstance(part.lifetime, Window):
        return (_WINDOW_RANK, -part.lifetime.tokens)
    return (_STATE_RANK, 0)


def _planes_of(part: Part, page_size: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape in one unit and dtype of each plane, in the order in which they are packed."""
    geometry = part.geometry
    if isinstance(geometry, MHA):
        return [
            ("k", (page_size, geometry.kv_heads, geometry.k_dim), geometry.dtype),
            ("v", (page_size, geometry.kv_heads, geometry.v_dim), geometry.dtype),
        ]
    if isinstance(geometry, MLA):
        return [("latent", (page_size, geometry.latent_dim + geometry.rope_dim), geometry.dtype)]
    assert isinstance(geometry, State)
    return [(tensor.name, tensor.shape, tensor.dtype) for tensor in geometry.tensors]


def _lay_out(
    number: int,
    rank: tuple[int, int],
    everywhere: list[tuple[int, Part]],
    stored: list[tuple[int, Part]],
    page_size: int,
) -> BandPlan:
    """Packs the stored parts of one band into a unit."""
    placed: list[tuple[int, str, int, tuple[int, ...], str]] = []
    end = 0
    for layer, part in stored:
        for plane, shape, dtype in _planes_of(part, page_size):
            start = align_up(end, PLANE_ALIGN_BYTES)
            placed.append((layer, plane, start, shape, dtype))
            end = start + prod(shape) * dtype_bytes(dtype)
    unit_bytes = align_up(end, UNIT_ALIGN_BYTES)
    assert 0 <= unit_bytes - end < UNIT_ALIGN_BYTES
    planes = tuple(
        PlaneView(number, layer, plane, start, shape, _strides(shape, dtype), unit_bytes, dtype)
        for layer, plane, start, shape, dtype in placed
    )
    kinds: tuple[BandKind, ...] = ("state", "window", "full")
    kind = kinds[rank[0]]
    window = -rank[1]
    name = f"window:{window}" if kind == "window" else kind
    interval = 0
    if kind == "state":
        interval = getattr(everywhere[0][1].lifetime, "checkpoint_interval", 0)
        assert interval > 0
    return BandPlan(BandGeometry(name, kind, unit_bytes, window), planes, interval)


def _strides(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """C-order strides in bytes."""
    out: list[int] = []
    step = dtype_bytes(dtype)
    for size in reversed(shape):
        out.append(step)
        step *= size
    return tuple(reversed(out))
