"""`bandmaster stress`: what it prints, writes and returns; and how failing programs shrink."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import cli, stress
from tools.pagesafety.cases import load
from tools.pagesafety.program import Case
from tools.pagesafety.shrink import shrink

CASES = Path(__file__).parents[1] / "allocator" / "cases"


def test_a_clean_sweep_prints_a_row_per_shape_and_page_size(capsys: pytest.CaptureFixture[str]) -> None:
    """Two seeds of two shapes: four rows and their sum, no fault, exit code 0."""
    argv = ["stress", "--seeds", "0:2", "--ops", "60", "--shapes", "full,full+state", "--page-sizes", "1,16", "--json"]
    assert cli.main(argv) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["faults"] == []
    rows = printed["rows"]
    assert [(row["shape"], row["page size"], row["runs"]) for row in rows] == [
        ("full", "1", 2),
        ("full", "16", 2),
        ("full+state", "1", 2),
        ("full+state", "16", 2),
        ("all", "", 8),
    ]
    assert rows[-1]["ops"] == 480
    assert rows[-1]["steps"] == sum(row["steps"] for row in rows[:-1])


def test_processes_change_nothing_but_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    """The same sweep in one process and in two gives the same figures."""
    found = []
    for jobs in ("1", "2"):
        argv = ["--seeds", "0:3", "--ops", "40", "--shapes", "full+window", "--page-sizes", "16", "--json"]
        assert stress.main([*argv, "--jobs", jobs]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        found.append([{name: value for name, value in row.items() if name != "seconds"} for row in rows])
    assert found[0] == found[1]


def test_a_mutant_is_hunted_minimized_saved_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A deliberate fault is caught, its smallest case is written, and a replay of that file shows the same."""
    argv = ["--mutants", "publish_before_forward_ends", "--minimize", "--out", str(tmp_path)]
    assert stress.main(argv) == 0
    table = capsys.readouterr().out
    assert "1 of 1 mutants caught" in table
    assert "unordered_overlap" in table
    path = tmp_path / "publish_before_forward_ends.json"
    saved = load(path)
    assert len(saved.program) <= 5
    assert stress.main(["--replay", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "fault at the end: unordered_overlap" in shown
    assert "stage 0: SendUnits(use=1" in shown or "stage 0: PublishUnits(use=1" in shown
    assert stress.main(["--replay", str(path), "--without-mutant"]) == 0
    assert "no fault" in capsys.readouterr().out


def test_a_fault_of_the_allocator_makes_the_sweep_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, the fault with its shape and seed, and a file with the minimized case."""
    monkeypatch.setattr("allocator.physical.ledger.BandLedger.stream_wait", lambda self, consumer, seq: False)
    argv = ["--seeds", "0:2", "--ops", "200", "--shapes", "full+state", "--page-sizes", "16"]
    assert stress.main([*argv, "--minimize", "--out", str(tmp_path)]) == 1
    assert "full+state, page size 16, seed " in capsys.readouterr().out
    (path,) = list(tmp_path.glob("unordered_overlap_full+state_16_*.json"))[:1]
    assert load(path).mutant is None
    assert len(load(path).program) < 20


def test_shrinking_keeps_what_is_needed_and_nothing_else() -> None:
    """Of 40 operations, the two that a fault needs stay, in order, with the smallest numbers that still fail."""
    program = [("quiet", n, 900) for n in range(40)]
    program[7], program[31] = ("admit", 500, 17), ("flush", 999, 123)

    def failed(case: Case) -> str | None:
        names = [name for name, _, _ in case.program]
        big = any(name == "flush" and a >= 99 for name, a, _ in case.program)
        together = "admit" in names and "flush" in names and names.index("admit") < names.index("flush")
        return "lost_write" if together and big else "error" if "admit" in names else None

    small = shrink(Case("full", 1, 0, program), "lost_write", failed)
    assert small.program == [("admit", 0, 0), ("flush", 99, 0)]
    assert small.ranks == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--seeds", "5:5"], "give A:B with A below B"),
        (["--seeds", "5"], "give A:B with A below B"),
        (["--shapes", "round"], "the shapes are full, "),
        (["--page-sizes", "0"], "positive numbers of tokens"),
        (["--ranks", "9"], "--ranks is 1 to 8"),
        (["--mutants", "kindness"], "the mutants are skip_forward_wait, "),
    ],
)
def test_arguments_that_make_no_sense_are_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and a line that says what was wrong."""
    with pytest.raises(SystemExit) as ended:
        stress.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_no_case_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, with the path, for a missing file and for another JSON file."""
    path = tmp_path / "case.json"
    assert stress.main(["--replay", str(path)]) == 2
    path.write_text('{"shape": 3}')
    assert stress.main(["--replay", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
