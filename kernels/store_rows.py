"""Row store: the new K or V rows of a batch into their pages.

Owns one kernel. Must never write the sink: pages are checked where the batch is built. They are physical: every band's
are translated there, once per step, because the id tables on the device change under a running forward. Formula:
view[pages[t], slots[t]] = values[t]. Twin: `reference.store_rows`.
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(
    do_not_specialize=["v_token", "v_head"],
    do_not_specialize_on_alignment=["values_ptr", "pages_ptr", "slots_ptr"],
)
def _store(
    values_ptr, view_ptr, pages_ptr, slots_ptr, v_token, v_head, unit, slot_stride, head_stride, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: HEADS x DIM elements, BLOCK at a time."""
    token = tl.program_id(0)
    page = tl.load(pages_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    for first in range(0, HEADS * DIM, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        inside = lane < HEADS * DIM
        head = lane // DIM
        dim = lane % DIM
        value = tl.load(values_ptr + token.to(tl.int64) * v_token + head * v_head + dim, mask=inside)
        tl.store(view_ptr + page * unit + slot * slot_stride + head * head_stride + dim, value, mask=inside)


def store_rows(view: Tensor, values: Tensor, pages: Tensor, slots: Tensor) -> None:
    """`view` [units, page_size, kv_heads, d], `values` [T, kv_heads, d] ; `pages`, `slots` int32[T]."""
    tokens, heads, dim = values.shape
    block = min(triton.next_power_of_2(heads * dim), 1024)
    _store[(tokens,)](
        values, view, pages, slots, *values.stride()[:2], *view.stride()[:3], HEADS=heads, DIM=dim, BLOCK=block
    )
