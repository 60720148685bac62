"""Sampling: temperature, min-p, top-k, top-p and counter-based Gumbel noise, one program per row, one launch.

Owns the rules and the noise as a kernel: the noise is integer arithmetic until the last step, so it is the twin's bit
for bit up to the logarithm. Must never let a row's result depend on another row, nor need a value on the host. With
x = logits / T (T > 0) and m its maximum, a row keeps the x_t at or above all of

    min-p    m + log(min_p)
    top-k    the k-th largest of those kept so far
    top-p    the largest bound b whose kept mass sum(e^(x_t - m), x_t >= b) is at least p of what is kept so far

and takes argmax_t x_t - log(-log(u_t)) of them, u_t from hash(hash(t + a) ^ b) of the row's key (a, b); at T = 0 the
plain argmax. Both bounds are found by bisection over the order of float32, so equal values are kept or dropped
together. Twins: `reference.sample`, `reference.keep_best` and `reference.gumbel`.
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import UNIFORM_STEP

BLOCK_MAX = 2048
LOWEST = -(1 << 31)


@triton.jit
def _hash32(x):
    """The bijection of `reference.hash32` on uint32."""
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _rank(x):
    """int64 that is ordered as float32 is; -0.0 is 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _scaled(row_at, token, vocab, divisor):
    """x of these tokens; -inf behind the vocabulary."""
    return tl.load(row_at + token, mask=token < vocab, other=-float("inf")).to(tl.float32) / divisor


@triton.jit
def _kept(row_at, vocab, divisor, best, bound, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How many x are at or above a bound, or the mass of them."""
    found = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = _scaled(row_at, token, vocab, divisor)
        inside = (_rank(x) >= bound) & (token < vocab)
        if COUNT:
            found += inside.to(tl.float32)
        else:
            found += tl.where(inside, tl.exp(x - best), 0.0)
    return tl.sum(found, 0)


@triton.jit
def _raise(row_at, vocab, divisor, best, low, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest bound from `low` up to the maximum that keeps `wanted`, or `low`."""
    high = _rank(best)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = _kept(row_at, vocab, divisor, best, middle, COUNT, BLOCK) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _bound(row_at, vocab, divisor, min_p, top_k, top_p, BLOCK: tl.constexpr):
    """The rank of the lowest x that a row keeps."""
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        most = tl.maximum(most, _scaled(row_at, first + tl.arange(0, BLOCK), vocab, divisor))
    best = tl.max(most, 0)
    low = _rank(tl.full([], -float("inf"), tl.float32))
    if min_p > 0:
        low = _rank(best + tl.log(min_p))
    if (top_k > 0) & (top_k < vocab):
        low = _raise(row_at, vocab, divisor, best, low, top_k.to(tl.float32), True, BLOCK)
    if top_p < 1:
        mass = _kept(row_at, vocab, divisor, best, low, False, BLOCK)
        low = _raise(row_at, vocab, divisor, best, low, top_p * mass, False, BLOCK)
    return low


@triton.jit
def _sample(
    logits_ptr,
    keys_ptr,
    temperatures_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    out_ptr,
    logits_row,
    vocab,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMITED: tl.constexpr,
    LOWEST: tl.constexpr,
):
    """One row: the best score of what it keeps and the first id that has it, block by block."""
    row = tl.program_id(0)
    row_at = logits_ptr + row.to(tl.int64) * logits_row
    temperature = tl.load(temperatures_ptr + row)
    drawn = temperature > 0
    divisor = tl.where(drawn, temperature, 1.0)
    a = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
    b = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
    low = tl.full([], LOWEST, tl.int64)
    if LIMITED:
        min_p, top_k, top_p = tl.load(min_p_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        if drawn & ((min_p > 0) | ((top_k > 0) & (top_k < vocab)) | (top_p < 1)):
            low = _bound(row_at, vocab, divisor, min_p, top_k, top_p, BLOCK)
    best = tl.full([], -float("inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = _scaled(row_at, token, vocab, divisor)
        bits = _hash32(_hash32(token.to(tl.uint32) + a) ^ b) >> 8
        uniform = (bits.to(tl.int32).to(tl.float32) + 0.5) * STEP
        score = x + tl.where(drawn, -tl.log(-tl.log(uniform)), 0.0)
        score = tl.where(_rank(x) >= low, score, -float("inf"))
        top = tl.max(score, 0)
        top_id = first + tl.argmax(score, 0)
        best_id = tl.where(top > best, top_id, best_id)
        best = tl.maximum(best, top)
    tl.store(out_ptr + row, best_id.to(tl.int64))


def sample(
    logits: Tensor,
    keys: Tensor,
    temperatures: Tensor,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """int64[n] tokens; `logits` [n, vocab], `keys` int32[n, 2], `temperatures`, `min_p`, `top_p` float32[n], `top_k`
    int32[n]: all three limits or none."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    limits = (min_p, top_k, top_p)
    limited = all(column is not None for column in limits)
    assert limited or limits == (None, None, None), "all three limits or none"
    block = min(triton.next_power_of_2(vocab), BLOCK_MAX)
    columns = limits if limited else (temperatures, keys, temperatures)
    switches = {"STEP": UNIFORM_STEP, "BLOCK": block, "LIMITED": limited, "LOWEST": LOWEST}
    _sample[(rows,)](logits, keys, temperatures, *columns, out, logits.stride(0), vocab, **switches)
    return out
