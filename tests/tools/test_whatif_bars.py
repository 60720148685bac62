"""What-if's bars: each figure says how far off it may be before anything runs again, and is marked when it is more."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from tests.tools.test_whatif_doubts import FITS, figures
from tools.whatif.account import Figures, spread, together
from tools.whatif.bars import bar, bars, outside
from tools.whatif.doubts import doubts
from tools.whatif.rows import CHANGED, PACED, RECORDED, RERUN, ROWS, UNCHANGED, Row
from tools.whatif.show import judged, with_bar

ROW = {row.name: row for row in ROWS}
CACHED = ROW["prompt tokens found in the cache"]
MEDIAN = ROW["time to first token, median"]


def runs(**made: list[Figures]) -> dict[str, Figures]:
    """Each run from its replays; those that are not named have the plain figures."""
    plain = {name: [figures()] for name in (RECORDED, UNCHANGED, CHANGED)}
    return {name: together(some) for name, some in (plain | made).items()}


def document(found: dict[str, Figures], row: Row, off: float) -> dict[str, Any]:
    """So much of an answer as its table reads for one row of the changed replay."""
    return {
        "runs": found,
        "bars": bars(found),
        "off": {CHANGED: {row.name: off}},
        "outside": {CHANGED: [row.name] if outside(found, CHANGED, row) else []},
    }


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({}, 0.0),
        ({CHANGED: [figures(cached_tokens=90), figures(cached_tokens=110)]}, 20.0),
        ({UNCHANGED: [figures(cached_tokens=85)]}, 15.0),
        ({UNCHANGED: [figures(cached_tokens=115)], CHANGED: [figures(cached_tokens=200)]}, 30.0),
        ({RECORDED: [figures(cached_tokens=0)]}, 0.0),
    ],
)
def test_the_bar_of_a_prediction_is_the_largest_of_what_is_known(made: Any, expected: float) -> None:
    """How far replays lie apart, or what the unchanged replay misses, as a part of the prediction."""
    assert bar(runs(**made), CHANGED, CACHED) == pytest.approx(expected)


def test_the_bar_of_a_replay_without_changes_does_not_know_what_was_recorded() -> None:
    """Else nothing could be outside of it."""
    found = runs(unchanged=[figures(cached_tokens=80), figures(cached_tokens=84)])
    assert bar(found, UNCHANGED, CACHED) == 4
    assert outside(found, UNCHANGED, CACHED)
    assert not outside(runs(unchanged=[figures(cached_tokens=90), figures(cached_tokens=101)]), UNCHANGED, CACHED)


def test_what_is_run_for_real_several_times_has_a_bar_of_its_own() -> None:
    """A prediction is not outside of it because one real run of two is."""
    found = runs(rerun=[figures(cached_tokens=100), figures(cached_tokens=130)])
    assert bars(found)[RERUN][CACHED.name] == 30
    assert not outside(found, CHANGED, CACHED)
    assert outside(runs(rerun=[figures(cached_tokens=114), figures(cached_tokens=116)]), CHANGED, CACHED)
    assert not outside(runs(), CHANGED, CACHED), "nothing was run for real"


@pytest.mark.parametrize(("real", "marked"), [(1010, False), (1020, True)])
def test_a_hundredth_is_never_outside(real: int, marked: bool) -> None:
    """Five replays may agree by chance on a figure that is not that certain."""
    found = runs(changed=[figures(cached_tokens=1000)] * 2, rerun=[figures(cached_tokens=real)])
    assert outside(found, CHANGED, CACHED) == marked


def test_a_median_between_two_crowds_has_a_wide_bar_and_a_note() -> None:
    """Half of the requests start at once and half wait: a few more of either move it from one end to the other."""
    waits = spread(array("d", [100.0] * 99 + [2000.0, 5000.0] + [9000.0] * 99))
    assert (waits["p50"], waits["p50_low"], waits["p50_high"]) == (3500.0, 100.0, 9000.0)
    found = runs(changed=[figures(first_token_ms=waits)])
    assert bar(found, CHANGED, MEDIAN) == 5500
    (note,) = [note for note in doubts(found, {RECORDED: FITS}) if "two in a hundred" in note]
    assert "time to first token, median, 100 ms to 9.0 s" in note
    steady = spread(array("d", [float(1000 + at) for at in range(200)]))
    assert bar(runs(changed=[figures(first_token_ms=steady)]), CHANGED, MEDIAN) < 5


def test_a_figure_outside_of_its_bar_is_marked_in_the_table() -> None:
    """`!` stands behind how far it is off, and ± behind the figure."""
    found = runs(changed=[figures(cached_tokens=180), figures(cached_tokens=220)], rerun=[figures(cached_tokens=100)])
    made = document(found, CACHED, 1.0)
    assert (with_bar(made, CHANGED, CACHED), judged(made, CHANGED, CACHED)) == ("200 \u00b120%", "+100.0% !")
    found = runs(changed=[figures(cached_tokens=95), figures(cached_tokens=125)], rerun=[figures(cached_tokens=100)])
    made = document(found, CACHED, 0.1)
    assert judged(made, CHANGED, CACHED) == "+10.0%"
    assert PACED not in made["bars"]
