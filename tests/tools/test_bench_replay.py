"""The bench of replay: it measures what was reproduced, and its targets can be missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import bench_replay
from tools.bench_replay import problems, record, recorded_s, replayed
from tools.ends import Unreadable


def test_a_recorded_load_is_replayed_beside_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So many requests run, the journal is reproduced by two processes, and its time is that of its steps in flight."""
    record(tmp_path / "j", "hybrid", 8, 60)
    busy_s, span_s = recorded_s(str(tmp_path / "j"))
    assert 60 * 0.005 < busy_s <= span_s  # a step takes 5 ms at least
    assert bench_replay.main(["--journal", str(tmp_path / "j"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (row,) = shown["rows"]
    assert row["steps"] >= 60
    assert row["recorded_busy_s"] == round(busy_s, 1)
    assert row["times_real"] == pytest.approx(busy_s / row["elapsed_s"], abs=0.1)
    assert min(row["core_peak_mib"], row["ranks_peak_mib"]) > 10


def test_what_is_not_reproduced_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged journal has no speed; nor has a directory without one."""
    record(tmp_path / "j", "full", 4, 20)
    path = next((tmp_path / "j").glob("*.kvj"))
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(Unreadable, match="not reproduced, exit code 4"):
        replayed(tmp_path / "j", 1)
    assert bench_replay.main(["--journal", str(tmp_path / "nothing")]) == 2
    assert "there is no such directory" in capsys.readouterr().err


def test_targets_can_be_missed() -> None:
    """Each target has a side on which it is missed."""
    row = {"shape": "full", "processes": 2, "steps_per_minute_of_free_cores": 60_000, "growth": 1.0}
    assert problems([row]) == []
    assert "a minute" in problems([row | {"steps_per_minute_of_free_cores": 40_000}])[0]
    assert "the memory" in problems([row | {"growth": 2.0}])[0]
    fast = row | {"times_real": 90.0, "times_real_of_free_cores": 120.0}
    assert problems([fast]) == []
    assert "faster than recorded" in problems([fast | {"times_real_of_free_cores": 80.0}])[0]
