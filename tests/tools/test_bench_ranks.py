"""`bench ranks`: real rank processes get steps of a real core, and what comes back is measured."""

from __future__ import annotations

import json

import pytest

from daemon.rank.modeled import read_options
from tools import bench_ranks
from tools.bench_ranks import main, parse_layouts, settings_of


def test_two_processes_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure of a layout of two ranks is there, and a step's way takes longer than nothing."""
    assert main(["--layouts", "1x2", "--running", "8", "--steps", "5", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["stages"], row["ranks"], row["processes"], row["running"]) == (1, 2, 2, 8)
    assert row["rows_per_step"] == 8
    assert 0 < row["trip_us_p50"] <= row["trip_us_p99"]
    assert row["core_us_p50"] > 0
    assert row["apply_us_p50"] > 0
    assert row["traffic_us_p50"] < row["trip_us_p99"]


Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]


def test_a_rank_that_does_not_start_is_named(monkeypatch: Patch, capsys: Output) -> None:
    """The bench ends with what the rank said, instead of waiting for it."""
    monkeypatch.setattr(bench_ranks, "VOCAB", 8)
    assert main(["--layouts", "1x1", "--running", "2", "--steps", "2"]) == 1
    assert "first_token=32 must be below vocab_size=8" in capsys.readouterr().err


def test_ranks_take_requests_as_long_as_the_run() -> None:
    """The modeled runner's own limit of a request would end every request in the middle of a long run."""
    settings = settings_of(1, 1, 2, 20_000)
    assert read_options(settings.options).max_model_len == settings.max_model_len == 20_000


def test_layouts_are_checked() -> None:
    """Text that is no layout is named."""
    assert parse_layouts("1x2,4x1") == [(1, 2), (4, 1)]
    for wrong in ("2", "x", "0x1", "9x9", "1x-1"):
        with pytest.raises(ValueError, match="STAGESxRANKS"):
            parse_layouts(wrong)
