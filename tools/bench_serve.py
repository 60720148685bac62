"""`bandmaster bench serve`: a server measured from outside, over HTTP, with streams.

Owns the rounds and their presentation; the load is `tools.http_load`, an own server `tools.own_server`. Must never mix
two concurrencies or two loads in one row. Sides take turns, round by round, because a machine's speed drifts: the own
server (or the one at `--url`), other servers (`--beside NAME=URL`), single-stream `generate` of `transformers`
(`--beside-transformers`) and the bare products of the model's shapes (`--beside-floor`). What is compared is medians of
the same rounds. A server that is not measured at the moment is idle, so it takes no part of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from daemon.rank.convert import prepare_model
from daemon.rank.errors import RankError
from tools.http_load import PROMPT_ID_HIGH, PROMPT_ID_LOW, Load
from tools.own_server import OwnServer, ServerFailed
from tools.serve_sides import FloorSide, ReferenceSide, ServerSide, Shape, Side

COLUMNS = (
    ("load", "load"),
    ("concurrency", "conc."),
    ("side", "side"),
    ("output_tok_s", "tok/s"),
    ("beside", "x"),
    ("ttft_ms_p50", "TTFT p50 ms"),
    ("ttft_ms_p99", "p99"),
    ("itl_ms_p50", "ITL p50 ms"),
    ("itl_ms_p99", "p99"),
    ("cached_share", "cached"),
)
OWN = "bandmaster"
TABLE_WIDTH = 110  # below it headings are cut
SERVED = "the served model"  # no directory has this name


class Key(NamedTuple):
    """What one row is about."""

    load: Shape
    concurrency: int
    side: str


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="bandmaster bench serve", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--url", default="", help="a running server; without it one is started and stopped")
    made.add_argument("--model", default="", help="the model's name there; default: the first that the server lists")
    made.add_argument("--family", default="", help="serve a small random model of this family, from a fixed seed")
    made.add_argument("--api-key", default="", help="bearer token")
    made.add_argument("--concurrency", default="1,8,32", help="comma-separated list [1,8,32]")
    made.add_argument(
        "--load",
        nargs="+",
        default=["128/64"],
        metavar="[SHARED+]IN/OUT",
        help="tokens in and out, with SHARED tokens that all prompts begin with [128/64], for example 1024+64/32",
    )
    made.add_argument("--requests", type=int, default=0, help="requests of a row [--per-stream, 8 at least]")
    made.add_argument("--per-stream", type=int, default=4, help="requests of a row over its concurrency")
    made.add_argument("--rounds", type=int, default=1, help="turns of everything; medians count")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--plain", action="store_true", help="send no extension fields (ignore_eos, return_token_ids)")
    made.add_argument("--beside", action="append", default=[], metavar="NAME=URL", help="another server; repeatable")
    made.add_argument(
        "--beside-transformers",
        default="",
        nargs="?",
        const=SERVED,
        metavar="DIR",
        help="single-stream generate on this model, without DIR on the served one",
    )
    made.add_argument("--reference-dtype", default="bfloat16", choices=("float32", "bfloat16"))
    made.add_argument(
        "--beside-floor",
        default="",
        nargs="?",
        const=SERVED,
        metavar="DIR",
        help="the bare products of this model's shapes",
    )
    made.add_argument("--json", action="store_true", help="one object with a list `rows`")
    made.add_argument("serve", nargs="*", help="behind `--`: flags of an own `bandmaster serve`")
    return made


def concurrencies(text: str) -> list[int]:
    """The list of concurrencies; raises ValueError for anything but positive integers."""
    found = [int(part) for part in text.split(",")]
    if not found or min(found) < 1:
        raise ValueError(text)
    return found


def peers(texts: list[str]) -> dict[str, str]:
    """Name and URL of every `NAME=URL`; raises ValueError for another form or a name twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, sign, url = text.partition("=")
        if not (name and sign and url) or name in found or name == OWN:
            raise ValueError(f"--beside {text}: NAME=URL, each name once, none of them {OWN}")
        found[name] = url.rstrip("/")
    return found


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of all rounds: every number's median, the rates of all rounds beside it."""
    merged = dict(rows[-1])
    for name in rows[-1]:
        values = [row.get(name) for row in rows]
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if name not in ("errors", "requests", "threads") and len(numbers) == len(values):
            merged[name] = round(statistics.median(numbers), 4)
    merged["errors"] = sum(row["errors"] for row in rows)
    merged["first_error"] = next((row["first_error"] for row in rows if row.get("first_error")), "")
    merged["rounds_tok_s"] = [row["output_tok_s"] for row in rows]
    return merged


