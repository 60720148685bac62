"""Holders: the requests that an op or a row concerns, from decisions and steps alone."""

from __future__ import annotations

import numpy as np

from allocator.columns import pack_i32
from allocator.ops import CopyState, Free, Part, Take
from daemon.core.outputs import Decided
from ipc.messages import Forward, Step
from journal.holders import GENERATIONS_KEPT, STEPS_KEPT, Holders
from tools.planted.scene import BANDS, CONFIG, PAGE
from tools.simulate.engine import one_stage

STATE, FULL = 0, 2


def made() -> Holders:
    holders = Holders(one_stage(BANDS, PAGE, 26_000), CONFIG.max_running_requests)
    for request, row in ((7, 0), (9, 3)):
        holders.admitted(Decided(0, "admitted", request, "", {"row": row, "generation": 1}))
    return holders


def step(seq: int, *ops: object, rows: tuple[int, ...] = (), pages: tuple[int, ...] = (), slots: object = ()) -> Step:
    """A step whose forward puts pages into the tables of rows, and names a slot for each row."""
    column, none = pack_i32(rows), b""
    forward = Forward(
        column, column, column, column, bytes(len(rows)), none, column, column, pack_i32(pages), [], pack_i32(slots)
    )
    return Step(1, seq, 0, 0, [], list(ops), forward if rows else None, bytes(16))  # type: ignore[arg-type]


def test_takes_and_frees_concern_whose_table_has_the_page() -> None:
    """A take: who gets it in this step. A free: who had it, also when somebody else gets it in the same step."""
    holders = made()
    holders.step(step(1, Take([Part(FULL, pack_i32([4, 5]))]), rows=(0, 3), pages=(4, 5)))
    assert holders.of_op(1, 0) == [7, 9]
    again = (Free([Part(FULL, pack_i32([4]))]), Take([Part(FULL, pack_i32([4]))]))
    holders.step(step(2, *again, rows=(3,), pages=(4,)))
    assert holders.of_op(2, 0) == [7]
    assert holders.of_op(2, 1) == [9]
    assert holders.of_op(1, 0) == [7, 9], "what was known of a step stays"
    assert holders.of_op(3, 0) == holders.of_op(2, 7) == []


def test_a_slot_belongs_to_nobody_before_a_state_is_in_it() -> None:
    """A taken slot is its row's when the forward names it, or that of whom a state was copied from."""
    holders = made()
    holders.step(step(1, Take([Part(STATE, pack_i32([2, 6]))]), rows=(3,), pages=(1,), slots=(2,)))
    assert holders.of_op(1, 0) == [9]
    holders.step(step(2, CopyState(STATE, pack_i32([2]), pack_i32([6]))))
    holders.step(step(3, Free([Part(STATE, pack_i32([6]))])))
    assert holders.of_op(3, 0) == [9]
    holders.step(step(4, Take([Part(STATE, pack_i32([6]))])))
    assert holders.of_op(4, 0) == []


def test_rows_are_told_by_their_generation() -> None:
    """An earlier tenant of a row is known for a while."""
    holders = made()
    for generation in range(2, GENERATIONS_KEPT + 2):
        holders.enter(100 + generation, 0, generation)
    told = holders.of_rows(np.zeros(3, np.int32), np.array([1, 2, GENERATIONS_KEPT + 1], np.int32))
    assert told == [0, 102, 100 + GENERATIONS_KEPT + 1]
    assert holders.of_row(0) == [100 + GENERATIONS_KEPT + 1]
    assert holders.of_row(99) == []


def test_what_no_step_can_name_changes_nothing() -> None:
    """Ids and rows out of range are refused elsewhere; here they concern nobody. Old steps are forgotten."""
    holders = made()
    holders.step(step(1, Free([Part(FULL, pack_i32([10**6]))]), rows=(99,), pages=(3,)))
    assert holders.of_op(1, 0) == []
    for seq in range(2, STEPS_KEPT + 2):
        holders.step(step(seq))
    assert holders.of_op(1, 0) == []
