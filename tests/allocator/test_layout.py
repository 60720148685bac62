"""The layout search, against brute force over every cut on small arenas and against its own bound on large ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest

from allocator.capacity import StageWalk
from allocator.geometry import BandGeometry, StageGeometry
from allocator.physical import layout_refine
from allocator.physical.layout import BandLayout, Int64s, Layout, Level, search

Extent = tuple[int, int]


@dataclass(frozen=True)
class World:
    """An arena: bands with their live units, and the bytes they share."""

    bands: list[BandLayout]
    live: list[list[int]]
    start: int
    end: int

    def outside(self, k: int, begin: int, end: int) -> int:
        """Bytes of band k's live units outside units [begin, end)."""
        return sum(not begin <= unit < end for unit in self.live[k]) * self.bands[k].unit_bytes


def below(live: Sequence[int]) -> Callable[[Int64s], Int64s]:
    """live_below of these ascending units."""
    column = np.array(live, dtype=np.int64)
    return lambda units: np.searchsorted(column, units, "left")


def world(rng: random.Random, units: Sequence[int], arena: int, fill: float, contested: bool = False) -> World:
    """Random live units in chain order, spans around them, and now and then pinned units and limits.

    One band wants much of what is free, wherever it is, so that others have to give way. `contested`: the bands are of
    about one size and leave no gaps, and an inner one grows, so that either neighbour could give way.
    """
    start = rng.randrange(4)
    edges = [start, *sorted(rng.randint(start, arena) for _ in units[1:]), arena]
    if contested:
        edges = [start + (arena - start) * k // len(units) for k in range(len(units) + 1)]
    pieces = [
        range(-(-begin // unit), max(end // unit, -(-begin // unit)))
        for unit, (begin, end) in zip(units, pairwise(edges), strict=True)
    ]
    tight = contested or rng.random() < 0.5
    lives = [[u for u in piece if rng.random() < fill or (tight and u in (piece[0], piece[-1]))] for piece in pieces]
    needs = [len(live) + rng.choice((0, 0, 0, 1)) for live in lives]
    # One band grows by much or all of the space that is free anywhere.
    grows = rng.randrange(1, len(units) - 1) if contested else rng.randrange(len(units))
    free = arena - start - sum(need * unit for need, unit in zip(needs, units, strict=True))
    needs[grows] += max(0, free) // units[grows] * rng.randint(2, 6) // 6
    bands: list[BandLayout] = []
    for unit, piece, live, need in zip(units, pieces, lives, needs, strict=True):
        first, limit = -(-start // unit), arena // unit
        if live and rng.random() < 0.1:
            first, limit = rng.randint(first, live[0]), rng.randint(live[-1] + 1, limit)
        pinned = None
        if live and rng.random() < 0.1:
            fixed = sorted(rng.sample(live, rng.randint(1, min(2, len(live)))))
            pinned = (fixed[0], fixed[-1] + 1)
        span = (live[0], live[-1] + 1) if live else (0, 0)
        if live and rng.random() < 0.5:
            span = (max(piece[0], first), min(piece[-1] + 1, limit))
        bands.append(BandLayout(unit, first, limit, *span, need, pinned, below(live)))
    return World(bands, lives, start, arena)


def brute(world: World, inner_stay: bool) -> int | None:
    """The least bytes to move, over all byte positions of all cuts; None when nothing holds the needs.

    `inner_stay`: only the first and the last band may have units outside their pieces.
    """
    needed = [k for k, band in enumerate(world.bands) if band.need_units]
    best: dict[int, int] = {world.start: 0}
    for k in needed:
        band = world.bands[k]
        after: dict[int, int] = {}
        for edge in range(world.start, world.end + 1) if k != needed[-1] else (world.end,):
            for before, paid in best.items():
                begin = max(band.first_unit, -(-before // band.unit_bytes))
                end = min(band.limit_unit, edge // band.unit_bytes)
                if end - begin < band.need_units:
                    continue
                if band.pinned and not begin <= band.pinned[0] < band.pinned[1] <= end:
                    continue
                cost = world.outside(k, begin, end)
                if inner_stay and cost and 0 < k < len(world.bands) - 1:
                    continue
                after[edge] = min(after.get(edge, 1 << 60), paid + cost)
        best = after
    return min(best.values()) if best else None


def first_fit(world: World) -> bool:
    """The closed form: every band starts as early as it can, covers its pinned units, and ends inside."""
    edge = world.start
    for band in world.bands:
        if not band.need_units:
            continue
        begin = max(band.first_unit, -(-edge // band.unit_bytes))
        if band.pinned and begin > band.pinned[0]:
            return False
        end = max(begin + band.need_units, band.pinned[1] if band.pinned else 0)
        edge = end * band.unit_bytes
        if end > band.limit_unit or edge > world.end:
            return False
    return True


def test_the_search_agrees_with_the_capacity_walk() -> None:
    """What the logical chain's walk says of counts and fixed extents is what the search finds, on random arenas."""
    rng = random.Random(7)
    seen = {True: 0, False: 0}
    for _ in range(6000):
        units = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
        case = world(rng, units, rng.randint(8, 90), rng.choice((0.2, 0.5, 0.9)))
        whole = [
            replace(band, first_unit=-(-case.start // band.unit_bytes), limit_unit=case.end // band.unit_bytes)
            for band in case.bands
        ]
        stage = StageGeometry(case.end, case.start, [BandGeometry("full", "full", b.unit_bytes) for b in whole])
        fixed = [b.pinned and (b.pinned[0] * b.unit_bytes, b.pinned[1] * b.unit_bytes) for b in whole]
        fits = StageWalk(stage, fixed).overlap_bytes([b.need_units for b in whole]) <= 0
        assert (search(whole, case.start, case.end) is not None) == fits, case
        seen[fits] += 1
    assert min(seen.values()) > 1000, seen


def check_ranges(world: World, found: Layout) -> None:
    """The ranges hold needs and pinned units, keep chain order, and cost what is said."""
    edge, cost, inner = world.start, 0, 0
    for k, (band, (begin, end)) in enumerate(zip(world.bands, found.ranges, strict=True)):
        if not band.need_units:
            assert begin == end
            continue
        assert end - begin >= band.need_units
        assert band.first_unit <= begin < end <= band.limit_unit
        assert begin * band.unit_bytes >= edge
        edge = end * band.unit_bytes
        if band.pinned:
            assert begin <= band.pinned[0] < band.pinned[1] <= end
        outside = world.outside(k, begin, end)
        cost += outside
        inner += outside if 0 < k < len(world.bands) - 1 else 0
    assert edge <= world.end
    assert cost == found.cost_bytes
    assert found.level == (Level.NO_MOVE if cost == 0 else Level.RELAYOUT if inner else Level.FLUSH_ENDS)


def small_worlds() -> Iterator[World]:
    """Every combination of 1 to 4 bands of unit sizes 1 to 4, each with a few arenas and live sets drawn for it."""
    rng = random.Random(20)
    for bands, draws in ((1, 20), (2, 60), (3, 40), (4, 20)):
        for units in product((1, 2, 3, 4), repeat=bands):
            for _ in range(draws):
                yield world(rng, units, rng.randint(8, 24), rng.choice((0.2, 0.4, 0.8)))
                if bands > 2:
                    yield world(rng, units, rng.randint(20, 48), rng.choice((0.2, 0.4)), contested=True)


def test_the_search_is_optimal_on_small_arenas() -> None:
    """Feasibility, cost and level equal brute force over all cuts; the closed form says which are feasible."""
    seen = dict.fromkeys((None, *Level), 0)
    for case in small_worlds():
        best = brute(case, inner_stay=False)
        found = search(case.bands, case.start, case.end)
        assert (best is not None) == first_fit(case)
        seen[found.level if found else None] += 1
        if found is None:
            assert best is None
            continue
        check_ranges(case, found)
        assert found.cost_bytes == found.bound_bytes == best, case
        if found.level == Level.RELAYOUT:
            assert brute(case, inner_stay=True) != best, "the lower level costs as much"
    assert min(seen.values()) > 100, seen


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_refinement_keeps_its_bound(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With very few cells per round the bound never exceeds the optimum, nor the cost 1.05 times the bound."""
    monkeypatch.setattr(layout_refine, "PARTS", parts)
    refined = 0
    for case in list(small_worlds())[parts::7]:
        best = brute(case, inner_stay=False)
        found = search(case.bands, case.start, case.end)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            check_ranges(case, found)
            assert found.bound_bytes <= best <= found.cost_bytes <= 1.05 * found.bound_bytes
            refined += best > 0
    assert refined > 150


@dataclass
class Asked:
    """Counts questions to bands, and places asked about."""

    calls: int = 0
    places: int = 0

    def below(self, live: Int64s) -> Callable[[Int64s], Int64s]:
        """live_below of ascending units, counted."""

        def answer(units: Int64s) -> Int64s:
            self.calls += 1
            self.places += units.size
            return np.searchsorted(live, units, "left")

        return answer


def large_world(rng: np.random.Generator, bands: int, asked: Asked) -> tuple[World, list[Int64s]]:
    """An arena of up to 2^40 bytes, its bands without gaps and with holes in runs; an inner one, or an end, grows."""
    units = [int(rng.choice((3072, 4096, 65536, 1 << 20))) for _ in range(bands)]
    grows = int(rng.integers(0, bands))
    edge, rows, lives = 0, [], []
    for k, unit in enumerate(units):
        first, size = -(-edge // unit), int(rng.integers(2_000, 200_000))
        runs = rng.random(size // 50 + 1) < rng.choice((0.5, 0.9))
        mask = np.repeat(runs, 50)[:size] & (rng.random(size) < 0.9)
        mask[[0, -1]] = True
        live = first + np.flatnonzero(mask)
        lives.append(live)
        need = size + int((size - live.size) * rng.random()) if k == grows else int(live.size)
        rows.append((unit, first, first + size, need))
        edge = (first + size) * unit
    assert edge < 1 << 40
    made = [
        BandLayout(unit, 0, edge // unit, first, end, need, None, asked.below(live))
        for (unit, first, end, need), live in zip(rows, lives, strict=True)
    ]
    return World(made, [], 0, edge), lives


def drawn_layout(rng: np.random.Generator, case: World) -> list[Extent] | None:
    """Unit ranges of a layout that holds the needs: the rest of the arena is dealt out at random."""
    spare = case.end - sum((band.need_units + 1) * band.unit_bytes for band in case.bands)
    if spare < 0:
        return None
    shares = rng.dirichlet(np.full(len(case.bands), 0.5)) * spare
    out, edge = [], 0
    for band, share in zip(case.bands, shares, strict=True):
        begin = -(-edge // band.unit_bytes)
        end = begin + band.need_units + int(share) // band.unit_bytes
        out.append((begin, end))
        edge = end * band.unit_bytes
    assert edge <= case.end
    return out


@pytest.mark.parametrize("parts", [64, 1024])
@pytest.mark.parametrize("bands", [2, 3, 4, 5])
def test_large_arenas_keep_the_bound_in_few_questions(bands: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No drawn layout costs less than the bound, the cost is within 1.05 of it, and the work stays small."""
    monkeypatch.setattr(layout_refine, "PARTS", parts)
    rng = np.random.default_rng(bands)
    moved = 0
    for _ in range(100):
        asked = Asked()
        case, lives = large_world(rng, bands, asked)
        found = search(case.bands, case.start, case.end)
        assert asked.calls <= 12 * bands, asked
        assert asked.places <= 8 * 1024 * bands, asked
        assert (found is not None) == first_fit(case)
        if found is None:
            continue
        costs = []
        for ranges in [found.ranges, *(drawn_layout(rng, case) for _ in range(20))]:
            if ranges is not None:
                inside = [np.diff(np.searchsorted(live, r))[0] for live, r in zip(lives, ranges, strict=True)]
                kept = zip(case.bands, lives, inside, strict=True)
                costs.append(sum(int(live.size - stays) * band.unit_bytes for band, live, stays in kept))
        assert costs[0] == found.cost_bytes
        assert found.bound_bytes <= min(costs)
        assert found.cost_bytes <= 1.05 * found.bound_bytes
        moved += found.cost_bytes > 0
    assert moved >= 50


def band(unit: int, live: Sequence[int], need: int, limit: int = 100) -> BandLayout:
    """A band whose span is its live units."""
    span = (live[0], live[-1] + 1) if live else (0, 0)
    return BandLayout(unit, 0, limit, *span, need, None, below(live))


def test_cuts_lie_in_the_middle_of_the_gaps() -> None:
    """Where nothing has to move, neighbours share the gap; an empty band lies in the middle of the gap it gets."""
    two = search([band(1, range(10), 10), band(1, range(80, 100), 20)], 0, 100)
    assert two is not None
    assert two.ranges == [(0, 45), (45, 100)]
    assert two.level == Level.NO_MOVE
    three = search([band(1, range(10), 10), band(1, [], 20), band(1, range(80, 100), 20)], 0, 100)
    assert three is not None
    begin, end = three.ranges[1]
    assert 10 < begin < end < 80
    assert abs(begin - 10 - (80 - end)) <= 1, "as far from both neighbours"
    assert end - begin > 20, "with room to grow"


def test_a_float_grows_into_both_gaps() -> None:
    """A float that needs more than half of both gaps gets the extra from both sides alike."""
    found = search([band(1, range(10), 10), band(1, range(40, 60), 70), band(1, range(90, 100), 10)], 0, 100)
    assert found is not None
    assert found.ranges[1] == (15, 85)


def test_a_band_without_a_need_is_transparent() -> None:
    """An empty float between two ends gets nothing and takes nothing."""
    found = search([band(1, range(10), 50), band(7, [], 0, limit=14), band(1, range(80, 100), 50)], 0, 100)
    assert found is not None
    assert found.ranges[0] == (0, 50)
    assert found.ranges[1][0] == found.ranges[1][1]
    assert found.ranges[2] == (50, 100)
    assert found.cost_bytes == 0
    nothing = search([band(3, [], 0), band(2, [], 0)], 5, 100)
    assert nothing is not None
    assert nothing.ranges == [(2, 2), (3, 3)]


def test_the_cheaper_neighbour_gives_way() -> None:
    """A growing float pushes the neighbour with fewer live bytes in the way."""
    sparse = [0, *range(1, 40, 8)]
    found = search([band(1, sparse, 8), band(1, range(40, 60), 30), band(2, range(30, 50), 20, limit=50)], 0, 100)
    assert found is not None
    assert found.ranges[2] == (30, 50)
    assert found.ranges[1] == (30, 60)
    assert found.cost_bytes == 1, "only the unit at 33 moves"
    assert found.level == Level.FLUSH_ENDS
