"""Capacity: the closed form that says whether counts of units fit every stage, jointly over its bands.

Owns the left-to-right walk, what fixed bytes do to it, and the refusal it leads to. Must never look at positions
beyond the two numbers per band that a fixed extent is: only counts, geometry and extents decide.

Invariant (exactness): counts fit a stage exactly when contiguous spans of the bands, in chain order, can be placed
between the chain's start and the arena's end, each starting at a multiple of its unit, none shorter than its count, and
each covering the fixed bytes of its band. Starting every band as early as it can leaves most to those behind it, so one
walk decides: a start past the band's lowest fixed byte, or a last band that would have to start before the others end,
is a no. Bands without units and without fixed bytes are transparent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allocator.geometry import BandGeometry, Geometry, StageGeometry

Demand = tuple[int, ...]
"""Units wanted of each band, in chain order."""

Extent = tuple[int, int] | None
"""Lowest fixed byte of a band on a stage, and the end of its highest (exclusive); None: nothing is fixed."""

Extents = tuple[tuple[Extent, ...], ...]
"""Fixed extents by stage and band."""

ID_SPACE = -1
"""The `stage` of a refusal when the ids, not the bytes of a stage, run out."""

FROZEN = -2
"""The `stage` of a refusal while units were published and where they lie is not known yet: no band may grow."""


@dataclass(frozen=True, slots=True)
class CapacityRefusal:
    """Why a demand does not fit.

    `units_short` units of `band` must be freed first if nothing else is; `never`: not even an arena that holds only
    the quarantined units, wherever they lie, holds the demand. `stage` is the first stage on which it
    fails, `ID_SPACE` when the ids run out, `FROZEN` until extents are reported. `live` and `wanted` are the counts of
    all bands at the question. `transfers`: without quarantined and fixed units the demand would have been granted (with
    `never`: would fit an empty arena), so the end of transfers helps too.
    """

    never: bool
    stage: int
    band: int
    band_name: str
    units_short: int
    wanted: Demand
    live: tuple[int, ...]
    transfers: bool = False

    def text(self) -> str:
        """One sentence for logs and clients."""
        wheres = {ID_SPACE: "the id space", FROZEN: "every stage"}
        where = wheres.get(self.stage, f"stage {self.stage}")
        what = f"band {self.band_name} on {where} is {self.units_short} units short"
        what = f"{what} ({sum(self.wanted)} wanted beside {sum(self.live)} live)"
        if self.never:
            if self.transfers:
                return f"{what}: not even an arena freed of all but what transfers keep holds it; those must end first"
            return f"{what}: not even an empty arena holds this demand"
        if self.stage == FROZEN:
            return f"{what}: the ranks must report where the published units lie first"
        end = f"{self.units_short} units of {self.band_name} must be freed first"
        return f"{what}: {end}, or transfers must end" if self.transfers else f"{what}: {end}"


class StageWalk:
    """The closed form of one stage, from its geometry and the fixed extents of its bands (None: nothing is fixed)."""

    __slots__ = ("arena_bytes", "last", "last_high", "last_low", "last_top", "last_unit_bytes", "rising", "start_bytes")

    def __init__(self, stage: StageGeometry, extents: Sequence[Extent] | None = None) -> None:
        if not stage.bands:
            raise ValueError("a stage needs at least the owner's band, if only with zero unit bytes")
        assert stage.chain_start_bytes >= 0
        if any(band.unit_bytes < 0 for band in stage.bands):
            raise ValueError("unit bytes must not be negative")
        fixed: Sequence[Extent] = extents if extents is not None else (None,) * len(stage.bands)
        for band, extent in zip(stage.bands, fixed, strict=True):
            _check_extent(stage, band, extent)
        self.start_bytes = stage.chain_start_bytes
        self.arena_bytes = stage.arena_bytes
        self.last = len(stage.bands) - 1
        self.last_unit_bytes = stage.bands[self.last].unit_bytes
        self.last_top = stage.arena_bytes // self.last_unit_bytes if self.last_unit_bytes else 0
        self.last_low, self.last_high = fixed[self.last] or (0, 0)
        self.rising = tuple(
            (i, band.unit_bytes, *(fixed[i] or (0, 0))) for i, band in enumerate(stage.bands[:-1]) if band.unit_bytes
        )

    def overlap_bytes(self, counts: Sequence[int]) -> int:
        """How far some band reaches past where it must have ended; at most 0: the counts fit."""
        end = self.start_bytes
        for band, unit, low, high in self.rising:
            units = counts[band]
            if high:
                begin = -(-end // unit)
                if begin * unit > low:
                    return begin * unit - low
                end = (begin + units) * unit
                if end < high:
                    end = high
            elif units:
                end = (-(-end // unit) + units) * unit
        units = counts[self.last]
        if self.last_high:
            begin = (self.last_top - units) * self.last_unit_bytes
            return end - (begin if begin < self.last_low else self.last_low)
        if units and self.last_unit_bytes:
            return end - (self.last_top - units) * self.last_unit_bytes
        return end - self.arena_bytes


def _check_extent(stage: StageGeometry, band: BandGeometry, extent: Extent) -> None:
    if extent is None:
        return
    low, high = extent
    unit = band.unit_bytes
    if not unit or low % unit or high % unit or not stage.chain_start_bytes <= low < high <= stage.arena_bytes:
        inside = f"[{stage.chain_start_bytes}, {stage.arena_bytes})"
        raise ValueError(f"band {band.name}: fixed bytes [{low}, {high}) are no units of {unit} bytes inside {inside}")


class CapacityForm:
    """All stages and both id spaces of a geometry: the one capacity question.

    `extents` are the fixed bytes by stage and band; `caps` bound the counts per band while a freeze lasts.
    """

    __slots__ = ("_bare", "bands", "caps", "geometry", "id_limits", "limits", "owner", "walks")

    def __init__(self, geometry: Geometry, extents: Extents | None = None, caps: Demand | None = None) -> None:
        self.geometry = geometry
        self.bands: tuple[BandGeometry, ...] = tuple(geometry.stages[0].bands)
        shape = [(band.name, band.kind, band.window_tokens) for band in self.bands]
        for index, stage in enumerate(geometry.stages):
            if [(band.name, band.kind, band.window_tokens) for band in stage.bands] != shape:
                raise ValueError(f"stage {index} lists other bands than stage 0; every stage lists all, in one order")
        self.owner = len(self.bands) - 1
        if self.bands[self.owner].kind != "full":
            raise ValueError("the last band must be the owner (kind full), if only with zero unit bytes")
        by_stage: Sequence[Sequence[Extent] | None] = extents if extents is not None else (None,) * len(geometry.stages)
        self.walks = tuple(StageWalk(s, fixed) for s, fixed in zip(geometry.stages, by_stage, strict=True))
        # A window's units are bound to owner pages, so its count is bounded by theirs and needs no limit of its own.
        most = {"full": geometry.virtual_pages, "state": geometry.virtual_slots, "window": geometry.virtual_pages}
        self.id_limits = tuple(most[band.kind] for band in self.bands)
        self.caps = caps
        self.limits = self.id_limits if caps is None else tuple(map(min, self.id_limits, caps))
        # The same question with nothing fixed: what can never fit, and what the end of transfers would change.
        self._bare = self if extents is None and caps is None else CapacityForm(geometry)

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether these counts fit every stage, the id spaces and, while a freeze lasts, its caps."""
        for units, limit in zip(counts, self.limits):  # noqa: B905 - on the path of every question; lengths are checked
            if units > limit:
                return False
        for walk in self.walks:  # noqa: SIM110 - a generator would double the time
            if walk.overlap_bytes(counts) > 0:
                return False
        return True

    def refusal(self, live: Sequence[int], demand: Demand, quarantined: Demand | None = None) -> CapacityRefusal | None:
        """None when live + demand fits, else the first reason why not; `quarantined` of the live never go before."""
        assert len(demand) == len(self.bands), demand
        assert min(demand) >= 0, demand
        total = [held + wanted for held, wanted in zip(live, demand)]  # noqa: B905 - as above
        if self.fits(total):
            return None
        kept = quarantined or (0,) * len(self.bands)
        stage, band, short = self._blame(total, demand)
        assert short > 0, "a refusal says how much is missing"
        least = [held + wanted for held, wanted in zip(kept, demand, strict=True)]
        never = not self._bare.fits(least)
        freed = demand if never else [units - held for units, held in zip(total, kept, strict=True)]
        transfers = (self._bare is not self or any(kept)) and self._bare.fits(freed)
        return CapacityRefusal(never, stage, band, self.bands[band].name, short, demand, tuple(live), transfers)

    def _blame(self, total: list[int], demand: Demand) -> tuple[int, int, int]:
        """The stage, the band, and how many of its units must go for `total` to fit there."""
        for band, limit in enumerate(self.id_limits):
            if total[band] > limit:
                return ID_SPACE, band, total[band] - limit
        for stage, walk in enumerate(self.walks):
            if walk.overlap_bytes(total) > 0:
                return self._blame_stage(stage, total, demand)
        band = next(b for b, limit in enumerate(self.limits) if total[b] > limit)
        return FROZEN, band, total[band] - self.limits[band]

    def _blame_stage(self, stage: int, total: list[int], demand: Demand) -> tuple[int, int, int]:
        """The band that asks for most bytes is named; where it alone cannot make room, the next one is."""
        walk = self.walks[stage]
        units = [band.unit_bytes for band in self.geometry.stages[stage].bands]
        order = sorted(range(len(units)), key=lambda b: (-demand[b] * units[b], -total[b] * units[b], -b))
        for band in order:
            short = _units_to_go(walk, total, band)
            if short:
                return stage, band, short
        band = order[0]
        return stage, band, max(1, -(-walk.overlap_bytes(total) // (units[band] or 1)))

    def most(self, base: Sequence[int], per: Demand) -> int:
        """The largest n for which base + n * per fits; -1 when not even n = 0 does."""
        assert max(per) > 0, "a memory clip needs a unit to count"
        if not self.fits(base):
            return -1
        high = min((limit - b) // p for limit, b, p in zip(self.limits, base, per, strict=True) if p)
        low = 0
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits([b + middle * p for b, p in zip(base, per, strict=True)]):
                low = middle
            else:
                high = middle - 1
        assert self.fits([b + low * p for b, p in zip(base, per, strict=True)])
        return low


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
