"""`bandmaster bench replay`: how fast a journal is replayed, and that its length costs no memory.

    bandmaster bench replay [--steps 12000] [--running 64] [--json] [--check]    recorded here, once and 8 times as long
    bandmaster bench replay --journal DIR [--json] [--check]                    one that is there, beside its own time

Owns the recording of a steady load on a simulated device and the measuring of `bandmaster replay check` on it, in
processes of its own. Must never count what was not reproduced. Columns: steps a minute by the clock, and by processor
time of the busier process, which is what two cores that are free would give; the most memory of each process. With a
journal: how many times faster than it was recorded, by the time during which a step was in flight. Exit code 0; with
`--check` 1 where a target is missed: 50,000 steps a minute, 100 times, 15% more memory at 8 times the length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from allocator.columns import pack_i64
from allocator.geometry import BandGeometry
from daemon.core.inputs import EpochBegan, EpochEnded, Reported, Ticked
from daemon.core.limits import CoreConfig
from ipc.messages import Generate
from journal.reader import Walk
from journal.records import Kind
from tools.ends import DAMAGED, DONE, NO, Failed, Unreadable, ended
from tools.journal_files import open_directory
from tools.output import tell
from tools.simulate.engine import FACTS, GREEDY, Engine, Times, one_stage
from tools.simulate.recording import Recording
from tools.tables import print_table

STEPS_PER_MINUTE_MIN = 50_000
REAL_TIME_MIN = 100.0
GROWTH_MAX = 1.15  # of the most memory, from a journal to one of eight times its length
LONGER = 8
PAGE = 16
SEGMENT_BYTES = 4 << 20
NS_PER_S = 1_000_000_000
SHAPES: dict[str, list[BandGeometry]] = {
    "full": [BandGeometry("full", "full", 4096)],
    "hybrid": [
        BandGeometry("state", "state", 16384),
        BandGeometry("window:256", "window", 4096, 256),
        BandGeometry("full", "full", 4096),
    ],
}
Row = dict[str, Any]


def record(directory: Path, shape: str, running: int, steps: int, seed: int = 1) -> None:
    """The journal of so many steps with so many requests running: a third of the prompts begin like others."""
    rng, fresh = random.Random(seed), itertools.count(1000)
    config = CoreConfig(page_size=PAGE, max_running_requests=running, checkpoint_interval=256)
    bands = SHAPES[shape]
    pages = running * 80  # what runs takes about half of it
    geometry = one_stage(bands, PAGE, sum(band.unit_bytes for band in bands) * pages)
    stems = [[next(fresh) for _ in range(256)] for _ in range(8)]
    numbers = itertools.count()
    with Recording(directory, config, {"bench": "replay"}, SEGMENT_BYTES) as recording:
        engine = Engine(config, geometry, FACTS, Times(), recording=recording)
        made = 0
        while made < steps:
            while engine.state.live < running + 2:
                stem = rng.choice(stems) if rng.random() < 0.33 else []
                prompt = stem + [next(fresh) % FACTS.vocab_size for _ in range(rng.randrange(64, 512))]
                length = rng.randrange(96, 384)
                engine.submit(Generate(f"r{next(numbers)}", pack_i64(prompt), GREEDY, max_tokens=length, clip=True))
            engine.advance(engine.now_ns + NS_PER_S // 20)
            made = engine.core.gauges()["steps_total"]
        recording.close(engine.now_ns, "recorded", engine.core)


def replayed(directory: Path, processes: int) -> Row:
    """`bandmaster replay check` on a journal: what it says, raises Failed where it is not reproduced."""
    command = [sys.executable, "-m", "tools.replay", "check", str(directory), "--json", "--processes", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        kind = Unreadable if done.returncode == DAMAGED else Failed
        said = done.stderr.strip() or done.stdout.strip()
        raise kind(f"{directory}: not reproduced, exit code {done.returncode}: {said}")
    row: Row = json.loads(done.stdout)
    return row


def measured(directory: Path, processes: int) -> Row:
    """The row of one journal."""
    said = replayed(directory, processes)
    usage = said["usage"]
    busiest_s = max(one["cpu_s"] for one in usage.values())
    return {
        "steps": said["steps"],
        "processes": processes,
        "elapsed_s": said["elapsed_s"],
        "steps_per_minute": round(said["steps"] / said["elapsed_s"] * 60),
        "busiest_cpu_s": busiest_s,
        "steps_per_minute_of_free_cores": round(said["steps"] / busiest_s * 60),
        **{f"{name}_cpu_s": one["cpu_s"] for name, one in usage.items()},
        **{f"{name}_peak_mib": round(one["peak_rss_bytes"] / (1 << 20)) for name, one in usage.items()},
    }


def recorded_s(directory: str) -> tuple[float, float]:
    """Seconds of a journal's lives during which a step was in flight, and from their first to their last step."""
    busy_ns, span_ns, tick_ns, free_ns = 0, 0, 0, 0
    begun_ns: int | None = None
    in_flight: deque[int] = deque()
    for one in Walk(open_directory(directory)).records():
        if one.kind == Kind.TICKED:
            item: Any = one.decode()
            assert isinstance(item, Ticked)
            tick_ns = item.now_ns
        elif one.kind == Kind.STEPPED:
            in_flight.append(tick_ns)
            begun_ns = tick_ns if begun_ns is None else begun_ns
        elif one.kind in (Kind.REPORTED, Kind.EPOCH_ENDED, Kind.EPOCH_BEGAN):
            item = one.decode()
            if isinstance(item, Reported) and in_flight:
                busy_ns += item.now_ns - max(in_flight.popleft(), free_ns)
                free_ns = item.now_ns
            elif isinstance(item, EpochBegan | EpochEnded):
                span_ns += 0 if begun_ns is None else max(0, free_ns - begun_ns)
                begun_ns, free_ns = None, 0
                in_flight.clear()
    span_ns += 0 if begun_ns is None else max(0, free_ns - begun_ns)
    return busy_ns / NS_PER_S, span_ns / NS_PER_S


