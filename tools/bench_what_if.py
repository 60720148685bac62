"""`bandmaster bench what-if`: records a pressured run of a real daemon on modeled ranks, predicts changes, reruns them.

Owns the run that is recorded and the table of how far each prediction is off. Must never judge: times are the machine's
too, and a busy one is slow in one run and not in the next. Exit code 0; 1 where a run failed; 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from allocator.columns import pack_i64
from daemon.config import ConfigError, resolve
from journal.storage import DiskStorage
from tools.own_server import ServerFailed
from tools.tables import print_table
from tools.whatif.answer import answer
from tools.whatif.changes import parse_changes
from tools.whatif.command import progress
from tools.whatif.errors import WhatIfError
from tools.whatif.pressured import Load, draw
from tools.whatif.rerun import run_server, settings_for
from tools.whatif.show import CHANGED, PACED, RERUN, ROWS, off, show, value_of

EOS = 2
DEPTH = 8  # layers of the toy: a page of 32 tokens takes 2,048 bytes
PAGE_TOKENS, PAGE_BYTES = 32, 2048
SHOWN = ("prompt tokens found in the cache", "retractions", "waiting, mean", "waiting, 99th percentile")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    load = Load()
    parser = argparse.ArgumentParser(prog="bandmaster bench what-if", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add(
        "changes",
        nargs="*",
        metavar="KEY=VALUE",
        help="one question each [arena_bytes=+25% schedule_policy=lpm]".replace("%", "%%"),
    )
    add("--requests", type=int, default=load.requests, metavar="N", help=f"[{load.requests}]")
    add("--seconds", type=float, default=load.seconds, help=f"in which they come [{load.seconds:g}]")
    add("--pages", type=int, default=512, metavar="N", help=f"of {PAGE_TOKENS} tokens in the arena, at least 512 [512]")
    add(
        "--delay-us",
        type=int,
        default=60_000,
        metavar="US",
        help="of a forward; small ones drown in a busy machine [60000]",
    )
    add("--token-delay-us", type=int, default=20, metavar="US", help="for each computed token on top [20]")
    add("--replays", type=int, default=5, metavar="N", help="[5]")
    add("--seed", type=int, default=1, help="of the traffic [1]")
    add("--journal", metavar="DIR", help="where the recorded run is kept, a new directory; else it is removed")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def record(options: argparse.Namespace, directory: Path) -> Path:
    """Serve the traffic in an arena that is too small; the run directory."""
    delays = f"delay_us={options.delay_us},token_delay_us={options.token_delay_us}"
    flags = {
        "rank_runner": "modeled",
        "rank_option": f"{delays},eos_ppm=30000,depth={DEPTH}",
        "page_size": str(PAGE_TOKENS),
        "enable_priority_preemption": "true",
    }
    settings = settings_for(resolve("daemon", flags, {}), PAGE_BYTES * (options.pages + 1))
    load = Load(requests=options.requests, seconds=options.seconds)
    stops = pack_i64([EOS])
    requests = [
        one._replace(generate=msgspec.structs.replace(one.generate, stop_ids=stops)) for one in draw(load, options.seed)
    ]
    return run_server(settings, requests, directory)


def table(documents: list[dict[str, Any]]) -> Table:
    """A row for each figure of each question."""
    made = Table(title="predictions beside real reruns")
    made.add_column("change", no_wrap=True)
    made.add_column("figure", no_wrap=True)
    for name in ("recorded", "predicted", "real", "off", "at its pace", "off "):
        made.add_column(name, justify="right", no_wrap=True)
    rows = [row for row in ROWS if row.name in SHOWN]
    for document in documents:
        runs = document["runs"]
        for row in rows:
            real = value_of(runs[RERUN], row)
            cells = [row.write(value_of(runs["recorded"], row))]
            for name in (CHANGED, PACED):
                value = value_of(runs[name], row)
                part = off(value, real)
                cells += [row.write(value)] + ([row.write(real)] if name == CHANGED else [])
                cells.append("-" if part is None else f"{part:+.1%}")
            made.add_row(" ".join(document["changes"]) if row is rows[0] else "", row.name, *cells)
    return made


def main(argv: list[str]) -> int:
    """Record, ask, rerun, tell."""
    options = build_parser().parse_args(argv)
    questions = options.changes or ["arena_bytes=+25%", "schedule_policy=lpm"]
    try:
        asked = [parse_changes([text]) for text in questions]
        with tempfile.TemporaryDirectory(prefix="bandmaster-what-if-") as temporary:
            directory = Path(options.journal or temporary)
            directory.mkdir(parents=True, exist_ok=True)
            print(f"recording for {options.seconds:g} s of arrivals, and what is left then", file=sys.stderr)
            run_dir = record(options, directory)
            storage = DiskStorage(run_dir / "journal")
            documents = [answer(str(run_dir), storage, one, options.replays, True, progress) for one in asked]
    except (WhatIfError, ConfigError) as error:
        print(f"bandmaster bench what-if: {error}", file=sys.stderr)
        return 2
    except ServerFailed as error:
        print(f"bandmaster bench what-if: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"rows": documents}))
        return 0
    for document in documents:
        show(document)
    print_table(Console(highlight=False), table(documents))
    return 0
