"""Freeze: from a publication until the ranks report where its units lie, no band grows.

Owns the reported fixed extents and the capacity form that follows from them. Must never guess an extent. A send that is
fixed counts as a publication. Invariants: a publication is reported only by a report of a state that it was part of,
even if it ended meanwhile; while one is unreported no count may exceed its value at the newest publication, because
what fits the spans held then is realizable; a band whose reported publications are all over has nothing fixed.

Between publications what is fixed only shrinks. So of two reports up to the same publication both hold, in whichever
order they come, and neither can refuse counts that grew by leave of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from allocator.capacity import CapacityForm, Demand, Extent, Extents
from allocator.checks import Checks
from allocator.geometry import Geometry
from allocator.logical.uses import MARKS, Uses


class Freeze:
    """`form` answers capacity questions now, `bare` those about what can ever be: with nothing fixed."""

    __slots__ = ("_caps", "_extents", "_geometry", "_through", "_unreported", "_uses", "bare", "form")

    def __init__(self, geometry: Geometry, uses: Uses) -> None:
        self._geometry = geometry
        self._uses = uses
        self.bare = CapacityForm(geometry)
        self._extents: Extents = ((None,) * len(self.bare.bands),) * len(geometry.stages)
        self._through = 0  # the newest publication that a report covers
        self._unreported: list[int] = []  # publications after it in the order of the ops, those that are over too
        self._caps: Demand | None = None
        self.form = self.bare

    def begin(self, use: int, counts: Demand) -> None:
        """A publication happened at these counts."""
        self._unreported.append(use)
        self._caps = counts
        self.refit()

    def report(self, extents: Extents, through_use: int, counts: Sequence[int], checks: Checks) -> None:
        """Extents as of a state whose newest publication is `through_use`; raises before anything changes."""
        if [len(stage) for stage in extents] != [len(self.bare.bands)] * len(self._geometry.stages):
            raise ValueError(f"extents must list {len(self.bare.bands)} bands on each of the stages")
        CapacityForm(self._geometry, extents)  # refuses extents that are none, whether they count or not
        later = self._unreported
        known: Extents = tuple(tuple(stage) for stage in extents)
        if through_use in later:
            later = later[later.index(through_use) + 1 :]
        elif through_use == self._through:
            known = _common(self._extents, known)
        else:
            return  # of an older state: what was published since is not in it
        masked = self._masked(known, later)
        if masked is not None and not CapacityForm(self._geometry, masked).fits(counts):
            text = f"live units {tuple(counts)} do not fit around the fixed extents {masked}"
            checks.broken("chain.stage_capacity_agreement", text)
        missing = self._missing(known, later)
        if missing:
            text = f"band {missing} has published units, and a stage that stores it reports none fixed"
            checks.broken("chain.stage_capacity_agreement", text)
        self._extents, self._through, self._unreported = known, through_use, later
        self.refit()

    def refit(self) -> None:
        """The form follows the extents, what is published, and what is unreported."""
        masked = self._masked(self._extents, self._unreported)
        if not self._unreported:
            self._caps = None
        plain = masked is None and self._caps is None
        self.form = self.bare if plain else CapacityForm(self._geometry, masked, self._caps)

    def content(self) -> tuple[Extents, int, list[int], Demand | None]:
        """For digests."""
        return self._extents, self._through, self._unreported, self._caps

    def _masked(self, extents: Extents, unreported: list[int]) -> Extents | None:
        """The extents of bands with an open publication that was reported; None when nothing is fixed.

        One that is not reported yet says nothing about an older extent: that may be of a publication that is over.
        """
        if not self._uses.any_fixed:
            return None
        covered = {
            band
            for use, (kind, columns) in self._uses.open.items()
            if "fixed" in MARKS[kind] and use not in unreported
            for band, _ in columns
        }
        masked = tuple(
            tuple(extent if band in covered else None for band, extent in enumerate(stage)) for stage in extents
        )
        return masked if any(extent for stage in masked for extent in stage) else None

    def _missing(self, extents: Extents, unreported: list[int]) -> str:
        """A band whose reported publications no extent covers; empty: none. Who waited for a send fixes nothing."""
        for use, (kind, columns) in self._uses.open.items():
            if kind not in ("lend", "receive") or use in unreported:
                continue
            for band, _ in columns:
                for stage, row in zip(self._geometry.stages, extents, strict=True):
                    if stage.bands[band].unit_bytes and row[band] is None:
                        return stage.bands[band].name
        return ""


def _common(one: Extents, other: Extents) -> Extents:
    """The bytes that lie in both extents, by stage and band."""

    def both(a: Extent, b: Extent) -> Extent:
        if a is None or b is None:
            return None
        low, high = max(a[0], b[0]), min(a[1], b[1])
        return (low, high) if low < high else None

    return tuple(tuple(map(both, *stages)) for stages in zip(one, other, strict=True))
