"""Triton kernels over states, in processes of their own: interpreted against float64, and compiled for real targets."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.kernels.test_triton import REGISTERS_MAX, run_module


def test_state_kernels_equal_a_float64_recurrence_in_the_interpreter(tmp_path: Path) -> None:
    """Every case of every kernel: odd sizes, rows cut in pieces, slots of NaN, far addresses, whole models."""
    done = run_module("state_interpreted", tmp_path, TRITON_INTERPRET="1")
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.endswith(" ok")] == []
    assert (done.returncode, len(lines)) == (0, 27), f"after {lines[-1:]}: {done.stderr[-2000:]}"


def test_state_kernels_compile_without_spills(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """For sm_80 and sm_90 every kernel keeps its values in registers and leaves room for a second program."""
    done = run_module("state_compiled", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"^(\S+) (\S+) registers (\d+) stack (\d+) local (\d+)$", done.stdout, re.MULTILINE)
    assert len(found) == 14
    for name, target, registers, stack, local in found:
        record_property(f"{name} {target}", f"registers {registers}, stack {stack}, local {local}")
        assert (int(registers) <= REGISTERS_MAX, stack, local) == (True, "0", "0"), f"{name} {target}: {registers}"
