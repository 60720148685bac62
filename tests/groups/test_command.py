"""`bandmaster groups`: honest groups are clean, planted divergences are all named; the exit code tells both."""

from __future__ import annotations

import json

import pytest

from tools.groups import command
from tools.groups.command import main


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, object]]]:
    """Exit code and rows of a run."""
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)["rows"]


def test_an_honest_layout_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps, digests of every rank and tokens are counted."""
    code, (row,) = rows(capsys, "--layouts", "2x1", "--steps", "25")
    assert (code, row["problem"]) == (0, "")
    assert row["digests"] == 2 * int(str(row["steps"]))
    assert int(str(row["tokens"])) > 0


def test_a_divergence_is_named_for_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """One rank after the other; a step that comes too late for the run counts as not found."""
    code, found = rows(capsys, "--layouts", "1x2", "--steps", "150", "--plant", "hole", "--seed", "2")
    assert code == 0
    assert [row["rank"] for row in found] == ["0.0", "0.1"]
    assert all(row["band"] and "Take" in str(row["said"]) for row in found)
    code, found = rows(capsys, "--layouts", "1x2", "--steps", "20", "--plant", "hole")
    assert code == 1
    assert all("not found" in str(row["problem"]) for row in found)


def test_a_group_that_differs_is_not_clean(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An output that is not the toy's fails the row, and the run."""
    monkeypatch.setattr("tools.groups.work.mismatches", lambda *_: [0])
    code, (row,) = rows(capsys, "--layouts", "1x1", "--steps", "10")
    assert code == 1
    assert "not the toy's" in str(row["problem"])


def test_layouts_without_a_second_rank_have_nothing_to_plant(capsys: pytest.CaptureFixture[str]) -> None:
    """The command says so."""
    with pytest.raises(SystemExit):
        command.main(["--layouts", "2x1", "--plant", "clock"])
    assert "two tensor ranks" in capsys.readouterr().err
