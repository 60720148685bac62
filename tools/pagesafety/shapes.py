"""Shapes of chains that programs run on: which bands, how many bytes a unit, how large an arena; drawn by seed.

Owns the table `SHAPES`. Must never make an arena so large that nothing is ever short: pressure is the point. Invariant:
the chain starts at or above the largest token unit (the sink), and on a multiple of the state unit with a whole slot
of it (the padding slot) between the two.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from allocator.geometry import BandGeometry, BandKind, Geometry, StageGeometry

STAGE_UNITS = {"state": (5, 7, 8, 12), "window": (2, 3, 4, 6), "full": (3, 4, 5, 8)}
"""Unit bytes that a band may be drawn with, at least two: contents must be told apart."""


class Shape(NamedTuple):
    """Bands in chain order (`state`, `window`, `full`), and per stage which of them it stores."""

    bands: tuple[BandKind, ...]
    stages: tuple[tuple[bool, ...], ...]
    about: str


SHAPES: dict[str, Shape] = {
    "full": Shape(("full",), ((True,),), "full attention only"),
    "full+window": Shape(("window", "full"), ((True, True),), "a window and full attention, two ends"),
    "full+state": Shape(("state", "full"), ((True, True),), "state and full attention, two ends"),
    "full+window+state": Shape(("state", "window", "full"), ((True,) * 3,), "a float between two ends"),
    "windows+state": Shape(("state", "window", "window", "full"), ((True,) * 4,), "two floats between two ends"),
    "stages": Shape(
        ("state", "window", "full"),
        ((True, True, True), (False, True, True)),
        "two stages with units of their own; the second stores no state",
    ),
    "gaps": Shape(
        ("state", "window", "full"),
        ((True, True, True), (True, True, False), (False, False, False)),
        "three stages: all bands, no owner, nothing at all",
    ),
    "windows3+state": Shape(("state", "window", "window", "window", "full"), ((True,) * 5,), "three floats"),
    "no-owner": Shape(("state", "window", "full"), ((True, True, False),), "windows and state; pages are only ids"),
}
FIVE = ("full", "full+window", "full+state", "full+window+state", "windows+state")


class Setting(NamedTuple):
    """What a seed draws besides its program: the geometry, and how crowded it is."""

    geometry: Geometry
    window_pages: tuple[int, ...]  # per band, the pages that a request keeps a window unit of; 0: no window
    host_slots: int


def draw_setting(shape: str, page_size: int, seed: int, scale_bytes: int = 1) -> Setting:
    """The geometry of a seed: unit bytes, arenas from a few units to some dozens, odd bytes at both ends.

    All bytes are multiples of `scale_bytes`.
    """
    row = SHAPES[shape]
    rng = random.Random(f"{shape}:{seed}")
    window_pages = _window_pages(row.bands, rng)
    scale = rng.choice((3, 6, 12, 20))
    stages = [_stage(row.bands, stored, window_pages, page_size, scale, rng) for stored in row.stages]
    if scale_bytes > 1:
        stages = [_scaled(stage, scale_bytes) for stage in stages]
    most = max(
        (stage.arena_bytes - stage.chain_start_bytes) // band.unit_bytes
        for stage in stages
        for band in stage.bands
        if band.unit_bytes and band.kind != "state"
    )
    pages = max(2, most if rng.random() < 0.7 else most // 2)
    slots = max(4, scale if rng.random() < 0.5 else 3 * scale) if "state" in row.bands else 0
    return Setting(Geometry(page_size, pages, slots, stages), window_pages, host_slots=256)


def _window_pages(bands: tuple[BandKind, ...], rng: random.Random) -> tuple[int, ...]:
    """Longest window first, as a chain has them."""
    windows = sorted((rng.randint(1, 4) for kind in bands if kind == "window"), reverse=True)
    left = iter([pages + len(windows) - 1 - place for place, pages in enumerate(windows)])  # no two alike
    return tuple(next(left) if kind == "window" else 0 for kind in bands)


def _scaled(stage: StageGeometry, by: int) -> StageGeometry:
    """The same stage with larger bytes."""
    bands = [BandGeometry(band.name, band.kind, band.unit_bytes * by, band.window_tokens) for band in stage.bands]
    return StageGeometry(stage.arena_bytes * by, stage.chain_start_bytes * by, bands)


def _stage(
    kinds: tuple[BandKind, ...],
    stored: tuple[bool, ...],
    window_pages: tuple[int, ...],
    page_size: int,
    scale: int,
    rng: random.Random,
) -> StageGeometry:
    bands = []
    for kind, has, pages in zip(kinds, stored, window_pages, strict=True):
        unit = rng.choice(STAGE_UNITS[kind]) if has else 0
        tokens = pages * page_size
        bands.append(BandGeometry(f"window:{tokens}" if pages else kind, kind, unit, tokens))
    sink = max((band.unit_bytes for band in bands if band.kind != "state"), default=1)
    slot = max((band.unit_bytes for band in bands if band.kind == "state"), default=0)
    start = (-(-sink // slot) + 1) * slot if slot else sink + rng.randint(0, 2)
    average = sum(band.unit_bytes for band in bands)
    return StageGeometry(start + scale * average + rng.randint(0, max(1, average)), start, bands)
