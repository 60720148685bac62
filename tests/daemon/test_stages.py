"""The whole daemon before modeled ranks of several stages: a thousand cancels, orders under load, divergences."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from allocator.columns import pack_i64
from daemon.core.inputs import Reported
from daemon.exits import Exit
from ipc.client import DaemonClient
from ipc.client_stream import RequestStream, Tokens
from ipc.messages import Accepted, Finished, Generate, Sampling
from journal.reader import read_records
from journal.records import Kind, decode
from journal.storage import DiskStorage
from tests.daemon.daemon_process import ROOT, DaemonProcess, running
from tools.replay import replay_directory
from tools.toy_reference import Toy, mismatches

pytestmark = pytest.mark.e2e
PATIENCE_S = 60.0


class Reader:
    """One request: its stream, what it was told and when, and its end."""

    def __init__(self, name: str, max_tokens: int, seed: int) -> None:
        self.prompt = [100 + (seed * 37 + k * 11) % 5000 for k in range(6 + seed % 9)]
        self.generate = Generate(name, pack_i64(self.prompt), Sampling(temperature=0.0), max_tokens=max_tokens)
        self.stream: RequestStream | None = None
        self.accepted, self.decoding = trio.Event(), trio.Event()
        self.said: list[int] = []
        self.gaps_s: list[float] = []
        self.end = ""

    async def read(self, client: DaemonClient) -> None:
        """Follow the request to its end."""
        async with client.generate(self.generate) as stream:
            self.stream, heard = stream, trio.current_time()
            async for event in stream:
                if isinstance(event, Tokens):
                    self.said += [int(token) for token in event.tokens]
                    self.gaps_s.append(trio.current_time() - heard)
                    heard = trio.current_time()
                    self.decoding.set()
                elif isinstance(event, Accepted):
                    self.accepted.set()
                elif isinstance(event, Finished):
                    self.end = event.reason


async def status(client: DaemonClient) -> dict[str, Any]:
    """What the daemon says of itself."""
    return dict(json.loads((await client.ask("status")).body))


async def rests(client: DaemonClient) -> None:
    """Until nothing runs; then the cache is dropped, and nothing may be live on any rank."""
    with trio.fail_after(PATIENCE_S):
        while (await status(client))["core"]["requests"]:
            await trio.sleep(0.02)
        while not (await client.ask("flush_cache")).ok:
            await trio.sleep(0.02)
        while any(
            live or pending for live, _, pending, _ in json.loads((await client.ask("status")).body)["bands"].values()
        ):
            await trio.sleep(0.02)


async def ended(daemon: DaemonProcess) -> None:
    """Ordered to stop it ends cleanly, and its journal replays on every stage."""
    daemon.send(signal.SIGTERM)
    assert await daemon.code() == Exit.CLEAN
    assert replay_directory(str(daemon.run_dir)).divergence is None


async def test_a_thousand_cancels_at_once_do_not_stall_two_stages(tmp_path: Path) -> None:
    """1,000 running and waiting requests end at once, in few steps; what runs beside them goes on, and is right."""
    flags = ("--pp", "2", "--max-running-requests", "256", "--max-queued-requests", "2000")
    keepers = [Reader(f"keep{k}", 300, k) for k in range(8)]
    victims = [Reader(f"gone{k}", 4000, k) for k in range(1000)]
    async with running(tmp_path / "run", *flags, delay_us=3000) as (daemon, client), trio.open_nursery() as nursery:
        with trio.fail_after(PATIENCE_S):
            for reader in keepers:
                nursery.start_soon(reader.read, client)
            for reader in keepers:
                await reader.decoding.wait()
            for reader in victims:
                nursery.start_soon(reader.read, client)
            for reader in victims:
                await reader.accepted.wait()
            while sum(reader.decoding.is_set() for reader in victims) < 200:
                await trio.sleep(0.01)
            before = [len(reader.gaps_s) for reader in keepers]
            asked = trio.current_time()
            for reader in victims:
                assert reader.stream is not None
                reader.stream.abort()
            while any(not reader.end for reader in victims):
                await trio.sleep(0.01)
            took_s = trio.current_time() - asked
            while any(not reader.end for reader in keepers):
                await trio.sleep(0.01)
        await rests(client)
        await ended(daemon)
        nursery.cancel_scope.cancel()
    assert {reader.end for reader in victims} == {"abort"}
    assert {reader.end for reader in keepers} == {"length"}
    assert all(not mismatches(Toy(depth=2), reader.prompt, reader.said) for reader in [*keepers, *victims])
    longest_s = max(max(reader.gaps_s[seen:]) for reader, seen in zip(keepers, before, strict=True))
    steps = steps_between_aborts(daemon.run_dir)
    assert steps <= 200, (
        f"{steps} steps from the first cancel to the last; {took_s:.2f} s, longest gap {longest_s:.2f} s"
    )
    assert longest_s < PATIENCE_S / 10, f"a stream that went on had to wait {longest_s:.2f} s"


def steps_between_aborts(run_dir: Path) -> int:
    """Steps that were sent from the first Aborted on until the last."""
    kinds = [Kind(record.kind) for record in read_records(DiskStorage(run_dir / "journal"))]
    aborts = [at for at, kind in enumerate(kinds) if kind is Kind.ABORTED]
    assert len(aborts) == 1000, f"{len(aborts)} cancels reached the core"
    return kinds[aborts[0] : aborts[-1]].count(Kind.STEPPED)


async def test_orders_at_any_time_are_answered_by_four_stages(tmp_path: Path) -> None:
    """Compaction, cache flush, status, metrics, health while all stages work: answered, no stall (user report R6)."""
    readers = [Reader(f"r{k}", 150, k) for k in range(24)]
    rng = random.Random(6)
    answered = 0
    async with (
        running(tmp_path / "run", "--pp", "4", delay_us=2000) as (daemon, client),
        trio.open_nursery() as nursery,
    ):
        with trio.fail_after(PATIENCE_S):
            for reader in readers:
                nursery.start_soon(reader.read, client)
            while any(not reader.end for reader in readers):
                what = rng.choice(["flush", "flush_cache", "status", "metrics", "health"])
                answer = await client.ask(what, timeout_s=10.0)
                assert answer.ok or what == "flush_cache", f"{what}: {answer.body}"
                answered += 1
        await rests(client)
        await ended(daemon)
        nursery.cancel_scope.cancel()
    assert answered >= 10
    assert {reader.end for reader in readers} == {"length"}
    assert all(not mismatches(Toy(depth=4), reader.prompt, reader.said) for reader in readers)


PLANT = """
import os, sys, time
marker = {marker!r}
arguments = " ".join(getattr(sys, "orig_argv", []))
if "daemon.rank" in arguments and "--stage 1 --rank 1" in arguments and not os.path.exists(marker):
    open(marker, "w").close()
    from daemon.rank.step_worker import StepWorker
    from tools.groups.plants import by_the_clock, other_hole
    made = StepWorker.__init__
    def init(self, *arguments):
        made(self, *arguments)
        ended = lambda: self._newest_forward if time.monotonic_ns() >> 16 & 1 else 0
        plant = other_hole if {kind!r} == "hole" else by_the_clock(ended)
        plant(self, 40)
    StepWorker.__init__ = init
