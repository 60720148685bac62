"""Ends: by signal, or by more deaths than are repaired; nothing is left behind and the journal replays."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import trio

from tests.e2e.harness import (
    assert_gone,
    assert_replays,
    client,
    collect,
    completion,
    eventually_async,
    gauge,
    modeled,
    serving,
)
from tools.own_server import OwnServer, http_get

STREAMS = 8


async def with_streams(
    server: OwnServer, tokens: int, act: Any, streams: int = STREAMS
) -> tuple[list[dict[str, Any]], list[psutil.Process]]:
    """Open streams, wait until all of them decode, do `act` in a thread; the streams' outcomes and the processes."""
    outcomes: list[dict[str, Any]] = []
    family = server.processes()
    async with client(server) as http, trio.open_nursery() as nursery:

        async def one(index: int) -> None:
            outcomes.append(await collect(http, completion(tokens, seed=index)))

        for index in range(streams):
            nursery.start_soon(one, index)
        await eventually_async(lambda: gauge(server, "num_requests_decoding") == streams, "all streams decode")
        await trio.to_thread.run_sync(act)
    return outcomes, family


async def test_interrupt_ends_everything_at_once(tmp_path: Path) -> None:
    """SIGINT in mid-load: exit code 0 within seconds, every stream is told, no process and no socket file is left."""
    with serving(tmp_path / "run", *modeled(delay_us=10_000)) as server:
        outcomes, family = await with_streams(server, 4000, lambda: server.send(signal.SIGINT))
        assert server.wait(20) == 0, server.tail()
        assert len(outcomes) == STREAMS
        assert all(outcome["finish"] is None and outcome["error"]["code"] != "cut" for outcome in outcomes), outcomes
        assert_gone(family, server.run_dir)
        assert_replays(server.run_dir)


async def test_terminate_drains(tmp_path: Path) -> None:
    """SIGTERM lets running streams finish in full, refuses new requests, and exits 0."""
    with serving(tmp_path / "run", *modeled(delay_us=10_000)) as server:
        refused: list[int] = []

        def terminate() -> None:
            server.send(signal.SIGTERM)
            for _ in range(2000):
                try:
                    status = httpx.post(
                        f"{server.url}/v1/completions", json={"prompt": "a"}, trust_env=False
                    ).status_code
                except httpx.HTTPError:
                    status = 0  # no longer listening
                if status != 200:
                    refused.append(status)
                    return

        outcomes, family = await with_streams(server, 200, terminate)
        assert server.wait(45) == 0, server.tail()
        assert [outcome["finish"] for outcome in outcomes] == ["length"] * STREAMS, outcomes
        assert {len(outcome["tokens"]) for outcome in outcomes} == {200}
        assert refused in ([503], [0])
        assert_gone(family, server.run_dir)
        assert_replays(server.run_dir)


async def test_one_rank_too_many_ends_all_with_fault(tmp_path: Path) -> None:
    """kill -9 of the rank with no restart left: each stream ends with the engine's fault, and the exit code says so."""
    with serving(tmp_path / "run", *modeled("--epoch-restarts-max", "0", delay_us=10_000)) as server:
        rank = server.process_of("daemon.rank")
        outcomes, family = await with_streams(server, 4000, rank.kill)
        assert server.wait(30) == 3, server.tail()
        assert [outcome["error"]["code"] for outcome in outcomes] == ["engine_fault"] * STREAMS, outcomes
        assert_gone(family, server.run_dir)
        assert_replays(server.run_dir)


def test_a_second_server_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    """A run directory has one owner: the second server exits 5 and says who it is; the first goes on."""
    with serving(tmp_path / "run", *modeled()) as server:
        second = OwnServer([*modeled()], server.run_dir)
        second.start(ready=False)
        try:
            assert second.wait(60) == 5, second.tail()
            assert f"in use by the server with pid {server.pid}" in second.output()
        finally:
            second.kill()
        assert http_get(f"{server.url}/health")[0] == 200


def test_a_wrong_flag_starts_nothing(tmp_path: Path) -> None:
    """A setting out of range is refused with its name, value and range, and exit code 2."""
    server = OwnServer([*modeled("--page-size", "0")], tmp_path / "run")
    server.start(ready=False)
    try:
        assert server.wait(60) == 2
    finally:
        server.kill()
    assert "--page-size" in server.output()
    assert not (tmp_path / "run" / "journal").exists()
