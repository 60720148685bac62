"""One call at a time in a known layout: extend, finish, capacity questions, and takes that need relief.

Owns these cases. Must never measure a layout that a serving pool cannot have: every pool is filled, freed and asked
through the same ops that a scheduler makes. Relief: the arena is full, every other block is given back, and each take
asks for more than the free bytes in place can hold, though the free bytes altogether do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from allocator.capacity import Demand
from allocator.columns import Int32s
from allocator.ops import Flush
from tools.bench_allocator_world import IN_FLIGHT, Shape, Timer, World

EXTEND_TOKENS = (512, 2048)
QUESTIONS = 64
RELIEF_TAKES = 4
STATE_SLOTS_ASKED = 4
LARGE_PART = 64
FILL_PAGES = 4096
EVERYTHING = 2**30

Row = dict[str, Any]


def extend_rows(shape: Shape, rounds: int, budget_s: float) -> Iterator[Row]:
    """Takes of a prompt's pages and frees of a whole request, on an untouched arena and into its holes again."""
    world = World(shape)
    deadline = time.monotonic() + budget_s
    for tokens in EXTEND_TOKENS:
        pages = -(-tokens // shape.page_size)
        demand = shape.demand(0, pages, pages)
        if tokens > shape.slots // 2:
            continue
        for _ in range(rounds):
            if time.monotonic() > deadline:
                break
            for place in ("clean", "reuse"):
                taken = world.take(f"extend_{tokens}_{place}", demand)
                if taken is None:
                    raise RuntimeError(f"an empty pool refuses {tokens} tokens")
                world.step(f"extend_{tokens}_{place}", [taken.op])
                freed = world.free(f"finish_{tokens}", shape.parts(None, taken.ids[-1], taken.ids[-1]))
                world.step(f"finish_{tokens}", [freed])
            world.step("tidy", [Flush(EVERYTHING)])
    for row in world.times.rows():
        if row["op"].startswith(("extend", "finish")):
            yield row


def capacity_rows(shape: Shape, rounds: int, seed: int) -> Iterator[Row]:
    """Capacity questions on a pool that is nearly full, in batches: microseconds of one."""
    world = World(shape)
    rng = random.Random(seed)
    slots = shape.state_slots // 2 if shape.bands == 3 else 0
    pages = shape.slots // shape.page_size * 9 // 10
    taken = world.take("fill", shape.demand(slots, pages, pages))
    if taken is None:
        raise RuntimeError("nine tenths of the pool are refused")
    logical, page = world.logical, shape.demand(0, 1, 1)
    room = logical.max_extra(None, page)
    asked = {
        "capacity_fits": [shape.demand(0, n % room + 1, n % room + 1) for n in range(QUESTIONS)],
        "capacity_refused": [shape.demand(0, room + n + 1, room + n + 1) for n in range(QUESTIONS)],
    }
    for name in asked:
        rng.shuffle(asked[name])
    for _ in range(rounds):
        for name, demands in asked.items():
            held = logical.take(page)
            logical.free(held.ids)
            for op, questions in ((name, list(dict.fromkeys(demands))), ("capacity_memo", demands)):
                with Timer() as timer:
                    for demand in questions:
                        logical.refusal(demand)
                world.times.add("logical", op, *timer.each(len(questions)), 1)
            with Timer() as timer:
                for demand in demands:
                    logical.fits(demand)
            world.times.add("logical", "capacity_predicate", *timer.each(len(demands)), 1)
            with Timer() as timer:
                logical.max_extra(None, page)
            world.times.add("logical", "max_extra", timer.wall_ns, timer.cpu_ns, 1)
    for row in world.times.rows():
        if row["op"] != "fill":
            yield row


# --- relief ------------------------------------------------------------------------------------------------------


def relief_rows(shape: Shape, rounds: int, budget_s: float, seed: int) -> Iterator[Row]:
    """Takes that need relief: tokens into a window's holes, few and many, and with state also slots beside a float."""
    few = max(1, _block(shape, 256) // 2)
    many = max(few, shape.slots // shape.page_size // LARGE_PART)
    asks: dict[str, tuple[str, int]] = {
        "relief_take": ("tokens", few),
        "relief_take_large": ("tokens", many),
        "relief_take_in_flight": ("flying", few),
    }
    if shape.bands == 3:
        asks |= {"relief_state_take": ("state", STATE_SLOTS_ASKED), "relief_state_take_large": ("state", EVERYTHING)}
    for name, (what, ask) in asks.items():
        moved: list[Row] = []
        world = World(shape)
        rng = random.Random(seed)
        deadline = time.monotonic() + budget_s
        for count in range(rounds):
            if count and time.monotonic() > deadline:
                break
            if what == "state":
                moved += _state_relief(world, name, ask)
            else:
                moved += _token_relief(world, rng, name, ask, what == "flying")
            world.check()
            _empty(world)
        for row in world.times.rows():
            if row["op"].removesuffix("_no_move") != name:
                continue
            if row["side"] == "physical" and row["op"] == name:
                row |= _summary(moved)
            yield row


def _summary(moved: list[Row]) -> Row:
    units, bytes_moved, least = (sum(row[key] for row in moved) for key in ("units", "bytes", "least"))
    wall, cpu = (sum(row[key] for row in moved) for key in ("wall_ns", "cpu_ns"))
    levels: dict[str, int] = {}
    for row in moved:
        for level, times in row["levels"].items():
            levels[level] = levels.get(level, 0) + times
    return {
        "moved_units_p50": int(np.median([row["units"] for row in moved])),
        "moved_bytes": bytes_moved,
        "least_bytes": least,
        "bytes_over_least": round(bytes_moved / least, 4) if least else None,
        "worst_bytes_over_least": max((round(r["bytes"] / r["least"], 4) for r in moved if r["least"]), default=None),
        "cpu_us_per_unit_moved": round(cpu / 1e3 / units, 3) if units else None,
        "wall_us_per_unit_moved": round(wall / 1e3 / units, 3) if units else None,
        "levels": levels,
    }


def _block(shape: Shape, most: int) -> int:
    """Pages of one block that is held or given back whole: a 64th of the pool, at most so many tokens."""
    return max(1, min(most, shape.slots // 64) // shape.page_size)


def _token_relief(world: World, rng: random.Random, name: str, ask: int, flying: bool) -> list[Row]:
    """The arena full of tokens, window units of every other block given back at random, four takes past the gaps.

    `flying`: two forwards are in flight meanwhile, which write the last page of every block that stays.
    """
    shape = world.shape
    block = _block(shape, 256)
    pages = _fill(world)
    blocks = [pages[first : first + block] for first in range(0, pages.size, block)]
    rng.shuffle(blocks)
    half = len(blocks) // 2
    if flying:
        last = np.array([block[-1] for block in blocks[half:]], dtype=np.int32)
        for _ in range(IN_FLIGHT):
            world.step("launch", [], {band: last for band, kind in enumerate(shape.kinds) if kind != "state"})
    going = np.sort(np.concatenate(blocks[:half]))
    world.step("give_back", [world.free("give_back", shape.parts(None, going, None))])
    moved: list[Row] = []
    for _ in range(RELIEF_TAKES):
        most = world.logical.max_extra(None, shape.demand(0, 1, 1))
        wanted = min(most, _pages_in_place(world) + ask)
        if wanted < 1:
            break
        moved += _relieve(world, name, shape.demand(0, wanted, wanted))
    return moved


def _state_relief(world: World, name: str, ask: int) -> list[Row]:
    """The arena full of tokens, all but every other block given back: state slots that only fit beside a float."""
    shape = world.shape
    block = _block(shape, EVERYTHING)
    pages = _fill(world)
    pages = pages[world.physical.physical(shape.kinds.index("window"), pages).argsort()]  # as they lie in the arena
    going = np.concatenate([pages[first : first + block] for first in range(block, pages.size, 2 * block)])
    world.step("give_back", [world.free("give_back", shape.parts(None, going, going))])
    most = world.logical.max_extra(None, shape.demand(1, 0, 0))
    wanted = min(most, shape.state_slots, _slots_in_place(world) + ask)
    return _relieve(world, name, shape.demand(wanted, 0, 0))


def _fill(world: World) -> Int32s:
    """Every token page the pool holds, in takes of a few thousand, as prompts take them."""
    shape, pages = world.shape, []
    while left := world.logical.max_extra(None, shape.demand(0, 1, 1)):
        k = min(left, FILL_PAGES)
        taken = world.take("fill", shape.demand(0, k, k))
        if taken is None:
            raise RuntimeError("what max_extra promised is refused")
        world.step("fill", [taken.op])
        pages.append(taken.ids[-1])
    return np.concatenate(pages)


def _empty(world: World) -> None:
    """Frees everything, lands every forward and hands all spans back."""
    world.land()
    parts = [world.logical.live_ids(band) for band in range(world.shape.bands)]
    world.step("empty", [world.free("empty", list(parts))])
    world.step("empty", [Flush(EVERYTHING)])


def _relieve(world: World, name: str, demand: Demand) -> list[Row]:
    """One take, and what the physical chain moved for it; nothing when it needed no relief, or none that moves."""
    before = _counters(world)
    taken = world.take(name, demand)
    if taken is None:
        raise RuntimeError(f"a demand of {demand} within max_extra is refused")
    timer = world.apply_alone([taken.op])
    after = _counters(world)
    if after["reliefs"] == before["reliefs"]:
        return []
    if after["units"] == before["units"]:
        world.times.add("physical", f"{name}_no_move", timer.wall_ns, timer.cpu_ns, sum(demand))
        return []
    world.times.add("physical", name, timer.wall_ns, timer.cpu_ns, sum(demand))
    levels = {level: times - before["levels"][level] for level, times in after["levels"].items()}
    change = {key: after[key] - before[key] for key in ("units", "bytes", "least")}
    levels = {level: times for level, times in levels.items() if times}
    return [{**change, "levels": levels, "wall_ns": timer.wall_ns, "cpu_ns": timer.cpu_ns}]


def _counters(world: World) -> Row:
    relief = world.physical.relief
    return {
        "reliefs": relief.reliefs,
        "units": relief.moves,
        "bytes": relief.moved_bytes,
        "least": relief.least_bytes,
        "levels": {level.name: times for level, times in relief.by_level.items()},
    }


# --- what fits in place --------------------------------------------------------------------------------------------


def _gaps_bytes(world: World) -> list[tuple[int, int]]:
    """Start and end byte of the gap before each band, and of the one behind the last; empty bands are transparent."""
    out = []
    at = world.stage.chain_start_bytes
    for span in world.physical.spans():
        if span is not None and span[1] > span[0]:
            out.append((at, span[0]))
            at = span[1]
    return [*out, (at, world.stage.arena_bytes)]


def _pages_in_place(world: World) -> int:
    """The most token pages that holes, pending units and the gaps beside their bands hold without any move."""
    holes, units = world.counts()[:, 1:3].sum(axis=1), [band.unit_bytes for band in world.stage.bands]
    gaps = [end - start for start, end in _gaps_bytes(world)]
    right = gaps[-2]
    left = gaps[-3] if world.shape.bands == 3 and len(gaps) > 2 else 0
    low, high = 0, world.shape.slots // world.shape.page_size
    while low < high:
        pages = (low + high + 1) // 2
        window = max(0, pages - int(holes[-2]) - left // units[-2]) * units[-2]
        full = max(0, pages - int(holes[-1])) * units[-1]
        low, high = (pages, high) if window + full <= right else (low, pages - 1)
    return low


def _slots_in_place(world: World) -> int:
    """The most state slots that holes and the gap behind the state band hold without any move."""
    unit = world.stage.bands[0].unit_bytes
    state = world.physical.spans()[0]
    gaps = _gaps_bytes(world)
    start, end = gaps[1] if state is not None and state[1] > state[0] else gaps[0]
    return int(world.counts()[0, 1:3].sum()) + max(0, end // unit - -(-start // unit))
