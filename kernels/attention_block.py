"""One block of paged attention: keys loaded through a page table, scored, and joined into a running softmax.

Owns what decode and extend attention share, and the block sizes that fit a head size. Must never store. A block's
formula, for queries at positions p and keys j of the block (and the window's rule only where there is a window):

    s_j = cap(scale * <q, k_j>) where j < end, j <= p and j > p - window, else -inf
    peak' = max(peak, max_j s_j),   total' = total e^(peak - peak') + sum_j e^(s_j - peak'),   acc' likewise with v_j
"""
# Triton kernels take what their launch passes: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def attend_keys(
    q,
    position,
    key,
    end,
    table_at,
    k_at,
    v_at,
    scale,
    window,
    softcap,
    peak,
    total,
    acc,
    K_UNIT: tl.constexpr,
    K_SLOT: tl.constexpr,
    V_UNIT: tl.constexpr,
    V_SLOT: tl.constexpr,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Join keys `key` [n] into (peak, total, acc) of queries q [m, K_BLOCK] at `position` [m]; returns the three.

    `table_at` points to where page 0 of the row would stand in its table; `k_at`, `v_at` to the head's plane.
    """
    k_lane = tl.arange(0, K_BLOCK)
    v_lane = tl.arange(0, V_BLOCK)
    alive = key < end
    page = tl.load(table_at + key // PAGE, mask=alive, other=0).to(tl.int64)
    slot = key % PAGE
    k_mask = alive[:, None] & (k_lane[None, :] < K_DIM)
    k = tl.load(k_at + (page * K_UNIT + slot * K_SLOT)[:, None] + k_lane[None, :], mask=k_mask, other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1): it ends at -1 and 1 where e^2x leaves float32.
        scores = softcap - 2.0 * softcap / (tl.exp(scores * (2.0 / softcap)) + 1.0)
    seen = alive[None, :] & (key[None, :] <= position[:, None])
    if WINDOWED:
        seen = seen & (key[None, :] > position[:, None] - window)
    scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    # A query may see no key of this block, nor of those before it: then its peak stays -inf.
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp(scores - shift[:, None])
    shrink = tl.exp(peak - shift)
    total = total * shrink + tl.sum(weights, 1)
    v_mask = alive[:, None] & (v_lane[None, :] < V_DIM)
    v = tl.load(v_at + (page * V_UNIT + slot * V_SLOT)[:, None] + v_lane[None, :], mask=v_mask, other=0.0)
    if UPCAST:
        v = v.to(tl.float32)
    # The products take the pages' own type: on a GPU that is what its matrix units multiply.
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, acc


def lanes(dim: int) -> int:
    """Elements of a head as the kernels hold them: a power of two that a matrix unit takes."""
    return max(16, triton.next_power_of_2(dim))


def blocks(k_view: Tensor, v_view: Tensor) -> tuple[int, int]:
    """Keys of a block and queries of a tile for such views: as many as registers hold without spilling.

    What the compiler makes of each is in the report of the ahead-of-time tests.
    """
    lane_bytes = max(lanes(k_view.shape[-1]), lanes(v_view.shape[-1])) * k_view.element_size()
    return (32, 32) if lane_bytes <= 256 else (16, 16)


def strides(plane: str, view: Tensor) -> dict[str, int]:
    """Elements from unit to unit, slot to slot and head to head of a view [units, page_size, kv_heads, d].

    Compile-time values: the compiler loads as many elements at once as they all divide, and they change with the
    model only.
    """
    names = (f"{plane}_UNIT", f"{plane}_SLOT", f"{plane}_HEAD")
    return dict(zip(names, view.stride()[:3], strict=True))


def rules(window: int, softcap: float, sinks: Tensor | None, upcast: bool) -> dict[str, object]:
    """The compile-time switches of a layer's rules."""
    return {"WINDOWED": window > 0, "CAPPED": softcap > 0, "SINKS": sinks is not None, "UPCAST": upcast}
