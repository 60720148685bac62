"""`bandmaster bench ranks`: what a step costs between the daemon and its ranks, without a model.

Owns the measurement of one step of steady decode at a time: encoded, sent to every rank process, applied there (ops,
layout, batch), reported by all, decoded, compared: the `trip`. The scheduler's own time is measured beside it and not
part of it. Must never have a model in it: ranks run the modeled runner blind, which reads and stores nothing and passes
nothing to other ranks. `apply` is what a step worker alone needs for the same step, in this process; `traffic` is what
is left of its trip without that.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trio
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from allocator.columns import pack_i64
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.scheduler import SchedulerCore
from daemon.processes import collect_seldom
from daemon.rank.layout import Layout
from daemon.rank.modeled import ModeledRunner
from daemon.rank.step_worker import StepWorker
from ipc.messages import Begin, Generate, RankSettings, Sampling, Step
from tools.groups.processes import EPOCH, GroupFailed, RankProcesses, first_words
from tools.tables import print_table

PROMPT_TOKENS = 128
PAGE_SIZE = 16
VOCAB = 49_152
LAYOUTS = "1x1,1x2,1x4,2x1,4x1,2x2"
WARM_STEPS = 32


def settings_of(stages: int, ranks: int, running: int, length: int) -> RankSettings:
    """Ranks without a model whose arena holds every request whole."""
    pages = running * (-(-length // PAGE_SIZE) + 2)
    return RankSettings(
        model_path="",
        model_name="none",
        dtype="float32",
        page_size=PAGE_SIZE,
        max_running_requests=running,
        max_batched_tokens=max(8192, 2 * running),
        max_model_len=length,
        arena_bytes=pages * PAGE_SIZE * 8 * 2,
        mem_fraction_ppm=0,
        runner="modeled",
        threads=1,
        invariants=1,
        options={"blind": "1", "vocab_size": str(VOCAB), "max_model_len": str(length)},
        tensor_ranks=ranks,
        stage_layers=[0] * stages if stages > 1 else [],
    )


class Decoding:
    """A core with `running` requests that decode, asked for one step at a time."""

    def __init__(self, group: RankProcesses, running: int, length: int) -> None:
        self.core = SchedulerCore(
            CoreConfig(
                page_size=PAGE_SIZE,
                max_running_requests=running,
                max_batched_tokens=max(8192, 2 * running),
                chunked_prefill_size=8192,
                reserve="full",
                enable_prefix_caching=False,
            )
        )
        self._now_ns = 0
        self.core.feed(inputs.EpochBegan(0, EPOCH, group.geometry, group.facts))
        random = np.random.default_rng(running)
        for number in range(running):
            prompt = pack_i64(random.integers(32, VOCAB, PROMPT_TOKENS + number % PAGE_SIZE))
            generate = Generate(str(number), prompt, Sampling(temperature=0.0), length - PROMPT_TOKENS - PAGE_SIZE)
            self.core.feed(inputs.Arrived(0, "bench", generate, number))

    @property
    def running(self) -> int:
        """Requests that decode."""
        return self.core.gauges()["running"]

    def step(self) -> Step:
        """The next step."""
        self._now_ns += 1_000_000
        step = self.core.feed(inputs.Ticked(self._now_ns)).step
        assert step is not None, "a steady decode has a next step"
        return step

    def take(self, reported: inputs.Reported) -> None:
        """A step came back."""
        self.core.feed(reported)


async def measure(stages: int, ranks: int, running: int, steps: int, place: Path) -> dict[str, Any]:
    """The row of one layout: microseconds of a step's way to the ranks and back, beside the core's and the worker's."""
    length = PROMPT_TOKENS + PAGE_SIZE + (stages + 1) * (steps + WARM_STEPS) + 64
    settings = settings_of(stages, ranks, running, length)
    async with RankProcesses(settings, stages, place) as group, trio.open_nursery() as nursery:
        nursery.start_soon(group.watch)
        load = Decoding(group, running, length)
        alone = _alone(settings, group, stages)
        while load.running < running:
            step = load.step()
            load.take((await group.round_trip(step, 0)).reported)
            alone.finish(alone.launch(step))
        collect_seldom()
        for _ in range(WARM_STEPS):
            await _one(group, load, alone)
        busy_s, own_s = group.processor_s(), time.process_time()
        took = [await _one(group, load, alone) for _ in range(steps)]
        busy_s, own_s = group.processor_s() - busy_s, time.process_time() - own_s
        gc.unfreeze()
        nursery.cancel_scope.cancel()
    trips, core, apply, rows = zip(*took, strict=True)
    return {
        "stages": stages,
        "ranks": ranks,
        "processes": stages * ranks,
        "running": running,
        "rows_per_step": round(sum(rows) / len(rows)),
        "steps": steps,
        **_us("trip", trips),
        **_us("apply", apply),
        **_us("traffic", [trip - alone_ns for trip, alone_ns in zip(trips, apply, strict=True)]),
        **_us("core", core),
        "rank_cpu_us": round(busy_s * 1e6 / steps / stages / ranks, 1),
        "daemon_cpu_us": round((own_s * 1e9 - sum(core) - sum(apply)) / 1e3 / steps, 1),
    }


