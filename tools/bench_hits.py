"""`bandmaster bench hits`: what later requests find of earlier ones in a model with recurrent layers, and at what cost.

Owns the command. Must never serve anything itself. No model: the real core, logical chain and prefix tree on a
simulated device. Two parts: a sweep over how much requests share, and conversations beside a grid that keeps a state at
every point. Exit code 0; 2 for bad arguments; with `--check` 1 where something promised does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from daemon.core.limits import CHECKPOINT_POLICIES
from tools.hits.arena import ROOM_PPM, Served
from tools.hits.chat import CHATS, Chat, run
from tools.hits.show import Comparison, cost_rows, cost_table, kind_table, split_rows, split_table
from tools.hits.sweep import Split, sweep
from tools.tables import print_table

MODES = ("alone", "nested", "together")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bandmaster bench hits", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--part", choices=("all", "sweep", "chat"), default="all", help="what to measure [all]")
    add("--requests", type=int, default=64, metavar="N", help="requests of each split, at least 3 [64]")
    add("--shared", default="1500:1600:10", metavar="FIRST:LAST:STEP", help="shared tokens [1500:1600:10]")
    add("--total", type=int, default=2200, metavar="TOKENS", help="tokens of every prompt of the sweep [2200]")
    add(
        "--modes",
        default=",".join(MODES),
        help="how a split's requests come: one by one from an empty cache, from what is there, all at once [all three]",
    )
    add("--chats", default=",".join(chat.name for chat in CHATS), help="conversations, comma-separated [all]")
    add("--rooms", default="100,50", metavar="PERCENT", help="arenas of the chats, of what holds everything [100,50]")
    add("--page-size", type=int, default=16, metavar="TOKENS", help="[16]")
    add("--chunk", type=int, default=512, metavar="TOKENS", help="most prompt tokens of a request in a step [512]")
    add("--interval", type=int, default=256, metavar="TOKENS", help="the checkpoint grid [256]")
    add(
        "--marks", type=int, default=4096, metavar="TOKENS", help="between marks of a prompt seen first, 0: none [4096]"
    )
    add("--check", action="store_true", help="exit 1 where a hit of the sweep or what a chat promises does not hold")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def numbers(parser: argparse.ArgumentParser, flag: str, text: str, separator: str) -> list[int]:
    """Whole numbers of a flag, or the usage and exit code 2."""
    try:
        return [int(part) for part in text.split(separator)]
    except ValueError:
        parser.error(f"{flag} {text!r} is not made of whole numbers with {separator!r} between them")


def splits_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[int]:
    """The shared lengths of the sweep."""
    parts = numbers(parser, "--shared", options.shared, ":")
    if len(parts) != 3 or parts[2] < 1 or not 0 < parts[0] <= parts[1] < options.total:
        parser.error(
            f"--shared {options.shared!r} is not FIRST:LAST:STEP with 0 < FIRST <= LAST < --total and STEP > 0"
        )
    return list(range(parts[0], parts[1] + 1, parts[2]))


def named(parser: argparse.ArgumentParser, flag: str, text: str, known: tuple[str, ...]) -> list[str]:
    """Names of a flag, or the usage and exit code 2."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            parser.error(f"{flag} {name!r} is none of {', '.join(known)}")
    return names


def compare(served: Served, chats: list[Chat], rooms: list[int], tick: Progress) -> list[Comparison]:
    """Both policies on every chat in every arena."""
    task = tick.add_task("chat", total=len(chats) * len(rooms))
    found: list[Comparison] = []
    for chat in chats:
        for room in rooms:
            tick.update(task, description=f"chat: {chat.name}")
            likely, grid = (
                run(chat, served._replace(policy=policy), room * ROOM_PPM // 100) for policy in CHECKPOINT_POLICIES
            )
            found.append(Comparison(likely, grid))
            tick.advance(task)
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure, and print tables, or with `--json` one object with a list `rows`."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.requests < 3:
        parser.error(f"--requests must be at least 3, not {options.requests}: hits count from the third on")
    if options.page_size < 1 or options.interval < 1 or options.interval % options.page_size:
        parser.error(f"--interval {options.interval} is no multiple of --page-size {options.page_size}")
    if options.chunk < 1 or options.marks < 0:
        parser.error(f"--chunk starts at 1 and --marks at 0, not {options.chunk} and {options.marks}")
    splits = splits_of(parser, options)
    modes = named(parser, "--modes", options.modes, MODES)
    names = named(parser, "--chats", options.chats, tuple(chat.name for chat in CHATS))
    rooms = numbers(parser, "--rooms", options.rooms, ",")
    if min(rooms) < 1:
        parser.error(f"--rooms {options.rooms!r}: an arena has at least 1 percent of what holds everything")
    served = Served(options.page_size, options.chunk, options.interval, options.marks)
    rows: list[Split] = []
    costs: list[Comparison] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        if options.part != "chat":
            for mode in progress.track(modes, description="sweep"):
                rows += sweep(served, splits, options.total, options.requests, mode)
        if options.part != "sweep":
            costs = compare(served, [chat for chat in CHATS if chat.name in names], rooms, progress)
    _print(rows, costs, options.json)
    missed = not (all(one.holds for one in rows) and all(both.holds for both in costs))
    return int(options.check and missed)


def _print(rows: list[Split], costs: list[Comparison], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rows": split_rows(rows) + cost_rows(costs)}))
        return
    console = Console()
    if rows:
        print_table(console, split_table(rows))
        held = sum(one.holds for one in rows)
        console.print(f"{held} of {len(rows)} splits end at most {rows[0].interval} tokens below from request 3 on")
    if costs:
        print_table(console, cost_table(costs))
        print_table(console, kind_table(costs))


if __name__ == "__main__":
    sys.exit(main())
