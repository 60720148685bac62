"""A rank's stream that two threads use: nothing is lost, doubled or out of order, and nobody sleeps over a message."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ipc import shared_socket
from ipc.codec import encode
from ipc.errors import StreamBroken
from ipc.messages import Explain, Heartbeat, Report, Step, Stop
from ipc.rank_stream import RankStream
from ipc.streams import RankServer
from tests.ipc.test_streams import joined, report, step

STEPS = 400
ASK_EVERY = 7
UNREAD_MAX = 32  # heartbeats on their way: far from the high-water mark, where a report would have to wait


@contextmanager
def second_thread(work: Callable[[], None]) -> Iterator[threading.Thread]:
    """A thread that runs `work`, which must have ended when the block has."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join(20)
    assert not thread.is_alive(), "the second thread sleeps for ever"


def answer_until_closed(stream: RankStream, taken: list[int]) -> Callable[[], None]:
    """What a work thread does: take steps, report each."""

    def work() -> None:
        while (steps := stream.take_steps(None)) is not None:
            for one in steps:
                taken.append(one.seq)
                assert stream.send_now(report(one.seq))

    return work


async def expect_reports(server: RankServer, last: int) -> None:
    """Reports up to `last` come in order; heartbeats may come between."""
    due = 1
    while due <= last:
        message = await server.recv()
        if isinstance(message, Report):
            assert message.seq == due
            due += 1


