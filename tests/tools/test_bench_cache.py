"""The bench of the cache: it runs, its rows say what was measured, and a broken promise is told."""

from __future__ import annotations

import json

import pytest

from tools import bench_cache

SMALL = ["--tokens", "4096", "--leaves", "300", "--pages", "1,20", "--nodes", "200", "--running", "2", "--steps", "40"]


def test_every_part_has_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole prompts are found, every policy gives up pages, and a full arena takes its pages from the cache."""
    assert bench_cache.main([*SMALL, "--repeats", "5", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["found"] == 4096 or "state" in row["bands"] for row in rows["match"])
    assert {row["policy"] for row in rows["reclaim"]} == set(bench_cache.EVICTION_POLICIES)
    assert {row["pages"] for row in rows["reclaim"]} == {1, 20}
    by_kind = {(row["bands"], row["cache"]): row for row in rows["step"]}
    for family in bench_cache.FAMILIES:
        assert by_kind[family, "empty"]["nodes"] == 0
        assert by_kind[family, "cached"]["nodes"] == 200
        assert by_kind[family, "cached"]["evicted_units"] == 0
        assert by_kind[family, "pressed"]["evicted_units"] > 0


def test_a_cut_path_is_walked_node_by_node() -> None:
    """The short shape of the look-up really has a node every 256 tokens."""
    prompt = bench_cache.np.arange(4096, dtype=bench_cache.np.int64)
    long, short = (bench_cache.known_prompt(prompt, "full", cut).tree for cut in (False, True))
    for tree, nodes in ((long, 2), (short, 16)):
        node, count = tree.match("", prompt, 4096).node, 0
        while node is not None and node.parent is not None:
            node, count = node.parent, count + 1
        assert count in (nodes, nodes - 1)


def test_a_promise_that_does_not_hold_is_told() -> None:
    """One line per cost that is passed, none where all hold."""
    rows = {
        "match": [{"bands": "full", "node_tokens": 256, "match_ms_p50": 1.5}],
        "reclaim": [{"bands": "full", "policy": "value", "pages": 1, "us_p50": 25.0}],
        "step": [
            {"bands": "full", "cache": "empty", "nodes": 0, "step_ms_p99": 0.1},
            {"bands": "full", "cache": "cached", "nodes": 9, "step_ms_p99": 0.3},
        ],
    }
    assert len(bench_cache.failures(rows)) == 3
    rows["match"][0]["match_ms_p50"] = rows["reclaim"][0]["us_p50"] = rows["step"][1]["step_ms_p99"] = 0.1
    assert bench_cache.failures(rows) == []


@pytest.mark.parametrize("arguments", [["--pages", "0"], ["--policies", "best"], ["--steps", "0"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With the flag in the message."""
    with pytest.raises(SystemExit):
        bench_cache.main(arguments)
    assert arguments[0] in capsys.readouterr().err
