"""What a stress run prints: tables that align, or one JSON object; and a replay, step by step.

Owns the wording and the columns. Must never decide what is run or what counts as a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from allocator.columns import i32, i64
from allocator.effects import Effect
from allocator.ops import Op
from tools.pagesafety.cases import SavedCase
from tools.pagesafety.faults import Fault, fault_of
from tools.pagesafety.fleet import Observer
from tools.pagesafety.mutants import MUTANTS, applied
from tools.pagesafety.program import make_world, run_operation
from tools.pagesafety.sweep import HuntDone, RunDone
from tools.pagesafety.world import World

COLUMNS = ("steps", "forwards", "takes", "refusals", "uses", "reliefs", "moves", "forward_waits", "copy_waits")


def sweep_rows(done: Sequence[RunDone], ops: int) -> list[dict[str, Any]]:
    """One row per shape and page size, and the sum."""
    groups: dict[tuple[str, str], list[RunDone]] = {}
    for run in done:
        groups.setdefault((run.spec.shape, str(run.spec.page_size)), []).append(run)
    rows = [_sweep_row(shape, page, runs, ops) for (shape, page), runs in groups.items()]
    return [*rows, _sweep_row("all", "", list(done), ops)]


def _sweep_row(shape: str, page_size: str, runs: list[RunDone], ops: int) -> dict[str, Any]:
    figures: Counter[str] = Counter()
    for run in runs:
        figures.update(run.figures)
    faults = sum(run.found is not None for run in runs)
    row: dict[str, Any] = {"shape": shape, "page size": page_size, "runs": len(runs), "ops": len(runs) * ops}
    row |= dict(sorted(figures.items())) | {"faults": faults, "seconds": round(sum(run.seconds for run in runs), 2)}
    return row


def hunt_rows(done: Sequence[HuntDone]) -> list[dict[str, Any]]:
    """One row per deliberate fault."""
    return [
        {
            "mutant": hunt.spec.mutant,
            "caught by": hunt.found.fault.check if hunt.found else "-",
            "seeds": hunt.seeds if hunt.found else f"> {hunt.seeds}",
            "within": MUTANTS[hunt.spec.mutant].seeds,
            "shape": hunt.found.case.shape if hunt.found else "",
            "operations": len(hunt.found.case.program) if hunt.found else "",
            "seconds": round(hunt.seconds, 1),
            "breaks": MUTANTS[hunt.spec.mutant].breaks,
        }
        for hunt in done
    ]


def print_rows(console: Console, title: str, rows: list[dict[str, Any]], columns: Sequence[str]) -> None:
    """A table; numbers to the right."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for name in columns:
        number = isinstance(rows[0].get(name), int | float) if rows else False
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{v:,}" if isinstance(v := row.get(name, ""), int | float) else str(v) for name in columns))
    console.print(table)


# --- replay ------------------------------------------------------------------------------------------------------


def replay(console: Console, saved: SavedCase, with_mutant: bool) -> Fault | None:
    """Runs one case and prints each operation, the steps it sends with their effects, and the fault."""
    console.print(f"shape {saved.shape}, page size {saved.page_size}, seed {saved.seed}, {saved.ranks} ranks")
    mutant = saved.mutant if with_mutant else None
    if mutant is not None:
        console.print(f"with the deliberate fault {mutant}: {MUTANTS[mutant].breaks}")
    at = 0
    with applied(mutant):
        try:
            world = make_world(saved.case)
            _describe(console, world)
            for at, (name, a, b) in enumerate(saved.program):
                console.print(f"{at + 1:>4}  {name} {a} {b}", highlight=False)
                run_operation(world, (name, a, b))
            console.print("      finish", highlight=False)
            at = len(saved.program)
            world.finish()
        except Exception as error:
            fault = fault_of(error, at)
            where = f"operation {at + 1}" if at < len(saved.program) else "the end"
            console.print(f"fault at {where}: {fault.check}: {fault.text}", highlight=False, soft_wrap=True)
            return fault
    console.print("no fault")
    return None


def _describe(console: Console, world: World) -> None:
    for index, stage in enumerate(world.geometry.stages):
        bands = ", ".join(f"{band.name} {band.unit_bytes} bytes" for band in stage.bands)
        arena = f"chain [{stage.chain_start_bytes}, {stage.arena_bytes})"
        console.print(f"stage {index}: {arena}; units: {bands}", highlight=False)

    for ranks in world.fleet.stages:
        ranks.ranks[0].observer = _observer(console, ranks.index)


def _observer(console: Console, stage: int) -> Observer:
    def observe(seq: int, things: Sequence[Op] | Sequence[Effect]) -> None:
        for thing in things:
            text = f"        step {seq}, stage {stage}: {type(thing).__name__}{_fields(thing)}"
            console.print(text, highlight=False, soft_wrap=True)

    return observe


def _fields(thing: msgspec.Struct) -> str:
    """Field names and values; columns as lists of numbers."""
    out = [f"{name}={_value(name, getattr(thing, name))}" for name in thing.__struct_fields__]
    return f"({', '.join(out)})"


def _value(name: str, value: object) -> str:
    if isinstance(value, bytes):
        column: np.ndarray[Any, Any] = i64(value) if name == "slots" else i32(value)
        return str(column.tolist())
    if isinstance(value, list):
        return "[" + ", ".join(_value(name, item) for item in value) + "]"
    if isinstance(value, msgspec.Struct):
        return _fields(value)
    return str(value)
