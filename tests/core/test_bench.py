"""The bench of the core: it runs, and its JSON has the fields that others read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from daemon.core.order import POLICIES
from journal.reader import read_records
from journal.records import Kind
from journal.storage import DiskStorage
from tools.bench_core import main, measure


def test_bench_prints_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """One row per concurrency, in order, with positive times."""
    assert main(["--running", "1,5", "--steps", "20", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["running"] for row in rows] == [1, 5]
    for row in rows:
        assert 0 < row["step_ms_p50"] <= row["step_ms_p99"]
        assert row["journal_us_p50"] > 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_bench_measures_a_long_queue_under_every_policy(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The requests that wait are there in every measured step, and none of them starts."""
    assert main(["--running", "2", "--steps", "10", "--waiting", "60", "--policy", policy, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["waiting"], row["policy"]) == (60, policy)
    assert row["step_ms_p50"] > 0


def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json a table for people."""
    assert main(["--running", "2", "--steps", "5"]) == 0
    assert "running" in capsys.readouterr().out


def test_bench_writes_what_a_daemon_writes(tmp_path: Path) -> None:
    """The journal that is measured holds all records of an iteration: digests, report, tick and step, in this order."""
    measure(2, 10, tmp_path)
    kinds = [record.kind for record in read_records(DiskStorage(tmp_path))]
    assert kinds[-4:] == [Kind.DIGESTED, Kind.REPORTED, Kind.TICKED, Kind.STEPPED]
    assert kinds.count(Kind.DIGESTED) == kinds.count(Kind.REPORTED) >= 10
