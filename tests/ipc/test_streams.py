"""Rank streams: who may speak, and in which order."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from allocator.geometry import BandGeometry, Geometry, StageGeometry
from ipc.codec import encode, to_rank
from ipc.errors import Dismissed, RankGone, RankStalled, StreamBroken, VersionMismatch
from ipc.handshake import version_problem
from ipc.messages import Begin, Heartbeat, Hello, Join, RankSettings, Report, Step, Stop
from ipc.rank_stream import RankStream
from ipc.sockets import connect_dealer
from ipc.streams import RankServer

TOKEN = "proof"
SETTINGS = RankSettings("m", "m", "float32", 16, 4, 64, 0, 0, 500_000)
GEOMETRY = Geometry(16, 8, 4, [StageGeometry(1 << 20, 64, [BandGeometry("full", "full", 64)])])
DIGEST = bytes(16)


def step(seq: int, epoch: int = 1) -> Step:
    """A step without ops or forward."""
    return Step(epoch, seq, 0, 0, [], [], None, DIGEST)


def report(seq: int, epoch: int = 1, rank: int = 0) -> Report:
    """A report of a step without forward."""
    return Report(epoch, seq, 0, rank, b"", b"", b"", DIGEST, DIGEST, b"")


async def read_for_ever(server: RankServer) -> None:
    """Read until an error ends it."""
    while True:
        await server.recv()


async def send_steps(server: RankServer, pause_s: float = 0.0) -> None:
    """Send steps 1, 2, 3, ... until an error ends it."""
    for seq in range(1, 100_000):
        server.send_step(seq, encode(step(seq)))
        await wait_all_tasks_blocked(pause_s)


@asynccontextmanager
async def joined(endpoint: str, ranks: int = 1) -> AsyncIterator[tuple[RankServer, list[RankStream]]]:
    """A server and its ranks, joined and greeted, in epoch 1."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, rank) for rank in range(ranks)])
    server.begin_epoch(1)
    streams = [RankStream(endpoint, stage=0, rank=rank, token=TOKEN) for rank in range(ranks)]
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(stream.join, 1)
            for _ in streams:
                join = await server.recv()
                assert isinstance(join, Join)
                await server.send(join.stage, join.rank, Hello(1, SETTINGS))
        server.broadcast(Begin(1, GEOMETRY))
        for stream in streams:
            assert isinstance(await stream.recv(), Begin)
        yield server, streams
    for stream in streams:
        await stream.aclose(0)
    await server.aclose(0)


async def test_steps_go_out_and_reports_come_back_in_order(endpoint: str) -> None:
    """Two ranks get every step once and in order; their reports come back, each rank's in order."""
    async with joined(endpoint, 2) as (server, streams):
        for seq in range(1, 6):
            server.send_step(seq, encode(step(seq)))
            for rank, stream in enumerate(streams):
                received = await stream.recv()
                assert received == step(seq)
                await stream.send(report(seq, rank=rank))
        got: list[tuple[int, int]] = []
        while len(got) < 10:
            for message in await server.recv_batch(4):
                assert isinstance(message, Report)
                got.append((message.rank, message.seq))
        assert [seq for rank, seq in got if rank == 0] == [1, 2, 3, 4, 5]
        assert [seq for rank, seq in got if rank == 1] == [1, 2, 3, 4, 5]


async def test_a_hole_in_the_steps_is_never_sent(endpoint: str) -> None:
    """The daemon's end refuses to skip or repeat a seq."""
    async with joined(endpoint) as (server, _):
        server.send_step(1, encode(step(1)))
        for seq in (1, 3):
            with pytest.raises(StreamBroken, match=f"step {seq} is to be sent after step 1"):
                server.send_step(seq, encode(step(seq)))


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (step(2), "step 2 came after step 0"),
        (step(1, epoch=2), "Step of epoch 2, we are in epoch 1"),
        (Begin(3, GEOMETRY), "Begin of epoch 3"),
        (Hello(1, SETTINGS), "second Hello"),
    ],
)
async def test_a_rank_refuses_what_is_out_of_order(endpoint: str, message: Step, complaint: str) -> None:
    """The rank's end names what came and what belonged."""
    async with joined(endpoint) as (server, (stream,)):
        await server.send(0, 0, message)
        with pytest.raises(StreamBroken, match=complaint):
            await stream.recv()


