"""Capacity: the closed form that says whether counts of units fit a stage, jointly over its bands.

Owns the left-to-right walk and the refusal it leads to. Must never look at positions: only counts and geometry decide.
Invariant (exactness): counts fit a stage exactly when contiguous spans of the bands, in chain order, each starting at
a multiple of its unit, can be placed between the chain's start and the arena's end. Bands without units are
transparent. Spans that must cover a fixed unit (a quarantined transfer) are not part of this form yet: nothing in this
version can fix a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allocator.geometry import BandGeometry, Geometry, StageGeometry

Demand = tuple[int, ...]
"""Units wanted of each band, in chain order."""

ID_SPACE = -1
"""The `stage` of a refusal when the ids, not the bytes of a stage, run out."""


@dataclass(frozen=True, slots=True)
class CapacityRefusal:
    """Why a demand does not fit.

    `units_short` units of `band` must be freed first if nothing else is; `never`: not even an empty arena holds the
    demand. `stage` is the first stage on which it fails, `ID_SPACE` when the ids run out. `live` and `wanted` are the
    counts of all bands at the question.
    """

    never: bool
    stage: int
    band: int
    band_name: str
    units_short: int
    wanted: Demand
    live: tuple[int, ...]

    def text(self) -> str:
        """One sentence for logs and clients."""
        where = "the id space" if self.stage == ID_SPACE else f"stage {self.stage}"
        what = f"band {self.band_name} on {where} is {self.units_short} units short"
        asked = f"{sum(self.wanted)} wanted beside {sum(self.live)} live"
        if self.never:
            return f"{what} ({asked}): not even an empty arena holds this demand"
        return f"{what} ({asked}): {self.units_short} units of {self.band_name} must be freed first"


class StageWalk:
    """The closed form of one stage, from its geometry."""

    __slots__ = ("arena_bytes", "last", "last_unit_bytes", "rising", "start_bytes")

    def __init__(self, stage: StageGeometry) -> None:
        if not stage.bands:
            raise ValueError("a stage needs at least the owner's band, if only with zero unit bytes")
        assert stage.chain_start_bytes >= 0
        if any(band.unit_bytes < 0 for band in stage.bands):
            raise ValueError("unit bytes must not be negative")
        self.start_bytes = stage.chain_start_bytes
        self.arena_bytes = stage.arena_bytes
        self.last = len(stage.bands) - 1
        self.last_unit_bytes = stage.bands[self.last].unit_bytes
        self.rising = tuple((i, band.unit_bytes) for i, band in enumerate(stage.bands[:-1]) if band.unit_bytes)

    def overlap_bytes(self, counts: Sequence[int]) -> int:
        """How far the rising bands reach past the start of the last one, which grows down; at most 0: it fits."""
        end = self.start_bytes
        for band, unit in self.rising:
            units = counts[band]
            if units:
                end = (-(-end // unit) + units) * unit
        unit = self.last_unit_bytes
        units = counts[self.last]
        if unit and units:
            return end - (self.arena_bytes // unit - units) * unit
        return end - self.arena_bytes


class CapacityForm:
    """All stages and both id spaces of a geometry: the one capacity question."""

    __slots__ = ("bands", "id_limits", "owner", "walks")

    def __init__(self, geometry: Geometry) -> None:
        self.bands: tuple[BandGeometry, ...] = tuple(geometry.stages[0].bands)
        shape = [(band.name, band.kind, band.window_tokens) for band in self.bands]
        for index, stage in enumerate(geometry.stages):
            if [(band.name, band.kind, band.window_tokens) for band in stage.bands] != shape:
                raise ValueError(f"stage {index} lists other bands than stage 0; every stage lists all, in one order")
        self.owner = len(self.bands) - 1
        if self.bands[self.owner].kind != "full":
            raise ValueError("the last band must be the owner (kind full), if only with zero unit bytes")
        self.walks = tuple(StageWalk(stage) for stage in geometry.stages)
        # A window's units are bound to owner pages, so its count is bounded by theirs and needs no limit of its own.
        limits = {"full": geometry.virtual_pages, "state": geometry.virtual_slots, "window": geometry.virtual_pages}
        self.id_limits = tuple(limits[band.kind] for band in self.bands)

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether these counts fit every stage and the id spaces."""
        for units, limit in zip(counts, self.id_limits, strict=True):
            if units > limit:
                return False
        return all(walk.overlap_bytes(counts) <= 0 for walk in self.walks)

    def refusal(self, live: Sequence[int], demand: Demand) -> CapacityRefusal | None:
        """None when live + demand fits, else the first reason why not."""
        assert len(demand) == len(self.bands), demand
        assert min(demand) >= 0, demand
        total = [held + wanted for held, wanted in zip(live, demand, strict=True)]
        if self.fits(total):
            return None
        stage, band, short = self._blame(total, demand)
        name = self.bands[band].name
        assert short > 0, "a refusal says how much is missing"
        return CapacityRefusal(not self.fits(demand), stage, band, name, short, demand, tuple(live))

    def _blame(self, total: list[int], demand: Demand) -> tuple[int, int, int]:
        """The stage, the band, and how many of its units must go for `total` to fit there."""
        for band, limit in enumerate(self.id_limits):
            if total[band] > limit:
                return ID_SPACE, band, total[band] - limit
        stage = next(i for i, walk in enumerate(self.walks) if walk.overlap_bytes(total) > 0)
        walk = self.walks[stage]
        bands = len(self.bands)
        # The band that asks for most bytes is named; where it alone cannot make room, the next one is.
        weight = [demand[b] * self._unit_bytes(walk, b) for b in range(bands)]
        assert any(weight) or any(total), "an empty demand on an empty arena fits"
        order = sorted(range(bands), key=lambda b: (-weight[b], -b))
        for band in order:
            short = self._units_to_go(walk, total, band)
            if short:
                return stage, band, short
        band = order[0]
        unit = self._unit_bytes(walk, band) or 1
        return stage, band, max(1, -(-walk.overlap_bytes(total) // unit))

    @staticmethod
    def _unit_bytes(walk: StageWalk, band: int) -> int:
        if band == walk.last:
            return walk.last_unit_bytes
        return next((unit for index, unit in walk.rising if index == band), 0)

    @staticmethod
    def _units_to_go(walk: StageWalk, total: list[int], band: int) -> int:
        """The fewest units of `band` whose absence makes `total` fit; 0 when all of them do not suffice."""
        trial = list(total)
        trial[band] = 0
        if walk.overlap_bytes(trial) > 0:
            return 0
        low, high = 1, total[band]
        assert low <= high, "the stage was too full with this band and is not without it"
        while low < high:
            middle = (low + high) // 2
            trial[band] = total[band] - middle
            if walk.overlap_bytes(trial) <= 0:
                high = middle
            else:
                low = middle + 1
        return low

    def most(self, base: Sequence[int], per: Demand) -> int:
        """The largest n for which base + n * per fits; -1 when not even n = 0 does."""
        assert max(per) > 0, "a memory clip needs a unit to count"
        if not self.fits(base):
            return -1
        high = min((limit - b) // p for limit, b, p in zip(self.id_limits, base, per, strict=True) if p)
        low = 0
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits([b + middle * p for b, p in zip(base, per, strict=True)]):
                low = middle
            else:
                high = middle - 1
        assert self.fits([b + low * p for b, p in zip(base, per, strict=True)])
        return low
