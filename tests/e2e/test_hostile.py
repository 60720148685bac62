"""Hostile bytes at the daemon's sockets change nothing but counters."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
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


def throw(path: Path, strings: int, seed: int, until: Callable[[], object]) -> None:
    """Send random byte strings, alone and in several frames, from a few connections that stay open for `until`."""
    draw, context = random.Random(seed), zmq.Context()
    try:
        sockets = [context.socket(zmq.DEALER) for _ in range(4)]
        for socket in sockets:
            socket.setsockopt(zmq.SNDTIMEO, 10_000)
            socket.connect(f"ipc://{path}")
        for index in range(strings):
            frames = [
                draw.randbytes(draw.choice((0, 1, 2, 3, 8, 60, 300, 2000))) for _ in range(draw.choice((1, 1, 1, 2)))
            ]
            sockets[index % 4].send_multipart(frames)
        until()
    finally:
        context.destroy(linger=0)


# Per socket, the counters of which each string moves exactly one.
COUNTERS = {
    "gateway": ("malformed", "not_connected"),
    "rank_stream": ("undecodable", "not_joined", "bad_join"),
}


def hostile_seen(server: OwnServer, socket: str) -> float:
    """Messages that one socket counted as not taken."""
    counters = server.metrics()
    return sum(counters[f'bandmaster:{socket}_events{{event="{name}"}}'] for name in COUNTERS[socket])


def reaches(seen: Callable[[], float], due: float) -> None:
    """Wait for the count."""
    eventually(lambda: seen() >= due, f"{due:g} strings are counted")


async def test_random_bytes_change_nothing_but_a_counter(tmp_path: Path) -> None:
    """10,000 random byte strings, half at each socket: counters rise, the core's do not, and requests are served."""
    with serving(tmp_path / "run", *modeled()) as server:
        async with client(server) as http:
            first = await collect(http, completion(8))
            await eventually_async(lambda: idle(server), "idle before")
            core, held = [gauge(server, name) for name in CORE], units(server)
            before = {socket: hostile_seen(server, socket) for socket in COUNTERS}
            for seed, (path, socket) in enumerate((("front.sock", "gateway"), ("ranks.sock", "rank_stream")), start=1):
                due = before[socket] + STRINGS // 2
                seen = partial(hostile_seen, server, socket)
                throw(server.run_dir / path, STRINGS // 2, seed, partial(reaches, seen, due))
                assert seen() == due, "each string once"
            assert [gauge(server, name) for name in CORE] == core
            assert units(server) == held
            again = await collect(http, completion(8))
            assert again["tokens"] == first["tokens"]
        assert server.stop() == 0, server.tail()
        assert_replays(server.run_dir)
