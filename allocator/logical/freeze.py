"""Freeze: from a publication until the ranks report where the published units lie, no band grows.

Owns the reported fixed extents and the capacity form that follows from them. Must never guess an extent. Invariants:
a band without an open publication that a report covers has nothing fixed, whatever an older report says; while a
publication is unreported no count may exceed its value at the newest publication, because what fits the spans held then
is realizable.
"""

from __future__ import annotations

from collections.abc import Sequence

from allocator.capacity import CapacityForm, Demand, Extents
from allocator.checks import Checks
from allocator.geometry import Geometry
from allocator.logical.uses import Uses


class Freeze:
    """`form` answers capacity questions now, `lasting` those about what can ever be, with the same extents."""

    __slots__ = ("_bare", "_caps", "_extents", "_geometry", "_unreported", "_uses", "form", "lasting")

    def __init__(self, geometry: Geometry, uses: Uses) -> None:
        self._geometry = geometry
        self._uses = uses
        self._bare = CapacityForm(geometry)
        self._extents: Extents = ((None,) * len(self._bare.bands),) * len(geometry.stages)
        self._unreported: list[int] = []  # publications, in their order
        self._caps: Demand | None = None
        self.form = self.lasting = self._bare

    def begin(self, use: int, counts: Demand) -> None:
        """A publication happened at these counts."""
        self._unreported.append(use)
        self._caps = counts
        self.refit()

    def drop(self, use: int) -> None:
        """A use ended: if it was unreported, nothing needs to be known of it any more; `refit` follows."""
        if use in self._unreported:
            self._unreported.remove(use)

    def report(self, extents: Extents, through_use: int, counts: Sequence[int], checks: Checks) -> None:
        """Extents as of the step that published `through_use`; raises before anything changes."""
        if [len(stage) for stage in extents] != [len(self._bare.bands)] * len(self._geometry.stages):
            raise ValueError(f"extents must list {len(self._bare.bands)} bands on each of the stages")
        kept = self._unreported
        if through_use in kept:
            kept = kept[kept.index(through_use) + 1 :]
        CapacityForm(self._geometry, extents)  # refuses extents that are none, whether they count or not
        masked = self._masked(extents, kept)
        lasting = self._bare if masked is None else CapacityForm(self._geometry, masked)
        if not lasting.fits(counts):
            text = f"live units {tuple(counts)} do not fit around the fixed extents {extents}"
            checks.broken("chain.stage_capacity_agreement", text)
        missing = self._missing(extents, kept)
        if missing:
            text = f"band {missing} has published units, and a stage that stores it reports none fixed"
            checks.broken("chain.stage_capacity_agreement", text)
        self._extents = tuple(tuple(stage) for stage in extents)
        self._unreported = kept
        self.refit()

    def refit(self) -> None:
        """The forms follow the extents, what is published, and what is unreported."""
        masked = self._masked(self._extents, self._unreported)
        self.lasting = self._bare if masked is None else CapacityForm(self._geometry, masked)
        if not self._unreported:
            self._caps = None
        self.form = self.lasting if self._caps is None else CapacityForm(self._geometry, masked, self._caps)

    def content(self) -> tuple[Extents, list[int], Demand | None]:
        """For digests."""
        return self._extents, self._unreported, self._caps

    def _masked(self, extents: Extents, unreported: list[int]) -> Extents | None:
        """The extents of bands with an open publication that was reported; None when nothing is fixed.

        One that is not reported yet says nothing about an older extent: that may be of a publication that is over.
        """
        if not self._uses.any_published:
            return None
        covered = {
            band
            for use, (kind, columns) in self._uses.open.items()
            if kind == "publish" and use not in unreported
            for band, _ in columns
        }
        masked = tuple(
            tuple(extent if band in covered else None for band, extent in enumerate(stage)) for stage in extents
        )
        return masked if any(extent for stage in masked for extent in stage) else None

    def _missing(self, extents: Extents, unreported: list[int]) -> str:
        """A band whose reported publications no extent covers; empty: none."""
        for use, (kind, columns) in self._uses.open.items():
            if kind != "publish" or use in unreported:
                continue
            for band, _ in columns:
                for stage, row in zip(self._geometry.stages, extents, strict=True):
                    if stage.bands[band].unit_bytes and row[band] is None:
                        return stage.bands[band].name
        return ""
