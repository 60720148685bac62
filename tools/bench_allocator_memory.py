"""What the allocator's own books weigh beside the arena they keep, for storage plans of real models.

Owns the walk over a chain's columns and the list of plans. Must never count a column twice. The columns are made at
their full length when a chain is made, so an unused chain weighs what a full one does, but for what pends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from allocator.decl import MHA, Full, Layer, Part, State, StateLife, StateTensor, Window
from allocator.geometry import Geometry
from allocator.logical.chain import LogicalChain
from allocator.physical.chain import PhysicalChain
from allocator.plan import plan_storage
from allocator.sizing import size_arena

PAGE_SIZE = 16
GIB = 1 << 30
ARENA_GIB = (4, 64)

_ATTENTION = MHA(8, 128, 128, "bfloat16")
_WIDE = MHA(8, 256, 256, "bfloat16")
_SMALL = MHA(3, 64, 64, "bfloat16")
_MAMBA2 = State((StateTensor("conv", (10240, 3), "bfloat16"), StateTensor("ssm", (128, 64, 128), "float32")))
_FULL, _WINDOW, _STATE = Full(), Window(1024), StateLife(256)


def _layers(part: Part, times: int) -> list[Layer]:
    return [Layer((part,))] * times


MODELS: dict[str, list[Layer]] = {
    "30 layers of 3 heads of 64 (135M)": _layers(Part(_SMALL, _FULL), 30),
    "32 layers of 8 heads of 128 (8B)": _layers(Part(_ATTENTION, _FULL), 32),
    "8 full + 40 window layers of 8 heads of 256 (12B)": _layers(Part(_WIDE, _FULL), 8)
    + _layers(Part(_WIDE, _WINDOW), 40),
    "4 attention + 24 Mamba-2 layers (8B)": _layers(Part(_ATTENTION, _FULL), 4) + _layers(Part(_MAMBA2, _STATE), 24),
    "4 full + 12 window + 16 Mamba-2 layers": _layers(Part(_ATTENTION, _FULL), 4)
    + _layers(Part(_ATTENTION, _WINDOW), 12)
    + _layers(Part(_MAMBA2, _STATE), 16),
}


def weigh(root: object) -> tuple[int, int]:
    """Bytes of numpy columns, and of all other objects of ours, reachable from `root`; each object once."""
    seen: set[int] = set()
    columns = others = 0
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            if item.base is not None:
                waiting.append(item.base)
            else:
                columns += item.nbytes
            continue
        others += sys.getsizeof(item)
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, str | bytes | int | float):
            continue
        elif hasattr(item, "__iter__"):
            waiting += list(item)
        names = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        waiting += [getattr(item, name) for name in names if isinstance(name, str) and hasattr(item, name)]
        waiting += list(getattr(item, "__dict__", {}).values())
    return columns, others


def memory_rows() -> Iterator[dict[str, Any]]:
    """Per plan and arena: bytes of both chains and their share of the arena."""
    for model, layers in MODELS.items():
        plan = plan_storage(layers, PAGE_SIZE)
        for gib in ARENA_GIB:
            sizing = size_arena(plan, gib * GIB, max_running_requests=16, max_model_len=8192, max_batched_tokens=2048)
            geometry = Geometry(PAGE_SIZE, sizing.virtual_pages, sizing.virtual_slots, [sizing.geometry])
            logical, physical = LogicalChain(geometry), PhysicalChain(geometry, 0)
            sides = {"logical": weigh(logical), "physical": weigh(physical), "both": weigh((logical, physical))}
            arena = sizing.geometry.arena_bytes
            for side, (columns, others) in sides.items():
                yield {
                    "side": side,
                    "op": "memory",
                    "model": model,
                    "arena_gib": gib,
                    "page_size": PAGE_SIZE,
                    "virtual_pages": geometry.virtual_pages,
                    "columns_bytes": columns,
                    "other_bytes": others,
                    "share_percent": round(100 * (columns + others) / arena, 5),
                }