async def _one(group: RankProcesses, load: Decoding, alone: StepWorker) -> tuple[int, int, int, int]:
    """Nanoseconds of one step's way, of the core, and of the worker alone; and its rows."""
    began = time.perf_counter_ns()
    step = load.step()
    made = time.perf_counter_ns()
    collated = await group.round_trip(step, 0)
    back = time.perf_counter_ns()
    load.take(collated.reported)
    taken = time.perf_counter_ns()
    alone.finish(alone.launch(step))
    applied = time.perf_counter_ns()
    rows = len(step.forward.rows) // 4 if step.forward is not None else 0
    return back - made, made - began + taken - back, applied - taken, rows


def _alone(settings: RankSettings, group: RankProcesses, stages: int) -> StepWorker:
    """The same rank 0.0 in this process."""
    runner = ModeledRunner(settings, Layout(0, stages, 0, settings.tensor_ranks))
    runner.prepare()
    return StepWorker(runner, Begin(EPOCH, group.geometry), settings, group.facts.max_model_len, 0, 0)


def _us(name: str, values_ns: Sequence[int]) -> dict[str, float]:
    return {f"{name}_us_p{at}": round(float(np.percentile(values_ns, at)) / 1e3, 1) for at in (50, 99)}


def _measured(stages: int, ranks: int, running: int, steps: int) -> dict[str, Any]:
    """As `measure`, in a directory of its own; raises GroupFailed."""
    with tempfile.TemporaryDirectory(prefix="bandmaster-bench-") as place:
        try:
            return trio.run(measure, stages, ranks, running, steps, Path(place))
        except* GroupFailed as failed:
            why = first_words(failed)
    raise GroupFailed(why)


def parse_layouts(text: str) -> list[tuple[int, int]]:
    """Stages and tensor ranks from text like `1x2,2x1`; raises ValueError naming the wrong part."""
    layouts = []
    for part in text.split(","):
        stages, cross, ranks = part.partition("x")
        if not (cross and stages.isdecimal() and ranks.isdecimal() and 1 <= int(stages) * int(ranks) <= 64):
            raise ValueError(f"{part!r} is no layout: STAGESxRANKS, like 2x1, at most 64 ranks")
        layouts.append((int(stages), int(ranks)))
    return layouts


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, or with `--json` one object with a list `rows`."""
    cli = argparse.ArgumentParser(prog="bandmaster bench ranks", description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--layouts", default=LAYOUTS, help=f"stages x tensor ranks of each, comma-separated [{LAYOUTS}]")
    cli.add_argument("--running", type=int, default=256, help="running requests [256]")
    cli.add_argument("--steps", type=int, default=1000, help="measured steps of each layout [1000]")
    cli.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = cli.parse_args(argv)
    try:
        layouts = parse_layouts(options.layouts)
    except ValueError as error:
        cli.error(f"--layouts: {error}")
    if options.running < 1 or options.steps < 1:
        cli.error(f"--running {options.running} and --steps {options.steps} must be at least 1")
    try:
        rows = [_measured(stages, ranks, options.running, options.steps) for stages, ranks in layouts]
    except GroupFailed as error:
        sys.stderr.write(f"bandmaster bench ranks: {error}\n")
        return 1
    if options.json:
        print(json.dumps({"rows": rows}))
        return 0
    table = Table(title="a step to the ranks and back, one at a time, without a model", box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        table.add_column(name.replace("_us_", " us\n"), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    print_table(Console(), table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
