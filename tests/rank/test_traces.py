"""Traces: what a rank says of its newest steps, op by op and band by band."""

from __future__ import annotations

from allocator.columns import pack_i32
from allocator.effects import Bind, Effect, HostRead, WaitForward, Zero
from allocator.geometry import BandGeometry
from allocator.ops import Flush, Take
from daemon.rank.traces import LATE, STEPS_KEPT, Trace, Traces, in_words
from tools.rank_driver import Driver, settings

BANDS = [BandGeometry("window:8", "window", 256, 8), BandGeometry("full", "full", 256, 0)]


def test_effects_are_told_under_the_op_and_band_that_they_are_of() -> None:
    """An op of two bands has two entries, one without effects says so, waits of the launch before come first."""
    traces = Traces(BANDS)
    effects: list[Effect] = [
        WaitForward(3),
        Zero(0, pack_i32([4])),
        Bind(1, pack_i32([7, 8]), pack_i32([20, 21])),
        Bind(0, pack_i32([7]), pack_i32([4])),
    ]
    traces.add(Trace(9, b"l" * 16, b"p" * 16, [Take([]), Flush(2)], effects, [1, 4, 4]))
    (step,) = traces.explain()
    assert (step.seq, step.logical, step.layout) == (9, b"l" * 16, b"p" * 16)
    told = [(op.index, op.kind, op.band, op.effects.partition(" (#")[0]) for op in step.ops]
    assert told == [
        (0, LATE, "", "WaitForward seq 3"),
        (0, "Take", "window:8", "Zero units 4; Bind virtual 7 physical 4"),
        (0, "Take", "full", "Bind virtual 7, 8 physical 20, 21"),
        (1, "Flush", "", "nothing"),
    ]


def test_columns_that_are_too_long_to_show_differ_by_their_hash() -> None:
    """Two texts are equal only where the effects are; host slots are 64-bit columns."""
    one = in_words([Zero(0, pack_i32(range(1, 100)))])
    other = in_words([Zero(0, pack_i32([*range(1, 99), 500]))])
    assert one.partition("#")[0] == other.partition("#")[0] == "Zero units 1, 2, 3, 4, 5, 6, 7, 8 and 91 more ("
    assert one != other
    slots = (5).to_bytes(8, "little")
    assert in_words([HostRead(2, 1, pack_i32([3]), slots)]).startswith("HostRead use 2 units 3 slots 5 (#")


def test_the_newest_steps_are_kept() -> None:
    """A worker's ring holds as many steps as are told, whole, however many went by."""
    driver = Driver(settings())
    driver.generate(0, [40, 41, 42], STEPS_KEPT + 5)
    steps = driver.worker.traces.explain()
    assert [step.seq for step in steps] == [report.seq for report in driver.reports[-STEPS_KEPT:]]
    assert all(len({(op.index, op.band) for op in step.ops}) == len(step.ops) for step in steps)
    taken = [op for step in steps for op in step.ops if op.kind == "Take"]
    assert taken
    assert all(op.band == "full" and "Bind virtual" in op.effects for op in taken)
