"""`bandmaster bench snapshot`: what a snapshot costs the loop, whatever the prefix cache holds.

Owns the measurement: how long the core takes to encode, which would be the pause without a copy of the process; the
pause for the fork; steps beside the copy and without it; the time until the file is on disk; a stage's part, encoded
and packed. Must never write anywhere but into a temporary directory. No model. Processor time of the thread, unless a
column says wall. Exit code 0; with `--check` 1 where a pause is longer than promised.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import trio
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from allocator.geometry import BandGeometry
from allocator.logical.mirror import LogicalMirror
from daemon.snapshot_draft import ForkedDraft, Moment, Written
from daemon.snapshots import core_state
from ipc.digests import SAMPLED_START
from ipc.messages import Step
from ipc.packing import pack
from journal.opening import open_journal
from journal.storage import DiskStorage
from journal.writer import JournalSettings, JournalWriter
from tools.bench_cache import fill, quantiles
from tools.bench_core import BenchWorld, bands_of
from tools.replica import StageReplica
from tools.tables import print_table

PAUSE_MS_MAX = 5.0  # promised for a small daemon,
PAUSE_US_PER_MIB_MAX = 60.0  # and so much more for each MiB that it holds
STEPS_ALONE = 200
STEPS_BESIDE_MAX = 1500
STEP_S = 0.01  # the forward that the daemon waits for

Row = dict[str, Any]


class FollowedWorld(BenchWorld):
    """A bench's world whose steps a stage can follow."""

    def __init__(self, running: int, journal: JournalWriter, bands: list[BandGeometry], spare_pages: int) -> None:
        self.made: list[Step] = []
        super().__init__(running, STEPS_ALONE + STEPS_BESIDE_MAX, journal, bands, spare_pages=spare_pages)

    def tick(self) -> None:
        """See BenchWorld."""
        before = len(self.in_flight)
        super().tick()
        self.made += self.in_flight[before:]

    def measure(self) -> tuple[int, int]:
        """See BenchWorld."""
        times = super().measure()
        self.made.append(self.in_flight[-1])
        return times


def row(nodes: int, running: int) -> Row:
    """All that is measured at one size of the prefix tree."""
    with tempfile.TemporaryDirectory(prefix="bandmaster-bench-") as directory:
        storage = DiskStorage(Path(directory))
        journal, _ = open_journal(storage, JournalSettings(policy="os"), bytes(16))
        world = FollowedWorld(running, journal, bands_of("full"), nodes)
        held = fill(world, nodes, to_the_brim=False)
        for _ in range(16):
            world.measure()
        stage, parts = stage_parts(world)
        world.made.clear()
        gc.collect()
        gc.freeze()
        began = time.thread_time_ns()
        state_bytes = len(core_state(world.core))
        encode_ms = _ms(began)
        found = trio.run(_snapshot, world, storage, stage)
        gc.unfreeze()
        journal.close()
    return {
        "nodes": held,
        "running": running,
        "state_bytes": state_bytes,
        "encode_ms": encode_ms,
        **found,
        **parts,
    }


def stage_parts(world: FollowedWorld) -> tuple[bytes, Row]:
    """What a stage that followed the world's steps says, packed, and what that costs a rank."""
    core = world.core
    assert core.state.memory is not None, "a bench runs in an epoch"
    assert core.state.facts is not None, "a bench runs in an epoch"
    geometry = core.state.memory.geometry
    stage, mirror = StageReplica(geometry, 0, core.state.config, core.state.facts), LogicalMirror(geometry)
    for step in world.made:
        mirror.apply_step(step.seq, step.ops, step.released)
        stage.apply_step(step)
    began = time.thread_time_ns()
    state = stage.state(mirror)
    encoded = time.thread_time_ns()
    packed = pack(state)
    costs = {"stage_encode_ms": round((encoded - began) / 1e6, 2), "stage_pack_ms": _ms(encoded)}
    return packed, costs | {"stage_bytes": len(state), "packed_bytes": len(packed)}


async def _snapshot(world: FollowedWorld, storage: DiskStorage, stage: bytes) -> Row:
    """Steps alone, a snapshot with steps beside it."""
    alone = [await _step(world) for _ in range(STEPS_ALONE)]
    rss_mib = psutil.Process().memory_info().rss >> 20
    moment = Moment(bytes(16), "bench", 1, 1, world.in_flight[0].seq, 0, SAMPLED_START, 1)
    wall_ns, began = time.perf_counter_ns(), time.thread_time_ns()
    draft = ForkedDraft(world.core, storage, moment)
    pause_ms, paused_ns = _ms(began), time.perf_counter_ns()
    written: list[Written] = []

    async def finish() -> None:
        written.append(await draft.finish([stage]))

    beside: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(finish)
        while not written and len(beside) < STEPS_BESIDE_MAX:
            beside.append(await _step(world))
    return {
        "rss_mib": rss_mib,
        "pause_ms": pause_ms,
        "pause_wall_ms": round((paused_ns - wall_ns) / 1e6, 2),
        "step_ms_p50": quantiles(alone, 1e6)[0],
        "step_ms_max": round(max(alone) / 1e6, 2),
        "beside_ms_p50": quantiles(beside, 1e6)[0],
        "beside_ms_max": round(max(beside) / 1e6, 2),
        "file_wall_s": round((time.perf_counter_ns() - wall_ns) / 1e9, 2),
        "file_bytes": written[0].size_bytes,
    }


async def _step(world: FollowedWorld) -> int:
    began = time.thread_time_ns()
    world.measure()
    took_ns = time.thread_time_ns() - began
    await trio.sleep(STEP_S)
    return took_ns


def _ms(began_ns: int) -> float:
    return round((time.thread_time_ns() - began_ns) / 1e6, 2)


def too_long(rows: list[Row]) -> list[str]:
    """What pauses the loop for longer than was promised, in one line each."""
    found = []
    for one in rows:
        limit_ms = PAUSE_MS_MAX + one["rss_mib"] * PAUSE_US_PER_MIB_MAX / 1000
        if one["pause_ms"] > limit_ms:
            found.append(
                f"{one['nodes']} nodes, {one['rss_mib']} MiB: a pause of {one['pause_ms']} ms > {limit_ms:.1f}"
            )
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure, print one table per size, or with `--json` one object with a list `rows`."""
    parser = argparse.ArgumentParser(prog="bandmaster bench snapshot", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", default="1000,10000,100000", help="of the prefix tree [1000,10000,100000]")
    parser.add_argument("--running", type=int, default=256, help="running requests [256]")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a pause is longer than promised")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    counts = options.nodes.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in counts):
        parser.error(f"--nodes {options.nodes!r}: whole numbers above 0, comma-separated")
    rows = [row(int(part), options.running) for part in counts]
    if options.json:
        sys.stdout.write(json.dumps({"rows": rows}, indent=1) + "\n")
    else:
        table = Table(title="a snapshot", box=SIMPLE_HEAD, pad_edge=False)
        for name in ("", *(f"{one['nodes']} nodes" for one in rows)):
            table.add_column(name, justify="right")
        for name in rows[0]:
            table.add_row(name, *(str(one[name]) for one in rows))
        print_table(Console(), table)
    failures = too_long(rows) if options.check else []
    sys.stderr.write("".join(f"{line}\n" for line in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
