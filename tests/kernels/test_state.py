"""Recurrent ops of a CPU rank equal a float64 recurrence, however a row is cut and whatever lies in its slot."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from daemon.rank.batch import Batch
from daemon.rank.states import TORCH_OPS, LayerStates, RecurrentStates
from daemon.rank.triton_states import TRITON_OPS
from kernels import state_rows
from kernels.state_mamba2 import mamba2_chunks
from kernels.state_rows import plan_rows
from tests.kernels.state_cases import Cuts, convolution, delta, mamba2, strided
from tests.kernels.uploads import Uploads

CUTS: list[Cuts] = [
    [(70, 3, 130)],
    [(1, 1, 1)] * 9,
    [(1, 0, 64), (1, 2, 1), (5, 1, 65), (33, 40, 1)],
    [(2, 1, 3), (2, 1, 3), (0, 1, 100), (1, 1, 1), (17, 1, 16)],
]


@pytest.mark.parametrize(
    ("taps", "bias", "silu"), [(2, False, True), (3, True, False), (4, True, True), (8, False, False)]
)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_convolution(cuts: Cuts, taps: int, bias: bool, silu: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Kernels of 2 to 8 taps, chunks shorter than the kernel, with and without bias and activation."""
    assert convolution(TORCH_OPS, cuts, taps, bias, silu, dtype) < tolerance


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("heads", "groups", "dim", "width"), [(4, 2, 8, 16), (6, 1, 3, 5), (2, 2, 16, 8)])
def test_mamba2(cuts: Cuts, heads: int, groups: int, dim: int, width: int) -> None:
    """Selective state updates and chunk scans, mixed in every order."""
    assert mamba2(TORCH_OPS, cuts, heads, groups, dim, width) < 2e-6


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("heads", "key_heads", "key_dim", "value_dim"), [(4, 2, 8, 12), (3, 3, 16, 4), (4, 1, 5, 7)])
def test_gated_delta_rule(cuts: Cuts, heads: int, key_heads: int, key_dim: int, value_dim: int) -> None:
    """Recurrent updates and chunks, mixed in every order."""
    assert delta(TORCH_OPS, cuts, heads, key_heads, key_dim, value_dim) < 5e-6


def test_rows_are_updated_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """States larger than a pass: every row alone, then two at a time, fresh ones among them."""
    for pass_bytes in (1, 2 * 4 * 8 * 16 * 4):
        monkeypatch.setattr(state_rows, "PASS_BYTES", pass_bytes)
        cuts: Cuts = [(1, 0, 0), (1, 0, 1), (1, 1, 1), (1, 1, 1)]
        assert mamba2(TORCH_OPS, cuts, 4, 2, 8, 16) < 2e-6
        assert delta(TORCH_OPS, cuts, 4, 2, 8, 16) < 5e-6


def test_a_row_with_nan_spoils_no_other() -> None:
    """Padding of a block is taken from the row itself: what another row holds, even NaN, never enters."""
    torch.manual_seed(0)
    x, dt = torch.randn(40, 2, 4), torch.rand(40, 2)
    b, c = torch.randn(40, 1, 8), torch.randn(40, 1, 8)
    x[:20] = torch.nan
    plan = plan_rows(torch.tensor([0, 0]), torch.tensor([20, 20]), torch.tensor([1, 2]), torch.device("cpu"))
    out = torch.zeros(40, 2, 4)
    assert plan.chunks is not None
    mamba2_chunks(x, dt, -torch.ones(2), b, c, torch.ones(2), strided(2, 4, 8), plan.chunks, out)
    assert torch.isnan(out[:20]).all()
    assert torch.isfinite(out[20:]).all()


def test_kernels_plan_uploads_what_they_read_and_waits_for_none() -> None:
    """For the kernels a chunk of 8,192 tokens takes as many copies as one of 17, and none that waits."""
    view = LayerStates(torch.empty(8, 6, 3), None)
    for chunk in (17, 8192):
        columns = {"starts": [9, 0, 5], "counts": [1, chunk, 40], "slots": [3, 1, 2]}
        batch = SimpleNamespace(**{name: np.array(column, np.int32) for name, column in columns.items()})
        with Uploads() as uploads:
            RecurrentStates({0: view}, torch.device("meta"), TRITON_OPS).begin(cast(Batch, batch))
        assert uploads.waits == [False] * 7, "3 columns of the single rows, 4 of the chunks"


def test_plans_cover_every_token_once() -> None:
    """All small mixtures of rows: every token is in one single or in one block, in its row's order."""
    for counts in itertools.product((1, 2, 16, 17, 70), repeat=3):
        sizes = torch.tensor(counts)
        plan = plan_rows(torch.tensor([0, 5, 0]), sizes, torch.tensor([3, 1, 2]), torch.device("cpu"))
        seen: list[int] = []
        if plan.singles is not None:
            seen += list(range(3)) if plan.singles.tokens is None else plan.singles.tokens.tolist()
        if plan.chunks is not None:
            cut = plan.chunks.cut()
            tokens = cut.places[cut.inside].tolist()
            assert tokens == cut.tokens.tolist()
            assert sorted(torch.cat(cut.steps).tolist()) == list(range(cut.places.shape[0]))
            seen += tokens
        assert sorted(seen) == list(range(sum(counts)))
