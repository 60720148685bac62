"""`bandmaster simulate`: the real core, its chain and its prefix cache on a trace of traffic, without a model.

    bandmaster simulate TRACE (--band KIND=BYTES/UNIT ... | --model MODEL) [--arena-fraction 5%,20%] [--policy lru,...]

Owns the command line and the document. Must never decide anything about memory: every figure comes from the core that
serves. Exit code 0; 1 when a run did not account for every request or a result was not written, with what was wrong; 2
for what cannot be simulated; 130 interrupted. A result file keeps what it held until its new text is complete.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from daemon.config import ConfigError
from tools.output import OutputLost, printing
from tools.serve_flags import add_setting
from tools.simulate.bound import OfflineBound
from tools.simulate.errors import SimulateError
from tools.simulate.paths import Reuse, everything, find_reuse
from tools.simulate.plot import svg
from tools.simulate.results import put
from tools.simulate.run import Run
from tools.simulate.scene import OWN_DEFAULTS, SETTINGS, Scene, make_scene
from tools.simulate.show import show
from tools.simulate.traffic import BLOCK_TOKENS
from tools.simulate.workers import run_all

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    """The command line; absent settings stay absent, so that defaults follow what is given."""
    parser = argparse.ArgumentParser(
        prog="bandmaster simulate",
        description=__doc__.split("\n")[0],
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    text = "JSON lines, plain or gzipped: timestamp, input_length, output_length, hash_ids"
    add("trace", metavar="TRACE", help=f"{text}; -: standard input")
    group = parser.add_argument_group("the model")
    add_model = group.add_argument
    text = "a band and its bytes: full=BYTES/page, window:TOKENS=BYTES/page, state:INTERVAL=BYTES/slot; repeat"
    add_model("--band", action="append", default=[], metavar="KIND=BYTES/UNIT", help=text)
    add_model("--model", default="", metavar="MODEL", help="or a directory with config.json, or such a file")
    add_model("--tp", default="1", metavar="N", help="with --model: tensor ranks, of which one is simulated [1]")
    group = parser.add_argument_group("memory")
    text = "bytes of the arena; several to compare"
    group.add_argument("--arena-bytes", default=None, metavar="BYTES,...", help=text)
    text = "or parts of what holds everything: distinct pages, a checkpoint per grid point, a window per prefix end"
    group.add_argument("--arena-fraction", default=None, metavar="PART,...", help=f"{text} [20%%]")
    text = "eviction policies to compare, each with a checkpoint policy if it says so: value,lru,value/grid"
    group.add_argument("--policy", default="value,lru", metavar="NAME,...", help=f"{text} [value,lru]")
    group = parser.add_argument_group("time")
    group.add_argument("--step-us", default="5000", metavar="US", help="what every forward takes [5000]")
    group.add_argument("--prefill-us", default="10", metavar="US", help="and for each prompt token it computes [10]")
    group.add_argument("--decode-us", default="40", metavar="US", help="and for each decoding request [40]")
    group.add_argument("--speed", default="1", metavar="X", help="requests arrive X times as fast as in the trace [1]")
    group = parser.add_argument_group("the trace")
    group.add_argument("--requests", default=None, metavar="N", help="only the first N [all]")
    text = f"tokens of a hashed block [{BLOCK_TOKENS}]"
    group.add_argument("--block-tokens", default=str(BLOCK_TOKENS), metavar="N", help=text)
    group = parser.add_argument_group("results")
    group.add_argument("--json", action="store_true", default=False, help="print one JSON object instead of tables")
    text = "a JSON line for every request of every run; -: on standard output, without the tables"
    group.add_argument("--per-request", default=None, metavar="FILE", help=text)
    text = "an SVG of the memory by band over time; -: on standard output, without the tables"
    group.add_argument("--plot", default=None, metavar="FILE", help=text)
    text = "an empty or new directory that gets the run as a journal, for `replay`; one arena and one policy only"
    group.add_argument("--journal", default=None, metavar="DIR", help=text)
    group.add_argument("--no-bound", action="store_true", default=False, help="leave the offline bound out")
    group.add_argument("--jobs", default="1", metavar="N", help="runs at a time, a process each [1]")
    group = parser.add_argument_group("settings of `bandmaster serve`")
    for key in SETTINGS:
        add_setting(group, key, OWN_DEFAULTS.get(key, ""))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """`bandmaster simulate`."""
    values = vars(build_parser().parse_args(argv))
    try:
        document, runs, scene = _simulate(values)
    except (SimulateError, ConfigError) as error:
        sys.stderr.write(f"bandmaster simulate: {error}\n")
        return USAGE
    except KeyboardInterrupt:
        sys.stderr.write("bandmaster simulate: interrupted; nothing was written\n")
        return INTERRUPTED
    wrong = [f"{run.arena} {run.policy}: {run.error}" for run in runs if run.error]
    try:
        with printing():
            if values["json"]:
                print(json.dumps(document))
            elif not scene.results.on_stdout:
                show(document)
    except OutputLost as error:
        wrong += [str(error)]
    wrong += _write(scene, runs)
    for text in filter(None, wrong):
        sys.stderr.write(f"bandmaster simulate: {text}\n")
    return FAILED if wrong else 0


def _simulate(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Run], Scene]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        reading = progress.add_task("reading", total=None)
        scene = make_scene(values)
        trace = scene.trace
        progress.update(reading, description="paths")
        reuse = find_reuse(trace, scene.page_size, scene.grid)
        jobs = scene.jobs(everything(reuse, scene.shape.bands).total_bytes)
        bounds = {}
        if not values["no_bound"] and scene.caching:
            bounds = _bounds(scene, reuse, progress)
        progress.remove_task(reading)
        tasks = [progress.add_task(f"{job.arena} {job.policy}", total=len(trace.lines)) for job in jobs]
        runs = run_all(trace, jobs, scene.at_a_time, lambda job, done: progress.update(tasks[job], completed=done))
    return _document(scene, reuse, bounds, runs), runs, scene


def _bounds(scene: Scene, reuse: Reuse, progress: Progress) -> dict[str, int]:
    """The offline bound of every arena, in tokens."""
    total = everything(reuse, scene.shape.bands).total_bytes
    arenas = scene.arenas(total)
    task = progress.add_task("offline bound", total=len(arenas))
    bound, found = OfflineBound(reuse, scene.shape.bands), {}
    for arena in arenas:
        found[arena.name] = bound.solve(arena.chain_bytes).tokens
        progress.advance(task)
    progress.remove_task(task)
    return found


def _document(scene: Scene, reuse: Reuse, bounds: Mapping[str, int], runs: Sequence[Run]) -> dict[str, Any]:
    trace, shape, times = scene.trace, scene.shape, scene.times
    total = everything(reuse, shape.bands)
    infinite = reuse.hit_tokens(scene.grid) if scene.caching else 0
    arenas = [
        {
            "arena": arena.name,
            "arena_bytes": arena.arena_bytes,
            "bound_tokens": bounds.get(arena.name, 0),
            "bound_hit_rate": bounds.get(arena.name, 0) / trace.input_tokens,
        }
        for arena in scene.arenas(total.total_bytes)
    ]
    return {
        "trace": {
            "path": trace.path,
            "requests": len(trace.lines),
            "input_tokens": trace.input_tokens,
            "output_tokens": trace.output_tokens,
            "longest_tokens": trace.longest,
            "span_ms": trace.lines[-1].at_ns / 1e6,
            "block_tokens": trace.block_tokens,
        },
        "shape": {
            "name": shape.name,
            "origin": shape.origin,
            "page_size": scene.page_size,
            "checkpoint_interval": scene.grid,
            "bands": [
                {"band": band.name, "unit": "slot" if band.kind == "state" else "page", "unit_bytes": band.unit_bytes}
                for band in shape.bands
            ],
        },
        "time_model": {
            "step_us": times.step_ns / 1000,
            "prefill_us": times.prefill_ns / 1000,
            "decode_us": times.decode_ns / 1000,
            "speed": scene.speed,
        },
        "settings": msgspec.to_builtins(scene.config),
        "everything": {
            "units": {band.name: count for band, count in zip(shape.bands, total.units, strict=True)},
            "total_bytes": total.total_bytes,
        },
        "infinite": {"tokens": infinite, "hit_rate": infinite / trace.input_tokens},
        "arenas": arenas,
        "runs": [{"arena": run.arena, "policy": run.policy, "error": run.error, **run.figures} for run in runs],
        "notes": scene.notes,
    }


def _write(scene: Scene, runs: Sequence[Run]) -> list[str]:
    """The results that were asked for, each though another cannot be written; what went wrong."""
    texts: dict[str, tuple[str, str]] = {}
    results = scene.results
    if results.per_request is not None:
        rows = [{"arena": run.arena, "policy": run.policy, **row} for run in runs for row in run.requests]
        texts["--per-request"] = (results.per_request, "".join(json.dumps(row) + "\n" for row in rows))
    if results.plot is not None:
        sizes = {run.arena: scene.arena_bytes[run.arena] for run in runs}
        title = f"{Path(scene.trace.path).name}: {scene.shape.name}"
        texts["--plot"] = (results.plot, svg(runs, scene.shape.bands, sizes, title))
    wrong = []
    for flag, (path, text) in texts.items():
        try:
            put(flag, path, text)
        except SimulateError as error:
            wrong.append(str(error))
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
