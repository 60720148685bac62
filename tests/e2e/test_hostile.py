"""Hostile bytes at the daemon's sockets change nothing but counters."""

from __future__ import annotations

import random
from pathlib import Path

import zmq

from tests.e2e.harness import (
    assert_replays,
    client,
    collect,
    completion,
    eventually,
    eventually_async,
    gauge,
    idle,
    modeled,
    serving,
    units,
)
from tools.own_server import OwnServer

STRINGS = 10_000
CORE = (
    "requests_received_total",
    "requests_accepted_total",
    "steps_total",
    "forwards_total",
    "generation_tokens_total",
)


def throw(path: Path, strings: int, seed: int) -> int:
    """Send random byte strings, alone and in several frames, from a few connections; how many were sent."""
    draw, context = random.Random(seed), zmq.Context()
    sent = 0
    try:
        sockets = [context.socket(zmq.DEALER) for _ in range(4)]
        for socket in sockets:
            socket.setsockopt(zmq.LINGER, 2000)
            socket.setsockopt(zmq.SNDTIMEO, 10_000)
            socket.connect(f"ipc://{path}")
        for index in range(strings):
            frames = [
                draw.randbytes(draw.choice((0, 1, 2, 3, 8, 60, 300, 2000))) for _ in range(draw.choice((1, 1, 1, 2)))
            ]
            sockets[index % 4].send_multipart(frames)
            sent += 1
    finally:
        context.destroy(linger=2000)
    return sent


def hostile_seen(server: OwnServer) -> float:
    """Messages that gateway and rank streams counted as not taken."""
    counters = {name: value for name, value in server.metrics().items() if "_events{" in name}
    kinds = ("malformed", "undecodable", "not_connected", "not_joined", "bad_join", "rejected")
    return sum(value for name, value in counters.items() if any(f'"{kind}"' in name for kind in kinds))


async def test_random_bytes_change_nothing_but_a_counter(tmp_path: Path) -> None:
    """10,000 random byte strings, half at each socket: counters rise, the core's do not, and requests are served."""
    with serving(tmp_path / "run", *modeled()) as server:
        async with client(server) as http:
            first = await collect(http, completion(8))
            await eventually_async(lambda: idle(server), "idle before")
            core, held = [gauge(server, name) for name in CORE], units(server)
            before = hostile_seen(server)
            sent = throw(server.run_dir / "front.sock", STRINGS // 2, 1)
            sent += throw(server.run_dir / "ranks.sock", STRINGS // 2, 2)
            assert sent == STRINGS
            eventually(lambda: hostile_seen(server) - before >= STRINGS * 0.9, "the strings are counted")
            assert [gauge(server, name) for name in CORE] == core
            assert units(server) == held
            again = await collect(http, completion(8))
            assert again["tokens"] == first["tokens"]
        assert server.stop() == 0, server.tail()
        assert_replays(server.run_dir)
