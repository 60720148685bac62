"""Triton kernels, in processes of their own: interpreted against their twins, and compiled for real targets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REGISTERS_MAX = 168  # leaves three programs of four warps on a multiprocessor
UNIT_REGISTERS_MAX = 64  # eight: a copy lives from loads in flight


def run_module(name: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this folder in a process of its own."""
    variables = os.environ | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-m", f"tests.kernels.{name}"]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def test_kernels_equal_their_twins_in_the_interpreter(tmp_path: Path) -> None:
    """Every case of every kernel: odd sizes, all dtypes, far addresses; a crash names the case it did not print."""
    done = run_module("interpreted", tmp_path, TRITON_INTERPRET="1")
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.endswith(" ok")] == []
    assert (done.returncode, len(lines)) == (0, 58), f"after {lines[-1:]}: {done.stderr[-2000:]}"


def test_kernels_compile_without_spills(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """For sm_80 and sm_90 every kernel compiles, keeps its values in registers and leaves room for two more programs.

    The registers of each are a property of the test's report; unit kernels, which only move words, need few.
    """
    done = run_module("compiled", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"^(\S+) (\S+) registers (\d+) stack (\d+) local (\d+)$", done.stdout, re.MULTILINE)
    assert len(found) == 42
    for name, target, registers, stack, local in found:
        record_property(f"{name} {target}", f"registers {registers}, stack {stack}, local {local}")
        most = UNIT_REGISTERS_MAX if name in ("zero", "copy", "update") else REGISTERS_MAX
        assert (int(registers) <= most, stack, local) == (True, "0", "0"), f"{name} {target}: {registers} registers"


def test_a_warm_up_asks_for_every_form_of_the_attention_kernels(tmp_path: Path) -> None:
    """Longer contexts, wider tables and mixed batches launch what the two batches of a warm-up had compiled; two layers
    of one band differ by their rules alone."""
    done = run_module("forms", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["_combine 2", "_extend 3", "_partial 3", "_store 2"]


def test_the_folder_is_not_taken_for_a_foreign_package() -> None:
    """`transformers` probes for a package named kernels; ours must not switch its hub kernels on."""
    code = "import transformers.utils.import_utils as u; print(u.is_kernels_available())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_importing_the_folder_imports_nothing() -> None:
    """`import kernels` loads neither torch nor triton."""
    code = "import sys, kernels; print(kernels.__version__, 'torch' in sys.modules, 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False", "False"]


@pytest.mark.parametrize("module", ["host_attention", "reference"])
def test_what_a_cpu_rank_runs_needs_no_triton(module: str) -> None:
    """The modules of the CPU path import without triton."""
    code = f"import sys; import kernels.{module}; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
