"""Metrics: every number of the core is shown under its name, with its band, and counters only ever rise."""

from __future__ import annotations

import pytest

from daemon.core.limits import CoreConfig
from daemon.metrics import (
    ACCOUNT_GAUGES,
    ACCOUNT_TOTALS,
    BAND_GAUGES,
    BAND_TOTALS,
    CORE_GAUGES,
    CORE_TOTALS,
    POLICIES,
    Metrics,
)
from tests.core.rank_double import Shape
from tests.core.world import World

SHAPE = Shape(windows=(20,), state=True)
CONFIG = CoreConfig(page_size=4, checkpoint_interval=16, max_running_requests=4, max_batched_tokens=64)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """A sample, or None where there is none."""
    return metrics.registry.get_sample_value(f"bandmaster:{name}", labels)


def pressed() -> World:
    """Many prompts, few pages: prefixes are cached and evicted, requests wait and are retracted."""
    world = World(CONFIG, pages=44, shape=SHAPE, caching=True)
    for k in range(8):
        world.send(f"r{k}", [k * 9 + j for j in range(10)], 50)
    world.run()
    assert world.core.gauges()["retractions_total"] > 0
    return world


def test_every_number_of_the_core_that_has_a_metric_is_shown() -> None:
    """Gauges, totals and numbers per band equal the core's; each row of the six tables has a number of the core."""
    world, metrics = pressed(), Metrics()
    gauges = world.core.gauges()
    metrics.set_core(gauges)
    for name, (shown, _) in CORE_GAUGES.items():
        assert value(metrics, shown) == gauges[name]
    for name, (shown, _) in CORE_TOTALS.items():
        assert value(metrics, f"{shown}_total") == gauges[name]
    metrics.written(1, world.core.account())
    for name, (shown, _) in ACCOUNT_TOTALS.items():
        assert value(metrics, f"{shown}_total") == gauges[f"{name}_total"]
    for name, (shown, _) in ACCOUNT_GAUGES.items():
        assert value(metrics, shown) == (
            gauges["running"] + gauges["prefilling"] if name == "holding" else gauges[name]
        )
    for band in ("state", "window:20", "full"):
        for name, (shown, _) in BAND_GAUGES.items():
            assert value(metrics, shown, band=band) == gauges[f"{name}{band}"]
        for name, (shown, _) in BAND_TOTALS.items():
            assert value(metrics, f"{shown}_total", band=band) == gauges[f"{name}{band}_total"]
    assert value(metrics, "evicted_units_total", band="full")
    assert value(metrics, "recomputed_tokens_total")
    assert value(metrics, "relief_climbs_total")


def test_counters_follow_the_core_and_never_fall() -> None:
    """Taken over twice they are counted once; a core that starts again counts on from what was told."""
    world, metrics = pressed(), Metrics()
    gauges = world.core.gauges()
    for _ in range(2):
        metrics.set_core(gauges)
    assert value(metrics, "num_preemptions_total") == gauges["retractions_total"]
    metrics.set_core({**gauges, "retractions_total": 0})
    metrics.set_core({**gauges, "retractions_total": 2})
    assert value(metrics, "num_preemptions_total") == gauges["retractions_total"] + 2


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_the_policies_are_labels_of_one_metric(policy: str) -> None:
    """Whoever compares two daemons reads from each what it runs with."""
    metrics = Metrics()
    config = CoreConfig(eviction_policy=policy)
    metrics.set_life("a life", config)
    assert value(metrics, "policies", **{name: getattr(config, name) for name in POLICIES}) == 1
