"""Gateway and client together: whole lives of requests, hang-ups at any moment, and a daemon that stops or dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from ipc.client import DaemonClient
from ipc.client_stream import Tokens
from ipc.errors import DaemonLost
from ipc.keys import load_client_keys, load_server_keys, make_keys
from ipc.messages import Accepted, Finished, Refused
from tests.gateway.harness import gateway, request
from tests.gateway.toy_core import ToyCore

ROOT = Path(__file__).parents[2]


async def consume(client: DaemonClient, id: str, n: int, leave_after: int, got: dict[str, list[str]]) -> None:
    """Read a request, leaving after so many events (-1: never); note what came, checking its order."""
    steps: dict[int, list[int]] = {choice: [] for choice in range(n)}
    ends: dict[int, Finished] = {}
    kinds: list[str] = []
    async with client.generate(request(id, n=n)) as stream:
        async for event in stream:
            kinds.append(type(event).__name__)
            if isinstance(event, Tokens):
                assert event.choice not in ends
                steps[event.choice] += event.tokens
            elif isinstance(event, Finished):
                ends[event.choice] = event
            if len(kinds) == leave_after:
                break
    got[id] = kinds
    assert kinds[:1] in (["Accepted"], [])
    for choice, tokens in steps.items():
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens))) if tokens else True  # dense: none missing
        if choice in ends:
            assert ends[choice].output_tokens == len(tokens)


async def test_C10_many_requests_leave_at_any_moment_and_nothing_stays_behind(endpoint: str) -> None:
    """120 requests of two front ends, n up to 3, left or cancelled anywhere: each ends once, every end is acknowledged,
    and the daemon's side runs empty."""
    rng = random.Random(5)
    got: dict[str, list[str]] = {}
    async with gateway(endpoint) as world, trio.open_nursery() as nursery:
        core = ToyCore(world, length=20)
        nursery.start_soon(core.run)
        async with DaemonClient(endpoint, "one") as one, DaemonClient(endpoint, "two") as two:
            await one.wait_connected(5)
            await two.wait_connected(5)
            async with trio.open_nursery() as readers:
                for number in range(120):
                    leave = rng.choice([-1, 0, 1, 2, 5])
                    client = rng.choice([one, two])
                    scope = await readers.start(cancellable, client, f"r{number}", rng.randrange(1, 4), leave, got)
                    if rng.random() < 0.2:
                        scope.cancel()
                    if rng.random() < 0.5:
                        await trio.sleep(0.001)
            while core.live or core.acknowledged < core.arrived:
                await core.turned()
            assert core.aborted > 0
            assert core.finished > 0
            assert {row["live_requests"] for row in world.gateway.frontends()} == {0}
            assert len(one._streams) == len(two._streams) == 0
            assert one._streams.numbers() == two._streams.numbers() == set()
        nursery.cancel_scope.cancel()
    whole = [kinds for kinds in got.values() if kinds[-1:] == ["Finished"]]
    assert len(whole) >= 20


async def cancellable(
    client: DaemonClient,
    id: str,
    n: int,
    leave_after: int,
    got: dict[str, list[str]],
    task_status: trio.TaskStatus[trio.CancelScope],
) -> None:
    """`consume` under a scope that the test may cancel."""
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await consume(client, id, n, leave_after, got)


async def test_refusals_and_stop_strings(endpoint: str) -> None:
    """The core's refusal reaches its stream; a stop string found here ends its choice there and no other."""
    async with gateway(endpoint) as world, trio.open_nursery() as nursery:
        nursery.start_soon(ToyCore(world, length=10_000).run)
        async with DaemonClient(endpoint, "fe") as client:
            await client.wait_connected(5)
            bad = request("bad")
            bad.max_tokens = 0
            async with client.generate(bad) as stream:
                (event,) = [event async for event in stream]
                assert isinstance(event, Refused)
                assert event.field == "max_tokens"
            async with client.generate(request("a", n=2)) as stream:
                assert isinstance(await anext(stream), Accepted)
                stream.finish_at(1, 3)
                ended = [e async for e in stream_until_finished(stream)]
                assert [(e.choice, e.reason) for e in ended] == [(1, "stop")]
                stream.abort()
                ended = [e async for e in stream_until_finished(stream)]
                assert [(e.choice, e.reason) for e in ended] == [(0, "abort")]
        nursery.cancel_scope.cancel()


async def stream_until_finished(stream):  # type: ignore[no-untyped-def]
    """Events up to the next Finished; only that one is given."""
    async for event in stream:
        if isinstance(event, Finished):
            yield event
            return


async def test_over_tcp_with_keys(run_dir: Path) -> None:
    """The whole way with CURVE: the known client is served, one without the right key is not even answered."""
    make_keys(run_dir, ["fe"])
    keys = load_client_keys(run_dir, "fe")
    async with gateway("tcp://127.0.0.1:*", keys=load_server_keys(run_dir)) as world, trio.open_nursery() as nursery:
        nursery.start_soon(ToyCore(world).run)
        endpoint = world.gateway.endpoint
        async with DaemonClient(endpoint, "fe", keys=keys) as good, DaemonClient(endpoint, "x", insecure=True) as bad:
            await good.wait_connected(10)
            got: dict[str, list[str]] = {}
            await consume(good, "a", 2, -1, got)
            assert got["a"][-1] == "Finished"
            with pytest.raises(DaemonLost):
                await bad.wait_connected(0.3)
        assert [row["name"] for row in world.gateway.frontends()] == ["fe"]
        nursery.cancel_scope.cancel()


# --- a real process --------------------------------------------------------------------------------------------------


@pytest.fixture
def daemon(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "tests.gateway.gateway_process", endpoint], cwd=ROOT)
    yield process
    process.kill()
    process.wait()


@pytest.mark.e2e
@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 4.0)])
async def test_X1_a_killed_or_stopped_daemon_is_noticed_in_time(
    endpoint: str, daemon: subprocess.Popen[bytes], how: signal.Signals, within_s: float
) -> None:
    """SIGKILL at once, SIGSTOP after `lost_after_s` and a ping: all 64 streams end with DaemonLost, none hangs."""
    lost: list[str] = []
    with trio.fail_after(40):
        async with DaemonClient(endpoint, "fe", lost_after_s=2.0, return_within_s=0.0) as client:
            await client.wait_connected(30)

            async def read(id: str, task_status: trio.TaskStatus[None]) -> None:
                try:
                    async with client.generate(request(id)) as stream:
                        async for event in stream:
                            if isinstance(event, Accepted):
                                task_status.started()
                except DaemonLost as error:
                    lost.append(error.reason)

            async with trio.open_nursery() as nursery:
                for number in range(64):
                    await nursery.start(read, f"r{number}")
                os.kill(daemon.pid, how)
                begun = trio.current_time()
            assert trio.current_time() - begun < within_s
            assert len(lost) == 64
            assert not client.connected
            if how is signal.SIGSTOP:  # it wakes up again: the client returns and clears what it left there
                os.kill(daemon.pid, signal.SIGCONT)
                await client.wait_connected(10)
                got: dict[str, list[str]] = {}
                await consume(client, "after", 1, 3, got)
                assert got["after"][0] == "Accepted"
                while len(client._streams):
                    await client.ask("ping")
