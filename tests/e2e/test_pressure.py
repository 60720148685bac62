"""More requests than the server has room for: refusals that say when to come back, and a queue that empties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
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
)

ROWS, QUEUE, EXTRA = 2, 4, 6


async def test_a_full_queue_answers_429_with_retry_after(tmp_path: Path) -> None:
    """Beyond rows and queue a request gets a 429 with `Retry-After`; everything accepted finishes."""
    flags = ("--max-running-requests", str(ROWS), "--max-queued-requests", str(QUEUE))
    with serving(tmp_path / "run", *modeled(*flags, delay_us=10_000)) as server:
        outcomes: list[dict[str, Any]] = []
        async with client(server) as http, trio.open_nursery() as nursery:

            async def one(index: int) -> None:
                outcomes.append(await collect(http, completion(200, seed=index)))

            for index in range(ROWS):  # first the rows: what arrives at once counts as queued until the next step
                nursery.start_soon(one, index)
            await eventually_async(lambda: gauge(server, "num_requests_running") == ROWS, "the rows are taken")
            for index in range(ROWS, ROWS + QUEUE):
                nursery.start_soon(one, index)
            await eventually_async(lambda: gauge(server, "num_requests_waiting") == QUEUE, "the queue is full")
            for index in range(EXTRA):
                answer: httpx.Response = await http.post("/v1/completions", json=completion(4, seed=index))
                assert answer.status_code == 429
                assert answer.json()["error"]["code"] == "queue_full"
                assert int(answer.headers["Retry-After"]) >= 1
        assert [outcome["finish"] for outcome in outcomes] == ["length"] * (ROWS + QUEUE), outcomes
        await eventually_async(lambda: idle(server), "idle again")
        assert server.stop() == 0, server.tail()
        assert_replays(server.run_dir)


async def test_short_memory_retracts_and_still_gives_the_same_tokens(tmp_path: Path) -> None:
    """Eight requests that memory cannot hold in full: some are preempted, all give the tokens that they give alone."""
    # A unit takes 256 bytes at least, so that pages of one token make one MiB an arena of 4,095 tokens.
    flags = ("--arena-bytes", "1MiB", "--page-size", "1", "--max-running-requests", "8")
    with serving(tmp_path / "run", *modeled(*flags)) as server:
        bodies = [completion(900, prompt=100, seed=index) for index in range(8)]
        outcomes: dict[int, dict[str, Any]] = {}
        async with client(server) as http:
            async with trio.open_nursery() as nursery:

                async def one(index: int) -> None:
                    outcomes[index] = await collect(http, bodies[index])

                for index in range(len(bodies)):
                    nursery.start_soon(one, index)
            assert [outcomes[index]["finish"] for index in range(8)] == ["length"] * 8, outcomes
            assert gauge(server, "num_preemptions_total") > 0
            for index in (0, 7):
                assert (await collect(http, bodies[index]))["tokens"] == outcomes[index]["tokens"]
        await eventually_async(lambda: idle(server), "idle again")
        assert server.stop() == 0, server.tail()
        assert_replays(server.run_dir)
