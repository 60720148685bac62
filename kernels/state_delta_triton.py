"""Gated delta rule on a GPU: the recurrent update of single tokens, and chunks.

Owns two kernels. In both a program owns VALUES columns of one head's state, so nothing else orders reads and writes of
it; `_chunk` takes them through a chunk BLOCK tokens at a time, reading and writing the slot each time, which keeps its
registers few, and inverts each block's triangle by forward substitution. Must never read a fresh row's slot. Arithmetic
is float32, products of matrices by `PRECISION`. Formulas and twins: `state_delta`.
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.state_conv_triton import flags
from kernels.state_mamba2_triton import PRECISION
from kernels.state_rows import Chunks, Singles

BLOCK = 16
VALUES = 32  # columns of a head's state in one program
LANES = 16  # rows of it at a time in a chunk


@triton.jit
def _update(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, states_ptr, slots_ptr, fresh_ptr, out_ptr, k_row, v_row, v_head, slot_stride,
    heads, SIZE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):  # fmt: skip
    """One token of one row and value head, V_BLOCK columns of the state; SIZE value heads share a key."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    value = tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    lane = tl.arange(0, K_BLOCK)
    inside = (lane < K_DIM)[:, None] & (value < V_DIM)[None, :]
    wide_row = row.to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    state_at = states_ptr + slot * slot_stride + (head * K_DIM + lane)[:, None] * V_DIM + value[None, :]
    stored = inside & (tl.load(fresh_ptr + row) == 0)
    key_at = wide_row * k_row + head // SIZE * K_DIM + lane
    q = tl.load(q_ptr + key_at, mask=lane < K_DIM, other=0.0)
    k = tl.load(k_ptr + key_at, mask=lane < K_DIM, other=0.0)
    v = tl.load(v_ptr + wide_row * v_row + head * v_head + value, mask=value < V_DIM, other=0.0).to(tl.float32)
    state = tl.load(state_at, mask=stored, other=0.0) * tl.exp(tl.load(g_ptr + wide_row * heads + head))
    known = tl.sum(state * k[:, None], 0)
    correction = (v - known) * tl.load(beta_ptr + wide_row * heads + head)
    state += k[:, None] * correction[None, :]
    tl.store(state_at, state, mask=inside)
    out = tl.sum(state * q[:, None], 0)
    tl.store(out_ptr + (wide_row * heads + head) * V_DIM + value, out, mask=value < V_DIM)


@triton.jit
def _inverse(system, token, TOKENS: tl.constexpr):
    """(I + system)^-1 of a strictly lower triangular [TOKENS, TOKENS], row by row."""
    inverse = tl.where(token[:, None] == token[None, :], 1.0, 0.0)
    for line in range(1, TOKENS):
        chosen = token[:, None] == line
        factors = tl.sum(tl.where(chosen, system, 0.0), 0)
        solved = tl.sum(factors[:, None] * tl.where(token[:, None] < line, inverse, 0.0), 0)
        inverse = tl.where(chosen, inverse - solved[None, :], inverse)
    return inverse


