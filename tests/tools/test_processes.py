"""Ctrl-C: one line and exit code 130, wherever a command is and however many processes it has."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tidy.source import ROOT
from tests.tools.simulate_world import conversations, write
from tools import cli
from tools.processes import start_deaf


def test_a_process_never_sees_sigint() -> None:
    """It is blocked in the process from its start, the first one's too; here it is not."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    for _ in range(2):
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
        start_deaf(process)
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.kill()
        process.join()
        (blocked,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")]
        assert int(blocked, 16) >> (signal.SIGINT - 1) & 1
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before


@pytest.mark.parametrize("name", ["bench", "simulate", "plan"])
def test_an_interrupted_command_says_so_in_a_line(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a command does at that moment, its import too."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for module in (SimpleNamespace(main=interrupted), None):
        monkeypatch.setattr(cli.importlib, "import_module", lambda _, it=module: it or interrupted())
        assert cli.main([name, "hits"]) == 130
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == ("", f"bandmaster {name}: interrupted\n")


def test_ctrl_c_while_processes_start_is_told_once(tmp_path: Path) -> None:
    """The signal comes to all of them at once, as a terminal sends it: only the command speaks."""
    trace = write(tmp_path / "trace.jsonl", conversations(1, 400, 1))
    arguments = ["simulate", str(trace), "--band", "full=1000/page", "--jobs", "2", "--no-bound"]
    with subprocess.Popen(
        [sys.executable, "-m", "tools.cli", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as command:
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
        while command.poll() is None and len(children.read_text().split()) < 2:
            os.sched_yield()  # the first is the tracker of `multiprocessing`
        os.killpg(command.pid, signal.SIGINT)
        out, err = command.communicate(timeout=60)
    assert command.returncode == 130, err
    assert (out, err) == ("", "bandmaster simulate: interrupted; nothing was written\n")
