"""Watch: what became of every unit of one band, many steps at once.

Owns the copies of a chain's columns behind each step of a batch, and the comparison of them. Must never decide anything
or change the chain. Invariant: the changes of a batch are those that a comparison after every step would have found.

Comparing two small columns costs little more than the call, so a batch lies in one table: a row for each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from allocator.columns import Bytes8s, Int32s, Int64s
from allocator.physical.band import Band
from allocator.physical.chain import PhysicalChain
from allocator.physical.units import BEYOND, LIVE
from tools.replica import StageReplica
from tools.view.takers import Holding, LeftBehind, Takers
from tools.view.units import FIXED, MOVED, Changes, Mask, is_live


class Watched(StageReplica):
    """A stage whose units can be seen."""

    @property
    def chain(self) -> PhysicalChain:
        """The physical chain: to be read."""
        return self._chain

    def stored(self) -> list[Band]:
        """The bands that this stage stores, in chain order."""
        return list(self._chain._stored)


class Counts(NamedTuple):
    """Per step of a batch, of one band: units that are left behind, that are fixed, that moved."""

    cached: Int64s
    fixed: Int64s
    moved: Int64s


class _Row(NamedTuple):
    """A band behind one step: its span's begin, and the states and holders in its span."""

    begin: int
    codes: Bytes8s
    ids: Int32s


class _Table(NamedTuple):
    """A batch: a row in front of it and one behind each step; columns are positions from `low` on. Ids are only true
    where a unit is live.
    """

    low: int
    width: int
    codes: Bytes8s
    ids: Int32s
    live: Mask


class _Cells(NamedTuple):
    """Cells of a table behind steps (`at`), by steps and positions: where they are (`now`) in the flat table, one row
    further than what was there before the step.
    """

    now: Int64s
    at: Int64s
    position: Int64s