async def test_steps_and_all_else_come_to_their_threads_in_order(endpoint: str) -> None:
    """Steps wake the second thread while the loop sends and hears; each of its calls may swallow a wake-up."""
    async with joined(endpoint) as (server, (stream,)):
        assert stream.share()
        taken: list[int] = []
        asked = beats = 0

        async def hear() -> None:
            nonlocal asked
            while asked < STEPS // ASK_EVERY:
                assert isinstance(await stream.recv(), Explain)
                asked += 1
                stream.stand_in(0)  # the loop takes over, and must give back

        async def beat() -> None:
            sent = 0
            while True:
                if sent - beats < UNREAD_MAX:
                    await stream.send(Heartbeat(0, 0, stream.received, stream.reported))
                    sent += 1
                await trio.lowlevel.checkpoint()

        async def serve() -> None:
            nonlocal beats
            for seq in range(1, STEPS + 1):
                server.send_step(seq, encode(step(seq)))
                if seq % ASK_EVERY == 0:
                    server.broadcast(Explain(1))
                while not isinstance(message := await server.recv(), Report):
                    beats += 1
                assert message.seq == seq

        with second_thread(answer_until_closed(stream, taken)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(beat)
                async with trio.open_nursery() as both:
                    both.start_soon(hear)
                    both.start_soon(serve)
                nursery.cancel_scope.cancel()
            await stream.aclose(0)
        assert taken == list(range(1, STEPS + 1))
        assert asked == STEPS // ASK_EVERY


async def test_steps_that_came_before_the_thread_looks_are_its_own(endpoint: str) -> None:
    """The loop reads until there is a worker: what it read is taken first, then what is in the socket."""
    async with joined(endpoint) as (server, (stream,)):
        stream.share()
        for seq in (1, 2):
            server.send_step(seq, encode(step(seq)))
        server.broadcast(Explain(1))
        assert isinstance(await stream.recv(), Explain)
        server.send_step(3, encode(step(3)))
        taken: list[int] = []
        with second_thread(answer_until_closed(stream, taken)):
            await expect_reports(server, 3)
            await stream.aclose(0)
        assert taken == [1, 2, 3]


async def test_a_stop_is_heard_while_the_thread_computes(endpoint: str) -> None:
    """It does not look: the loop stands in, and what it reads of steps is kept for the thread."""
    async with joined(endpoint) as (server, (stream,)):
        stream.share()
        computed = threading.Event()
        left: list[Step] = []

        def work() -> None:
            assert stream.take_steps(None) == [step(1)]
            stream.send_now(report(1))
            computed.wait(20)
            left.extend(stream.take_steps(0) or [])

        with second_thread(work):
            server.send_step(1, encode(step(1)))
            await expect_reports(server, 1)
            server.send_step(2, encode(step(2)))
            server.broadcast(Stop("over"))
            async with trio.open_nursery() as nursery:

                async def hear() -> None:
                    assert await stream.recv() == Stop("over")
                    nursery.cancel_scope.cancel()

                nursery.start_soon(hear)
                while True:  # as the loop does from time to time
                    stream.stand_in(0)
                    await trio.lowlevel.checkpoint()
            computed.set()
        assert left == [step(2)]


async def test_a_closed_stream_wakes_the_thread(endpoint: str) -> None:
    """It is told that nothing comes any more, also when it asks again."""
    async with joined(endpoint) as (_, (stream,)):
        stream.share()
        told: list[list[Step] | None] = []

        def work() -> None:
            for _ in range(2):
                told.append(stream.take_steps(None))

        with second_thread(work):
            await trio.lowlevel.checkpoint()
            await stream.aclose(0)
        assert told == [None, None]
        assert not stream.send_now(report(1)), "there is nothing to send it over"


async def test_a_broken_order_is_the_loops_to_raise(endpoint: str) -> None:
    """Whoever read it: the thread has the steps before it, the loop the reason."""
    async with joined(endpoint) as (server, (stream,)):
        stream.share()
        taken: list[int] = []
        with second_thread(answer_until_closed(stream, taken)):
            server.send_step(1, encode(step(1)))
            await expect_reports(server, 1)
            await server.send(0, 0, step(3))
            with pytest.raises(StreamBroken, match="step 3 came after step 1"):
                await stream.recv()
            await stream.aclose(0)
        assert taken == [1]


async def test_a_wait_ends_after_its_time_or_at_once(endpoint: str) -> None:
    """A forward that is due ends the wait; without time nothing is waited for."""
    async with joined(endpoint) as (_, (stream,)):
        stream.share()
        found: list[list[Step] | None] = []

        def work() -> None:
            found.extend(stream.take_steps(within_s) for within_s in (0, 0.0005))

        with second_thread(work):
            pass
        assert found == [[], []]


@pytest.mark.parametrize("seq", [1, 3])
async def test_a_report_out_of_order_is_not_sent(endpoint: str, seq: int) -> None:
    """A repetition or a hole is left to the loop, which raises."""
    async with joined(endpoint) as (server, (stream,)):
        stream.share()
        for number in (1, 2, 3):
            server.send_step(number, encode(step(number)))
        taken: list[int] = []
        server.broadcast(Explain(1))
        await stream.recv()
        assert stream.send_now(report(1))
        assert not stream.send_now(report(seq))
        with pytest.raises(StreamBroken, match=f"report of step {seq} after step 1"):
            await stream.send(report(seq))
        assert taken == []


class Gate:
    """`select` as the second thread calls it: held up until the loop has done what may swallow the wake-up."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def select(self, readers: list[int], _writers: object, _others: object, within_s: float | None) -> object:
        self.reached.set()
        assert self.open.wait(20)
        return select.select(readers, (), (), within_s)


@pytest.mark.parametrize("loop_does", ["looks", "sends", "reads"])
async def test_a_wake_up_that_the_loop_swallowed_is_made_up_for(
    endpoint: str, loop_does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has found nothing and is about to sleep; a step comes, and the loop is the first to notice."""
    gate = Gate()
    monkeypatch.setattr(shared_socket, "select", gate)
    async with joined(endpoint) as (server, (stream,)):
        stream.share()
        taken: list[int] = []
        with second_thread(answer_until_closed(stream, taken)):
            await trio.to_thread.run_sync(gate.reached.wait)
            server.send_step(1, encode(step(1)))
            server.broadcast(Explain(1))
            if loop_does == "looks":
                while not stream._socket.readable:
                    await trio.lowlevel.checkpoint()
            elif loop_does == "sends":
                while not stream._socket._raw.getsockopt(shared_socket.zmq.EVENTS) & shared_socket.zmq.POLLIN:
                    await trio.lowlevel.checkpoint()
                await stream.send(Heartbeat(0, 0, 0, 0))
            else:
                stream._elsewhere = False  # as when the thread came back while the loop was about to stand in
                assert isinstance(await stream.recv(), Explain)
            gate.open.set()
            await expect_reports(server, 1)
            await stream.aclose(0)
        assert taken == [1]


class Wakings(trio.abc.Instrument):
    """How often each task went on."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps[task.name] = self.steps.get(task.name, 0) + 1


async def test_a_step_does_not_wake_the_loop(endpoint: str) -> None:
    """The loop that waited for messages makes way for the thread once, however many steps come."""
    async with joined(endpoint) as (server, (stream,)), trio.open_nursery() as nursery:
        stream.share()
        nursery.start_soon(stream.recv, name="hear")
        await wait_all_tasks_blocked()
        wakings = Wakings()
        trio.lowlevel.add_instrument(wakings)
        taken: list[int] = []
        with second_thread(answer_until_closed(stream, taken)):
            for seq in range(1, 51):
                server.send_step(seq, encode(step(seq)))
                await server.recv()
            trio.lowlevel.remove_instrument(wakings)
            assert wakings.steps["hear"] <= 2
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await stream.aclose(0)
