"""Recurrent ops equal a float64 recurrence token by token, however a row is cut and whatever lies in its slot."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.state_conv import conv_chunks, conv_update
from kernels.state_delta import delta_chunks, delta_update
from kernels.state_mamba2 import mamba2_chunks, mamba2_update
from kernels.state_rows import RowPlan, plan_rows

SLOTS = 12
# Tokens per step of three rows; 0: the row is not in the step.
CUTS = [
    [(70, 3, 130)],
    [(1, 1, 1)] * 9,
    [(1, 0, 64), (1, 2, 1), (5, 1, 65), (33, 40, 1)],
    [(2, 1, 3), (2, 1, 3), (0, 1, 100), (1, 1, 1), (17, 1, 16)],
]
Step = Callable[[RowPlan, Tensor, Tensor], Tensor]


def strided(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A view [slots, *shape] with gaps between slots, full of NaN: a slot is never read before it is written."""
    size = int(torch.tensor(shape).prod())
    whole = torch.full((SLOTS, size + 5), torch.nan, dtype=dtype)
    return whole[:, 3 : 3 + size].view(SLOTS, *shape)


def loose(tensor: Tensor) -> Tensor:
    """The same numbers as a view of a wider tensor, as the inputs of a mixer are parts of one product."""
    flat = tensor.flatten(1)
    wide = torch.cat((flat, torch.full_like(flat, torch.nan)), 1)
    return wide[:, : flat.shape[1]].view(tensor.shape)


def cut_run(cuts: list[tuple[int, ...]], step: Step, width: int) -> list[Tensor]:
    """Run three rows through `step` in these pieces, batched per step in a changing order; outputs of each row."""
    slots, done = [7, 2, 10], [0, 0, 0]
    outputs: list[list[Tensor]] = [[], [], []]
    for number, counts in enumerate(cuts):
        rows = [row for row in range(3) if counts[row]]
        rows = rows[number % len(rows) :] + rows[: number % len(rows)]
        sizes = [counts[row] for row in rows]
        starts, places = torch.tensor([done[row] for row in rows]), torch.tensor([slots[row] for row in rows])
        plan = plan_rows(starts, torch.tensor(sizes), places, torch.device("cpu"))
        tokens = torch.tensor([row for row in rows for _ in range(counts[row])])
        positions = torch.cat([torch.arange(done[row], done[row] + counts[row]) for row in rows])
        out = step(plan, tokens, positions)
        assert out.flatten(1).shape == (tokens.numel(), width)
        for row, part in zip(rows, torch.split(out, sizes), strict=True):
            outputs[row].append(part)
            done[row] += counts[row]
    return [torch.cat(parts) for parts in outputs]


def close(mine: list[Tensor], naive: Callable[[int, int], Tensor], tolerance: float) -> None:
    """Every row equals its float64 recurrence."""
    for row, part in enumerate(mine):
        want = naive(row, part.shape[0])
        assert torch.isfinite(part).all()
        error = float((part.double() - want).abs().max() / want.abs().max())
        assert error < tolerance, f"row {row} of {part.shape[0]} tokens: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("taps", "bias", "silu"), [(2, False, True), (3, True, False), (4, True, True), (8, False, False)]
)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(taps: int, bias: bool, silu: bool, cuts: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    """Kernels of 2 to 8 taps, chunks shorter than the kernel, with and without bias and activation."""
    torch.manual_seed(taps)
    channels, length = 6, 200
    x = torch.randn(3, length, channels).to(dtype)
    weight, shift = torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype)
    states = strided(channels, taps - 1, dtype=dtype)

    def step(plan: RowPlan, rows: Tensor, positions: Tensor) -> Tensor:
        given = loose(x[rows, positions])
        out = torch.empty_like(given)
        if plan.singles is not None:
            mine = given if plan.singles.tokens is None else given[plan.singles.tokens]
            result = conv_update(mine, states, plan.singles, weight, shift if bias else None, silu)
            out[slice(None) if plan.singles.tokens is None else plan.singles.tokens] = result
        if plan.chunks is not None:
            conv_chunks(given, states, plan.chunks, weight, shift if bias else None, silu, out)
        return out

    def naive(row: int, count: int) -> Tensor:
        padded = F.pad(x[row, :count].double().T[None], (taps - 1, 0))
        out = F.conv1d(padded, weight.double()[:, None], shift.double() if bias else None, groups=channels)[0].T
        return F.silu(out) if silu else out

    close(cut_run(cuts, step, channels), naive, 1e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("heads", "groups", "dim", "width"), [(4, 2, 8, 16), (6, 1, 3, 5), (2, 2, 16, 8)])
