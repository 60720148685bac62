"""Hostile peers: whatever bytes arrive, a counter moves, the core hears nothing, and a good front end is served."""

from __future__ import annotations

import random
import socket as sockets
from pathlib import Path

import msgspec
import pytest
import trio
import zmq
from trio.testing import wait_all_tasks_blocked

from daemon.core.inputs import Aborted
from daemon.gateway_hostile import Complaints
from ipc.codec import encode
from ipc.handshake import Limits
from ipc.messages import (
    Abort,
    Acknowledge,
    Answer,
    Ask,
    Connect,
    FinishAt,
    FromFrontEnd,
    Rejected,
    Resume,
)
from tests.gateway.harness import NOW_NS, Log, Peer, World, gateway, request

VALID: list[FromFrontEnd] = [
    request("id", prompt=tuple(range(50))),
    Abort("id"),
    FinishAt("id", 0, 5),
    Resume("id", 0, bytes(40)),
    Acknowledge(["id"] * 10),
    Ask("status", 5, {"a": 1}),
]


def random_bytes(rng: random.Random) -> bytes:
    """Any bytes, some of them beginning like a message."""
    size = rng.choice([0, 1, 2, 8, 40, 400])
    noise = rng.randbytes(size)
    return rng.choice([noise, b"\x92\xa5Abort" + noise, b"\x9b\xa8Generate" + noise, b"\xdd\xff\xff\xff\xff" + noise])


def mutated(rng: random.Random) -> bytes:
    """A valid message with a few bytes changed, inserted, removed or cut off."""
    data = bytearray(encode(rng.choice(VALID)))
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[place : place + 1] = rng.randbytes(1)
            case 1:
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del data[place : place + rng.randrange(1, 9)]
            case _:
                data = data[: max(1, place)]
    return bytes(data)


async def good_is_served(world: World, good: Peer) -> None:
    """A front end that behaves gets its answer, and its input reaches the core."""
    assert await good.ask(Ask("ping", 9)) == Answer(9, True, "life-1")
    await good.send(Abort("of-good"))
    while True:
        item = await world.inputs.receive()
        if item == Aborted(NOW_NS, "good", "of-good", "client"):
            return


async def throw(world: World, peer: Peer, messages: list[bytes]) -> None:
    """Send raw bytes and wait until the gateway has taken them all; what it says back is read away."""
    before = world.gateway.stats["received"]

    async def read_away() -> None:
        while True:
            await peer.socket.recv_batch(100)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_away)
        for data in messages:
            await peer.socket.send([data])
        while world.gateway.stats["received"] < before + len(messages):
            await wait_all_tasks_blocked(0.002)
        nursery.cancel_scope.cancel()


async def test_ten_thousand_random_byte_strings_change_nothing_but_a_counter(endpoint: str) -> None:
    """From a stranger: nothing reaches the core, nobody is remembered, one line is logged."""
    rng = random.Random(1)
    messages = [random_bytes(rng) for _ in range(10_000)]
    async with gateway(endpoint) as world:
        good, stranger = await world.peer("good"), await world.peer()
        before = dict(world.gateway.stats)
        await throw(world, stranger, messages)
        moved = {name: count - before[name] for name, count in world.gateway.stats.items() if count != before[name]}
        assert moved.pop("malformed") + moved.pop("not_connected", 0) == 10_000  # a few are an Abort by chance
        assert moved == {"received": 10_000, "rejected": 10_000}
        with pytest.raises(trio.WouldBlock):
            world.inputs.receive_nowait()
        assert [row["name"] for row in world.gateway.frontends()] == ["good"]
        assert len(world.log.of("malformed_message")) == 1
        await good_is_served(world, good)


async def test_ten_thousand_mutated_messages_of_a_stranger_reach_nobody(endpoint: str) -> None:
    """Nearly valid is not valid, and valid from a stranger is not heard."""
    rng = random.Random(2)
    async with gateway(endpoint) as world:
        good, stranger = await world.peer("good"), await world.peer()
        await throw(world, stranger, [mutated(rng) for _ in range(10_000)])
        stats = world.gateway.stats
        assert stats["malformed"] + stats["not_connected"] == 10_000
        assert stats["malformed"] > 1_000
        with pytest.raises(trio.WouldBlock):
            world.inputs.receive_nowait()
        await good_is_served(world, good)


