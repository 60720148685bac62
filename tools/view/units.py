"""Units: what became of every unit of every band from one step to the next, as exact changes.

Owns the form in which changes are packed. Must never look at a chain. Invariant: `Board` with all changes of a block
applied, up to any step of it, is the chain's state behind it.

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

from allocator.columns import Bytes8s, Int32s, Int64s
from allocator.physical.units import BEYOND, LIVE, STATE_NAMES
from tools.view.pack import Column, Numbers, pack_columns, read_columns, squeeze, unsqueeze

FIXED = len(STATE_NAMES)
MOVED = FIXED + 1
CODES = (*STATE_NAMES, "fixed", "moved")
"""What a unit became: the chain's states; live where a peer knows its address; live, and came here by a move."""

BLOCK_STEPS = 1024
BLOCK_CHANGES = 400_000  # a block ends early, so that a page has any step within some milliseconds

Mask = NDArray[np.bool_]


class Changes(NamedTuple):
    """What changed in one band in a run of steps: how much in each, then all of it. `ids` and `takers` have an entry
    for each that is live then.
    """

    counts: Int64s
    positions: Int32s
    codes: Bytes8s
    ids: Int32s
    takers: Int32s


def is_live(codes: Bytes8s) -> Mask:
    """Which codes say that a unit is bound."""
    live: Mask = (codes == LIVE) | (codes >= FIXED)
    return live


@dataclass(slots=True)
class _Growing:
    """The changes of one band in the block that is being filled."""

    changes: list[Changes] = field(default_factory=list)

    def columns(self) -> tuple[Column, ...]:
        counts, positions, codes, ids, takers = map(np.concatenate, zip(*self.changes, strict=True))
        return Column(counts), Column(positions, differences=True), Column(codes), Column(ids), Column(takers)


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
        self._bands = [_Growing([changes]) for changes in frame]

    def add(self, steps: int, changes: Sequence[Changes]) -> None:
        """The next steps' changes."""
        for growing, some in zip(self._bands, changes, strict=True):
            growing.changes.append(some)
            self._changes += some.positions.size
        self._steps += steps

    @property
    def room(self) -> int:
        """Steps that the block has place for; 0: the next step belongs into another block."""
        return max(0, BLOCK_STEPS - self._steps) if self._changes < BLOCK_CHANGES else 0

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
