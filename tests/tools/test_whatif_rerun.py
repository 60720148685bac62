"""What-if beside a real daemon: a run is recorded on modeled ranks, predicted, and run again."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from allocator.columns import pack_i64
from daemon.config import resolve
from ipc.messages import Generate, Sampling
from tools.trim import main as trim
from tools.whatif.command import main
from tools.whatif.pressured import Load, draw
from tools.whatif.rerun import Sending, run_server, settings_for

EOS = 2
OPTIONS = "delay_us=6000,depth=20,eos_ppm=60000"
ARENA_BYTES = 2560 * 411
FEW = Load(requests=36, seconds=1.2, talks=6, max_tokens=60, long_tokens=30, burst=6, system_tokens=96)


def record(directory: Path, requests: list[Sending]) -> str:
    """Serve requests for real; the run directory."""
    flags = {"rank_runner": "modeled", "rank_option": OPTIONS, "max_running_requests": "8", "snapshot_bytes": "64KiB"}
    settings = settings_for(resolve("daemon", {**flags, "enable_priority_preemption": "true"}, {}), ARENA_BYTES)
    return str(run_server(settings, requests, directory))


def test_a_real_run_is_predicted_and_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests, outputs and ends of the rerun are those of the recorded run, under another policy and arena.

    One ends by a stop string that its client finds. No time is asserted: the machine of a test has none to spare.
    """
    requests = draw(FEW._replace(hang_up_one_in=0), 3)
    stopped = Generate("s", pack_i64([5, 6, 7]), Sampling(temperature=0.0), max_tokens=50, min_tokens=50)
    run_dir = record(tmp_path, [*requests, Sending(1_300_000_000, stopped, -1, (17,))])
    capsys.readouterr()
    asked = [run_dir, "schedule_policy=fcfs", "arena_bytes=+10%", "--replays", "1", "--json"]
    assert main(asked) == 2
    assert "--enable-priority-preemption" in capsys.readouterr().err
    asked[1] = "schedule_policy=lpm"
    assert main([*asked, "--rerun"]) == 0
    found = json.loads(capsys.readouterr().out)
    runs = found["runs"]
    assert list(runs) == ["recorded", "unchanged", "changed", "rerun", "at the rerun's pace"]
    for name, figures in runs.items():
        assert (figures["requests"], figures["live"]) == (37, 0), name
        assert figures["ends"] == runs["recorded"]["ends"], name
        assert sum(figures["ends"].values()) == 37
    assert found["arena_bytes"]["changed"] == round(ARENA_BYTES * 1.1) // 256 * 256
    assert set(found["paces"]) == {"recorded", "rerun"}
    assert min(pace["forwards"] for pace in found["paces"].values()) > 50
    assert not [note for note in found["notes"] if "another length" in note]


def test_a_trimmed_journal_begins_at_its_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was live at the oldest snapshot begins there; later requests are all there."""
    rng = random.Random(1)
    run_dir = record(
        tmp_path,
        [
            Sending(
                at * 30_000_000,
                Generate(f"t{at}", pack_i64([rng.randrange(9, 999) for _ in range(600)]), Sampling(0.0), max_tokens=40),
            )
            for at in range(50)
        ],
    )
    assert trim([run_dir]) == 0
    assert not (Path(run_dir) / "journal" / "0000000001.kvj").exists(), "something was trimmed"
    capsys.readouterr()
    assert main([run_dir, "arena_bytes=+25%", "--replays", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    recorded, unchanged = found["runs"]["recorded"], found["runs"]["unchanged"]
    assert 0 < recorded["requests"] <= 50
    assert unchanged["requests"] == recorded["requests"]
    assert (recorded["live"], unchanged["live"]) == (0, 0)
    assert unchanged["ends"] == recorded["ends"]
    assert any("snapshot" in note for note in found["notes"])
