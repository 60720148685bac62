"""The pace of a recorded run's ranks: what is fitted is what made the times."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tools.whatif import pace
from tools.whatif.pace import Pace, Samples, Work

TRUE = Pace(12_000_000.0, 9_000.0, 250_000.0, 40_000.0, start_ns=900_000)


def taken(count: int, off: Callable[[random.Random], float], overlap: bool = True) -> Samples:
    """Forwards of all sizes on ranks of the true pace, each off by some factor, now and then on idle ranks."""
    rng, samples = random.Random(5), Samples()
    now, reported, before = 1_000_000_000, 0, 0
    for _ in range(count):
        work = Work(rng.choice([0, 0, 17, 200, 512]), rng.randint(0, 40), rng.uniform(0, 30))
        idle = not overlap or rng.random() < 0.1  # nothing was in flight
        now = reported + rng.randint(200_000, 900_000) if idle else max(now, before + 100_000)
        begins = max(now + TRUE.start_ns, reported)
        ended = begins + round(TRUE.forward_ns(work) * off(rng))
        samples.add(work, now, reported, ended)
        samples.turned(130_000)
        before, reported = reported, ended
    return samples


def test_exact_times_are_fitted_exactly() -> None:
    """Every part comes out, and the way to idle ranks."""
    fitted = taken(400, lambda rng: 1.0).fit()
    for name in ("fixed_ns", "prompt_token_ns", "decoding_row_ns", "context_ns"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert fitted.start_ns == pytest.approx(TRUE.start_ns, rel=1e-2)
    assert (fitted.turn_ns, fitted.forwards, fitted.pauses) == (130_000, 400, 0)
    assert fitted.error < 1e-4


def test_without_overlap_the_way_to_the_ranks_is_part_of_every_forward() -> None:
    """Nothing tells the two apart, and their sum is what counts."""
    fitted = taken(400, lambda rng: 1.0, overlap=False).fit()
    assert fitted.start_ns == 0
    assert fitted.fixed_ns == pytest.approx(TRUE.fixed_ns + TRUE.start_ns, rel=1e-3)


def test_noise_keeps_the_mean_and_pauses_are_left_out() -> None:
    """Forwards that are a fifth too long now and then make the mean longer; a pause of a hundred forwards does not."""
    rng_off = lambda rng: 100.0 if rng.random() < 0.005 else rng.choice([0.95, 1.0, 1.05, 1.2])  # noqa: E731
    fitted = taken(2000, rng_off).fit()
    work = Work(200, 20, 10.0)
    assert fitted.forward_ns(work) == pytest.approx(TRUE.forward_ns(work) * 1.05, rel=0.03)
    assert 3 <= fitted.pauses <= 25
    assert 0.01 < fitted.error < 0.15


def test_no_part_is_negative() -> None:
    """A device that takes less for more, by chance, is not extrapolated below nothing."""
    samples = Samples()
    for at in range(60):
        samples.add(Work(at, 60 - at, 0.0), at * 10**8, 0, at * 10**8 + 5_000_000 - at * 20_000)
    fitted = samples.fit()
    assert min(fitted.fixed_ns, fitted.prompt_token_ns, fitted.decoding_row_ns, fitted.context_ns) >= 0
    assert fitted.forward_ns(Work(0, 0, 0.0)) > 0


def test_samples_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many forwards some are kept, over all of the run."""
    monkeypatch.setattr(pace, "KEPT_MAX", 100)
    samples = Samples()
    for at in range(1005):
        samples.add(Work(1, 1, 0.0), at * 100, at * 100 - 10, at * 100 + 50)
    assert len(samples._rows) // 6 <= 100
    assert samples.fit().forwards == 1005


def test_without_a_forward_there_is_no_pace() -> None:
    """It is said, not guessed."""
    with pytest.raises(ValueError, match="no forward"):
        Samples().fit()


def test_one_slow_first_forward_says_nothing_of_the_way_to_idle_ranks() -> None:
    """Ranks warm up in the first of all: neither it nor the fit of the others may be moved by that."""
    samples, reported = Samples(), 1_000_000_000
    first = Work(300, 0, 0.3)
    samples.add(first, reported - 475_000_000, 0, reported)
    samples.first(first, 475_000_000)
    samples.first(first, 465_000_000)
    rng = random.Random(2)
    for _ in range(300):
        work = Work(rng.choice([0, 0, 0, 200]), rng.randint(1, 40), rng.uniform(0, 30))
        took = TRUE.forward_ns(work)
        samples.add(work, reported - took // 2, reported, reported + took)
        reported += took
    fitted = samples.fit()
    assert fitted.start_ns == 0
    assert fitted.fixed_ns == pytest.approx(TRUE.fixed_ns, rel=1e-2)
    assert fitted.prompt_token_ns == pytest.approx(TRUE.prompt_token_ns, rel=1e-2)
    assert fitted.error < 0.01
    assert fitted.warm_ns == pytest.approx(470_000_000 - TRUE.forward_ns(first), rel=1e-2), "of an epoch's first"


def test_no_forward_starts_later_than_those_that_waited_for_another_one() -> None:
    """Where idle ranks were slow to begin for a reason of that moment, forwards in a row are not made longer by it."""
    samples, now = Samples(), 1_000_000_000
    for at in range(400):
        if at % 40 == 0:  # idle: 90 ms until it begins
            now += 500_000_000
            samples.add(Work(0, 8, 1.0), now - 100_000_000, now - 200_000_000, now)
        else:
            samples.add(Work(0, 8, 1.0), now - 7_000_000, now, now + 10_000_000)
            now += 10_000_000
    fitted = samples.fit()
    assert fitted.start_ns <= 7_000_000
    assert fitted.forward_ns(Work(0, 8, 1.0)) == pytest.approx(10_000_000, rel=1e-2)


def test_late_reports_make_single_forwards_differ_and_stretches_not() -> None:
    """Every second report is late: what one forward seems to take longer the next one takes less."""
    samples, now = Samples(), 1_000_000_000
    for at in range(640):
        took = 15_000_000 if at % 2 else 5_000_000
        samples.add(Work(0, 8, 1.0), now - 1_000_000, now, now + took)
        now += took
    fitted = samples.fit()
    assert fitted.error == pytest.approx(0.5, rel=0.05)
    assert fitted.stretch < 0.01
    assert fitted.slow_ns == 0


def test_a_machine_that_is_slow_for_a_while_is_told_with_how_long_and_how_slow() -> None:
    """A fifth of the forwards in one go takes three times as long."""
    samples, now = Samples(), 1_000_000_000
    for at in range(960):
        took = 30_000_000 if 320 <= at < 512 else 10_000_000
        samples.add(Work(0, 8, 1.0), now - 1_000_000, now, now + took)
        now += took
    fitted = samples.fit()
    assert fitted.slow_ns == 192 * 30_000_000
    assert fitted.slow_ns / fitted.fitted_ns == pytest.approx(0.43, abs=0.01)
    assert fitted.slow_times == pytest.approx(30 / 14, rel=0.02), "beside the mean, which has them in it"
    assert fitted.stretch == pytest.approx(0.46, abs=0.02)
    assert sorted(fitted.off_ns.round(-6).tolist()) == [-4e6] * 768 + [16e6] * 192
