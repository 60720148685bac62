"""Rerun: the same arrivals once more, at the same times, on a real daemon of our own with the changed settings.

Owns the server and the client that sends. Must never touch the recorded run, and never help the daemon: what is read
of the rerun is its own journal. Invariants: a request is sent with the seed that it had; a client that hung up hangs up
again as long after the first arrival; leaving ends the server.

Nothing here dies on purpose: where ranks or the daemon were lost in the recorded run, the rerun goes on.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import trio

from daemon.config import show
from daemon.core import inputs
from daemon.settings_table import Settings
from ipc.client import DaemonClient
from ipc.client_stream import RequestStream, Tokens
from ipc.errors import DaemonLost
from ipc.messages import Generate
from journal.storage import DiskStorage
from tools.own_server import OwnServer
from tools.whatif.errors import WhatIfError
from tools.whatif.recorded import Recorded, read_journal
from tools.whatif.traffic import NEVER, WHOLE, Traffic, arrival_of

CONNECT_WITHIN_S = 60.0
SPAWN_AHEAD_S = 5.0  # requests are made ready so long before they are sent
OWN: dict[str, Any] = {
    "run_dir": "",
    "endpoint": "",
    "keys": "",
    "insecure": False,
    "ranks_endpoint": "",
    "rank_launch": "spawn",
}
FRONTEND = "what-if"


class Sending(NamedTuple):
    """One request: when it is sent and, where it was, hung up on, in ns behind the first; where its choices stop."""

    at_ns: int
    generate: Generate
    hang_up_ns: int = NEVER
    stops: tuple[int, ...] = ()  # by choice, output tokens behind which its stop string was found, or -1


def sendings(traffic: Traffic) -> list[Sending]:
    """The requests of a recorded run in order, each with the seed that it had."""
    hang_ups = _hang_ups(traffic)
    found: list[Sending] = []
    first_ns = NEVER
    for event in traffic.events():
        if not isinstance(event, inputs.Arrived):
            continue
        first_ns = event.now_ns if first_ns == NEVER else first_ns
        generate, arrival = event.generate, arrival_of(event.generate.id)
        seed = event.seed if generate.sampling.seed is None else generate.sampling.seed
        sampling = msgspec.structs.replace(generate.sampling, seed=seed)
        slot = traffic.first_slot[arrival]
        count = (
            traffic.first_slot[arrival + 1] if arrival + 1 < len(traffic.first_slot) else len(traffic.offset)
        ) - slot
        stops = tuple(traffic.stop_at[at] if traffic.state[at] == WHOLE else NEVER for at in range(slot, slot + count))
        hang_up_ns = hang_ups.get(generate.id, NEVER)
        found.append(
            Sending(
                event.now_ns - first_ns,
                msgspec.structs.replace(generate, sampling=sampling),
                hang_up_ns - first_ns if hang_up_ns != NEVER else NEVER,
                stops,
            )
        )
    return found


def _hang_ups(traffic: Traffic) -> dict[str, int]:
    """When each request was ended from outside, by id."""
    found: dict[str, int] = {}
    owned: dict[str, list[str]] = {}
    for event in traffic.events():
        if isinstance(event, inputs.Arrived):
            owned.setdefault(event.frontend, []).append(event.generate.id)
        elif isinstance(event, inputs.Aborted):
            found.setdefault(event.id, event.now_ns)
        elif isinstance(event, inputs.FrontEndLost):
            for id in owned.pop(event.frontend, []):
                found.setdefault(id, event.now_ns)
    return found


def settings_for(settings: Settings, arena_bytes: int) -> Settings:
    """Settings of a server of our own that is to be like a recorded one."""
    return dataclasses.replace(settings, **OWN, arena_bytes=arena_bytes, port=0, restarts_max=0)


class Run(NamedTuple):
    """A server to be started, what is sent to it, when to hang up, and who sees what its journal says."""

    settings: Settings
    requests: list[Sending]
    until_ns: int
    use: Callable[[Recorded], object]


def run_server(settings: Settings, requests: list[Sending], directory: Path, until_ns: int = NEVER) -> Path:
    """Start a server, send everything, stop the server; the run directory with its journal. `until_ns`: hang up then.

    Raises WhatIfError when the server does not outlive its requests, and what OwnServer raises.
    """
    with _as_one_error():
        return trio.run(_serve, settings, requests, directory, until_ns)


def run_all(runs: list[Run], together: int = 1) -> None:
    """Run each for real, so many side by side, and let its `use` see its journal before everything of it is removed.

    Raises as `run_server` does; the first that fails ends the others.
    """
    with _as_one_error():
        trio.run(_run_all, runs, together)


async def _run_all(runs: list[Run], together: int) -> None:
    places = trio.CapacityLimiter(together)
    async with trio.open_nursery() as nursery:
        for run in runs:
            nursery.start_soon(_run, run, places)


async def _run(run: Run, places: trio.CapacityLimiter) -> None:
    async with places:
        with tempfile.TemporaryDirectory(prefix="bandmaster-rerun-") as temporary:
            run_dir = await _serve(run.settings, run.requests, Path(temporary), run.until_ns)
            await trio.to_thread.run_sync(_read_run, run_dir, run.use)


def _read_run(run_dir: Path, use: Callable[[Recorded], object]) -> None:
    with Traffic() as traffic:
        use(read_journal(DiskStorage(run_dir / "journal"), traffic, names=True))


async def _serve(settings: Settings, requests: list[Sending], directory: Path, until_ns: int) -> Path:
    directory = directory.absolute()  # the server has a working directory of its own
    config = directory / "settings.toml"
    config.write_text(show("serve", settings))
    run_dir = directory / "run"
    server = OwnServer(["--config", str(config)], run_dir=run_dir)
    try:
        await trio.to_thread.run_sync(server.start)
        await _send_all(f"ipc://{run_dir.absolute() / 'front.sock'}", requests, until_ns)
        if server.exit_code is not None:
            raise WhatIfError(f"the server of the rerun ended with code {server.exit_code}\n{server.tail()}")
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(server.__exit__, None, None, None)
    return run_dir


@contextmanager
def _as_one_error() -> Iterator[None]:
    """Of several errors of tasks that run together the first is the one that counts."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def _send_all(endpoint: str, requests: list[Sending], until_ns: int) -> None:
    async with DaemonClient(endpoint, FRONTEND) as client:
        await client.wait_connected(CONNECT_WITHIN_S)
        begun_s = trio.current_time() + 0.2
        async with trio.open_nursery() as nursery:
            for sending in requests:
                await trio.sleep_until(begun_s + sending.at_ns / 1e9 - SPAWN_AHEAD_S)
                nursery.start_soon(_send, client, sending, begun_s)
            if until_ns != NEVER:
                await trio.sleep_until(begun_s + until_ns / 1e9)
                nursery.cancel_scope.cancel()


async def _send(client: DaemonClient, sending: Sending, begun_s: float) -> None:
    """One request at its time, read to its end, or left when its client hung up."""
    await trio.sleep_until(begun_s + sending.at_ns / 1e9)
    hang_up_s = begun_s + sending.hang_up_ns / 1e9 if sending.hang_up_ns != NEVER else float("inf")
    try:
        with trio.CancelScope(deadline=hang_up_s):
            async with client.generate(sending.generate) as stream:
                await _read(stream, sending.stops)
    except DaemonLost as error:
        raise WhatIfError(f"the rerun lost its daemon: {error}") from error


async def _read(stream: RequestStream, stops: tuple[int, ...]) -> None:
    """Read to the end; where a stop string was found, say so."""
    made = [0] * len(stops)
    async for event in stream:
        if isinstance(event, Tokens) and event.choice < len(stops):
            before = made[event.choice]
            made[event.choice] += len(event.tokens)
            if before < stops[event.choice] <= made[event.choice]:
                stream.finish_at(event.choice, stops[event.choice])
