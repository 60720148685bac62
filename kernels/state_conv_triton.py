"""Causal depthwise convolution over rows whose last inputs are kept in slots, on a GPU.

Owns three kernels: `_update` for single tokens, `_convolve` for the outputs of chunks, `_keep` for the inputs that a
chunk leaves. Must never read a fresh row's slot. A program owns its channels: it reads a kept input before it writes
the place, so nothing else orders them; `_keep` runs behind `_convolve`, which reads what it overwrites. Formula and
twins: `state_conv`.
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.state_rows import Chunks, Singles

CHANNELS = 128  # of one program
TILE = 8  # tokens of one program


@triton.jit
def _update(
    x_ptr, states_ptr, slots_ptr, fresh_ptr, weight_ptr, bias_ptr, out_ptr, channels, x_row, slot_stride,
    channel_stride, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token of one row, BLOCK channels."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    kept_at = states_ptr + tl.load(slots_ptr + row).to(tl.int64) * slot_stride + channel * channel_stride
    stored = inside & (tl.load(fresh_ptr + row) == 0)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(kept_at + tap, mask=stored, other=0.0)
        total += value.to(tl.float32) * tl.load(weight_ptr + channel * TAPS + tap, mask=inside).to(tl.float32)
        if tap:
            tl.store(kept_at + (tap - 1), value, mask=inside)
    newest = tl.load(x_ptr + row.to(tl.int64) * x_row + channel, mask=inside)
    tl.store(kept_at + (TAPS - 2), newest, mask=inside)
    total += newest.to(tl.float32) * tl.load(weight_ptr + channel * TAPS + (TAPS - 1), mask=inside).to(tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=inside).to(tl.float32)
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(out_ptr + row.to(tl.int64) * channels + channel, total, mask=inside)


@triton.jit
def _convolve(
    x_ptr, states_ptr, slots_ptr, fresh_ptr, begins_ptr, sizes_ptr, weight_ptr, bias_ptr, out_ptr, channels, x_row,
    out_row, slot_stride, channel_stride, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one chunk, BLOCK channels; inputs before the chunk come from the slot."""
    row = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    size = tl.load(sizes_ptr + row)
    if tl.program_id(1) * TOKENS < size:
        channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        begin = tl.load(begins_ptr + row).to(tl.int64)
        kept_at = states_ptr + tl.load(slots_ptr + row).to(tl.int64) * slot_stride + channel[None, :] * channel_stride
        used = (token < size)[:, None] & (channel < channels)[None, :]
        stored = used & (tl.load(fresh_ptr + row) == 0)
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            source = (token + (tap - TAPS + 1))[:, None]
            new = tl.load(x_ptr + (begin + source) * x_row + channel[None, :], mask=used & (source >= 0), other=0.0).to(
                tl.float32
            )
            old = tl.load(kept_at + (source + TAPS - 1), mask=stored & (source < 0), other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + channel * TAPS + tap, mask=channel < channels).to(tl.float32)
            total += (new + old) * weight[None, :]
        if BIAS:
            total += tl.load(bias_ptr + channel, mask=channel < channels).to(tl.float32)[None, :]
        if SILU:
            total = total * tl.sigmoid(total)
        tl.store(out_ptr + (begin + token[:, None]) * out_row + channel[None, :], total, mask=used)


@triton.jit
def _keep(
    x_ptr, states_ptr, slots_ptr, fresh_ptr, begins_ptr, sizes_ptr, channels, x_row, slot_stride, channel_stride,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last TAPS - 1 inputs of one chunk row, BLOCK channels; a short chunk moves older ones down."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    size = tl.load(sizes_ptr + row)
    begin = tl.load(begins_ptr + row).to(tl.int64)
    kept_at = states_ptr + tl.load(slots_ptr + row).to(tl.int64) * slot_stride + channel * channel_stride
    stored = inside & (tl.load(fresh_ptr + row) == 0)
    for place in tl.static_range(TAPS - 1):
        source = size + (place - TAPS + 1)
        new = tl.load(x_ptr + (begin + source) * x_row + channel, mask=inside & (source >= 0), other=0.0)
        old = tl.load(kept_at + (source + TAPS - 1), mask=stored & (source < 0), other=0.0)
        tl.store(kept_at + place, tl.where(source >= 0, new, old), mask=inside)


def conv_update(x: Tensor, states: Tensor, rows: Singles, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """One token of each row: `x` [b, c], `states` [slots, c, K - 1], `weight` [c, K]; [b, c] like `x`."""
    x, weight = _dense(x), weight.contiguous()
    count, channels = x.shape
    out = torch.empty(count, channels, dtype=x.dtype, device=x.device)
    block = _block(channels)
    _update[(count, triton.cdiv(channels, block))](
        x, states, rows.slots, flags(rows.fresh, rows.slots), weight, weight if bias is None else bias, out, channels,
        x.stride(0), states.stride(0), states.stride(1), TAPS=weight.shape[1], BIAS=bias is not None, SILU=silu,
        BLOCK=block,
    )  # fmt: skip
    return out


def conv_chunks(
    x: Tensor, states: Tensor, rows: Chunks, weight: Tensor, bias: Tensor | None, silu: bool, out: Tensor
) -> None:
    """Whole chunks: `x` [T, c]; writes the chunk tokens of `out` [T, c] and the rows' `states` [slots, c, K - 1]."""
    x, weight = _dense(x), weight.contiguous()
    channels, count, block = x.shape[1], rows.slots.numel(), _block(x.shape[1])
    fresh, blocks = flags(rows.fresh, rows.slots), triton.cdiv(channels, block)
    _convolve[(count, triton.cdiv(rows.longest, TILE), blocks)](
        x, states, rows.slots, fresh, rows.begins, rows.sizes, weight, weight if bias is None else bias, out, channels,
        x.stride(0), out.stride(0), states.stride(0), states.stride(1), TAPS=weight.shape[1],
        BIAS=bias is not None, SILU=silu, TOKENS=TILE, BLOCK=block,
    )  # fmt: skip
    _keep[(count, blocks)](
        x, states, rows.slots, fresh, rows.begins, rows.sizes, channels, x.stride(0), states.stride(0),
        states.stride(1), TAPS=weight.shape[1], BLOCK=block,
    )  # fmt: skip


def flags(fresh: Tensor | None, slots: Tensor) -> Tensor:
    """`fresh` as uint8[rows]: plans on a GPU always have it, so that a kernel has one form."""
    return torch.zeros_like(slots, dtype=torch.uint8) if fresh is None else fresh.view(torch.uint8)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _block(channels: int) -> int:
    return min(triton.next_power_of_2(channels), CHANNELS)
