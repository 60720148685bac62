"""Engine: nothing leaves before it is written, ticks come when they may, orders end the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from allocator.columns import pack_i32
from allocator.geometry import Geometry
from daemon.core import inputs
from daemon.core.inputs import Aborted, Acknowledged, Controlled, EpochBegan, EpochEnded, Input, Reported, Ticked
from daemon.core.outputs import Decided, Outputs, Reply
from daemon.engine import CoreFailed
from daemon.exits import DaemonError, Exit
from daemon.mailbox import ITERATION_INPUTS_MAX, BecameIdle, Collated, StepSent
from ipc import codec
from ipc.messages import Accepted, Finished, Forward, ModelFacts, Step
from journal.reader import read_records
from journal.records import Closed, Digested, Kind
from journal.writer import JournalSettings
from tests.daemon.doubles import Bench

FACTS = ModelFacts("m", "modeled", 100, 64, "uint8")
BEGAN = EpochBegan(1, 1, Geometry(16, 4, 1, []), FACTS)
ACCEPTED = Reply(0, Accepted("a", 1, 1, 8, 5))


def step(seq: int, counts: list[int] | None = None) -> Step:
    forward = None
    if counts is not None:
        forward = Forward(b"", b"", b"", pack_i32(counts), b"", b"", b"", b"", b"", [])
    return Step(1, seq, 0, 0, [], [], forward, b"\1" * 16)


def acknowledged() -> Acknowledged:
    return Acknowledged(2, "fe", [])


def script(table: dict[type[Any], Callable[[Any], Outputs]]) -> Callable[[Input], Outputs]:
    return lambda item: table.get(type(item), lambda _: Outputs())(item)


def kinds(bench: Bench) -> list[Kind]:
    return [Kind(record.kind) for record in read_records(bench.disk.killed())][1:]


async def test_nothing_leaves_before_the_one_write() -> None:
    """Step, replies and tokens of several inputs follow one single write that holds all of their records."""
    bench = Bench(
        script(
            {
                inputs.Acknowledged: lambda _: Outputs([Decided(2, "accepted", 1, "")], [ACCEPTED], wants_tick=True),
                inputs.Ticked: lambda _: Outputs(step=step(1, [3, 4])),
            }
        )
    )
    await bench.engine.iterate([BEGAN, acknowledged(), acknowledged()])
    assert bench.names() == ["write", "written", "expect", "step", "deliver", "deliver"]
    assert kinds(bench) == [
        Kind.EPOCH_BEGAN, Kind.ACKNOWLEDGED, Kind.DECIDED, Kind.ACKNOWLEDGED, Kind.DECIDED, Kind.TICKED, Kind.STEPPED,
    ]  # fmt: skip
    assert bench.events[1] == ("written", True), "an acceptance waits for the disk"
    assert bench.engine.scheduled_tokens == 7


async def test_the_ranks_get_the_bytes_of_the_journal() -> None:
    """A step is encoded once: what is sent is the journaled payload, and the wire's decoder reads it."""
    bench = Bench(script({inputs.Ticked: lambda _: Outputs(step=step(1))}))
    await bench.engine.iterate([BEGAN])
    bench.engine._wants_tick = True
    await bench.engine.iterate([])
    sent = next(data for name, data in bench.events if name == "step")
    stepped = [record for record in read_records(bench.disk.killed()) if record.kind == Kind.STEPPED]
    assert [record.payload for record in stepped] == [sent]
    assert codec.to_rank(sent) == step(1)


async def test_digests_stand_before_their_report() -> None:
    """A collated step is journaled as its digests and then the input made of them."""
    bench = Bench(
        script({inputs.EpochBegan: lambda _: Outputs(wants_tick=True), Ticked: lambda _: Outputs(step=step(1))})
    )
    await bench.engine.iterate([BEGAN])
    digests = [Digested(1, 1, 0, rank, b"", b"", b"") for rank in (0, 1)]
    await bench.engine.iterate([Collated(digests, Reported(3, 1, 1, b"", b"", b""))])
    assert kinds(bench)[-3:] == [Kind.DIGESTED, Kind.DIGESTED, Kind.REPORTED]
    assert bench.engine.in_flight == 0