def compare(rows: list[dict[str, Any]]) -> None:
    """Set `beside` of every other side's row: how many times its rate ours is, the median over rounds."""
    own = {(row["load"], row["concurrency"]): row["rounds_tok_s"] for row in rows if row["side"] == OWN}
    for row in rows:
        ours = own.get((row["load"], row["concurrency"]), own.get((row["load"], 1), []))
        if row["side"] != OWN and ours and all(row["rounds_tok_s"]):
            ratios = [a / b for a, b in zip(ours, row["rounds_tok_s"], strict=True)]
            row["beside"] = round(statistics.median(ratios), 3)


def all_rounds(sides: list[Side], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every round in turn; one row for each load, concurrency and side."""
    found: dict[Key, list[dict[str, Any]]] = {}
    shapes = [Shape.parse(text) for text in options.load]
    asked = concurrencies(options.concurrency)
    turns = itertools.product(range(options.rounds), shapes, asked)
    for series, (_, shape, concurrency) in enumerate(turns):
        requests = options.requests or max(8, options.per_stream * concurrency)
        for side in sides:
            if concurrency in side.concurrencies(asked):
                row = side.measure(shape, concurrency, requests, series)
                found.setdefault(Key(shape, concurrency, side.name), []).append(row)
    merged = [
        {"load": str(key.load), "side": key.side, **middle(rows), "concurrency": key.concurrency}
        for key, rows in found.items()
    ]
    compare(merged)
    return merged


def served_directory(options: argparse.Namespace, place: Path) -> tuple[Path | None, tuple[int, int]]:
    """The model that an own server will serve, and token ids that it has; None where it is not made or named here."""
    if options.family:
        from tools.bench_family import family_model

        return family_model(place, options.family)
    named = [flag for flag in options.serve[:1] if not flag.startswith("-")]
    return (Path(named[0]) if named else None), (PROMPT_ID_LOW, PROMPT_ID_HIGH)


def open_sides(options: argparse.Namespace, stack: contextlib.ExitStack) -> list[Side]:
    """Every side that was asked for; raises ServerFailed, OSError, ValueError, RankError."""
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bandmaster-")))
    directory, ids = served_directory(options, place)
    server = OwnServer([str(directory), *options.serve] if options.family else options.serve)
    if not options.url:
        stack.enter_context(server)
    server.url = options.url.rstrip("/") or server.url
    load = Load(server.url, options.model or server.model(), seed=options.seed, api_key=options.api_key, ids=ids)
    found: list[Side] = [ServerSide(OWN, load, not options.plain, options.json)]
    for name, url in peers(options.beside).items():
        other = OwnServer()
        other.url = url
        found.append(ServerSide(name, replace(load, url=url, model=other.model()), not options.plain, options.json))

    def of(asked: str) -> str:
        return str(directory or prepare_model(None)) if asked == SERVED else asked

    if options.beside_transformers:
        found.append(ReferenceSide(of(options.beside_transformers), options.reference_dtype, load, options.json))
    if options.beside_floor:
        found.append(FloorSide(of(options.beside_floor), options.reference_dtype))
    return found


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """The rows for a person."""
    caption = f"tok/s: output tokens per second; x: {OWN} over this side"
    made = Table(title=title, caption=caption, box=SIMPLE_HEAD, pad_edge=False)
    for _, heading in COLUMNS:
        made.add_column(heading, justify="right")
    for row in rows:
        cells = [row.get(key) for key, _ in COLUMNS]
        made.add_row(
            *["" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells]
        )
    return made


def check(cli: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the command with 2 where an argument is wrong."""
    try:
        concurrencies(options.concurrency)
    except ValueError:
        cli.error(f"--concurrency {options.concurrency!r}: positive integers separated by commas")
    try:
        peers(options.beside)
        for text in options.load:
            Shape.parse(text)
    except ValueError as error:
        cli.error(str(error))
    if options.family and options.url:
        cli.error("--family is served by an own server; leave --url away")


def main(argv: list[str]) -> int:
    """0 when every request ended well, 1 when one did not or there was no server, 2 for bad arguments."""
    cli = parser()
    options = cli.parse_args(argv)
    check(cli, options)
    with contextlib.ExitStack() as stack:
        try:
            sides = open_sides(options, stack)
            rows = all_rounds(sides, options)
        except (ServerFailed, RankError, OSError, ValueError) as error:
            sys.stderr.write(f"bandmaster bench serve: {error}\n")
            return 1
    if options.json:
        sys.stdout.write(json.dumps({"rows": rows}) + "\n")
    else:
        Console(width=max(Console().width, TABLE_WIDTH)).print(
            table(rows, options.family or options.url or "own server")
        )
    failed = [row for row in rows if row["errors"]]
    for row in failed:
        where = f"{row['side']}, {row['load']}, concurrency {row['concurrency']}"
        sys.stderr.write(f"{where}: {row['errors']} failed, first: {row['first_error']}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
