"""`bandmaster bench hits`: what it promises holds on a slice, and its arithmetic is right."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tools import bench, bench_hits
from tools.hits.arena import ROOM_PPM, SLOT_BYTES, Served
from tools.hits.chat import CHATS, Chat, Cost, run, text
from tools.hits.show import Comparison
from tools.hits.sweep import Split, prompt_of, sweep

SERVED = Served(page_size=16, chunk_tokens=512, interval=256, mark_tokens=4096)
SMALL = Chat("small", conversations=2, turns=3, system=600, first=900, new=500, output=300)


@pytest.mark.parametrize("mode", bench_hits.MODES)
@pytest.mark.parametrize("chunk", [512, 2048])
def test_hit_sweep_from_the_third_request_on_a_hit_is_within_one_step(mode: str, chunk: int) -> None:
    """1,500 shared and 700 own tokens, then 1,600 and 600, and splits between, one after the other and all at once."""
    rows = sweep(SERVED._replace(chunk_tokens=chunk), [1500, 1530, 1540, 1600], 2200, 6, mode)
    for row in rows:
        assert row.holds, row
        assert row.below_tokens <= 256
        assert row.settled_at <= 3
        assert min(row.found[2:]) == row.shared_tokens // 256 * 256


def test_prompts_of_a_split_share_what_they_say() -> None:
    """Two of one split share exactly the beginning; two of different splits share nothing."""
    one, other, stranger = prompt_of(50, 20, 0, 1), prompt_of(50, 20, 0, 2), prompt_of(50, 20, 1, 3)
    assert len(one) == 70
    assert (one[:50] == other[:50]).all()
    assert one[50] != other[50]
    assert one[0] != stranger[0]
    firsts = {int(prompt_of(1, 1, stem, stem)[part]) for stem in range(64) for part in (0, 1)}
    assert len(firsts) == 128, "beginnings and own parts are all different"


def test_conversations_share_the_system_prompt_alone() -> None:
    """Texts of two conversations differ at every position."""
    assert (text(-1, 0, 100) == text(-1, 0, 100)).all()
    for one in range(4):
        for other in range(one):
            assert (text(one, 7, 3000) != text(other, 7, 3000)).all()
    assert (np.concatenate([text(2, 0, 10), text(2, 10, 10)]) == text(2, 0, 20)).all()


def test_a_small_chat_is_hit_as_on_the_grid_with_fewer_states() -> None:
    """Every turn goes on from the last one's end under both policies."""
    likely, grid = run(SMALL, SERVED), run(SMALL, SERVED._replace(policy="grid"))
    both = Comparison(likely, grid)
    assert both.holds
    assert likely.given < grid.given
    assert likely.kinds["turn"] == (6, 4), "the second and third turn of both begin where the turn before ended"
    assert grid.hit_tokens - likely.hit_tokens == 512, "the beginning, once"
    assert likely.prompt_tokens == grid.prompt_tokens == likely.hit_tokens + likely.computed_tokens


def test_what_a_chat_promises_is_measured() -> None:
    """Bytes over hit tokens, and what makes a promise broken: too many bytes, or hits that are lost."""
    kinds: dict[str, tuple[int, int]] = {}
    chat = Chat("c", 1, 1, 100, 0, 0, 0, fewer=5.0)
    grid = Cost(chat, "grid", ROOM_PPM, 1000, 500, 500, 50, 50, kinds)
    assert grid.bytes_per_hit_token == 50 * SLOT_BYTES / 500
    assert Comparison(grid._replace(policy="likely", given=10), grid).holds
    assert not Comparison(grid._replace(policy="likely", given=11), grid).holds
    assert Comparison(grid._replace(policy="likely", given=5, hit_tokens=400), grid).holds
    assert not Comparison(grid._replace(policy="likely", given=5, hit_tokens=399), grid).holds
    assert not Comparison(grid._replace(policy="likely", hit_tokens=0), grid).holds
    tight = grid._replace(room_ppm=ROOM_PPM // 2)
    assert Comparison(tight._replace(policy="likely", given=49), tight).holds, "no promise where not all fits"


def test_one_split_says_where_it_settles() -> None:
    """The first request from which all find enough, and by how much the worst from the third on misses."""
    row = Split("alone", 1500, 700, 256, (0, 0, 1280, 1280), 5, 2)
    assert (row.below_tokens, row.settled_at, row.holds) == (220, 3, True)
    late = row._replace(found=(0, 0, 0, 1280))
    assert (late.below_tokens, late.settled_at, late.holds) == (1500, 4, False)
    assert row._replace(found=(1280, 1280, 1280)).settled_at == 1


def test_chats_of_long_turns_promise_something() -> None:
    """Only a chat whose turns are many intervals long can promise anything, and two do."""
    promising = [chat for chat in CHATS if chat.fewer]
    assert [chat.name for chat in promising] == ["tool results", "as traced"]
    assert all(chat.new + chat.output > 10 * 256 for chat in promising)


def rows_of(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    """What the command prints as JSON."""
    assert bench.main(["hits", "--json", *argv]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def test_the_command_prints_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Both parts as one list, with what each row is about."""
    rows = rows_of(capsys, "--part", "sweep", "--requests", "4", "--shared", "100:120:20", "--total", "600", "--check")
    assert [(row["mode"], row["shared_tokens"]) for row in rows] == [
        (mode, shared) for mode in bench_hits.MODES for shared in (100, 120)
    ]
    assert all(row["holds"] and row["part"] == "sweep" and len(row["found_tokens"]) == 4 for row in rows)


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """For people: every figure whole, whatever the terminal."""
    argv = ["--part", "sweep", "--requests", "3", "--shared", "1500:1500:1", "--modes", "alone"]
    assert bench_hits.main(argv) == 0
    out = capsys.readouterr().out
    assert "least from third" in out
    assert "1 of 1 splits" in out
    assert "…" not in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--requests", "2"], "--requests must be at least 3"),
        (["--interval", "100"], "--interval 100 is no multiple of --page-size 16"),
        (["--shared", "1500:1400:10"], "--shared"),
        (["--shared", "a:b:c"], "whole numbers"),
        (["--shared", "1500:2200:10"], "--shared"),
        (["--modes", "alone,both"], "--modes 'both' is none of alone, nested, together"),
        (["--chats", "nobody"], "--chats 'nobody' is none of"),
        (["--rooms", "0"], "at least 1 percent"),
        (["--chunk", "0"], "--chunk starts at 1"),
    ],
)
def test_bad_arguments_are_named(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag, its value and what it may be; exit code 2."""
    with pytest.raises(SystemExit, match="2"):
        bench_hits.main(argv)
    assert words in capsys.readouterr().err
