"""Rounds: the clients of a campaign against a running server, once undisturbed and once for every strike.

Owns the front ends over ZeroMQ, the order of events in a round and its books. Must never go on to the next round before
everything asked in this one has ended, the server is green and holds nothing but its cache.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import trio

from ipc.client import DaemonClient
from tools.faults import http_clients, product_clients
from tools.faults.strikes import Strike, deliver, victims
from tools.faults.watch import Seen, Watch
from tools.faults.wire_clients import WireFrontEnd
from tools.faults.work import CLIENT, HTTP, Story, Task
from tools.own_server import OwnServer, ServerFailed

LABEL = re.compile(r'(\w+)="([^"]*)"')  # of a sample
STRIKE_WITHIN_S = 1.0  # of the end of the last client
VICTIM_WITHIN_S = 10.0
LAUNCHER_RESTS_S = 2.0  # how long a stopped launcher stays stopped
GONE_WITHIN_S = 30.0
GREEN_WITHIN_S = 120.0
IDLE_WITHIN_S = 60.0
LOOK_S = 0.05
BEFORE_OUTPUT = 0.05  # strikes of a smaller share come while requests arrive and prompts are computed
WIRE_FRONT_ENDS = 2
ZERO_AT_REST = ("requests_running", "requests_waiting", "requests_prefilling", "requests_parked", "steps_in_flight")


@dataclass(slots=True)
class Round:
    """The books of one round; times are monotonic seconds."""

    number: int
    strike: Strike | None
    stories: list[Story]
    began_s: float = 0.0
    struck_s: float = 0.0
    ended_s: float = 0.0
    victim: str = ""
    gone_s: float | None = None  # from the death of the launcher until no process of its server lived
    seen: Seen = field(default_factory=lambda: Seen(None, None, 0.0, None))
    units_left: dict[str, float] = field(default_factory=dict)  # bands whose live units are not the cache's
    problems: list[str] = field(default_factory=list)  # of the server, not of a client


class Rounds:
    """Runs rounds against one server, which it starts again where a strike ended it."""

    def __init__(self, server: OwnServer, tasks: list[Task], patience_s: float, nonce: str) -> None:
        self.server = server
        self._tasks = tasks
        self._patience_s = patience_s
        self._nonce = nonce
        self._watch = Watch(server.url)
        endpoint = f"ipc://{Path(server.run_dir).absolute() / 'front.sock'}"
        self._wires = [WireFrontEnd(endpoint, f"wire-{at}-{nonce}") for at in range(WIRE_FRONT_ENDS)]
        self.client = DaemonClient(endpoint, f"client-{nonce}", lost_after_s=patience_s)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Rounds]:
        """Front ends connected and the monitor looking, until left."""
        async with self.client, trio.open_nursery() as nursery:
            for wire in self._wires:
                nursery.start_soon(wire.run)
            nursery.start_soon(self._watch.run)
            await self.client.wait_connected(GREEN_WITHIN_S)
            yield self
            nursery.cancel_scope.cancel()

    async def run(self, number: int, strike: Strike | None, undisturbed_s: float, notes: Path | None = None) -> Round:
        """One round: everything asked at once, the strike at its share of all output.

        Faults that were planted in the processes strike by themselves, and leave their time in `notes`.
        """
        done = Round(number, strike, [Story(task) for task in self._tasks], began_s=time.monotonic())
        async with trio.open_nursery() as nursery:
            struck = trio.Event()
            if strike is None:
                struck.set()
            else:
                nursery.start_soon(self._strike, done, strike, undisturbed_s, struck)
            if strike is None or strike.kind != "launcher:kill":
                nursery.start_soon(self._keep_up, done)
            with trio.move_on_after(self._patience_s):
                async with http_clients.open_client(self.server.url, 64) as http, trio.open_nursery() as clients:
                    for story in done.stories:
                        clients.start_soon(self._follow, http, done, story)
            await self._await_strike(done, struck)
            nursery.cancel_scope.cancel()
        done.ended_s = time.monotonic()
        await self._settle(done)
        arrivals = [moment for story in done.stories for moment in story.arrivals_s]
        if notes is not None:
            read_notes(done, notes)
        if done.struck_s:
            done.seen = self._watch.seen(done.struck_s, time.monotonic(), arrivals)
        return done

    async def _follow(self, http: Any, done: Round, story: Story) -> None:
        task, name = story.task, f"{done.number}-{story.task.index}-{self._nonce}"
        if task.via == HTTP:
            breaks = done.strike is not None and done.strike.breaks_http
            await http_clients.follow(http, story, done.number, lambda: breaks and done.struck_s > 0)
        elif task.via == CLIENT:
            await product_clients.follow(self.client, story, done.number, name)
        else:
            wire = self._wires[task.index // 4 % len(self._wires)]
            await wire.follow(story, task.generate(done.number, name))

    # --- the strike

    async def _strike(self, done: Round, strike: Strike, undisturbed_s: float, struck: trio.Event) -> None:
        """At its share of the output; one that comes before any output, at its share of the time."""
        asked = sum(story.task.output_tokens for story in done.stories)
        if strike.share < BEFORE_OUTPUT:
            await trio.sleep(strike.share * undisturbed_s)
        else:
            while sum(len(story.tokens) for story in done.stories) < strike.share * asked:
                await trio.sleep(LOOK_S / 10)
        try:
            await self._deliver(done, strike)
        finally:
            struck.set()

    @staticmethod
    async def _await_strike(done: Round, struck: trio.Event) -> None:
        """Every client has ended or given up: the strike has come, or never will."""
        with trio.move_on_after(STRIKE_WITHIN_S):
            while not (done.struck_s or struck.is_set()):
                await trio.sleep(LOOK_S)
        if done.struck_s:
            await struck.wait()
        elif not struck.is_set():
            done.problems.append("its strike never came: too little output")

    async def _deliver(self, done: Round, strike: Strike) -> None:
        if strike.kind.startswith("client"):
            done.struck_s, done.victim = time.monotonic(), "the campaign's own front ends"
            for wire in self._wires:
                wire.vanish()
            return
        for pause_s, kind, which in strike.blows():
            await trio.sleep(pause_s)
            await self._blow(done, kind, which)

    async def _blow(self, done: Round, kind: str, which: int) -> None:
        with trio.move_on_after(VICTIM_WITHIN_S):  # one that was struck before may not have its successor yet
            while not (found := await trio.to_thread.run_sync(victims, self.server, kind)):
                await trio.sleep(LOOK_S)
        if not found:
            done.problems.append(f"no process to strike: {kind}")
            return
        process, family = found[which % len(found)], self.server.processes()
        named = f"{kind.partition(':')[0]} {which % len(found) + 1} of {len(found)}, pid {process.pid}"
        done.victim = ", ".join(filter(None, [done.victim, named]))
        done.struck_s = done.struck_s or time.monotonic()
        deliver(process, kind)
        if kind == "launcher:stop":
            await trio.sleep(LAUNCHER_RESTS_S)
            process.resume()
        elif kind == "launcher:kill":
            await trio.to_thread.run_sync(self._start_again, done, family)

    async def _keep_up(self, done: Round) -> None:
        """A server that ends unasked is a problem, and is started again, so that the round can go on."""
        while True:
            await trio.sleep(LOOK_S)
            code = self.server.exit_code
            if code is None:
                continue
            done.problems.append(f"the server ended with code {code} (see {self._keep_tail(done)})")
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._start, done)

    def _keep_tail(self, done: Round) -> Path:
        """What the server said last, in a file beside the run directory."""
        path = self.server.run_dir.with_name(f"{self.server.run_dir.name}.round-{done.number}.txt")
        path.write_text(self.server.tail())
        return path

    def _start_again(self, done: Round, family: list[psutil.Process]) -> None:
        """Everything of the server must end by itself; then it is started again in the same place."""
        _, left = psutil.wait_procs(family, timeout=GONE_WITHIN_S)
        done.gone_s = time.monotonic() - done.struck_s
        if left:
            done.problems.append(f"outlived the launcher by {GONE_WITHIN_S:g} s: pids {[one.pid for one in left]}")
            for process in left:
                process.kill()
        self._start(done)

    def _start(self, done: Round) -> None:
        try:
            self.server.start(GREEN_WITHIN_S)
        except ServerFailed as error:
            done.problems.append(f"it did not start again: {str(error).splitlines()[0]} (see {self._keep_tail(done)})")

    # --- the end of a round

    async def _settle(self, done: Round) -> None:
        """Wait for green and idle; what does not come is a problem of the round."""
        with trio.move_on_after(GREEN_WITHIN_S) as scope:
            while not self._watch.green_since(done.ended_s):
                await trio.sleep(LOOK_S)
                if self.server.exit_code is not None:
                    text = f"the server ended with code {self.server.exit_code} (see {self._keep_tail(done)})"
                    done.problems.append(text)
                    return
        if scope.cancelled_caught:
            done.problems.append(f"not green within {GREEN_WITHIN_S:g} s behind its last request")
            return
        with trio.move_on_after(IDLE_WITHIN_S):
            while True:
                done.units_left = await trio.to_thread.run_sync(units_left, self.server)
                if not done.units_left:
                    return
                await trio.sleep(LOOK_S)
        done.problems.append(f"not idle within {IDLE_WITHIN_S:g} s: {done.units_left}")


def read_notes(done: Round, notes: Path) -> None:
    """When the first planted fault struck and whom, by the notes that the processes left."""
    fired = sorted((json.loads(path.read_text()) for path in notes.iterdir()), key=lambda note: note["monotonic_ns"])
    if fired:
        done.struck_s = max(fired[0]["monotonic_ns"] / 1e9, done.began_s)  # some strike while the process starts
        done.victim = ", ".join(f"{note['process']} at {note['number']}" for note in fired)


def units_left(server: OwnServer) -> dict[str, float]:
    """What keeps the server from being at rest: requests and steps, and units that nothing reclaimable accounts for."""
    try:
        metrics = server.metrics()
    except ServerFailed as error:
        return {str(error)[:200]: 1.0}
    left: dict[str, float] = {}
    for name in ZERO_AT_REST:
        if value := metrics.get(f"bandmaster:num_{name}", math.nan):  # what is not told is not at rest
            left[f"num_{name}"] = value
    cached = by_band(metrics, "cached_units")
    held: dict[tuple[str, str], float] = {}
    for sample, value in metrics.items():
        labels = dict(LABEL.findall(sample))
        if sample.startswith("bandmaster:units{") and labels["state"] in ("live", "pending"):
            place = labels["band"], labels["stage"]
            held[place] = held.get(place, 0.0) + value
    for (band, stage), value in held.items():
        if value != cached.get(band, 0.0):  # what is cached is so on every stage that stores the band
            left[f"units of {band} on stage {stage}"] = value - cached.get(band, 0.0)
    return left


def by_band(metrics: dict[str, float], name: str, states: tuple[str, ...] = ("",)) -> dict[str, float]:
    """A metric's sum by band, over some of its states."""
    found: dict[str, float] = {}
    for sample, value in metrics.items():
        labels = dict(LABEL.findall(sample))
        if sample.startswith(f"bandmaster:{name}{{") and labels.get("state", "") in states:
            found[labels["band"]] = found.get(labels["band"], 0.0) + value
    return found
