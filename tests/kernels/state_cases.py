"""Recurrent ops against a float64 recurrence token by token: three rows cut into pieces, batched in a changing order.

Slots are full of NaN and inputs are views of wider tensors with NaN behind them: nothing foreign may enter a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from daemon.rank.states import StateOps
from kernels.state_rows import RowPlan, Singles, plan_rows

SLOTS = 12
Cuts = Sequence[tuple[int, int, int]]  # tokens of each row in each step; 0: the row is not in the step
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


def cut_run(cuts: Cuts, step: Step) -> list[Tensor]:
    """Run three rows through `step` in these pieces; outputs of each row."""
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
        for row, part in zip(rows, torch.split(step(plan, tokens, positions), sizes), strict=True):
            outputs[row].append(part)
            done[row] += counts[row]
    return [torch.cat(parts) for parts in outputs]


def worst(mine: list[Tensor], naive: Callable[[int, int], Tensor]) -> float:
    """Largest error over all rows, relative to the largest value of the row; infinite for NaN."""
    errors = []
    for row, part in enumerate(mine):
        want = naive(row, part.shape[0])
        error = (part.double() - want).abs().max() / want.abs().max()
        errors.append(float(error) if torch.isfinite(part).all() else torch.inf)
    return max(errors)


def _length(cuts: Cuts) -> int:
    return max(sum(step[row] for step in cuts) for row in range(3))


def _places(rows: Singles) -> Tensor | slice:
    return slice(None) if rows.tokens is None else rows.tokens


def convolution(
    ops: StateOps, cuts: Cuts, taps: int, bias: bool, silu: bool, dtype: torch.dtype, channels: int = 6
) -> float:
    """Causal convolution of `taps` inputs."""
    torch.manual_seed(taps)
    x = torch.randn(3, _length(cuts), channels).to(dtype)
    weight, shift = torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype) if bias else None
    states = strided(channels, taps - 1, dtype=dtype)

    def step(plan: RowPlan, rows: Tensor, positions: Tensor) -> Tensor:
        given = loose(x[rows, positions])
        out = torch.empty_like(given)
        if plan.singles is not None:
            at = _places(plan.singles)
            out[at] = ops.conv_update(given[at], states, plan.singles, weight, shift, silu)
        if plan.chunks is not None:
            ops.conv_chunks(given, states, plan.chunks, weight, shift, silu, out)
        return out

    def naive(row: int, count: int) -> Tensor:
        padded = F.pad(x[row, :count].double().T[None], (taps - 1, 0))
        moved = None if shift is None else shift.double()
        out = F.conv1d(padded, weight.double()[:, None], moved, groups=channels)[0].T
        return F.silu(out) if silu else out

    return worst(cut_run(cuts, step), naive)


def mamba2(ops: StateOps, cuts: Cuts, heads: int, groups: int, dim: int, width: int) -> float:
    """Selective state updates and chunk scans, with weak and strong decay."""
    torch.manual_seed(heads)
    length = _length(cuts)
    x, b, c = (torch.randn(3, length, *shape) for shape in ((heads, dim), (groups, width), (groups, width)))
    dt = F.softplus(torch.randn(3, length, heads) * 2)
    a, d = -torch.exp(torch.randn(heads) * 2), torch.randn(heads)
    states = strided(heads, dim, width)

    def step(plan: RowPlan, rows: Tensor, positions: Tensor) -> Tensor:
        given = [loose(tensor[rows, positions]) for tensor in (x, dt, b, c)]
        out = torch.empty(given[0].shape)
        if plan.singles is not None:
            at = _places(plan.singles)
            xs, dts, bs, cs = (tensor[at] for tensor in given)
            out[at] = ops.mamba2_update(xs, dts, a, bs, cs, d, states, plan.singles)
        if plan.chunks is not None:
            ops.mamba2_chunks(given[0], given[1], a, given[2], given[3], d, states, plan.chunks, out)
        return out

    def naive(row: int, count: int) -> Tensor:
        state, out = torch.zeros(heads, dim, width, dtype=torch.float64), []
        for t in range(count):
            xt, step_t = x[row, t].double(), dt[row, t].double()[:, None, None]
            bt, ct = (tensor[row, t].double().repeat_interleave(heads // groups, 0) for tensor in (b, c))
            state = torch.exp(step_t * a.double()[:, None, None]) * state + step_t * xt[:, :, None] * bt[:, None]
            out.append((state * ct[:, None]).sum(-1) + d.double()[:, None] * xt)
        return torch.stack(out)

    return worst(cut_run(cuts, step), naive)


def delta(ops: StateOps, cuts: Cuts, heads: int, key_heads: int, key_dim: int, value_dim: int) -> float:
    """Recurrent updates and chunks of the gated delta rule, with weak and strong decay."""
    torch.manual_seed(heads + key_dim)
    length = _length(cuts)
    q, k = (F.normalize(torch.randn(3, length, key_heads, key_dim), dim=-1) for _ in range(2))
    v = torch.randn(3, length, heads, value_dim)
    g, beta = -torch.exp(torch.randn(3, length, heads) * 2 - 2), torch.sigmoid(torch.randn(3, length, heads) * 2)
    states = strided(heads, key_dim, value_dim)

    def step(plan: RowPlan, rows: Tensor, positions: Tensor) -> Tensor:
        given = [loose(tensor[rows, positions]) for tensor in (q, k, v, g, beta)]
        out = torch.empty(given[2].shape)
        if plan.singles is not None:
            at = _places(plan.singles)
            qs, ks, vs, gs, betas = (tensor[at] for tensor in given)
            out[at] = ops.delta_update(qs, ks, vs, gs, betas, states, plan.singles)
        if plan.chunks is not None:
            qs, ks, vs, gs, betas = given
            ops.delta_chunks(qs, ks, vs, gs, betas, states, plan.chunks, out)
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

    return worst(cut_run(cuts, step), naive)
