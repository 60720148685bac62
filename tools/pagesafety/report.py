"""What a stress run prints: tables that fit the terminal and cut nothing off, and a replay, step by step.

Owns the wording and the columns. Must never decide what is run or what counts as a fault.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from allocator.columns import i32, i64
from allocator.effects import Effect
from allocator.ops import Op
from tools.pagesafety.cases import Found, SavedCase
from tools.pagesafety.faults import Fault, fault_of
from tools.pagesafety.fleet import Stage
from tools.pagesafety.mutants import MUTANTS, applied
from tools.pagesafety.program import make_world, run_operation
from tools.pagesafety.sweep import HuntDone, RunDone
from tools.pagesafety.world import World

COLUMNS = ("runs", "ops", "steps", "forwards", "takes", "refusals", "uses", "reliefs", "moves", "faults", "seconds")
WIDE = 130


def sweep_rows(done: Sequence[RunDone], ops: int) -> list[dict[str, Any]]:
    """One row per shape and page size, and the sum."""
    groups: dict[tuple[str, str], list[RunDone]] = {}
    for run in done:
        groups.setdefault((run.spec.shape, str(run.spec.page_size)), []).append(run)
    rows = [_sweep_row(shape, page, runs, ops) for (shape, page), runs in groups.items()]
    return [*rows, _sweep_row("all", "", list(done), ops)]


def _sweep_row(shape: str, page_size: str, runs: list[RunDone], ops: int) -> dict[str, Any]:
    figures: Counter[str] = Counter(dict.fromkeys(COLUMNS, 0))
    for run in runs:
        figures.update(run.figures)
    row: dict[str, Any] = {"shape": shape, "page size": page_size} | dict(sorted(figures.items()))
    faults = sum(run.found is not None for run in runs)
    seconds = round(sum(run.seconds for run in runs), 2)
    return row | {"runs": len(runs), "ops": len(runs) * ops, "faults": faults, "seconds": seconds}


def sweep_text(rows: Sequence[dict[str, Any]], width: int) -> str:
    """A table where the terminal is wide, else a block per shape and page size."""
    names = [f"{row['shape']} {row['page size']}".rstrip() for row in rows]
    if width < WIDE:
        blocks = []
        for name, row in zip(names, rows, strict=True):
            numbers = ", ".join(f"{column} {_number(row[column])}" for column in COLUMNS)
            blocks.append(f"{name}\n{textwrap.fill(numbers, width, initial_indent='  ', subsequent_indent='  ')}")
        return "\n".join(blocks)
    first = max(len(name) for name in (*names, "shape, page size"))
    widths = [max(len(column), *(len(_number(row[column])) for row in rows)) for column in COLUMNS]
    lines = [
        "shape, page size".ljust(first)
        + "".join(f"  {name:>{size}}" for name, size in zip(COLUMNS, widths, strict=True))
    ]
    for name, row in zip(names, rows, strict=True):
        cells = (f"  {_number(row[column]):>{size}}" for column, size in zip(COLUMNS, widths, strict=True))
        lines.append(name.ljust(first) + "".join(cells))
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,}"


def found_text(found: Found, file: object) -> str:
    """One line for a case that failed."""
    case = found.case
    where = f"{case.shape}, page size {case.page_size}, seed {case.seed}, operation {found.fault.at + 1}"
    return f"{where}: {found.fault.check}: {found.fault.text}{f' ({file})' if file else ''}"


def hunt_rows(done: Sequence[HuntDone]) -> list[dict[str, Any]]:
    """One row per deliberate fault: `seeds` were needed of `within` at most, `seen before` are other checks."""
    return [
        {
            "mutant": hunt.spec.mutant,
            "caught by": hunt.found.fault.check if hunt.found else None,
            "seeds": hunt.seeds,
            "within": MUTANTS[hunt.spec.mutant].seeds,
            "shape": hunt.found.case.shape if hunt.found else None,
            "operations": len(hunt.found.case.program) if hunt.found else None,
            "seen before": list(hunt.others),
            "seconds": round(hunt.seconds, 1),
            "breaks": MUTANTS[hunt.spec.mutant].breaks,
        }
        for hunt in done
    ]


def hunt_text(rows: Sequence[dict[str, Any]], width: int) -> str:
    """Per fault: what it breaks, which check saw it, and after how many seeds of how many at most."""
    blocks = []
    for row in rows:
        missed = f"NOT CAUGHT within {row['within']} seeds"
        if row["seen before"]:
            missed += f"; seen instead: {', '.join(row['seen before'])}"
        caught = (
            f"{row['caught by']} after {row['seeds']} of {row['within']} seeds: {row['shape']}, "
            f"{row['operations']} operations, {row['seconds']} s"
        )
        lines = [row["breaks"], caught if row["caught by"] else missed]
        blocks.append(
            "\n".join(
                [row["mutant"]]
                + [textwrap.fill(line, width, initial_indent="  ", subsequent_indent="    ") for line in lines]
            )
        )
    return "\n".join(blocks)


# --- replay ------------------------------------------------------------------------------------------------------

Print = Callable[[str], None]


def replay(out: Print, saved: SavedCase, with_mutant: bool) -> Fault | None:
    """Runs one case and prints each operation, the ops of the steps it sends, each with its effects, and the fault."""
    out(f"shape {saved.shape}, page size {saved.page_size}, seed {saved.seed}, ranks {saved.ranks}")
    mutant = saved.mutant if with_mutant else None
    if mutant is not None:
        out(f"with the deliberate fault {mutant}: {MUTANTS[mutant].breaks}")
    out("an operation's two numbers choose among what is possible when it comes; what is not possible does nothing")
    at = 0
    with applied(mutant):
        try:
            world = make_world(saved.case)
            _describe(out, world)
            for at, (name, a, b) in enumerate(saved.program):
                out(f"{at + 1:>4}  {name} {a} {b}")
                run_operation(world, (name, a, b))
            out("      the end: everything is given back")
            at = len(saved.program)
            world.finish()
        except Exception as error:
            fault = fault_of(error, at)
            where = f"operation {at + 1}" if at < len(saved.program) else "the end"
            out(f"fault at {where}: {fault.check}: {fault.text}")
            return fault
    out("no fault")
    return None


def _describe(out: Print, world: World) -> None:
    for index, stage in enumerate(world.geometry.stages):
        bands = ", ".join(f"{number} {band.name} {band.unit_bytes} bytes" for number, band in enumerate(stage.bands))
        out(f"stage {index}: chain [{stage.chain_start_bytes}, {stage.arena_bytes}); units of bands: {bands}")
    for ranks in world.fleet.stages:
        _observe(out, ranks)


def _observe(out: Print, stage: Stage) -> None:
    """The stage's first rank tells of every op as it is applied, and of what it then has its device do."""
    rank = stage.ranks[0]
    apply, launched = rank.chain._apply, rank.chain.launched

    def tell(op: Op) -> list[Effect]:
        out(f"        stage {stage.index}: {type(op).__name__}{_fields(op)}")
        effects = apply(op)
        for effect in effects:
            out(f"          -> {type(effect).__name__}{_fields(effect)}")
        return effects

    def launch(seq: int, writes: Any) -> list[Effect]:
        waits = launched(seq, writes)
        out(f"        stage {stage.index}: forward {seq}")
        for effect in waits:
            out(f"          -> {type(effect).__name__}{_fields(effect)}")
        return waits

    rank.chain._apply = tell  # type: ignore[method-assign]
    rank.chain.launched = launch  # type: ignore[method-assign]


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
