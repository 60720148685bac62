"""Faults on a whole server: short campaigns, in which no client may lose, miss or double a token."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tools.faults import campaign
from tools.faults.campaign import Plan, Result
from tools.faults.cases import Case, run_case
from tools.faults.strikes import Strike
from tools.faults.work import Sizes

MODELED = ("--rank-runner", "modeled", "--rank-option", "delay_us=4000")
QUICK = ("--rank-timeout", "2", "--frontend-timeout", "2")  # how soon silence counts, here
SHORT = Sizes(output=(60, 160))


def plan(run_dir: Path, *strikes: Strike, flags: tuple[str, ...] = (), clients: int = 12) -> Plan:
    """A campaign that a test has time for."""
    return Plan(run_dir / "r", (*MODELED, *QUICK, *flags), 1, clients, SHORT, strikes, 60.0)


def assert_clean(result: Result) -> None:
    """Every client got every token once, the server is at rest, and the journal replays."""
    bad = [text for row in result.rounds for text in row["bad"]] + result.problems
    assert not bad, "\n".join(bad)
    assert result.clean, result.replay


def seconds(result: Result, kind: str, key: str) -> float:
    """One figure of the one round with a kind."""
    (value,) = [row[key] for row in result.rounds if row["kind"] == kind]
    assert value is not None, f"{kind}: {key} never came"
    return float(value)


def test_x1_kill_of_every_process_under_streams(tmp_path: Path) -> None:
    """kill -9 of daemon, rank, front end and launcher: red within two seconds, every accepted request whole."""
    kinds = ("daemon:kill", "rank:kill", "frontend:kill", "launcher:kill", "client:vanish")
    strikes = [Strike(kind, share) for kind, share in zip(kinds, itertools.cycle((0.4, 0.6, 0.3)), strict=False)]
    told: list[object] = []
    result = campaign.run(plan(tmp_path, *strikes), told.append)
    assert_clean(result)
    assert len(told) == len(kinds) + 1
    for kind in kinds[:-1]:
        if kind == "frontend:kill":  # the next one may answer before anybody saw it gone
            continue
        assert seconds(result, kind, "red_s") < 2, kind
        assert seconds(result, kind, "green_s") < 30, kind
    resumed = {row["kind"]: row["resumes"] for row in result.rounds}
    assert resumed["client:vanish"] > 0
    assert resumed["daemon:kill"] > 0


def test_x1_stop_of_every_process_under_streams(tmp_path: Path) -> None:
    """kill -STOP: whoever is silent for too long is killed and replaced; a launcher only watches, nobody misses it."""
    kinds = ("daemon:stop", "rank:stop", "frontend:stop", "launcher:stop")
    result = campaign.run(plan(tmp_path, *[Strike(kind, 0.3) for kind in kinds]), lambda row: None)
    assert_clean(result)
    for kind in kinds[:-1]:
        assert seconds(result, kind, "red_s") < 8, kind
        assert seconds(result, kind, "green_s") < 40, kind
    assert next(row for row in result.rounds if row["kind"] == "launcher:stop")["red_s"] is None


@pytest.mark.parametrize(
    "case",
    [
        Case("rank-0-1:report=20:corrupt_layout", ("layout digests differ at step 20", "rank 0.1")),
        Case("rank-0-0:report=20:corrupt_logical;daemon:journal.written=90:kill", ("digests differ at step 20",)),
        Case("rank-*:forward=1:delay:ms=0..15:seed=3;daemon:journal.write=40:full", ()),
    ],
    ids=lambda case: case.specs,
)
def test_planted_faults_on_two_tensor_ranks(tmp_path: Path, case: Case) -> None:
    """A divergence is named with its step, a dying daemon goes on, lateness and a full disk change nothing."""
    made = plan(tmp_path, flags=("--tp", "2"), clients=8)
    quiet = reference(tmp_path)
    result = run_case(made, case, 1, quiet, lambda row: None)
    assert_clean(result)


CANARY = """
import os, sys
if "daemon.rank" in sys.orig_argv:
    import numpy as np
    from daemon.rank import modeled
    keys = modeled.row_keys
    modeled.row_keys = lambda seeds, *rest: keys(seeds + np.uint64(os.getpid()), *rest)
"""


def test_a_rank_that_draws_differently_in_its_next_life_is_found(tmp_path: Path) -> None:
    """The campaign's own canary: noise that depends on the process changes what was sampled behind the strike."""
    (tmp_path / "sitecustomize.py").write_text(CANARY)
    made = replace(plan(tmp_path, Strike("rank:kill", 0.4), clients=16), environ={"PYTHONPATH": str(tmp_path)})
    result = campaign.run(made, lambda row: None)
    struck = result.rounds[1]
    assert struck["parted"] == struck["requests"] - struck["equal"] > 0, struck
    assert all("sampled" in text for text in struck["bad"])
    assert not result.clean
    assert result.replay_code == 0, result.replay


REFERENCES: dict[int, list[list[int]]] = {}


def reference(tmp_path: Path) -> list[list[int]]:
    """What an undisturbed server with one rank says, made once: two ranks must say the same."""
    if not REFERENCES:
        quiet = campaign.run(plan(tmp_path / "quiet", clients=8), lambda row: None)
        assert_clean(quiet)
        REFERENCES[1] = quiet.outputs
    return REFERENCES[1]
