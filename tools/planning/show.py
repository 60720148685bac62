"""The plan as tables.

Owns what a reader sees. Must never compute: every figure is in the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.tables import print_table

UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def show(document: dict[str, Any]) -> None:
    """Print the document's tables."""
    console = Console(highlight=False)
    console.print(_headline(document), soft_wrap=True)
    for note in document["notes"]:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    tables = [_stages(document), _requests(document), _shares(document)]
    tables += [_held(document)] if document["held_over_needed"] else []
    tables += [_mix_lines(document), _mix(document)] if "mix" in document else []
    for table in tables:
        print_table(console, table)
        if table is tables[0]:
            for line in _layer_lines(document):
                console.print(line, soft_wrap=True, markup=False)


def size(count: int) -> str:
    """Bytes with three figures and a unit; small ones exactly."""
    for unit, factor in UNITS:
        if count >= factor * 10 or (count >= factor and unit == "KiB"):
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,d} B"


def _headline(document: dict[str, Any]) -> str:
    interval = document["checkpoint_interval"]
    kept = f", checkpoints every {interval:,d} tokens" if interval else ""
    return (
        f"{document['model']}: {document['model_type']}, {document['layers']} layers, {document['dtype']}; "
        f"tp {document['tp']}, pp {document['pp']}, pages of {document['page_size']} tokens{kept}\n"
        f"arena of each rank: {document['budget_bytes']:,d} bytes, {document['budget_from']}"
    )


def _table(title: str, *names: str, left: int = 1) -> Table:
    table = Table(title=title)
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return table


def _first(document: dict[str, Any], shortage: dict[str, Any]) -> str:
    return str(shortage["band"]) + (f" on stage {shortage['stage']}" if document["pp"] > 1 else "")


def _stages(document: dict[str, Any]) -> Table:
    names = ("stage", "model layers", "band", "layers", "unit bytes", "bytes a token or slot", "boot target", "bytes")
    table = _table("storage: what one unit of each band holds, and how many the boot aims at", *names, left=3)
    for stage in document["stages"]:
        span = f"{stage['first_layer']}-{stage['last_layer']}"
        for row in stage["bands"]:
            each = row.get("token_bytes", row["unpadded_bytes"])
            units = f"{row['target_units']:,d} {'pages' if 'token_bytes' in row else 'slots'}"
            if row["target_units"] < row.get("wanted_units", 0):
                units += f" of {row['wanted_units']:,d} wanted"
            cells = (f"{len(row['layers'])}", f"{row['unit_bytes']:,d}", f"{each:,d}", units, size(row["target_bytes"]))
            table.add_row(str(stage["stage"]), span, row["band"], *cells)
        table.add_section()
    return table


def _layer_lines(document: dict[str, Any]) -> list[str]:
    """Which layers store something in which band."""
    return [
        f"stage {stage['stage']}, {row['band']}: layers {ranges(row['layers']) or 'none'}"
        for stage in document["stages"]
        for row in stage["bands"]
    ]


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with their runs joined: `0-4, 6, 8-9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _requests(document: dict[str, Any]) -> Table:
    names = ("tokens", "at once", "bytes each", "+ checkpoint", "+ batch tail", "runs out first")
    table = _table("requests of one length: at once by memory alone, bytes over all stages of one tensor rank", *names)
    table.columns[0].justify = "right"
    table.columns[-1].justify = "left"
    for row in document["requests"]:
        each = (size(row["total_bytes"]), size(row["checkpoint_bytes"]), size(row["tail_bytes"]))
        cells = (f"{row['tokens']:,d}", f"{row['at_once']:,d}", *each, _first(document, row["runs_out_first"]))
        table.add_row(*cells)
    return table


def _shares(document: dict[str, Any]) -> Table:
    bands = [row["band"] for row in document["stages"][0]["bands"]]
    table = _table(
        "what a request costs by band: units, + for its checkpoint, + while its tokens are written", "tokens", *bands
    )
    table.columns[0].justify = "right"
    for row in document["requests"]:
        cells = []
        for band in bands:
            parts = [row["units"][band], row["checkpoint_units"][band], row["tail_units"][band]]
            cost = sum(stage[band] for stage in row["stage_bytes"])
            cells.append(" + ".join(f"{units:,d}" for units in parts) + f"  {size(cost)}")
        table.add_row(f"{row['tokens']:,d}", *cells)
    return table


def _held(document: dict[str, Any]) -> Table:
    names = ("tokens", "needed", "held", "held / needed", "checkpoint apart", "batch tail apart")
    table = _table("bytes held over bytes needed: full attention, windows and working state", *names)
    table.columns[0].justify = "right"
    for row in document["held_over_needed"]:
        plain = (f"{row['tokens']:,d}", f"{row['needed_bytes']:,d}", f"{row['held_bytes']:,d}", f"{row['ratio']:.4f}")
        table.add_row(*plain, size(row["checkpoint_bytes"]), size(row["tail_bytes"]))
    return table


def _mix_lines(document: dict[str, Any]) -> Table:
    table = _table("the mix", "prompt", "output", "weight", "shared prefix", left=0)
    for line in document["mix"]["lines"]:
        tokens = (f"{line['prompt_tokens']:,d}", f"{line['output_tokens']:,d}")
        table.add_row(*tokens, f"{line['weight']:g}", f"{line['shared_prefix_tokens']:,d}")
    return table


def _mix(document: dict[str, Any]) -> Table:
    bands = [row["band"] for row in document["stages"][0]["bands"]]
    names = ("every request", "at once", *bands, "of them shared", "runs out first")
    table = _table("the mix at once: bytes by band over all stages of one tensor rank", *names)
    table.columns[-1].justify = "left"
    for row in document["mix"]["moments"]:
        cells = [size(sum(stage[band] for stage in row["stage_bytes"])) for band in bands]
        shared = ", ".join(f"{units:,d} {band}" for band, units in row["shared_units"].items() if units) or "nothing"
        name = {"longest": "at its longest", "midway": "halfway through its output"}[row["moment"]]
        table.add_row(name, f"{row['at_once']:,d}", *cells, shared, _first(document, row["runs_out_first"]))
    return table