@pytest.mark.parametrize("seq", [0, 2, 3])
async def test_a_rank_does_not_send_a_report_out_of_order(endpoint: str, seq: int) -> None:
    """Neither a hole, nor a repetition, nor a report of a step it never got."""
    async with joined(endpoint) as (server, (stream,)):
        server.send_step(1, encode(step(1)))
        await stream.recv()
        with pytest.raises(StreamBroken, match=f"report of step {seq} after step 0"):
            await stream.send(report(seq))


@pytest.mark.parametrize(("seqs", "complaint"), [([2], "step 2 after step 0"), ([1, 1], "step 1 after step 1")])
async def test_the_daemon_refuses_reports_out_of_order(endpoint: str, seqs: list[int], complaint: str) -> None:
    """A hole, a repetition or a report from the future is an error that names rank and numbers."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0)])
    server.begin_epoch(1)
    raw = connect_dealer(endpoint)
    await raw.send([encode(Join(0, 0, 1, TOKEN))])
    await server.recv()
    server.send_step(1, encode(step(1)))
    for seq in seqs:
        await raw.send([encode(report(seq))])
    with trio.fail_after(5), pytest.raises(StreamBroken, match=f"stage 0 rank 0 reported {complaint}"):
        await read_for_ever(server)
    raw.close()
    await server.aclose(0)


async def test_strangers_are_counted_and_change_nothing(endpoint: str) -> None:
    """Wrong tokens, unexpected ranks, second joins, foreign numbers and noise are dropped; the true rank goes on."""
    async with joined(endpoint) as (server, (stream,)):
        said: list[str] = []
        server._complain = lambda counter, text: said.append(counter)
        stranger = connect_dealer(endpoint)
        for data in (
            b"\xc1 noise",
            b"",
            encode(Join(0, 0, 1, "guess")),
            encode(Join(0, 7, 1, TOKEN)),
            encode(Join(0, 0, 1, TOKEN)),
            encode(Heartbeat(0, 0, 0, 0)),
            encode(report(1)),
            encode(step(1)),
        ):
            await stranger.send([data])
        await stranger.send([b"two", b"frames"])
        await stream.send(Heartbeat(0, 5, 0, 0))
        await stream.send(Heartbeat(0, 0, 0, 0))
        got = await server.recv()
        dropped = sum(server.stats.values())
        while dropped < 10:
            with trio.move_on_after(0.05):
                got = await server.recv()
            dropped = sum(server.stats.values())
        assert got == Heartbeat(0, 0, 0, 0)
        assert server.stats == {"undecodable": 4, "bad_join": 3, "not_joined": 2, "wrong_rank": 1, "old_epoch": 0}
        assert {name: said.count(name) for name in said} == {name: n for name, n in server.stats.items() if n}
        stranger.close()


async def test_ten_thousand_random_byte_strings_at_the_ranks_socket_change_nothing_but_counters(endpoint: str) -> None:
    """Half of them are mutated reports; the true rank's stream goes on."""
    rng = random.Random(1)
    valid = encode(report(1))
    async with joined(endpoint) as (server, (stream,)):
        stranger = connect_dealer(endpoint)
        before = sum(server.stats.values())

        async def throw() -> None:
            for number in range(10_000):
                data = rng.randbytes(rng.randrange(60))
                if number % 2:
                    place = rng.randrange(len(valid))
                    data = valid[:place] + rng.randbytes(1) + valid[place + rng.randrange(2) :]
                await stranger.send([data])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(throw)
            nursery.start_soon(server.recv)
            while sum(server.stats.values()) < before + 10_000:
                await wait_all_tasks_blocked(0.002)
            await stream.send(Heartbeat(0, 0, 0, 0))
        server.send_step(1, encode(step(1)))
        assert await stream.recv() == step(1)
        await stream.send(report(1))
        assert await server.recv() == report(1)
        stranger.close()


