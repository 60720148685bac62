"""Rows: the columns of every request that is on the ranks, one entry per row, and the snapshot the hot path reads.

Owns which row belongs to whom, its generation, positions, virtual page table, state slots and the newest output
tokens. Must never decide anything, and never loops over rows on the path of a steady decode step. Invariants: a row's
generation rises when it is released, so an entry of an older step names nobody; the rows of `decoding` are exactly
those that get one token in every step of their micro-batch.

    positions of a row   0 ............ scheduled ...... covered ........
                         KV written or      next token   end of the pages
                         in flight          goes here    it has

    page table           0 .... shared ............................ pages
                         the cache's,   its own
                         read only
    units of a window    0 ....... first .......................... pages
                         given back     held, from `shared` on its own
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allocator.capacity import Demand
from allocator.columns import Int32s, Int64s
from daemon.core.requests import Request
from ipc.messages import EXPLICIT, SAMPLE

NO_FLOOR = 2**31 - 1  # `floor` of a row that holds no window back
NO_GRID = 2**31 - 1  # `grid_at` of a row whose states are not kept
NO_MICROBATCH = -1  # of a row whose prefill has not ended
TAIL_TOKENS = 128  # output tokens a row keeps in columns before they move to its request; a power of two

Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that get one token each, ascending, with the columns that do not change while the set does not.

    Immutable and shared between steps; `rows` intp[n], `generations` int32[n], `frontends` int32[n], `requests`
    int64[n]; the byte columns are as `Forward` wants them.
    """

    rows: Rows
    generations: Int32s
    frontends: Int32s
    requests: Int64s
    rows_column: bytes
    generations_column: bytes
    counts_column: bytes
    flags_column: bytes
    slots_column: bytes

    def __len__(self) -> int:
        return len(self.rows)


