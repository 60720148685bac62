"""Sizing: what a byte budget becomes, what it is refused for, and that its promises hold at run time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.capacity import StageWalk
from allocator.cost import request_cost
from allocator.decl import MHA, MLA, Full, Layer, Lifetime, Part, State, StateLife, StateTensor, Window
from allocator.errors import BudgetTooSmall
from allocator.geometry import Geometry
from allocator.logical.chain import LogicalChain
from allocator.physical.chain import PhysicalChain
from allocator.plan import StoragePlan, plan_storage
from allocator.sizing import Sizing, Term, size_arena

ATTENTION = MHA(1, 8, 8, "float32")
LIFE = StateLife(64)
STATE = State((StateTensor("ssm", (10, 10), "float32"),))


def full_plan() -> StoragePlan:
    """Two full-attention layers; a page of 16 tokens is 2,048 bytes."""
    return plan_storage([Layer((Part(ATTENTION, Full()),))] * 2, 16)


def hybrid_plan() -> StoragePlan:
    """State, two windows and full attention; one layer each."""
    lifetimes: list[Lifetime] = [Full(), Window(32), Window(100)]
    layers = [Layer((Part(ATTENTION, lifetime),)) for lifetime in lifetimes]
    return plan_storage([*layers, Layer((Part(STATE, StateLife(64)),))], 16)


def size(plan: StoragePlan, budget: int, running: int = 4, length: int = 256, **more: object) -> Sizing:
    """`size_arena` with small defaults."""
    given = {"max_running_requests": running, "max_model_len": length, "max_batched_tokens": 64, **more}
    return size_arena(plan, budget, **given)  # type: ignore[arg-type]


def test_the_chain_takes_what_the_fixed_terms_leave() -> None:
    """Terms add up to the budget; the arena is the rest rounded down; every page that fits is an id and a target."""
    sizing = size(full_plan(), 50_000, fixed=[Term("request table", 1_000), Term("scratch", 500)])
    assert sizing.geometry.arena_bytes == 48_384
    assert sizing.geometry.chain_start_bytes == 2_048
    assert sum(term.size_bytes for term in sizing.terms) == 50_000
    assert sizing.targets == (22,)
    assert sizing.virtual_pages == 22
    assert sizing.virtual_slots == 0
    assert [(row.tokens, row.requests) for row in sizing.concurrency] == [(16, 22), (64, 5), (256, 1)]
    text = "\n".join(sizing.lines())
    assert "band full: 22 pages of 2,048 bytes, 352 tokens at 128 bytes each" in text
    assert "requests of 64 tokens at once: 5" in text


def test_the_floor_is_refused_with_the_table_and_the_bytes_missing() -> None:
    """Below one request at batch size 1 the refusal lists every term, and the missing bytes are exactly enough."""
    for plan in (full_plan(), hybrid_plan()):
        with pytest.raises(BudgetTooSmall) as caught:
            size(plan, 3_000, fixed=[Term("scratch", 700, "activations")])
        text = str(caught.value)
        assert "scratch" in text
        assert "sink and padding" in text
        assert "one request at batch size 1" in text
        missing = caught.value.missing_bytes
        assert f"{missing:,d} bytes below" in text
        for band in plan.bands:
            assert f"floor: {band.geometry.name}" in text
        enough = size(plan, 3_000 + missing, fixed=[Term("scratch", 700)])
        assert min(enough.targets) >= 1
        with pytest.raises(BudgetTooSmall):
            size(plan, 3_000 + missing - 256, fixed=[Term("scratch", 700)])


@settings(max_examples=60, deadline=None)
@given(budget=st.integers(0, 400_000), running=st.integers(1, 9), length=st.integers(1, 600), hybrid=st.booleans())
def test_targets_fit_the_geometry_they_come_with(budget: int, running: int, length: int, hybrid: bool) -> None:
    """Whatever the budget: refused below the floor, or the targets are feasible, and one page more is not."""
    plan = hybrid_plan() if hybrid else full_plan()
    refused: BudgetTooSmall | None = None
    try:
        sizing = size(plan, budget, running, length, slots_per_request=2)
    except BudgetTooSmall as error:
        refused = error
    else:
        check_promises(sizing, budget, running, hybrid)
    assert refused is None or refused.missing_bytes > 0


def check_promises(sizing: Sizing, budget: int, running: int, hybrid: bool) -> None:
    """The targets are feasible, one page more is not, and the terms add up."""
    walk = StageWalk(sizing.geometry)
    assert walk.overlap_bytes(sizing.targets) <= 0
    assert sum(term.size_bytes for term in sizing.terms) == budget
    assert sizing.targets[-1] >= 1
    more = [*sizing.targets[:-1], sizing.targets[-1] + 1]
    if not hybrid:
        assert walk.overlap_bytes(more) > 0
        assert sizing.targets[-1] == sizing.virtual_pages
    assert (sizing.virtual_slots >= 2) == hybrid
    if hybrid:
        assert 2 <= sizing.targets[0] <= 2 * running


def test_S6_more_requests_than_slots_are_clamped_with_both_numbers() -> None:
    """Where slots for every request do not fit, as many as fit are the target; both numbers are said."""
    sizing = size(hybrid_plan(), 40_000, running=500)
    slots = sizing.targets[0]
    assert 1 <= slots < 500
    said = (
        f"band state: {slots} slots of 512 bytes, of 500 wanted: state for {slots} of 500 requests at once, at 1 each"
    )
    assert said in sizing.lines()
    double = size(hybrid_plan(), 40_000, running=500, slots_per_request=2)
    assert f"wanted: state for {double.targets[0] // 2} of 500 requests at once, at 2 each" in "\n".join(double.lines())
    assert "wanted" not in "\n".join(size(hybrid_plan(), 100_000, running=2).lines())
    fewer = size(hybrid_plan(), 40_000, running=500, state_slots=3)
    assert fewer.targets[0] == 3
    assert fewer.targets[-1] > sizing.targets[-1], "slots not asked for are pages"


def test_states_may_fill_the_arena() -> None:
    """Slot ids are limited by bytes, not by the running requests, so that a prefix cache can hold many states; a stage
    without state bytes never limits the others."""
    plan = hybrid_plan()
    sizing = size(plan, 100_000, running=2, slots_per_request=2)
    chain = sizing.geometry.arena_bytes - sizing.geometry.chain_start_bytes
    assert sizing.virtual_slots == min(chain // 512, sizing.virtual_pages + 4) > 4
    counts = [sizing.virtual_slots, 0, 0, 0]
    assert StageWalk(sizing.geometry).overlap_bytes(counts) <= 0
    layers: list[Layer] = [Layer((Part(ATTENTION, Full()),)), Layer((Part(STATE, StateLife(64)),))]
    bare = size(plan_storage(layers, 16, [0]), 100_000, running=2, slots_per_request=2)
    assert bare.geometry.bands[0].unit_bytes == 0
    assert bare.virtual_slots == bare.virtual_pages + 4


def test_requests_at_once_fit_and_one_more_does_not() -> None:
    """The concurrency lines: that many requests, with checkpoints and one batch of new tokens, fit exactly."""
    plan = hybrid_plan()
    for slots in (1, 2):
        sizing = size(plan, 300_000, slots_per_request=slots, length=4096)
        walk = StageWalk(sizing.geometry)
        for row in sizing.concurrency:
            cost = request_cost(plan.band_geometries(), 16, row.tokens, 64, 64 if slots == 2 else 0)
            fits = [
                walk.overlap_bytes([n * a + b for a, b in zip(cost.owned, cost.tail, strict=True)]) <= 0
                for n in (row.requests, row.requests + 1)
            ]
            assert fits == [True, False]
            assert cost.owned[0] == slots


def test_windows_are_aimed_at_for_all_requests_and_one_batch() -> None:
    """Every running request keeps its window and what its checkpoint holds back; one batch is written at a time."""
    plan = hybrid_plan()
    for slots, interval in ((1, 0), (2, 64)):
        sizing = size(plan, 3_000_000, running=7, length=4096, slots_per_request=slots)
        cost = request_cost(plan.band_geometries(), 16, 4096, 64, interval)
        for band in (1, 2):
            assert sizing.targets[band] == 7 * cost.owned[band] + cost.tail[band]


def test_the_sized_arena_runs() -> None:
    """The geometry that sizing returns is served as promised: every page it counts can be live at once, on a rank."""
    sizing = size(full_plan(), 50_001)
    geometry = Geometry(16, sizing.virtual_pages, sizing.virtual_slots, [sizing.geometry])
    chain = LogicalChain(geometry)
    assert chain.most_ever() == sizing.targets[0]
    rank = PhysicalChain(geometry, 0)
    rank.begin_step(1, 0)
    rank.apply([chain.take(sizing.targets).op])
    rank.end_step()
    assert rank.band_counts().tolist() == [sizing.targets[0], 0, 0, 0]


def test_the_sink_is_as_large_as_the_largest_token_unit() -> None:
    """Bands start behind the sink that all token bands share, and behind the padding slot of the state band."""
    plan = hybrid_plan()
    sizing = size(plan, 100_000)
    pages = [b.geometry.unit_bytes for b in plan.bands if b.geometry.kind != "state"]
    slot = plan.bands[0].geometry.unit_bytes
    assert sizing.geometry.chain_start_bytes >= max(pages) + slot
    assert sizing.geometry.chain_start_bytes % slot == 0


kv = st.one_of(
    st.builds(MHA, st.integers(1, 3), st.integers(1, 20), st.integers(1, 20), st.sampled_from(["float32", "float16"])),
    st.builds(MLA, st.integers(1, 40), st.integers(0, 8), st.sampled_from(["bfloat16", "float8_e4m3fn"])),
)
parts = st.one_of(
    st.builds(Part, kv, st.one_of(st.just(Full()), st.builds(Window, st.sampled_from([8, 40, 130])))),
    st.builds(
        lambda rows: Part(
            State((StateTensor("conv", (rows, 3), "float16"), StateTensor("ssm", (4, 4), "float32"))), LIFE
        ),
        st.integers(1, 60),
    ),
)
models = st.lists(
    st.builds(Layer, st.lists(parts, max_size=3, unique_by=lambda part: part.lifetime).map(tuple)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), model=models, page_size=st.sampled_from([1, 4, 16]), slots=st.integers(1, 2))
def test_every_stage_of_any_model_is_sized_or_refused_exactly(
    data: st.DataObject, model: list[Layer], page_size: int, slots: int
) -> None:
    """Layers of any kinds, dealt to two stages: a budget of the floor is enough and 256 bytes less are not; the sink
    covers unit 0 of every token band, the padding slot lies right below the chain's first state unit, none overlap."""
    first = set(data.draw(st.lists(st.integers(0, len(model) - 1), max_size=len(model))))
    stages = [plan_storage(model, page_size, first), plan_storage(model, page_size, set(range(len(model))) - first)]
    assert [b.geometry.name for b in stages[0].bands] == [b.geometry.name for b in stages[1].bands]
    for plan in stages:
        floor = 0  # of a stage that stores nothing
        if any(band.geometry.unit_bytes for band in plan.bands):
            with pytest.raises(BudgetTooSmall) as caught:
                size(plan, 0, slots_per_request=slots)
            floor = caught.value.missing_bytes
            with pytest.raises(BudgetTooSmall):
                size(plan, floor - 1, slots_per_request=slots)
        for budget in (floor, 3 * floor + 777):
            check_stage(size(plan, budget, slots_per_request=slots), plan)


