"""`bandmaster bench core`: what one scheduler iteration costs without a model.

Owns the measurement of core, logical chain, step construction, encoding and journal (to a real file) on steady decode
with overlap. Must never measure anything else in between: reports are prepared before the clock starts. One iteration
is `feed(Reported)` + `feed(Ticked)`; the journal's part is append of a rank's digests, the inputs, decisions and the
step, and the one flush.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from allocator.columns import i32, pack_i64
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from daemon.core.inputs import Arrived, EpochBegan, Reported, Ticked
from daemon.core.limits import CoreConfig
from daemon.core.order import POLICIES
from daemon.core.scheduler import SchedulerCore
from ipc.messages import SAMPLE, Generate, ModelFacts, Sampling, Step
from journal.opening import open_journal
from journal.records import DECISION_VERSION, SCHEMA_VERSION, Digested, Kind, Opened
from journal.storage import DiskStorage
from journal.writer import JournalSettings, JournalWriter
from tools.tables import print_table

PAGE_SIZE = 16
VOCAB = 49_152
PROMPT_TOKENS = 128
UNIT_BYTES = 4096
STEP_NS = 10_000_000


class BenchWorld:
    """A core full of decoding requests, fed as an engine feeds it; `running` requests, `steps` output tokens each.

    `bands` as of `bands_of`; the arena holds all of every band that anybody could take, so that nothing is evicted.
    `waiting` more wait for a row under `policy`, of fifty namespaces and seven priorities. `spare_pages` more than that
    are there for whoever fills them; `eviction` is the policy by which they are given up.
    """

    def __init__(
        self,
        running: int,
        steps: int,
        journal: JournalWriter,
        bands: list[BandGeometry],
        waiting: int = 0,
        policy: str = "priority",
        spare_pages: int = 0,
        eviction: str = "value",
    ) -> None:
        output = steps + 64
        pages = running * (-(-(PROMPT_TOKENS + PAGE_SIZE + output) // PAGE_SIZE) + 1) + spare_pages
        slots = running * (3 + output // 256)
        units = sum(slots if band.kind == "state" else pages for band in bands)
        geometry = Geometry(PAGE_SIZE, pages, slots, [StageGeometry(UNIT_BYTES * (units + 1), UNIT_BYTES, bands)])
        config = CoreConfig(
            page_size=PAGE_SIZE,
            max_running_requests=running,
            max_queued_requests=running + waiting,
            schedule_policy=policy,
            max_batched_tokens=max(8192, 2 * running),
            chunked_prefill_size=8192,
            reserve="full",
            eviction_policy=eviction,
        )
        self.core, self.journal = SchedulerCore(config), journal
        self.now_ns = 0
        self.in_flight: list[Step] = []
        self.encoder = msgspec.msgpack.Encoder()
        self.random = np.random.default_rng(running)
        journal.append(Opened(0, "bench", SCHEMA_VERSION, DECISION_VERSION, config, {}, {}))
        self.core.feed(
            EpochBegan(0, 1, geometry, ModelFacts("bench", "bench", VOCAB, PROMPT_TOKENS + PAGE_SIZE + output, "none"))
        )
        for k in range(running):
            prompt = pack_i64(self.random.integers(0, VOCAB, PROMPT_TOKENS + k % PAGE_SIZE))
            self.core.feed(Arrived(0, "bench", Generate(f"r{k}", prompt, Sampling(), max_tokens=output), k))
        while self.core.gauges()["running"] < running or len(self.in_flight) < 2:
            self.tick()
            if len(self.in_flight) == 2 and self.core.gauges()["running"] < running:
                self.core.feed(self.next_report())
        for k in range(waiting):
            self._wait(k, policy)

    def _wait(self, k: int, policy: str) -> None:
        """One more request arrives while every row is taken."""
        prompt = pack_i64(self.random.integers(0, VOCAB, PROMPT_TOKENS))
        fields: dict[str, Any] = {"namespace": f"salt:{k % 50}", "deadline_ms": 10**8 + 17 * k % 1000}
        fields |= {} if policy == "fcfs" else {"priority": k % 7}
        self.core.feed(Arrived(self.now_ns, "bench", Generate(f"w{k}", prompt, Sampling(), max_tokens=8, **fields), k))

    def tick(self) -> None:
        """One iteration outside the measurement."""
        step = self.core.feed(Ticked(self.now_ns)).step
        if step is not None:
            self.in_flight.append(step)

    def next_report(self) -> Reported:
        """The report of the oldest step in flight, with random tokens."""
        step = self.in_flight.pop(0)
        self.now_ns += STEP_NS
        forward = step.forward
        assert forward is not None, "every step here has a forward"
        sampled = (np.frombuffer(forward.flags, np.uint8) & SAMPLE) != 0
        rows, generations = i32(forward.rows)[sampled], i32(forward.generations)[sampled]
        tokens = pack_i64(self.random.integers(0, VOCAB, len(rows)))
        return Reported(self.now_ns, step.epoch, step.seq, rows.tobytes(), generations.tobytes(), tokens)

    def measure(self) -> tuple[int, int]:
        """One iteration: nanoseconds of core with encoding, and of the journal."""
        report, ticked = self.next_report(), Ticked(self.now_ns)
        digests = [Digested(1, report.seq, 0, 0, *(self.random.bytes(16) for _ in range(3)))]
        begin = time.perf_counter_ns()
        first = self.core.feed(report)
        second = self.core.feed(ticked)
        assert second.step is not None, "a steady decode launches a step in every iteration"
        payload = self.encoder.encode(second.step)
        fed = time.perf_counter_ns()
        journal = self.journal
        journal.append_all(digests)
        journal.append(report)
        journal.append(ticked)
        for decision in first.decisions + second.decisions:
            journal.append(decision)
        journal.append_encoded(Kind.STEPPED, payload)
        journal.flush()
        end = time.perf_counter_ns()
        self.in_flight.append(second.step)
        return fed - begin, end - fed


def bands_of(text: str) -> list[BandGeometry]:
    """Bands in chain order from names like `full,window:1024,state`; raises ValueError naming a wrong one."""
    names = text.split(",")
    wrong = [name for name in names if name not in ("full", "state") and not re.fullmatch(r"window:[1-9]\d*", name)]
    if wrong or "full" not in names or len(set(names)) < len(names):
        raise ValueError(f"--bands {text!r}: full, and beside it state and window:TOKENS, each once")
    windows = sorted((int(name[7:]) for name in names if name.startswith("window")), reverse=True)
    bands = [BandGeometry("state", "state", UNIT_BYTES)] if "state" in names else []
    bands += [BandGeometry(f"window:{tokens}", "window", UNIT_BYTES, tokens) for tokens in windows]
    return [*bands, BandGeometry("full", "full", UNIT_BYTES)]


def measure(
    running: int, steps: int, directory: Path, bands: str = "full", waiting: int = 0, policy: str = "priority"
) -> dict[str, Any]:
    """The row of one concurrency: milliseconds of core per iteration, microseconds of journal."""
    journal, _ = open_journal(DiskStorage(directory), JournalSettings(policy="os"), bytes(16))
    world = BenchWorld(running, steps, journal, bands_of(bands), waiting, policy)
    for _ in range(16):
        world.measure()
    gc.collect()
    gc.freeze()
    core_ns, journal_ns = zip(*(world.measure() for _ in range(steps)), strict=True)
    gc.unfreeze()
    journal.close()
    return {
        "bands": bands,
        "running": running,
        **({"waiting": waiting, "policy": policy} if waiting else {}),
        "steps": steps,
        "step_ms_p50": round(float(np.percentile(core_ns, 50)) / 1e6, 4),
        "step_ms_p99": round(float(np.percentile(core_ns, 99)) / 1e6, 4),
        "journal_us_p50": round(float(np.percentile(journal_ns, 50)) / 1e3, 2),
        "journal_us_p99": round(float(np.percentile(journal_ns, 99)) / 1e3, 2),
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, or with `--json` one object with a list `rows`."""
    parser = argparse.ArgumentParser(prog="bandmaster bench core", description=__doc__.split("\n")[0])
    parser.add_argument("--running", default="1,64,256,1024", help="running requests, comma-separated [1,64,256,1024]")
    parser.add_argument("--steps", type=int, default=1000, help="measured iterations each")
    parser.add_argument("--bands", default="full", help="bands of the model: full, and with it window:TOKENS and state")
    parser.add_argument("--waiting", type=int, default=0, help="requests that wait for a row meanwhile")
    parser.add_argument("--policy", default="priority", choices=sorted(POLICIES), help="the order in which they wait")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    try:
        bands_of(options.bands)
    except ValueError as error:
        parser.error(str(error))
    counts = options.running.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in counts):
        parser.error(f"--running {options.running!r}: whole numbers above 0, comma-separated")
    if options.steps < 1:
        parser.error(f"--steps {options.steps} must be at least 1")
    if options.waiting < 0:
        parser.error(f"--waiting {options.waiting} must be at least 0")
    rows = []
    for running in map(int, counts):
        with tempfile.TemporaryDirectory(prefix="bandmaster-bench-") as directory:
            world = (options.bands, options.waiting, options.policy)
            rows.append(measure(running, options.steps, Path(directory), *world))
    if options.json:
        print(json.dumps({"rows": rows}))
        return 0
    title = "core + logical chain + step + encoding, and journal to a file, per iteration of steady decode"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        table.add_column(name.replace("_p", "\np"), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    print_table(Console(), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