def beside(directory: str, processes: int) -> Row:
    """The row of a journal that is there."""
    busy_s, span_s = recorded_s(directory)
    row = measured(Path(directory), processes)
    return row | {
        "recorded_busy_s": round(busy_s, 1),
        "recorded_span_s": round(span_s, 1),
        "times_real": round(busy_s / row["elapsed_s"], 1),
        "times_real_of_free_cores": round(busy_s / row["busiest_cpu_s"], 1),
    }


def problems(rows: list[Row]) -> list[str]:
    """Targets that are missed, by what two free cores give; empty where none is."""
    found = []
    for row in rows:
        rate = row["steps_per_minute_of_free_cores"]
        if "times_real" in row:
            if row["times_real_of_free_cores"] < REAL_TIME_MIN:
                found.append(f"{row['times_real_of_free_cores']} times faster than recorded, at least {REAL_TIME_MIN}")
        elif row["processes"] > 1 and rate < STEPS_PER_MINUTE_MIN:
            found.append(f"{row['shape']}: {rate:,} steps a minute, at least {STEPS_PER_MINUTE_MIN:,}")
        if row.get("growth", 1.0) > GROWTH_MAX:
            found.append(f"{row['shape']}: {row['growth']:.2f} times the memory at {LONGER} times the length")
    return found


def synthetic(shapes: list[str], running: int, steps: int) -> list[Row]:
    """Each shape once and eight times as long; two processes, and one."""
    rows = []
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="bandmaster-bench-") as directory:
            short, long = Path(directory) / "short", Path(directory) / "long"
            record(short, shape, running, steps)
            record(long, shape, running, LONGER * steps)
            small, large = measured(short, 2), measured(long, 2)
            peak = max(large[name] / small[name] for name in ("core_peak_mib", "ranks_peak_mib"))
            rows += [{"shape": shape, "running": running} | row for row in (measured(short, 1), small)]
            rows.append({"shape": shape, "running": running} | large | {"growth": round(peak, 2)})
    return rows


def show(rows: list[Row]) -> None:
    """The rows as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name == "shape" else "right")
    for row in rows:
        table.add_row(
            *(f"{row[name]:,}" if isinstance(row.get(name), int) else str(row.get(name, "")) for name in names)
        )
    print_table(Console(), table)


def main(argv: list[str] | None = None) -> int:
    """`bandmaster bench replay`."""
    parser = argparse.ArgumentParser(prog="bandmaster bench replay", description=__doc__.partition("\n")[0])
    parser.add_argument("--journal", metavar="DIR", help="a journal that is there, instead of recording some")
    text = f"of the short journal, which must be long enough to fill the state; the long has {LONGER} times as many"
    parser.add_argument("--steps", type=int, default=12000, help=text)
    parser.add_argument("--running", type=int, default=64, help="requests that run at once")
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append", help="bands [each shape]")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2, help="for --journal")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a target is missed")
    options = parser.parse_args(argv)
    if options.steps < 1 or options.running < 1:
        parser.error("steps and running requests are at least 1")
    return ended("bench replay", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    rows = (
        [beside(options.journal, options.processes)]
        if options.journal
        else synthetic(options.shape or sorted(SHAPES), options.running, options.steps)
    )
    missed = problems(rows)

    def printed() -> None:
        show(rows)
        for line in missed:
            print(f"MISSED: {line}")

    tell(options.json, lambda: {"rows": rows, "missed": missed}, printed)
    return NO if missed and options.check else DONE


if __name__ == "__main__":
    raise SystemExit(main())
