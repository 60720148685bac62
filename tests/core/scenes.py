"""Scenes of pressure: small worlds that are certain to reach a rung of the relief ladder, by inputs alone.

There is no prefix cache in them: what it shares between requests and takes back would move the scenes.
"""

from __future__ import annotations

from collections.abc import Callable

from daemon.core.limits import CoreConfig
from ipc.messages import Sampling
from tests.core.world import NEUTRAL, World


def crowd(pages: int, chunk: int, prompt: int, head_start: int, sampling: Sampling = NEUTRAL) -> World:
    """Eight requests grow by a page per step beside one long prompt that arrives `head_start` steps later.

    The estimate lets all in; the memory does not hold them to the end.
    """
    config = CoreConfig(
        page_size=1, max_running_requests=9, max_batched_tokens=64, chunked_prefill_size=chunk, overlap=False
    )
    world = World(config, pages=pages, caching=False)
    for k in range(8):
        world.send(f"s{k}", 1, 13, sampling=sampling)
    for _ in range(head_start):
        world.tick()
        world.report()
    world.send("long", prompt, 1, sampling=sampling)
    return world


def parked_and_shrunk() -> World:
    """The long prompt parks, goes on and shrinks, while small ones are retracted."""
    return crowd(88, 2, 30, 0)


def chunk_retracted_while_parked() -> World:
    """The long prompt parks and is then the cheapest victim."""
    return crowd(88, 1, 20, 1)


def chunk_retracted() -> World:
    """The long prompt is the cheapest victim in the middle of its prefill."""
    return crowd(80, 1, 20, 1)


def last_row_parks() -> World:
    """One request decodes and finds no page: all others wait for the result of their last token."""
    config = CoreConfig(page_size=1, max_running_requests=2, max_batched_tokens=64, chunked_prefill_size=64)
    world = World(config, pages=16, caching=False)
    world.send("a", 4, 13)
    world.send("b", 4, 5)
    return world


def drive(world: World, until: Callable[[], bool]) -> None:
    """Tick and report as an engine would until a condition holds."""
    for _ in range(1000):
        if until():
            return
        if world.wants_tick:
            world.tick()
        else:
            world.report()
    raise AssertionError("the scene never gets there")


def stage(world: World, id: str) -> str:
    """The stage of a live request, or `ended`."""
    stages = {entry["id"]: entry["stage"] for entry in world.core.view()["requests"]}
    return str(stages.get(id, "ended"))
