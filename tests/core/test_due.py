"""When deadlines are looked at: in order, for live requests alone, and without keeping what ended."""

from __future__ import annotations

import random

import pytest

from daemon.core.due import Due
from daemon.core.limits import CoreConfig
from tests.core.world import World, facts

WEEK_MS = 7 * 24 * 3600 * 1000


@pytest.mark.parametrize("ends", ["as it will", "by its client"])
def test_deadlines_of_ended_requests_are_not_kept(ends: str) -> None:
    """Hundreds of requests with a week's time end beside one that is due earlier and lives: hardly an entry stays."""
    world = World(
        CoreConfig(page_size=4, max_running_requests=4, deadline_check=False), pages=400, model=facts(97, 4000)
    )
    world.send("lives", 3, 1200, deadline_ms=WEEK_MS - 1)
    for k in range(300):
        world.send(f"r{k}", 3, 1, deadline_ms=WEEK_MS)
        if ends == "by its client":
            world.abort(f"r{k}")
        while world.core.gauges()["live"] > 1:
            world.turn()
        assert len(world.core._state.deadlines) <= 3
    assert world.core.gauges()["live"] == 1
    assert world.core._state.due_ns() is not None
    world.abort("lives")
    assert len(world.core._state.deadlines) == 0
    world.run()
    world.check_rest()


def test_times_come_in_order_and_never_those_of_who_ended() -> None:
    """Random additions, ends and looks against a plain list; of what is held no more than half belongs to the ended."""
    for seed in range(20):
        rng = random.Random(seed)
        due, model, number = Due(), list[tuple[int, int]](), 0
        for _ in range(400):
            known = sorted({request for _, request in model})
            match rng.choice(["new", "again", "end", "look"]):
                case "new":
                    number += 1
                    entry = (rng.randrange(1000), number)
                case "again" if known:
                    entry = (rng.randrange(1000), rng.choice(known))
                case "end":
                    gone = rng.choice(known) if known else number + 1000
                    due.ended(gone)
                    model = [entry for entry in model if entry[1] != gone]
                    continue
                case _:
                    assert due.first_ns() == min(model, default=(None,))[0]
                    if model:
                        assert due.pop() == min(model)[1]
                        model.remove(min(model))
                    continue
            model.append(entry)
            due.add(*entry)
            assert due.content() == sorted(model)
            assert len(due) <= 2 * len(model)
