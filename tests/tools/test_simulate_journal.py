"""The journal of a simulated run: as a daemon's, it replays; and it changes nothing of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.simulate_world import conversations, write
from tools.replay import replay_directory
from tools.simulate import command

BANDS = ["--band", "full=4096/page", "--band", "window:128=4096/page", "--band", "state:256=9000/slot"]
SETTINGS = ["--page-size", "16", "--max-running-requests", "8", "--no-bound", "--json"]


def _run(trace: Path, *flags: str) -> list[str]:
    return [str(trace), *BANDS, *SETTINGS, "--policy", "value", "--arena-fraction", "10%", *flags]


def test_a_recorded_run_replays_and_is_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps, decisions and digests of three bands under pressure are reproduced, and the figures do not change."""
    trace = write(tmp_path / "trace.jsonl", conversations(3, 40, 30, block=64))
    assert command.main(_run(trace, "--block-tokens", "64")) == 0
    plain = json.loads(capsys.readouterr().out)["runs"][0]
    assert command.main(_run(trace, "--block-tokens", "64", "--journal", str(tmp_path / "j"))) == 0
    recorded = json.loads(capsys.readouterr().out)["runs"][0]
    timed = {"wall_s", "core_us_per_step"}
    assert {k: v for k, v in recorded.items() if k not in timed} == {k: v for k, v in plain.items() if k not in timed}
    verdict = replay_directory(str(tmp_path / "j"))
    assert verdict.divergence is None
    assert verdict.counts.steps == recorded["steps"] == verdict.counts.digests
    assert verdict.replay.core is not None
    assert verdict.replay.core.gauges()["finished_total"] == recorded["core"]["finished"] > 30


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy", "value,lru"], "one run"),
        (["--arena-fraction", "10%,20%"], "one run"),
        (["--journal", ""], "names no directory"),
        (["--journal", "-"], "names no directory"),
    ],
)
def test_a_journal_is_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    """Two runs, or no directory, are refused before anything runs."""
    trace = write(tmp_path / "trace.jsonl", conversations(3, 4, 30))
    assert command.main(_run(trace, "--journal", str(tmp_path / "j"), *flags)) == 2
    assert words in capsys.readouterr().err


def test_a_journal_goes_into_a_directory_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is in a directory already stays as it was."""
    trace = write(tmp_path / "trace.jsonl", conversations(3, 4, 30))
    assert command.main(_run(trace, "--journal", str(tmp_path))) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]
