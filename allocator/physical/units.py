"""The columns of one band: the state of every position, who holds it, and where each virtual id lies.

Owns the only writes to those columns, and the recount that proves them. Must never decide which position is used.
Invariants: every position is in exactly one state; `unit_of` and `holder` are inverse on live positions; positions
outside the span [begin, frontier) are beyond, those inside are not; `live_below` agrees with the states.

    position   0 ...... begin ............................ frontier ...... capacity
               beyond   live | hole | pending | vacated | fenced   beyond
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from allocator.checks import Checks, some
from allocator.columns import I32, Int32s, Int64s
from allocator.free_set import FreeSet

BEYOND, HOLE, LIVE, PENDING, VACATED, FENCED = range(6)
"""States of a position: outside the span; free inside it; bound; freed behind a forward; moved from behind one; free,
but a host copy or our transfer engine may still touch it."""

STATE_NAMES = ("beyond", "hole", "live", "pending", "vacated", "fenced")
SHIFT = 7
BLOCK = 1 << SHIFT
_LOG_MAX = 64


class Units:
    """Positions [0, capacity) of a band; unit of position p: `anchor` + `direction` * p."""

    def __init__(
        self, name: str, capacity: int, anchor: int, direction: int, virtual_ids: int, resting: int, checks: Checks
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.anchor, self.direction = anchor, direction
        self.resting = resting
        self.checks = checks
        self.begin = self.frontier = 0
        self.live = 0
        self.fenced = 0
        blocks = -(-capacity // BLOCK) + 1
        # `full`, never `zeros`: memory is touched here, once, and not page by page while requests are served.
        self.state = np.full(blocks * BLOCK, BEYOND, dtype=np.uint8)  # whole blocks, so that a rank query can gather
        self.holder = np.full(capacity, 0, dtype=np.int32)  # virtual id of each live position
        self.unit_of = np.full(virtual_ids + 1, resting, dtype=np.int32)  # physical unit of each virtual id
        self.holes = FreeSet(capacity, filled=False)
        self._live_blocks = np.full(blocks, 0, dtype=np.int64)
        self._bound_log: list[Int32s] = []
        self._left_log: list[Int32s] = []

    # --- reading -------------------------------------------------------------------------------------------------

    def units(self, positions: Int32s) -> Int32s:
        """Physical units of positions."""
        return positions + self.anchor if self.direction > 0 else self.anchor - positions

    def positions(self, ids: Int32s) -> Int32s:
        """Positions of bound virtual ids, in their order."""
        units = self.unit_of[ids]
        return units - self.anchor if self.direction > 0 else self.anchor - units

    def bound(self, ids: Int32s) -> NDArray[np.bool_]:
        """For each virtual id, whether it is bound."""
        out: NDArray[np.bool_] = self.unit_of[ids] != self.resting
        return out

    def resting_column(self, size: int) -> bytes:
        """An int32 column of `size` times the resting unit."""
        return bytes(size * I32.itemsize) if not self.resting else self.resting.to_bytes(I32.itemsize, "little") * size

    def find(self, code: int, low: int, high: int) -> Int32s:
        """Positions in [low, high) with this state, ascending."""
        return (np.flatnonzero(self.state[low:high] == code) + low).astype(np.int32)

    def live_before(self, positions: Int64s) -> Int64s:
        """For each position, how many live ones lie before it; costs the span's blocks plus 128 bytes for each."""
        places = np.clip(positions, self.begin, self.frontier)
        blocks = places >> SHIFT
        first = self.begin >> SHIFT
        counts = self._count_blocks()[first : (self.frontier >> SHIFT) + 1]
        starts = np.cumsum(counts) - counts
        rows = self.state.reshape(-1, BLOCK)[blocks] == LIVE
        rows &= np.arange(BLOCK) < (places & (BLOCK - 1))[:, None]
        out: Int64s = starts[blocks - first] + rows.sum(axis=1, dtype=np.int64)
        return out

    def live_below(self, units: Int64s) -> Int64s:
        """For each unit index, how many live units lie below it in the arena."""
        if self.direction > 0:
            return self.live_before(units - self.anchor)
        return self.live - self.live_before(self.anchor - units + 1)

    # --- changes -------------------------------------------------------------------------------------------------

    def bind(self, positions: Int32s, ids: Int32s) -> Int32s:
        """Positions that are no holes any more become the units of these ids; the units."""
        units = self.units(positions)
        self.state[positions] = LIVE
        self.holder[positions] = ids
        self.unit_of[ids] = units
        self.live += ids.size
        self._log_blocks(self._bound_log, positions)
        return units

    def unbind(self, ids: Int32s) -> Int32s:
        """Frees the ids at once; their positions, ascending, which the caller gives a state."""
        positions = self.positions(ids)
        positions.sort()
        self.unit_of[ids] = self.resting
        self._leave(positions)
        return positions

    def move(self, sources: Int32s, targets: Int32s) -> Int32s:
        """Live positions trade places with ones that are no holes any more; ids, in the order of `sources`."""
        assert sources.size == targets.size
        ids = self.holder[sources]
        self._leave(sources)
        self.bind(targets, ids)
        return ids

    def become(self, code: int, positions: Int32s) -> None:
        """Positions (ascending) that are in no set any more are now holes, pending, vacated, fenced or beyond."""
        assert code != LIVE
        self.state[positions] = code
        if code == HOLE:
            self.holes.add(positions)
        elif code == FENCED:
            self.fenced += positions.size

    def unfence(self, positions: Int32s) -> None:
        """Fenced positions (ascending) are holes."""
        self.fenced -= positions.size
        assert self.fenced >= 0
        self.become(HOLE, positions)

    def drop(self, low: int, high: int) -> None:
        """Holes and fenced positions of [low, high) are beyond; the caller moves the span's end."""
        if low >= high:
            return
        holes = self.find(HOLE, low, high)
        self.holes.remove(holes)
        self.state[holes] = BEYOND
        if self.fenced:
            fenced = self.find(FENCED, low, high)
            self.fenced -= fenced.size
            self.state[fenced] = BEYOND

    def _leave(self, positions: Int32s) -> None:
        self.live -= positions.size
        assert self.live >= 0
        self._log_blocks(self._left_log, positions)

    def _log_blocks(self, log: list[Int32s], positions: Int32s) -> None:
        """Positions for which the live counts per block are to change: few small changes cost as much as one.

        A large change is counted at once, so that no search pays for what others took.
        """
        log.append(positions)
        if len(log) >= _LOG_MAX or positions.size >= BLOCK:
            self._count_blocks()

    def _count_blocks(self) -> NDArray[np.int64]:
        """Live positions per block."""
        for log, count in ((self._bound_log, np.add), (self._left_log, np.subtract)):
            if log:
                count.at(self._live_blocks, np.concatenate(log) >> SHIFT, 1)
                log.clear()
        return self._live_blocks

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self, pending: Int32s, vacated: Int32s) -> None:
        """Recounts every unit and both directions of the id table; raises InvariantBroken where they differ."""
        inside = self.state[self.begin : self.frontier]
        if (inside == BEYOND).any() or (self.state != BEYOND).sum() != inside.size:
            self._conserve(f"the span is not [{self.begin}, {self.frontier})")
        if not 0 <= self.begin <= self.frontier <= self.capacity:
            self._conserve(f"the span [{self.begin}, {self.frontier}) leaves [0, {self.capacity})")
        ids = np.flatnonzero(self.unit_of != self.resting).astype(np.int32)
        positions = self.positions(ids)
        if ids.size != self.live or (self.state[positions] != LIVE).any() or (self.holder[positions] != ids).any():
            self._conserve(f"bound ids {some(ids)} and {self.live} live units differ")
        if int((self.state == LIVE).sum()) != self.live:
            self._conserve("live positions and their count differ")
        for code, column in ((HOLE, self.holes.members()), (PENDING, pending), (VACATED, vacated)):
            if not np.array_equal(np.flatnonzero(self.state == code), column):
                self._conserve(f"{STATE_NAMES[code]} units and their record differ")
        if int((self.state == FENCED).sum()) != self.fenced:
            self._conserve("fenced units and their count differ")
        blocks = (self.state == LIVE).reshape(-1, BLOCK).sum(axis=1)
        if not self.holes.check() or not np.array_equal(blocks, self._count_blocks()):
            self._conserve("the set of holes or the count per block is damaged")

    def _conserve(self, detail: str) -> None:
        self.checks.broken("chain.byte_conservation", f"band {self.name}: {detail}")
