"""Units: what became of every unit of every band from one step to the next, as exact changes.

Owns the watching of a stage's chain and the form in which changes are packed. Must never decide anything or change the
chain. Invariant: `Board` with all changes of a block applied, up to any step of it, is the chain's state behind it.

A block is a frame (all that is not beyond when it begins) and the changes of up to BLOCK_STEPS steps. For every band
that a stage stores, in order of stages and bands, it has five columns: how many changes the frame and each step have,
positions (ascending within a step), what each became (`CODES`), and for those that are live then two more: the virtual
id that is there, and the request that took it (0: not known).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Bytes8s, Int32s
from allocator.physical.band import Band
from allocator.physical.chain import PhysicalChain
from allocator.physical.units import BEYOND, LIVE, STATE_NAMES
from tools.replica import StageReplica
from tools.view.pack import Column, Numbers, pack_columns, read_columns, squeeze, unsqueeze

FIXED = len(STATE_NAMES)
MOVED = FIXED + 1
CODES = (*STATE_NAMES, "fixed", "moved")
"""What a unit became: the chain's states; live where a peer knows its address; live, and came here by a move."""

BLOCK_STEPS = 1024
BLOCK_CHANGES = 400_000  # a block ends early, so that a page has any step within some milliseconds

Mask = NDArray[np.bool_]


class Watched(StageReplica):
    """A stage whose units can be seen."""

    @property
    def chain(self) -> PhysicalChain:
        """The physical chain: to be read."""
        return self._chain

    def stored(self) -> list[Band]:
        """The bands that this stage stores, in chain order."""
        return list(self._chain._stored)


class Changes(NamedTuple):
    """What changed in one band in one step. `ids` and `takers` have an entry for each that is live now.

    `left`: takers of the units that were live and are not, or are another's now. `fixed`: how many more are fixed.
    """

    positions: Int32s
    codes: Bytes8s
    ids: Int32s
    takers: Int32s
    left: Int32s
    fixed: int


def is_live(codes: Bytes8s) -> Mask:
    """Which codes say that a unit is bound."""
    live: Mask = (codes == LIVE) | (codes >= FIXED)
    return live


class BandWatch:
    """One band of one stage as it was behind the step before."""

    def __init__(self, band: Band) -> None:
        units = band.units
        self._band = band
        self._codes = np.full(units.capacity, BEYOND, np.uint8)
        self._ids = np.zeros(units.capacity, np.int32)
        self._takers = np.zeros(units.capacity, np.int32)
        self._places = np.full(units.unit_of.size, -1, np.int32)  # position of each id that was live
        self._bound_now = np.zeros(units.unit_of.size, np.bool_)
        self._begin = self._end = 0

    def changes(self, bound: Sequence[Int32s], taker_of: Int32s) -> Changes:
        """What the newest step changed; `bound` are the ids that it bound, `taker_of` the request of each id."""
        units = self._band.units
        low, high = min(units.begin, self._begin), max(units.frontier, self._end)
        if units.begin == units.frontier:
            low, high = self._begin, self._end
        elif self._begin == self._end:
            low, high = units.begin, units.frontier
        now, before = units.state[low:high], self._codes[low:high]
        if self._band.ledger.uses:
            now = self._with_fixed(now, low)
        live = is_live(now)
        other = now != before
        other |= live & (units.holder[low:high] != self._ids[low:high])
        for some in bound:  # freed and taken in one step, an id may be where it was, and another's
            places = units.positions(some[units.bound(some)])
            other[places - low] |= taker_of[units.holder[places]] != self._takers[places]
        at = (np.flatnonzero(other) + low).astype(np.int32)
        codes, bound_at = now[at - low], live[at - low]
        ids = units.holder[at][bound_at]
        old = self._codes[at]
        left, fixed = self._takers[at[is_live(old)]], int((codes == FIXED).sum()) - int((old == FIXED).sum())
        takers = taker_of[ids]
        shown = codes.copy()
        shown[bound_at] = np.where(self._moved(at[bound_at], ids, bound), MOVED, codes[bound_at])
        self._note(at, codes, bound_at, ids, takers)
        self._begin, self._end = units.begin, units.frontier
        return Changes(at, shown, ids, takers, left, fixed)

    def frame(self) -> Changes:
        """All that is not beyond, as changes to an empty band."""
        at = np.flatnonzero(self._codes != BEYOND).astype(np.int32)
        codes = self._codes[at]
        live = at[is_live(codes)]
        return Changes(at, codes, self._ids[live], self._takers[live], live[:0], 0)

    def _moved(self, at: Int32s, ids: Int32s, bound: Sequence[Int32s]) -> Mask:
        """Which live units came from elsewhere, and not by an op that bound their id."""
        for some in bound:
            self._bound_now[some] = True
        places = self._places[ids]
        moved: Mask = (places >= 0) & (places != at) & ~self._bound_now[ids]
        for some in bound:
            self._bound_now[some] = False
        return moved

    def _note(self, at: Int32s, codes: Bytes8s, bound_at: Mask, ids: Int32s, takers: Int32s) -> None:
        gone = self._ids[at[is_live(self._codes[at])]]
        self._places[gone] = -1
        self._codes[at] = codes
        self._ids[at], self._takers[at] = 0, 0
        self._ids[at[bound_at]], self._takers[at[bound_at]] = ids, takers
        self._places[ids] = at[bound_at]

    def _with_fixed(self, now: Bytes8s, low: int) -> Bytes8s:
        live = np.flatnonzero(now == LIVE)
        pinned = self._band.ledger.on_transfer((live + low).astype(np.int32))
        if pinned is None or not pinned.any():
            return now
        shown = now.copy()
        shown[live[pinned]] = FIXED
        return shown


