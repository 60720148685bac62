"""`bandmaster bench model`: the forward of a model on this machine, in turns with `transformers` `generate`.

Owns the measurement of one rank alone: no sockets, no HTTP, the real step worker over a real chain. Must never report
a side that ran under other conditions than its neighbour: sides take turns, round by round, and the median round
counts. Rates are output tokens per second over the whole call, prefill included, as a client would see them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from daemon.rank.convert import prepare_model
from daemon.rank.errors import RankError
from daemon.rank.torch_runner import TorchRunner
from ipc.messages import RankSettings
from tools.rank_driver import Driver
from tools.reference import Reference
from tools.tables import print_table

Row = dict[str, Any]
Measure = Callable[[Path, argparse.Namespace], list[Row]]

ARENA_BYTES = 2 << 30  # taken as it is touched
PAGE_SIZE = 16


class Ours:
    """A torch runner behind a driver; `run(n)` generates for n rows at once."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        settings = RankSettings(
            model_path=str(directory),
            model_name=directory.name,
            dtype=options.dtype,
            page_size=PAGE_SIZE,
            max_running_requests=max(options.concurrency),
            max_batched_tokens=4096,
            max_model_len=0,
            arena_bytes=ARENA_BYTES,
            mem_fraction_ppm=0,
            threads=options.threads,
            options={"model_impl": options.model_impl, "host_kernels": options.host_kernels},
        )
        self._driver = Driver(settings, TorchRunner(settings))
        self.versions = self._driver.prepared.versions
        self.vocab_size = self._driver.prepared.facts.vocab_size

    def run(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """`tokens` greedy output ids of each prompt, all rows decoded together."""
        driver = self._driver
        for row in range(len(prompts)):
            driver.start(row)
        driver.step([(row, prompt, True) for row, prompt in enumerate(prompts)])
        for _ in range(tokens - 1):
            driver.step([(row, None, True) for row in range(len(prompts))])
        return self._ended(prompts)

    def steps(self, prompts: list[list[int]], count: int, before: Callable[[], object] = lambda: None) -> list[float]:
        """Seconds of each of `count` decode steps of all rows together, behind a first one; `before` runs between."""
        driver, rows = self._driver, range(len(prompts))
        for row in rows:
            driver.start(row)
        driver.step([(row, prompts[row], True) for row in rows])
        work: list[tuple[int, list[int] | None, bool]] = [(row, None, True) for row in rows]
        driver.step(work)
        taken_s = []
        for _ in range(count):
            before()
            taken_s.append(timed(partial(driver.step, work)))
        self._ended(prompts)
        return taken_s

    def _ended(self, prompts: list[list[int]]) -> list[list[int]]:
        """End the first rows; what they made behind their prompts."""
        driver = self._driver
        made = [driver.rows[row].tokens[len(prompt) :] for row, prompt in enumerate(prompts)]
        for row in range(len(prompts)):
            driver.end(row)
        driver.step([])
        return made


def timed(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per side: transformers in each dtype asked for, and ours at each concurrency."""
    import torch

    ours = Ours(directory, options)
    threads_ours = torch.get_num_threads()
    chance = random.Random(options.seed)
    prompts = [
        [chance.randrange(100, ours.vocab_size) for _ in range(options.prompt_tokens)]
        for _ in range(max(options.concurrency))
    ]
    sides: dict[tuple[str, int], Callable[[], object]] = {}
    threads: dict[tuple[str, int], int] = {}
    for dtype in options.reference_dtype:
        reference = Reference(directory, dtype)
        torch.set_num_threads(options.threads or torch.get_num_threads())
        if not options.threads:
            reference.choose_threads(prompts[0])
        threads[f"transformers {dtype}", 1] = torch.get_num_threads()
        sides[f"transformers {dtype}", 1] = partial(reference.generate, prompts[0], options.tokens, stop_at_eos=False)
    name = f"bandmaster {ours.versions['dtype'].partition(':')[0]}"
    for rows in options.concurrency:
        threads[name, rows] = threads_ours
        sides[name, rows] = partial(ours.run, prompts[:rows], options.tokens)
    taken_s: dict[tuple[str, int], list[float]] = {side: [] for side in sides}
    for turn in range(options.rounds + 1):  # the first turn warms up and is not counted
        for side, work in sides.items():
            torch.set_num_threads(threads[side])
            seconds = timed(work)
            if turn:
                taken_s[side].append(seconds)
    return [
        {
            "side": side[0],
            "concurrency": side[1],
            "threads": threads[side],
            "tokens_per_s": round(side[1] * options.tokens / statistics.median(taken_s[side]), 2),
            "seconds": [round(second, 4) for second in taken_s[side]],
        }
        for side in sides
    ]


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The rows for a person; the last column is the rate beside the first row's."""
    table = Table("side", "rows at once", "threads", "tokens/s", "beside the first", title=title)
    for row in rows:
        beside = row["tokens_per_s"] / rows[0]["tokens_per_s"]
        values = (row["side"], row["concurrency"], row["threads"], f"{row['tokens_per_s']:.1f}", f"{beside:.2f}x")
        table.add_row(*map(str, values))
    print_table(Console(), table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(prog="bandmaster bench model", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", help="directory or GGUF file; the embedded model without it")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16], help="rows decoded together")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each row")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every side; the median counts")
    parser.add_argument("--threads", type=int, default=0, help="threads of both sides; 0: each side's best, measured")
    parser.add_argument("--reference-dtype", nargs="*", default=["float32", "bfloat16"], help="dtypes of transformers")
    add_ours(parser)
    return parser.parse_args(argv)


def add_ours(parser: argparse.ArgumentParser) -> None:
    """What our side is made with, and how the rows are told."""
    parser.add_argument("--dtype", default="auto", help="ours")
    parser.add_argument("--model-impl", default="auto", help="auto, native or generic")
    parser.add_argument("--host-kernels", default="auto", help="auto, torch or compiled")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one object with a list `rows`")


def run(options: argparse.Namespace, measure: Measure, told: Callable[[list[Row], str], None]) -> int:
    """Measure on the model that is named and print, by `told` with the model's name; 1 when it cannot be loaded."""
    try:
        directory = prepare_model(options.model or None)
        rows = measure(directory, options)
    except RankError as error:
        sys.stderr.write(f"bandmaster: {error}\n")
        return 1
    if options.json:
        sys.stdout.write(json.dumps({"model": directory.name, "rows": rows}) + "\n")
    else:
        told(rows, directory.name)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 1 when the model cannot be loaded."""
    options = parse(argv)
    lengths = f"{options.prompt_tokens} prompt + {options.tokens} output tokens"
    return run(options, measure, lambda rows, model: show(rows, f"{model}: {lengths}"))


if __name__ == "__main__":
    sys.exit(main())
