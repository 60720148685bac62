"""Planted faults: of every one replay names the first wrong step, op and request, or where the damage is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from journal.divergence import Divergence
from journal.replay import Verdict
from tests.tidy.source import ROOT
from tools.planted import command, files, scene
from tools.planted.command import FAULTS, NOTHING, judge, missed
from tools.planted.scene import Fault, Scene, Truth
from tools.replay import replay_directory


def test_there_are_more_than_twenty() -> None:
    """Of ranks, of the core, of the records and of the files; each has a name and says what it is."""
    assert len(FAULTS) >= 20
    for page in ("README.md", "docs/replay.md", "CHANGELOG.md"):
        assert f"{len(FAULTS)} faults" in (ROOT / page).read_text(encoding="utf-8")
    assert all(fault.about and fault.name == name for name, fault in FAULTS.items())
    asked = "wrong-page skipped-wait lost-free wrong-victim clock-read reordered-report bit-flip missing-segment"
    assert set(f"{asked} torn-tail duplicate-report".split()) <= set(FAULTS)


@pytest.mark.parametrize("name", [NOTHING, *FAULTS])
def test_replay_names_it(name: str, tmp_path: Path) -> None:
    """What is named is what was planted, and without a fault nothing is."""
    row = judge(name, tmp_path / name)
    assert not row["missed"], row
    if name != NOTHING:
        assert row["named"]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("double-free", 33),
        ("stale-generation", 33),
        ("duplicate-report", 33),
        ("changed-prompt", 75),
        ("wrong-token", 90),
    ],
)
def test_it_is_named_at_other_moments(name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a row has its next tenant already, pages were taken again at once, or a prompt ends alike."""
    monkeypatch.setattr(scene, "STRIKE_STEP", step)
    monkeypatch.setattr(FAULTS[name], "turns", 120)
    row = judge(name, tmp_path / name)
    assert not row["missed"], row


@pytest.mark.parametrize("name", ["wrong-page", "duplicate-report", "wrong-table", "other-snapshot", "wrong-token"])
def test_two_processes_name_the_same(name: str, tmp_path: Path) -> None:
    """A difference of either half is the same one, word for word, whether the halves run in one process or in two."""
    Scene(FAULTS[name](), tmp_path / name).make()
    one, two = (replay_directory(str(tmp_path / name), processes=count) for count in (1, 2))
    assert isinstance(one.divergence, Divergence)
    assert one.divergence == two.divergence
    assert one.notes == two.notes


def test_a_fault_that_is_not_named_is_missed(tmp_path: Path) -> None:
    """The judge is no rubber stamp: another step, op, request, file or none at all is a miss."""
    Scene(FAULTS["wrong-page"](), tmp_path / "one").make()
    verdict = replay_directory(str(tmp_path / "one"))
    found = verdict.divergence
    assert found is not None
    true = Truth(found.step, found.op, found.requests[0])
    fault = FAULTS["wrong-page"]()
    assert missed(fault, true, verdict) == ""
    assert missed(fault, Truth(found.step + 1), verdict) == f"step {found.step + 1}"
    assert missed(fault, Truth(found.step, found.op + 1), verdict) == f"op {found.op + 1}"
    assert missed(fault, Truth(found.step, request=999), verdict) == "request 999"
    assert missed(fault, Truth(rule="segment_missing"), verdict) == "the damage"
    assert "not reproduced" in missed(files.Nothing(), Truth(), verdict)
    Scene(files.Nothing(), tmp_path / "two").make()
    sound: Verdict = replay_directory(str(tmp_path / "two"))
    assert missed(fault, true, sound) == "that anything is wrong"
    assert missed(files.TornTail(), Truth(rule="short_payload", file="x"), sound)


def test_the_command_fails_where_one_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row a fault; exit code 1 and the fault's name where something was not named."""

    class Sleeping(Fault):
        """Nothing is wrong, and the truth says that something is."""

        def files(self, scene: Scene, directory: Path) -> None:
            self.truth = Truth(5)

    monkeypatch.setitem(FAULTS, "sleeping", Sleeping)
    assert command.main(["--only", "sleeping"]) == 1
    assert "MISSED sleeping" in capsys.readouterr().out
    assert command.main(["--only", "wrong-page", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["missed"] == []
    assert [row["fault"] for row in shown["faults"]] == ["wrong-page"]
