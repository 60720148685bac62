"""The command line itself: usage, unknown names, bad arguments, what `check` runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tidy.source import ROOT
from tools import bench, bench_serve, check, cli


def test_usage_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command: the list and exit code 2; with --help: the list and 0; unknown: its name and 2."""
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)
    assert cli.main(["no-such-command"]) == 2
    assert "no-such-command" in capsys.readouterr().err


def test_unknown_benchmarks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """`bench` lists what it has and refuses what it has not."""
    assert bench.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in bench.BENCHMARKS)
    assert bench.main(["nothing"]) == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "1,-2", "a", "1,,2"])
def test_concurrencies_must_be_positive(text: str) -> None:
    """A bad list is refused before a server is started."""
    with pytest.raises(ValueError, match=r".*"):
        bench_serve.concurrencies(text)
    assert bench_serve.concurrencies("1,16") == [1, 16]


def test_help_is_light() -> None:
    """`bandmaster --help` imports no heavy package."""
    program = (
        "import sys; from tools.cli import main; main(['--help']); "
        "print(sorted({'torch', 'numpy', 'trio', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_check_runs_format_lint_types_tidy_and_tests_and_reports_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All steps run in order even after one failed, and the exit code tells."""
    ran: list[str] = []

    def run_step(step: check.StepOfCheck) -> tuple[int, float]:
        ran.append(step.name)
        return (1 if step.name == "types" else 0), 0.0

    monkeypatch.setattr(check, "run_step", run_step)
    assert check.main([]) == 1
    assert ran == ["format", "lint", "types", "tidy", "tests"]
    assert "types    FAILED" in capsys.readouterr().out
    ran.clear()
    assert check.main(["--no-tests"]) == 1
    assert ran == ["format", "lint", "types"]
    assert check.main(["--only", "lint"]) == 0


def test_a_server_that_cannot_start_is_an_error_of_the_benchmark() -> None:
    """`bench serve` with a refused flag exits 1 and says why, with no trace."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.cli", "bench", "serve", "--json", "--", "--page-size", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1
    assert "--page-size" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.e2e
def test_bench_serve_and_idle_measure_a_server() -> None:
    """Rows with the promised fields, no errors, and an idle server that costs little."""
    modeled = ["--", "--rank-runner", "modeled", "--rank-option", "delay_us=1000"]
    small = ["--requests", "8", "--load", "16/8"]
    serve = run("bench", "serve", "--concurrency", "1,4", *small, "--json", *modeled)
    assert [row["concurrency"] for row in serve] == [1, 4]
    for row in serve:
        assert (row["requests"], row["errors"], row["output_tokens"]) == (8, 0, 64)
        assert row["output_tok_s"] > 0
        assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"] <= row["e2e_ms_p99"]
    idle = run("bench", "idle", "--seconds", "3", "--settle", "1", "--json", *modeled)
    assert {"daemon", "daemon.frontend", "daemon.rank", "all"} <= {row["process"] for row in idle}
    assert idle[-1]["percent_of_a_core"] < 20


def run(*arguments: str) -> list[dict[str, float]]:
    """The rows that a command prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows: list[dict[str, float]] = json.loads(done.stdout)["rows"]
    return rows
