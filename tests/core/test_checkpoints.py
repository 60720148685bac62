"""Checkpoints through the scheduler: which states reach the cache, and that hits need no others.

The rank double models states by hashes of all tokens before them: a state that stands where it does not belong fails
the step that starts from it.
"""

from __future__ import annotations

from typing import Any

import pytest

from allocator.columns import i64
from daemon.core import inputs
from daemon.core.grid import Kind
from tests.core.rank_double import Shape
from tests.core.test_caching import (
    EVERYTHING,
    SHAPES,
    STATE,
    admitted,
    evict,
    prompt_of,
    retract,
    tree_of,
    turn,
    world,
)
from tests.core.world import World

KINDS = ("branch", "prompt", "stem", "mark", "turn", "retracted", "grid")


def given(one: World) -> dict[str, int]:
    """States given so far, by kind; kinds without any are left out."""
    gauges = one.core.gauges()
    counts = {kind: gauges[f"states_given_{kind}_total"] for kind in KINDS}
    assert sum(counts.values()) == gauges["checkpoints_given_total"]
    return {kind: count for kind, count in counts.items() if count}


def hit(one: World) -> dict[str, int]:
    """Admissions that started from a state, by its kind."""
    gauges = one.core.gauges()
    return {kind: gauges[f"states_hit_{kind}_total"] for kind in KINDS if gauges[f"states_hit_{kind}_total"]}


def states(one: World) -> dict[int, Kind]:
    """Where the tree holds states, by position in tokens, and why; of a tree that is one path."""
    found: dict[int, Kind] = {}
    nodes = list(tree_of(one)._tree.roots())
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        if node.slot:
            assert node.end * one.config.page_size not in found, "the tree is one path"
            found[node.end * one.config.page_size] = Kind(node.kind)
    return found


def until_output(one: World, tokens: int) -> None:
    """Go on until so many tokens were delivered in all."""
    while one.core.gauges()["output_tokens_total"] < tokens:
        assert one.turn()


# --- what is wanted --------------------------------------------------------------------------------------------------


def test_a_prompt_seen_first_gives_its_last_point_its_marks_and_its_end() -> None:
    """Of fourteen grid points four are given: two marks, the last before the last token, and where the turn ended."""
    one = world(STATE, checkpoint_mark_tokens=32)
    turn(one, "first", prompt_of(1, 90), 24)
    assert states(one) == {32: Kind.MARK, 64: Kind.MARK, 88: Kind.PROMPT, 112: Kind.TURN}
    assert one.core.gauges()["checkpoints_kept_total"] >= 7, "the row kept its state all along"
    one.check_rest()


def test_a_row_that_decodes_gives_nothing_before_its_end() -> None:
    """Its newest state waits in its own slot, and the end of the turn is the one place it goes to."""
    one = world(EVERYTHING)
    one.send("long", prompt_of(2, 20), 60)
    until_output(one, 58)
    assert given(one) == {"prompt": 1}
    one.run()
    assert states(one) == {16: Kind.PROMPT, 72: Kind.TURN}
    found = turn(one, "next", [*prompt_of(2, 20), *one.output("long"), 1, 2], 2)
    assert found.numbers["cached_tokens"] == 72
    assert hit(one) == {"turn": 1}
    one.check_rest()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", [STATE, EVERYTHING])
def test_hit_sweep_from_the_third_request_on_a_hit_is_within_one_interval(
    shape: Shape, nested: bool, overlap: bool
) -> None:
    """Requests that share any number of tokens and differ behind them: the second one leaves a state where they part.

    `nested`: what the next split shares begins with what the last one did.
    """
    for shared in range(40, 60):
        one = world(shape, pages=600, overlap=overlap)
        stem = prompt_of(3 if nested else shared, 60)[:shared]
        for number in range(5):
            prompt = [*stem, number, *prompt_of(100 + number, 80 - shared)]
            found = turn(one, f"r{number}", prompt, 3).numbers["cached_tokens"]
            if number >= 2:
                assert shared - 8 < found <= shared
                assert one.output(f"r{number}") == one.expected(f"r{number}")[0]
        assert given(one)["branch"] == 1
        one.check_rest()


