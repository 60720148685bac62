"""`bench serve`: what is sent, how rounds become rows, how sides are compared; families served for real."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.tidy.source import ROOT
from tools import bench_serve
from tools.bench_serve import OWN, all_rounds, compare, middle, peers
from tools.http_load import Load, Result, summary, take_event
from tools.serve_sides import Shape


def test_loads_are_read_and_written() -> None:
    """IN/OUT with or without shared tokens; anything else is refused with its text."""
    assert Shape.parse("128/64") == (0, 128, 64)
    assert Shape.parse("1024+64/32") == (1024, 64, 32)
    assert str(Shape.parse("1024+64/32")) == "1024+64/32"
    assert str(Shape.parse("5/1")) == "5/1"
    for text in ("128", "128/", "/64", "0/4", "4/0", "-1+4/4", "a/b", "1+2+3/4"):
        with pytest.raises(ValueError, match="--load"):
            Shape.parse(text)


def test_prompts_share_what_the_load_says_and_no_more() -> None:
    """The first tokens are the same in every prompt of a seed; the rest differs; lengths are exact."""
    load = Shape(20, 10, 4).of(Load("http://x", "m", seed=3))
    first, second = load.prompt(0), load.prompt(1)
    assert len(first) == len(second) == 30
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]
    assert first == load.prompt(0)
    assert Load("http://x", "m", prompt_tokens=10, seed=4).prompt(0) != first[20:]
    low = Load("http://x", "m", prompt_tokens=50, ids=(5, 9)).prompt(0)
    assert set(low) <= {5, 6, 7, 8}


def test_cached_tokens_come_from_the_usage() -> None:
    """Their share is of the prompt tokens of all good requests."""
    results = [Result(0, ended_s=1.0), Result(1, ended_s=1.0)]
    usage = {"completion_tokens": 4, "prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 60}}
    take_event(results[0], {"choices": [], "usage": usage}, 1.0)
    take_event(results[1], {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 100}}, 1.0)
    row = summary(2.0, results, 2)
    assert (row["cached_share"], row["output_tok_s"]) == (0.3, 4.0)


def test_rounds_become_medians() -> None:
    """Every number is the median of the rounds', errors are added up, all rates stay."""
    rounds = [
        {"output_tok_s": rate, "ttft_ms_p50": rate * 10, "errors": errors, "requests": 8, "first_error": text}
        for rate, errors, text in ((5.0, 0, ""), (1.0, 2, "gone"), (3.0, 1, "late"))
    ]
    assert middle(rounds) == {
        "output_tok_s": 3.0,
        "ttft_ms_p50": 30.0,
        "errors": 3,
        "requests": 8,
        "first_error": "gone",
        "rounds_tok_s": [5.0, 1.0, 3.0],
    }


def test_a_time_that_a_round_lacks_is_no_number() -> None:
    """A percentile of nothing is None; it is not mixed with numbers."""
    rounds: list[dict[str, Any]] = [{"output_tok_s": 1.0, "errors": 1, "ttft_ms_p50": value} for value in (None, 4.0)]
    assert middle(rounds)["ttft_ms_p50"] == 4.0
    assert middle(rounds[::-1])["ttft_ms_p50"] is None


def test_sides_are_compared_round_by_round() -> None:
    """The median of the ratios, not the ratio of the medians; one stream is compared with our one stream."""

    def row(side: str, concurrency: int, rates: list[float]) -> dict[str, Any]:
        return {"load": "1/1", "side": side, "concurrency": concurrency, "rounds_tok_s": rates}

    rows = [row(OWN, 1, [2.0, 4.0, 8.0]), row("peer", 1, [1.0, 1.0, 8.0]), row(OWN, 8, [9.0, 9.0, 9.0])]
    rows.append(row("peer", 8, [3.0, 0.0, 3.0]))
    compare(rows)
    assert rows[1]["beside"] == 2.0
    assert "beside" not in rows[0]
    assert "beside" not in rows[3], "a round without a rate compares with nothing"


def test_turns_go_through_every_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round measures load after load, concurrency after concurrency, side after side; prompts never come again."""
    seen: list[tuple[str, str, int, int]] = []

    class Fake:
        def __init__(self, name: str, only: list[int]) -> None:
            self.name = name
            self._only = only

        def concurrencies(self, asked: list[int]) -> list[int]:
            return [count for count in asked if count in self._only]

        def measure(self, shape: Shape, concurrency: int, requests: int, series: int) -> dict[str, Any]:
            seen.append((self.name, str(shape), concurrency, series))
            return {"output_tok_s": 1.0, "errors": 0, "requests": requests}

    options = bench_serve.parser().parse_args(["--concurrency", "1,2", "--load", "4/2", "8+4/2", "--rounds", "2"])
    rows = all_rounds([Fake(OWN, [1, 2]), Fake("one", [1])], options)
    once = [(OWN, 1), ("one", 1), (OWN, 2)]
    places = [(load, side, concurrency) for load in ("4/2", "8+4/2") for side, concurrency in once]
    assert [(load, side, concurrency) for side, load, concurrency, _ in seen] == places * 2
    series = [number for *_, number in seen]
    assert series == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7], "sides share a series' prompts, no two series do"
    assert [(row["load"], row["side"], row["concurrency"]) for row in rows] == [
        (load, side, concurrency) for load in ("4/2", "8+4/2") for side, concurrency in once
    ]
    assert [row["requests"] for row in rows[:3]] == [8, 8, 8]


def test_peers_have_names() -> None:
    """NAME=URL, once each, and never our own name."""
    assert peers(["a=http://h:1/", "b=http://h:2"]) == {"a": "http://h:1", "b": "http://h:2"}
    for wrong in (["http://h"], ["=http://h"], ["a="], ["a=x", "a=y"], [f"{OWN}=x"]):
        with pytest.raises(ValueError, match="NAME=URL"):
            peers(wrong)


@pytest.mark.parametrize(
    "wrong", [["--load", "x"], ["--beside", "x"], ["--family", "bamba", "--url", "http://h"], ["--concurrency", "0"]]
)
def test_wrong_arguments_end_before_a_server_starts(wrong: list[str]) -> None:
    """Exit code 2, as for every other command."""
    with pytest.raises(SystemExit) as ended:
        bench_serve.main(wrong)
    assert ended.value.code == 2


def test_an_unknown_family_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With the list of those there are."""
    assert bench_serve.main(["--family", "nothing"]) == 1
    assert "bamba" in capsys.readouterr().err


@pytest.mark.e2e
def test_a_family_is_served_beside_transformers_and_the_floor() -> None:
    """A hybrid family end to end: rows of every side, no errors, our own row with times."""
    command = [
        sys.executable,
        "-m",
        "tools.cli",
        "bench",
        "serve",
        "--json",
        "--family",
        "lfm2",
        "--concurrency",
        "1,2",
    ]
    command += ["--load", "16/8", "--requests", "2", "--beside-transformers", "--beside-floor"]
    command += ["--reference-dtype", "float32", "--", "--dtype", "float32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["side"], row["concurrency"]) for row in rows] == [
        (OWN, 1),
        ("transformers float32", 1),
        ("floor float32", 1),
        (OWN, 2),
        ("floor float32", 2),
    ]
    assert all(row["errors"] == 0 and row["output_tok_s"] > 0 for row in rows)
    assert rows[0]["output_tokens"] == 16
    assert rows[2]["beside"] == pytest.approx(rows[0]["output_tok_s"] / rows[2]["output_tok_s"], abs=0.001)