class BandWatch:
    """One band of one stage: as it was in front of the batch, and its copies since."""

    def __init__(self, band: Band, takers: Takers) -> None:
        units, size = band.units, max(1, band.units.capacity)
        self._band, self._takers_of = band, takers
        self._codes = np.full(size, BEYOND, np.uint8)
        self._ids = np.zeros(size, np.int32)
        self._takers = np.zeros(size, np.int32)
        self._places = np.full(units.unit_of.size, -1, np.int64)  # where each id was seen last
        self._span = (0, 0)
        self._left_behind = LeftBehind()
        self._rows: list[_Row] = []
        self._bound: list[tuple[int, Int32s]] = []

    def note(self, bound: Sequence[Int32s]) -> int:
        """Copy what is behind the newest step, which bound these ids; the bytes it took."""
        units = self._band.units
        begin, end = units.begin, units.frontier
        codes = units.state[begin:end].copy()
        if self._band.ledger.uses:
            self._put_fixed(codes, begin)
        self._bound += [(len(self._rows), ids) for ids in bound]
        self._rows.append(_Row(begin, codes, units.holder[begin:end].copy()))
        return codes.size * (codes.itemsize + self._ids.itemsize)

    def settle(self, holding: Holding) -> tuple[Changes, Counts]:
        """What the batch's steps changed; the next batch begins behind it."""
        steps, table = len(self._rows), self._table()
        cells, bound = self._cells(table)
        codes, ids, live = table.codes[cells.now], table.ids[cells.now], table.live[cells.now]
        held, were = table.ids[cells.now - table.width], table.live[cells.now - table.width]
        takers = np.where(live, self._takers_of.history(steps).of(cells.at, np.where(live, ids, 0)), 0)
        before = self._takers_before(cells, takers)
        stays = live & were & (ids == held)
        moved = live & ~stays & ~among(bound, self._keys(cells.at, ids))
        left_behind = self._left_behind.follow(
            (cells.at[live], takers[live]), (cells.at[were], before[were]), holding, steps
        )
        fixed = np.count_nonzero(table.codes.reshape(-1, table.width)[1:] == FIXED, axis=1)
        counts = Counts(left_behind, fixed, np.bincount(cells.at[moved], minlength=steps))
        # An id that a step leaves where it is was freed and taken in it, or is fixed now, or it is told for nothing.
        told = ~stays | (takers != before) | (codes != table.codes[cells.now - table.width])
        positions, shown = cells.position.astype(np.int32), np.where(moved, MOVED, codes)
        own = told & live
        changes = Changes(
            np.bincount(cells.at[told], minlength=steps), positions[told], shown[told], ids[own], takers[own]
        )
        self._go_on(table, positions, takers)
        self._places[ids[live]] = positions[live]  # of two places of an id the later one stays
        return changes, counts

    def look(self, holding: Holding) -> None:
        """Take note of what the band holds already, as one step that bound it all."""
        units = self._band.units
        self.note([units.holder[units.find(LIVE, units.begin, units.frontier)]])
        self.settle(holding)

    def frame(self) -> Changes:
        """All that is not beyond in front of the batch, as changes to an empty band in one step."""
        at = np.flatnonzero(self._codes != BEYOND).astype(np.int32)
        codes = self._codes[at]
        live = at[is_live(codes)]
        return Changes(np.array([at.size]), at, codes, self._ids[live], self._takers[live])

    # --- inside --------------------------------------------------------------------------------------------------

    def _put_fixed(self, codes: Bytes8s, begin: int) -> None:
        live = np.flatnonzero(codes == LIVE)
        pinned = self._band.ledger.on_transfer((live + begin).astype(np.int32))
        if pinned is not None:
            codes[live[pinned]] = FIXED

    def _table(self) -> _Table:
        spans = [self._span, *((row.begin, row.begin + row.codes.size) for row in self._rows)]
        spans = [span for span in spans if span[0] < span[1]]
        low, high = min((span[0] for span in spans), default=0), max((span[1] for span in spans), default=1)
        codes = np.full((len(self._rows) + 1, high - low), BEYOND, np.uint8)
        ids = np.empty((len(self._rows) + 1, high - low), np.int32)
        codes[0], ids[0] = self._codes[low:high], self._ids[low:high]
        for at, row in enumerate(self._rows, 1):
            begin = row.begin - low if row.codes.size else 0
            codes[at, begin : begin + row.codes.size] = row.codes
            ids[at, begin : begin + row.codes.size] = row.ids
        return _Table(low, high - low, codes.ravel(), ids.ravel(), is_live(codes.ravel()))

    def _keys(self, at: Int64s, ids: Int32s) -> Int64s:
        """An id and a step as one number."""
        return ids.astype(np.int64) * len(self._rows) + at

    def _cells(self, table: _Table) -> tuple[_Cells, Int64s]:
        """Cells that differ from those in front of them, and those of ids that were bound; the keys of what was bound,
        ascending.
        """
        width = table.width
        other = table.codes[width:] != table.codes[:-width]
        other |= table.live[width:] & (table.ids[width:] != table.ids[:-width])
        now = np.flatnonzero(other) + width
        bound = self._bound_keys()
        unseen = self._unseen(table, now, bound)
        if unseen.size:
            now = np.unique(np.concatenate([now, unseen]))
        row, column = np.divmod(now, width)
        return _Cells(now, row - 1, column + table.low), bound

    def _bound_keys(self) -> Int64s:
        if not self._bound:
            return np.zeros(0, np.int64)
        at, ids = zip(*self._bound, strict=True)
        keys = self._keys(np.repeat(np.array(at, np.int64), [some.size for some in ids]), np.concatenate(ids))
        keys.sort()
        return keys

    def _unseen(self, table: _Table, now: Int64s, bound: Int64s) -> Int64s:
        """Cells of ids that were bound where they had been before."""
        live = now[table.live[now]]
        keys = self._keys(live // table.width - 1, table.ids[live])
        order = np.argsort(keys)
        keys = keys[order]
        bound = bound[~among(keys, bound)]
        ids, at = np.divmod(bound, len(self._rows))
        places = self._places[ids] - table.low
        if keys.size:
            last = np.searchsorted(keys, bound) - 1
            known = (last >= 0) & (keys[last] >= bound - at)
            places[known] = live[order[last[known]]] % table.width
        inside = (places >= 0) & (places < table.width)
        cells: Int64s = ((at + 1) * table.width + places)[inside]
        return cells[table.live[cells] & (table.ids[cells] == ids[inside])]

    def _takers_before(self, cells: _Cells, takers: Int32s) -> Int32s:
        """The takers that are known of the cells in front of these: those of the change before, or of the batch's."""
        order = np.argsort(cells.position, kind="stable")
        positions = cells.position[order]
        before = self._takers[positions]
        again = np.flatnonzero(positions[1:] == positions[:-1]) + 1
        before[again] = takers[order[again - 1]]
        out = np.empty_like(before)
        out[order] = before
        return out

    def _go_on(self, table: _Table, positions: Int32s, takers: Int32s) -> None:
        """The last row is in front of the next batch."""
        here, last = slice(table.low, table.low + table.width), slice(-table.width, None)
        self._codes[here], self._ids[here] = table.codes[last], table.ids[last]
        self._span = self._rows[-1].begin, self._rows[-1].begin + self._rows[-1].codes.size
        self._takers[positions] = takers  # of two changes of a position the later one stays
        self._rows.clear()
        self._bound.clear()


def among(keys: Int64s, wanted: Int64s) -> Mask:
    """Which of the wanted are among the keys (ascending)."""
    if not keys.size:
        return np.zeros(wanted.size, np.bool_)
    found: Mask = keys[np.minimum(np.searchsorted(keys, wanted), keys.size - 1)] == wanted
    return found
