"""Layers over stages: even splits, given ones, and what is refused."""

from __future__ import annotations

import pytest

from daemon.layers import LayersError, parse_layers, split_layers


def test_layers_are_split_evenly_or_as_told() -> None:
    """Consecutive, every layer once, sizes at most one apart, the larger first; or exactly as given."""
    for count in range(1, 20):
        for pp in range(1, count + 1):
            split = split_layers(count, [0] * pp)
            assert [layer for stage in split for layer in stage] == list(range(count))
            sizes = [len(stage) for stage in split]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1
    assert split_layers(22, [10, 12]) == [range(10), range(10, 22)]


def test_stages_that_are_not_the_models_layers_are_refused() -> None:
    """Sums that differ, a stage without layers and more stages than layers are named."""
    for given in ([10, 11], [22, 0], [11, 11, 1]):
        with pytest.raises(LayersError, match="the model has 22 layers"):
            split_layers(22, given)
    with pytest.raises(LayersError, match="--pp may be 1 to 22"):
        split_layers(22, [0] * 23)


def test_the_flag_is_read_or_refused() -> None:
    """One number for each stage, or nothing; anything else names the flag."""
    assert parse_layers("", 3) == [0, 0, 0]
    assert parse_layers(" 10, 12 ", 2) == [10, 12]
    for text, said in (("10", "pass --pp 1"), ("1,2,3", "names 3 stages"), ("0,22", "from 1 up"), ("a,b", "from 1 up")):
        with pytest.raises(LayersError, match=said):
            parse_layers(text, 2)
