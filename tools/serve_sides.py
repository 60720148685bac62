"""The sides that `bandmaster bench serve` measures in turns: servers, `transformers`, and the bare products.

Owns one measurement of one side. Must never start or stop a server. Invariant: every side gets the same prompts, those
of its series: no prompt is sent twice to a server (its cache would answer), but for the tokens that a load shares.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tools.http_load import Load, percentile, run_load, summary
from tools.own_server import ServerFailed
from tools.reference import Reference

WARM_UP_INDEX = -1  # prompts of the warm-up are never those of a measured request
SERIES_STRIDE = 1_000_000  # more than the requests of one series
REFERENCE_REQUESTS = 4  # of the single stream


class Shape(NamedTuple):
    """Tokens of each request: shared with all others, its own, and of its output."""

    shared: int
    own: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """`IN/OUT` or `SHARED+IN/OUT`; raises ValueError naming the text."""
        before, sign, output = text.partition("/")
        shared, plus, own = before.rpartition("+")
        try:
            made = cls(int(shared) if plus else 0, int(own), int(output))
        except ValueError:
            made = cls(0, 0, 0)
        if not sign or min(made.own, made.output) < 1 or made.shared < 0:
            raise ValueError(f"--load {text}: [SHARED+]IN/OUT in tokens, such as 128/64 or 1024+64/32")
        return made

    def __str__(self) -> str:
        return f"{f'{self.shared}+' if self.shared else ''}{self.own}/{self.output}"

    def of(self, load: Load) -> Load:
        """The load with this shape."""
        return replace(load, prompt_tokens=self.own, output_tokens=self.output, shared_tokens=self.shared)


class Side(Protocol):
    """Something with a rate."""

    name: str

    def concurrencies(self, asked: list[int]) -> list[int]:
        """Those of the asked ones that it is measured at."""

    def measure(self, shape: Shape, concurrency: int, requests: int, series: int) -> dict[str, Any]:
        """One row; another `series` has other prompts."""


@contextlib.contextmanager
def progress_bar(quiet: bool, total: int, text: str) -> Iterator[Callable[[], None]]:
    """A bar on standard error; yields what advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


class ServerSide:
    """A server over HTTP."""

    def __init__(self, name: str, load: Load, extras: bool, quiet: bool) -> None:
        self.name = name
        self._load = replace(load, extras=extras)
        self._quiet = quiet

    def concurrencies(self, asked: list[int]) -> list[int]:
        """All."""
        return asked

    def measure(self, shape: Shape, concurrency: int, requests: int, series: int) -> dict[str, Any]:
        """A warm-up request (which leaves the shared prefix in a cache), then `requests` at this concurrency."""
        load = shape.of(self._load)
        warm = replace(load, output_tokens=min(load.output_tokens, 4))
        _, warmed = trio.run(run_load, warm, [WARM_UP_INDEX - series], 1)
        if warmed[0].error:
            raise ServerFailed(f"the first request to {self.name} failed: {warmed[0].error}")
        indices = range(series * SERIES_STRIDE, series * SERIES_STRIDE + requests)
        with progress_bar(self._quiet, requests, f"{self.name} {shape} x{concurrency}") as advance:
            wall_s, results = trio.run(run_load, load, indices, concurrency, advance)
        row = summary(wall_s, results, concurrency)
        row["prompt_tokens"] = shape.shared + shape.own
        row["first_error"] = next((result.error for result in results if result.error), "")
        return row


class ReferenceSide:
    """Single-stream `generate` of transformers, with its best number of threads."""

    def __init__(self, directory: str, dtype: str, load: Load, quiet: bool) -> None:
        self.name = f"transformers {dtype}"
        self._load = load
        self._quiet = quiet
        self._reference = Reference(directory, dtype)
        self._reference.choose_threads(load.prompt(WARM_UP_INDEX))

    def concurrencies(self, asked: list[int]) -> list[int]:
        """The smallest: it is one stream."""
        return [min(asked)]

    def measure(self, shape: Shape, concurrency: int, requests: int, series: int) -> dict[str, Any]:
        """The first prompts of the series, one after the other."""
        load, took_s = shape.of(self._load), []
        count = min(requests, REFERENCE_REQUESTS)
        with progress_bar(self._quiet, count, self.name) as advance:
            for index in range(series * SERIES_STRIDE, series * SERIES_STRIDE + count):
                began = time.monotonic()
                self._reference.generate(load.prompt(index), load.output_tokens, stop_at_eos=False)
                took_s.append(time.monotonic() - began)
                advance()
        return {
            "requests": count,
            "errors": 0,
            "output_tok_s": round(count * load.output_tokens / sum(took_s), 2),
            "e2e_ms_p50": round(percentile(took_s, 0.5) * 1000, 2),
            "prompt_tokens": shape.shared + shape.own,
            "threads": self._reference.threads,
        }


class FloorSide:
    """The bare products of the model's shapes for the same tokens, with the fastest number of threads.

    Shared tokens are left out: a cache computes them once.
    """

    def __init__(self, directory: str, dtype: str) -> None:
        from daemon.rank.dtypes import BY_NAME
        from tools.bench_floor import Floor

        self.name = f"floor {dtype}"
        self._floor = Floor(Path(directory), BY_NAME[dtype])

    def concurrencies(self, asked: list[int]) -> list[int]:
        """All."""
        return asked

    def measure(self, shape: Shape, concurrency: int, requests: int, series: int) -> dict[str, Any]:
        """The products of one request on every stream; the median of three passes."""
        self._floor.prepare(concurrency, shape.own)
        took_s = [self._floor.load_seconds(concurrency, shape.own, shape.output) for _ in range(3)]
        return {
            "requests": concurrency,
            "errors": 0,
            "output_tok_s": round(concurrency * shape.output / percentile(took_s, 0.5), 2),
            "step_ms": round(self._floor.seconds(concurrency, concurrency) * 1000, 3),
            "threads": self._floor.threads[concurrency],
        }
