"""Files of `bandmaster simulate`: an old one is lost only to a whole new text, and nothing else is touched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.tools.simulate_world import conversations, write
from tools import result_files
from tools.simulate import command

FULL = ("--band", "full=1000/page")
SMALL = (*FULL, "--policy", "lru", "--no-bound")
OLD = "of last night\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six requests."""
    return write(tmp_path / "trace.jsonl", conversations(1, 6, 10))


def files(directory: Path) -> list[str]:
    """Every name there, hidden ones too."""
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("flag", ["--per-request", "--plot"])
@pytest.mark.parametrize("how", ["path", "relative", "link", "hard link"])
def test_a_result_is_never_the_trace(
    flag: str,
    how: str,
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However it is named, it is refused, and the trace stays as it was."""
    before = trace.read_bytes()
    target = trace if how == "path" else Path("trace.jsonl") if how == "relative" else tmp_path / "other"
    monkeypatch.chdir(tmp_path)
    if how == "link":
        target.symlink_to(trace)
    elif how == "hard link":
        target.hardlink_to(trace)
    assert command.main([str(trace), *SMALL, flag, str(target)]) == command.USAGE
    said = f"{flag} {target} is the trace, which is only read; name another file"
    assert said in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_a_result_is_never_the_model(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the config file that is named nor that of the directory that is."""
    config = tmp_path / "config.json"
    config.write_text("{}")
    for model in (config, tmp_path):
        assert command.main([str(trace), "--model", str(model), "--plot", str(config)]) == command.USAGE
        assert "which is only read; name another file" in capsys.readouterr().err
    assert config.read_text() == "{}"


@pytest.mark.parametrize("there", [False, True])
def test_two_results_are_two_files(
    there: bool, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place under two names is refused, whether there is a file or not."""
    monkeypatch.chdir(tmp_path)
    if there:
        Path("both").write_text(OLD)
    assert command.main([str(trace), *SMALL, "--plot", "both", "--per-request", "./both"]) == command.USAGE
    assert "--per-request and --plot both name both; give each its own" in capsys.readouterr().err
    assert files(tmp_path) == ["both", "trace.jsonl"] if there else ["trace.jsonl"]
    assert not there or Path("both").read_text() == OLD


@pytest.mark.parametrize(
    "wrong", [("--band", "full=1/inch"), (*FULL, "--arena-fraction", "0.0001%"), (*FULL, "--block-tokens", "9")]
)
def test_what_is_refused_leaves_old_results_alone(
    wrong: tuple[str, ...], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong band, arena or trace: yesterday's files are whole, new ones are not begun."""
    rows, plot = tmp_path / "rows", tmp_path / "plot"
    rows.write_text(OLD)
    assert command.main([str(trace), *wrong, "--per-request", str(rows), "--plot", str(plot)]) == command.USAGE
    assert capsys.readouterr().out == ""
    assert rows.read_text() == OLD
    assert files(tmp_path) == ["rows", "trace.jsonl"]


def test_an_interrupted_simulation_leaves_old_results_alone(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a run: exit code 130 and no draft left."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_all", interrupted)
    rows = tmp_path / "rows"
    rows.write_text(OLD)
    assert command.main([str(trace), *SMALL, "--per-request", str(rows)]) == 130
    assert capsys.readouterr().err == "bandmaster simulate: interrupted; nothing was written\n"
    assert (rows.read_text(), files(tmp_path)) == (OLD, ["rows", "trace.jsonl"])


def test_results_that_cannot_be_written_cost_no_table(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at the end: the tables are shown, the old file is whole, exit code 1; the other result is written."""

    def full(draft: int) -> None:
        if "rows" in os.readlink(f"/proc/self/fd/{draft}"):
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(result_files.os, "fsync", full)
    rows, plot = tmp_path / "rows", tmp_path / "plot"
    rows.write_text(OLD)
    assert command.main([str(trace), *SMALL, "--per-request", str(rows), "--plot", str(plot)]) == command.FAILED
    shown = capsys.readouterr()
    assert "the prefix cache" in shown.out
    assert f"--per-request {rows} was not written: [Errno 28] No space left on device" in shown.err
    assert (rows.read_text(), files(tmp_path)) == (OLD, ["plot", "rows", "trace.jsonl"])
    ElementTree.fromstring(plot.read_text())


def test_a_dash_is_standard_output(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows or plot alone, so that another program can read them; no file of that name."""
    monkeypatch.chdir(tmp_path)
    assert command.main([str(trace), *SMALL, "--per-request", "-", "--plot", "plot"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert command.main([str(trace), *SMALL, "--plot", "-"]) == 0
    ElementTree.fromstring(capsys.readouterr().out)
    assert files(tmp_path) == ["plot", "trace.jsonl"]


def test_a_file_is_replaced_where_it_is(tmp_path: Path) -> None:
    """Its permissions stay, a link to it stays one, a pipe and the null device are written to."""
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text(OLD)
    file.chmod(0o640)
    link.symlink_to(file)
    for path in (link, Path(os.devnull)):
        result_files.probe(path)
        result_files.put(path, "new")
    assert (file.read_text(), file.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o640, True)
    assert not Path(os.devnull).is_file()
    long = tmp_path / ("x" * 255)
    result_files.probe(long)
    assert not long.exists()
    result_files.put(long, "new")
    assert files(tmp_path) == ["file", "link", long.name]
    read, written = os.pipe()
    result_files.put(Path(f"/dev/fd/{written}"), "new")
    assert os.read(read, 9) == b"new"