async def test_a_report_does_not_wait_behind_what_clients_ask() -> None:
    """With the mailbox full of cancels, the next iteration takes the report first, and not all of the cancels."""
    bench = Bench(script({}))
    for number in range(ITERATION_INPUTS_MAX):
        bench.send.send_nowait(Aborted(2, "fe", f"r{number}", "client"))
    bench.engine.order(Collated([], Reported(3, 1, 1, b"", b"", b"")))
    first = await bench.engine._gather()
    assert isinstance(first[0], Collated)
    assert [item.id for item in first[1:] if isinstance(item, Aborted)] == [
        f"r{number}" for number in range(ITERATION_INPUTS_MAX - 1)
    ]


async def test_one_tick_an_iteration_and_none_at_idle(autojump_clock: trio.testing.MockClock) -> None:
    """The loop ticks while the core wants it, once per iteration, and not at all when it does not."""
    wanted = iter([True, True, False])
    seq = iter(range(1, 10))
    bench = Bench(
        script(
            {
                inputs.EpochBegan: lambda _: Outputs(wants_tick=True),
                Ticked: lambda _: Outputs(step=step(next(seq)), wants_tick=next(wanted)),
            }
        )
    )
    await bench.send.send(BEGAN)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.engine.run)
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert sum(isinstance(item, Ticked) for item in bench.core.fed) == 3
    assert bench.names().count("write") == 3, "each tick is an iteration with a write of its own"


async def test_a_due_time_ticks_once_it_is_reached(autojump_clock: trio.testing.MockClock) -> None:
    """`due_ns` wakes the loop at that time and not before."""
    bench = Bench(script({inputs.Acknowledged: lambda item: Outputs(due_ns=bench.clock.now_ns() + 5_000_000_000)}))
    await bench.send.send(acknowledged())
    started = bench.clock.now_ns()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.engine.run)
        await trio.sleep(50)
        nursery.cancel_scope.cancel()
    ticks = [item.now_ns - started for item in bench.core.fed if isinstance(item, Ticked)]
    assert len(ticks) == 1
    assert ticks[0] == pytest.approx(5e9, rel=1e-3)


async def test_a_core_that_raises_leaves_its_inputs_on_disk() -> None:
    """The input that the core failed on and all before it are written; no step of the iteration was sent."""

    def fail(item: Any) -> Outputs:
        raise AssertionError("broken")

    bench = Bench(script({inputs.Controlled: fail, Acknowledged: lambda _: Outputs(step=step(1))}))
    with pytest.raises(CoreFailed, match=r"Controlled.*broken") as caught:
        await bench.engine.iterate([BEGAN, acknowledged(), Controlled(4, "drain")])
    assert caught.value.code == Exit.INTERNAL
    assert kinds(bench) == [Kind.EPOCH_BEGAN, Kind.ACKNOWLEDGED, Kind.STEPPED, Kind.CONTROLLED]
    assert "step" not in bench.names()


async def test_what_was_said_before_the_core_failed_is_told() -> None:
    """An end that stands in the journal reaches the gateway and the observer."""
    ended = Reply(0, Finished("a", 0, 1, "abort", "", 1, 0))

    def answer(item: Input) -> Outputs:
        assert not isinstance(item, Controlled), "broken"
        return script({Acknowledged: lambda _: Outputs(replies=[ended])})(item)

    bench = Bench(answer)
    with pytest.raises(CoreFailed):
        await bench.engine.iterate([BEGAN, acknowledged(), Controlled(4, "drain")])
    assert bench.names() == ["write", "written", "deliver"], "told once it is written"
    bench.engine._observed.close()
    assert [reply async for seen in bench.observed for reply in seen.replies()] == [ended]


