"""`bandmaster bench what-if`: records a pressured run of a real daemon on modeled ranks, predicts changes, reruns them.

Owns the run that is recorded and the table of how far each prediction is off. Must never judge: times are the machine's
too, and a busy one is slow in one run and not in the next. Predictions are done before anything is run again. Ranks are
blind: they compute nothing, so that a forward takes what it is told to, and say a token by its position, so that a stop
id of each request's own ends it where that was drawn. Exit code 0; 1 where a run failed; 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from allocator.columns import Int64s, pack_i64
from daemon.config import ConfigError, resolve
from journal.storage import DiskStorage
from tools.own_server import ServerFailed
from tools.tables import print_table
from tools.whatif.answer import Study, run_for_real
from tools.whatif.changes import Change, parse_changes
from tools.whatif.command import progress
from tools.whatif.documents import Documents, draw_documents
from tools.whatif.errors import WhatIfError
from tools.whatif.pressured import Load, draw
from tools.whatif.rerun import Sending, run_server, settings_for
from tools.whatif.rows import CHANGED, PACED, RECORDED, RERUN, ROWS, UNCHANGED, Row, value_of
from tools.whatif.show import judged, show, with_bar
from tools.whatif.traffic import Traffic

VOCAB_SIZE, FIRST_TOKEN = 49_152, 32  # as ranks have them where nothing is said
DEPTH = 16  # layers of the toy: a page of 32 tokens takes 4,096 bytes
PAGE_TOKENS, PAGE_BYTES = 32, 4096
SHOWN = (
    "prompt tokens found in the cache",
    "retractions",
    "waiting, mean",
    "waiting, 99th percentile",
    "time to first token, mean",
    "time to first token, median",
)


class Served(NamedTuple):
    """Traffic to record, and the server that it comes to. `output_tokens` is how long outputs are on the mean."""

    draw: Callable[[argparse.Namespace], list[Sending]]
    requests: int
    seconds: float
    delay_us: int
    token_delay_us: int
    output_tokens: int
    flags: dict[str, str]


def _talks(options: argparse.Namespace) -> list[Sending]:
    return draw(Load(requests=options.requests, seconds=options.seconds), options.seed)


def _documents(options: argparse.Namespace) -> list[Sending]:
    return draw_documents(Documents(requests=options.requests, seconds=options.seconds), options.seed)


WORLDS = {
    "talks": Served(_talks, Load().requests, Load().seconds, 40_000, 20, 33, {}),
    "documents": Served(
        _documents,
        Documents().requests,
        Documents().seconds,
        40_000,
        300,
        60,
        {"max_running_requests": "16"},
    ),
}
DEFAULTS = ("requests", "seconds", "delay_us", "token_delay_us")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bandmaster bench what-if", description=__doc__.split("\n")[0])
    add = parser.add_argument
    of = {name: ", ".join(f"{getattr(world, name):g}" for world in WORLDS.values()) for name in DEFAULTS}
    add(
        "changes",
        nargs="*",
        metavar="KEY=VALUE",
        help="one question each [arena_bytes=+25% schedule_policy=lpm]".replace("%", "%%"),
    )
    add(
        "--world",
        choices=list(WORLDS),
        default="talks",
        help="conversations in bursts; or questions about a few documents between texts that come once, where it "
        "matters what the cache keeps [talks]",
    )
    add("--requests", type=int, metavar="N", help=f"[{of['requests']}]")
    add("--seconds", type=float, help=f"in which they come [{of['seconds']}]")
    add("--pages", type=int, default=512, metavar="N", help=f"of {PAGE_TOKENS} tokens in the arena, at least 256 [512]")
    add(
        "--delay-us",
        type=int,
        metavar="US",
        help=f"of a forward; small ones drown in a busy machine [{of['delay_us']}]",
    )
    add("--token-delay-us", type=int, metavar="US", help=f"for each computed token on top [{of['token_delay_us']}]")
    add("--replays", type=int, default=5, metavar="N", help="[5]")
    add("--reruns", type=int, default=1, metavar="N", help="real runs of each change, which differ too [1]")
    add(
        "--together",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="real runs side by side, whose ranks only wait; 1 on a busy machine [one for each processor]",
    )
    add("--seed", type=int, default=1, help="of the traffic [1]")
    add("--journal", metavar="DIR", help="where the recorded run is kept, a new directory; else it is removed")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--brief", action="store_true", help="only the last table and the notes")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, with what the world has for those that are not given."""
    parser = build_parser()
    options = parser.parse_args(argv)
    for name in DEFAULTS:
        if getattr(options, name) is None:
            setattr(options, name, getattr(WORLDS[options.world], name))
    for name in ("requests", "replays", "reruns", "together"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    return options


def record(options: argparse.Namespace, directory: Path) -> Path:
    """Serve the traffic in an arena that is too small; the run directory."""
    world = WORLDS[options.world]
    delays = f"delay_us={options.delay_us},token_delay_us={options.token_delay_us}"
    flags = {
        "rank_runner": "modeled",
        "rank_option": f"{delays},depth={DEPTH},blind=1",
        "page_size": str(PAGE_TOKENS),
        "enable_priority_preemption": "true",
        **world.flags,
    }
    settings = settings_for(resolve("daemon", flags, {}), PAGE_BYTES * (options.pages + 1))
    return run_server(settings, ending(world.draw(options), world.output_tokens, options.seed), directory)


def blind_tokens(positions: Int64s) -> Int64s:
    """What blind ranks say at these positions (int64)."""
    return positions % (VOCAB_SIZE - FIRST_TOKEN) + FIRST_TOKEN


def ending(requests: list[Sending], output_tokens: int, seed: int) -> list[Sending]:
    """Each with an end of its own: most outputs are short and few long, and so long on the mean beyond their least."""
    rng, found = random.Random(f"ends/{seed}"), []
    for one in requests:
        generate = one.generate
        most = min(generate.min_tokens + 1 + int(rng.expovariate(1 / output_tokens)), generate.max_tokens or 1)
        last = blind_tokens(np.array([len(generate.prompt) // 8 + most - 1]))
        found.append(one._replace(generate=msgspec.structs.replace(generate, stop_ids=pack_i64(last))))
    return found


def ask(options: argparse.Namespace, asked: list[list[Change]], run_dir: Path) -> list[dict[str, Any]]:
    """The document of each question: predicted, then run for real, so many side by side."""
    with Traffic() as traffic:
        study = Study(DiskStorage(run_dir / "journal"), traffic, options.replays, progress)
        predictions = [study.predict(changes, True) for changes in asked]
        reals = run_for_real(predictions, options.reruns, options.together)
        each = zip(predictions, reals, strict=True)
        return [study.conclude(str(run_dir), prediction, found) for prediction, found in each]


def table(documents: list[dict[str, Any]]) -> Table:
    """A row for each figure of each question; first, what a replay without changes has for the recorded figures."""
    made = Table(title="predictions beside real reruns")
    made.add_column("change", no_wrap=True)
    made.add_column("figure", no_wrap=True)
    for name in ("recorded", "predicted", "real", "off", "at its pace", "off "):
        made.add_column(name, justify="right", no_wrap=True)
    rows = [row for row in ROWS if row.name in SHOWN]
    first = documents[0]
    for row in rows:
        recorded = row.write(value_of(first["runs"][RECORDED], row))
        cells = [recorded, with_bar(first, UNCHANGED, row), recorded, judged(first, UNCHANGED, row), "", ""]
        made.add_row("nothing" if row is rows[0] else "", row.name, *cells, end_section=row is rows[-1])
    for document in documents:
        for row in rows:
            name = " ".join(document["changes"]) if row is rows[0] else ""
            made.add_row(name, row.name, *_cells(document, row), end_section=row is rows[-1])
    return made


def _cells(document: dict[str, Any], row: Row) -> list[str]:
    cells = [row.write(value_of(document["runs"][RECORDED], row))]
    for name in (CHANGED, PACED):
        cells.append(with_bar(document, name, row))
        if name == CHANGED:
            cells.append(with_bar(document, RERUN, row))
        cells.append(judged(document, name, row))
    return cells


def main(argv: list[str]) -> int:
    """Record, ask, rerun, tell."""
    options = parse(argv)
    questions = options.changes or ["arena_bytes=+25%", "schedule_policy=lpm"]
    try:
        asked = [parse_changes([text]) for text in questions]
        with tempfile.TemporaryDirectory(prefix="bandmaster-what-if-") as temporary:
            directory = Path(options.journal or temporary)
            directory.mkdir(parents=True, exist_ok=True)
            print(f"recording for {options.seconds:g} s of arrivals, and what is left then", file=sys.stderr)
            documents = ask(options, asked, record(options, directory))
    except (WhatIfError, ConfigError) as error:
        print(f"bandmaster bench what-if: {error}", file=sys.stderr)
        return 2
    except ServerFailed as error:
        print(f"bandmaster bench what-if: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"rows": documents}))
        return 0
    tell(documents, options.brief)
    return 0


def tell(documents: list[dict[str, Any]], brief: bool) -> None:
    """Print the tables; `brief`: only the last, with the notes of all."""
    console = Console(highlight=False)
    if not brief:
        for document in documents:
            show(document)
    print_table(console, table(documents))
    if brief:
        for note in told_once(documents):
            console.print(f"note: {note}", soft_wrap=True, markup=False)


def told_once(documents: list[dict[str, Any]]) -> list[str]:
    """The notes of all questions: what is said of each once, and what is said of one alone with its change."""
    notes = dict.fromkeys(note for document in documents for note in document["notes"])
    found = []
    for note in notes:
        of = [" ".join(document["changes"]) for document in documents if note in document["notes"]]
        found.append(note if len(of) == len(documents) else f"{', '.join(of)}: {note}")
    return found
