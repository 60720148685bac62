"""Every sequence of operations on tiny arenas, up to a depth: no sampling, no luck.

A world is one logical chain, one rank and its device, with at most two forwards in flight. States are told apart by a
canonical form: what lies where, what pends behind which forward in flight, what those forwards touch. A forward counts
by its place among those in flight; bytes are left out (the device finds overlaps by who touches what, whatever the
bytes).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest

from allocator.ops import Flush, Op
from tests.allocator.device_model import DeviceModel
from tests.allocator.worlds import full_geometry, ids

Action = tuple[str, int, bool]  # operation, its number, whether the step has a forward


class World:
    """One state; `actions` lists what can happen, `act` makes it happen."""

    def __init__(self, units: int) -> None:
        # Imported here so that a pickled world names only importable classes.
        from allocator.checks import OFF, Checks
        from allocator.logical.chain import LogicalChain
        from allocator.physical.chain import PhysicalChain

        geometry = full_geometry(units, unit_bytes=2)
        self.logical = LogicalChain(geometry, Checks(OFF))
        self.physical = PhysicalChain(geometry, 0, Checks(OFF))
        self.device = DeviceModel(geometry, 0, 0, seed=0, lazy=1.0)
        self.seq = 0
        self.processed = 0
        self.in_flight: list[int] = []

    def actions(self) -> Iterator[Action]:
        room = self.logical.max_extra()
        live = self.logical.live_ids(0).tolist()
        for forward in (False, True):
            if forward and len(self.in_flight) == 2:
                continue
            yield ("nothing", 0, forward)
            yield from (("take", n, forward) for n in range(1, room + 1))
            yield from (("free", page, forward) for page in live)
            if len(live) > 1:
                yield ("free_all", 0, forward)
            yield from (("flush", moves, forward) for moves in (0, 1, 9))
        if self.in_flight:
            yield ("process", 0, False)

    def act(self, action: Action) -> None:
        what, number, forward = action
        if what == "process":
            self.processed = self.in_flight.pop(0)
            return
        ops: list[Op] = []
        if what == "take":
            ops.append(self.logical.take((number,)).op)
        elif what == "free":
            ops.append(self.logical.free([ids(number)]))
        elif what == "free_all":
            ops.append(self.logical.free([self.logical.live_ids(0)]))
        elif what == "flush":
            ops.append(Flush(number))
        self._step(ops, forward)

    def _step(self, ops: list[Op], forward: bool) -> None:
        self.seq += 1
        self.physical.begin_step(self.seq, self.processed)
        self.device.processed(self.processed)
        self.device.execute(self.physical.apply(ops))
        self.physical.end_step()
        live = self.logical.live_ids(0).tolist()
        if forward:
            writes = [(live[-1], 0, 1)] if live else []
            self.device.launch(self.seq, live, writes)
            self.physical.launched(self.seq, {0: ids(*(page for page, _, _ in writes))})
            self.in_flight.append(self.seq)
        self.physical.check()
        assert self.physical.band_counts()[0] == len(live)

    def form(self) -> tuple[object, ...]:
        """The canonical form: equal forms behave alike from here on."""
        band = self.physical._stored[0]
        flying = list(band._steps._in_flight)

        def name(seq: int) -> int:
            return flying.index(seq) if seq in flying else -1

        def batches(pending: object) -> tuple[object, ...]:
            return tuple((name(seq), tuple(np.concatenate(c).tolist())) for seq, c in pending._batches)  # type: ignore[attr-defined]

        flights = tuple(
            (name(f.seq), tuple(sorted(f.reads)), tuple(sorted(f.written_units))) for f in self.device._flights
        )
        return (
            bytes(band._state),
            tuple(band._unit_of.tolist()),
            batches(band._pending),
            batches(band.ledger.vacated),
            tuple(name(int(seq)) for seq in band.ledger._written_by),
            name(band._steps.waited_through),
            len(flying),
            len(self.in_flight),
            flights,
        )


def explore(units: int, depth: int) -> tuple[int, int, bool]:
    """Visits every state within `depth` actions of an empty world; (states, transitions, whether none is left)."""
    first = World(units)
    seen = {first.form()}
    edge = [pickle.dumps(first)]
    transitions = 0
    for _ in range(depth):
        following: list[bytes] = []
        for state in edge:
            for action in list(pickle.loads(state).actions()):
                world = pickle.loads(state)
                world.act(action)
                transitions += 1
                form = world.form()
                if form not in seen:
                    seen.add(form)
                    following.append(pickle.dumps(world))
        edge = following
    return len(seen), transitions, not edge


@pytest.mark.parametrize(("units", "depth", "states_least"), [(2, 7, 1500), (3, 4, 700)])
def test_every_short_history_is_safe(units: int, depth: int, states_least: int) -> None:
    """No history up to the depth loses a byte, overlaps unordered work, or fails to realize what was accepted."""
    states, transitions, _ = explore(units, depth)
    assert states >= states_least, f"{states} states, {transitions} transitions"


def test_an_arena_of_one_unit_is_known_completely() -> None:
    """With one unit the states close: every history of any length has been visited."""
    states, transitions, complete = explore(1, 40)
    assert complete, f"{states} states after {transitions} transitions and still more"
    assert states > 100
