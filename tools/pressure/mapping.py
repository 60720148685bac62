"""Mapping: the published table of cached tokens under pressure, as data, with the geometry it was measured in.

Owns the 48 conditions, what SGLang kept in each before and after its bounded joint reclaim (pull request 39294, one
paired diagnostic episode each on an RTX 5090), and the arenas. Must never run anything. All numbers but the unit bytes
are the published ones; those follow from the published arenas: Mellum's 398,196,736 bytes at cap 8192 are 64 pages of
1,835,008 and 51 window pages of 5,505,024; Inkling's 105,906,176 are 64, 51 and 128 state slots.

    an episode   flush - hot A - hot B - cold 1 .. cold n - the two hot prompts again, the oldest or the recent first
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from allocator.geometry import BandGeometry, Geometry
from tools.simulate.engine import one_stage

Order = Literal["oldest", "recent"]

PAGE_TOKENS = 128
CHUNK_TOKENS = 512
CHECKPOINT_TOKENS = 128
COLD_TOKENS = 512
OUTPUT_TOKENS = 32
CONTEXT_TOKENS = 4096
RUNNING_MAX = 4

# Nominal cap in tokens -> pages of full attention and window pages that the arena was sized for.
CAPS: dict[int, tuple[int, int]] = {4096: (32, 25), 8192: (64, 51), 16384: (128, 102)}


class Model(NamedTuple):
    """One model of the table: its bands in chain order, and the state slots its arena was sized for."""

    name: str
    bands: tuple[BandGeometry, ...]
    slots: int

    @property
    def kinds(self) -> str:
        """Its bands as people name them."""
        return "+".join(band.kind for band in reversed(self.bands))


MELLUM = Model(
    "Mellum",
    (BandGeometry("window:1024", "window", 5_505_024, 1024), BandGeometry("full", "full", 1_835_008)),
    slots=0,
)
INKLING = Model(
    "Inkling",
    (
        BandGeometry("state", "state", 147_456),
        BandGeometry("window:512", "window", 1_048_576, 512),
        BandGeometry("full", "full", 524_288),
    ),
    slots=128,
)


class Condition(NamedTuple):
    """One row: which model at which nominal cap, how long the hot prompts, how many cold ones, which comes back first.

    `before` and `after` are the published sums of cached prompt tokens of the two revisits.
    """

    model: Model
    cap_tokens: int
    hot_tokens: int
    cold: int
    order: Order
    before: int
    after: int

    @property
    def name(self) -> str:
        """Names the row, for `--only` and messages."""
        return f"{self.model.name}/{self.cap_tokens}/{self.hot_tokens}/{self.cold}/{self.order}"

    @property
    def possible(self) -> int:
        """What both revisits find if nothing of the hot prompts is lost: every whole page before the last token."""
        return 2 * ((self.hot_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS)


# model, cap, hot tokens, cold requests: before and after, oldest first; before and after, recent first
PUBLISHED: tuple[tuple[Model, int, int, int, tuple[int, int], tuple[int, int]], ...] = (
    (MELLUM, 8192, 1024, 7, (1792, 1792), (1792, 1792)),
    (MELLUM, 8192, 1024, 8, (1792, 1792), (1792, 1792)),
    (MELLUM, 8192, 1024, 9, (1024, 1024), (1408, 1408)),
    (MELLUM, 8192, 1024, 11, (0, 0), (512, 512)),
    (MELLUM, 4096, 1024, 1, (1792, 1792), (1792, 1792)),
    (MELLUM, 4096, 1024, 2, (1792, 1792), (1792, 1792)),
    (MELLUM, 4096, 1024, 3, (512, 1024), (512, 1408)),
    (MELLUM, 4096, 1024, 5, (0, 0), (512, 512)),
    (MELLUM, 16384, 1024, 21, (1792, 1792), (1792, 1792)),
    (MELLUM, 16384, 1024, 22, (1792, 1792), (1792, 1792)),
    (MELLUM, 16384, 1024, 23, (0, 1024), (896, 1408)),
    (MELLUM, 16384, 1024, 25, (0, 0), (0, 512)),
    (MELLUM, 8192, 2048, 3, (3840, 3840), (3840, 3840)),
    (MELLUM, 8192, 2048, 4, (3840, 3840), (3840, 3840)),
    (MELLUM, 8192, 2048, 5, (3072, 3072), (3456, 3456)),
    (MELLUM, 8192, 2048, 7, (512, 1024), (2432, 2432)),
    (INKLING, 8192, 1024, 10, (1024, 1024), (1024, 1024)),
    (INKLING, 8192, 1024, 11, (512, 1024), (512, 1024)),
    (INKLING, 8192, 1024, 12, (0, 1024), (0, 512)),
    (INKLING, 8192, 1024, 14, (0, 0), (0, 512)),
    (INKLING, 4096, 1024, 3, (1024, 1024), (1024, 1024)),
    (INKLING, 4096, 1024, 4, (512, 1024), (512, 1024)),
    (INKLING, 4096, 1024, 5, (0, 1024), (0, 1024)),
    (INKLING, 4096, 1024, 7, (0, 0), (0, 512)),
)

ORDERS: tuple[Order, ...] = ("oldest", "recent")
CONDITIONS: tuple[Condition, ...] = tuple(
    Condition(model, cap, hot, cold, order, *values)
    for model, cap, hot, cold, *both in PUBLISHED
    for order, values in zip(ORDERS, both, strict=True)
)


def arena_bytes(model: Model, cap_tokens: int) -> int:
    """Bytes of the arena at a nominal cap, the sink in them; raises KeyError for a cap that the table does not have."""
    pages, window_pages = CAPS[cap_tokens]
    counts = {"full": pages, "window": window_pages, "state": model.slots}
    return sum(counts[band.kind] * band.unit_bytes for band in model.bands)


def geometry(model: Model, cap_tokens: int) -> Geometry:
    """The arena of one condition; the sink comes out of its bytes."""
    return one_stage(list(model.bands), PAGE_TOKENS, arena_bytes(model, cap_tokens))
