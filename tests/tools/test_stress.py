"""`bandmaster stress`: what it prints, writes and returns; and how failing programs shrink."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tools import cli, stress
from tools.pagesafety.cases import load
from tools.pagesafety.program import Case
from tools.pagesafety.shrink import shrink

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "allocator" / "cases"


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
    assert len(saved.program) <= 10
    assert stress.main(["--replay", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "fault at " in shown
    assert "unordered_overlap" in shown.splitlines()[-1]
    assert re.search(r"-> (SendUnits|PublishUnits)\(use=\d+", shown)
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
        (["--seeds", "5:5"], "--seeds 5:5: give A:B, whole numbers from 0, A below B"),
        (["--seeds", "5"], "--seeds 5: give A:B"),
        (["--seeds=-3:2"], "--seeds -3:2: give A:B"),
        (["--shapes", "all,round"], "--shapes round: unknown; they are all, full, "),
        (["--page-sizes", "0"], "--page-sizes 0: give numbers of tokens from 1 to 4096"),
        (["--ranks", "9"], "--ranks 9: it must be at least 1 and at most 8"),
        (["--jobs", "0"], "--jobs 0: it must be at least 1 and at most 256"),
        (["--ops", "0"], "--ops 0: it must be at least 1"),
        (["--mutants", "kindness"], "--mutants kindness: unknown; they are all, skip_forward_wait, "),
        (["--mutants", "--seeds", "0:3"], "--seeds does not go with --mutants"),
        (["--without-mutant"], "goes with --replay only"),
    ],
)
def test_arguments_that_make_no_sense_are_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and a line that says the option, the value and the limit."""
    with pytest.raises(SystemExit) as ended:
        stress.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": "round"}, "its shape 'round' is none of full, "),
        ({"shape": 3}, "Expected `str`"),
        ({"mutant": "kindness"}, "its mutant 'kindness' is none of "),
        ({"page_size": -1}, "its page_size -1 must be at least 1"),
        ({"ranks": 0}, "its ranks 0 must be at least 1 and at most 8"),
        ({"program": [["dance", 0, 0]]}, "operation 1, 'dance', is none of admit, "),
        ({"program": [["admit", -1, 0]]}, "operation 1, admit, has numbers [-1, 0]"),
    ],
)
def test_a_file_that_is_no_case_is_named(
    change: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, with the path and what the field may hold, and no trace."""
    case = json.loads((CASES / "skip_zeroing.json").read_text())
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case | change))
    assert stress.main(["--replay", str(path)]) == 2
    shown = capsys.readouterr().err
    assert f"{path} is no case: {said}" in shown
    path.write_text(path.read_text()[:40])
    assert stress.main(["--replay", str(path)]) == 2
    assert stress.main(["--replay", str(tmp_path / "nothing")]) == 2


def test_a_directory_that_cannot_be_written_is_known_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 at once, with the directory."""
    (tmp_path / "file").write_text("")
    assert stress.main(["--out", str(tmp_path / "file" / "cases"), "--seeds", "0:100000"]) == 2
    assert "--out " in capsys.readouterr().err


def test_so_many_failures_are_enough(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--failures-max stops a sweep whose every program fails, with each failure printed and the table at the end."""
    monkeypatch.setattr("allocator.physical.band.Band.take", lambda self, ids, growth: [])
    assert stress.main(["--seeds", "0:1000", "--ops", "40", "--shapes", "full", "--failures-max", "3"]) == 1
    shown = capsys.readouterr()
    assert "--failures-max 3: stopped after " in shown.err
    assert shown.out.count("full, page size 1, seed ") == 3
    assert "3 failed" in shown.out


@pytest.mark.parametrize("width", [60, 80, 140])
def test_tables_fit_and_cut_no_number_off(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every width all figures are there in full, and no line is longer than the terminal."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert stress.main(["--seeds", "0:2", "--ops", "50", "--shapes", "windows+state"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    for name in ("runs", "forwards", "refusals", "reliefs", "moves", "faults", "seconds"):
        assert name in shown
    assert "300" in shown, "operations of all six programs"
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def started(*argv: str) -> subprocess.Popen[str]:
    """The command in a process of its own, at work on more programs than it could finish."""
    command = [sys.executable, "-m", "tools.cli", "stress", "--seeds", "0:100000", "--shapes", "full", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def _command_line(child: psutil.Process) -> str:
    """Empty for one that has just ended, as a compiler does that was asked for its version."""
    try:
        return " ".join(child.cmdline())
    except psutil.NoSuchProcess:
        return ""


def workers_of(pid: int) -> list[psutil.Process]:
    """Its processes that run programs: all but the one that tracks their resources; waited for."""
    while True:
        children = psutil.Process(pid).children()
        found = [child for child in children if "spawn_main" in _command_line(child)]
        if len(found) == 2 and all(child.cpu_times().user > 0.5 for child in found):
            return found


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command_and_its_processes(number: signal.Signals, code: int) -> None:
    """The exit code of the signal, what was seen so far, no trace, and no process left."""
    with started("--jobs", "2") as command:
        children = workers_of(command.pid)
        command.send_signal(number)
        out, err = command.communicate(timeout=30)
    assert command.returncode == code
    assert re.search(r"ended after \d+ of 300000 programs, 0 failed", err)
    assert "Traceback" not in err
    assert "programs in " in out
    assert not any(child.is_running() for child in children)


@pytest.mark.slow
def test_a_lost_process_ends_the_command() -> None:
    """Exit code 3, and which program the killed process was at."""
    with started("--jobs", "2") as command:
        workers_of(command.pid)[0].kill()
        _, err = command.communicate(timeout=30)
    assert command.returncode == 3
    assert "was killed by SIGKILL, at work on RunSpec(shape='full', page_size=1, seed=" in err
    assert "Traceback" not in err
