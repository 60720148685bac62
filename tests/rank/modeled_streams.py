"""Streams and events that run nothing: they know what is ordered, and report two accesses that nothing orders.

Every piece of work has a clock: for each line of work (a stream, the host, the engine) how much of it came before. Two
pieces that touch one thing, at least one of them writing, must have one in the other's past; else real streams could
run them in either order, and the result would depend on it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from allocator.columns import Int32s, Int64s

Clock = dict[str, int]


class Access(NamedTuple):
    """One piece of work that touches a thing, the `number`th on its line."""

    name: str
    line: str
    number: int
    writes: bool


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
    """All lines of one rank; waits of a kind in `deaf`, (who waits, for whom), are not heard.

    `races` are pairs of work that touch one thing with nothing between them, found when the later one is issued.
    """

    def __init__(self, deaf: frozenset[tuple[str, str]] = frozenset()) -> None:
        self.deaf = deaf
        self.heard: set[tuple[str, str]] = set()
        self.clocks: defaultdict[str, Clock] = defaultdict(dict)
        self.races: list[str] = []
        self.current = ""
        self._touched: defaultdict[object, list[Access]] = defaultdict(list)

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
        past = dict(clock)
        for thing in reads:
            self._touch(thing, Access(name, line, clock[line], False), past)
        for thing in writes:
            self._touch(thing, Access(name, line, clock[line], True), past)

    def _touch(self, thing: object, work: Access, past: Clock) -> None:
        before = self._touched[thing]
        ordered = True
        for one in before:
            if past.get(one.line, 0) < one.number:
                ordered = False
                if work.writes or one.writes:
                    self.races.append(f"{work.name} does not wait for {one.name}: {thing}")
        if ordered and work.writes:
            before.clear()  # whoever comes after this write comes after them
        before.append(work)


class Units:
    """Unit operations that only note what they touch: bytes of the arena, ("slot", band, slot), ("id", band, id)."""

    def __init__(self, machine: Machine, unit_bytes: Sequence[int]) -> None:
        self.machine = machine
        self.unit_bytes = unit_bytes

    def bytes_of(self, band: int, units: Int32s) -> list[object]:
        """The bytes of these units, by number."""
        size = self.unit_bytes[band]
        return [byte for unit in units.tolist() for byte in range(unit * size, (unit + 1) * size)]

    def open_tables(self, tables: Sequence[Int32s]) -> None:
        """Every id is written."""
        ids = [("id", band, one) for band, table in enumerate(tables) for one in range(table.size)]
        self._note("open", [], ids)

    def zero(self, band: int, units: Int32s) -> None:
        """Units are written."""
        self._note("zero", [], self.bytes_of(band, units))

    def copy(self, band: int, sources: Int32s, targets: Int32s) -> None:
        """Sources are read, targets written."""
        self._note("copy", self.bytes_of(band, sources), self.bytes_of(band, targets))

    def bind(self, band: int, virtual: Int32s, physical: Int32s) -> None:
        """Ids are written."""
        self._note("bind", [], [("id", band, one) for one in virtual.tolist()])

    def to_host(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Units are read, slots written."""
        self._note(f"read {use}", self.bytes_of(band, units), _slots(band, slots))

    def from_host(self, use: int, band: int, units: Int32s, slots: Int64s) -> None:
        """Slots are read, units written."""
        self._note(f"write {use}", _slots(band, slots), self.bytes_of(band, units))

    def _note(self, name: str, reads: Sequence[object], writes: Sequence[object]) -> None:
        assert self.machine.current, f"{name} was issued on no stream"
        self.machine.issue(name, self.machine.current, reads, writes)


class Engine:
    """A transfer engine: each transfer starts when it is called, beside everything; `log` keeps the calls.

    `reads(use, band, virtual)`: whether the peer of a publication reads; by default it writes.
    """

    def __init__(self, machine: Machine, units: Units, reads: Callable[[int, int, Int32s], bool] | None = None) -> None:
        self.machine = machine
        self.units = units
        self.reads = reads or (lambda use, band, virtual: False)
        self.log: list[tuple[object, ...]] = []

    def submit(self, use: int, band: int, units: Int32s) -> None:
        """Units are read."""
        self.log.append(("submit", use, band, units.tolist()))
        self.machine.issue(f"send {use}", f"engine {use}", self.units.bytes_of(band, units))

    def publish(self, use: int, band: int, virtual: Int32s, units: Int32s) -> None:
        """The peer may touch the units."""
        self.log.append(("publish", use, band, virtual.tolist(), units.tolist()))
        touched = self.units.bytes_of(band, units)
        reads, writes = (touched, []) if self.reads(use, band, virtual) else ([], touched)
        self.machine.issue(f"peer {use}", f"engine {use}", reads, writes)

    def wait(self, use: int) -> None:
        """The host goes on behind the transfer."""
        self.log.append(("wait", use))
        self.machine.order("host", "engine", self.machine.clocks[f"engine {use}"])

    def end(self, use: int) -> None:
        """Forgotten."""
        self.log.append(("end", use))


def _slots(band: int, slots: Int64s) -> list[object]:
    return [("slot", band, slot) for slot in slots.tolist()]
