"""A socket that two threads use: what one swallows the other is told of, nothing is repaired, everything is closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import trio
import zmq
from trio.testing import wait_all_tasks_blocked

from ipc import sockets
from ipc.codec import encode
from ipc.errors import StreamBroken
from ipc.messages import Begin, Explain, Heartbeat, Stop
from ipc.rank_stream import RankStream
from ipc.shared_socket import Sort
from ipc.streams import RankServer
from tests.ipc.test_shared_stream import answer_until_closed, expect_reports, second_thread
from tests.ipc.test_streams import GEOMETRY, TOKEN, joined, report, step

BEAT = Heartbeat(0, 0, 0, 0)


async def fill(stream: RankStream) -> None:
    """Heartbeats until there is no room for one, here and on the way."""
    refused = 0
    while refused < 5:
        refused = 0 if stream._socket.try_send([encode(BEAT)]) else refused + 1
        await wait_all_tasks_blocked(0.01)


def drain(server: RankServer, count: int) -> None:
    """The server reads so many messages while no task of this thread runs."""
    raw = server._socket._raw
    while count:
        if raw.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            raw.recv_multipart(zmq.DONTWAIT)
            count -= 1


async def beat(stream: RankStream, sent: list[str]) -> None:
    """One heartbeat, however long it waits for room."""
    await stream.send(BEAT)
    sent.append("beat")


async def test_room_that_the_reading_thread_noticed_wakes_the_sender(endpoint: str) -> None:
    """The loop sleeps for room; the thread that sleeps for steps sees the change first."""
    async with joined(endpoint) as (server, (stream,)):
        stream.share()
        sent: list[str] = []
        with second_thread(answer_until_closed(stream, [])):
            await fill(stream)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(beat, stream, sent)
                await wait_all_tasks_blocked(0.01)
                assert not sent
                drain(server, 500)
            await stream.aclose(0)
        assert sent == ["beat"]


async def test_room_that_a_report_noticed_wakes_who_is_about_to_sleep(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop looked and found no room; before it sleeps the other thread reports, which takes the change along."""
    async with joined(endpoint) as (server, (stream,)):
        stream.share()
        server.send_step(1, encode(step(1)))
        server.broadcast(Explain(1))
        assert isinstance(await stream.recv(), Explain)
        await fill(stream)
        lead, posted = sockets._Lead, []

        def late(direction: int) -> Any:
            if not posted:
                drain(server, 500)
                thread = threading.Thread(target=lambda: posted.append(stream.send_now(report(1))))
                thread.start()
                thread.join()
            return lead(direction)

        monkeypatch.setattr(sockets, "_Lead", late)
        sent: list[str] = []
        await beat(stream, sent)
        assert (posted, sent) == ([True], ["beat"])


async def test_a_step_that_the_loop_read_before_the_thread_sleeps_wakes_it(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread found no step and is about to look into the socket, which the loop has emptied."""
    async with joined(endpoint) as (server, (stream,)):
        stream.share()
        looked, go = threading.Event(), threading.Event()
        read = stream._socket.read

        def late(sort: Sort, within_s: float | None) -> bool:
            looked.set()
            assert go.wait(20)
            return read(sort, within_s)

        monkeypatch.setattr(stream._socket, "read", late)
        taken: list[int] = []
        with second_thread(answer_until_closed(stream, taken)):
            await trio.to_thread.run_sync(looked.wait)
            stream._elsewhere = False  # as when the loop was reading already
            server.send_step(1, encode(step(1)))
            server.broadcast(Explain(1))
            assert isinstance(await stream.recv(), Explain)
            go.set()
            await expect_reports(server, 1)
            await stream.aclose(0)
        assert taken == [1]


async def test_a_broken_order_is_not_repaired(endpoint: str) -> None:
    """Steps behind a hole count for nothing, also those that would fit; a Stop counts."""
    async with joined(endpoint) as (server, (stream,)):
        stream.share()
        for seq in (1, 3, 2, 3):
            await server.send(0, 0, step(seq))
        server.broadcast(Stop("over"))
        with pytest.raises(StreamBroken, match="step 3 came after step 1"):
            await stream.recv()
        assert await stream.recv() == Stop("over")
        assert stream.take_steps(0) == [step(1)]


@pytest.mark.parametrize("shared", [False, True])
async def test_a_second_begin_is_refused(endpoint: str, shared: bool) -> None:
    """There is one per epoch; a worker for another would never be made."""
    async with joined(endpoint) as (server, (stream,)):
        if shared:
            stream.share()
        server.broadcast(Begin(1, GEOMETRY))
        with pytest.raises(StreamBroken, match="a second Begin"):
            await stream.recv()


async def test_the_last_word_counts_while_the_thread_computes(endpoint: str) -> None:
    """Stop, then the daemon's end, and nobody reads but who waits for that end."""
    async with joined(endpoint) as (server, (stream,)):
        stream.share()
        first, computed = threading.Event(), threading.Event()

        def work() -> None:
            stream.take_steps(None)
            first.set()
            computed.wait(20)

        heard: list[object] = []

        async def hear() -> None:
            heard.append(await stream.recv())

        with second_thread(work):
            server.send_step(1, encode(step(1)))
            await trio.to_thread.run_sync(first.wait)
            server.broadcast(Stop("over"))
            await server.aclose(200)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hear)
                await stream.wait_daemon_gone()
                nursery.cancel_scope.cancel()
            computed.set()
        assert heard == [Stop("over")]


async def test_a_closed_stream_wakes_the_loop_too(endpoint: str) -> None:
    """Who waits to hear something that is no step is not left waiting."""
    async with joined(endpoint) as (_, (stream,)):
        stream.share()
        with second_thread(answer_until_closed(stream, [])):
            while not stream._elsewhere:
                await trio.lowlevel.checkpoint()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(closed_in, stream)
                await wait_all_tasks_blocked()
                await stream.aclose(0)


async def closed_in(stream: RankStream) -> None:
    """Hear that there is nothing more to hear."""
    with pytest.raises(trio.ClosedResourceError):
        await stream.recv()


async def test_no_bell_is_left_open(endpoint: str) -> None:
    """A stream that was never shared hangs up by itself, as each try to join does; else the thread does."""
    async with joined(endpoint) as (_, (shared,)):
        shared.share()
        with second_thread(answer_until_closed(shared, [])):
            await shared.aclose(0)
        alone = RankStream(endpoint, stage=0, rank=0, token=TOKEN)
        await alone.aclose(0)
        assert (shared._socket._bell, alone._socket._bell) == (-1, -1)


async def test_a_report_that_finds_no_room_is_the_loops(endpoint: str) -> None:
    """It is not sent, and the loop's `send` waits; nor is one of a step that never came."""
    async with joined(endpoint) as (server, (stream,)):
        stream.share()
        assert not stream.send_now(report(1))
        server.send_step(1, encode(step(1)))
        server.broadcast(Explain(1))
        await stream.recv()
        await fill(stream)
        assert not stream.send_now(report(1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, report(1))
            await expect_reports(server, 1)
        assert stream.reported == 1
