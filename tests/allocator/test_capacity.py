"""The closed form of capacity, against brute force over all placements."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.capacity import ID_SPACE, CapacityForm, StageWalk
from allocator.geometry import StageGeometry
from allocator.logical.chain import LogicalChain
from tests.allocator.shapes import full_geometry, hybrid_geometry, stage_of


def placeable(stage: StageGeometry, counts: tuple[int, ...]) -> bool:
    """Tries every aligned start of every band, in chain order, without overlap."""

    def place(band: int, end: int) -> bool:
        if band == len(counts):
            return True
        unit = stage.bands[band].unit_bytes
        if not unit or not counts[band]:
            return place(band + 1, end)
        size = unit * counts[band]
        starts = range(0, stage.arena_bytes - size + 1, unit)
        return any(start >= end and place(band + 1, start + size) for start in starts)

    return place(0, stage.chain_start_bytes)


@pytest.mark.parametrize(
    "units", [(4,), (0,), (3, 2), (2, 5), (0, 3), (3, 0), (4, 3, 2), (3, 0, 5), (2, 3, 4), (5, 3, 0)]
)
@pytest.mark.parametrize("arena", [11, 16, 23])
def test_the_walk_is_exact(units: tuple[int, ...], arena: int) -> None:
    """For every count of every band, the closed form says yes exactly when some placement exists."""
    stage = stage_of(arena, 2, units)
    walk = StageWalk(stage)
    seen = set()
    for counts in product(range(9), repeat=len(units)):
        fits = walk.overlap_bytes(counts) <= 0
        assert fits == placeable(stage, counts), f"{counts} in {stage}"
        seen.add(fits)
    assert seen == {True, False} or max(units) == 0


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    arenas=st.lists(st.integers(8, 60), min_size=1, max_size=3),
    bands=st.integers(1, 4),
    pages=st.integers(0, 12),
    slots=st.integers(0, 6),
)
def test_a_demand_fits_when_it_fits_every_stage_and_the_ids(
    data: st.DataObject, arenas: list[int], bands: int, pages: int, slots: int
) -> None:
    """The joint question over stages and id spaces equals asking each stage by brute force and counting ids."""
    sizes = [tuple(data.draw(st.integers(0, 7)) for _ in range(bands)) for _ in arenas]
    stages = [stage_of(arena, 3, size) for arena, size in zip(arenas, sizes, strict=True)]
    form = CapacityForm(hybrid_geometry(*stages, pages=pages, slots=slots))
    live = tuple(data.draw(st.integers(0, 3)) for _ in range(bands))
    demand = tuple(data.draw(st.integers(0, 4)) for _ in range(bands))
    total = tuple(a + b for a, b in zip(live, demand, strict=True))
    limits = [slots if band.kind == "state" else pages for band in stages[0].bands]
    ids_last = all(units <= limit for units, limit in zip(total, limits, strict=True))
    expected = ids_last and all(placeable(stage, total) for stage in stages)
    refusal = form.refusal(live, demand)
    assert (refusal is None) == expected
    if refusal is not None:
        empty = all(a <= b for a, b in zip(demand, limits, strict=True)) and all(placeable(s, demand) for s in stages)
        assert refusal.never == (not empty)
        assert refusal.units_short >= 1
        assert refusal.band_name in refusal.text()


@settings(max_examples=60, deadline=None)
@given(
    arena=st.integers(20, 200),
    sizes=st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9)),
    base=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    per=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)).filter(any),
)
def test_the_memory_clip_is_the_largest_that_fits(
    arena: int, sizes: tuple[int, int, int], base: tuple[int, int, int], per: tuple[int, int, int]
) -> None:
    """`max_extra` is the last n of a count upward that fits; one more does not."""
    chain = LogicalChain(hybrid_geometry(stage_of(arena, 3, sizes), pages=30, slots=9))
    most = chain.max_extra(base, per)

    def at(n: int) -> tuple[int, ...]:
        return tuple(b + n * p for b, p in zip(base, per, strict=True))

    assert most == -1 or chain.refusal(at(most)) is None
    assert chain.refusal(at(most + 1)) is not None


def test_the_units_short_are_enough_and_not_one_too_many() -> None:
    """Freeing as many units of the named band as the refusal says makes the demand fit; one fewer does not."""
    stage = stage_of(120, 8, (8, 4, 6))
    form = CapacityForm(hybrid_geometry(stage))
    live = (4, 6, 8)
    checked = 0
    for demand in product(range(4), repeat=3):
        refusal = form.refusal(live, demand)
        if refusal is None or refusal.stage == ID_SPACE:
            continue
        after = [a + b for a, b in zip(live, demand, strict=True)]
        after[refusal.band] -= refusal.units_short
        assert after[refusal.band] < 0 or form.fits(after)
        after[refusal.band] += 1
        assert not form.fits(after)
        checked += 1
    assert checked > 10


def test_every_stage_must_list_the_same_bands() -> None:
    """Stages with other bands, or an owner that is not last, are refused when the chain is made."""
    with pytest.raises(ValueError, match="stage 1 lists other bands"):
        CapacityForm(hybrid_geometry(stage_of(64, 4, (4, 4)), stage_of(64, 4, (4,))))
    backwards = StageGeometry(64, 4, list(reversed(stage_of(64, 4, (4, 4)).bands)))
    with pytest.raises(ValueError, match="last band must be the owner"):
        CapacityForm(hybrid_geometry(backwards))


def test_one_band_holds_every_unit_between_its_sink_and_the_arena_end() -> None:
    """A single band's capacity is what lies between the chain's start and the end, tail bytes left out."""
    for tail in (0, 1, 255):
        chain = LogicalChain(full_geometry(9, tail_bytes=tail))
        assert chain.most_ever() == 9
        assert chain.max_extra() == 9
