"""Heat: the arena over time as a picture, address by address, at as many steps as a screen has columns.

Owns the sampling: which addresses and which steps are looked at. Must never look at a chain: it reads the packed
blocks, so what it shows is what a page finds in them. Invariant: the shares of a row add up to at most POINTS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Bytes8s
from allocator.physical.units import BEYOND, HOLE, LIVE
from tools.view.arena import COUNTS
from tools.view.film import Film, Stretch
from tools.view.requests import HOLDS
from tools.view.units import FIXED, BlockReader, Board, Mask

ROWS = 160  # of the picture of one stage
POINTS = 15  # addresses that are looked at in a row: shares fit four bits
SAMPLES_MAX = 2400
GAP_SHARE = 0.25  # a gap that nothing touched is left out when it is at least this much of the arena
MARGIN_SHARE = 0.04  # of what was touched, shown beside it
NO_BAND = 15

Bytes = NDArray[np.int64]
Piece = tuple[int, int]


class Heat(NamedTuple):
    """`planes`: uint8[stage][3, ROWS, samples]. First: used, cached; second: hole, pending (vacated and fenced too);
    third: band (NO_BAND: none), fixed; each 4 bits, the first one high.
    """

    steps: list[int]
    planes: list[Bytes8s]


def pieces(stretches: Sequence[Stretch]) -> list[list[Piece]]:
    """Per stage the byte ranges of its arena that are worth showing: all of it, or without a large untouched gap."""
    stages = max((len(stretch.geometry.stages) for stretch in stretches), default=0)
    return [_stage_pieces(stretches, stage) for stage in range(stages)]


def heat(film: Film, shown: Sequence[Sequence[Piece]]) -> Heat:
    """The picture of all stages."""
    steps = sampled_steps(film.position)
    planes = [np.zeros((3, ROWS, len(steps)), np.uint8) for _ in shown]
    for plane in planes:
        plane[2] = NO_BAND << 4
    wanted = np.asarray(steps, np.int64)
    lookers: dict[int, list[list[_BandPoints]]] = {}
    active = ActiveAt(film)
    for at, stretch, board in boards(film, wanted):
        if id(stretch) not in lookers:
            lookers[id(stretch)] = [_points(stretch, stage, shown[stage]) for stage in range(len(shown))]
        looks = lookers[id(stretch)]
        column = int(np.searchsorted(wanted, at))
        holding = active.at(at)
        for stage, bands in enumerate(looks):
            planes[stage][:, :, column] = _rows(bands, board, holding)
    return Heat(steps, planes)


def sampled_steps(steps: int) -> list[int]:
    """Every step, or every n-th."""
    return list(range(0, steps, max(1, -(-steps // SAMPLES_MAX))))


def boards(film: Film, wanted: NDArray[np.int64]) -> Iterator[tuple[int, Stretch, Board]]:
    """The board behind each wanted step (positions, ascending), read from the packed blocks."""
    for block in film.writer.blocks:
        stretch = next(one for one in film.stretches if one.first <= block.first < one.end)
        reader, board = BlockReader(block, len(stretch.bands)), Board.empty([band[2] for band in stretch.bands])
        for at in wanted[(wanted >= block.first) & (wanted < block.first + block.steps)].tolist():
            reader.apply(board, at - block.first + 1)
            yield at, stretch, board


class ActiveAt:
    """Which requests hold memory as running ones behind a step; asked with rising positions."""

    def __init__(self, film: Film) -> None:
        self._columns = film.requests.phases
        self._active = np.zeros(max(film.requests.lives, default=0) + 1, np.bool_)
        self._next = 0

    def at(self, position: int) -> Mask:
        """By request number; the array is the same at every call."""
        columns = self._columns
        while self._next < len(columns.at) and columns.at[self._next] <= position:
            self._active[columns.requests[self._next]] = columns.phases[self._next] in HOLDS
            self._next += 1
        return self._active


class _BandPoints(NamedTuple):
    """Where one band lies under the points of a picture: its place on the board, its index, points, positions."""

    place: int
    band: int
    points: NDArray[np.int64]
    positions: NDArray[np.int64]


def _points(stretch: Stretch, stage: int, shown: Sequence[Piece]) -> list[_BandPoints]:
    total = sum(end - begin for begin, end in shown)
    offsets = (np.arange(ROWS * POINTS) * 2 + 1) * total // (2 * ROWS * POINTS)
    addresses, before = np.zeros_like(offsets), 0
    for begin, end in shown:
        inside = (offsets >= before) & (offsets < before + end - begin)
        addresses[inside] = offsets[inside] - before + begin
        before += end - begin
    found = []
    for place, (at, band, capacity, anchor, direction) in enumerate(stretch.bands):
        if at != stage:
            continue
        positions = (addresses // stretch.geometry.stages[stage].bands[band].unit_bytes - anchor) * direction
        points = np.flatnonzero((positions >= 0) & (positions < capacity))
        found.append(_BandPoints(place, band, points, positions[points]))
    return found


def _rows(bands: Sequence[_BandPoints], board: Board, holding: Mask) -> Bytes8s:
    """One column of the picture: uint8[3, ROWS]."""
    shares = np.zeros((5, ROWS * POINTS), np.bool_)  # used, cached, hole, pending, fixed
    owner = np.zeros((len(bands), ROWS), np.int64)
    for number, band in enumerate(bands):
        codes = board.codes[band.place][band.positions]
        takers = board.takers[band.place][band.positions]
        held = holding[np.minimum(takers, holding.size - 1)] & (takers < holding.size)
        live = codes == LIVE
        kinds = (live & held, live & ~held, codes == HOLE, (codes > LIVE) & (codes < FIXED), codes == FIXED)
        for kind, mask in enumerate(kinds):
            shares[kind, band.points[mask]] = True
        inside = np.zeros(ROWS * POINTS, np.int64)
        inside[band.points[codes != BEYOND]] = 1
        owner[number] = inside.reshape(ROWS, POINTS).sum(axis=1)
    counts = shares.reshape(5, ROWS, POINTS).sum(axis=2, dtype=np.uint8)
    names = np.array([band.band for band in bands] or [NO_BAND], np.uint8)
    of = np.full(ROWS, NO_BAND, np.uint8)
    if bands:
        of = np.where(owner.max(axis=0) > 0, names[owner.argmax(axis=0)], NO_BAND).astype(np.uint8)
    out: Bytes8s = np.stack([counts[0] << 4 | counts[1], counts[2] << 4 | counts[3], of << 4 | counts[4]])
    return out


def _stage_pieces(stretches: Sequence[Stretch], stage: int) -> list[Piece]:
    here = [stretch for stretch in stretches if stage < len(stretch.geometry.stages)]
    arena = max(stretch.geometry.stages[stage].arena_bytes for stretch in here)
    touched = [(0, max(stretch.geometry.stages[stage].chain_start_bytes for stretch in here)), (arena, arena)]
    for stretch in here:
        for place, (at, band, _, anchor, direction) in enumerate(stretch.bands):
            if at == stage:
                columns = stretch.counts[place * len(COUNTS) : (place + 1) * len(COUNTS)]
                begins, ends = np.asarray(columns[-2], np.int64), np.asarray(columns[-1], np.int64)
                some = ends > begins
                if some.any():
                    size = stretch.geometry.stages[stage].bands[band].unit_bytes
                    reach = (int(begins[some].min()), int(ends[some].max()) - 1)
                    first, last = sorted(anchor + direction * position for position in reach)
                    touched.append((first * size, (last + 1) * size))
    return _without_gaps(sorted(touched), arena)


def _without_gaps(touched: Sequence[Piece], arena: int) -> list[Piece]:
    """[0, arena) without the large gaps between what was touched, with a margin beside each."""
    out, begin, reached = list[Piece](), 0, 0
    margin = int(sum(end - first for first, end in touched) * MARGIN_SHARE)
    for first, end in touched:
        if first - reached >= arena * GAP_SHARE:
            out.append((begin, reached + margin))
            begin = first - margin if first < arena else arena
        reached = max(reached, end)
    if begin < arena:
        out.append((begin, arena))
    return out
