"""A daemon of our own with a modeled rank, and a front end's client on it.

Owns the patience of the process tests. Must never leave a process: leaving the context kills what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import trio

from allocator.columns import pack_i64
from ipc.client import DaemonClient
from ipc.client_stream import Tokens
from ipc.errors import DaemonLost
from ipc.keys import ClientKeys
from ipc.messages import Accepted, Finished, Generate, Refused, Sampling
from journal.reader import read_records
from journal.records import Kind
from journal.storage import DiskStorage

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60


class DaemonProcess:
    """One `python -m daemon`; `code` waits for its exit code."""

    def __init__(
        self,
        run_dir: Path,
        *flags: str,
        delay_us: int = 0,
        environ: dict[str, str] | None = None,
        parent: Sequence[str] = (),
    ) -> None:
        """`parent`: a command line that gets ours behind it, and starts it."""
        self.run_dir = run_dir
        command = [*parent]
        command += [sys.executable, "-m", "daemon", "--run-dir", str(run_dir), "--rank-runner", "modeled"]
        command += ["--rank-option", f"delay_us={delay_us}", "--log-format", "json", *flags]
        own = {name: text for name, text in os.environ.items() if not name.startswith("BANDMASTER_")}
        self.output = run_dir.with_suffix(".out")
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=own | (environ or {}), stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    async def code(self) -> int:
        with trio.fail_after(PATIENCE_S):
            return await trio.to_thread.run_sync(self.process.wait)

    def ranks(self) -> list[psutil.Process]:
        return [psutil.Process(int(line.split()[0])) for line in (self.run_dir / "ranks.pid").read_text().splitlines()]

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Log lines of this event, over all lives."""
        found = [json.loads(line) for line in (self.run_dir / "logs" / "daemon.log").read_text().splitlines()]
        return [line for line in found if line["event"] == event]

    def kill(self) -> None:
        for process in [self.process, *psutil.Process(self.process.pid).children()] if self.alive() else []:
            process.kill()
        self.process.wait()

    def alive(self) -> bool:
        return self.process.poll() is None


@contextlib.asynccontextmanager
async def running(
    run_dir: Path,
    *flags: str,
    delay_us: int = 0,
    lost_after_s: float = 5.0,
    return_within_s: float = 0.0,
    environ: dict[str, str] | None = None,
    keys: ClientKeys | None = None,
    parent: Sequence[str] = (),
) -> AsyncIterator[tuple[DaemonProcess, DaemonClient]]:
    """A ready daemon and a connected client, whose streams wait so long for a daemon that is gone."""
    daemon = DaemonProcess(run_dir, *flags, delay_us=delay_us, environ=environ, parent=parent)
    try:
        endpoint = f"ipc://{run_dir}/front.sock"
        client = DaemonClient(endpoint, "fe", keys=keys, lost_after_s=lost_after_s, return_within_s=return_within_s)
        async with client:
            await client.wait_connected(PATIENCE_S)
            yield daemon, client
    finally:
        daemon.kill()


def kinds(run_dir: Path) -> list[Kind]:
    """Of every record of a daemon's journal, in order."""
    return [Kind(record.kind) for record in read_records(DiskStorage(run_dir / "journal"))]


class Outcome:
    """How one request went: tokens, and its end in one word."""

    def __init__(self) -> None:
        self.tokens = 0
        self.end = ""
        self.detail = ""
        self.decoding = trio.Event()


def greedy(name: str, max_tokens: int) -> Generate:
    """A greedy request of three tokens."""
    return Generate(name, pack_i64([5, 6, 7]), Sampling(temperature=0.0), max_tokens=max_tokens)


async def request(client: DaemonClient, name: str, outcome: Outcome, max_tokens: int = 8) -> None:
    """Send one request and follow it to its end: an EndReason, `refused CODE`, or `lost`."""
    try:
        async with client.generate(greedy(name, max_tokens)) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    outcome.tokens += len(event.tokens)
                    outcome.decoding.set()
                elif isinstance(event, Finished):
                    outcome.end, outcome.detail = event.reason, event.detail
                elif isinstance(event, Refused):
                    outcome.end = f"refused {event.code}"
                else:
                    assert isinstance(event, Accepted)
    except DaemonLost:
        outcome.end = "lost"


async def under_load(client: DaemonClient, count: int, max_tokens: int, act: Any) -> list[Outcome]:
    """Start requests, wait until all decode, do `act`; returns when each has its end."""
    outcomes = [Outcome() for _ in range(count)]
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for index, outcome in enumerate(outcomes):
                nursery.start_soon(request, client, f"r{index}", outcome, max_tokens)
            for outcome in outcomes:
                await outcome.decoding.wait()
            await act()
    return outcomes
