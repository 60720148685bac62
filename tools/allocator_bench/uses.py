"""Takes and frees beside open host copies and transfers, and the ops that begin and end those.

Owns these cases. Must never let a use end by itself: host copies stay open, so that every take has to look past them.
The pool is full; a host backup reads some of its units, two forwards are in flight, and half of the pool pends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from allocator.columns import Int32s
from allocator.ops import Op
from tools.allocator_bench.world import IN_FLIGHT, Shape, World

TAKE_PAGES = 16
USED_TOKENS = 2048

Row = dict[str, Any]


def uses_rows(shape: Shape, rounds: int, budget_s: float) -> Iterator[Row]:
    """Takes out of what pends, without and beside an open backup; then uses of one request's units."""
    world = World(shape)
    deadline = time.monotonic() + budget_s
    for name in ("take_of_pending", "take_of_pending_beside_backup"):
        _takes(world, name, rounds, deadline)
    pages = min(world.fill().size, USED_TOKENS // shape.page_size)
    for _ in range(rounds):
        if time.monotonic() > deadline:
            break
        _uses(world, world.logical.live_ids(shape.bands - 1)[:pages])
    world.check()
    for row in world.times.rows():
        if row["op"] in OPS:
            yield row


OPS = (
    "take_of_pending",
    "take_of_pending_beside_backup",
    "backup_2048",
    "send_2048",
    "publish_2048",
    "release_2048",
)


def _takes(world: World, name: str, rounds: int, deadline: float) -> None:
    """`rounds` takes of a few pages each while half of the pool pends behind two forwards."""
    shape = world.shape
    pages = world.fill()
    going, staying = np.sort(pages[: pages.size // 2]), np.sort(pages[pages.size // 2 :])
    backups: list[int] = []
    if name.endswith("backup"):
        held = staying[: max(1, min(staying.size, USED_TOKENS // shape.page_size))]
        backups.append(world.next_use())
        world.step("backup", [_backup(world, backups[0], held)])
    for _ in range(IN_FLIGHT):
        world.step("launch", [], {band: staying for band, kind in enumerate(shape.kinds) if kind != "state"})
    both = shape.parts(None, going if shape.bands > 1 else None, going)
    world.step("give_back", [world.free("give_back", both)])
    k = max(1, min(TAKE_PAGES, going.size // (2 * rounds)))
    for _ in range(rounds):
        taken = world.take(name, shape.demand(0, k, k))
        if taken is None or time.monotonic() > deadline:
            break
        world.step(name, [taken.op])
    if backups:
        world.end_uses("drop", backups)
    world.empty()


def _backup(world: World, use: int, pages: Int32s) -> Op:
    slots = np.arange(pages.size, dtype=np.int64)
    parts = world.shape.parts(None, pages, pages)
    return world.logical.backup(use, parts, [None if part is None else slots for part in parts])


def _uses(world: World, pages: Int32s) -> None:
    """One use of each kind on the same pages, each begun in a step of its own, all ended together."""
    logical, parts = world.logical, world.shape.parts(None, pages, pages)
    begin: dict[str, Callable[[int], Op]] = {
        "backup_2048": lambda use: _backup(world, use, pages),
        "send_2048": lambda use: logical.send(use, parts),
        "publish_2048": lambda use: logical.publish(use, parts),
    }
    open_uses = []
    for name, call in begin.items():
        use = world.next_use()
        op = world.timed("logical", name, pages.size, lambda: call(use))  # noqa: B023 - called at once
        world.step(name, [op])
        open_uses.append(use)
    world.end_uses("release_2048", open_uses)
