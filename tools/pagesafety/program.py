"""Programs: lists of (operation, number, number), every one of them legal, drawn by seed; and how one is run.

Owns the operation table with its weights. Must never depend on the chain's layout: a program is the same list whatever
the code under test does with it. Each seed also disables some operations (swarm), so that others get room.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from tools.pagesafety import request_ops, transfer_ops, tree_ops
from tools.pagesafety.faults import Fault, fault_of
from tools.pagesafety.fleet import MakeDevice
from tools.pagesafety.shapes import draw_setting
from tools.pagesafety.world import World

Operation = tuple[str, int, int]
Program = list[Operation]


class Row(NamedTuple):
    """An operation: its weight in random programs and what it does."""

    weight: int
    run: Callable[[World, int, int], None]


OPERATIONS: dict[str, Row] = {
    "admit": Row(8, request_ops.admit),
    "extend": Row(4, request_ops.extend),
    "decode": Row(6, request_ops.decode),
    "retire": Row(5, request_ops.retire),
    "trim": Row(3, request_ops.trim),
    "abort": Row(6, request_ops.abort),
    "fill": Row(2, request_ops.fill),
    "checkpoint": Row(3, request_ops.checkpoint),
    "flush": Row(4, request_ops.flush),
    "forward": Row(12, request_ops.forward),
    "speculative": Row(3, request_ops.speculative),
    "quiet": Row(4, request_ops.quiet),
    "process": Row(6, request_ops.process),
    "settle": Row(1, request_ops.settle),
    "drain": Row(1, request_ops.drain),
    "into_tree": Row(4, tree_ops.into_tree),
    "gift": Row(3, tree_ops.gift),
    "hit": Row(4, tree_ops.hit),
    "rebind": Row(3, tree_ops.rebind),
    "reattach": Row(3, tree_ops.reattach),
    "evict": Row(9, tree_ops.evict),
    "squeeze": Row(4, tree_ops.squeeze),
    "backup": Row(4, transfer_ops.backup),
    "forget": Row(1, transfer_ops.forget),
    "load_back": Row(4, transfer_ops.load_back),
    "submit": Row(3, transfer_ops.submit),
    "send": Row(3, transfer_ops.send),
    "fix": Row(2, transfer_ops.fix),
    "pull": Row(2, transfer_ops.pull),
    "expect": Row(3, transfer_ops.expect),
    "publish": Row(3, transfer_ops.publish),
    "release": Row(6, transfer_ops.release),
    "trespass": Row(2, transfer_ops.trespass),
    "report": Row(5, transfer_ops.report),
}
ALWAYS = ("admit", "forward", "process")


class Case(NamedTuple):
    """One run: everything it depends on."""

    shape: str
    page_size: int
    seed: int
    program: Program
    ranks: int = 2


class Outcome(NamedTuple):
    """What a run found (None: nothing), and what happened in it."""

    fault: Fault | None
    figures: dict[str, int]


def random_program(shape: str, page_size: int, seed: int, length: int) -> Program:
    """The program of a seed."""
    rng = random.Random(f"{shape}:{page_size}:{seed}:program")
    weights = {}
    for name, row in OPERATIONS.items():
        on = name in ALWAYS or rng.random() > 0.2
        weights[name] = row.weight * rng.uniform(0.3, 1.0) if on else 0.0
    kinds = rng.choices(list(weights), list(weights.values()), k=length)
    return [(kind, rng.randrange(1000), rng.randrange(1000)) for kind in kinds]


def random_case(shape: str, page_size: int, seed: int, length: int, ranks: int = 2) -> Case:
    """The case of a seed."""
    return Case(shape, page_size, seed, random_program(shape, page_size, seed, length), ranks)


def make_world(case: Case, strict: bool = True, make: MakeDevice | None = None, scale_bytes: int = 1) -> World:
    """The empty world of a case; `make` builds its devices, `scale_bytes` multiplies its units."""
    setting = draw_setting(case.shape, case.page_size, case.seed, scale_bytes)
    return World(setting, case.ranks, case.seed, strict, make)


def run_operation(world: World, operation: Operation) -> None:
    """One operation, with all its checks."""
    name, a, b = operation
    OPERATIONS[name].run(world, a, b)


def run_case(case: Case, strict: bool = True, make: MakeDevice | None = None, scale_bytes: int = 1) -> Outcome:
    """Runs a program, then ends everything: the first fault, or None."""
    at = 0
    world: World | None = None
    try:
        world = make_world(case, strict, make, scale_bytes)
        for at, operation in enumerate(case.program):  # noqa: B007  (where it stopped)
            run_operation(world, operation)
        at = len(case.program)
        world.finish()
    except Exception as error:
        return Outcome(fault_of(error, at), world.figures if world else {})
    return Outcome(None, collect(world))


def collect(world: World) -> dict[str, int]:
    """The figures of a finished run: the world's own, and those of the first rank's relief."""
    figures = dict(world.figures)
    for stage in world.fleet.stages:
        relief = stage.ranks[0].chain.relief
        for name in ("reliefs", "moves", "moved_bytes", "least_bytes", "flush_moves"):
            figures[name] = figures.get(name, 0) + int(getattr(relief, name))
        for level, count in relief.by_level.items():
            figures[level.name.lower()] = figures.get(level.name.lower(), 0) + count
        for what, count in stage.ranks[0].device.waits.items():
            figures[f"{what}_waits"] = figures.get(f"{what}_waits", 0) + count
    return figures