async def test_a_failure_elsewhere_takes_nothing_more() -> None:
    """`leave` ends the loop at once: what waits in the mailbox and in orders is neither written nor fed, none ends."""
    bench = Bench(script({}))
    bench.core.live = 3
    await bench.engine.iterate([BEGAN])
    bench.events.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.engine.run)
        await trio.testing.wait_all_tasks_blocked()
        bench.send.send_nowait(acknowledged())
        bench.engine.order(Controlled(4, "flush_cache"))
        bench.engine.leave()
        bench.engine.fault("later", [])
    assert bench.names() == []
    assert bench.core.fed == [BEGAN]


async def test_an_epoch_that_ends_is_followed_by_another() -> None:
    """Between the two nothing is in flight, reports of the old one are not taken, and steps count from 1 again."""
    table = {Ticked: lambda item: Outputs(step=step(1))}
    bench = Bench(script(table))
    await bench.engine.iterate([BEGAN])
    bench.engine._wants_tick = True
    await bench.engine.iterate([])
    assert (bench.engine.sent_seq, bench.engine.in_flight) == (1, 1)
    record = Digested(1, 1, 0, 0, b"a" * 16, b"b" * 16, b"")
    bench.engine.end_epoch(1, "rank 0.0 was killed", [record])
    late = Collated([record], Reported(5, 1, 1, b"", b"", b"", []))
    await bench.engine.iterate([*bench.engine._orders, late])
    assert (bench.engine.epoch, bench.engine.in_flight) == (0, 0)
    assert isinstance(bench.core.fed[-1], EpochEnded)
    assert bench.core.fed[-1].recovers
    assert kinds(bench)[-2:] == [Kind.DIGESTED, Kind.EPOCH_ENDED]
    await bench.engine.iterate([msgspec.structs.replace(BEGAN, epoch=2)])
    assert (bench.engine.epoch, bench.engine.sent_seq) == (2, 0)


async def test_one_failed_write_costs_nothing() -> None:
    """When one write fails, the records go to a new segment and everything is sent as if nothing had happened."""
    bench = Bench(script({Acknowledged: lambda _: Outputs(replies=[ACCEPTED])}), faults={"forever": False})
    await bench.engine.iterate([acknowledged()])
    assert "deliver" in bench.names()
    assert kinds(bench) == [Kind.ACKNOWLEDGED]


async def test_a_lost_disk_ends_the_daemon_with_nothing_sent() -> None:
    """When no segment takes the records, the step and the replies stay here and the exit code is the journal's."""
    bench = Bench(script({Acknowledged: lambda _: Outputs(replies=[ACCEPTED], step=None)}), faults={"forever": True})
    with pytest.raises(DaemonError, match="cannot be written") as caught:
        await bench.engine.iterate([acknowledged()])
    assert caught.value.code == Exit.JOURNAL
    assert bench.names() == []


async def test_policy_always_is_on_disk_before_it_leaves() -> None:
    """With `always` the sync comes between the write and whatever leaves."""
    bench = Bench(script({Acknowledged: lambda _: Outputs(replies=[ACCEPTED])}), settings=JournalSettings("always"))
    bench.writer.sync()
    bench.events.clear()
    await bench.engine.iterate([acknowledged()])
    assert bench.names() == ["write", "sync", "written", "deliver"]
    assert bench.writer.synced_through == bench.writer.last_sequence


async def test_drain_ends_when_what_runs_has_ended(autojump_clock: trio.testing.MockClock) -> None:
    """After a drain the loop goes on until nothing is live and every step is reported, then returns."""
    bench = Bench(script({}))
    bench.core.live = 1
    ended = trio.Event()

    async def run() -> None:
        await bench.engine.run()
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        bench.engine.drain()
        await trio.sleep(10)
        assert not ended.is_set()
        bench.core.live = 0
        await bench.send.send(acknowledged())
        with trio.fail_after(1):
            await ended.wait()
    assert [item.order for item in bench.core.fed if isinstance(item, Controlled)] == ["drain"]


