"""Page safety: what the logical chain accepts, every rank realizes, and no live byte is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.allocator.harness import OPERATIONS, Harness, random_program

operations = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 999), st.integers(0, 999))


@settings(max_examples=60, deadline=None)
@given(units=st.sampled_from([1, 2, 3, 5, 8, 20]), program=st.lists(operations, max_size=60), seed=st.integers(0, 50))
def test_every_program_is_safe(units: int, program: list[tuple[str, int, int]], seed: int) -> None:
    """Any program runs without a fault, leaves two ranks with other timing in agreement, and frees what it took."""
    Harness(units, seed).run(program)


@pytest.mark.parametrize("seed", range(24))
def test_long_seeded_programs_are_safe(seed: int) -> None:
    """Long programs at several fill levels; between them they wait, move and reuse."""
    harness = Harness(units=(4, 9, 30, 80)[seed % 4], seed=seed)
    harness.run(random_program(seed, 250))


def test_the_programs_reach_what_they_are_about() -> None:
    """Together the seeded programs settle behind running forwards and move pages, often."""
    waits = moves = 0
    for seed in range(8):
        harness = Harness(units=(4, 9, 30, 80)[seed % 4], seed=seed)
        harness.run(random_program(seed, 250))
        waits += harness.devices[0].waits
        moves += harness.devices[0].moves
    assert waits > 25
    assert moves > 15
