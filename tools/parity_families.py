"""`bandmaster parity --family NAME|all`: the model matrix of small random checkpoints and of the embedded model.

Owns the command: which families, how much of each, and the table. Must never call a run clean that compared nothing.
`tools.parity_models` runs and judges.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from daemon.rank.errors import BadOption, UnsupportedModel
from tools.parity import prepared, tokenized
from tools.parity_models import Family, Plan, Result, random_prompts, run_family, temporary, tiny_family
from tools.parity_prompts import CASES
from tools.tables import print_table
from tools.tiny_models import NAMES

EMBEDDED = "embedded"
SLICE = Plan(pairs=((16, 100),), prompt_tokens=(1, 17, 64, 255, 700), output_tokens=8, together=6)
EMBEDDED_PLAN = Plan(
    pairs=((1, 512), (16, 100), (16, 512), (64, 512)),
    prompt_tokens=(1, 17, 64, 255, 700),
    together=6,
    arena_bytes=1 << 30,
)
LONG_TOKENS = 3000  # one prompt of the embedded model


def main(options: argparse.Namespace) -> int:
    """0 when every output is equal up to listed flips, 1 otherwise."""
    names = [*NAMES, EMBEDDED] if options.family == "all" else options.family.split(",")
    unknown = sorted(set(names) - {*NAMES, EMBEDDED})
    if unknown:
        sys.stderr.write(f"bandmaster parity: no family {unknown[0]!r}; there are {', '.join([*NAMES, EMBEDDED])}\n")
        return 2
    told = Console(stderr=True)
    results: list[tuple[Result, float]] = []
    runs = _run_all(names, options.slice, (options.pp, options.tp), options.jobs)
    try:
        for one in track(runs, "families", len(names), console=told):
            results.append(one)
            told.print(summary(one[0]))
    except (UnsupportedModel, BadOption) as error:
        sys.stderr.write(f"bandmaster parity: {error}\n")
        return 2
    found = report(results)
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        _show(found)
    return 1 if found["different"] or not found["equal"] else 0


def _run_all(names: list[str], sliced: bool, layout: tuple[int, int], jobs: int) -> Iterator[tuple[Result, float]]:
    """Results and seconds of all families, in order, on `jobs` processes."""
    if jobs <= 1:
        yield from (_run_one(name, sliced, layout) for name in names)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(partial(_run_one, sliced=sliced, layout=layout), names)


def _run_one(name: str, sliced: bool, layout: tuple[int, int]) -> tuple[Result, float]:
    """One family on an engine of so many stages and tensor ranks."""
    began = time.monotonic()
    with temporary() as place:
        family = make(name, sliced, Path(place))
        family.plan = family.plan._replace(stages=layout[0], ranks=layout[1])
        result = run_family(family)
    return result, round(time.monotonic() - began, 1)


def make(name: str, sliced: bool, place: Path) -> Family:
    """The family of a name, with its checkpoint and prompts."""
    if name != EMBEDDED:
        return tiny_family(name, SLICE if sliced else Plan(), place)
    directory = prepared("")
    plan = EMBEDDED_PLAN._replace(pairs=((16, 512),)) if sliced else EMBEDDED_PLAN
    texts = tokenized(directory, [case for case in CASES if case.tokens >= LONG_TOKENS // 2][:1])[0]
    prompts = [texts[:count] for count in plan.prompt_tokens]
    if not sliced:
        prompts.append((texts * 2)[:LONG_TOKENS])
    return Family(name, directory, plan, [*prompts, *random_prompts(plan, 20_000, seed=1)[: 2 if sliced else 6]])


def report(results: list[tuple[Result, float]]) -> dict[str, Any]:
    """Counts over everything, one entry per family and round, and every flip and difference."""
    rows = [row for result, _ in results for row in result.rows]
    verdicts = Counter(row.verdict for row in rows)
    return {
        **{verdict: verdicts[verdict] for verdict in ("equal", "flip", "different")},
        "output_tokens_compared": sum(row.output_tokens for row in rows),
        "families": [
            {
                "family": result.family,
                "seconds": seconds,
                "outputs": len(result.rows),
                "relief_moves": result.relief_moves,
                "copied_units": dict(result.copied),
                "retractions": result.retractions,
                "rounds": _rounds(result),
            }
            for result, seconds in results
        ],
        "flips": [asdict(row) for row in rows if row.verdict == "flip"],
        "differences": [asdict(row) for row in rows if row.verdict == "different"],
    }


def _rounds(result: Result) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(row.round for row in result.rows))
    found = []
    for name in names:
        rows = [row for row in result.rows if row.round == name]
        cuts = Counter(row.cut or "nothing" for row in rows if row.cached_tokens or row.cut)
        found.append(
            {
                "round": name,
                **Counter(row.verdict for row in rows),
                "hits": sum(row.cached_tokens > 0 for row in rows),
                "cached_tokens": sum(row.cached_tokens for row in rows),
                "cuts": dict(sorted(cuts.items())),
                "admitted_again": sum(row.admissions > 1 for row in rows),
            }
        )
    return found


def summary(result: Result) -> str:
    """One line for a person who waits."""
    verdicts = Counter(row.verdict for row in result.rows)
    hits = sum(row.cached_tokens > 0 for row in result.rows)
    moves = f"{result.relief_moves} relocations, {result.retractions} retractions"
    return f"{result.family}: {dict(verdicts)}, {hits} hits, {moves}"


def _show(found: dict[str, Any]) -> None:
    table = Table(title="outputs beside transformers; `again`: admitted more than once")
    for name in ("family", "round", "equal", "flips", "different", "hits", "cached", "cut by", "again"):
        table.add_column(name, justify="left" if name in ("family", "round", "cut by") else "right", no_wrap=True)
    for family in found["families"]:
        for one in family["rounds"]:
            cuts = ", ".join(f"{name} {times}" for name, times in one["cuts"].items())
            numbers = [one.get("equal", 0), one.get("flip", 0), one.get("different", 0), one["hits"]]
            cells = [str(number) for number in [*numbers, one["cached_tokens"]]]
            table.add_row(family["family"], one["round"], *cells, cuts, str(one["admitted_again"]))
    console = Console()
    print_table(console, table)
    for kind in ("flips", "differences"):
        for row in found[kind]:
            where = f"{row['family']} page {row['page_size']} chunk {row['chunk']} {row['round']}"
            console.print(
                f"{kind[:-1]}: {where}, prompt of {row['prompt_tokens']}: {row['why'] or row['flips']}", soft_wrap=True
            )
    counts = ", ".join(f"{found[verdict]:,d} {verdict}" for verdict in ("equal", "flip", "different"))
    console.print(f"{counts}; {found['output_tokens_compared']:,d} output tokens compared", soft_wrap=True)
