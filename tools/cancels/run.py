"""A run: one server of our own, its rounds, and what must be true when all is over.

Owns the server and the order. Must never end before the server has, whichever way it ends. The run directory must be
a fresh one: the whole journal in it is taken for this run's.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from ipc.client import DaemonClient
from ipc.errors import DaemonLost
from journal.reader import read_records
from journal.storage import DiskStorage
from tools.cancels import asks
from tools.cancels.failed import Failed
from tools.cancels.http_crowd import HttpCrowd
from tools.cancels.result import Bounds, row_of
from tools.cancels.round import LOOK_S, Plan, Rounds, Seen, gauges
from tools.cancels.trail import Trail
from tools.cancels.wire_crowd import WireCrowd
from tools.own_server import ROOT, OwnServer

CONNECT_WITHIN_S = 30.0
REST_WITHIN_S = 10.0
REPLAY_WITHIN_S = 600.0
Told = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """The server, its flags, and what is asked of it."""

    run_dir: Path
    serve: tuple[str, ...]
    rounds: int
    http: bool
    stall_ms: float


@dataclass(slots=True)
class Result:
    """What a run found; `units` by band are what was free at boot, at the end with what the cache would give, and
    at last with the cache emptied.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    units: dict[str, dict[str, int]] = field(default_factory=dict)
    replay: str = ""
    problems: list[str] = field(default_factory=list)  # of the server as a whole

    @property
    def missed(self) -> list[str]:
        """Everything that is wrong, in words."""
        rounds = [f"round {row['round']}: {text}" for row in self.rows for text in row["problems"]]
        return rounds + self.problems


def run(setting: Setting, plan: Plan, told: Told) -> Result:
    """All of it; raises Failed, ServerFailed, KeyboardInterrupt."""
    server, result, name = OwnServer(list(setting.serve), setting.run_dir), Result(), f"kept-{uuid.uuid4().hex[:6]}"
    seen: list[tuple[Seen, WireCrowd | HttpCrowd]] = []
    told("the server starts", 0, 1)
    try:
        server.start()
        trio.run(_all, setting, plan, server, name, seen, result, told)
        told("the server stops", 0, 1)
        if code := server.stop():
            result.problems.append(f"the server ended with code {code} when asked to stop")
    except BaseExceptionGroup as group:
        raise _first(group) from None
    finally:
        server.kill()
    told("the journal is read", 0, 1)
    found = Trail(read_records(DiskStorage(setting.run_dir / "journal")), name)
    bounds = Bounds(plan.cancels, setting.stall_ms)
    for one, crowd in seen:
        books, broken = (None, crowd.problems) if isinstance(crowd, HttpCrowd) else (crowd.books, [])
        result.rows.append(row_of(one, books, broken, found, bounds))
    told("replay check", 0, 1)
    code, result.replay = _replay(setting.run_dir)
    if code:
        result.problems.append(f"replay check ended with code {code}: {result.replay}")
    return result


async def _all(
    setting: Setting,
    plan: Plan,
    server: OwnServer,
    name: str,
    seen: list[tuple[Seen, WireCrowd | HttpCrowd]],
    result: Result,
    told: Told,
) -> None:
    endpoint = f"ipc://{setting.run_dir.absolute() / 'front.sock'}"
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(DaemonClient(endpoint, name, return_within_s=0.0))
        try:
            await client.wait_connected(CONNECT_WITHIN_S)
            boot = await gauges(client)
            for number in range(1, setting.rounds + 1):
                rounds = Rounds(plan, client, lambda what, *counts, n=number: told(f"round {n}: {what}", *counts))
                crowd = _crowd(setting, plan, server, endpoint, f"crowd-{number}-{name}", number)
                async with crowd.open():
                    seen.append((await rounds.run(number, crowd), crowd))
                await rounds.repeat(seen[-1][0])
            await _rest(client, boot, result)
        except DaemonLost as error:
            raise Failed(f"the daemon was lost: {error}") from error


def _crowd(
    setting: Setting, plan: Plan, server: OwnServer, endpoint: str, name: str, number: int
) -> WireCrowd | HttpCrowd:
    made = asks.crowd(plan.seed, number, plan.cancels)
    return HttpCrowd(server.url, made) if setting.http else WireCrowd(endpoint, name, made)


async def _rest(client: DaemonClient, boot: dict[str, int], result: Result) -> None:
    """Nothing is held but by the prefix cache, and nothing at all once that is empty."""
    bands = [name.removeprefix("free_units_") for name in boot if name.startswith("free_units_")]
    held: dict[str, int] = {}
    with trio.move_on_after(REST_WITHIN_S):
        while True:
            now = await gauges(client)
            held = {band: now[f"live_units_{band}"] - now[f"reclaimable_units_{band}"] for band in bands}
            if not now["live"] and not any(held.values()):
                break
            await trio.sleep(LOOK_S)
    now = await gauges(client)
    if now["live"]:
        result.problems.append(f"{now['live']} requests live at the end")
    for band in bands:
        free, reclaimable = now[f"free_units_{band}"], now[f"reclaimable_units_{band}"]
        result.units[band] = {"boot": boot[f"free_units_{band}"], "free": free, "reclaimable": reclaimable}
        if held[band]:
            result.problems.append(f"{held[band]} units of {band} are held at the end, and not by the prefix cache")
    await client.ask("flush_cache")
    now = await gauges(client)
    for band, units in result.units.items():
        units["emptied"] = now[f"free_units_{band}"]
        if units["emptied"] != units["boot"]:
            text = f"{units['emptied']} units of {band} are free with an empty cache, {units['boot']} were at boot"
            result.problems.append(text)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a person is told of a group: an interrupt before all, then the first of its exceptions."""
    if group.subgroup(KeyboardInterrupt) is not None:
        return KeyboardInterrupt()
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _replay(run_dir: Path) -> tuple[int, str]:
    """Exit code and last line of `bandmaster replay check`."""
    command = [sys.executable, "-m", "tools.cli", "replay", "check", str(run_dir / "journal")]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=REPLAY_WITHIN_S)
    except subprocess.TimeoutExpired:
        return 1, f"not done within {REPLAY_WITHIN_S:g} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""
