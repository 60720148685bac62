"""`bandmaster parity --held`: bytes that a running request holds over the bytes that it needs, measured on the core.

Owns the measurement: one request alone on a real core and a real physical chain, with a runner that computes nothing,
so that geometries of any size can be measured. Must never count from a formula what the chain can be asked: units are
what is live. Needed bytes are every stored token of full attention, the tokens that a window still shows, and the
working state, without page rounding and alignment.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from allocator.capacity import Demand
from allocator.cost import held_at
from allocator.decl import Layer, dtype_bytes
from allocator.geometry import Geometry
from allocator.plan import StoragePlan, plan_storage
from daemon.core.limits import CoreConfig
from daemon.core.memory import minus
from daemon.rank.batch import Batch
from daemon.rank.declare import declare
from daemon.rank.device import Device
from daemon.rank.runner import Launched, Outcome, Prepared
from daemon.rank.sizes import plan_and_size
from ipc.messages import ModelFacts, RankSettings
from tools.inprocess import InProcess
from tools.planning.described import describe_model
from tools.planning.errors import PlanError

PAGE_SIZE = 16
TOKENS = (300, 1300, 5000)
INTERVAL = 256
CHUNK = 512
LENGTH_MAX = 8192
GOAL = 1.05


class Held(NamedTuple):
    """One request between two forwards. `units` live per band without a cache; `checkpoint_bytes`: what more it holds
    with one, that the cache could not give back; `tail_bytes`: the most that the running forward added. Both are beside
    `ratio`."""

    tokens: int
    units: Demand
    held_bytes: int
    needed_bytes: int
    checkpoint_bytes: int
    tail_bytes: int

    @property
    def ratio(self) -> float:
        """Held over needed."""
        return self.held_bytes / self.needed_bytes


class _NoDevice:
    """A device without memory: every order is taken and nothing is done."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class _Silent:
    """The result of a forward that computed nothing: token 0 for every sampling row."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def due_in_s(self) -> float:
        """Nothing to wait for."""
        return 0.0

    def outcome(self) -> Outcome:
        """Zeros."""
        return Outcome(np.zeros(self._rows, dtype=np.int64), [])


class SilentRunner:
    """A runner of given layers that stores and computes nothing; its steps are planned and translated in full."""

    def __init__(self, layers: Sequence[Layer], settings: RankSettings) -> None:
        self.plan, self._sizing = plan_and_size(layers, settings, LENGTH_MAX, settings.arena_bytes)
        self.device: Device

    def prepare(self) -> Prepared:
        """The sizing, and facts of no model."""
        facts = ModelFacts("silent", "silent", 4, LENGTH_MAX, "uint8")
        sizing = self._sizing
        return Prepared(sizing.geometry, sizing.virtual_pages, sizing.virtual_slots, facts, {}, [])

    def begin(self, geometry: Geometry, stage: int) -> None:
        """No arena."""
        self.device = cast(Device, _NoDevice())

    def expect(self, tokens: int) -> None:
        """Nothing arrives."""

    def launch(self, batch: Batch) -> Launched:
        """Nothing but the shape of a result."""
        return _Silent(batch.sampled.size)


def measure(layers: Sequence[Layer], tokens: int, page_size: int = PAGE_SIZE) -> Held:
    """Run one request until it has stored exactly `tokens`, without a cache and with one."""
    bare, peak, plan = _live(layers, tokens, page_size, caching=False)
    cached, _, _ = _live(layers, tokens, page_size, caching=True)
    sizes = [band.geometry.unit_bytes for band in plan.bands]
    held = sum(units * size for units, size in zip(bare, sizes, strict=True))
    with_cache = sum(units * size for units, size in zip(cached, sizes, strict=True))
    most = sum(units * size for units, size in zip(peak, sizes, strict=True))
    return Held(tokens, bare, held, needed_bytes(plan, tokens), with_cache - held, max(0, most - held))


def needed_bytes(plan: StoragePlan, tokens: int) -> int:
    """Bytes of everything that the next token reads, as if units had no size."""
    total = 0
    for band in plan.bands:
        unit = sum(prod(view.shape) * dtype_bytes(view.dtype) for view in band.planes)
        kind, window = band.geometry.kind, band.geometry.window_tokens
        kept = min(tokens, window - 1) if kind == "window" else tokens
        total += unit if kind == "state" else kept * unit // plan.page_size
    return total


def _live(layers: Sequence[Layer], tokens: int, page_size: int, *, caching: bool) -> tuple[Demand, Demand, StoragePlan]:
    """Live units with `tokens` stored, but what a cache could give back, and each band's most while the prompt ran."""
    bands = plan_storage(layers, page_size).band_geometries()
    room = sum(band.unit_bytes for band in bands) * 2 * (LENGTH_MAX // page_size + 8)  # never touched
    settings = RankSettings("", "silent", "auto", page_size, 1, CHUNK, 0, room, 0, threads=1, invariants=1)
    settings.checkpoint_interval = INTERVAL if caching else 0
    config = CoreConfig(
        page_size=page_size,
        max_running_requests=1,
        max_batched_tokens=CHUNK,
        chunked_prefill_size=CHUNK,
        overlap=False,
        enable_prefix_caching=caching,
        checkpoint_interval=INTERVAL,
    )
    runner = SilentRunner(layers, settings)
    engine = InProcess(config, settings, runner)
    engine.submit([1] * (tokens - 1), 3)
    peak = engine.live_units()
    while int(engine.state.rows.scheduled.max()) <= tokens:
        engine.tick() if not engine.flights else engine.report()
        peak = tuple(max(pair) for pair in zip(peak, engine.live_units(), strict=True))
    memory = engine.state.memory
    assert memory is not None, "the epoch has begun"
    idle = memory.cache.reclaimable() if memory.cache is not None else memory.none
    return minus(engine.live_units(), idle), peak, runner.plan


def geometries(paths: Sequence[str]) -> dict[str, tuple[list[Layer], str]]:
    """Layers by name: of config files or directories with one, else of every small model's config."""
    if paths:
        found = {}
        for path in paths:
            model = describe_model(path, "auto", 0, INTERVAL, 1)
            found[Path(path).name.removesuffix(".config.json")] = (model.layers, model.dtype)
        return found
    from tools.tiny_models import NAMES, tiny_config

    return {name: (declare(tiny_config(name), "bfloat16", INTERVAL), "bfloat16") for name in NAMES}


def main(options: argparse.Namespace) -> int:
    """0 when every request holds what the plan says, and at most the goal of what it needs; 1 otherwise.

    The small models' windows are of a page or two, so the goal is asked only of configs that are given.
    """
    rows: list[dict[str, Any]] = []
    try:
        found = geometries(options.config)
    except PlanError as error:
        sys.stderr.write(f"bandmaster parity: {error}\n")
        return 2
    for name, (layers, dtype) in found.items():
        for tokens in TOKENS:
            held = measure(layers, tokens)
            planned = held_at(plan_storage(layers, PAGE_SIZE).band_geometries(), PAGE_SIZE, tokens)
            rows.append(
                {
                    "model": name,
                    "dtype": dtype,
                    **held._asdict(),
                    "ratio": round(held.ratio, 4),
                    "planned_units": planned,
                    "as_planned": planned == held.units,
                }
            )
    if options.json:
        sys.stdout.write(json.dumps({"page_size": PAGE_SIZE, "goal": GOAL, "rows": rows}) + "\n")
    else:
        _show(rows)
    within = not options.config or all(row["ratio"] <= GOAL for row in rows)
    return 0 if within and all(row["as_planned"] for row in rows) else 1


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="bytes of one request between two forwards; checkpoint and tail are beside them")
    for name in ("model", "tokens", "units", "held", "needed", "ratio", "as planned", "checkpoint", "tail"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for row in rows:
        sizes = [f"{row[name]:,d}" for name in ("held_bytes", "needed_bytes")]
        beside = [f"{row[name]:,d}" for name in ("checkpoint_bytes", "tail_bytes")]
        units = "/".join(map(str, row["units"]))
        ratio, same = f"{row['ratio']:.3f}", "yes" if row["as_planned"] else "no"
        table.add_row(row["model"], str(row["tokens"]), units, *sizes, ratio, same, *beside)
    wide = Console(width=1000)  # also in a pipe: nothing is cut, however long a name is
    Console(width=wide.measure(table).maximum).print(table)
