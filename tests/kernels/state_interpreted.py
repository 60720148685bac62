"""Runs in a process of its own with TRITON_INTERPRET=1: every kernel over states against a float64 recurrence.

Prints one line `name ok` or `name WRONG detail` for each case; an out-of-bounds access ends this process, not pytest's.
"""

from __future__ import annotations

import itertools
import mmap
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from daemon.rank.states import TORCH_OPS, RecurrentStates
from daemon.rank.triton_states import TRITON_OPS
from kernels.state_rows import plan_rows
from tests.kernels.state_cases import Cuts, convolution, delta, mamba2
from tools.rank_driver import Driver, settings
from tools.tiny_models import tiny_model

MIXED: Cuts = [(1, 0, 34), (1, 2, 1), (5, 1, 3)]
LONG: Cuts = [(33, 3, 66), (1, 2, 1)]
NO_RESERVE = 0x4000  # Linux: address space without memory behind it until it is touched
FAR = {"conv": (8, 3), "mamba2": (2, 4, 8), "delta": (2, 8, 4)}  # a slot of each
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def distant(shape: tuple[int, ...], slot: int) -> Tensor:
    """Zeros float32[18, *shape], slots `slot` elements apart; what lies between them is never touched."""
    region = mmap.mmap(-1, 18 * slot * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(region, dtype=torch.float32).as_strided((18, *shape), (slot, *torch.empty(shape).stride()))


def far(family: str, counts: list[int], slots_dtype: torch.dtype) -> str:
    """An op says and keeps in slot 17, which begins 2^32 + 2^28 elements behind slot 0, what it does with slots side by
    side. To an address of 32 bits that is slot 1, which stays empty; so the numbers of slots come in 32 bits too."""
    plan = plan_rows(torch.tensor([0, 40]), torch.tensor(counts), torch.tensor([2, 17]), torch.device("cpu"))
    rows = plan.singles or plan.chunks
    assert rows is not None
    rows = rows._replace(slots=rows.slots.to(slots_dtype))
    wide, key, step = torch.randn(sum(counts), 2, 4), torch.randn(sum(counts), 1, 8), torch.rand(sum(counts), 2)
    near, distant_ones = torch.zeros(18, *FAR[family]), distant(FAR[family], 1 << 28)
    said = []
    for states in (near, distant_ones):
        states[17] = torch.linspace(-1, 1, states[17].numel()).view(FAR[family])
        given: tuple[object, ...] = (key, key, wide, -step, step, states, rows)
        if family == "mamba2":
            given = (wide, step, -step[0], key, key, step[0], states, rows)
        elif family == "conv":
            given = (wide.flatten(1), states, rows, torch.ones(8, 4), None, True)
        if plan.chunks is None:
            said.append(getattr(TRITON_OPS, f"{family}_update")(*given))
        else:
            said.append(torch.zeros(wide.flatten(1).shape if family == "conv" else wide.shape))
            getattr(TRITON_OPS, f"{family}_chunks")(*given, said[-1])
    if not torch.equal(*said):
        return "what is said"
    return "" if torch.equal(near, distant_ones) and not near[1].any() and near[2].any() else "what is kept"


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
    found: dict[str, Callable[[], str]] = {}
    for family, (kind, counts) in itertools.product(FAR, (("update", [1, 1]), ("chunks", [5, 2]))):
        for slots_dtype in (torch.int64, torch.int32):
            found[f"far {family} {kind} {slots_dtype}"] = partial(far, family, counts, slots_dtype)
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
