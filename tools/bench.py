"""`bandmaster bench`: which benchmark measures what.

Owns the list of benchmarks. Must never measure anything itself. Each benchmark prints a table, or with `--json` one
object with a list `rows`.
"""

from __future__ import annotations

import importlib
import sys

# name -> (module with main(argv), what it measures)
BENCHMARKS: dict[str, tuple[str, str]] = {
    "core": ("tools.bench_core", "one scheduler iteration without a model: core, logical chain, journal to a file"),
    "ranks": (
        "tools.bench_ranks",
        "a step's way to the ranks of a layout and back, without a model: control traffic beside the core's time",
    ),
    "allocator": (
        "tools.allocator_bench.command",
        "the allocator's two chains: microseconds a call, bytes moved, bookkeeping",
    ),
    "serve": ("tools.bench_serve", "a server over HTTP: tokens per second and latencies at given concurrencies"),
    "cancels": (
        "tools.bench_cancels",
        "many requests cancelled at once: what streams that go on notice of it, and whether each ends once",
    ),
    "idle": ("tools.bench_idle", "processor time of all processes of a server that has nothing to do"),
    "floor": ("tools.bench_floor", "a decode step beside the bare products of the model's shapes"),
    "kernels": ("tools.bench_kernels", "the kernels of this machine, beside a measured copy and a measured product"),
    "cache": (
        "tools.bench_cache",
        "what the prefix cache costs: look-ups, giving memory back, steps beside many nodes",
    ),
    "hits": ("tools.bench_hits", "what later requests find of earlier ones, and what the checkpoints for it cost"),
    "pressure": ("tools.bench_pressure", "what stays of hot prompts while cold ones pass, beside a published table"),
    "oversubscription": (
        "tools.bench_oversubscription",
        "throughput, retractions and work done twice in arenas that get too small",
    ),
    "what-if": (
        "tools.bench_what_if",
        "predictions of `bandmaster what-if` beside real reruns, on modeled ranks in an arena that is too small",
    ),
    "snapshot": ("tools.bench_snapshot", "what a snapshot costs the loop and a rank, beside a cache of many nodes"),
    "replay": (
        "tools.bench_replay",
        "replay of a journal: steps a minute, beside the time that it recorded, memory at eight times the length",
    ),
    "model": ("tools.bench_model", "the forward of a model on this machine, beside `transformers`"),
}


def usage() -> str:
    """The list of benchmarks as text."""
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:<{width}} {text}" for name, (_, text) in BENCHMARKS.items()]
    return "\n".join(["usage: bandmaster bench NAME [--json] [options]", "", *lines, ""])


def main(argv: list[str]) -> int:
    """Run the benchmark named first; 2 for an unknown name."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        sys.stdout.write(usage())
        return 0 if argv else 2
    if argv[0] not in BENCHMARKS:
        sys.stderr.write(f"there is no benchmark {argv[0]!r}\n{usage()}")
        return 2
    module = importlib.import_module(BENCHMARKS[argv[0]][0])
    return int(module.main(argv[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