def test_the_branch_of_a_prompt_that_is_still_being_computed_is_known() -> None:
    """Its pages are in the cache as soon as they are computed: who comes meanwhile leaves a state where they part."""
    one = world(STATE, pages=600, max_batched_tokens=24)
    stem = prompt_of(4, 60)
    one.send("first", [*stem, *prompt_of(5, 100)], 2)
    for _ in range(12):
        one.turn()
    assert one.core._state.resident is not None
    one.send("second", [*stem, *prompt_of(6, 30)], 2)
    one.run()
    assert given(one)["branch"] == 1
    assert turn(one, "third", [*stem, *prompt_of(7, 30)], 2).numbers["cached_tokens"] == 56
    one.check_rest()


def test_what_becomes_known_while_a_prompt_is_computed_is_a_branch() -> None:
    """Two prompts that start together are strangers; the slower one learns on its way what the faster one gave."""
    one = world(STATE, pages=600, max_batched_tokens=24, chunked_prefill_size=8, overlap=False)
    stem = prompt_of(8, 60)
    one.send("first", [*stem, *prompt_of(9, 20)], 2)
    one.send("second", [*stem, *prompt_of(10, 40)], 2)
    while not any(decision.request == 2 for decision in one.verdicts("admitted")):
        one.turn()
    state = one.core._state
    request = state.requests[2]
    known = {request.known_tokens}
    while request.sequence is not None:
        one.turn()
        known.add(request.known_tokens)
    assert max(known) == 60
    one.run()
    assert given(one)["branch"] == 1
    assert turn(one, "third", [*stem, *prompt_of(11, 30)], 2).numbers["cached_tokens"] == 56
    one.check_rest()


def conversation(one: World, turns: int = 5) -> tuple[int, int]:
    """Each turn is all before it and some new tokens: tokens of prompts, and those of them that were cached."""
    asked = cached = 0
    history = prompt_of(12, 90)
    for number in range(turns):
        found = turn(one, f"t{number}", history, 30)
        asked, cached = asked + len(history), cached + found.numbers["cached_tokens"]
        history = [*history, *one.output(f"t{number}"), *prompt_of(20 + number, 60)]
    return asked, cached


@pytest.mark.parametrize("shape", [STATE, EVERYTHING])
def test_a_conversation_needs_no_more_checkpoints_than_it_has_turns(shape: Shape) -> None:
    """Hits are those of a grid that keeps every point, with a few of its states."""
    likely, grid = (world(shape, pages=2000, checkpoint_policy=policy) for policy in ("likely", "grid"))
    assert conversation(likely) == conversation(grid)
    few, all_points = (one.core.gauges()["checkpoints_given_total"] for one in (likely, grid))
    assert given(likely) == {"prompt": 1, "turn": 5}, "none of a prompt that goes on from a turn's end"
    assert all_points > 9 * few
    assert hit(likely) == {"turn": 4}
    for one in (likely, grid):
        one.check_rest()


def test_another_answer_in_a_conversation_is_a_branch() -> None:
    """The second one computes the turn's prompt again, from the end of the turn before; the next start behind it."""
    one = world(EVERYTHING, pages=600)
    history = prompt_of(12, 90)
    turn(one, "t0", history, 30)
    history = [*history, *one.output("t0"), *prompt_of(20, 60)]
    found = [turn(one, f"answer{number}", history, 30).numbers["cached_tokens"] for number in range(4)]
    assert found == [112, 112, 176, 176]
    assert hit(one) == {"turn": 2, "branch": 2}
    one.check_rest()


def test_choices_of_one_prompt_share_it_in_a_conversation_too() -> None:
    """Several answers at once: the first one leaves a state at the prompt's end for the others."""
    one = world(EVERYTHING, pages=600)
    history = prompt_of(12, 90)
    turn(one, "t0", history, 30)
    history = [*history, *one.output("t0"), *prompt_of(20, 60)]
    one.send("answers", history, 3, n=3)
    one.run()
    assert sorted(decision.numbers["cached_tokens"] for decision in one.verdicts("admitted")[1:]) == [112, 176, 176]
    one.check_rest()


def test_the_same_prompt_again_starts_at_its_last_point() -> None:
    """Another answer to a prompt, as often as one likes, needs one state."""
    one = world(EVERYTHING)
    turn(one, "first", prompt_of(13, 45), 2)
    for number in range(3):
        assert turn(one, f"again{number}", prompt_of(13, 45), 2).numbers["cached_tokens"] == 40
    assert given(one) == {"prompt": 1}
    assert hit(one) == {"prompt": 3}
    one.check_rest()


