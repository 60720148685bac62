"""Declarations to bands: chain order, the unit envelope, and the views that kernels get."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.decl import (
    DTYPE_BYTES,
    MHA,
    MLA,
    Full,
    Layer,
    Part,
    State,
    StateLife,
    StateTensor,
    Window,
    dtype_bytes,
)
from allocator.errors import DeclarationError
from allocator.plan import PlaneView, StoragePlan, plan_storage

ATTENTION = MHA(kv_heads=3, k_dim=64, v_dim=64, dtype="bfloat16")
MAMBA = State((StateTensor("conv", (8, 3), "bfloat16"), StateTensor("ssm", (2, 4, 5), "float32")))

parts = st.one_of(
    st.builds(
        Part,
        st.one_of(
            st.builds(MHA, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.sampled_from(list(DTYPE_BYTES))),
            st.builds(MLA, st.integers(1, 9), st.integers(0, 4), st.just("float16")),
        ),
        st.one_of(st.just(Full()), st.builds(Window, st.sampled_from([4, 32, 100]))),
    ),
    st.builds(Part, st.just(MAMBA), st.just(StateLife(256))),
)
layers = st.builds(Layer, st.lists(parts, max_size=3, unique_by=lambda part: part.lifetime).map(tuple))


def as_array(arena: np.ndarray, view: PlaneView, units: int) -> np.ndarray:
    """The view over a byte arena as numpy would make it: [units, *shape] of raw elements."""
    size = dtype_bytes(view.dtype)
    raw = np.ndarray(
        (units, *view.shape, size),
        dtype=np.uint8,
        buffer=arena.data,
        offset=view.offset_bytes,
        strides=(view.unit_bytes, *view.strides_bytes, 1),
    )
    assert raw.shape[1:-1] == view.shape
    return raw


def test_B1_bytes_per_token_and_slot_equal_a_hand_calculation() -> None:
    """30 layers of 3 heads of 64 in bfloat16, K and V, cost 23,040 bytes per token; state is counted, not per token."""
    plan = plan_storage([Layer((Part(ATTENTION, Full()),))] * 30, page_size=16)
    assert [band.geometry.name for band in plan.bands] == ["full"]
    assert plan.bands[0].geometry.unit_bytes == 16 * 23_040
    mixed = [Layer((Part(ATTENTION, Full()),)), Layer((Part(MAMBA, StateLife(256)),))]
    state, full = plan_storage(mixed, page_size=16).bands
    assert state.geometry.unit_bytes == 256  # 48 bytes of conv + 160 of ssm, rounded up to the unit
    assert full.geometry.unit_bytes == 16 * 2 * 3 * 64 * 2
    assert state.checkpoint_interval == 256


def test_bands_come_in_chain_order() -> None:
    """State first, windows from the longest, full attention last, whatever the layers' order."""
    everything = [
        Layer((Part(ATTENTION, Full()), Part(MAMBA, StateLife(64)))),
        Layer((Part(ATTENTION, Window(128)),)),
        Layer((Part(ATTENTION, Window(1024)),)),
        Layer(),
    ]
    names = ["state", "window:1024", "window:128", "full"]
    assert [band.geometry.name for band in plan_storage(everything, 16).bands] == names
    assert [band.geometry.name for band in plan_storage(everything[::-1], 16).bands] == names
    windows = [band.geometry.window_tokens for band in plan_storage(everything, 16).bands]
    assert windows == [0, 1024, 128, 0]


def test_a_model_of_windows_only_still_has_an_owner() -> None:
    """The owner is an id space: without full-attention layers its band has zero unit bytes."""
    plan = plan_storage([Layer((Part(ATTENTION, Window(128)),))], 16)
    assert [(b.geometry.name, b.geometry.unit_bytes) for b in plan.bands] == [("window:128", 12_288), ("full", 0)]


def test_every_stage_has_all_bands() -> None:
    """A stage's units hold only its own layers, but its bands are the model's; layer numbers stay the model's."""
    model = [
        Layer((Part(ATTENTION, Full()),)),
        Layer((Part(ATTENTION, Window(32)),)),
        Layer((Part(ATTENTION, Full()),)),
    ]
    first, last = plan_storage(model, 16, local=[0, 1]), plan_storage(model, 16, local=[2])
    assert [b.geometry.unit_bytes for b in first.bands] == [12_288, 12_288]
    assert [b.geometry.unit_bytes for b in last.bands] == [0, 12_288]
    assert last.layer_view(2, "k").offset_bytes == 0
    with pytest.raises(DeclarationError, match=r"layer 0 stores no plane 'k' on this stage; it stores \[\]"):
        last.layer_view(0, "k")
    with pytest.raises(DeclarationError, match="go beyond the model's 3 layers"):
        plan_storage(model, 16, local=[3])


