"""One call at a time in a known layout: extend, finish, capacity questions.

Owns these cases. Must never measure a layout that a serving pool cannot have: every pool is filled, freed and asked
through the same ops that a scheduler makes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from allocator.ops import Flush
from tools.allocator_bench.world import EVERYTHING, Shape, Timer, World

EXTEND_TOKENS = (512, 2048)
QUESTIONS = 64

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
