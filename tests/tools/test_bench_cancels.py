"""`bench cancels` on a real server: a small crowd over ZeroMQ and HTTP, an answer that is lost, usage, an interrupt."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.daemon.daemon_process import PATIENCE_S, ROOT
from tools.bench_cancels import main

SMALL = [
    "--cancels",
    "40",
    "--keep",
    "4",
    "--running",
    "16",
    "--quiet",
    "0.2",
    "--stall-ms",
    "60000",
    "--delay-us",
    "1000",
]
LOSES_ONE_AND_STALLS = """
import sys, time
if ["-m", "daemon"] == [word for word in getattr(sys, "orig_argv", []) if word in ("-m", "daemon")]:
    from daemon.gateway import Gateway
    send = Gateway._send_reply
    def lose(self, reply):
        if not (type(reply.message).__name__ == "Finished" and reply.message.id == "gone-1-7"):
            send(self, reply)
    Gateway._send_reply = lose
    from daemon.core.scheduler import SchedulerCore
    aborted = SchedulerCore._aborted
    def slow(self, item, out):
        time.sleep(0.02)
        aborted(self, item, out)
    SchedulerCore._aborted = slow
"""


@pytest.mark.e2e
def test_a_small_crowd_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """Two crowds, one by one: every figure is there, both rounds hold, memory is back and the journal replays."""
    assert main([*SMALL, "--rounds", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["missed"] == []
    for row in told["rows"]:
        assert row["accepted"] == row["answered"] == row["ended"] == row["cancels"] == 40
        assert row["kept_equal"] == row["kept"] == 4
        assert sum(row[f"{state}_at_cancel"] for state in ("decoding", "prefilling", "waiting")) == 40
        assert row["decoding_at_cancel"] >= 6
        assert row["waiting_at_cancel"] > 0
        longest = {name: row["pauses"][name]["seen_ms"]["max"] for name in ("alone", "crowd", "after")}
        assert min(longest.values()) > 0, longest  # 40 cancels may be over before any pause ends among them
        assert "cancels" in row["pauses"]
        assert row["pauses"]["alone"]["steps_between"] >= 2, "two stages take turns"
    (units,) = told["units"].values()
    assert units["free"] + units["reclaimable"] == units["emptied"] == units["boot"]
    assert told["replay"].startswith("reproduced")


@pytest.mark.e2e
def test_clients_that_hang_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody is answered over HTTP; the journal has one end for each, and the kept streams are told apart from it."""
    assert main([*SMALL, "--http", "--pp", "1"]) == 0
    shown = capsys.readouterr().out
    assert "held: 40 cancels, each ended once" in shown
    assert "reproduced" in shown


@pytest.mark.e2e
def test_a_lost_answer_and_a_stall_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A daemon that does not tell one end, and whose cancels take 20 ms each: both are said, and nothing else."""
    (tmp_path / "sitecustomize.py").write_text(LOSES_ONE_AND_STALLS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main([*SMALL, "--pp", "1", "--patience", "5", "--stall-ms", "500"]) == 1
    lost, stall = [line for line in capsys.readouterr().out.splitlines() if line.startswith("MISSED")]
    assert lost == "MISSED: round 1: 1 of 40 were not answered: gone-1-7"
    assert re.fullmatch(r"MISSED: round 1: a kept stream paused for \d+ ms .*; the bound is 500 ms", stall)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--cancels", "0"], "--cancels 0: it must be at least 1"),
        (["--cancels", "9" * 400], "99: it must be at least 1 and at most 4000"),
        (["--seed", "9" * 400], "99: it must be at least 0 and at most 4294967295"),
        (["--spread-ms", "nan"], "--spread-ms nan"),
        (["--running", "32"], "--running 32: --keep 32 streams need a place each"),
        (["--tp", "0"], "--tensor-parallel-size"),
        (["--run-dir", str(ROOT)], "must be a directory that is empty"),
        (["--", "--nonsense"], "--nonsense"),
        (["--", "--rank-runner", "torch"], "--rank-runner"),
    ],
)
def test_bad_usage_is_named(argv: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and a line that names the option, before anything is started."""
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert why in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.e2e
def test_what_the_server_refuses_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank knows its options: exit code 2 and its sentence, without the server's logs."""
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--", "--rank-option", "nope=1"])
    assert "unknown option 'nope' of the modeled runner; it has " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.e2e
def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while the server runs: exit code 130, one line, and no process of it is left."""
    command = [sys.executable, "-m", "tools.cli", "bench", "cancels", *SMALL, "--quiet", "60"]
    command += ["--run-dir", str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as bench:
        while not (tmp_path / "run" / "ranks.pid").exists():
            assert bench.poll() is None
            psutil.Process(bench.pid).cpu_times()
        family = psutil.Process(bench.pid).children(recursive=True)
        bench.send_signal(signal.SIGINT)
        _, told = bench.communicate(timeout=PATIENCE_S)
    assert (bench.returncode, told) == (130, "bandmaster bench: interrupted\n")
    assert len(family) > 2
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
