"""Takes that need relief: how long they take, and how many bytes they move beside the fewest possible.

Owns these cases and what fits in place, by the chain's own counts and spans. Must never judge a take by the search that
made it: the fewest bytes come from `least`. The arena is full, every other block is given back, and each take asks for
more than the free bytes in place can hold, though the free bytes altogether do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from allocator.capacity import Demand
from tools.allocator_bench.least import least_bytes
from tools.allocator_bench.world import EVERYTHING, IN_FLIGHT, Shape, World

RELIEF_TAKES = 4
STATE_SLOTS_ASKED = 4
LARGE_PART = 64

Row = dict[str, Any]


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
        for count in range(max(2, rounds)):  # by turns judged and timed: judging leaves cold caches behind
            if count > 1 and time.monotonic() > deadline:
                break
            judged = count % 2 == 0
            if what == "state":
                moved += _state_relief(world, name, ask, judged)
            else:
                moved += _token_relief(world, rng, name, ask, what == "flying", judged)
            world.check()
            world.empty()
        for row in world.times.rows():
            if row["op"].removesuffix("_no_move") != name:
                continue
            if row["side"] == "physical" and row["op"] == name:
                row |= _summary(moved)
            yield row


def _summary(moved: list[Row]) -> Row:
    """Bytes of the judged takes, time of the others, units of all."""
    timed = [row for row in moved if not row["judged"]]
    judged = [row for row in moved if row["judged"]]
    if not timed or not judged:
        return {}
    levels: dict[str, int] = {}
    for row in moved:
        for level, times in row["levels"].items():
            levels[level] = levels.get(level, 0) + times
    bytes_moved, least = (sum(row[key] for row in judged) for key in ("bytes", "least"))
    return {
        "moved_units_p50": int(np.median([row["units"] for row in moved])),
        "judged_takes": len(judged),
        "moved_bytes": bytes_moved,
        "least_bytes": least,
        "search_bound_bytes": sum(row["bound"] for row in judged),
        "bytes_over_least": round(bytes_moved / least, 4),
        "worst_bytes_over_least": max(round(row["bytes"] / row["least"], 4) for row in judged),
        "cpu_us_per_unit_moved": round(sum(row["cpu_ns"] for row in timed) / 1e3 / sum(r["units"] for r in timed), 3),
        "levels": levels,
    }


def _block(shape: Shape, most: int) -> int:
    """Pages of one block that is held or given back whole: a 64th of the pool, at most so many tokens."""
    return max(1, min(most, shape.slots // 64) // shape.page_size)


def _token_relief(world: World, rng: random.Random, name: str, ask: int, flying: bool, judged: bool) -> list[Row]:
    """The arena full of tokens, window units of every other block given back at random, four takes past the gaps.

    `flying`: two forwards are in flight meanwhile, which write the last page of every block that stays.
    """
    shape = world.shape
    block = _block(shape, 256)
    pages = world.fill()
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
        moved += _relieve(world, name, shape.demand(0, wanted, wanted), judged)
    return moved


def _state_relief(world: World, name: str, ask: int, judged: bool) -> list[Row]:
    """The arena full of tokens, all but every other block given back: state slots that only fit beside a float."""
    shape = world.shape
    block = _block(shape, EVERYTHING)
    pages = world.fill()
    pages = pages[world.physical.physical(shape.kinds.index("window"), pages).argsort()]  # as they lie in the arena
    going = np.concatenate([pages[first : first + block] for first in range(block, pages.size, 2 * block)])
    world.step("give_back", [world.free("give_back", shape.parts(None, going, going))])
    most = world.logical.max_extra(None, shape.demand(1, 0, 0))
    wanted = min(most, shape.state_slots, _slots_in_place(world) + ask)
    return _relieve(world, name, shape.demand(wanted, 0, 0), judged)


def _relieve(world: World, name: str, demand: Demand, judged: bool) -> list[Row]:
    """One take, and what the physical chain moved for it; nothing when it needed no relief, or none that moves.

    Judged, it is held against the fewest bytes, and not timed.
    """
    before, least = _counters(world), least_bytes(world, demand) if judged else 0
    taken = world.take("judged_take" if judged else name, demand)
    if taken is None:
        raise RuntimeError(f"a demand of {demand} within max_extra is refused")
    timer = world.apply_alone([taken.op])
    after = _counters(world)
    if after["reliefs"] == before["reliefs"]:
        return []
    moved = after["units"] > before["units"]
    if not judged:
        op = name if moved else f"{name}_no_move"
        world.times.add("physical", op, timer.wall_ns, timer.cpu_ns, sum(demand))
    if not moved:
        return []
    levels = {level: times - before["levels"][level] for level, times in after["levels"].items()}
    change = {key: after[key] - before[key] for key in ("units", "bytes", "bound")}
    levels = {level: times for level, times in levels.items() if times}
    return [{**change, "judged": judged, "least": least, "levels": levels, "cpu_ns": timer.cpu_ns}]


def _counters(world: World) -> Row:
    relief = world.physical.relief
    return {
        "reliefs": relief.reliefs,
        "units": relief.moves,
        "bytes": relief.moved_bytes,
        "bound": relief.least_bytes,
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
