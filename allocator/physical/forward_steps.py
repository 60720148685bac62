"""Forwards in flight, as logical progress: which were launched, which were processed, which the stream has waited for.

Owns the order of one rank's steps and the batches of units that pend behind a forward. Must never ask whether an event
has fired: everything here moves by the step stream alone, so all ranks move alike.

    begin(seq) -> [apply ops] -> end(seq) -> launch(seq)?   then the next begin

Invariants: steps are dense; nothing is taken or freed between a step's end and its launch; forwards are processed in
launch order; with no forward in flight nothing pends. A forward has *retired* for the schedule stream once it was
processed, or once that stream has been told to wait for it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from allocator.checks import Checks
from allocator.columns import Int32s


class ForwardSteps:
    """Progress of one rank. Seqs are those of steps; 0 stands for none."""

    __slots__ = ("_checks", "_in_flight", "_open", "processed_through", "seq", "waited_through")

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._in_flight: deque[int] = deque()
        self._open = False
        self.seq = 0
        self.processed_through = 0
        self.waited_through = 0

    @property
    def newest_in_flight(self) -> int:
        """The newest launched forward that is not processed: what a freed unit pends behind (0: nothing)."""
        return self._in_flight[-1] if self._in_flight else 0

    @property
    def retired_through(self) -> int:
        """Work issued on the schedule stream from now on runs after every forward up to this one."""
        return max(self.processed_through, self.waited_through)

    def begin(self, seq: int, processed_through: int) -> bool:
        """Opens step `seq`; returns whether a forward was processed since the last one."""
        if self._open or seq != self.seq + 1:
            state = "still open" if self._open else "ended"
            self._checks.broken("chain.step_order", f"step {seq} cannot begin: step {self.seq} is {state}")
        if processed_through != self.processed_through and processed_through not in self._in_flight:
            flying = ", ".join(map(str, self._in_flight)) or "none"
            detail = (
                f"step {seq} says processed through {processed_through}; in flight: {flying}, "
                f"processed before: {self.processed_through}"
            )
            self._checks.broken("chain.step_order", detail)
        moved = processed_through > self.processed_through
        assert processed_through < seq, "a step cannot process its own forward"
        while self._in_flight and self._in_flight[0] <= processed_through:
            self._in_flight.popleft()
        self.seq = seq
        self.processed_through = processed_through
        self._open = True
        return moved

    def require_open(self, what: str) -> None:
        """Units may change only inside a step: between a step's end and its launch nothing is taken or freed."""
        if not self._open:
            self._checks.broken("chain.step_order", f"{what} after step {self.seq} ended and before the next began")

    def end(self) -> None:
        """Closes the open step; its forward, if it has one, is launched next."""
        self.require_open("end")
        self._open = False

    def launch(self, seq: int) -> None:
        """The forward of the step that has just ended is launched."""
        if self._open or seq != self.seq or (self._in_flight and self._in_flight[-1] == seq):
            detail = (
                f"forward {seq} cannot be launched: the newest step is {self.seq}, in flight {list(self._in_flight)}"
            )
            self._checks.broken("chain.step_order", detail)
        assert not self._in_flight or self._in_flight[-1] < seq
        self._in_flight.append(seq)

    def wait(self, seq: int) -> bool:
        """The schedule stream must run after forward `seq`; returns whether that needs a new wait."""
        assert seq <= self.newest_in_flight, "only a launched forward can be waited for"
        if seq <= self.retired_through:
            return False
        self.waited_through = seq
        return True


class PendingBatches:
    """Positions of one band that pend, whole batches keyed by the forward behind which they pend, oldest first."""

    __slots__ = ("_batches", "units")

    def __init__(self) -> None:
        self._batches: deque[tuple[int, list[Int32s]]] = deque()
        self.units = 0

    def add(self, seq: int, positions: Int32s) -> None:
        """Positions pend behind forward `seq`, the newest so far."""
        assert seq > 0
        if self._batches and self._batches[-1][0] == seq:
            self._batches[-1][1].append(positions)
        else:
            assert not self._batches or self._batches[-1][0] < seq
            self._batches.append((seq, [positions]))
        self.units += positions.size

    def release_through(self, seq: int) -> Int32s | None:
        """Removes the batches of forwards up to `seq`; their positions ascending, or None."""
        released: list[Int32s] = []
        while self._batches and self._batches[0][0] <= seq:
            released += self._batches.popleft()[1]
        return self._out(released)

    def settle(self, units: int) -> tuple[int, Int32s]:
        """Removes whole batches, oldest first, until they hold `units`; the newest forward among them, positions."""
        assert 0 < units <= self.units
        settled: list[Int32s] = []
        seq, held = 0, 0
        while held < units:
            seq, columns = self._batches.popleft()
            settled += columns
            held += sum(column.size for column in columns)
        positions = self._out(settled)
        assert positions is not None
        return seq, positions

    def pick(self, units: int) -> list[Int32s]:
        """Removes exactly `units`, of the oldest batches first, the lowest of a batch: their positions."""
        assert 0 < units <= self.units
        picked: list[Int32s] = []
        while units:
            seq, columns = self._batches.popleft()
            positions = np.sort(np.concatenate(columns))
            if positions.size > units:
                self._batches.appendleft((seq, [positions[units:]]))
                positions = positions[:units]
            picked.append(positions)
            units -= positions.size
            self.units -= positions.size
        return picked

    def positions(self) -> Int32s:
        """All pending positions, ascending: for checks."""
        columns = [column for _, batch in self._batches for column in batch]
        return np.sort(np.concatenate(columns)) if columns else np.empty(0, dtype=np.int32)

    def _out(self, columns: list[Int32s]) -> Int32s | None:
        if not columns:
            return None
        positions = np.sort(np.concatenate(columns)) if len(columns) > 1 else columns[0]
        self.units -= positions.size
        assert self.units >= 0
        return positions
