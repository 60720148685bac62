"""Page safety: what the logical chain accepts, every rank realizes, and no byte is lost, raced for or left behind."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.pagesafety.program import OPERATIONS, Case, Outcome, make_world, random_case, run_case, run_operation
from tools.pagesafety.shapes import SHAPES, draw_setting

PAGE_SIZES = (1, 16, 64)
operations = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 999), st.integers(0, 999))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    page_size=st.sampled_from(PAGE_SIZES),
    seed=st.integers(0, 50),
    program=st.lists(operations, max_size=60),
)
def test_every_program_is_safe(shape: str, page_size: int, seed: int, program: list[tuple[str, int, int]]) -> None:
    """Any list of operations is legal, runs without a fault, and gives back all that it took."""
    assert run_case(Case(shape, page_size, seed, program)).fault is None


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, int, int], Outcome]:
    """Long seeded programs of every shape and page size; each fourth with a recount after every step."""
    return {
        (shape, page_size, seed): run_case(random_case(shape, page_size, seed, 300), strict=seed % 4 == 0)
        for shape in SHAPES
        for page_size in PAGE_SIZES
        for seed in range(4)
    }


def test_long_seeded_programs_are_safe(outcomes: dict[tuple[str, int, int], Outcome]) -> None:
    """Long programs at several fill levels, with two ranks whose devices run late, each in its own way."""
    assert {case: outcome.fault for case, outcome in outcomes.items() if outcome.fault is not None} == {}


def test_the_programs_reach_what_they_are_about(outcomes: dict[tuple[str, int, int], Outcome]) -> None:
    """Together they refuse, rearrange on every level, move, quarantine, freeze, and wait in all three ways, often."""
    figures: Counter[str] = Counter()
    for outcome in outcomes.values():
        figures.update(outcome.figures)
    least = {"refusals": 1000, "frozen": 100, "quarantined": 100, "uses": 1000, "flush_moves": 50}
    least |= {"no_move": 100, "flush_ends": 30, "relayout": 100, "moves": 500}
    least |= {"forward_waits": 300, "copy_waits": 100, "host_waits": 10}
    assert {name: figures[name] for name, count in least.items() if figures[name] < count} == {}
    assert figures["moved_bytes"] <= 1.1 * figures["least_bytes"]


def test_a_case_is_the_same_whenever_it_is_run() -> None:
    """Two runs of a case, on worlds of their own, end with the same digests on every rank and the same figures."""
    case = random_case("windows+state", 16, 7, 200)
    assert run_case(case) == run_case(case)
    digests = []
    for _ in range(2):
        world = make_world(case)
        for operation in case.program:
            run_operation(world, operation)
        digests.append((world.logical.state_digest(), world.fleet.digests()))
    assert digests[0] == digests[1]
    assert len(set(digests[0][1])) == 1, "two ranks of one stage"


def test_programs_follow_their_seed_and_leave_operations_out() -> None:
    """The program of a seed is always the same, another seed's differs, and seeds disable different operations."""
    assert random_case("full", 1, 3, 50) == random_case("full", 1, 3, 50)
    assert random_case("full", 1, 3, 50) != random_case("full", 1, 4, 50)
    missing = {
        frozenset(OPERATIONS) - {name for name, _, _ in random_case("full", 1, seed, 3000).program} for seed in range(6)
    }
    assert len(missing) > 1
    assert all({"admit", "forward", "process"}.isdisjoint(names) for names in missing)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_shape_leaves_room_for_sinks_and_padding_before_its_chain(shape: str) -> None:
    """Before the chain lies a whole token unit, and between it and the chain a whole slot where there is state."""
    for seed in range(30):
        geometry = draw_setting(shape, 16, seed).geometry
        for stage in geometry.stages:
            tokens = max(band.unit_bytes for band in stage.bands if band.kind != "state")
            slot = max((band.unit_bytes for band in stage.bands if band.kind == "state"), default=0)
            assert stage.chain_start_bytes >= tokens + slot
            assert slot == 0 or stage.chain_start_bytes % slot == 0
