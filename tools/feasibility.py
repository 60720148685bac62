"""Feasibility: the closed form of capacity against brute force, on a stated exhaustive set and on random cases.

Owns the brute force, which lists placements of spans and shares nothing with the closed form, and the sets it is run
on. Must never judge by sampling where it says exhaustive. What a span is: aligned units of one band, in chain order,
without overlap, covering the band's fixed bytes, at least as many as its count; a band without units and fixed bytes
needs none.

How the lists are kept short: `reach` of some bands is, for each of their count vectors, a bit mask of the byte
positions at or before which some placement of them ends; every span of the next band is then tried from every such
position. Both sides only lose by a higher count (asserted of the brute force in every geometry), so where extents are
enumerated the two are compared on the border: the most units of the last band and one more for every feasible vector
of the others, and all minimal infeasible ones.

`python -m tools.feasibility [--random N] [--seed S] [--arena-max BYTES] [--json]`
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from allocator.capacity import CapacityForm, Extent, StageWalk
from allocator.geometry import BandGeometry, BandKind, Geometry, StageGeometry

Masks = NDArray[np.uint32]
Counts = NDArray[np.int64]

ARENA_MAX = 24
RANDOM_CASES = 100_000
ANY_UNITS = 1 << 20  # a band that a stage does not store holds as many as one likes


class Sweep(NamedTuple):
    """One exhaustive set: all arenas of 1 to `arena_max` bytes and all unit sizes, `fixed` units at most (-1: any).

    With `fixed` not 0, every lowest and highest fixed byte of every band is tried that so many units can make.
    """

    bands: int
    arena_max: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    fixed: int

    def text(self) -> str:
        """The set in words."""
        fixed = {0: "no fixed unit", -1: "any fixed units in any bands"}.get(self.fixed, f"up to {self.fixed} fixed")
        sizes = f"units of {min(self.sizes)} to {max(self.sizes)} bytes"
        start = " or ".join(map(str, self.starts))
        return f"{self.bands} bands, {sizes}, arenas of 1 to {self.arena_max} bytes from byte {start}, {fixed}"


SWEEPS = (
    Sweep(2, 24, (0, 1), (0, 1, 2, 3, 4), 0),
    Sweep(3, 24, (0, 1), (0, 1, 2, 3, 4), 0),
    Sweep(4, 24, (0,), (1, 2, 3, 4), 0),
    Sweep(2, 24, (0, 1), (1, 2, 3, 4), -1),
    Sweep(3, 24, (0,), (1, 2, 3, 4), 2),
    Sweep(3, 16, (0,), (1, 2, 3, 4), -1),
    Sweep(4, 24, (0,), (1, 2, 3, 4), 1),
    Sweep(4, 12, (0,), (1, 2, 3, 4), 2),
    Sweep(4, 9, (0,), (1, 2, 3, 4), -1),
)


class StagePairs(NamedTuple):
    """Every pair of stages out of an exhaustive set of stages, under limits of the id spaces."""

    bands: int
    arena_max: int
    fixed: int

    def text(self) -> str:
        """The set in words."""
        fixed = f"up to {self.fixed} fixed on each" if self.fixed else "no fixed unit"
        return f"2 stages of {self.bands} bands, units of 0 to 4 bytes, arenas of 1 to {self.arena_max} bytes, {fixed}"


PAIRS = (StagePairs(2, 4, 1), StagePairs(3, 2, 0))
PAIR_SLOTS, PAIR_PAGES = 2, 3


class Tally:
    """Configurations compared and differences found in one set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.geometries = 0
        self.configurations = 0
        self.differences = 0
        self.first = ""

    def compare(self, ask: Callable[[list[int]], bool], vectors: Counts, wanted: NDArray[np.bool_], what: Any) -> None:
        """Asks for every count vector (a row each) and notes where the answer differs."""
        rows = vectors.tolist()
        got = np.fromiter(map(ask, rows), dtype=np.bool_, count=len(rows))
        self.configurations += len(rows)
        wrong = np.flatnonzero(got != wanted)
        if wrong.size:
            self.differences += int(wrong.size)
            at = int(wrong[0])
            self.first = self.first or f"counts {rows[at]}: closed form {got[at]}, brute force {wanted[at]}, {what}"

    def report(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "set": self.name,
            "geometries": self.geometries,
            "configurations": self.configurations,
            "differences": self.differences,
            "first_difference": self.first,
        }


# --- brute force ---------------------------------------------------------------------------------------------------


