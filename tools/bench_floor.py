"""`bandmaster bench floor`: how near a decode step is to the bare products of the model's shapes.

Owns the floor: every weight of the model that a forward multiplies by, read once, in the layout and with the number of
threads that are fastest here; no norm, no attention, no sampling. Must never compare a floor with a step of another
turn: products and steps take turns, round by round, and medians are compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from daemon.rank.dtypes import BY_NAME
from daemon.rank.products import Product
from daemon.rank.threads import usable_cores
from daemon.rank.weights import Weights
from tools.bench_model import Ours, Row, add_ours, run, timed
from tools.tables import print_table

CHUNK_TOKENS = 2048  # a prompt's products run on so many tokens at once
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight")


class Floor:
    """The products of a model directory, alone."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._layers: list[Product] = []
        self._head: Product | None = None
        tied: Tensor | None = None
        joined: dict[str, list[Tensor]] = {}
        stored = Weights(directory, dtype, torch.device("cpu"))
        for name in stored.unread():
            weight = stored.get(name)
            if weight.dim() != 2 or not name.endswith(".weight"):
                continue
            if name.endswith(HEADS):
                self._head = Product(weight)
            elif name.endswith(EMBEDDINGS):
                tied = weight
            else:
                joined.setdefault(group_of(name), []).append(weight)
        self._layers = [Product(torch.cat(weights)) for weights in joined.values()]
        if self._head is None and tied is not None:
            self._head = Product(tied)
        self.weight_bytes = sum(p.inputs * p.outputs for p in [*self._layers, *self._heads()]) * dtype.itemsize
        self.threads: dict[int, int] = {}

    def _heads(self) -> list[Product]:
        return [] if self._head is None else [self._head]

    def run(self, tokens: int, heads: int) -> None:
        """Every layer's products on `tokens` rows, the head on `heads`."""
        inputs = {product.inputs: torch.ones(tokens, product.inputs, dtype=self._dtype) for product in self._layers}
        with torch.inference_mode():
            for product in self._layers:
                product(inputs[product.inputs])
            for product in self._heads() if heads else []:
                product(torch.ones(heads, product.inputs, dtype=self._dtype))

    def seconds(self, tokens: int, heads: int, threads: Sequence[int] = ()) -> float:
        """The time of one pass; without `threads` with the number that was fastest for so many rows before."""
        before = torch.get_num_threads()
        tried = threads or [self.threads.get(tokens, before)]
        took = {}
        for count in tried:
            torch.set_num_threads(count)
            took[count] = timed(partial(self.run, tokens, heads))
        torch.set_num_threads(before)
        return min(took.values())

    def choose_threads(self, batches: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the fastest number of threads for each number of rows: the best of three passes each."""
        for tokens in batches:
            took = {}
            for count in counts:
                self.seconds(tokens, tokens, [count])
                took[count] = min(self.seconds(tokens, tokens, [count]) for _ in range(3))
            self.threads[tokens] = min(took, key=lambda count: took[count])

    def prepare(self, requests: int, prompt_tokens: int) -> None:
        """Choose the threads of a load's passes, those not chosen yet."""
        whole, rest = divmod(requests * prompt_tokens, CHUNK_TOKENS)
        wanted = {requests, *([CHUNK_TOKENS] if whole else []), *([rest] if rest else [])}
        self.choose_threads(sorted(wanted - set(self.threads)), range(1, usable_cores() + 1))

    def load_seconds(self, requests: int, prompt_tokens: int, output_tokens: int) -> float:
        """The products of `requests` prompts and, all together, of their outputs; measured now."""
        whole, rest = divmod(requests * prompt_tokens, CHUNK_TOKENS)
        total = whole * self.seconds(CHUNK_TOKENS, 0) if whole else 0.0
        if rest:
            total += self.seconds(rest, 0)
        # the prompts' own last positions go through the head once; the first output token needs no further pass
        return total + output_tokens * self.seconds(requests, requests)


def group_of(name: str) -> str:
    """Weights that are multiplied with the same rows: Q, K and V, and gate and up, of a layer; else the name itself."""
    parent, _, leaf = name.removesuffix(".weight").rpartition(".")
    for members in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        if leaf in members:
            return f"{parent}.{'+'.join(members)}"
    return name


def measure(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per batch: floor and step in ms, medians of the rounds, and the floor's share of the step.

    A pass of the bare products precedes every step, so whatever slows the machine slows both.
    """
    ours = Ours(directory, options)
    own_threads = torch.get_num_threads()
    dtype = ours.versions["dtype"].partition(":")[0]
    floor = Floor(directory, BY_NAME[dtype])
    floor.choose_threads(options.concurrency, range(1, usable_cores() + 1))
    chance = random.Random(options.seed)
    taken: dict[int, tuple[list[float], list[float]]] = {rows: ([], []) for rows in options.concurrency}
    for turn in range(options.rounds + 1):  # the first turn warms up and is not counted
        for rows, (floors, own) in taken.items():
            ids = range(options.prompt_tokens)
            prompts = [[chance.randrange(100, ours.vocab_size) for _ in ids] for _ in range(rows)]
            bare: list[float] = []
            steps = ours.steps(prompts, options.tokens, lambda n=rows, to=bare: to.append(floor.seconds(n, n)))  # type: ignore[misc]
            if turn:
                floors.append(statistics.median(bare))
                own.append(statistics.median(steps))
    return [row_of(rows, floor, dtype, own_threads, *taken[rows]) for rows in options.concurrency]


def row_of(
    rows: int, floor: Floor, dtype: str, threads: int, floors: Sequence[float], own: Sequence[float]
) -> dict[str, Any]:
    """The figures of one batch size from the seconds of all rounds."""
    bare, step = statistics.median(floors), statistics.median(own)
    return {
        "concurrency": rows,
        "dtype": dtype,
        "floor_threads": floor.threads[rows],
        "threads": threads,
        "floor_ms": round(bare * 1000, 3),
        "step_ms": round(step * 1000, 3),
        "floor_share": round(bare / step, 4),
        "floor_gb_s": round(floor.weight_bytes / bare / 1e9, 2),
        "rounds": [[round(a * 1000, 3), round(b * 1000, 3)] for a, b in zip(floors, own, strict=True)],
    }


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The rows for a person."""
    table = Table("rows", "floor ms", "threads", "GB/s", "step ms", "threads", "floor / step", title=title)
    for row in rows:
        values = (
            str(row["concurrency"]),
            f"{row['floor_ms']:.1f}",
            str(row["floor_threads"]),
            f"{row['floor_gb_s']:.1f}",
            f"{row['step_ms']:.1f}",
            str(row["threads"]),
            f"{row['floor_share']:.0%}",
        )
        table.add_row(*values)
    print_table(Console(), table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(prog="bandmaster bench floor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="", help="directory or GGUF file; the embedded model without it")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="rows of a step")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="what each row has stored before")
    parser.add_argument("--tokens", type=int, default=32, help="steps of each round")
    parser.add_argument("--rounds", type=int, default=3, help="turns of both; medians count")
    parser.add_argument("--threads", type=int, default=0, help="of our steps; 0: as a server chooses")
    add_ours(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 1 when the model cannot be loaded."""

    def told(rows: list[Row], model: str) -> None:
        show(rows, f"{model}: one step over bare products, {rows[0]['dtype']}")

    return run(parse(argv), measure, told)


if __name__ == "__main__":
    sys.exit(main())
