"""Tree shape: what never changes of a prefix tree, and the constants that its parts agree on.

Owns pages, bands, the reach of windows and the bytes of units. Must never hold anything that changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from allocator.geometry import BandGeometry

TOKEN_BYTES = 8
WORTHS = 8  # powers of two of tokens saved per byte that are told apart


class TreeShape:
    """What never changes: `bands` in chain order, the owner last, and the bytes of a unit of each on all stages.

    `leads` has, per window band, the pages before a match end that the next token reads, rounded up.
    """

    def __init__(self, page_size: int, bands: Sequence[BandGeometry], unit_bytes: Sequence[int] | None = None) -> None:
        if page_size < 1 or not bands or bands[-1].kind != "full":
            raise ValueError(f"a tree needs pages of at least one token, not {page_size}, and an owner band at the end")
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.bands = tuple(bands)
        self.count = len(bands)
        self.owner = len(bands) - 1
        self.state = next((index for index, band in enumerate(bands) if band.kind == "state"), -1)
        self.windows = tuple((b, band.window_tokens) for b, band in enumerate(bands) if band.kind == "window")
        self.leads = tuple((band, -(-(window - 1) // page_size)) for band, window in self.windows)
        self.unit_bytes = tuple(unit_bytes) if unit_bytes is not None else tuple(band.unit_bytes for band in bands)

    def window_first(self, position: int) -> tuple[int, ...]:
        """Per band, the first page whose window unit a token at `position` reads; 0 where a band is no window."""
        first = [0] * self.count
        for band, window in self.windows:
            first[band] = max(0, position - window + 1) // self.page_size
        return tuple(first)

    def bytes_of(self, units: Sequence[int]) -> int:
        """Bytes of so many units per band."""
        return sum(count * size for count, size in zip(units, self.unit_bytes, strict=True))
