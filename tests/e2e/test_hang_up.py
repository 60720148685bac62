"""Clients that hang up, in the queue, in prefill and in decode: everything they held comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.e2e.harness import (
    assert_replays,
    client,
    collect,
    completion,
    eventually_async,
    gauge,
    idle,
    modeled,
    serving,
    units,
)
from tools.own_server import OwnServer

DECODES = 4
FLAGS = ("--max-running-requests", str(DECODES), "--chunked-prefill-size", "16", "--max-num-batched-tokens", "64")


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[OwnServer]:
    """A server of four rows whose forwards take 20 ms, so that each stage of a request lasts."""
    with serving(tmp_path / "run", *modeled(*FLAGS, delay_us=20_000)) as server:
        yield server


async def stream_until(
    http: httpx.AsyncClient, body: dict[str, Any], hang_up: trio.Event, tokens_seen: list[int]
) -> None:
    """Read a stream and drop the connection when told; counts the deliveries."""
    with trio.CancelScope() as scope:

        async def watch() -> None:
            await hang_up.wait()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    tokens_seen[0] += 1
            nursery.cancel_scope.cancel()


async def test_hang_ups_give_everything_back(slow: OwnServer, tmp_path: Path) -> None:
    """Hang-ups while decoding, while prefilling and while queued leave what the cache holds, and then nothing."""
    async with client(slow) as http:
        await collect(http, completion(2))
        await eventually_async(lambda: idle(slow), "idle after the first request")
        boot = units(slow)
        for stage, tokens, prompt, waiting in (("decode", 3000, 8, 0), ("prefill", 8, 4000, 0), ("queue", 3000, 8, 6)):
            hang_up, seen = trio.Event(), [0]
            async with trio.open_nursery() as nursery:
                for index in range(DECODES + waiting):
                    body = completion(tokens, prompt=prompt, seed=index)
                    nursery.start_soon(stream_until, http, body, hang_up, seen)
                reached = {
                    "decode": lambda: gauge(slow, "num_requests_decoding") == DECODES,
                    "prefill": lambda: gauge(slow, "num_requests_prefilling") > 0,
                    "queue": lambda waiting=waiting: gauge(slow, "num_requests_waiting") >= waiting,
                }[stage]
                await eventually_async(reached, f"requests are in {stage}")
                hang_up.set()
            await eventually_async(lambda: idle(slow), f"idle after hang-ups in {stage}")
            assert (await http.post("/flush_cache")).status_code == 200, "nobody reads what is cached"
            await eventually_async(lambda: units(slow) == boot, f"units of the boot after hang-ups in {stage}")
        aborted = 'request_success_total{finished_reason="abort"}'
        assert gauge(slow, aborted) == 3 * DECODES + 6
        served = await collect(http, completion(4, seed=9))
        assert served["finish"] == "length"
    assert slow.stop() == 0, slow.tail()
    assert_replays(slow.run_dir)
