"""Mamba-2 on a GPU: the selective state update of single tokens, and the scan of chunks.

Owns two kernels. In both a program owns DIMS rows of one head's state, so nothing else orders reads and writes of it;
`_scan` takes them through a chunk BLOCK tokens at a time, reading and writing the slot each time, which keeps its
registers few. Must never read a fresh row's slot. Arithmetic is float32, products of matrices by `PRECISION`. Formulas
and twins: `state_mamba2`.
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.state_conv_triton import flags
from kernels.state_rows import Chunks, Singles

BLOCK = 32
DIMS = 32  # rows of a head's state in one program
LANES = 32  # columns of it at a time
PRECISION = "ieee"  # float32 as it is; "tf32x3" needs over 224 registers, "tf32" keeps 10 bits of a state


@triton.jit
def _update(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, states_ptr, slots_ptr, fresh_ptr, out_ptr, x_row, x_head, dt_row,
    b_row, b_group, c_row, c_group, slot_stride, heads, SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
 DIM_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """One token of one row and head, DIM_BLOCK rows of the state; SIZE heads share B and C."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    group = head // SIZE
    dim = tl.program_id(2) * DIM_BLOCK + tl.arange(0, DIM_BLOCK)
    lane = tl.arange(0, WIDTH_BLOCK)
    inside = (dim < DIM)[:, None] & (lane < WIDTH)[None, :]
    wide_row = row.to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    state_at = states_ptr + slot * slot_stride + (head * DIM + dim)[:, None] * WIDTH + lane[None, :]
    stored = inside & (tl.load(fresh_ptr + row) == 0)
    state = tl.load(state_at, mask=stored, other=0.0)
    dt = tl.load(dt_ptr + wide_row * dt_row + head)
    x = tl.load(x_ptr + wide_row * x_row + head * x_head + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + wide_row * b_row + group * b_group + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + wide_row * c_row + group * c_group + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    state = state * tl.exp(dt * tl.load(a_ptr + head).to(tl.float32)) + (dt * x)[:, None] * b[None, :]
    tl.store(state_at, state, mask=inside)
    y = tl.sum(state * c[None, :], 1) + tl.load(d_ptr + head).to(tl.float32) * x
    tl.store(out_ptr + (wide_row * heads + head) * DIM + dim, y, mask=dim < DIM)


@triton.jit
def _scan(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, states_ptr, slots_ptr, fresh_ptr, begins_ptr, sizes_ptr, out_ptr,
    x_row, x_head, dt_row, b_row, b_group, c_row, c_group, slot_stride, heads, SIZE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, DIM_BLOCK: tl.constexpr, LANES: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """One chunk row and head, DIM_BLOCK rows of the state: TOKENS tokens at a time, LANES columns at a time."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    group = head // SIZE
    dim = tl.program_id(2) * DIM_BLOCK + tl.arange(0, DIM_BLOCK)
    token = tl.arange(0, TOKENS)
    past = token[:, None] >= token[None, :]
    slot = tl.load(slots_ptr + row).to(tl.int64)
    state_at = states_ptr + slot * slot_stride + (head * DIM + dim)[:, None] * WIDTH
    fresh = tl.load(fresh_ptr + row).to(tl.int32)
    begin = tl.load(begins_ptr + row).to(tl.int64)
    size = tl.load(sizes_ptr + row).to(tl.int32)
    a = tl.load(a_ptr + head).to(tl.float32)
    d = tl.load(d_ptr + head).to(tl.float32)
    for first in range(0, size, TOKENS):
        used = first + token < size
        at = begin + first + token
        outs = used[:, None] & (dim < DIM)[None, :]
        dt = tl.load(dt_ptr + at * dt_row + head, mask=used, other=0.0)
        x = tl.load(x_ptr + at[:, None] * x_row + head * x_head + dim[None, :], mask=outs, other=0.0).to(tl.float32)
        log = tl.cumsum(dt * a, 0)
        total = tl.sum(dt * a, 0)
        added = tl.trans(x * (dt * tl.exp(total - log))[:, None])
        weights = tl.zeros([TOKENS, TOKENS], tl.float32)
        y = tl.zeros([TOKENS, DIM_BLOCK], tl.float32)
        for column in range(0, WIDTH, LANES):
            lane = column + tl.arange(0, LANES)
            lanes = used[:, None] & (lane < WIDTH)[None, :]
            b_at, c_at = b_ptr + group * b_group + lane[None, :], c_ptr + group * c_group + lane[None, :]
            b = tl.load(b_at + at[:, None] * b_row, mask=lanes, other=0.0).to(tl.float32)
            c = tl.load(c_at + at[:, None] * c_row, mask=lanes, other=0.0).to(tl.float32)
            inside = (dim < DIM)[:, None] & (lane < WIDTH)[None, :]
            state = tl.load(state_at + lane[None, :], mask=inside & ((first > 0) | (fresh == 0)), other=0.0)
            weights = tl.dot(c, tl.trans(b), acc=weights, input_precision=PRECISE)
            y = tl.dot(c, tl.trans(state), acc=y, input_precision=PRECISE)
            state = tl.dot(added, b, acc=state * tl.exp(total), input_precision=PRECISE)
            tl.store(state_at + lane[None, :], state, mask=inside)
        weights *= tl.exp(tl.where(past, log[:, None] - log[None, :], -float("inf"))) * dt[None, :]
        y = tl.dot(weights, x, acc=y * tl.exp(log)[:, None], input_precision=PRECISE) + d * x
        tl.store(out_ptr + (at[:, None] * heads + head) * DIM + dim[None, :], y, mask=outs)
        tl.debug_barrier()  # the next tokens read the state that other threads of this program wrote


def mamba2_update(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, rows: Singles
) -> Tensor:
    """One token of each row: `x` [n, h, p], `dt` float32[n, h] (> 0), `a`, `d` [h], `b`, `c` [n, g, s], `states`
    float32[slots, h, p, s]; float32[n, h, p]."""
    count, heads, dim = x.shape
    out = torch.empty(count, heads, dim, dtype=torch.float32, device=x.device)
    blocks = min(triton.next_power_of_2(dim), DIMS)
    x, b, c = (_dense(tensor) for tensor in (x, b, c))
    _update[(count, heads, triton.cdiv(dim, blocks))](
        x, dt, a, b, c, d, states, rows.slots, flags(rows.fresh, rows.slots), out, *x.stride()[:2], dt.stride(0),
        *b.stride()[:2], *c.stride()[:2], states.stride(0), heads, SIZE=heads // b.shape[1], DIM=dim,
        WIDTH=b.shape[2], DIM_BLOCK=blocks,
        WIDTH_BLOCK=triton.next_power_of_2(b.shape[2]),
    )  # fmt: skip
    return out


def mamba2_chunks(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, rows: Chunks, out: Tensor
) -> None:
    """Whole chunks: `x` [T, h, p], `dt` float32[T, h], `b`, `c` [T, g, s]; writes the chunk tokens of `out`
    float32[T, h, p], which is dense, and the rows' `states`."""
    heads, dim = x.shape[1:]
    blocks = min(max(triton.next_power_of_2(dim), 16), DIMS)
    x, b, c = (_dense(tensor) for tensor in (x, b, c))
    _scan[(rows.slots.numel(), heads, triton.cdiv(dim, blocks))](
        x, dt, a, b, c, d, states, rows.slots, flags(rows.fresh, rows.slots), rows.begins, rows.sizes, out,
        *x.stride()[:2], dt.stride(0), *b.stride()[:2], *c.stride()[:2], states.stride(0), heads,
        SIZE=heads // b.shape[1], DIM=dim, WIDTH=b.shape[2], TOKENS=BLOCK,
        DIM_BLOCK=blocks, LANES=LANES, PRECISE=PRECISION,
    )  # fmt: skip


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
