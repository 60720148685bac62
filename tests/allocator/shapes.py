"""Small geometries for tests: what only needs the logical chain imports nothing else."""

from __future__ import annotations

import numpy as np

from allocator.columns import Int32s
from allocator.geometry import BandGeometry, Geometry, StageGeometry


def full_geometry(units: int, unit_bytes: int = 256, virtual_pages: int = 0, tail_bytes: int = 0) -> Geometry:
    """One full-attention band of `units` pages behind its sink, with some bytes at the top that hold no page."""
    arena = (units + 1) * unit_bytes + tail_bytes
    band = BandGeometry("full", "full", unit_bytes)
    return Geometry(16, virtual_pages or units, 0, [StageGeometry(arena, unit_bytes, [band])])


def stage_of(arena_bytes: int, start_bytes: int, unit_bytes: tuple[int, ...]) -> StageGeometry:
    """A stage of several bands: state first, windows, full attention last, as many as there are sizes."""
    rising = len(unit_bytes) - 1
    names = [*("state", "window:64", "window:32")[:rising], "full"]
    kinds = [*("state", "window", "window")[:rising], "full"]
    bands = [
        BandGeometry(name, kind, size, int(name.partition(":")[2] or 0))  # type: ignore[arg-type]
        for name, kind, size in zip(names, kinds, unit_bytes, strict=True)
    ]
    return StageGeometry(arena_bytes, start_bytes, bands)


def hybrid_geometry(*stages: StageGeometry, pages: int = 100, slots: int = 100) -> Geometry:
    """Several bands over one or more stages."""
    return Geometry(16, pages, slots, list(stages))


def ids(*values: int) -> Int32s:
    """An int32 column."""
    return np.array(values, dtype=np.int32)