@settings(max_examples=60, deadline=None)
@given(model=st.lists(layers, min_size=1, max_size=5), page_size=st.sampled_from([1, 3, 16, 64]))
def test_planes_are_aligned_and_never_overlap(model: list[Layer], page_size: int) -> None:
    """Planes start at multiples of 16, units at multiples of 256; layer by layer, none overlapping."""
    plan = plan_storage(model, page_size)
    for band in plan.bands:
        assert band.geometry.unit_bytes % 256 == 0
        ends = [
            (view.offset_bytes, view.offset_bytes + prod(view.shape) * dtype_bytes(view.dtype)) for view in band.planes
        ]
        assert all(start % 16 == 0 for start, _ in ends)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert [view.layer for view in band.planes] == sorted(view.layer for view in band.planes)
        last = ends[-1][1] if ends else 0
        assert last <= band.geometry.unit_bytes < last + 256
    stored = sum(len(band.planes) for band in plan.bands)
    names = {MHA: 2, MLA: 1, State: 2}
    assert stored == sum(names[type(part.geometry)] for layer in model for part in layer.parts)


@settings(max_examples=20, deadline=None)
@given(model=st.lists(layers, min_size=1, max_size=4))
def test_views_reach_every_element_once(model: list[Layer]) -> None:
    """Written through its views, every element of every unit is its own: no two share a byte, none leaves its unit."""
    plan: StoragePlan = plan_storage(model, 4)
    for band in plan.bands:
        if not band.planes:
            continue
        arena = np.zeros(3 * band.geometry.unit_bytes, dtype=np.uint8)
        for view in band.planes:
            as_array(arena, view, 3)[:] += 1
        elements = 3 * sum(prod(view.shape) * dtype_bytes(view.dtype) for view in band.planes)
        assert int(arena.sum()) == elements
        assert int(arena.max()) == 1


def test_a_page_view_has_tokens_first() -> None:
    """A page's plane is [page_size, heads, dim]; strides of its elements are inside the unit."""
    plan = plan_storage([Layer((Part(MHA(3, 64, 32, "float32"), Full()),))] * 2, 16)
    view = plan.layer_view(1, "v")
    assert (view.shape, view.strides_bytes, view.dtype) == ((16, 3, 32), (384, 128, 4), "float32")
    assert view.offset_bytes == 16 * 3 * 64 * 4 + 16 * 3 * 32 * 4 + 16 * 3 * 64 * 4
    latent = plan_storage([Layer((Part(MLA(512, 64, "bfloat16"), Full()),))], 16).layer_view(0, "latent")
    assert latent.shape == (16, 576)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Layer((Part(MHA(0, 64, 64, "float32"), Full()),)), "layer 0: kv_heads must be at least 1, not 0"),
        (Layer((Part(MHA(1, 64, 64, "float99"), Full()),)), "dtype 'float99' cannot be stored"),
        (Layer((Part(MLA(8, -1, "float32"), Full()),)), "rope_dim must be at least 0"),
        (Layer((Part(ATTENTION, Window(0)),)), "window tokens must be at least 1"),
        (Layer((Part(ATTENTION, StateLife(64)),)), "state lives by StateLife"),
        (Layer((Part(MAMBA, Full()),)), "state lives by StateLife"),
        (Layer((Part(MAMBA, StateLife(0)),)), "checkpoint_interval must be at least 1"),
        (Layer((Part(State(()), StateLife(64)),)), "distinct names"),
        (Layer((Part(ATTENTION, Full()), Part(ATTENTION, Full()))), "two parts of one lifetime"),
    ],
)
def test_what_cannot_be_laid_out_is_named(layer: Layer, text: str) -> None:
    """Every bad declaration is refused with its layer, the limit and the value."""
    with pytest.raises(DeclarationError, match=text):
        plan_storage([layer], 16)


def test_the_model_as_a_whole_is_checked_too() -> None:
    """Two checkpoint intervals, and a page size of zero tokens, are refused."""
    two = [Layer((Part(MAMBA, StateLife(64)),)), Layer((Part(MAMBA, StateLife(128)),))]
    with pytest.raises(DeclarationError, match=r"checkpoint intervals \[64, 128\]"):
        plan_storage(two, 16)
    with pytest.raises(DeclarationError, match="page_size must be at least 1 token, not 0"):
        plan_storage([Layer()], 0)
