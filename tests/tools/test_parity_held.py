"""Bytes held over bytes needed, measured on a running core, for models of published dimensions."""

from __future__ import annotations

from pathlib import Path

import pytest

from allocator.cost import held_at
from allocator.plan import plan_storage
from tools.parity_held import GOAL, PAGE_SIZE, TOKENS, geometries, measure

PUBLISHED = Path(__file__).parent / "published"


@pytest.mark.parametrize("name", sorted(path.name for path in PUBLISHED.glob("*.config.json")))
def test_a_request_holds_hardly_more_than_it_needs(name: str) -> None:
    """At every length each published model is within the goal, with exactly the units that the plan says."""
    ((layers, _),) = geometries([str(PUBLISHED / name)]).values()
    for tokens in TOKENS:
        held = measure(layers, tokens)
        assert held.units == held_at(plan_storage(layers, PAGE_SIZE).band_geometries(), PAGE_SIZE, tokens)
        assert 1.0 <= held.ratio <= GOAL