def test_mamba2(cuts: list[tuple[int, ...]], heads: int, groups: int, dim: int, width: int) -> None:
    """Selective state updates and chunk scans, with weak and strong decay, mixed in every order."""
    torch.manual_seed(heads)
    length = 200
    x, b, c = (
        torch.randn(3, length, heads, dim),
        torch.randn(3, length, groups, width),
        torch.randn(3, length, groups, width),
    )
    dt = F.softplus(torch.randn(3, length, heads) * 2)
    a, d = -torch.exp(torch.randn(heads) * 2), torch.randn(heads)
    states = strided(heads, dim, width)

    def step(plan: RowPlan, rows: Tensor, positions: Tensor) -> Tensor:
        given = [loose(tensor[rows, positions]) for tensor in (x, dt, b, c)]
        out = torch.empty_like(given[0])
        if plan.singles is not None:
            at = slice(None) if plan.singles.tokens is None else plan.singles.tokens
            xs, dts, bs, cs = (tensor[at] for tensor in given)
            out[at] = mamba2_update(xs, dts, a, bs, cs, d, states, plan.singles)
        if plan.chunks is not None:
            mamba2_chunks(given[0], given[1], a, given[2], given[3], d, states, plan.chunks, out)
        return out

    def naive(row: int, count: int) -> Tensor:
        state, out = torch.zeros(heads, dim, width, dtype=torch.float64), []
        spread = heads // groups
        for t in range(count):
            xt, dtt = x[row, t].double(), dt[row, t].double()[:, None, None]
            bt, ct = (tensor[row, t].double().repeat_interleave(spread, 0) for tensor in (b, c))
            state = torch.exp(dtt * a.double()[:, None, None]) * state + dtt * xt[:, :, None] * bt[:, None]
            out.append((state * ct[:, None]).sum(-1) + d.double()[:, None] * xt)
        return torch.stack(out)

    close(cut_run(cuts, step, heads * dim), naive, 2e-6)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("heads", "key_heads", "key_dim", "value_dim"), [(4, 2, 8, 12), (3, 3, 16, 4), (4, 1, 5, 7)])
def test_gated_delta_rule(
    cuts: list[tuple[int, ...]], heads: int, key_heads: int, key_dim: int, value_dim: int
) -> None:
    """Recurrent updates and chunks, with weak and strong decay, mixed in every order."""
    torch.manual_seed(heads + key_dim)
    length = 200
    q, k = (F.normalize(torch.randn(3, length, key_heads, key_dim), dim=-1) for _ in range(2))
    v = torch.randn(3, length, heads, value_dim)
    g, beta = -torch.exp(torch.randn(3, length, heads) * 2 - 2), torch.sigmoid(torch.randn(3, length, heads) * 2)
    states = strided(heads, key_dim, value_dim)

    def step(plan: RowPlan, rows: Tensor, positions: Tensor) -> Tensor:
        given = [loose(tensor[rows, positions]) for tensor in (q, k, v, g, beta)]
        out = torch.empty_like(given[2])
        if plan.singles is not None:
            at = slice(None) if plan.singles.tokens is None else plan.singles.tokens
            qs, ks, vs, gs, betas = (tensor[at] for tensor in given)
            out[at] = delta_update(qs, ks, vs, gs, betas, states, plan.singles)
        if plan.chunks is not None:
            qs, ks, vs, gs, betas = given
            delta_chunks(qs, ks, vs, gs, betas, states, plan.chunks, out)
        return out

    def naive(row: int, count: int) -> Tensor:
        state, out = torch.zeros(heads, key_dim, value_dim, dtype=torch.float64), []
        for t in range(count):
            qt, kt = (tensor[row, t].double().repeat_interleave(heads // key_heads, 0) for tensor in (q, k))
            state = state * torch.exp(g[row, t].double())[:, None, None]
            known = torch.einsum("hkv,hk->hv", state, kt)
            correction = beta[row, t].double()[:, None] * (v[row, t].double() - known)
            state = state + kt[:, :, None] * correction[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, qt))
        return torch.stack(out)

    close(cut_run(cuts, step, heads * value_dim), naive, 5e-6)


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


def test_plans_cover_every_token_once() -> None:
    """All small mixtures of rows: every token is in one single or in one block, in its row's order."""
    for counts in itertools.product((1, 2, 16, 17, 70), repeat=3):
        sizes = torch.tensor(counts)
        plan = plan_rows(torch.tensor([0, 5, 0]), sizes, torch.tensor([3, 1, 2]), torch.device("cpu"))
        seen: list[int] = []
        if plan.singles is not None:
            seen += list(range(3)) if plan.singles.tokens is None else plan.singles.tokens.tolist()
        if plan.chunks is not None:
            blocks = plan.chunks.places[plan.chunks.inside].tolist()
            assert blocks == plan.chunks.tokens.tolist()
            assert sorted(torch.cat(plan.chunks.steps).tolist()) == list(range(plan.chunks.places.shape[0]))
            seen += blocks
        assert sorted(seen) == list(range(sum(counts)))