# --- the end of a turn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("output", range(10, 22))
def test_a_turn_that_a_stop_string_ends_leaves_what_the_client_goes_on_from(output: int, ahead: int) -> None:
    """Found late, with steps in flight: the next turn hits the newest state that consumed nothing behind the stop."""
    one = world(EVERYTHING, pages=400)
    prompt = prompt_of(14, 20)
    one.send("stopped", prompt, 60)
    while len(one.output("stopped")) < output or one.reports_waiting:
        one.report() if one.reports_waiting else one.tick()
    for _ in range(ahead):
        one.tick()
    one.feed(inputs.FinishAsked(one.now_ns, "fe", "stopped", 0, output))
    assert max(states(one)) <= 20 + output
    assert tree_of(one).held()[-1] <= (20 + output) // 4
    one.run()
    found = turn(one, "next", [*prompt, *one.output("stopped")[:output], 1, 2, 3], 3).numbers["cached_tokens"]
    assert found == (20 + output - (not ahead)) // 8 * 8, "the newest token is no input of a step that was launched"
    assert one.output("next") == one.expected("next")[0]
    one.check_rest()


def test_tokens_behind_the_end_of_the_client_are_not_kept() -> None:
    """A stop string found a page late: neither the page behind it nor the state there is worth memory."""
    one = world(STATE)
    one.send("stopped", prompt_of(15, 20), 60)
    until_output(one, 30)
    one.feed(inputs.FinishAsked(one.now_ns, "fe", "stopped", 0, 9))
    assert tree_of(one).held() == (1, 7)
    assert states(one) == {16: Kind.PROMPT}
    one.run()
    one.check_rest()


# --- what is not to be stored ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["full", "window", "state", "everything"])
def test_do_not_store_reads_hits_and_leaves_nothing(shape: str) -> None:
    """It starts behind what others left; what the cache holds and what it gives to the next one are as before it."""
    one = world(SHAPES[shape], pages=400)
    turn(one, "first", prompt_of(16, 40), 2)
    held = tree_of(one).held()
    private = [*prompt_of(16, 40), *prompt_of(17, 50)]
    for number in range(2):
        one.send(f"private{number}", private, 30, store=False)
        one.run()
        assert one.finished(f"private{number}").cached_tokens == 40
        assert one.output(f"private{number}") == one.expected(f"private{number}")[0]
    assert tree_of(one).held() == held
    one.check_rest()


def test_do_not_store_holds_after_a_retraction_too() -> None:
    """Nothing of it outlives its row, whatever takes that away; it is computed again."""
    one = world(EVERYTHING, pages=400)
    one.send("private", prompt_of(18, 40), 30, store=False)
    until_output(one, 12)
    retract(one, "private")
    assert not any(tree_of(one).held())
    one.run()
    assert one.finished("private").reason == "length"
    assert one.output("private") == one.expected("private")[0]
    assert given(one) == {}
    one.check_rest()


def test_do_not_store_copies_no_states() -> None:
    """Nobody could start from them: its chunks are not cut and its row keeps nothing."""
    one = world(STATE, pages=400, chunked_prefill_size=50)
    one.send("private", prompt_of(19, 90), 30, store=False)
    one.run()
    assert one.core.gauges()["checkpoints_kept_total"] == 0
    assert [len(i64(step.forward.tokens)) for step in one.steps if step.forward is not None][:2] == [50, 40]
    one.check_rest()


# --- retraction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shape", ["full", "window", "state", "everything"])
def test_a_retracted_request_resumes_from_the_newest_it_had(shape: str, overlap: bool) -> None:
    """What it wrote stays, as evictable as anything: another start computes what lies behind its newest state."""
    one = world(SHAPES[shape], pages=400, overlap=overlap)
    one.send("victim", prompt_of(21, 41), 60)
    until_output(one, 45)
    had = int(one.core._state.rows.scheduled[0])
    retract(one, "victim")
    assert not any(tree_of(one).locked()), "all of it can be had"
    told = one.verdicts("retracted")[0].numbers
    one.run()
    resumed = admitted(one).numbers["cached_tokens"]
    assert resumed == told["cached_tokens"]
    assert had - resumed <= (4 + 2 if shape in ("full", "window") else 8 + 2)
    assert one.output("victim") == one.expected("victim")[0]
    one.check_rest()