async def test_mutated_messages_of_a_connected_front_end_are_counted_or_valid(endpoint: str) -> None:
    """What gets through is a message that could have been meant: it encodes again; everything else is counted."""
    rng = random.Random(3)
    async with gateway(endpoint) as world:
        good, bad = await world.peer("good"), await world.peer("bad")
        await throw(world, bad, [mutated(rng) for _ in range(5_000)])
        stats = world.gateway.stats
        passed = []
        while True:
            try:
                passed.append(world.inputs.receive_nowait())
            except trio.WouldBlock:
                break
        assert all(item.frontend == "bad" and msgspec.msgpack.encode(item) for item in passed)  # type: ignore[union-attr]
        rejected_resumes = stats["rejected"] - stats["malformed"]
        assert stats["malformed"] + stats["refused_here"] + stats["asks"] + len(passed) + rejected_resumes == 5_000
        assert stats["malformed"] > 1_000
        await good_is_served(world, good)


async def test_a_thousand_identities_are_not_remembered(endpoint: str) -> None:
    """Peers that knock without introducing themselves, or under too many names, leave nothing behind."""
    context = zmq.Context.instance()
    async with gateway(endpoint, limits=Limits(frontends_max=4)) as world:
        good = await world.peer("good")
        for number in range(1000):
            raw = context.socket(zmq.DEALER)
            raw.setsockopt(zmq.LINGER, 1000)
            raw.setsockopt(zmq.IDENTITY, b"peer-%d" % number)
            raw.connect(endpoint)
            raw.send(encode(Connect(f"name-{number}") if number % 2 else Abort("x")))
            raw.close()
        while world.gateway.stats["received"] < 1001:
            await wait_all_tasks_blocked(0.01)
        assert len(world.gateway.frontends()) == 4
        assert world.gateway.stats["too_many_frontends"] == 497
        assert len(world.log.of("too_many_front_ends")) == 1
        await good_is_served(world, good)


async def test_oversized_and_many_framed_messages(endpoint: str) -> None:
    """Too large: the connection is cut by ZeroMQ. Many frames: counted. Neither disturbs another peer."""
    async with gateway(endpoint, limits=Limits(message_bytes_max=10_000)) as world:
        good, hostile, framed = await world.peer("good"), await world.peer(), await world.peer("framed")
        hostile.socket.watch_disconnects()
        await hostile.socket.send([bytes(10_001)])
        await hostile.socket.wait_disconnected()
        await framed.socket.send([encode(Abort("x"))] * 500)
        answer = await framed.recv()
        assert isinstance(answer, Rejected)
        assert answer.code == "malformed"
        await good_is_served(world, good)


async def test_bytes_that_are_not_even_zeromq(endpoint: str, run_dir: Path) -> None:
    """A raw Unix socket client that talks nonsense, or nothing, disturbs nobody."""
    async with gateway(endpoint) as world:
        good = await world.peer("good")
        rng = random.Random(4)
        plain = []
        for _ in range(50):
            client = sockets.socket(sockets.AF_UNIX)
            client.connect(str(run_dir / "front.sock"))
            client.sendall(rng.randbytes(rng.randrange(200)))
            plain.append(client)
        await good_is_served(world, good)
        for client in plain:
            client.close()
        await good_is_served(world, good)


async def test_a_peer_that_never_reads_its_rejections_is_not_queued_for(endpoint: str) -> None:
    """Answers to strangers go out at once or not at all."""
    async with gateway(endpoint) as world:
        good, stranger = await world.peer("good"), await world.peer(recv_hwm=1)
        for _ in range(5_000):
            await stranger.socket.send([b"\xc1"])
        while world.gateway.stats["malformed"] < 5_000:
            await wait_all_tasks_blocked(0.002)
        assert await world.gateway.drain(0.01)
        await good_is_served(world, good)


def test_complaints_are_counted_between_lines() -> None:
    """One line at once, the next after the interval with the number left out; kinds do not share an interval."""
    log, now = Log(), [0.0]
    complaints = Complaints(log, lambda: now[0], every_s=10.0)
    for second in range(25):
        now[0] = float(second)
        complaints.note("malformed", "invalid", peer="", text="x" * 1000)
    complaints.note("other", "invalid", peer="", text="")
    lines = log.of("malformed")
    assert [line["left_out"] for line in lines] == [0, 9, 9]
    assert all(len(line["text"]) <= 200 for line in lines)
    assert len(log.of("other")) == 1