class RowTable:
    """Columns over `capacity` rows; see the module's drawing. Growing a page table doubles its width.

    `windows` are the tokens of each window band in chain order, `slots_each` the state slots a row owns (0, 1 or 2).
    `explicit`: decode rows bring their tokens along, because the rank that sampled them is not the one that reads them.
    """

    def __init__(
        self,
        capacity: int,
        page_size: int,
        windows: Sequence[int] = (),
        slots_each: int = 0,
        microbatches: int = 1,
        explicit: bool = False,
    ) -> None:
        self.capacity = capacity
        self.page_size = page_size
        self.windows = tuple(windows)
        self.slots_each = slots_each
        self.explicit = explicit
        self.owners: list[Request | None] = [None] * capacity
        self.generation = np.ones(capacity, np.int32)
        self.request = np.zeros(capacity, np.int64)
        self.frontend = np.zeros(capacity, np.int32)
        self.scheduled = np.zeros(capacity, np.int32)  # positions whose KV is written or in flight
        self.covered = np.zeros(capacity, np.int32)  # positions that the pages of its table cover
        self.pages = np.zeros(capacity, np.int32)  # pages in its table
        self.shared = np.zeros(capacity, np.int32)  # of those, the first ones, which the cache owns
        self.window_first = np.zeros((capacity, len(windows)), np.int32)  # per window, first page whose unit it needs
        self.retire_at = np.zeros(capacity, np.int32)  # the next launched position at which a window unit falls out
        self.floor = np.full(capacity, NO_FLOOR, np.int32)  # windows are kept as if the next position were this
        self.slots = np.zeros((capacity, slots_each), np.int32)  # working slot, then checkpoint slot; 0: given away
        self.grid_at = np.full(capacity, NO_GRID, np.int32)  # the next position at which its state is to be kept
        self.left = np.zeros(capacity, np.int32)  # output tokens not launched yet
        self.output = np.zeros(capacity, np.int32)  # output tokens committed
        self.table = np.zeros((capacity, 16), np.int32)
        self.tail = np.zeros((capacity, TAIL_TOKENS), np.int64)
        self.decoding = np.zeros(capacity, np.bool_)
        self.microbatch = np.full(capacity, NO_MICROBATCH, np.int32)
        self.bound = [0] * microbatches  # rows of each micro-batch
        self.releases = 0  # rows released so far: a step launched at this count has no stale entry
        self._free = list(range(capacity))
        self._batches: list[Batch | None] = [None] * microbatches
        self._going: Rows | None = None

    @property
    def free_count(self) -> int:
        """Rows nobody owns."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Rows that somebody owns."""
        return self.capacity - len(self._free)

    def assign(self, request: Request, slots: Int32s) -> int:
        """Give `request` the lowest free row and its state slots; its complete output is in `request.kept`."""
        row = heapq.heappop(self._free)
        assert self.owners[row] is None, "a free row has no owner"
        self.owners[row] = request
        self.request[row] = request.number
        self.frontend[row] = request.group.frontend
        self.scheduled[row] = self.covered[row] = self.pages[row] = self.shared[row] = 0
        self.window_first[row] = 0
        self.retire_at[row] = self.page_size - 1 + min(self.windows, default=0)
        self.floor[row] = NO_FLOOR
        self.grid_at[row] = NO_GRID
        self.slots[row] = slots
        self.output[row] = request.output_tokens
        self.left[row] = request.max_output - request.output_tokens
        self._restore_tail(row, request)
        request.row = row
        return row

    def held(self, row: int) -> list[Int32s]:
        """The ids of what a row owns, per band in chain order; copies."""
        table, shared = self.table[row, : self.pages[row]], int(self.shared[row])
        slots = [self.slots[row][self.slots[row] > 0]] if self.slots_each else []
        windows = [table[max(shared, first) :].copy() for first in self.window_first[row].tolist()]
        return [*slots, *windows, table[shared:].copy()]

    def named_units(self, rows: Rows) -> Demand:
        """Units that the tables of these rows name, whoever owns them, and their slots, per band in chain order.

        A unit counts once per row that names it.
        """
        pages = int(self.pages[rows].sum())
        slots = [self.slots_each * len(rows)] if self.slots_each else []
        return (*slots, *(pages - first for first in self.window_first[rows].sum(axis=0).tolist()), pages)

    def held_units(self, rows: Rows) -> Demand:
        """How many units these rows own together, per band in chain order."""
        pages, shared = self.pages[rows], self.shared[rows]
        slots = [int(np.count_nonzero(self.slots[rows] > 0))] if self.slots_each else []
        first = np.maximum(self.window_first[rows], shared[:, None])
        windows = np.maximum(pages[:, None] - first, 0).sum(axis=0)
        return (*slots, *windows.tolist(), int((pages - shared).sum()))

    def all_named_units(self) -> Demand:
        """The same of all rows together."""
        pages = int(self.pages.sum())
        slots = [self.slots_each * self.used_count] if self.slots_each else []
        return (*slots, *(pages - first for first in self.window_first.sum(axis=0).tolist()), pages)

    def release(self, request: Request) -> list[Int32s]:
        """Take the row back; what it owned is returned per band, and `request.kept` holds all its output again."""
        row = request.row
        assert self.owners[row] is request, "only the owner's row is released"
        assert self.output[row] <= request.max_output, "no token beyond the limit was committed"
        request.output_tokens = int(self.output[row])
        newest = self.newest_output(row)
        if len(newest):
            request.kept.append(newest.tobytes())
        held = self.held(row)
        self.owners[row] = None
        self.request[row] = self.pages[row] = self.shared[row] = 0
        self.window_first[row] = 0
        self.generation[row] += 1
        self.releases += 1
        microbatch = int(self.microbatch[row])
        if self.decoding[row]:
            self.decoding[row] = False
            self._batches[microbatch] = self._going = None
        if microbatch != NO_MICROBATCH:
            self.bound[microbatch] -= 1
            self.microbatch[row] = NO_MICROBATCH
        request.row = -1
        heapq.heappush(self._free, row)
        return held

    def newest_output(self, row: int) -> Int64s:
        """The committed output of a row that its request's `kept` does not hold, at most one tail; a view."""
        return self.tail[row, : self.output[row] % TAIL_TOKENS]

    def bind(self, row: int, microbatch: int) -> None:
        """The row belongs to a micro-batch until it is released."""
        assert self.microbatch[row] == NO_MICROBATCH, "a row is bound once"
        self.microbatch[row] = microbatch
        self.bound[microbatch] += 1

    def start_decoding(self, row: int) -> None:
        """From the next step of its micro-batch on the row gets one token per step."""
        assert self.left[row] > 0, "a decoding row has output left"
        self.decoding[row] = True
        self._batches[self.microbatch[row]] = self._going = None

    def stop_decoding(self, rows: Rows, microbatch: int) -> None:
        """The last token of these rows of a micro-batch is launched; they wait for their results."""
        self.decoding[rows] = False
        self._batches[microbatch] = self._going = None

    def decode_batch(self, microbatch: int) -> Batch:
        """All decoding rows of a micro-batch; the same object until the set changes."""
        batch = self._batches[microbatch]
        if batch is None:
            going = self.decoding if len(self.bound) == 1 else self.decoding & (self.microbatch == microbatch)
            batch = self._batches[microbatch] = self.batch_of(np.flatnonzero(going))
        return batch

    def going(self) -> Rows:
        """The decoding rows of all micro-batches, ascending."""
        if len(self.bound) == 1:
            return self.decode_batch(0).rows
        if self._going is None:
            self._going = np.flatnonzero(self.decoding)
        return self._going

    def newest_tokens(self, rows: Rows) -> bytes:
        """The newest committed output token of each of `rows`, int64."""
        output = self.output[rows]
        assert not len(output) or int(output.min()) > 0, "a decode row has a token to begin from"
        newest: Int64s = self.tail[rows, (output - 1) & (TAIL_TOKENS - 1)]
        return newest.tobytes()

    def batch_of(self, rows: Rows) -> Batch:
        """A batch over chosen rows, for a step that leaves some out."""
        generations, frontends, requests = self.generation[rows], self.frontend[rows], self.request[rows]
        for column in (rows, generations, frontends, requests):
            column.setflags(write=False)  # steps in flight and outputs share them
        return Batch(
            rows=rows,
            generations=generations,
            frontends=frontends,
            requests=requests,
            rows_column=rows.astype(np.int32).tobytes(),
            generations_column=generations.tobytes(),
            counts_column=np.ones(len(rows), np.int32).tobytes(),
            flags_column=bytes([SAMPLE | EXPLICIT if self.explicit else SAMPLE]) * len(rows),
            slots_column=self.working_slots(rows),
        )

    def working_slots(self, rows: Rows) -> bytes:
        """The working state slot of each row, int32; empty for a model without state."""
        return self.slots[rows, 0].tobytes() if self.slots_each else b""

    def append_pages(self, row: int, ids: Int32s) -> int:
        """Append pages to one row's table; returns the index of the first."""
        assert self.owners[row] is not None, "only an owned row holds pages"
        first = int(self.pages[row])
        self._widen(first + len(ids))
        self.table[row, first : first + len(ids)] = ids
        self.pages[row] = first + len(ids)
        self.covered[row] = (first + len(ids)) * self.page_size
        return first

    def append_page_each(self, rows: Rows, ids: Int32s) -> Int32s:
        """Append one page to each of `rows` (no row twice); returns the index of each."""
        indexes = self.pages[rows]
        self._widen(int(indexes.max()) + 1)
        self.table[rows, indexes] = ids
        self.pages[rows] = indexes + 1
        self.covered[rows] += self.page_size
        return indexes

    def commit(self, rows: Rows, tokens: Int64s) -> None:
        """Append one committed output token to each of `rows` (no row twice)."""
        before = self.output[rows]
        self.output[rows] = before + 1
        place = before & (TAIL_TOKENS - 1)
        self.tail[rows, place] = tokens
        for row in rows[place == TAIL_TOKENS - 1].tolist():
            owner = self.owners[row]
            assert owner is not None, "tokens are committed to owned rows"
            owner.kept.append(self.tail[row].tobytes())

    def _restore_tail(self, row: int, request: Request) -> None:
        """Put the part of the kept output behind the last whole tail back into the columns."""
        part = request.output_tokens % TAIL_TOKENS
        if not part:
            return
        kept = b"".join(request.kept)
        whole = len(kept) - part * 8
        self.tail[row, :part] = np.frombuffer(kept[whole:], np.int64)
        request.kept = [kept[:whole]] if whole else []

    def _widen(self, pages: int) -> None:
        width = self.table.shape[1]
        if pages > width:
            wider = np.zeros((self.capacity, max(pages, 2 * width)), np.int32)
            wider[:, :width] = self.table
            self.table = wider
