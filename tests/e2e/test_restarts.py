"""Restarts as clients see them: a daemon's death is a pause, a front end's takes its own connections only, and when the
launcher dies nothing is left, not even what was stopped."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trio

from tests.e2e.harness import (
    alive,
    assert_gone,
    assert_replays,
    client,
    collect,
    completion,
    events,
    eventually_async,
    gauge,
    idle,
    modeled,
    serving,
)
from tools.own_server import OwnServer, http_get

QUICK = ("--frontend-timeout", "2")


def pid(server: OwnServer, name: str) -> int:
    """The present process of this name."""
    return int(json.loads((server.run_dir / "pids.json").read_text())[name])


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A stream's tokens, text, log probabilities and finish reason, by choice."""
    choices = [{"tokens": [], "text": "", "logprobs": [], "finish": None} for _ in range(body.get("n", 1))]
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for event in events(answer):
            assert "error" not in event, event
            assert "cut" not in event
            for choice in event["choices"]:
                found: dict[str, Any] = choices[choice["index"]]
                found["tokens"] += choice["token_ids"] or []
                found["text"] += choice["text"]
                found["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
                found["finish"] = choice["finish_reason"] or found["finish"]
    return choices


async def all_of(http: httpx.AsyncClient, bodies: list[dict[str, Any]], act: Any = None) -> list[list[dict[str, Any]]]:
    """Every stream at once, with `act` in between."""
    found: list[Any] = [None] * len(bodies)

    async def one(index: int) -> None:
        found[index] = await whole(http, bodies[index])

    async with trio.open_nursery() as nursery:
        for index in range(len(bodies)):
            nursery.start_soon(one, index)
        if act is not None:
            await act()
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_X1_a_daemons_death_is_a_pause(tmp_path: Path, how: signal.Signals) -> None:
    """Plain streams, log probabilities of output and of prompt, two choices, a stop string: each is what it is without
    the death; meanwhile health is red, and what comes is refused or waits, but is not lost."""
    with serving(tmp_path / "run", *modeled(*QUICK, delay_us=4_000)) as server:
        async with client(server) as http:
            bodies = [completion(400, seed=seed) for seed in range(2)]
            bodies += [completion(400, seed=9, logprobs=2), completion(400, prompt=40, logprobs=1, echo=True)]
            bodies += [completion(400, n=2, temperature=1.0) | {"seed": 5}]
            undisturbed = await all_of(http, bodies)
            text = undisturbed[0][0]["text"]
            bodies.append(bodies[0] | {"stop": [text[len(text) * 2 // 3 :][:12]]})
            undisturbed += await all_of(http, bodies[-1:])
            assert undisturbed[-1][0]["finish"] == "stop"

            async def act() -> None:
                await eventually_async(lambda: gauge(server, "num_requests_decoding") == len(bodies) + 1, "all decode")
                os.kill(pid(server, "daemon"), how)
                await eventually_async(lambda: http_get(server.url + "/health")[0] == 503, "health is red", 10)
                if how == signal.SIGKILL:
                    refused = await http.post("/v1/completions", json=completion(4))
                    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "daemon_lost")
                    assert int(refused.headers["retry-after"]) >= 1
                else:  # said to a stopped daemon, read by nobody: the next life answers
                    assert len((await whole(http, completion(4)))[0]["tokens"]) == 4
                await eventually_async(lambda: http_get(server.url + "/health")[0] == 200, "health is green again")

            for got, expected in zip(await all_of(http, bodies, act), undisturbed, strict=True):
                assert got == expected
            await eventually_async(lambda: idle(server), "everything is given back")
        assert server.stop() == 0, server.tail()
        assert_replays(server.run_dir)


async def test_a_front_ends_death_is_its_own_clients_only(tmp_path: Path) -> None:
    """Two front ends on one port: the streams of the one that is killed break, the others' do not; the next one answers
    on the same port, and what nobody reads any more is aborted."""
    with serving(tmp_path / "run", *modeled(*QUICK, "--frontends", "2", delay_us=10_000)) as server:
        outcomes: list[dict[str, Any]] = []
        async with trio.open_nursery() as nursery:

            async def one(seed: int) -> None:
                async with client(server) as http:  # a connection of its own
                    outcomes.append(await collect(http, completion(500, seed=seed)))

            for seed in range(12):
                nursery.start_soon(one, seed)
            await eventually_async(lambda: gauge(server, "num_requests_decoding") == 12, "all decode")
            before = pid(server, "frontend-0")
            os.kill(before, signal.SIGKILL)
            await eventually_async(lambda: pid(server, "frontend-0") != before, "another one runs")
        finished = [outcome for outcome in outcomes if outcome["finish"] == "length"]
        broken = [outcome for outcome in outcomes if outcome["error"]]
        assert len(finished) + len(broken) == 12
        assert all(len(outcome["tokens"]) == 500 for outcome in finished)
        assert all(outcome["error"]["code"] == "transport" for outcome in broken)
        await eventually_async(lambda: idle(server), "what nobody reads is aborted after the grace period")
        for _ in range(8):  # whichever accepts
            assert http_get(server.url + "/health")[0] == 200
        assert server.stop() == 0, server.tail()
        assert_replays(server.run_dir)


async def test_X4_a_killed_launcher_leaves_nothing_even_of_what_was_stopped(tmp_path: Path) -> None:
    """Every other process is stopped, then the launcher is killed: all end, and a server starts on the same port."""
    with serving(tmp_path / "run", *modeled(*QUICK, delay_us=4_000)) as server:
        launcher, family = psutil.Process(server.pid), server.processes()
        assert len(family) == 4
        for process in family:
            if process != launcher:
                process.suspend()
        launcher.kill()
        await eventually_async(lambda: not any(map(alive, family)), "every orphan ends")
        port = server.url.rpartition(":")[2]
        with serving(server.run_dir, *modeled(), "--port", port) as again:
            assert again.url == server.url
            assert again.stop() == 0, again.tail()
            assert_gone(family, server.run_dir)
        assert_replays(server.run_dir)