def check_stage(sizing: Sizing, plan: StoragePlan) -> None:
    """The fixed bytes below the chain are what the module says, and no band's first unit reaches into them."""
    start, bands = sizing.geometry.chain_start_bytes, sizing.geometry.bands
    sink = max(band.unit_bytes for band in bands if band.kind != "state")
    fixed_end = sink
    for band in bands:
        if band.kind == "state" and band.unit_bytes:
            padding = start // band.unit_bytes - 1
            assert (padding + 1) * band.unit_bytes == start, "the chain's first state unit is the one above"
            assert padding * band.unit_bytes >= sink
            fixed_end = (padding + 1) * band.unit_bytes
    assert start == fixed_end
    for band, units in zip(bands, sizing.targets, strict=True):
        if band.kind != "state" and band.unit_bytes:
            assert units >= 1
    assert StageWalk(sizing.geometry).overlap_bytes(sizing.targets) <= 0
    assert bands == plan.band_geometries()


def test_a_band_of_mixed_geometries_has_one_unit() -> None:
    """Layers of other heads, dims, dtypes and a latent share a page: its bytes are their aligned planes' sum."""
    geometries: list[MHA | MLA] = [MHA(3, 64, 64, "bfloat16"), MHA(1, 10, 6, "float32"), MLA(40, 9, "float8_e4m3fn")]
    plan = plan_storage([Layer((Part(geometry, Full()),)) for geometry in geometries], 5)
    planes = [5 * 3 * 64 * 2, 5 * 3 * 64 * 2, 5 * 10 * 4, 5 * 6 * 4, 5 * 49]
    assert plan.bands[0].geometry.unit_bytes == -(-sum(-(-plane // 16) * 16 for plane in planes) // 256) * 256
    assert [view.dtype for view in plan.bands[0].planes] == ["bfloat16"] * 2 + ["float32"] * 2 + ["float8_e4m3fn"]
    assert size(plan, 100_000).geometry.chain_start_bytes == plan.bands[0].geometry.unit_bytes


def test_a_checkpoint_holds_windows_back() -> None:
    """With a checkpoint slot the floor has room for a window that reaches back to the last checkpoint."""
    plan = hybrid_plan()
    short, long = (size(plan, 200_000, running=1, length=600, slots_per_request=slots) for slots in (1, 2))
    held = 64 // 16  # pages of one checkpoint interval
    assert [b - a for a, b in zip(short.targets[1:3], long.targets[1:3], strict=True)] == [held, held]


def test_an_owner_without_bytes_does_not_limit_the_ids_of_others() -> None:
    """A stage of windows only bounds ids by twice the longest working set and what its bytes can hold beside it."""
    plan = plan_storage([Layer((Part(ATTENTION, Window(32)),))], 16)
    sizing = size(plan, 60_000, running=4, length=256)
    stage = sizing.geometry
    assert sizing.virtual_pages == 2 * 4 * 16 + (stage.arena_bytes - stage.chain_start_bytes) // 1024
    assert sizing.targets[-1] == 4 * 16


@pytest.mark.parametrize("name", ["max_running_requests", "max_model_len", "max_batched_tokens", "slots_per_request"])
def test_I7_zero_is_refused_by_name(name: str) -> None:
    """Every count must be at least one; the error names the argument and the value."""
    for value in (0, -5):
        with pytest.raises(ValueError, match=re.escape(f"{name} must be at least 1, not {value}")):
            size(full_plan(), 50_000, **{name: value})