async def test_reports_of_an_old_epoch_are_dropped(endpoint: str) -> None:
    """After a new epoch began and the rank joined again, its late report counts for nothing."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0)])
    server.begin_epoch(1)
    old, new = connect_dealer(endpoint), connect_dealer(endpoint)
    await old.send([encode(Join(0, 0, 1, TOKEN))])
    await server.recv()
    server.send_step(1, encode(step(1)))
    server.begin_epoch(2)
    await old.send([encode(report(1))])
    await new.send([encode(Join(0, 0, 2, TOKEN))])
    assert await server.recv() == Join(0, 0, 2, TOKEN)
    server.send_step(1, encode(step(1, epoch=2)))
    await new.send([encode(report(1, epoch=1))])
    await new.send([encode(report(1, epoch=2))])
    with trio.fail_after(5):
        assert await server.recv() == report(1, epoch=2)
    assert server.stats["old_epoch"] == 2, "by its connection, and by the number that it carries"
    assert server.stats["not_joined"] == 0
    old.close()
    new.close()
    await server.aclose(0)


async def test_ranks_that_join_anew_break_the_epoch_and_are_in_the_next(endpoint: str) -> None:
    """Where somebody else starts them: both are noted though they come at once, and taken in without asking again."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0), (0, 1)], replaced=True)
    server.begin_epoch(1)
    sockets = [connect_dealer(endpoint) for _ in range(4)]
    for rank in range(2):
        await sockets[rank].send([encode(Join(0, rank, 1, TOKEN))])
        assert await server.recv() == Join(0, rank, 1, TOKEN)
    again = [Join(0, rank, 2, TOKEN) for rank in range(2)]
    for socket, join in zip(sockets[2:], again, strict=True):
        await socket.send([encode(join)])
    await wait_all_tasks_blocked(0.05)
    with pytest.raises(StreamBroken, match=r"joins anew \(pid 2\)"):
        await server.recv_batch(16)
    server.begin_epoch(2)
    assert sorted(await server.recv_batch(16), key=lambda join: join.rank) == again
    server.send_step(1, encode(step(1, epoch=2)))
    for socket in sockets[2:]:
        assert await socket.recv() == [encode(step(1, epoch=2))]
    server.forget(0, 1)
    with pytest.raises(RankGone, match=r"\(0, 1\)"):
        server.send_step(2, encode(step(2, epoch=2)))
    for socket in sockets:
        socket.close()
    await server.aclose(0)


async def test_a_second_process_of_a_rank_waits_until_the_first_is_gone(endpoint: str) -> None:
    """Started by mistake, it takes no epoch from the one that serves; once that is gone one can join."""
    said: list[str] = []
    server = RankServer(
        endpoint, token=TOKEN, ranks=[(0, 0)], replaced=True, complain=lambda _, text: said.append(text)
    )
    server.begin_epoch(1)
    first, second, third = (connect_dealer(endpoint) for _ in range(3))
    await first.send([encode(Join(0, 0, 1, TOKEN))])
    await server.recv()
    await server.send(0, 0, Hello(1, SETTINGS))
    await second.send([encode(Join(0, 0, 2, TOKEN))])
    with trio.move_on_after(0.2) as waited:
        await server.recv_batch(16)
    assert waited.cancelled_caught
    assert "a second process as stage 0 rank 0 (pid 2) waits until the first is gone" in said[0]
    server.send_step(1, encode(step(1)))
    first.close()
    with pytest.raises(RankGone):
        await say_for_ever(server, Stop("whether it is there"))
    await third.send([encode(Join(0, 0, 3, TOKEN))])
    with pytest.raises(StreamBroken, match=r"joins anew \(pid 3\)"):
        await server.recv_batch(16)
    server.begin_epoch(2)
    assert await server.recv() == Join(0, 0, 3, TOKEN)
    for socket in (second, third):
        socket.close()
    await server.aclose(0)