"""


@pytest.mark.parametrize("kind", ["hole", "clock"])
async def test_R2_a_rank_that_decides_by_itself_is_named_and_nothing_of_it_is_told(tmp_path: Path, kind: str) -> None:
    """A tensor rank of the last stage picks another hole, or reads a clock: step, op, band are named; all goes on."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(PLANT.format(marker=str(tmp_path / "planted"), kind=kind))
    environ = {"PYTHONPATH": f"{hook}:{ROOT}"}
    readers = [Reader(f"r{k}", 30 + 15 * k, k) for k in range(12)]
    flags = ("--tp", "2", "--pp", "2", "--page-size", "2", "--no-enable-prefix-caching")
    async with running(tmp_path / "run", *flags, delay_us=1000, environ=environ) as (daemon, client):
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for reader in readers:
                    nursery.start_soon(reader.read, client)
        await ended(daemon)
    (found,) = daemon.lines("Diverged")
    assert found["seq"] >= 40
    assert {found["left"], found["right"]} == {"rank 1.0", "rank 1.1"}
    if kind == "hole":
        assert (found["kind"], found["band"]) == ("Take", "full")
    records = read_records(DiskStorage(daemon.run_dir / "journal"))
    payloads = [record.payload for record in records if Kind(record.kind) is Kind.REPORTED]
    reported = [decode(Kind.REPORTED, payload) for payload in payloads]
    assert max(item.seq for item in reported if isinstance(item, Reported) and item.epoch == 1) == found["seq"] - 1
    assert {reader.end for reader in readers} == {"length"}
    assert all(not mismatches(Toy(depth=2), reader.prompt, reader.said) for reader in readers)
