"""Sizes: from what each layer stores to the rank's own geometry, by the allocator's plan and sizing.

Owns the byte budget: given, or a share of the memory that is available now. Must never plan a layout of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import psutil

from allocator.decl import Layer
from allocator.errors import BudgetTooSmall, DeclarationError
from allocator.plan import StoragePlan, plan_storage
from allocator.sizing import Sizing, size_arena
from daemon.rank.errors import RankError
from ipc.messages import RankSettings

PPM = 1_000_000


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


def plan_and_size(
    layers: Sequence[Layer],
    settings: RankSettings,
    max_model_len: int,
    budget: int,
    local: Iterable[int] | None = None,
) -> Sized:
    """Plan what all `layers` of the model store and size the arena of the stage that holds the `local` ones (all).

    Raises RankError with the table of terms below the floor, and for layers or a page size that cannot be laid out.
    """
    try:
        plan = plan_storage(layers, settings.page_size, local)
        sizing = size_arena(
            plan,
            budget,
            max_running_requests=settings.max_running_requests,
            max_model_len=max_model_len,
            max_batched_tokens=settings.max_batched_tokens,
            slots_per_request=2 if settings.checkpoint_interval else 1,
        )
    except (BudgetTooSmall, DeclarationError) as error:
        raise RankError(str(error)) from error
    return Sized(plan, sizing)
