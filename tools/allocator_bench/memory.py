"""What the allocator's own books weigh beside the arena they keep, for storage plans of real models.

Owns the walk over a chain's columns and the list of plans. Must never count a column twice. Columns have their full
length from the start, some of them only from the first transfer: so one is begun, published and its units freed in
every band, and then the chains weigh what full ones do, but for what pends and for the open uses themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from allocator.decl import MHA, Full, Layer, Part, State, StateLife, StateTensor, Window
from allocator.geometry import Geometry
from allocator.logical.chain import LogicalChain
from allocator.ops import Op
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
    "30 full layers of 3 x 64 (135M)": _layers(Part(_SMALL, _FULL), 30),
    "32 full layers of 8 x 128 (8B)": _layers(Part(_ATTENTION, _FULL), 32),
    "8 full + 40 window layers of 8 x 256 (12B)": _layers(Part(_WIDE, _FULL), 8) + _layers(Part(_WIDE, _WINDOW), 40),
    "4 full of 8 x 128 + 24 Mamba-2 layers (8B)": _layers(Part(_ATTENTION, _FULL), 4)
    + _layers(Part(_MAMBA2, _STATE), 24),
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


def used_chains(geometry: Geometry) -> tuple[LogicalChain, PhysicalChain]:
    """Both chains after a transfer in every band that was published and whose units wait for its end."""
    logical, physical = LogicalChain(geometry), PhysicalChain(geometry, 0)
    taken = logical.take((1,) * len(logical.bands))
    steps: list[list[Op]] = [
        [taken.op, logical.hold(1, taken.ids)],
        [logical.publish(1, taken.ids)],
        [logical.free(taken.ids)],
    ]
    for seq, ops in enumerate(steps, start=1):
        physical.begin_step(seq, 0)
        physical.apply(ops)
        physical.end_step()
    return logical, physical


def memory_rows() -> Iterator[dict[str, Any]]:
    """Per plan and arena: bytes of both chains and their share of the arena."""
    for model, layers in MODELS.items():
        plan = plan_storage(layers, PAGE_SIZE)
        for gib in ARENA_GIB:
            sizing = size_arena(plan, gib * GIB, max_running_requests=16, max_model_len=8192, max_batched_tokens=2048)
            geometry = Geometry(PAGE_SIZE, sizing.virtual_pages, sizing.virtual_slots, [sizing.geometry])
            logical, physical = used_chains(geometry)
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