async def take_in(server: RankServer, stream: RankStream) -> None:
    """Join and Hello."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.join, 1)
        join = await server.recv()
        assert isinstance(join, Join)
        await server.send(join.stage, join.rank, Hello(1, SETTINGS))


async def say_for_ever(server: RankServer, stop: Stop) -> None:
    """Tell all ranks until an error ends it."""
    while True:
        server.broadcast(stop)
        await wait_all_tasks_blocked(0.01)


async def join_to_be_dismissed(endpoint: str, rank: int, told: list[tuple[int, bool]]) -> None:
    """A new process of a rank: it is told that it is over, and whether another life follows."""
    stream = RankStream(endpoint, stage=0, rank=rank, token=TOKEN)
    with pytest.raises(Dismissed, match="not taken in: over") as dismissed:
        await stream.join(1)
    told.append((rank, dismissed.value.again))
    await stream.aclose(0)


async def test_ranks_between_two_epochs_are_told_that_it_is_over(endpoint: str) -> None:
    """The one that is connected, one that joined early, and one that joins only now; strangers are told nothing."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0), (0, 1), (0, 2)], replaced=True)
    server.begin_epoch(1)
    here = RankStream(endpoint, stage=0, rank=0, token=TOKEN)
    told: list[tuple[int, bool]] = []
    with trio.fail_after(20):
        await take_in(server, here)
        async with trio.open_nursery() as nursery:
            for rank in (1, 2):
                former = connect_dealer(endpoint)
                await former.send([encode(Join(0, rank, 1, TOKEN))])
                await server.recv()
                former.close()
            nursery.start_soon(join_to_be_dismissed, endpoint, 1, told)
            with pytest.raises(StreamBroken, match="joins anew"):
                await server.recv_batch(16)
            nursery.start_soon(server.dismiss, Stop("over"))
            await wait_all_tasks_blocked()
            nursery.start_soon(join_to_be_dismissed, endpoint, 2, told)
            assert await here.recv() == Stop("over")
        await here.aclose(0)
    assert sorted(told) == [(1, False), (2, False)]
    assert server.untold == []
    await server.aclose(0)


async def test_a_last_word_that_a_dead_process_got_does_not_count(endpoint: str) -> None:
    """It died before it read it, unnoticed as yet: whoever comes in its place is told, and waited for."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0)], replaced=True)
    server.begin_epoch(1)
    first = RankStream(endpoint, stage=0, rank=0, token=TOKEN)
    told: list[tuple[int, bool]] = []
    with trio.fail_after(20):
        await take_in(server, first)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.dismiss, Stop("over"))
            await wait_all_tasks_blocked(0.05)  # sent, and not read
            await first.aclose(0)
            await wait_all_tasks_blocked(0.05)
            assert server.untold == [(0, 0)]
            nursery.start_soon(join_to_be_dismissed, endpoint, 0, told)
    assert told == [(0, False)]
    assert server.untold == []
    await server.aclose(0)


async def test_who_read_first_that_another_epoch_follows_is_told_when_it_comes(endpoint: str) -> None:
    """One of two is lost, the other is told to come again; then it is over. That one leaves by what it read first."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0), (0, 1)], replaced=True)
    server.begin_epoch(1)
    streams = [RankStream(endpoint, stage=0, rank=rank, token=TOKEN) for rank in range(2)]
    told: list[tuple[int, bool]] = []
    with trio.fail_after(20):
        for stream in streams:
            await take_in(server, stream)
        await streams[1].aclose(0)
        with pytest.raises(RankGone):  # once its end is noticed; the other one has heard it each time
            await say_for_ever(server, Stop("a rank is lost", again=True))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.dismiss, Stop("over"))
            await wait_all_tasks_blocked()
            assert await streams[0].recv() == Stop("a rank is lost", again=True)
            await streams[0].aclose(50)
            await wait_all_tasks_blocked(0.05)
            assert server.untold == [(0, 0), (0, 1)]
            for rank in range(2):
                nursery.start_soon(join_to_be_dismissed, endpoint, rank, told)
    assert sorted(told) == [(0, False), (1, False)]
    await server.aclose(0)


async def test_a_rank_that_waits_to_be_taken_in_asks_the_next_life_too(endpoint: str) -> None:
    """The daemon took its Join and ended; whoever comes in its place hears of the rank at once."""
    stream = RankStream(endpoint, stage=0, rank=0, token=TOKEN)
    hellos: list[Hello] = []

    async def join() -> None:
        hellos.append(await stream.join(1))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(join)
            for life in (1, 2, 3):
                server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0)], replaced=True)
                server.begin_epoch(life)
                assert await server.recv() == Join(0, 0, 1, TOKEN)
                if life < 3:
                    await server.aclose(0)
            await server.send(0, 0, Hello(3, SETTINGS))
    assert [hello.epoch for hello in hellos] == [3]
    server.broadcast(Stop("over"))
    assert await stream.recv() == Stop("over")
    await stream.aclose(0)
    await server.aclose(0)


async def test_a_rank_reads_the_last_word_before_it_takes_its_daemon_for_gone(endpoint: str) -> None:
    """The daemon says Stop and goes at once: its end is told when that was read, and not before."""
    async with joined(endpoint) as (server, (stream,)):
        server.broadcast(Stop("over"))
        await server.aclose(200)
        gone = False

        async def watch() -> None:
            nonlocal gone
            await stream.wait_daemon_gone()
            gone = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await trio.sleep(0.2)
            assert not gone
            assert await stream.recv() == Stop("over")