async def test_drain_expires(autojump_clock: trio.testing.MockClock) -> None:
    """What still runs at the drain timeout is ended then: not earlier, not much later."""
    bench = Bench(script({}), drain_timeout_s=7)
    bench.core.live = 1

    def expire(item: Input) -> Outputs:
        if isinstance(item, Controlled) and item.order == "drain_expired":
            bench.core.live = 0
        return Outputs()

    bench.core.answer = expire
    started = trio.current_time()
    bench.engine.drain()
    await bench.engine.run()
    assert trio.current_time() - started == pytest.approx(7, abs=0.01)


async def test_stop_overtakes_the_mailbox_and_does_not_wait_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    """A stop is fed before what waits in the mailbox; a step that is never reported delays the end by two seconds."""
    bench = Bench(
        script({inputs.EpochBegan: lambda _: Outputs(wants_tick=True), Ticked: lambda _: Outputs(step=step(1))})
    )
    await bench.engine.iterate([BEGAN])
    await bench.send.send(acknowledged())
    bench.engine.stop()
    started = trio.current_time()
    await bench.engine.run()
    assert [type(item) for item in bench.core.fed[2:4]] == [Controlled, Acknowledged]
    assert trio.current_time() - started == pytest.approx(2, abs=0.01)


async def test_a_second_signal_does_not_wait(autojump_clock: trio.testing.MockClock) -> None:
    """`hurry` ends at once, with a step unreported."""
    bench = Bench(
        script({inputs.EpochBegan: lambda _: Outputs(wants_tick=True), Ticked: lambda _: Outputs(step=step(1))})
    )
    await bench.engine.iterate([BEGAN])
    bench.engine.stop()
    bench.engine.hurry()
    started = trio.current_time()
    await bench.engine.run()
    assert trio.current_time() == started


async def test_fault_records_the_digests_and_ends_the_epoch() -> None:
    """A fault writes the differing digests, ends the epoch, hands out the ends, and returns from `run`."""
    finished = Reply(0, Finished("a", 0, 1, "fault", "", 1, 0))
    bench = Bench(script({EpochEnded: lambda _: Outputs(replies=[finished])}))
    await bench.engine.iterate([BEGAN])
    bench.engine.fault("rank 0.0 is gone", [Digested(1, 1, 0, 0, b"", b"", b"")])
    await bench.engine.run()
    assert kinds(bench)[-2:] == [Kind.DIGESTED, Kind.EPOCH_ENDED]
    assert bench.names()[-1] == "deliver"


async def test_an_old_epoch_is_ignored() -> None:
    """A collated step of another epoch leaves no record and reaches no core."""
    bench = Bench(script({}))
    await bench.engine.iterate([BEGAN, Collated([], Reported(3, 9, 1, b"", b"", b""))])
    assert kinds(bench) == [Kind.EPOCH_BEGAN]


async def test_close_writes_totals_and_state() -> None:
    """The life's last record has the core's totals and the digest of its state."""
    bench = Bench(script({}))
    bench.engine.close("drain")
    last = list(read_records(bench.disk.killed()))[-1].decode()
    assert isinstance(last, Closed)
    assert (last.why, last.totals, last.state) == ("drain", {"accepted_total": 0}, b"\7" * 16)


async def test_hints_tell_steps_and_one_idleness() -> None:
    """Each step gives a hint; becoming idle gives one, however many inputs follow."""
    bench = Bench(
        script({inputs.EpochBegan: lambda _: Outputs(wants_tick=True), Ticked: lambda _: Outputs(step=step(1))})
    )
    await bench.engine.iterate([BEGAN])
    await bench.engine.iterate([Collated([], Reported(3, 1, 1, b"", b"", b""))])
    await bench.engine.iterate([acknowledged()])
    bench.engine._hints.close()
    assert [hint async for hint in bench.hints] == [StepSent(1), BecameIdle(1)]
