"""What keeps a server from being at rest, read off its metrics."""

from __future__ import annotations

from typing import Any

import pytest

from tools.faults.rounds import ZERO_AT_REST, units_left


class Server:
    """A server with these metrics."""

    def __init__(self, **samples: float) -> None:
        self._samples = samples

    def metrics(self) -> dict[str, float]:
        """As exposed."""
        found = {f"bandmaster:num_{name}": 0.0 for name in ZERO_AT_REST}
        for name, value in self._samples.items():
            band, *stage, state = name.split("_")
            sample = f'cached_units{{band="{band}"}}'
            if stage:
                sample = f'units{{band="{band}",stage="{stage[0]}",state="{state}"}}'
            found[f"bandmaster:{sample}"] = value
        return found


@pytest.mark.parametrize(
    ("samples", "left"),
    [
        ({"full_0_live": 5, "full_0_pending": 0, "full_cached": 5}, {}),
        ({"full_0_live": 5, "full_1_live": 5, "full_1_pending": 0, "full_cached": 5, "state_1_live": 3,
          "state_cached": 3}, {}),
        ({"full_0_live": 10, "full_0_pending": 0, "full_cached": 5}, {"units of full on stage 0": 5}),
        ({"full_0_live": 5, "full_0_pending": 1, "full_0_hole": 7, "full_cached": 5}, {"units of full on stage 0": 1}),
        ({"full_0_live": 5, "full_1_live": 6, "full_cached": 5}, {"units of full on stage 1": 1}),
        ({"full_0_live": 4, "full_1_live": 6, "full_cached": 5},
         {"units of full on stage 0": -1, "units of full on stage 1": 1}),
        ({"state_0_live": 1, "full_0_live": 0}, {"units of state on stage 0": 1}),
    ],
)  # fmt: skip
def test_only_what_the_cache_holds_may_be_live(samples: dict[str, float], left: dict[str, float]) -> None:
    """Live and pending units are the cached ones, on each stage that has the band; anything else is named."""
    server: Any = Server(**samples)
    assert units_left(server) == left


@pytest.mark.parametrize("name", ZERO_AT_REST)
def test_a_count_that_is_not_zero_or_not_told_is_not_rest(name: str) -> None:
    """Each of the counts keeps a server from rest, also where its metrics leave it out."""
    server: Any = Server()
    found = server.metrics()
    for told in ({f"bandmaster:num_{name}": 2.0}, {}):
        server.metrics = lambda told=told: {key: found[key] for key in found if not key.endswith(name)} | told
        assert list(units_left(server)) == [f"num_{name}"]
