"""Sampling: argmax of scaled logits plus counter-based Gumbel noise, one program per row.

Owns the noise as a kernel: integer arithmetic only until the last step, so it is the twin's noise bit for bit up to the
logarithm. Must never let a row's result depend on another row. Formula: argmax_t logits[t] / T - log(-log(u_t)), u_t
from hash(hash(t + a) ^ b) of the row's key (a, b); plain argmax where T is 0. Twins: `reference.sample` and
`reference.gumbel`.
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import UNIFORM_STEP

BLOCK = 1024


@triton.jit
def _hash32(x):
    """The bijection of `reference.hash32` on uint32."""
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _sample(
    logits_ptr, temperatures_ptr, keys_ptr, out_ptr, logits_row, vocab, STEP: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: the best score and the first id that has it, block by block."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + row)
    drawn = temperature > 0
    divisor = tl.where(drawn, temperature, 1.0)
    a = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
    b = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
    best = tl.full([], -float("inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + row.to(tl.int64) * logits_row + token, mask=token < vocab, other=-float("inf")).to(
            tl.float32
        )
        bits = _hash32(_hash32(token.to(tl.uint32) + a) ^ b) >> 8
        uniform = (bits.to(tl.int32).to(tl.float32) + 0.5) * STEP
        score = logit / divisor + tl.where(drawn, -tl.log(-tl.log(uniform)), 0.0)
        top = tl.max(score, 0)
        top_id = first + tl.argmax(score, 0)
        best_id = tl.where(top > best, top_id, best_id)
        best = tl.maximum(best, top)
    tl.store(out_ptr + row, best_id.to(tl.int64))


def sample(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """int64[n] tokens; `logits` [n, vocab], `temperatures` float32[n], `keys` int32[n, 2]."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _sample[(rows,)](logits, temperatures, keys, out, logits.stride(0), vocab, STEP=UNIFORM_STEP, BLOCK=BLOCK)
    return out
