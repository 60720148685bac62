"""`bandmaster groups`: simulated groups of ranks that lag at random, and the divergences they must name.

Owns the command: which layouts, how long, and the table. Must never call a group clean whose outputs were not compared.
Each row of an honest layout is three runs of one load: two whose ranks lag differently, fed alike, which must agree in
every step and digest, and one where ticks and reports come at random. With `--plant` one rank after the other decides
by itself, and the verdict must name it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from daemon.divergence import diverged, in_words
from daemon.results import DigestMismatch
from tools.bench_ranks import parse_layouts
from tools.groups.exchange import Place
from tools.groups.group import SimulatedGroup
from tools.groups.plants import PLANTS, planted
from tools.groups.work import Load, core_config, stage_settings
from tools.tables import print_table

LAYOUTS = "1x2,2x1,2x2,3x2"
ARENA_BYTES = 1 << 16
PLANTED_FROM = 60  # step from which a planted rank decides by itself


def honest(stages: int, ranks: int, steps: int, seed: int) -> dict[str, Any]:
    """The row of one layout and seed; `problem` is empty when everything agreed."""
    began = time.monotonic()
    row: dict[str, Any] = {"layout": f"{stages}x{ranks}", "seed": seed, "problem": ""}
    try:
        groups = [
            _run(stages, ranks, steps, seed, delays, steady) for delays, steady in ((1, True), (2, True), (3, False))
        ]
    except (AssertionError, DigestMismatch) as error:
        return row | {"problem": f"{type(error).__name__}: {error}"}
    one, other, _ = groups
    if one.steps != other.steps or one.digests != other.digests:
        row["problem"] = "two groups that were fed alike differ"
    clients = [client for group in groups for client in group.clients]
    moved = sum(rank.worker.chain.relief.moves for group in groups for rank in group.ranks.values())
    return row | {
        "steps": sum(len(group.steps) for group in groups),
        "digests": sum(len(group.digests) for group in groups),
        "requests": len(clients),
        "tokens": sum(len(client.tokens) for client in clients),
        "moved_units": moved,
        "seconds": round(time.monotonic() - began, 1),
    }


def _run(stages: int, ranks: int, steps: int, seed: int, delays: int, steady: bool) -> SimulatedGroup:
    settings = stage_settings(stages, ranks, ARENA_BYTES)
    group = SimulatedGroup(core_config(), settings, ranks, 10 * seed + delays, steady=steady)
    load = Load(seed)
    load.drive(group, steps)
    group.check_rest()
    load.check_outputs(group)
    for seq, stage, calls in group.group_calls():
        assert all(one == calls[0] for one in calls), f"step {seq}: tensor ranks of stage {stage} called {calls}"
    return group


def divergence(stages: int, ranks: int, steps: int, seed: int, plant: str, place: Place) -> dict[str, Any]:
    """The row of one planted divergence; `problem` is empty when it was named and nothing of it was told."""
    row: dict[str, Any] = {
        "layout": f"{stages}x{ranks}",
        "seed": seed,
        "plant": plant,
        "rank": f"{place[0]}.{place[1]}",
    }
    settings = stage_settings(stages, ranks, ARENA_BYTES)
    change = planted(plant, place, PLANTED_FROM)
    group = SimulatedGroup(core_config(), settings, ranks, 10 * seed + 1, change=change)
    try:
        Load(seed).drive(group, steps)
    except DigestMismatch as mismatch:
        record = diverged(mismatch, group.explained(), 1, 0)
        late = max((seq for seq, _ in group.told), default=0)
        sides = {record.left, record.right}
        problem = "" if f"rank {row['rank']}" in sides or place[1] == 0 else f"{sides} were named"
        problem = problem or (f"a token of step {late} was told" if late >= record.seq else "")
        return row | {
            "step": record.seq,
            "op": record.op,
            "band": record.band,
            "said": in_words(record),
            "problem": problem,
        }
    return row | {"step": 0, "op": -1, "band": "", "said": "", "problem": f"not found in {len(group.steps)} steps"}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(prog="bandmaster groups", description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--layouts", default=LAYOUTS, help=f"stages x tensor ranks of each, comma-separated [{LAYOUTS}]")
    cli.add_argument("--steps", type=int, default=500, help="steps of each run [500]")
    cli.add_argument("--seed", type=int, default=1, help="the first load's seed [1]")
    cli.add_argument("--runs", type=int, default=1, help="loads for each layout [1]")
    cli.add_argument("--plant", choices=sorted(PLANTS), help="a divergence to plant in one rank after the other")
    cli.add_argument("--json", action="store_true", help="one object with a list `rows`")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every group agreed, or every planted divergence was named; 1 otherwise."""
    options = parser().parse_args(argv)
    try:
        layouts = parse_layouts(options.layouts)
    except ValueError as error:
        parser().error(f"--layouts: {error}")
    if min(options.steps, options.runs) < 1 or options.seed < 1:
        parser().error(f"--steps {options.steps}, --runs {options.runs} and --seed {options.seed} must be at least 1")
    rows = []
    for stages, ranks in layouts:
        for seed in range(options.seed, options.seed + options.runs):
            if not options.plant:
                rows.append(honest(stages, ranks, options.steps, seed))
            elif ranks > 1:
                places = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
                rows += [divergence(stages, ranks, options.steps, seed, options.plant, place) for place in places]
    if options.plant and not rows:
        parser().error(
            f"--plant {options.plant} needs a layout with two tensor ranks: one alone has nobody to differ from"
        )
    wrong = sum(bool(row["problem"]) for row in rows)
    if options.json:
        sys.stdout.write(json.dumps({"wrong": wrong, "rows": rows}) + "\n")
    else:
        _show(rows)
    return 1 if wrong else 0


def _show(rows: list[dict[str, Any]]) -> None:
    names = [name for name in max(rows, key=len) if name not in ("said", "problem")]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in names))
    print_table(Console(), table)
    for row in rows:
        if row["problem"] or row.get("said"):
            sys.stdout.write(f"{row['layout']} seed {row['seed']}: {row['problem'] or row['said']}\n")
    sys.stdout.write(f"{len(rows)} rows, {sum(bool(row['problem']) for row in rows)} wrong\n")


if __name__ == "__main__":
    sys.exit(main())
