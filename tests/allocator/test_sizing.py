"""Sizing: what a byte budget becomes, what it is refused for, and that its promises hold at run time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.capacity import StageWalk
from allocator.decl import MHA, Full, Layer, Lifetime, Part, State, StateLife, StateTensor, Window
from allocator.errors import BudgetTooSmall
from allocator.geometry import Geometry
from allocator.logical.chain import LogicalChain
from allocator.physical.chain import PhysicalChain
from allocator.plan import StoragePlan, plan_storage
from allocator.sizing import Sizing, Term, size_arena

ATTENTION = MHA(1, 8, 8, "float32")
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
    assert f"band state: {slots} slots of 512 bytes, of 500 wanted" in "\n".join(sizing.lines())
    fewer = size(hybrid_plan(), 40_000, running=500, state_slots=3)
    assert fewer.targets[0] == 3
    assert fewer.targets[-1] > sizing.targets[-1], "slots not asked for are pages"


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


def test_an_owner_without_bytes_does_not_limit_the_ids_of_others() -> None:
    """A stage of windows only bounds ids by twice the longest working set."""
    plan = plan_storage([Layer((Part(ATTENTION, Window(32)),))], 16)
    sizing = size(plan, 60_000, running=4, length=256)
    assert sizing.virtual_pages == 2 * 4 * 16
    assert sizing.targets[-1] == 4 * 16


@pytest.mark.parametrize("name", ["max_running_requests", "max_model_len", "max_batched_tokens", "slots_per_request"])
def test_I7_zero_is_refused_by_name(name: str) -> None:
    """Every count must be at least one; the error names the argument and the value."""
    for value in (0, -5):
        with pytest.raises(ValueError, match=re.escape(f"{name} must be at least 1, not {value}")):
            size(full_plan(), 50_000, **{name: value})
