"""Expected output: what the price of an admission counts of the output that running requests may still ask for."""

from __future__ import annotations

import random

import pytest

from daemon.core.expected import (
    MARGIN_FALL_PPM,
    MARGIN_MAX_PPM,
    MARGIN_MIN_PPM,
    MARGIN_RAISE_PPM,
    SHARE_MIN_PPM,
    SHARE_ONE_PPM,
    SHARE_START_PPM,
    Expected,
)
from daemon.core.limits import CoreConfig
from tests.core.world import World


def test_each_namespace_learns_from_its_own_ends() -> None:
    """One that uses all it may ask for and one that uses little get estimates of their own, within a few ends."""
    expected = Expected(full=False)
    for _ in range(40):
        expected.finished("long", 100, 100)
        expected.finished("short", 5, 1000)
    assert expected.share_ppm("long") > 990_000
    assert expected.share_ppm("short") <= SHARE_MIN_PPM
    assert SHARE_MIN_PPM < expected.share_ppm("new") < SHARE_ONE_PPM, "one seen first begins with all ends together"
    expected.finished("new", 0, 0)
    assert expected.content() == expected.content()


def test_a_retraction_tightens_all_and_steps_relax_them() -> None:
    """The margin is a factor on every estimate: it falls with each step to a fifth, rises to one and a half, and what
    is expected is never more than everything."""
    expected = Expected(full=False)
    expected.tighten()
    assert expected.share_ppm("a") == SHARE_START_PPM * (SHARE_ONE_PPM + MARGIN_RAISE_PPM) // SHARE_ONE_PPM
    for _ in range(3):
        expected.relax()
    factor = SHARE_ONE_PPM + MARGIN_RAISE_PPM - 3 * MARGIN_FALL_PPM
    assert expected.share_ppm("a") == SHARE_START_PPM * factor // SHARE_ONE_PPM
    for _ in range(20):
        expected.tighten()
    assert expected.share_ppm("a") == SHARE_START_PPM * (SHARE_ONE_PPM + MARGIN_MAX_PPM) // SHARE_ONE_PPM
    for _ in range(40):
        expected.finished("a", 9, 9)
    assert expected.share_ppm("a") == SHARE_ONE_PPM
    for _ in range(4000):
        expected.relax()
    assert expected.share_ppm("b") == expected.share_ppm("a") > (SHARE_ONE_PPM + MARGIN_MIN_PPM) * 99 // 100


def test_full_reserve_expects_everything() -> None:
    """Whatever was learned, every share is one."""
    expected = Expected(full=True)
    expected.finished("a", 1, 1000)
    expected.began("a", 10)
    assert expected.share_ppm("a") == expected.mean_ppm() == SHARE_ONE_PPM


def test_the_mean_over_rows_is_that_of_a_recount() -> None:
    """Rows begin and leave, namespaces learn: the running sums give what a sum over all rows gives."""
    for seed in range(30):
        rng, expected = random.Random(seed), Expected(full=False)
        rows: list[tuple[str, int]] = []
        for _ in range(200):
            if rows and rng.random() < 0.4:
                expected.left(*rows.pop(rng.randrange(len(rows))))
            elif rng.random() < 0.3:
                expected.finished(rng.choice("abc"), rng.randint(0, 50), 50)
            else:
                rows.append((rng.choice("abc"), rng.randint(0, 100)))
                expected.began(*rows[-1])
            weight = sum(tokens for _, tokens in rows)
            if weight:
                weighted = sum(tokens * expected.share_ppm(name) for name, tokens in rows)
                assert expected.mean_ppm() == -(-weighted // weight)
                some = rows[: len(rows) // 2]
                rest = rows[len(some) :]
                if sum(tokens for _, tokens in rest):
                    weighted = sum(tokens * expected.share_ppm(name) for name, tokens in rest)
                    assert expected.mean_ppm(some) == -(-weighted // sum(tokens for _, tokens in rest))


def test_the_number_of_estimates_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespaces without end cost a bounded number of estimates; those with rows are kept."""
    monkeypatch.setattr("daemon.core.expected.NAMESPACES_MAX", 4)
    expected = Expected(full=False)
    expected.finished("kept", 1, 100)
    kept = expected.share_ppm("kept")
    expected.began("kept", 10)
    for number in range(20):
        expected.finished(f"n{number}", 1, 1)
    assert expected.share_ppm("kept") == kept
    assert len(expected.content()[-1]) <= 4  # type: ignore[arg-type]
    expected.left("kept", 10)


def test_outputs_that_end_at_their_limit_are_learned() -> None:
    """Requests that always use all they ask for: few are retracted, and none more than a few times."""
    world = World(
        CoreConfig(page_size=1, max_running_requests=8, max_batched_tokens=64, max_queued_requests=200),
        pages=100,
        caching=False,
    )
    for k in range(100):
        world.send(f"r{k}", 5, 20)
    world.run()
    world.check_rest()
    retracted = world.verdicts("retracted")
    assert len(retracted) <= 25
    assert max((decision.numbers["times"] for decision in retracted), default=0) <= 3
    estimate = world.core._state.expected.content()[0]
    assert isinstance(estimate, int)
    assert estimate > 950_000
