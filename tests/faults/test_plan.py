"""The plan: kinds take turns, the seed decides the rest, and tasks are the same in every round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allocator.columns import i64
from daemon.faults import parse
from tools.faults.command import check_ranks, main
from tools.faults.strikes import EXPECTED, KINDS, Strike, parse_kinds, plan
from tools.faults.work import CLIENT, HTTP, WIRE, Sizes, draw_tasks


def test_every_kind_takes_its_turn() -> None:
    """Over as many rounds as there are kinds each comes once, and each says what must come of it."""
    strikes = plan(5, len(KINDS), KINDS)
    assert [strike.kind for strike in strikes] == list(KINDS)
    assert set(EXPECTED) == set(KINDS)
    assert {kind for kind in KINDS if kind != "two:kill" and plan(5, 1, (kind,))[0].breaks_http} == {
        "frontend:kill", "frontend:stop", "launcher:kill",
    }  # fmt: skip


def test_moments_follow_from_the_seed_and_lie_anywhere() -> None:
    """The same seed plans the same; over many rounds the moments cover a round from its beginning to its end."""
    shares = [strike.share for strike in plan(3, 300, KINDS)]
    assert shares == [strike.share for strike in plan(3, 300, KINDS)]
    assert shares[:20] != [strike.share for strike in plan(4, 20, KINDS)]
    assert min(shares) < 0.03
    assert max(shares) > 0.92
    assert all(0 <= share < 0.96 for share in shares)


def test_two_blows_draw_their_processes_and_the_pause_between() -> None:
    """Over many rounds every pair of kinds comes, within the stated time; only pairs with a front end break HTTP."""
    strikes = plan(3, 200, ("two:kill",))
    pairs = {tuple(kind for _, kind, _ in strike.blows()) for strike in strikes}
    assert len(pairs) == 9
    assert all(0 <= strike.blows()[1][0] <= 3 for strike in strikes)
    assert max(strike.pause_s for strike in strikes) > 2.8
    for strike in strikes:
        assert strike.breaks_http == ("frontend:kill" in [kind for _, kind, _ in strike.blows()])
    assert Strike("rank:stop", 0.5, 3).blows() == [(0.0, "rank:stop", 3)]


def test_kinds_by_part_of_a_name() -> None:
    """A process or a signal alone names all kinds with it; a word that names none is refused with the list."""
    assert parse_kinds("rank") == ("rank:kill", "rank:stop")
    assert parse_kinds("stop,rank:kill") == (
        "daemon:stop", "rank:stop", "frontend:stop", "launcher:stop", "rank:kill",
    )  # fmt: skip
    with pytest.raises(ValueError, match="'ranks' is none of daemon:kill"):
        parse_kinds("ranks")


def test_tasks_are_drawn_once_and_salted_by_the_round() -> None:
    """All three ways are used, greedy and sampled in each; half of the tasks share no cache with another round."""
    tasks = draw_tasks(1, 32, Sizes())
    assert tasks == draw_tasks(1, 32, Sizes())
    assert [sum(task.via == via for task in tasks) for via in (HTTP, CLIENT, WIRE)] == [16, 8, 8]
    assert {task.via for task in tasks if task.temperature} == {HTTP, CLIENT, WIRE}
    assert {task.via for task in tasks if not task.temperature} == {HTTP, CLIENT, WIRE}
    assert sum(bool(task.salt(3)) for task in tasks) == 16
    salted = next(task for task in tasks if task.salt(1))
    assert salted.body(1)["cache_salt"] != salted.body(2)["cache_salt"]
    message = salted.generate(2, "a")
    assert i64(message.prompt).tolist() == salted.body(2)["prompt"]
    assert message.namespace == f"salt:{salted.body(2)['cache_salt']}"
    assert not any(task.temperature for task in draw_tasks(1, 32, Sizes(sampled_one_in=0)))


@pytest.mark.parametrize("flags", [["--tp", "1"], ["--tp", "9", "--pp", "9"]])
def test_a_fault_of_a_rank_that_will_not_be_there_is_refused_first(
    flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    """Code 2, the rank and the layout named, before any server runs."""
    with pytest.raises(SystemExit) as caught:
        main(["run", "--run-dir", str(tmp_path / "run"), *flags, "rank-9-9:report=30:kill"])
    assert caught.value.code == 2
    assert "there is no rank-9-9" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_faults_of_ranks_that_will_be_there_are_taken() -> None:
    """The last rank of a layout, every rank, and the daemon."""
    check_ranks(parse("rank-1-2:step=3:kill;rank-*:step=3:kill;daemon:journal.write=3:kill"), 2, 3)