@pytest.mark.parametrize("steps", range(1, 14))
def test_a_prompt_retracted_on_its_way_resumes_from_its_newest_chunk(steps: int) -> None:
    """With steps in flight or none, at any chunk: the state behind the newest chunk on the grid is there."""
    one = world(EVERYTHING, pages=600, max_batched_tokens=24)
    one.send("victim", prompt_of(22, 200), 4)
    for _ in range(steps):
        one.turn()
    had = one.core._state.requests[1].scheduled_tokens
    retract(one, "victim")
    one.run()
    assert admitted(one).numbers["cached_tokens"] == had
    assert one.output("victim") == one.expected("victim")[0]
    one.check_rest()


# --- short of slots --------------------------------------------------------------------------------------------------


def test_a_state_that_found_no_slot_is_given_at_the_end_where_it_stands() -> None:
    """Its pages and those behind it are in the cache long before it: it takes its place in the middle of the path."""
    one = world(Shape(windows=(9,), state=True, slot_bytes=16 * 256), checkpoint_interval=32, chunked_prefill_size=64)
    memory = one.core._state.memory
    assert memory is not None
    one.send("short", prompt_of(23, 58), 5)
    one.tick()
    one.tick()
    taken = memory.take(memory.demand(memory.chain.max_extra(memory.demand(2), memory.demand(1))))
    until_output(one, 4)
    assert one.core.gauges()["checkpoints_skipped_total"] == 1
    assert one.core.gauges()["checkpoints_given_total"] == 0
    memory.give_back(taken)
    memory.settle()
    one.run()
    assert states(one) == {32: Kind.PROMPT}
    assert turn(one, "again", prompt_of(23, 58), 5).numbers["cached_tokens"] == 32
    one.check_rest()


def test_cached_pages_make_room_for_a_checkpoint() -> None:
    """The arena is full of pages that nobody reads and has no other state: a checkpoint is given all the same."""
    one = world(STATE, pages=100)
    for number in range(6):
        turn(one, f"fill{number}", prompt_of(30 + number, 7 * 8), 1)
    evict(one, 0)
    for number in range(6):
        turn(one, f"more{number}", prompt_of(40 + number, 6), 30)
    assert not one.core.gauges()["checkpoints_skipped_total"]
    one.check_rest()


# --- pins ------------------------------------------------------------------------------------------------------------


def pins(fields: dict[str, Any]) -> World:
    """A pinned conversation of 40 tokens, and then traffic that passes the arena twice."""
    one = world(EVERYTHING, pages=120, **fields)
    one.send("pinned", prompt_of(24, 40), 2, pin_ms=1000)
    one.run()
    for number in range(12):
        turn(one, f"other{number}", prompt_of(50 + number, 60), 2)
    return one


def test_what_a_request_pinned_outlasts_traffic_that_would_evict_it() -> None:
    """The whole hit is held: pages, the windows before its end, and its state; without a pin it is gone."""
    one = pins({})
    assert turn(one, "again", [*prompt_of(24, 40), 1, 2], 2).numbers["cached_tokens"] == 40
    one.check_rest()
    without = world(EVERYTHING, pages=120)
    turn(without, "pinned", prompt_of(24, 40), 2)
    for number in range(12):
        turn(without, f"other{number}", prompt_of(50 + number, 60), 2)
    assert turn(without, "again", [*prompt_of(24, 40), 1, 2], 2).numbers["cached_tokens"] == 0


# --- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["likely", "grid"])
def test_the_same_inputs_give_the_same_checkpoints(policy: str) -> None:
    """A conversation, branches, a retraction: a fresh core makes the same steps and decisions of the inputs."""
    one = world(EVERYTHING, pages=300, checkpoint_policy=policy, checkpoint_mark_tokens=24)
    conversation(one, 3)
    for number in range(4):
        one.send(f"b{number}", [*prompt_of(12, 70), *prompt_of(number, 20)], 20)
    until_output(one, one.core.gauges()["output_tokens_total"] + 10)
    replayed = one.replayed()
    assert replayed[0] == bytes(one.log)
    assert replayed[1].state_digest() == one.core.state_digest()
    one.run()
    one.check_rest()
