"""`bench model` on a tiny model: sides in turns, a table for people and rows for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rank.models import tiny_model
from tools.bench_model import main


def test_rows_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row per side and concurrency, with as many times as rounds and the rate of the median one."""
    model = str(tiny_model(tmp_path, "llama"))
    sizes = ["--prompt-tokens", "5", "--tokens", "4", "--rounds", "3", "--threads", "1", "--concurrency", "1", "3"]
    options = ["--model", model, *sizes, "--reference-dtype", "float32", "--dtype", "float32"]
    assert main([*options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["side"], row["concurrency"]) for row in rows] == [
        ("transformers float32", 1),
        ("bandmaster float32", 1),
        ("bandmaster float32", 3),
    ]
    for row in rows:
        assert len(row["seconds"]) == 3
        assert row["tokens_per_s"] == pytest.approx(row["concurrency"] * 4 / sorted(row["seconds"])[1], rel=0.05)


def test_a_missing_model_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and one line."""
    assert main(["--model", str(tmp_path / "nowhere")]) == 1
    assert "there is no model" in capsys.readouterr().err
