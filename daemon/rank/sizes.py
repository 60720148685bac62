"""Sizes: from what each layer stores to the rank's own geometry, by the allocator's plan and sizing.

Owns the byte budget: given, or a share of the memory that is available now. Must never plan a layout of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import psutil

from allocator.decl import MHA, Full, Layer, Part
from allocator.errors import BudgetTooSmall
from allocator.plan import StoragePlan, plan_storage
from allocator.sizing import Sizing, size_arena
from daemon.rank.errors import RankError
from ipc.messages import RankSettings

PPM = 1_000_000


class KVShape(NamedTuple):
    """K and V of one layer on this rank, read from its real tensors; `dtype` is the allocator's name of it."""

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str


class Sized(NamedTuple):
    """The plan that views are built from, and the sizing that `Ready` carries."""

    plan: StoragePlan
    sizing: Sizing


def available_bytes() -> int:
    """Host memory that can be taken without swapping, now."""
    return int(psutil.virtual_memory().available)


def budget_bytes(settings: RankSettings, free_bytes: int) -> int:
    """The arena's byte budget: what the settings name, else their share of the free bytes."""
    if settings.arena_bytes:
        return settings.arena_bytes
    return free_bytes * settings.mem_fraction_ppm // PPM


def plan_and_size(shapes: Sequence[KVShape], settings: RankSettings, max_model_len: int, budget: int) -> Sized:
    """Plan full-attention layers of these shapes and size the arena; raises RankError with the table of terms."""
    layers = [
        Layer((Part(MHA(kv_heads=s.kv_heads, k_dim=s.k_dim, v_dim=s.v_dim, dtype=s.dtype), Full()),)) for s in shapes
    ]
    plan = plan_storage(layers, settings.page_size)
    try:
        sizing = size_arena(
            plan,
            budget,
            max_running_requests=settings.max_running_requests,
            max_model_len=max_model_len,
            max_batched_tokens=settings.max_batched_tokens,
        )
    except BudgetTooSmall as error:
        raise RankError(str(error)) from error
    return Sized(plan, sizing)
