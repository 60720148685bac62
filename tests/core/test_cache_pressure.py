"""Cache under pressure: who is retracted when much of what requests hold is shared, and what is counted as skipped."""

from __future__ import annotations

import numpy as np
import pytest

from daemon.core import caching, pressure
from tests.core.rank_double import Shape
from tests.core.test_caching import SHAPES, evict, prompt_of, tree_of, turn, world
from tests.core.world import World


def number_of(one: World, id: str) -> int:
    """Its request's number."""
    return one.clients["fe", id].accepted.first_request


def test_every_checkpoint_without_a_slot_is_counted() -> None:
    """Two rows reach the grid in the same steps: what waits behind the one that was refused is counted as well."""
    one = world(Shape(state=True, slot_bytes=32 * 256), pages=32 * 4 + 28, checkpoint_policy="grid")
    for number in range(2):
        one.send(f"r{number}", prompt_of(64 + number, 7), 42)
    state = one.core._state
    while one.core.gauges()["live"] == 2:
        one.tick() if one.wants_tick else one.report()
        totals = one.core.gauges()
        untold = sum(not gift.refused for gift in state.gifts.values())
        settled = totals["checkpoints_given_total"] + totals["checkpoints_skipped_total"]
        if totals["live"] == 2:
            assert totals["checkpoints_kept_total"] == settled + untold
    assert totals["checkpoints_skipped_total"] >= 8
    one.run()
    one.check_rest()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_victim_is_whoever_has_least_to_compute_again(shape: str, kept: bool) -> None:
    """What stays in the cache is not computed again: the reader of a long prefix goes before a row with more output.

    Where the window or the state that the prefix needs was evicted, all of it is computed again.
    """
    one = world(SHAPES[shape], pages=400, checkpoint_interval=64)
    stem = prompt_of(66, 64)
    turn(one, "first", [*stem, 1], 2)
    one.send("cold", prompt_of(67, 32), 60)
    while one.core.gauges()["output_tokens_total"] < 2 + 20:
        one.tick() if one.wants_tick else one.report()
    one.send("warm", [*stem, 2, 3, 4], 60)
    while one.core.gauges()["output_tokens_total"] < 2 + 26:
        one.tick() if one.wants_tick else one.report()
    memory, rows = one.core._state.memory, one.core._state.rows
    assert memory is not None
    scheduled = {id: int(rows.scheduled[one.core._state.requests[number_of(one, id)].row]) for id in ("cold", "warm")}
    assert scheduled["warm"] > scheduled["cold"] > 32 + 15
    if not kept:
        for band in range(len(memory.none)):
            evict(one, band)
    found = pressure._cheapest(one.core._state)
    assert found is not None
    victim, why = found
    assert why["redo_tokens"] <= why["next_redo_tokens"]
    assert victim.number == number_of(one, "warm" if kept or shape == "full" else "cold")
    match = tree_of(one).match("", np.array([*stem, 2, 3, 4], np.int64), 66)
    assert caching.stays(one.core._state, one.core._state.requests[number_of(one, "warm")]) == match.tokens
    one.run()
    assert len(one.output("cold")) == len(one.output("warm")) == 60
    one.check_rest()
