"""`bandmaster bench allocator`: small pools of every shape give the promised rows, and what they say holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools import bench, bench_allocator
from tools.bench_allocator_memory import weigh
from tools.bench_allocator_world import Shape, World

SMALL = ["--slots", "2048", "--page-sizes", "1,16", "--running", "8", "--steps", "12", "--rounds", "2", "--mirror"]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """All rows of two small pools of each shape."""
    options = ["allocator", "--json", "--bands", "1,2,3", *SMALL]
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda text: printed.append(text))
        assert bench.main(options) == 0
    found: list[dict[str, Any]] = json.loads(printed[0])["rows"]
    return found


def test_every_part_of_every_pool_is_measured(rows: list[dict[str, Any]]) -> None:
    """Each part has rows of both chains, each row says what it counts, and times are positive and ordered."""
    for part in ("extend", "relief", "trace"):
        for pool in ("window+full", "state+window+full"):
            for page in (1, 16):
                mine = [r for r in rows if (r["part"], r.get("pool"), r.get("page_size")) == (part, pool, page)]
                assert {"logical", "physical"} <= {row["side"] for row in mine}, (part, pool, page)
    assert {row["op"] for row in rows if row["part"] == "capacity"} >= {"capacity_fits", "capacity_refused"}
    assert {row["side"] for row in rows if row["part"] == "trace"} == {"logical", "mirror", "physical"}
    for row in rows:
        assert row["counts"], row
        if row["part"] != "memory":
            assert 0 < row["cpu_us_p50"] <= row["cpu_us_p99"], row
            assert row["calls"] > 0, row


def test_relief_moves_no_more_than_it_must(rows: list[dict[str, Any]]) -> None:
    """Each relief row moved units, and at most 1.1 times the bytes of the proven lower bound."""
    relief = [row for row in rows if row["side"] == "physical" and row["op"].startswith("relief")]
    relief = [row for row in relief if not row["op"].endswith("no_move")]
    assert {row["op"] for row in relief} >= {
        "relief_take",
        "relief_take_large",
        "relief_take_in_flight",
        "relief_state_take",
    }
    for row in relief:
        assert row["moved_units_p50"] > 0, row
        assert row["least_bytes"] <= row["moved_bytes"] <= 1.1 * row["least_bytes"], row


def test_the_books_are_small(rows: list[dict[str, Any]]) -> None:
    """At page 16 and unit sizes of real models, both chains together weigh under 0.1% of the arena."""
    memory = [row for row in rows if row["part"] == "memory" and row["side"] == "both"]
    assert len(memory) >= 5
    assert all(0 < row["share_percent"] < 0.1 for row in memory), memory


def test_weighing_counts_a_column_once() -> None:
    """Two references to a chain weigh as much as one, and a chain of twice the ids weighs more."""
    small, large = (World(Shape(2, slots, 16, 0)).physical for slots in (1024, 4096))
    assert weigh([small, small])[0] == weigh(small)[0] < weigh(large)[0]


def test_arguments_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A pool, a part or a number of bands that does not exist is named, before anything is measured."""
    for arguments in (["--bands", "4"], ["--only", "nothing"], ["--slots", "1"]):
        with pytest.raises(SystemExit):
            bench_allocator.main(arguments)
    assert "nothing" in capsys.readouterr().err


def test_the_table_shows_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json there is a table, with a legend that says what each op counts."""
    small = ["--slots", "1024", "--page-sizes", "16", "--bands", "3", "--rounds", "1", "--only", "extend,relief"]
    assert bench_allocator.main(small) == 0
    shown = capsys.readouterr().out
    assert "extend_512_clean" in shown
    assert "relief_state_take: a take of state slots" in shown