@triton.jit
def _chunk(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, states_ptr, slots_ptr, fresh_ptr, begins_ptr, sizes_ptr, out_ptr, k_row,
    v_row, v_head, slot_stride, heads, SIZE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
 TOKENS: tl.constexpr, LANES: tl.constexpr, V_BLOCK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One chunk row and value head, V_BLOCK columns of the state: TOKENS tokens at a time, LANES rows at a time."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    value = tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    token = tl.arange(0, TOKENS)
    past = token[:, None] >= token[None, :]
    slot = tl.load(slots_ptr + row).to(tl.int64)
    state_at = states_ptr + slot * slot_stride + head * K_DIM * V_DIM + value[None, :]
    fresh = tl.load(fresh_ptr + row).to(tl.int32)
    begin = tl.load(begins_ptr + row).to(tl.int64)
    size = tl.load(sizes_ptr + row).to(tl.int32)
    for first in range(0, size, TOKENS):
        used = first + token < size
        at = begin + first + token
        values = used[:, None] & (value < V_DIM)[None, :]
        key_at = at[:, None] * k_row + head // SIZE * K_DIM
        v = tl.load(v_ptr + at[:, None] * v_row + head * v_head + value[None, :], mask=values, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + at * heads + head, mask=used, other=0.0)
        beta = tl.load(beta_ptr + at * heads + head, mask=used, other=0.0)
        log = tl.cumsum(g, 0)
        total = tl.sum(g, 0)
        decay = tl.exp(tl.where(past, log[:, None] - log[None, :], -float("inf")))
        system = tl.zeros([TOKENS, TOKENS], tl.float32)
        mixing = tl.zeros([TOKENS, TOKENS], tl.float32)
        known = tl.zeros([TOKENS, V_BLOCK], tl.float32)
        out = tl.zeros([TOKENS, V_BLOCK], tl.float32)
        for line in range(0, K_DIM, LANES):
            lane = line + tl.arange(0, LANES)
            keys = used[:, None] & (lane < K_DIM)[None, :]
            inside = (lane < K_DIM)[:, None] & (value < V_DIM)[None, :]
            k = tl.load(k_ptr + key_at + lane[None, :], mask=keys, other=0.0)
            q = tl.load(q_ptr + key_at + lane[None, :], mask=keys, other=0.0)
            stored = inside & ((first > 0) | (fresh == 0))
            state = tl.load(state_at + lane[:, None] * V_DIM, mask=stored, other=0.0)
            system = tl.dot(k, tl.trans(k), acc=system, input_precision=PRECISE)
            mixing = tl.dot(q, tl.trans(k), acc=mixing, input_precision=PRECISE)
            known = tl.dot(k, state, acc=known, input_precision=PRECISE)
            out = tl.dot(q, state, acc=out, input_precision=PRECISE)
        system = tl.where(token[:, None] > token[None, :], system * decay * beta[:, None], 0.0)
        inverse = _inverse(system, token, TOKENS)
        right = (v - known * tl.exp(log)[:, None]) * beta[:, None]
        written = tl.dot(inverse, right, input_precision=PRECISE)
        out = tl.dot(mixing * decay, written, acc=out * tl.exp(log)[:, None], input_precision=PRECISE)
        tl.store(out_ptr + (at[:, None] * heads + head) * V_DIM + value[None, :], out, mask=values)
        tl.debug_barrier()  # every thread has read the state before any writes it
        for line in range(0, K_DIM, LANES):
            lane = line + tl.arange(0, LANES)
            keys = used[:, None] & (lane < K_DIM)[None, :]
            inside = (lane < K_DIM)[:, None] & (value < V_DIM)[None, :]
            k = tl.load(k_ptr + key_at + lane[None, :], mask=keys, other=0.0)
            stored = inside & ((first > 0) | (fresh == 0))
            state = tl.load(state_at + lane[:, None] * V_DIM, mask=stored, other=0.0) * tl.exp(total)
            ended = tl.trans(k * tl.exp(total - log)[:, None])
            state = tl.dot(ended, written, acc=state, input_precision=PRECISE)
            tl.store(state_at + lane[:, None] * V_DIM, state, mask=inside)
        tl.debug_barrier()  # the next tokens read the state that other threads of this program wrote


def delta_update(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, rows: Singles) -> Tensor:
    """One token of each row: `q`, `k` float32[n, hk, K], `v` [n, hv, V], `g`, `beta` float32[n, hv], `states`
    float32[slots, hv, K, V]; float32[n, hv, V]."""
    count, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    q, k, g, beta = (tensor.contiguous() for tensor in (q, k, g, beta))
    v = v if v.stride(-1) == 1 else v.contiguous()
    out = torch.empty(count, heads, value_dim, dtype=torch.float32, device=v.device)
    block = min(triton.next_power_of_2(value_dim), VALUES)
    _update[(count, heads, triton.cdiv(value_dim, block))](
        q, k, v, g, beta, states, rows.slots, flags(rows.fresh, rows.slots), out, k.stride(0), *v.stride()[:2],
        states.stride(0), heads, SIZE=heads // key_heads, K_DIM=key_dim, V_DIM=value_dim,
        K_BLOCK=triton.next_power_of_2(key_dim), V_BLOCK=block,
    )  # fmt: skip
    return out


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, rows: Chunks, out: Tensor
) -> None:
    """Whole chunks: `q`, `k` float32[T, hk, K], `v` [T, hv, V], `g`, `beta` float32[T, hv]; writes the chunk tokens of
    `out` float32[T, hv, V], which is dense, and the rows' `states`."""
    heads, value_dim = v.shape[1:]
    key_heads, key_dim = k.shape[1:]
    q, k, g, beta = (tensor.contiguous() for tensor in (q, k, g, beta))
    v = v if v.stride(-1) == 1 else v.contiguous()
    block = min(max(triton.next_power_of_2(value_dim), 16), VALUES)
    _chunk[(rows.slots.numel(), heads, triton.cdiv(value_dim, block))](
        q, k, v, g, beta, states, rows.slots, flags(rows.fresh, rows.slots), rows.begins, rows.sizes, out, k.stride(0),
        *v.stride()[:2], states.stride(0), heads, SIZE=heads // key_heads, K_DIM=key_dim, V_DIM=value_dim,
        TOKENS=BLOCK, LANES=LANES, V_BLOCK=block,
        PRECISE=PRECISION,
    )  # fmt: skip
