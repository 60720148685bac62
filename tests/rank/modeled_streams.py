"""Streams and events that run nothing: they know what is ordered, and report two accesses that nothing orders.

Every piece of work has a clock: for each line of work (a stream, the host, the engine) how much of it came before. Two
pieces that touch one thing, at least one of them writing, must have one in the other's past; else real streams could
run them in either order, and the result would depend on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from allocator.columns import Int32s, Int64s

Clock = dict[str, int]


class Access(NamedTuple):
    """One piece of work: what it reads and writes, and everything before it."""

    name: str
    line: str
    number: int
    past: Clock
    reads: frozenset[object]
    writes: frozenset[object]


class Event:
    """The end of what its line had issued when it was recorded."""

    def __init__(self, machine: Machine, line: str, past: Clock) -> None:
        self.machine, self.line, self.past = machine, line, past

    def synchronize(self) -> None:
        """The host goes on behind it."""
        self.machine.order("host", self.line, self.past)


class Stream:
    """One line of work."""

    def __init__(self, machine: Machine, line: str) -> None:
        self.machine, self.line = machine, line

    def wait_event(self, event: Event) -> None:
        """What follows here is behind the event."""
        self.machine.order(self.line, event.line, event.past)

    def record_event(self) -> Event:
        """Behind all that was issued here so far."""
        return Event(self.machine, self.line, dict(self.machine.clocks[self.line]))


class Machine:
    """All lines of one rank; waits of a kind in `deaf`, (who waits, for whom), are not heard."""

    def __init__(self, deaf: frozenset[tuple[str, str]] = frozenset()) -> None:
        self.deaf = deaf
        self.heard: set[tuple[str, str]] = set()
        self.lines = ("forward", "schedule", "copies", "engine", "host")
        self.clocks: dict[str, Clock] = {line: {} for line in self.lines}
        self.work: list[Access] = []
        self.current = ""

    def stream(self, line: str) -> Any:
        """The stream of that name."""
        return Stream(self, line)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Work inside goes to the stream."""
        before, self.current = self.current, stream.line
        yield
        self.current = before

    def order(self, line: str, behind: str, past: Clock) -> None:
        """What `line` issues from now on comes after `past`."""
        self.heard.add((line, behind))
        if (line, behind) not in self.deaf:
            mine = self.clocks[line]
            for other, count in past.items():
                mine[other] = max(mine.get(other, 0), count)

    def issue(self, name: str, line: str, reads: Sequence[object] = (), writes: Sequence[object] = ()) -> None:
        """One piece of work; the host issues it, so whatever the host knew to be over is before it."""
        clock = self.clocks[line]
        for other, count in self.clocks["host"].items():
            clock[other] = max(clock.get(other, 0), count)
        clock[line] = clock.get(line, 0) + 1
        self.work.append(Access(name, line, clock[line], dict(clock), frozenset(reads), frozenset(writes)))

    def races(self) -> list[str]:
        """Pairs of work, in the order in which they were issued, that touch one thing with nothing between them."""
        found = []
        for at, later in enumerate(self.work):
            for earlier in self.work[:at]:
                touched = later.writes & (earlier.reads | earlier.writes) | later.reads & earlier.writes
                if touched and later.past.get(earlier.line, 0) < earlier.number:
                    found.append(f"{later.name} does not wait for {earlier.name}: {sorted(map(str, touched))}")
        return found


class Units:
    """Unit operations that only note what they touch: (band, unit), ("slot", band, slot) and ("id", band, id)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def open_tables(self, tables: Sequence[Int32s]) -> None:
        """Every id is written."""
        ids = [("id", band, one) for band, table in enumerate(tables) for one in range(table.size)]
        self._note("open", [], ids)

    def zero(self, band: int, units: Int32s) -> None:
        """Units are written."""
        self._note("zero", [], _units(band, units))

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Sources are read, targets written."""
        self._note("copy", _units(band, sources), _units(band, targets))

    def bind(self, band: int, virtual: Int32s, physical: Int32s) -> None:
        """Ids are written."""
        self._note("bind", [], [("id", band, one) for one in virtual.tolist()])

    def to_host(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Units are read, slots written."""
        self._note(f"read {use}", _units(band, units), _slots(band, slots))

    def from_host(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Slots are read, units written."""
        self._note(f"write {use}", _slots(band, slots), _units(band, units))

    def _note(self, name: str, reads: Sequence[object], writes: Sequence[object]) -> None:
        assert self.machine.current, f"{name} was issued on no stream"
        self.machine.issue(name, self.machine.current, reads, writes)


class Engine:
    """A transfer engine: it starts when it is called, beside everything; `log` keeps the calls."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.log: list[tuple[object, ...]] = []

    def submit(self, use: int, band: int, units: Int32s) -> None:
        """Units are read."""
        self.log.append(("submit", use, band, units.tolist()))
        self.machine.issue(f"send {use}", "engine", _units(band, units))

    def publish(self, use: int, band: int, virtual: Int32s, units: Int32s) -> None:
        """The peer may write the units."""
        self.log.append(("publish", use, band, virtual.tolist(), units.tolist()))
        self.machine.issue(f"peer {use}", "engine", [], _units(band, units))

    def wait(self, use: int) -> None:
        """The host goes on behind the transfer."""
        self.log.append(("wait", use))
        self.machine.order("host", "engine", self.machine.clocks["engine"])

    def end(self, use: int) -> None:
        """Forgotten."""
        self.log.append(("end", use))


def _units(band: int, units: Int32s) -> list[object]:
    return [(band, unit) for unit in units.tolist()]


def _slots(band: int, slots: Int64s) -> list[object]:
    return [("slot", band, slot) for slot in slots.tolist()]
