"""What is possible at all on a tiny arena, by looking at every way to cut it: the yardstick of the explorer.

Owns the brute force over cuts. Must never use the allocator's closed form or its layout search: it is what they are
compared with. A cut gives band k the bytes [c_k, c_{k+1}); its usable units are those that lie wholly inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import NamedTuple

from allocator.geometry import StageGeometry

Pin = tuple[int, int] | None
"""Bytes [low, high) that must lie inside a band's piece."""


class ExactStage:
    """Every layout of one stage. Bands are indexes in chain order; those without unit bytes take no part."""

    def __init__(self, stage: StageGeometry) -> None:
        self.start, self.end = stage.chain_start_bytes, stage.arena_bytes
        self.units = tuple(band.unit_bytes for band in stage.bands)
        self.stored = tuple(index for index, size in enumerate(self.units) if size)
        self._fits = lru_cache(maxsize=None)(self._fits_anew)
        self._least = lru_cache(maxsize=1 << 16)(self._least_anew)

    def fits(self, counts: Sequence[int], pins: Sequence[Pin]) -> bool:
        """Whether some cut gives every band room for its count and covers its pinned bytes."""
        return self._fits(*self._stored_only(counts, pins))

    def least_bytes(self, counts: Sequence[int], pins: Sequence[Pin], live: Sequence[int]) -> int | None:
        """The fewest bytes of live units that must move to make room for `counts`; None when nothing makes room.

        `live` is, per band, a bit mask of the physical units that are bound.
        """
        return self._least(*self._stored_only(counts, pins), tuple(live[band] for band in self.stored))

    def _stored_only(self, counts: Sequence[int], pins: Sequence[Pin]) -> tuple[tuple[int, ...], tuple[Pin, ...]]:
        return tuple(counts[band] for band in self.stored), tuple(pins[band] for band in self.stored)

    def _pieces(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """For every cut, the whole units [first, last) inside each stored band's piece."""
        bands = len(self.stored)
        for cuts in combinations_with_replacement(range(self.start, self.end + 1), bands - 1):
            edges = (self.start, *cuts, self.end)
            yield tuple(
                (
                    -(-edges[k] // self.units[band]),
                    max(-(-edges[k] // self.units[band]), edges[k + 1] // self.units[band]),
                )
                for k, band in enumerate(self.stored)
            )

    def _allowed(self, counts: tuple[int, ...], pins: tuple[Pin, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
        for pieces in self._pieces():
            for (first, last), count, pin, band in zip(pieces, counts, pins, self.stored, strict=True):
                if last - first < count:
                    break
                if pin is not None and not first * self.units[band] <= pin[0] <= pin[1] <= last * self.units[band]:
                    break
            else:
                yield pieces

    def _fits_anew(self, counts: tuple[int, ...], pins: tuple[Pin, ...]) -> bool:
        return any(True for _ in self._allowed(counts, pins))

    def _least_anew(self, counts: tuple[int, ...], pins: tuple[Pin, ...], live: tuple[int, ...]) -> int | None:
        best: int | None = None
        for pieces in self._allowed(counts, pins):
            moved = 0
            for (first, last), units, band in zip(pieces, live, self.stored, strict=True):
                inside = (units >> first) & ((1 << (last - first)) - 1)
                moved += (units.bit_count() - inside.bit_count()) * self.units[band]
            if best is None or moved < best:
                best = moved
                if best == 0:
                    break
        return best


class Shape(NamedTuple):
    """A named tiny geometry: unit bytes per band and stage, in chain order."""

    name: str
    kinds: tuple[str, ...]
    stages: tuple[tuple[int, ...], ...]