async def test_another_version_is_refused_on_both_sides(endpoint: str) -> None:
    """A rank of another release is named as such, and so is a daemon."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0)])
    server.begin_epoch(1)
    raw = connect_dealer(endpoint)
    await raw.send([encode(Join(0, 0, 1, TOKEN, version=99))])
    with pytest.raises(VersionMismatch, match="speaks protocol version 99"):
        await server.recv()
    stream = RankStream(endpoint, stage=0, rank=0, token=TOKEN)

    async def join() -> None:
        with pytest.raises(VersionMismatch, match="the daemon speaks protocol version 98"):
            await stream.join(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(join)
        await server.recv()
        await server.send(0, 0, Hello(1, SETTINGS, version=98))
    raw.close()
    await stream.aclose(0)
    await server.aclose(0)


async def test_a_placed_rank_of_another_release_is_told_ours_and_changes_nothing(endpoint: str) -> None:
    """Also one whose place is taken: who serves goes on, and what the other is told ends it by name."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0), (0, 1)], replaced=True)
    server.begin_epoch(1)
    said: list[str] = []
    server._complain = lambda counter, text: said.append(text)
    serving = connect_dealer(endpoint)
    await serving.send([encode(Join(0, 0, 1, TOKEN))])
    assert await server.recv() == Join(0, 0, 1, TOKEN)
    for rank in (0, 1):
        other = connect_dealer(endpoint)
        await other.send([encode(Join(0, rank, 2, TOKEN, version=1))])
        while server.stats["bad_join"] <= rank:
            with trio.move_on_after(0.05):
                await server.recv()
        told = to_rank((await other.recv())[0])
        assert isinstance(told, Hello)
        assert told.version != 1
        assert version_problem(told.version, "the daemon") == ""
        other.close()
    assert said == [
        f"stage 0 rank {rank} speaks protocol version 1, this process understands 2: run both from one release"
        for rank in (0, 1)
    ]
    await serving.send([encode(Heartbeat(0, 0, 0, 0))])
    assert await server.recv() == Heartbeat(0, 0, 0, 0)
    serving.close()
    await server.aclose(0)


async def test_a_rank_that_left_is_named(endpoint: str) -> None:
    """Steps are not sent to a group with a hole in it, and a closed connection is noticed when sending."""
    async with joined(endpoint, 2) as (server, streams):
        await streams[1].aclose(0)
        with pytest.raises(RankGone, match=r"^rank 0.1 is not connected any more \(step \d+ could not be sent\)"):
            await send_steps(server, pause_s=0.01)
        with pytest.raises(RankGone, match=r"^rank 0.1 is not connected any more \(Stop could not"):
            server.broadcast(Stop("the rank left"))
        received = await streams[0].recv()
        while not isinstance(received, Stop):
            received = await streams[0].recv()
        assert received.why == "the rank left"
        server.begin_epoch(2)
        with pytest.raises(RankGone, match=r"not joined are \(stage, rank\) \[\(0, 0\), \(0, 1\)\]"):
            server.broadcast(Begin(2, GEOMETRY))
        with pytest.raises(RankGone):
            await server.send(0, 1, Stop("x"))


async def test_a_rank_that_does_not_read_is_named(endpoint: str) -> None:
    """Messages are bounded: a rank that never reads stalls the stream loudly instead of growing a queue."""
    async with joined(endpoint) as (server, _):
        with pytest.raises(RankStalled, match=r"^rank 0.0 has 256 messages unread \(step \d+"):
            await send_steps(server)


async def test_a_rank_notices_that_its_daemon_is_gone(endpoint: str) -> None:
    """Without traffic, the end of the daemon's socket wakes the rank."""
    async with joined(endpoint) as (server, (stream,)):
        await server.aclose(0)
        await stream.wait_daemon_gone()


async def test_join_gives_up_in_time(endpoint: str) -> None:
    """A daemon that never answers is an error after the time asked for."""
    stream = RankStream(endpoint, stage=0, rank=0, token=TOKEN)
    with pytest.raises(trio.TooSlowError):
        await stream.join(1, timeout_s=0.01)
    await stream.aclose(0)
