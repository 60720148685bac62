"""The one command before every commit: format, lint, types, tidy tests, all tests, in that order.

Owns the list of steps. Must never change a file. Invariant: it exits 0 only if every step that was asked for passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class StepOfCheck(NamedTuple):
    """One step: its name and the module with arguments that `python -m` runs in the repository's root."""

    name: str
    command: tuple[str, ...]
    is_test: bool = False


STEPS = (
    StepOfCheck("format", ("ruff", "format", "--check", ".")),
    StepOfCheck("lint", ("ruff", "check", ".")),
    StepOfCheck("types", ("mypy",)),
    StepOfCheck("tidy", ("pytest", "-q", "tests/tidy"), is_test=True),
    StepOfCheck("tests", ("pytest", "-q", "-n", "2", "--dist", "loadfile", "--ignore", "tests/tidy"), is_test=True),
)


def run_step(step: StepOfCheck) -> tuple[int, float]:
    """Exit code and seconds of one step; its output goes to ours."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", *step.command], cwd=ROOT, check=False)
    return done.returncode, time.monotonic() - began


def main(argv: list[str]) -> int:
    """`bandmaster check [--no-tests] [--only STEP]`: 0 if all passed, 1 otherwise; later steps run after a failure."""
    parser = argparse.ArgumentParser(prog="bandmaster check", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--no-tests", action="store_true", help="only format, lint and types")
    parser.add_argument("--only", choices=[step.name for step in STEPS], help="one step")
    options = parser.parse_args(argv)
    steps = [step for step in STEPS if (options.only in (None, step.name)) and not (options.no_tests and step.is_test)]
    lines, failed = [], 0
    for step in steps:
        sys.stdout.write(f"--- {step.name}: {' '.join(step.command)}\n")
        sys.stdout.flush()
        code, seconds = run_step(step)
        failed += code != 0
        lines.append(f"{step.name:8} {'passed' if code == 0 else f'FAILED (exit {code})'} in {seconds:.1f} s")
    sys.stdout.write("\n".join(["", *lines, ""]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
