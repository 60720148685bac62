"""Passes: each notes whom it passed over and why, the journal is told once per change, views say who waits for what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from daemon.core.admission import LOOKAHEAD
from daemon.core.limits import CoreConfig
from daemon.core.passes import PassedOver
from daemon.core.requests import State
from tests.core.scenes import drive, last_row_parks, parked_and_shrunk, stage
from tests.core.workload import Workload
from tests.core.world import World


def over(world: World, id: str) -> PassedOver | None:
    """What the newest pass says of a request."""
    return world.core.passed_over(world.clients["fe", id].accepted.first_request)


def rows_taken() -> World:
    """Two rows, both taken; two more requests wait."""
    world = World(CoreConfig(page_size=4, max_running_requests=2, max_batched_tokens=32))
    for k in range(4):
        world.send(f"r{k}", 5, 12)
    drive(world, lambda: stage(world, "r1") == "running")
    world.tick()
    return world


def memory_short() -> World:
    """One request holds most of the pages, the next does not fit."""
    world = World(CoreConfig(page_size=4, max_running_requests=4), pages=6)
    for k in range(3):
        world.send(f"r{k}", 16, 8)
    world.tick()
    return world


def budget_gone() -> World:
    """The first prompt takes the whole budget of the step."""
    world = World(CoreConfig(page_size=4, max_running_requests=4, max_batched_tokens=8, chunked_prefill_size=8))
    for k in range(3):
        world.send(f"r{k}", 8, 4)
    world.tick()
    return world


def prefilled_in_parts() -> World:
    """A long prompt is being prefilled, and the next would be partial too."""
    config = CoreConfig(page_size=4, max_running_requests=4, max_batched_tokens=32, chunked_prefill_size=8)
    world = World(config)
    world.send("r0", 30, 4)
    world.send("r1", 30, 4)
    world.send("r2", 3, 4)
    world.tick()
    return world


SCENES: dict[str, tuple[Callable[[], World], str, str, set[str]]] = {
    "rows": (rows_taken, "r2", "rows", {"limit"}),
    "queue": (rows_taken, "r3", "queue", {"ahead", "stopped_at"}),
    "memory": (memory_short, "r1", "memory", {"units", "units_short", "stage", "band"}),
    "budget": (budget_gone, "r1", "budget", {"limit"}),
    "resident": (prefilled_in_parts, "r1", "resident", {"prompt_tokens"}),
}


@pytest.mark.parametrize("name", sorted(SCENES))
def test_a_pass_says_why_it_left_a_request(name: str) -> None:
    """Each reason in the state that leads to it, with its numbers; the live snapshot says the same."""
    build, id, reason, numbers = SCENES[name]
    world = build()
    found = over(world, id)
    assert found is not None
    assert (found.state, found.reason) == (State.WAITING, reason)
    assert set(found.numbers) == numbers
    assert found.number == world.core.passes > 0
    view = next(entry for entry in world.core.view()["requests"] if entry["id"] == id)
    assert (view["waits_for"], view["waits_numbers"]) == (reason, found.numbers)
    world.run()
    world.check_rest()


def test_behind_the_end_of_a_pass_it_is_said_where_it_ended() -> None:
    """Who was not looked at is told how many are ahead and at whom the pass ended."""
    found = over(rows_taken(), "r3")
    assert found is not None
    assert found.numbers == {"ahead": 1, "stopped_at": 3}


def test_a_request_that_came_after_the_pass_waits_in_the_queue() -> None:
    """Nobody has looked at it: it stands in the queue, and no pass ended before it."""
    world = World(CoreConfig(page_size=4))
    world.send("r", 5, 2)
    assert over(world, "r") == PassedOver(0, State.WAITING, "queue", {"ahead": 0, "stopped_at": 0})
    world.run()


def test_the_journal_is_told_once_per_reason_and_every_pass_is_noted() -> None:
    """Fifty passes that leave a request for one reason are one decision; each of them can be asked."""
    world = rows_taken()
    seen = []
    while stage(world, "r2") == "waiting":
        found = over(world, "r2")
        assert found is not None
        seen.append(found.number)
        world.turn()
    assert len(set(seen)) > 5
    assert sorted(set(seen)) == list(range(min(seen), max(seen) + 1)), "no pass is left out"
    number = world.clients["fe", "r2"].accepted.first_request
    assert [one.reason for one in world.verdicts("waits") if one.request == number] == ["rows"]
    assert over(world, "r2") is None, "it runs"
    world.run()


@pytest.mark.parametrize(("scene", "id"), [(last_row_parks, "a"), (parked_and_shrunk, "long")])
def test_who_is_parked_waits_for_memory(scene: Callable[[], World], id: str) -> None:
    """A parked row or chunk: the numbers are those of the climb that left it so."""
    world = scene()
    drive(world, lambda: stage(world, id).startswith("parked"))
    found = over(world, id)
    assert found is not None
    assert found.reason == "memory"
    assert {"units_short", "reclaim_units", "spill_units", "park_requests"} <= set(found.numbers)
    world.run()
    world.check_rest()


def test_who_runs_waits_for_the_oldest_report() -> None:
    """A running request names the step whose report is due; with nothing in flight it waits for nothing."""
    world = rows_taken()
    view = next(entry for entry in world.core.view()["requests"] if entry["id"] == "r0")
    assert (view["waits_for"], view["waits_numbers"]) == ("report", {"step": world.steps[-world.reports_waiting].seq})
    world.run()
    world.send("alone", 5, 3)
    world.turn()
    world.turn()
    if not world.reports_waiting:
        view = world.core.view()["requests"][0]
        assert (view["waits_for"], view["waits_numbers"]) == ("", {})
    world.run()


@pytest.mark.parametrize("seed", range(6))
def test_M3_every_live_request_shows_stage_age_units_and_what_it_waits_for(seed: int) -> None:
    """In any workload: the views add up to the live units, ages grow, and whoever waits says for what."""
    workload = Workload(seed, pressed=True, caching=True)
    world = workload.world
    for _ in range(120):
        workload.act()
        view, core = world.core.view(world.now_ns), world.core._state
        if core.memory is None:
            assert {entry["waits_for"] for entry in view["requests"]} <= {"ranks"}
            continue
        held = [0] * len(core.memory.none)
        for entry in view["requests"]:
            request = core.requests[entry["request"]]
            assert entry["stage"] == request.state
            assert entry["age_ms"] == (world.now_ns - request.arrived_ns) // 1_000_000
            for at, band in enumerate(core.memory.chain.bands):
                held[at] += entry["held_units"].get(band.name, 0)
            if entry["stage"] in ("waiting", "retracted", "parked_row", "parked_chunk"):
                assert entry["waits_for"]
            assert entry == world.core.request_view(entry["request"], world.now_ns)
        cached = core.memory.cache.held() if core.memory.cache is not None else core.memory.none
        assert tuple(a + b for a, b in zip(held, cached, strict=True)) == core.memory.live_units()
    world.settle()
    world.run()
    world.check_rest()


@pytest.mark.parametrize("seed", range(6))
def test_whoever_a_pass_looked_at_and_left_is_noted(seed: int) -> None:
    """After each pass: the notes are of queued requests, and no more of them than a pass looks at."""
    workload = Workload(seed, pressed=True)
    world = workload.world
    passes = 0
    for _ in range(120):
        workload.act()
        core = world.core._state
        if core.totals.passes == passes:
            continue
        passes = core.totals.passes
        queued = [request.number for request in core.queue]
        noted = [number for number in core.skipped if number in core.requests]
        assert set(noted) <= set(queued)
        assert len(core.skipped) <= LOOKAHEAD
    world.run()
