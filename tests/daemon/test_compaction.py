"""Compaction worker: it asks when there is something to gain, once at a time, and rests when it gained nothing."""

from __future__ import annotations

import trio

from daemon.compaction import QUIET_STEPS, CompactionWorker, Hint
from daemon.core.inputs import FlushAsked, Input
from daemon.mailbox import BandCounts, BecameIdle, StepSent
from tests.daemon.doubles import TrioClock


def worker() -> CompactionWorker:
    _, hints = trio.open_memory_channel[Hint](1)
    mailbox, _ = trio.open_memory_channel[Input](1)
    return CompactionWorker(TrioClock(), hints, mailbox, 32)


def counts(seq: int, live: int, hole: int) -> BandCounts:
    return BandCounts(seq, [(live, hole, 0, 100)])


def test_nothing_to_gain_nothing_asked() -> None:
    """Without counts, and without holes, neither idleness nor a step leads to a request."""
    made = worker()
    assert not made.wants(BecameIdle(1))
    assert not made.wants(counts(1, 50, 0))
    assert not made.wants(StepSent(2))
    assert not made.wants(BecameIdle(2))


def test_one_hole_is_enough_at_idle_but_not_while_running() -> None:
    """At idle any hole counts; behind a step an eighth of the span must be holes."""
    made = worker()
    made.wants(counts(1, 15, 1))
    assert not made.wants(StepSent(2))
    assert made.wants(BecameIdle(2))
    busy = worker()
    busy.wants(counts(1, 14, 2))
    assert busy.wants(StepSent(2))


def test_one_request_at_a_time() -> None:
    """While the answer is out nothing is asked; once a later step was reported it may be asked again."""
    made = worker()
    made.wants(counts(1, 10, 10))
    assert made.wants(StepSent(2))
    assert not made.wants(StepSent(3))
    made.wants(counts(2, 10, 10))
    assert not made.wants(BecameIdle(2)), "step 2 was sent before the request: its report is no answer"
    made.wants(counts(3, 10, 4))
    assert made.wants(StepSent(4))


def test_a_flush_that_closed_nothing_is_followed_by_rest() -> None:
    """No holes closed: no request for a number of steps, at idle neither, so an idle daemon never loops."""
    made = worker()
    made.wants(counts(1, 10, 10))
    assert made.wants(BecameIdle(1))
    made.wants(counts(2, 10, 10))
    assert not made.wants(BecameIdle(2))
    assert not made.wants(StepSent(1 + QUIET_STEPS))
    assert made.wants(StepSent(2 + QUIET_STEPS))


async def test_the_actor_asks_the_engine() -> None:
    """A wanted flush reaches the engine as FlushAsked with the bound on moves."""
    to_worker, hints = trio.open_memory_channel[Hint](8)
    to_engine, mailbox = trio.open_memory_channel[Input](8)
    made = CompactionWorker(TrioClock(), hints, to_engine, 32)
    for hint in (counts(1, 1, 3), BecameIdle(1), BecameIdle(1)):
        await to_worker.send(hint)
    to_worker.close()
    await made.run()
    to_engine.close()
    asked = [item async for item in mailbox]
    assert [type(item) for item in asked] == [FlushAsked]
    assert isinstance(asked[0], FlushAsked)
    assert asked[0].moves_max == 32