def _spans(unit: int, arena: int, extent: Extent) -> Iterator[tuple[int, int]]:
    """Every aligned span of at least one unit in the arena that covers the extent."""
    for begin in range(0, arena, unit):
        for end in range(begin + unit, arena + 1, unit):
            if extent is None or (begin <= extent[0] and extent[1] <= end):
                yield begin, end


@cache
def _ends(unit: int, arena: int, extent: Extent) -> Masks:
    """[begin, count]: positions at or behind the end of some span that begins there and holds so many units."""
    ends = np.zeros((arena + 1, arena // unit + 2), dtype=np.uint32)
    for begin, end in _spans(unit, arena, extent):
        behind = sum(1 << position for position in range(end, arena + 1))
        ends[begin, : (end - begin) // unit + 1] |= np.uint32(behind)
    return ends


@cache
def _most_units(unit: int, arena: int, extent: Extent) -> Counts:
    """[begin]: the most units of a span that begins there; -1: no such span."""
    most = np.full(arena + 1, -1, dtype=np.int64)
    for begin, end in _spans(unit, arena, extent):
        most[begin] = max(most[begin], (end - begin) // unit)
    return most


def _bits(reach: Masks, arena: int) -> Masks:
    """reach[..., position]: 1 where the position is in the mask."""
    return (reach[..., None] >> np.arange(arena + 1, dtype=np.uint32)) & np.uint32(1)


def extend(reach: Masks, unit: int, arena: int, extents: Sequence[Extent]) -> Masks:
    """[extent, counts so far, units]: the reach of the bands so far and one more, for each extent of that one."""
    if not unit:
        assert list(extents) == [None]
        return np.stack((reach, reach), axis=-1)[None]
    ends = np.stack([_ends(unit, arena, extent) for extent in extents])
    ends = ends.reshape(len(extents), *(1,) * reach.ndim, *ends.shape[1:])
    out: Masks = np.bitwise_or.reduce(_bits(reach, arena)[..., None] * ends, axis=-2)
    for index, extent in enumerate(extents):
        if extent is None:
            out[index, ..., 0] |= reach
    return out


def most_of_last(reach: Masks, unit: int, arena: int, extents: Sequence[Extent]) -> Counts:
    """[extent, counts of the bands before]: the most units of the last band; -1: not even none."""
    free: Counts = np.where(reach != 0, 0 if unit else ANY_UNITS, -1)
    if not unit:
        return np.stack([free] * len(extents))
    per_begin = np.stack([_most_units(unit, arena, extent) for extent in extents])
    per_begin = per_begin.reshape(len(extents), *(1,) * reach.ndim, arena + 1)
    most: Counts = np.where(_bits(reach, arena) != 0, per_begin, -1).max(axis=-1)
    for index, extent in enumerate(extents):
        if extent is None:
            np.maximum(most[index], free, out=most[index])
    return most


# --- exhaustive sets -----------------------------------------------------------------------------------------------


def bands_of(sizes: Sequence[int]) -> list[BandGeometry]:
    """Bands of these unit sizes in chain order: state, windows, full; with two, a window and full."""
    windows: list[BandKind] = ["window" for _ in sizes[1:]]
    kinds: list[BandKind] = [*windows, "full"]
    if len(sizes) > 2:
        kinds[0] = "state"
    names = [kind if kind != "window" else f"window:{99 - index}" for index, kind in enumerate(kinds)]
    return [
        BandGeometry(name, kind, size, 99 - index if kind == "window" else 0)
        for index, (name, kind, size) in enumerate(zip(names, kinds, sizes, strict=True))
    ]


def _choices(unit: int, start: int, arena: int, fixed: int) -> list[tuple[int, Extent]]:
    """Extents that a band can have, each with the fixed units it takes at least."""
    choices: list[tuple[int, Extent]] = [(0, None)]
    if not unit or not fixed:
        return choices
    first, top = -(-start // unit), arena // unit
    for low in range(first, top):
        for high in range(low + 1, top + 1):
            cost = 1 if high == low + 1 else 2
            if fixed < 0 or cost <= fixed:
                choices.append((cost, (low * unit, high * unit)))
    return choices


def _by_cost(unit: int, start: int, arena: int, left: int) -> Iterator[tuple[int, list[Extent]]]:
    """Extents that a band can have with so many fixed units left, grouped by how many are left after it."""
    groups: dict[int, list[Extent]] = {}
    for cost, extent in _choices(unit, start, arena, left):
        groups.setdefault(left - cost if left > 0 else left, []).append(extent)
    yield from groups.items()


def _prefixes(
    sizes: Sequence[int], start: int, arena: int, fixed: int
) -> Iterator[tuple[Masks, tuple[Extent, ...], int]]:
    """Every choice of extents of these bands that can be placed: reach, extents, fixed units left."""
    begin = np.array(sum(1 << position for position in range(start, arena + 1)), dtype=np.uint32)
    stack: list[tuple[Masks, tuple[Extent, ...], int]] = [(begin, (), fixed)]
    while stack:
        reach, extents, left = stack.pop()
        if len(extents) == len(sizes):
            yield reach, extents, left
            continue
        for after, choices in _by_cost(sizes[len(extents)], start, arena, left):
            longer = extend(reach, sizes[len(extents)], arena, choices)
            stack += [(row, (*extents, e), after) for row, e in zip(longer, choices, strict=True) if row.any()]


def placements(
    sizes: Sequence[int], start: int, arena: int, fixed: int
) -> Iterator[tuple[list[tuple[Extent, ...]], Counts]]:
    """Every choice of extents, many at a time: the choices, and [choice, counts]: the most units of the last band.

    Choices of all bands but the last that cannot be placed are left out.
    """
    for reach, head, left in _prefixes(sizes[:-2], start, arena, fixed):
        for after, choices in _by_cost(sizes[-2], start, arena, left):
            longer = extend(reach, sizes[-2], arena, choices)
            placed = np.flatnonzero(longer.reshape(len(choices), -1).any(axis=1))
            kept = [choices[index] for index in placed.tolist()]
            if not kept:
                continue
            lasts = [extent for _, extent in _choices(sizes[-1], start, arena, after)]
            most = most_of_last(longer[placed], sizes[-1], arena, lasts)
            yield [(*head, one, last) for last in lasts for one in kept], most.reshape(-1, *most.shape[2:])


def _border(most: Counts) -> tuple[Counts, NDArray[np.bool_]]:
    """Count vectors on both sides of the border behind their index on the first axis, with brute force's answers.

    All ascend by that index.
    """
    feasible = most >= 0
    at = np.argwhere(feasible)
    last = most[feasible][:, None]
    minimal = ~feasible
    for axis in range(1, most.ndim):
        below = np.moveaxis(feasible, axis, 0)
        assert not (below[1:] & ~below[:-1]).any(), "a placement of more units is one of fewer"
        decremented = np.ones_like(below)
        decremented[1:] = below[:-1]
        minimal &= np.moveaxis(decremented, 0, axis)
    first = np.argwhere(minimal)
    none = np.zeros((len(first), 1), dtype=np.int64)
    vectors = np.concatenate((np.hstack((at, last)), np.hstack((at, last + 1)), np.hstack((first, none))))
    wanted = np.zeros(len(vectors), dtype=np.bool_)
    wanted[: len(at)] = True
    order = vectors[:, 0].argsort(kind="stable")
    return vectors[order], wanted[order]


def _grid(most: Counts, last_max: int) -> tuple[Counts, NDArray[np.bool_]]:
    """Every count vector with up to `last_max` units of the last band, as in `_border`."""
    vectors = np.indices((*most.shape, last_max + 1)).reshape(most.ndim + 1, -1).T
    wanted = np.arange(last_max + 1) <= most[..., None]
    return vectors, wanted.reshape(-1)


def sweep_geometry(tally: Tally, sweep: Sweep, sizes: tuple[int, ...], arena: int, start: int) -> None:
    """Compares all configurations of one arena."""
    stage = StageGeometry(arena, start, bands_of(sizes))
    last = sizes[-1]
    for choices, most in placements(sizes, start, arena, sweep.fixed):
        vectors, wanted = _border(most) if sweep.fixed else _grid(most, arena // last + 1 if last else 1)
        bounds = vectors[:, 0].searchsorted(np.arange(len(choices) + 1)).tolist()
        for fixed, (begin, end) in zip(choices, pairwise(bounds), strict=True):
            tally.geometries += 1
            tally.compare(_asker(StageWalk(stage, fixed)), vectors[begin:end, 1:], wanted[begin:end], (stage, fixed))


def _asker(walk: StageWalk) -> Callable[[list[int]], bool]:
    overlap_bytes = walk.overlap_bytes
    return lambda counts: overlap_bytes(counts) <= 0


def _stage_tables(pairs: StagePairs) -> list[tuple[StageGeometry, tuple[Extent, ...], NDArray[np.bool_]]]:
    """Every stage of the set, with the brute force's answer for every vector of 0 to arena_max + 1 units."""
    side = pairs.arena_max + 2
    tables = []
    for arena, sizes in product(range(1, pairs.arena_max + 1), product(range(5), repeat=pairs.bands)):
        stage = StageGeometry(arena, 0, bands_of(sizes))
        for choices, most in placements(sizes, 0, arena, pairs.fixed):
            for axis, size in enumerate(sizes[:-1], start=1):
                # Beyond the listed counts: as the highest one, which is infeasible where units have bytes.
                listed = np.arange(side).clip(max=most.shape[axis] - 1)
                assert not size or most.shape[axis] == arena // size + 2
                most = most.take(listed, axis=axis)
            tables += [
                (stage, fixed, np.arange(side) <= row[..., None]) for fixed, row in zip(choices, most, strict=True)
            ]
    return tables


def sweep_pairs(tally: Tally, pairs: StagePairs, step: Callable[[], None]) -> None:
    """Compares the joint question of every pair of stages, id limits included."""
    tables = _stage_tables(pairs)
    side = pairs.arena_max + 2
    vectors = np.indices((side,) * pairs.bands).reshape(pairs.bands, -1).T
    rows: Counts = np.ascontiguousarray(vectors)
    limits = np.array([PAIR_SLOTS if b.kind == "state" else PAIR_PAGES for b in bands_of((1,) * pairs.bands)])
    within = (rows <= limits).all(axis=1)
    for left, left_fixed, left_fits in tables:
        for right, right_fixed, right_fits in tables:
            geometry = Geometry(1, PAIR_PAGES, PAIR_SLOTS, [left, right])
            form = CapacityForm(geometry, (left_fixed, right_fixed))
            wanted = (left_fits & right_fits).reshape(-1) & within
            tally.geometries += 1
            tally.compare(form.fits, rows, wanted, (geometry, left_fixed, right_fixed))
        step()


# --- random cases --------------------------------------------------------------------------------------------------


def placeable(stage: StageGeometry, extents: Sequence[Extent], counts: Sequence[int]) -> bool:
    """Whether spans for these counts can be placed, by trying every span of every band from every reachable end."""
    arena = stage.arena_bytes
    ends = {stage.chain_start_bytes}
    for band, extent, units in zip(stage.bands, extents, counts, strict=True):
        unit = band.unit_bytes
        if not unit or (not units and extent is None):
            continue
        low, high = extent or (arena, 0)
        nearest = min(ends)
        starts = (begin for begin in range(0, min(low, arena) + 1, unit) if begin >= nearest)
        ends = {
            end
            for begin in starts
            for end in range(max(begin + max(units, 1) * unit, high), arena + 1)
            if not end % unit
        }
        if not ends:
            return False
    return any(end <= arena for end in ends)


def _random_extent(rng: np.random.Generator, unit: int, low: int, high: int) -> Extent:
    """Some whole units inside [low, high), if it has any."""
    first, top = -(-low // unit), high // unit
    if first >= top:
        return None
    ends = sorted(int(value) for value in rng.integers(first, top + 1, size=2))
    return (ends[0] * unit, ends[1] * unit) if ends[0] < ends[1] else None


def _random_stage(rng: np.random.Generator, bands: int) -> tuple[StageGeometry, tuple[Extent, ...], list[int]]:
    """A stage, extents that one layout could have, and counts that fill it to somewhere near its end."""
    start = int(rng.integers(0, 12))
    arena = start + int(rng.integers(20, 160))
    sizes = [int(size) for size in rng.integers(1, 14, size=bands) * (rng.random(bands) > 0.1)]
    cuts = [start, *sorted(int(cut) for cut in rng.integers(start, arena + 1, size=bands - 1)), arena]
    some = rng.random(bands) < rng.choice([0.0, 0.4, 0.9])
    extents: list[Extent] = []
    counts: list[int] = []
    for unit, (low, high), fixed in zip(sizes, pairwise(cuts), some, strict=True):
        extents.append(_random_extent(rng, unit, low, high) if unit and fixed else None)
        counts.append(max(0, (high - low) // unit - int(rng.integers(-1, 3))) if unit else int(rng.integers(0, 9)))
    return StageGeometry(arena, start, bands_of(sizes)), tuple(extents), counts


def random_case(tally: Tally, rng: np.random.Generator) -> None:
    """One geometry of up to three stages, and one count vector near the border."""
    bands = int(rng.integers(2, 6))
    stages, extents, counts = zip(*(_random_stage(rng, bands) for _ in range(int(rng.integers(1, 4)))), strict=True)
    total = [min(column) + int(rng.integers(0, 2)) for column in zip(*counts, strict=True)]
    if rng.random() < 0.5:
        total = list(counts[0])
    pages, slots = (int(rng.integers(1, 30)) for _ in range(2)) if rng.random() < 0.2 else (10**6, 10**6)
    form = CapacityForm(Geometry(1, pages, slots, list(stages)), extents)
    within = all(
        units <= (slots if band.kind == "state" else pages) for units, band in zip(total, form.bands, strict=True)
    )
    wanted = within and all(placeable(stage, fixed, total) for stage, fixed in zip(stages, extents, strict=True))
    tally.geometries += 1
    tally.compare(form.fits, np.array([total]), np.array([wanted]), (stages, extents, pages, slots))


# --- the whole run -------------------------------------------------------------------------------------------------


def run(
    exhaustive: bool,
    random_cases: int,
    seed: int,
    arena_max: int = ARENA_MAX,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Counts of configurations and differences per set; `arena_max` below 24 makes the exhaustive sets smaller.

    `progress` is told the pieces of work done and all there are, geometries of very different size.
    """
    work = [
        (sweep, sizes, arena, start)
        for sweep in SWEEPS
        for arena in range(1, min(arena_max, sweep.arena_max) + 1)
        for sizes in product(sweep.sizes, repeat=sweep.bands)
        for start in sweep.starts
        if start < arena
    ]
    work = work if exhaustive else []
    every = len(work) + random_cases
    done = 0
    tallies: dict[str, Tally] = {}
    for sweep, sizes, arena, start in work:
        used = sweep._replace(arena_max=min(arena_max, sweep.arena_max))
        tally = tallies.setdefault(used.text(), Tally(used.text()))
        sweep_geometry(tally, sweep, sizes, arena, start)
        done += 1
        if progress is not None:
            progress(done, every)
    for pairs in PAIRS if exhaustive else ():
        used_pairs = pairs._replace(arena_max=max(1, min(pairs.arena_max, arena_max // 4)))
        tally = tallies.setdefault(used_pairs.text(), Tally(used_pairs.text()))
        sweep_pairs(tally, used_pairs, lambda: None)
    rng = np.random.default_rng(seed)
    drawn = Tally(f"random: 2 to 5 bands on 1 to 3 stages, arenas of up to 171 bytes, seed {seed}")
    for _ in range(random_cases):
        random_case(drawn, rng)
        done += 1
        if progress is not None:
            progress(done, every)
    rows = [tally.report() for tally in tallies.values()] + ([drawn.report()] if random_cases else [])
    return {
        "exhaustive": exhaustive,
        "arena_max": arena_max,
        "random_cases": random_cases,
        "seed": seed,
        "geometries": sum(row["geometries"] for row in rows),
        "configurations": sum(row["configurations"] for row in rows),
        "differences": sum(row["differences"] for row in rows),
        "sets": rows,
    }


def main(argv: Sequence[str] | None = None, prog: str = "python -m tools.feasibility") -> int:
    """The command; exit code 1 when the closed form and brute force differ anywhere."""
    parser = argparse.ArgumentParser(prog=prog, description="closed form against brute force")
    parser.add_argument("--no-exhaustive", action="store_true", help="only random cases")
    parser.add_argument("--random", type=int, default=RANDOM_CASES, metavar="N", help="random larger cases")
    parser.add_argument("--seed", type=int, default=0, help="of the random cases")
    parser.add_argument("--arena-max", type=int, default=ARENA_MAX, metavar="BYTES", help="smaller exhaustive sets")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    options = parser.parse_args(argv)
    began = time.monotonic()
    console = Console(stderr=options.json)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("feasibility", total=None)
        report = run(
            not options.no_exhaustive,
            options.random,
            options.seed,
            options.arena_max,
            lambda done, every: bar.update(task, completed=done, total=every),
        )
    report["seconds"] = round(time.monotonic() - began, 1)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        for row in report["sets"]:
            first = f"; first: {row['first_difference']}" if row["differences"] else ""
            counts = f"{row['configurations']:>13,d} configurations, {row['geometries']:>10,d} geometries"
            console.print(f"{counts}, {row['differences']} differences: {row['set']}{first}")
        total = f"{report['configurations']:,d} configurations, {report['differences']} differences"
        console.print(f"{total}, {report['seconds']} s")
    return 1 if report["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
