"""`bandmaster bench serve`: a server measured from outside, over HTTP, with streams.

Owns the rounds and their presentation; the load is `tools.http_load`, an own server `tools.own_server`. Must never mix
two concurrencies in one row. With `--beside-transformers` each round is followed by single-stream `generate` of
`transformers` on the same weights and prompts, in turns, because a machine's speed drifts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import trio
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tools.http_load import Load, percentile, run_load, summary
from tools.own_server import OwnServer, ServerFailed
from tools.reference import Reference

COLUMNS = (
    ("concurrency", "conc."),
    ("requests", "reqs"),
    ("errors", "err."),
    ("output_tok_s", "tok/s"),
    ("ttft_ms_p50", "TTFT p50 ms"),
    ("ttft_ms_p99", "p99"),
    ("itl_ms_p50", "ITL p50 ms"),
    ("itl_ms_p99", "p99"),
    ("e2e_ms_p50", "e2e p50 ms"),
    ("e2e_ms_p99", "p99"),
)
WARM_UP_INDEX = 1_000_000  # prompts of the warm-up are never those of a measured request


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="bandmaster bench serve", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--url", default="", help="a running server; without it one is started and stopped")
    made.add_argument("--model", default="", help="the model's name; default: the first that the server lists")
    made.add_argument("--api-key", default="", help="bearer token")
    made.add_argument("--concurrency", default="1,16", help="comma-separated list [1,16]")
    made.add_argument(
        "--requests", type=int, default=0, help="requests of each row [4 times its concurrency, 8 at least]"
    )
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument("--output-tokens", type=int, default=64)
    made.add_argument("--rounds", type=int, default=1, help="repeat everything; the row with the median rate is shown")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--plain", action="store_true", help="send no extension fields (ignore_eos, return_token_ids)")
    made.add_argument(
        "--beside-transformers",
        default="",
        metavar="DIR",
        help="after each round also run single-stream generate of transformers on this model directory",
    )
    made.add_argument("--reference-dtype", default="float32", choices=("float32", "bfloat16"))
    made.add_argument("--json", action="store_true", help="one object with a list `rows`")
    made.add_argument("serve", nargs="*", help="behind `--`: flags of an own `bandmaster serve`")
    return made


def concurrencies(text: str) -> list[int]:
    """The list of concurrencies; raises ValueError for anything but positive integers."""
    found = [int(part) for part in text.split(",")]
    if not found or min(found) < 1:
        raise ValueError(text)
    return found


@contextlib.contextmanager
def progress_bar(quiet: bool, total: int, text: str) -> Iterator[Callable[[], None]]:
    """A bar on standard error; yields what advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


def measure(load: Load, concurrency: int, requests: int, quiet: bool) -> dict[str, Any]:
    """One row: a warm-up request, then `requests` at this concurrency."""
    warm = replace(load, output_tokens=min(load.output_tokens, 4))
    _, warmed = trio.run(run_load, warm, [WARM_UP_INDEX], 1)
    if warmed[0].error:
        raise ServerFailed(f"the first request failed: {warmed[0].error}")
    with progress_bar(quiet, requests, f"concurrency {concurrency}") as advance:
        wall_s, results = trio.run(run_load, load, range(requests), concurrency, advance)
    row = summary(wall_s, results, concurrency)
    row |= {"prompt_tokens": load.prompt_tokens, "first_error": next((r.error for r in results if r.error), "")}
    return row


def measure_reference(reference: Reference, load: Load, requests: int, quiet: bool) -> dict[str, Any]:
    """One row for `transformers`: the same prompts, one after the other."""
    took_s = []
    with progress_bar(quiet, requests, "transformers") as advance:
        for index in range(requests):
            began = time.monotonic()
            reference.generate(load.prompt(index), load.output_tokens, stop_at_eos=False)
            took_s.append(time.monotonic() - began)
            advance()
    tokens = requests * load.output_tokens
    return {
        "concurrency": "transformers",
        "requests": requests,
        "errors": 0,
        "wall_s": round(sum(took_s), 3),
        "output_tokens": tokens,
        "output_tok_s": round(tokens / sum(took_s), 2),
        "e2e_ms_p50": round(percentile(took_s, 0.5) * 1000, 2),
        "e2e_ms_p99": round(percentile(took_s, 0.99) * 1000, 2),
        "prompt_tokens": load.prompt_tokens,
        "threads": reference.threads,
    }


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with the median rate, and the rates of all rounds beside it."""
    ordered = sorted(rows, key=lambda row: float(row["output_tok_s"]))
    chosen = ordered[(len(ordered) - 1) // 2]
    return {**chosen, "rounds_tok_s": [row["output_tok_s"] for row in rows]}


def all_rounds(load: Load, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every round in turn; one row per concurrency, then one for `transformers` where it was asked for."""
    wanted = concurrencies(options.concurrency)
    rows: dict[Any, list[dict[str, Any]]] = {concurrency: [] for concurrency in wanted}
    reference = None
    if options.beside_transformers:
        reference = Reference(options.beside_transformers, options.reference_dtype)
        reference.choose_threads(load.prompt(WARM_UP_INDEX))
        rows["transformers"] = []
    for _ in range(options.rounds):
        for concurrency in wanted:
            requests = options.requests or max(8, 4 * concurrency)
            rows[concurrency].append(measure(load, concurrency, requests, options.json))
        if reference is not None:
            rows["transformers"].append(measure_reference(reference, load, options.requests or 4, options.json))
    return [middle(found) for found in rows.values()]


def table(rows: list[dict[str, Any]], load: Load) -> Table:
    """The rows for a person."""
    title = f"{load.url}  {load.model}  {load.prompt_tokens} tokens in, {load.output_tokens} out"
    made = Table(title=title, caption="tok/s: output tokens per second", box=SIMPLE_HEAD, pad_edge=False)
    for _, heading in COLUMNS:
        made.add_column(heading, justify="right")
    for row in rows:
        cells = [row.get(key) for key, _ in COLUMNS]
        made.add_row(
            *["" if cell is None else f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells]
        )
    return made


def main(argv: list[str]) -> int:
    """0 when every request ended well, 1 when one did not or there was no server, 2 for bad arguments."""
    cli = parser()
    options = cli.parse_args(argv)
    try:
        concurrencies(options.concurrency)
    except ValueError:
        cli.error(f"--concurrency {options.concurrency!r}: positive integers separated by commas")
    with contextlib.ExitStack() as stack:
        try:
            server = OwnServer(options.serve)
            if not options.url:
                stack.enter_context(server)
            server.url = options.url.rstrip("/") or server.url
            load = Load(
                server.url,
                options.model or server.model(),
                options.prompt_tokens,
                options.output_tokens,
                options.seed,
                options.api_key,
                not options.plain,
            )
            rows = all_rounds(load, options)
        except (ServerFailed, OSError, ValueError) as error:
            sys.stderr.write(f"bandmaster bench serve: {error}\n")
            return 1
    if options.json:
        sys.stdout.write(json.dumps({"rows": rows}) + "\n")
    else:
        Console().print(table(rows, load))
    failed = [row for row in rows if row["errors"]]
    for row in failed:
        sys.stderr.write(f"concurrency {row['concurrency']}: {row['errors']} failed, first: {row['first_error']}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
