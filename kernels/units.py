"""Whole units of a uint8 arena: zero and copy, in 8-byte words with 64-bit addresses; and the table that names them.

Owns three kernels. Must never know what a unit holds. Unit u is bytes [u * unit_bytes, (u + 1) * unit_bytes);
unit_bytes is a multiple of 256, so every launch has the same specialization and none compiles after the first. The
pairs of a copy run in any order: no target is a source. Twins: `reference.zero_units`, `reference.copy_units`,
`reference.update_table`.
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 2048
BLOCK_PAIRS = 256


@triton.jit
def _zero(arena_ptr, units_ptr, unit_words, BLOCK: tl.constexpr):
    """One block of one unit."""
    unit = tl.load(units_ptr + tl.program_id(0)).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(arena_ptr + unit * unit_words + word, tl.zeros([BLOCK], tl.int64), mask=word < unit_words)


@triton.jit
def _copy(arena_ptr, sources_ptr, targets_ptr, unit_words, BLOCK: tl.constexpr):
    """One block of one pair of units."""
    pair = tl.program_id(0)
    source = tl.load(sources_ptr + pair).to(tl.int64)
    target = tl.load(targets_ptr + pair).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(arena_ptr + source * unit_words + word, mask=word < unit_words)
    tl.store(arena_ptr + target * unit_words + word, value, mask=word < unit_words)


@triton.jit(do_not_specialize=["count"])
def _update(table_ptr, virtual_ptr, physical_ptr, count, BLOCK: tl.constexpr):
    """One block of pairs: table[virtual] = physical."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < count
    virtual = tl.load(virtual_ptr + pair, mask=inside, other=0).to(tl.int64)
    physical = tl.load(physical_ptr + pair, mask=inside, other=0)
    tl.store(table_ptr + virtual, physical, mask=inside)


def _words(arena: Tensor) -> Tensor:
    return arena[: arena.numel() // 8 * 8].view(torch.int64)


def zero_units(arena: Tensor, units: Tensor, unit_bytes: int) -> None:
    """Zero whole units; `arena` uint8[bytes], `units` int32[n]."""
    words = unit_bytes // 8
    _zero[(units.numel(), triton.cdiv(words, BLOCK_WORDS))](_words(arena), units, words, BLOCK=BLOCK_WORDS)


def copy_units(arena: Tensor, sources: Tensor, targets: Tensor, unit_bytes: int) -> None:
    """Copy whole units pair by pair; `sources`, `targets` int32[n], disjoint; a source may repeat."""
    words = unit_bytes // 8
    grid = (sources.numel(), triton.cdiv(words, BLOCK_WORDS))
    _copy[grid](_words(arena), sources, targets, words, BLOCK=BLOCK_WORDS)


def update_table(table: Tensor, virtual: Tensor, physical: Tensor) -> None:
    """table[virtual] = physical; all int32[n], `virtual` distinct."""
    count = virtual.numel()
    _update[(triton.cdiv(count, BLOCK_PAIRS),)](table, virtual, physical, count, BLOCK=BLOCK_PAIRS)