@dataclass(slots=True)
class _Growing:
    """The columns of one band in the block that is being filled."""

    counts: list[int] = field(default_factory=list)
    positions: list[Int32s] = field(default_factory=list)
    codes: list[Bytes8s] = field(default_factory=list)
    ids: list[Int32s] = field(default_factory=list)
    takers: list[Int32s] = field(default_factory=list)

    def add(self, changes: Changes) -> None:
        self.counts.append(changes.positions.size)
        if changes.positions.size:
            self.positions.append(changes.positions)
            self.codes.append(changes.codes)
            self.ids.append(changes.ids)
            self.takers.append(changes.takers)

    def columns(self) -> tuple[Column, ...]:
        return (
            Column(self.counts),
            Column(_joined(self.positions), differences=True),
            Column(_joined(self.codes)),
            Column(_joined(self.ids)),
            Column(_joined(self.takers)),
        )


class Block(NamedTuple):
    """A finished block: its first step, how many steps it has, and its squeezed chunk."""

    first: int
    steps: int
    squeezed: bytes


class BlockWriter:
    """Fills blocks, one epoch after the other; a block never reaches over an epoch's end."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._bands: list[_Growing] = []
        self._first = self._steps = self._changes = 0

    def begin(self, first: int, frame: Sequence[Changes]) -> None:
        """Close the block and begin one in front of step `first`, with the state of all bands as it is there."""
        self.end()
        self._first, self._steps, self._changes = first, 0, 0
        self._bands = [_Growing() for _ in frame]
        for growing, changes in zip(self._bands, frame, strict=True):
            growing.add(changes)

    def add(self, step: Sequence[Changes]) -> None:
        """The next step's changes."""
        for growing, changes in zip(self._bands, step, strict=True):
            growing.add(changes)
            self._changes += changes.positions.size
        self._steps += 1

    @property
    def full(self) -> bool:
        """Whether the next step belongs into another block."""
        return self._steps >= BLOCK_STEPS or self._changes >= BLOCK_CHANGES

    def end(self) -> None:
        """Close the block; one without a step is dropped."""
        if self._steps:
            kinds = zip(*(growing.columns() for growing in self._bands), strict=True)
            chunk = pack_columns(column for kind in kinds for column in kind)
            self.blocks.append(Block(self._first, self._steps, squeeze(chunk)))
        self._steps, self._bands = 0, []


@dataclass(slots=True)
class Board:
    """The state of all stored bands of all stages, out of a block: `codes`, `ids`, `takers` by band and position."""

    codes: list[Bytes8s]
    ids: list[Int32s]
    takers: list[Int32s]

    @classmethod
    def empty(cls, capacities: Sequence[int]) -> Board:
        """All beyond."""
        return cls(
            [np.full(size, BEYOND, np.uint8) for size in capacities],
            [np.zeros(size, np.int32) for size in capacities],
            [np.zeros(size, np.int32) for size in capacities],
        )


class BlockReader:
    """A block's columns, to be applied to a board step by step, or many steps at once."""

    def __init__(self, block: Block, bands: int) -> None:
        columns = list(read_columns(unsqueeze(block.squeezed)))
        assert len(columns) == 5 * bands, f"{len(columns)} columns of {bands} bands"
        self._bands = [_Read(*columns[at::bands]) for at in range(bands)]
        self._at = 0

    def apply(self, board: Board, through: int) -> None:
        """Apply the frame (0) and the steps of the block up to its step number `through`, from 1."""
        for band, read in enumerate(self._bands):
            read.apply(board.codes[band], board.ids[band], board.takers[band], self._at, through + 1)
        self._at = through + 1


class _Read:
    """One band's columns, with where each step's changes begin."""

    def __init__(self, counts: Numbers, positions: Numbers, codes: Numbers, ids: Numbers, takers: Numbers) -> None:
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._positions, self._codes, self._ids, self._takers = positions, codes, ids, takers
        live = is_live(codes.astype(np.uint8))
        self._live_starts = np.concatenate([[0], np.cumsum(live)])

    def apply(self, codes: Bytes8s, ids: Int32s, takers: Int32s, first: int, end: int) -> None:
        """Steps [first, end) of the block; of two changes of a position the later one stays."""
        low, high = int(self._starts[first]), int(self._starts[end])
        if low == high:
            return
        at, became = self._positions[low:high], self._codes[low:high].astype(np.uint8)
        live = is_live(became)
        own = slice(int(self._live_starts[low]), int(self._live_starts[high]))
        for column, values in ((ids, self._ids[own]), (takers, self._takers[own])):
            spread = np.zeros(at.size, np.int64)
            spread[live] = values
            column[at] = spread
        became[became == MOVED] = LIVE
        codes[at] = became


def _joined(parts: list[Int32s] | list[Bytes8s]) -> object:
    return np.concatenate(parts) if parts else ()
