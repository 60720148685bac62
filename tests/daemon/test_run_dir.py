"""Run directory: one owner, named when it lives; what the dead left is cleaned; live orphans are refused by pid."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import daemon.__main__
import daemon.launcher
import daemon.run_dir
from daemon.exits import Exit
from daemon.run_dir import RunDir, RunDirInUse, default_path, process_started
from daemon.settings_table import Settings
from ipc.errors import EndpointError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_it_is_private(place: Path) -> None:
    """The directory and its folders are 0700; one that others may write is refused."""
    RunDir(place).prepare()
    for folder in (place, place / "journal", place / "logs"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    place.chmod(0o777)
    with pytest.raises(EndpointError, match="0777"):
        RunDir(place).prepare()


def test_one_owner_named_by_pid(place: Path) -> None:
    """A second claim names the owner's pid and has the exit code for it; after the release it succeeds."""
    first, second = RunDir(place), RunDir(place)
    first.prepare()
    first.claim()
    assert second.owner() == os.getpid()
    with pytest.raises(RunDirInUse, match=str(os.getpid())) as caught:
        second.claim()
    assert caught.value.code == Exit.IN_USE
    first.release()
    assert second.owner() == 0
    assert not (place / "daemon.pid").exists()
    second.claim()
    second.release()


def test_a_launcher_keeps_the_directory_while_its_daemon_is_replaced(place: Path) -> None:
    """Another launcher is refused by the first one's pid, another's daemon too; after the end both come in."""
    first, second = RunDir(place), RunDir(place)
    first.prepare()
    first.claim_server()
    with pytest.raises(RunDirInUse, match=f"the server with pid {os.getpid()}") as caught:
        second.claim_server()
    assert caught.value.code == Exit.IN_USE
    with pytest.raises(RunDirInUse, match=f"the server with pid {os.getpid()}"):
        second.claim()  # not our child: whoever started it has not claimed the directory
    child = f"from pathlib import Path; from daemon.run_dir import RunDir; RunDir(Path({str(place)!r})).claim()"
    assert subprocess.run([sys.executable, "-c", child], check=False).returncode == 0, "our own daemon comes in"
    first.release_server()
    assert not (place / "server.pid").exists()
    second.claim_server()
    second.release_server()


def test_a_launcher_is_refused_where_a_daemon_runs_alone(place: Path) -> None:
    """A daemon that was started by hand is named; the refused launcher holds nothing."""
    alone, launcher = RunDir(place), RunDir(place)
    alone.prepare()
    alone.claim()
    with pytest.raises(RunDirInUse, match=f"the daemon with pid {os.getpid()}"):
        launcher.claim_server()
    alone.release()
    launcher.claim_server()
    launcher.release_server()


def test_10_a_dead_owner_leaves_nothing_in_the_way(place: Path) -> None:
    """A pid file, sockets and rank notes of processes that are dead hinder nobody and are swept."""
    made = RunDir(place)
    made.prepare()
    (place / "daemon.pid").write_text("1")
    (place / "ranks.pid").write_text(f"{os.getpid()} 1\n999999 5\n\n")
    (place / "front.sock").touch()
    made.sweep()
    assert sorted(path.name for path in place.iterdir()) == ["journal", "logs"]
    made.claim()
    made.release()


def test_10_live_ranks_of_a_dead_daemon_are_refused_by_pid(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank outlived its daemon the boot names its pid and starts nothing; once it is gone it boots."""
    monkeypatch.setattr(daemon.run_dir, "ORPHANS_GONE_WITHIN_S", 0.1)
    made = RunDir(place)
    made.prepare()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        made.note_ranks([child.pid])
        with pytest.raises(RunDirInUse, match=str(child.pid)):
            made.claim()
        assert made.owner() == 0, "a refused boot holds nothing"
        made.sweep()
        assert (place / "ranks.pid").exists(), "what a live process is known by stays"
    finally:
        child.communicate(b"\n")
    made.claim()
    made.release()


def test_a_pid_alone_is_no_identity() -> None:
    """A process is known by pid and start time, so that a reused pid is another process."""
    assert process_started(os.getpid()) > 0
    assert process_started(2**22 + 1) == 0


def test_the_default_is_per_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without `--run-dir` the directory lies under the user's state directory, one per port."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path(Settings(port=8123)) == tmp_path / "bandmaster" / "port-8123"
    assert default_path(Settings(run_dir="x")) == Path("x").absolute()


@pytest.mark.parametrize("main", [daemon.launcher.main, daemon.__main__.main])
@pytest.mark.parametrize(("place", "says"), [("{here}/file", "not a directory"), ("/proc/nope", "cannot be made")])
def test_a_place_that_can_be_no_directory_is_refused_in_one_line(
    main: Callable[[list[str]], int], place: str, says: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """A file, or a place where nothing can be made: one line on stderr and code 2, from whoever is told to use it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(daemon.__main__, "die_with_parent", lambda number: None)
    where = place.format(here=tmp_path)
    assert main(["--run-dir", where]) == Exit.USAGE
    said = capsys.readouterr().err
    assert where in said
    assert says in said
    assert said.count("\n") == 1
