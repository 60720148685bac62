"""Ctrl-C: one line and exit code 130, wherever a command is and however many processes it has."""

from __future__ import annotations

import multiprocessing
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

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
