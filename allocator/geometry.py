"""Geometry: the shape of every stage's arena, as agreed once per epoch and recorded in the journal.

Owns the plain data that the logical chain (all stages) and a physical chain (its own stage) are built from. Must never
hold anything that changes during an epoch. Invariants: every stage lists the same bands in the same chain order
(state, windows from the longest, full attention last); a stage without a band gives it zero unit bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

BandKind = Literal["state", "window", "full"]


class BandGeometry(msgspec.Struct, frozen=True):
    """One band on one stage.

    `name` is `full`, `window:TOKENS` or `state`; `unit_bytes` is a page's or a slot's bytes on this stage (0: the stage
    stores nothing of this kind); `window_tokens` is 0 except for windows.
    """

    name: str
    kind: BandKind
    unit_bytes: int
    window_tokens: int = 0


class StageGeometry(msgspec.Struct, frozen=True):
    """One pipeline stage: its arena and bands in chain order.

    `arena_bytes` is the smallest of its tensor ranks' arenas; bytes [0, `chain_start_bytes`) hold the sink and other
    fixed allocations, and the bands share the rest.
    """

    arena_bytes: int
    chain_start_bytes: int
    bands: list[BandGeometry]


class Geometry(msgspec.Struct, frozen=True):
    """All stages of an epoch.

    `page_size` in tokens. `virtual_pages` and `virtual_slots` bound the id spaces: page ids run from 1 to
    `virtual_pages` (0 is the sink), slot ids from 1 to `virtual_slots` (0 is the padding slot).
    """

    page_size: int
    virtual_pages: int
    virtual_slots: int
    stages: list[StageGeometry]
