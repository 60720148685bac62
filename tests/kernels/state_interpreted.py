"""Runs in a process of its own with TRITON_INTERPRET=1: every kernel over states against a float64 recurrence.

Prints one line `name ok` or `name WRONG detail` for each case; an out-of-bounds access ends this process, not pytest's.
"""

from __future__ import annotations

import mmap
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from daemon.rank.states import TORCH_OPS, RecurrentStates
from daemon.rank.triton_states import TRITON_OPS
from kernels.state_conv_triton import conv_update
from kernels.state_mamba2_triton import mamba2_update
from kernels.state_rows import Singles
from tests.kernels.state_cases import Cuts, convolution, delta, mamba2
from tools.rank_driver import Driver, settings
from tools.tiny_models import tiny_model

MIXED: Cuts = [(1, 0, 34), (1, 2, 1), (5, 1, 3)]
LONG: Cuts = [(33, 3, 66), (1, 2, 1)]
NO_RESERVE = 0x4000  # Linux: address space without memory behind it until it is touched
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def far() -> str:
    """Slots whose elements lie beyond 2^31: the addresses are of 64 bits. What lies before them is never touched."""
    slot = 1 << 28
    region = mmap.mmap(-1, 10 * slot * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    arena = torch.frombuffer(region, dtype=torch.float32)
    scan, kept = arena.as_strided((10, 2, 4, 8), (slot, 32, 8, 1)), arena.as_strided((10, 6, 3), (slot, 3, 1), 64)
    rows = Singles(None, torch.tensor([9, 1]), torch.tensor([True, True]))
    one, two = torch.ones(2, 1, 8), torch.ones(2, 2)
    y = mamba2_update(torch.ones(2, 2, 4), two, -two[0], one, one, two[0], scan, rows)
    if not torch.equal(y, torch.full((2, 2, 4), 9.0)) or not torch.equal(scan[9], torch.ones(2, 4, 8)):
        return "the scan state of slot 9"
    mixed = conv_update(torch.ones(2, 6), kept, rows, torch.ones(6, 4), None, False)
    if not torch.equal(mixed, torch.ones(2, 6)) or kept[9, :, 2].tolist() != [1.0] * 6:
        return "the inputs of slot 9"
    return "slot 0 was written" if arena[:200].any() else ""


def model(name: str) -> str:
    """A whole small model over these kernels says what it says over the torch ops; a chunk, a short one and decodes."""
    with tempfile.TemporaryDirectory() as place:
        directory = tiny_model(Path(place), name)
        values: dict[str, object] = {"runner": "torch", "model_path": str(directory), "dtype": "float32"}
        said = []
        for ops in (TORCH_OPS, TRITON_OPS):
            with mock.patch.object(RecurrentStates.__init__, "__defaults__", (ops,)):
                driver = Driver(settings(**values, arena_bytes=4 << 20))
                said.append(driver.generate(0, [5, 60, 7, 80, 9, 100, 11, 120, 13], 4, chunk=7))
    return "" if said[0] == said[1] else f"{said[1]} for {said[0]}"


def within(tolerance: float, measure: Callable[..., float], *arguments: object) -> str:
    """Empty, or what is wrong."""
    error = measure(TRITON_OPS, *arguments)
    return "" if error < tolerance else f"relative error {error:.1e}, allowed {tolerance:.0e}"


def cases() -> dict[str, Callable[[], str]]:
    """Every case by name."""
    found: dict[str, Callable[[], str]] = {"far slots": far}
    for taps, bias, silu, dtype, channels in (
        (2, False, True, F32, 150),
        (4, True, True, BF16, 6),
        (8, True, False, F32, 6),
        (3, False, False, F16, 6),
    ):
        tolerance = {F32: 1e-6, F16: 2e-3, BF16: 2e-2}[dtype]  # bfloat16 is truncated here
        found[f"conv {taps}"] = partial(within, tolerance, convolution, MIXED, taps, bias, silu, dtype, channels)
    for name in ("falcon_h1", "qwen3_next", "lfm3"):
        found[name] = partial(model, name)
    for name, cuts in (("mixed", MIXED), ("long", LONG)):
        for shape in ((4, 2, 8, 16), (3, 1, 5, 7)):
            found[f"mamba2 {name} {shape}"] = partial(within, 5e-6, mamba2, cuts, *shape)
        for shape in ((4, 2, 8, 12), (2, 1, 5, 35)):
            found[f"delta {name} {shape}"] = partial(within, 1e-5, delta, cuts, *shape)
    return found


def main() -> int:
    """Run every case."""
    for name, run in cases().items():
        detail = run()
        print(f"{name} {'WRONG ' + detail if detail else 'ok'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
