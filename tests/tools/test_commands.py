"""The command line itself: usage, unknown names, bad arguments, what `check` runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.tidy.source import ROOT
from tools import bench, bench_core, bench_idle, bench_serve, check, cli, parity_held, replay
from tools.worlds import command as worlds


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


@pytest.mark.parametrize(
    ("main", "argv", "why"),
    [
        (bench_core.main, ["--bands", "full,windw:64"], "'full,windw:64'"),
        (bench_core.main, ["--bands", ""], "--bands ''"),
        (bench_core.main, ["--running", "x"], "'x'"),
        (bench_core.main, ["--running", "4,0"], "'4,0'"),
        (bench_core.main, ["--steps", "0"], "--steps 0"),
        (bench_idle.main, ["--seconds", "-1"], "--seconds -1"),
        (replay.main, ["until", "0", "nowhere"], "'0' is no number of a record"),
        (replay.main, ["until", "-5", "nowhere"], "'-5' is no number of a record"),
        (worlds.main, ["--seeds", "-5:1"], "--seeds -5:1: give A:B, whole numbers from 0"),
    ],
)
def test_numbers_out_of_range_are_bad_usage(
    main: Callable[[list[str]], int], argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line that names the value, before anything is started."""
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_tables_of_held_bytes_are_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Long names and thirteen digits are printed uncut where no terminal says how wide it is."""
    numbers = {"held_bytes": 1234567890123, "needed_bytes": 1234567890122, "checkpoint_bytes": 98765432109}
    row = {"model": "qwen3_next-with-a-long-name", "tokens": 131072, "units": [8192, 1024, 1], "ratio": 1.0}
    parity_held._show([row | numbers | {"tail_bytes": 123456789012, "as_planned": True}])
    shown = capsys.readouterr().out
    for cell in (
        "qwen3_next-with-a-long-name",
        "1,234,567,890,123",
        "98,765,432,109",
        "123,456,789,012",
        "8192/1024/1",
    ):
        assert cell in shown


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
