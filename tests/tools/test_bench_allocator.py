"""`bandmaster bench allocator`: small pools of every shape give the promised rows, and what they say holds."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest

from tools import bench
from tools.allocator_bench import command
from tools.allocator_bench.least import least_bytes
from tools.allocator_bench.memory import weigh
from tools.allocator_bench.world import Shape, World

SMALL = ["--slots", "2048", "--page-sizes", "1,16", "--running", "8", "--steps", "12", "--rounds", "8", "--mirror"]

INVALID = [
    ("--bands", "4"),
    ("--bands", "x"),
    ("--only", "nothing"),
    ("--slots", "1"),
    ("--page-sizes", "0"),
    ("--running", ""),
    ("--steps", "0"),
    ("--rounds", "0"),
    ("--budget", "-1"),
    ("--budget", "nan"),
    ("--seed", "-1"),
]


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
    for part in ("extend", "relief", "uses", "trace"):
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
    """Each relief row moved units: at most 1.1 times the fewest bytes that any layout costs, by an own reckoning."""
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
        assert row["search_bound_bytes"] <= row["least_bytes"], row


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
    for option, value in INVALID:
        with pytest.raises(SystemExit) as ended:
            command.main([option, value])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert option in said, said
        assert value in said, said


def test_the_table_shows_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json there are tables, with a legend that says what each op counts, and no number is cut off."""
    small = ["--slots", "1024", "--page-sizes", "16", "--bands", "3", "--rounds", "1", "--only", "extend,relief"]
    assert command.main(small) == 0
    shown = capsys.readouterr().out
    assert "extend_512_clean" in shown
    assert "state_take: a take of state slots" in shown
    assert "\u2026" not in shown


def test_the_fewest_bytes_are_those_of_every_layout_tried() -> None:
    """The yardstick of relief equals the cheapest of all cuts, tried one by one, on a small scattered pool."""
    for bands in (2, 3):
        world = World(Shape(bands, 1024, 16, 8))
        pages = world.fill()
        world.step("free", [world.free("free", world.shape.parts(None, pages[::3], pages[::3]))])
        demand = world.shape.demand(3, 1, 20)
        assert least_bytes(world, demand) == cheapest(world, demand)


def cheapest(world: World, demand: tuple[int, ...]) -> int:
    """Bytes to move for the best of all cuts at any multiple of 512 bytes, which every unit here is."""
    bands, start, end = world.stage.bands, world.stage.chain_start_bytes, world.stage.arena_bytes
    sizes = [band.unit_bytes for band in bands]
    live = [world.physical.physical(band, world.logical.live_ids(band)) * sizes[band] for band in range(len(bands))]
    best = end
    places = range(start, end + 1, 512)
    for cuts in ((cut,) for cut in places) if len(bands) == 2 else combinations(places, 2):
        edges = (start, *cuts, end)
        room = [high // size - -(-low // size) for low, high, size in zip(edges, edges[1:], sizes, strict=False)]
        if any(have < held.size + wanted for have, held, wanted in zip(room, live, demand, strict=True)):
            continue
        outside = [
            int(((held < low) | (held + size > high)).sum()) * size
            for held, low, high, size in zip(live, edges, edges[1:], sizes, strict=False)
        ]
        best = min(best, sum(outside))
    return best
