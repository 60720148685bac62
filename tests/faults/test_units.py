"""What keeps a server from being at rest, read off its metrics."""

from __future__ import annotations

from typing import Any

import pytest

from tools.faults.rounds import units_left


class Server:
    """A server with these metrics."""

    def __init__(self, **samples: float) -> None:
        self._samples = samples

    def metrics(self) -> dict[str, float]:
        """As exposed."""
        found = {"bandmaster:num_requests_running": 0.0, "bandmaster:num_steps_in_flight": 0.0}
        for name, value in self._samples.items():
            band, _, state = name.partition("_")
            sample = (
                f'units{{band="{band}",state="{state}"}}' if state != "cached" else f'cached_units{{band="{band}"}}'
            )
            found[f"bandmaster:{sample}"] = value
        return found


@pytest.mark.parametrize(
    ("stages", "samples", "left"),
    [
        (1, {"full_live": 5, "full_pending": 0, "full_cached": 5}, {}),
        (2, {"full_live": 10, "full_pending": 0, "full_cached": 5, "state_live": 3, "state_cached": 3}, {}),
        (1, {"full_live": 10, "full_pending": 0, "full_cached": 5}, {"units of full": 5}),
        (1, {"full_live": 5, "full_pending": 1, "full_cached": 5}, {"units of full": 1}),
        (2, {"full_live": 11, "full_pending": 0, "full_cached": 5}, {"units of full": 6}),
        (1, {"state_live": 1, "full_live": 0}, {"units of state": 1}),
    ],
)
def test_only_what_the_cache_holds_may_be_live(stages: int, samples: dict[str, float], left: dict[str, float]) -> None:
    """Live and pending units are the cached ones, on each stage that has the band; anything else is named."""
    server: Any = Server(**samples)
    assert units_left(server, stages) == left
