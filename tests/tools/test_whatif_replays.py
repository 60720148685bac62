"""What-if's replays: with the same settings they are the recorded run, with others they are a run with those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from allocator.geometry import BandGeometry
from tests.tools.whatif_runs import CONFIG, FULL, HYBRID, geometry_of, requests, serve
from tools.whatif.command import main

ARENAS = {"full": (FULL, 40_960), "hybrid": (HYBRID, 122_880)}
SAME: tuple[str, ...] = (
    "requests",
    "refused",
    "refusals",
    "ends",
    "live",
    "cached_tokens",
    "computed_prompt_tokens",
    "retractions",
)
SAME += ("parks", "evicted_units", "waiting_ms", "first_token_ms", "request_ms", "output_tokens", "steps")


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The document of one question."""
    capsys.readouterr()
    assert main([*arguments, "--json", "--replays", "1"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def same(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Figures that differ, with both values."""
    return {name: (one[name], other[name]) for name in SAME if one[name] != other[name]}


@pytest.mark.parametrize("name", ARENAS)
def test_a_replay_without_changes_is_the_recorded_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every figure of a pressured run with retractions, evictions and clients that leave comes out as recorded."""
    bands, arena_bytes = ARENAS[name]
    told = serve(CONFIG, geometry_of(bands, arena_bytes), requests(1), tmp_path)
    found = ask(capsys, str(tmp_path))
    assert same(dict(told), found["runs"]["recorded"]) == {}
    assert same(found["runs"]["recorded"], found["runs"]["unchanged"]) == {}
    assert told["retractions"] > 3, "the run is under pressure"
    assert told["ends"].get("abort", 0)
    assert told["cached_tokens"] > 500


@pytest.mark.parametrize(
    ("name", "changes", "fields", "times"),
    [
        ("full", ["arena_bytes=+25%"], {}, 1.25),
        ("full", ["schedule_policy=lpm"], {"schedule_policy": "lpm"}, 1),
        (
            "full",
            ["disable_overlap=true", "enable_priority_preemption=no"],
            {"overlap": False, "priority_preemption": False},
            1,
        ),
        ("full", ["reserve=full", "max-running-requests=7"], {"reserve": "full", "max_running_requests": 7}, 1),
        ("hybrid", ["eviction_policy=lru"], {"eviction_policy": "lru"}, 1),
        ("hybrid", ["arena_bytes=+25%", "checkpoint_policy=grid"], {"checkpoint_policy": "grid"}, 1.25),
        ("full", ["enable_prefix_caching=no"], {"enable_prefix_caching": False}, 1),
    ],
)
def test_a_replay_with_changes_is_a_run_with_them(
    name: str,
    changes: list[str],
    fields: dict[str, Any],
    times: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is predicted from one run's journal is, figure for figure, what the same traffic does under it."""
    bands, arena_bytes = ARENAS[name]
    serve(CONFIG, geometry_of(bands, arena_bytes), requests(2, patient=True), tmp_path)
    config = msgspec.structs.replace(CONFIG, **fields)
    truth = serve(config, geometry_of(bands, round(arena_bytes * times), config), requests(2, patient=True), None)
    found = ask(capsys, str(tmp_path), *changes)
    assert same(dict(truth), found["runs"]["changed"]) == {}
    assert same(dict(truth), found["runs"]["recorded"]), "the change makes a difference"


def test_pages_of_another_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With pages of twice the tokens, which take twice the bytes, the prediction is a run with those."""
    serve(CONFIG, geometry_of(FULL, 40_960), requests(3, patient=True), tmp_path)
    config = msgspec.structs.replace(CONFIG, page_size=32)
    wide = [BandGeometry("full", "full", 1024)]
    truth = serve(config, geometry_of(wide, 40_960, config), requests(3, patient=True), None)
    found = ask(capsys, str(tmp_path), "page_size=32")
    assert same(dict(truth), found["runs"]["changed"]) == {}


def test_what_is_left_of_outputs_nobody_saw_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A client that left makes its output's end unknown; a faster world computes beyond it, and a note says so."""
    serve(CONFIG, geometry_of(FULL, 40_960), requests(4), tmp_path)
    found = ask(capsys, str(tmp_path), "arena_bytes=+200%")
    assert any("made up" in note for note in found["notes"])


def test_the_table_has_every_run_and_how_far_it_is_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json a person sees the three columns, the change and the pace."""
    serve(CONFIG, geometry_of(FULL, 40_960), requests(1, 30), tmp_path)
    assert main([str(tmp_path), "arena_bytes=+25%", "--replays", "2"]) == 0
    text = capsys.readouterr().out
    for words in ("recorded", "unchanged", "changed", "arena_bytes=+25%", "retractions", "waiting, mean", "4.00 ms"):
        assert words in text


def test_nothing_is_written_into_the_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files of the journal are the same bytes afterwards."""
    serve(CONFIG, geometry_of(FULL, 40_960), requests(1, 20), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ask(capsys, str(tmp_path), "schedule_policy=lpm")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
