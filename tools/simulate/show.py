"""The result of a simulation as tables.

Owns what a reader sees. Must never compute more than a ratio of two figures: everything else is in the document.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from tools.tables import print_table

UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
LEFT = ("arena", "policy", "ends", "refused")


def show(document: dict[str, Any]) -> None:
    """Print the document's tables."""
    console = Console(highlight=False)
    for line in _headline(document):
        console.print(line, soft_wrap=True, markup=False)
    for table in (_cache(document), _service(document), _cost(document)):
        print_table(console, table)
    for line in _refusals(document):
        console.print(line, soft_wrap=True, markup=False)
    for run in document["runs"]:
        if run["error"]:
            console.print(f"{run['arena']} {run['policy']} failed: {run['error']}", soft_wrap=True, markup=False)


def size(count: float) -> str:
    """Bytes with a unit that leaves at least two figures before the point; small ones exactly."""
    for unit, factor in UNITS:
        if count >= factor * 10 or (count >= factor and unit == "KiB"):
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} B"


def duration(milliseconds: float | None) -> str:
    """Milliseconds in a unit that fits; a dash where it never came to that."""
    if milliseconds is None:
        return "-"
    if milliseconds >= 100_000:
        return f"{milliseconds / 60_000:,.1f} min"
    return f"{milliseconds / 1000:,.1f} s" if milliseconds >= 1000 else f"{milliseconds:,.0f} ms"


def _headline(document: dict[str, Any]) -> list[str]:
    trace, shape, infinite = document["trace"], document["shape"], document["infinite"]
    clock = document["time_model"]
    bands = ", ".join(f"{row['band']} {row['unit_bytes']:,d} bytes a {row['unit']}" for row in shape["bands"])
    grid = f", checkpoints on a grid of {shape['checkpoint_interval']} tokens" if shape["checkpoint_interval"] else ""
    everything = document["everything"]
    held = ", ".join(f"{count:,d} {name}" for name, count in everything["units"].items())
    lines = [
        f"{trace['path']}: {trace['requests']:,d} requests, {trace['input_tokens']:,d} input tokens, "
        f"{trace['output_tokens']:,d} output tokens, over {duration(trace['span_ms'])}",
        f"{shape['origin']}: {bands}; pages of {shape['page_size']} tokens{grid}",
        f"everything: {everything['total_bytes']:,d} bytes ({held})",
        f"a forward takes {clock['step_us']:g} us, {clock['prefill_us']:g} us per prompt token that it computes and "
        f"{clock['decode_us']:g} us per decoding request; requests arrive at {clock['speed']:g}x the trace's speed",
        f"an infinite cache would find {infinite['tokens']:,d} tokens, {infinite['hit_rate']:.2%} of the input, "
        "if every earlier prompt were there at once",
    ]
    return lines + [f"note: {note}" for note in document["notes"]]


def _refusals(document: dict[str, Any]) -> list[str]:
    """Why requests were refused: what the first of each code was told, once for all runs that say the same."""
    told = {
        (code, first["line"]): first["message"]
        for run in document["runs"]
        for code, first in run["first_refused"].items()
    }
    return [f"refused, {code}, first on line {line}: {message}" for (code, line), message in told.items()]


def _table(title: str, *names: str) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    return table


def _of(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _cache(document: dict[str, Any]) -> Table:
    has_state = bool(document["shape"]["checkpoint_interval"])
    names = ["arena", "policy", "hit rate", "of infinite", "of bound", "beside lru", "cached/request", "evicted"]
    names += ["checkpoints", "bytes/hit token"] if has_state else []
    table = _table("the prefix cache: input tokens that were not computed", *names)
    for arena in document["arenas"]:
        runs = [run for run in document["runs"] if run["arena"] == arena["arena"]]
        lru = next((run["hit_rate"] for run in runs if run["policy"].split("/")[0] == "lru"), 0.0)
        for run in runs:
            cells = [arena["arena"], run["policy"], f"{run['hit_rate']:.2%}"]
            cells += [_of(run["cached_tokens"], document["infinite"]["tokens"])]
            cells += [_of(run["cached_tokens"], arena["bound_tokens"])]
            cells += [f"{run['hit_rate'] / lru:.3f}x" if lru else "-", f"{run['cached_tokens_per_request']:,.0f}"]
            cells += [size(sum(run["evicted_bytes"].values()))]
            if has_state:
                cells += [f"{run['core']['checkpoints_given']:,d}", f"{run['checkpoint_bytes_per_hit_token']:,.0f}"]
            table.add_row(*cells)
        if arena["bound_tokens"]:
            rate = arena["bound_tokens"] / document["trace"]["input_tokens"]
            cells = [arena["arena"], "offline bound", f"{rate:.2%}"]
            cells += [_of(arena["bound_tokens"], document["infinite"]["tokens"]), "100.0%"]
            table.add_row(*cells)
        table.add_section()
    return table


def _service(document: dict[str, Any]) -> Table:
    names = ["arena", "policy", "ends", "refused", "retracted", "most", "recomputed", "queued p50", "p99"]
    names += ["first token p50", "p99", "device busy", "output tok/s"]
    table = _table("service: what became of the requests, and when, in simulated time", *names)
    for run in document["runs"]:
        table.add_row(
            run["arena"],
            run["policy"],
            ", ".join(f"{count:,d} {reason}" for reason, count in run["ends"].items()) or "none",
            ", ".join(f"{count:,d} {code}" for code, count in run["refusals"].items()) or "none",
            f"{run['retractions']:,d}",
            f"{run['retractions_per_request_most']}",
            f"{run['recomputed_tokens']:,d}",
            duration(run["queued_ms"]["p50"]),
            duration(run["queued_ms"]["p99"]),
            duration(run["first_token_ms"]["p50"]),
            duration(run["first_token_ms"]["p99"]),
            f"{run['device_busy']:.0%}",
            f"{run['output_tokens_per_s']:,.0f}",
        )
    return table


def _cost(document: dict[str, Any]) -> Table:
    bands = [row["band"] for row in document["shape"]["bands"]]
    names = ["arena", "bytes", "policy", *(f"peak {band}" for band in bands), "steps"]
    names += ["core us/step", "p50", "p99", "most", "wall"]
    table = _table("memory at its fullest by band, and what the core took (CPU time)", *names)
    table.columns[2].justify = "left"
    sizes = {arena["arena"]: arena["arena_bytes"] for arena in document["arenas"]}
    for run in document["runs"]:
        core = run["core_us_per_step"]
        table.add_row(
            run["arena"],
            f"{sizes[run['arena']]:,d}",
            run["policy"],
            *(size(run["peak_bytes"][band]) for band in bands),
            f"{run['steps']:,d}",
            *("-" if core[name] is None else f"{core[name]:,.0f}" for name in ("mean", "p50", "p99", "p100")),
            duration(run["wall_s"] * 1000),
        )
    return table
