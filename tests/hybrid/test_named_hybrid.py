"""Named incidents and user reports at the border of core and rank: namespaces, repeated frees, what is in flight.

As in `test_incidents_hybrid`, the rank is the toy of exact hashes: right tokens mean right memory.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from allocator.columns import i32
from allocator.errors import InvariantBroken
from allocator.ops import CopyState, Free, Take
from tests.hybrid.test_incidents_hybrid import HYBRID, IDS, SHAPES, assert_right, close, ids, world
from tools.inprocess import InProcess, Sent
from tools.toy_reference import Toy


def table(engine: InProcess, sent: Sent) -> set[int]:
    """Virtual pages that a running request's table names."""
    row = engine.state.requests[sent.number].row
    assert row >= 0
    return set(engine.state.rows.table[row, : engine.state.rows.pages[row]].tolist())


@pytest.mark.parametrize("toy", SHAPES, ids=IDS)
def test_P6_one_tenants_pages_are_never_anothers(toy: Toy) -> None:
    """Equal tokens under salt x, under adapter x and under neither share no page; the same salt twice hits."""
    engine = world(toy)
    prompt, namespaces = ids(1, 200), ["", "salt:x", "lora:x", "salt:xx", "SALT:x"]
    first = [engine.submit(prompt, 40, namespace) for namespace in namespaces]
    for _ in range(200):
        engine.turn()
        if all(engine.state.requests[sent.number].row >= 0 for sent in first):
            break
    for one, other in itertools.combinations(first, 2):
        assert not table(engine, one) & table(engine, other)
    engine.run()
    assert [sent.cached for sent in first] == [[0]] * len(namespaces)
    again = [engine.generate(prompt, 5, namespace=namespace) for namespace in namespaces]
    assert {sent.cached[0] >= 128 for sent in again} == {True}
    assert engine.generate(prompt, 5, namespace="lora:xx").cached == [0]
    assert_right(toy, *first, *again)
    close(engine)


def test_incident_14_a_float_moves_aside_for_a_slot_and_no_state_byte_is_lost() -> None:
    """Slots are taken, windows move for them and states are copied in one step: every row's tokens stay right."""
    toy = Toy(windows=(64,), state=True)
    together = moved = 0
    for seed in range(5):
        draw, engine = random.Random(seed), world(toy, rows=4, room=(9, 30, 60))
        trunk = ids(seed, 200)
        sent = [engine.generate(trunk, 4)]
        for k in range(10):
            before = engine.worker.chain.relief.moves
            engine.churn(draw.randrange(2**30))
            sent.append(engine.submit(trunk[: draw.randrange(70, 200)] + ids(50 + k, 9), draw.randrange(2, 30)))
            for _ in range(draw.randrange(2, 14)):
                steps = len(engine.steps)
                engine.turn()
                if len(engine.steps) > steps and engine.worker.chain.relief.moves > before:
                    kinds = {type(op) for op in engine.steps[-1].ops}
                    together += {Take, CopyState} <= kinds
                before = engine.worker.chain.relief.moves
        engine.run()
        moved += engine.copied()["window:64"]
        assert_right(toy, *sent)
        close(engine)
    assert moved > 0
    assert together > 0, "no step took, moved and copied at once: the arena is not tight enough to show anything"


@pytest.mark.parametrize("toy", SHAPES, ids=IDS)
def test_incident_21_a_row_that_is_handed_on_while_its_chunk_runs(toy: Toy) -> None:
    """A chunked prompt is aborted with its chunk in flight; the next owner of the row computes from nothing."""
    for delay in range(4):
        engine = world(toy, rows=1, enable_prefix_caching=False)
        first = engine.submit(ids(1, 300), 9)
        for _ in range(1 + delay % 2):
            engine.tick()
        row = engine.state.requests[first.number].row
        if delay >= 2:
            engine.report()
            engine.tick()
        assert engine.flights, "its chunk is in flight"
        engine.abort(first)
        second = engine.submit(ids(2, 150), 9)
        engine.tick()
        if engine.flights and engine.state.requests[second.number].row < 0:
            engine.run()
        else:
            assert engine.state.requests[second.number].row == row
            engine.run()
        assert first.tokens == []
        assert_right(toy, second)
        engine.check_free()


def live_after(engine: InProcess) -> list[list[int]]:
    """Live ids per band after every step, from the ops alone; a second take or free of an id fails."""
    live: list[set[int]] = [set() for _ in engine.bands]
    counts = []
    for step in engine.steps:
        for op in step.ops:
            for part in op.parts if isinstance(op, Take | Free) else []:
                named = set(i32(part.ids).tolist())
                assert not (live[part.band] & named if isinstance(op, Take) else named - live[part.band])
                live[part.band] = live[part.band] | named if isinstance(op, Take) else live[part.band] - named
        counts.append([len(one) for one in live])
    return counts


@pytest.mark.parametrize("toy", [SHAPES[1], SHAPES[4]], ids=[IDS[1], IDS[4]])
def test_W6_free_units_never_pass_the_total(toy: Toy) -> None:
    """Long decodes through many windows, with retractions: each unit is freed once, and all of them come back."""
    engine = world(toy, rows=3, enable_prefix_caching=False)
    sent = [engine.submit(ids(k, 30 + 50 * k), 160) for k in range(4)]
    draw, seen = random.Random(5), [0] * len(engine.bands)
    while engine.turn():
        if draw.random() < 0.02:
            engine.retract(draw.choice(sent))
        physical = engine.worker.chain.band_counts().reshape(-1, 4)
        for band, units in enumerate(physical.sum(axis=1).tolist()):
            seen[band] = seen[band] or units
            assert units == seen[band], "live, holes, pending and beyond add up to the band's part, always"
    again = [decision for each in sent for decision in each.admissions[1:]]
    assert any(decision.numbers["tokens"] > 100 for decision in again), "somebody was retracted in mid-decode"
    counts = live_after(engine)
    assert counts[-1] == [0] * len(engine.bands)
    assert_right(toy, *sent)
    engine.check_free()


def test_W6_a_repeated_free_fails_loudly_and_names_the_page() -> None:
    """Giving a page back twice ends the epoch with the rule and the id in the text, and changes nothing."""
    engine = world(enable_prefix_caching=False)
    engine.submit(ids(1, 40), 200)
    engine.tick()
    memory = engine.state.memory
    assert memory is not None
    row, before = engine.state.rows.owners.index(next(iter(engine.state.requests.values()))), memory.live_units()
    page = engine.state.rows.table[row, :1].copy()
    freed = np.setdiff1d(np.arange(1, 9, dtype=np.int32), engine.state.rows.table[row, :3])[:1]
    for ids_ in (np.concatenate([page, page]), freed):
        memory.give_back([None, None, ids_])
        with pytest.raises(InvariantBroken, match=rf"free_of_bound_unit.* {ids_[0]}\b"):
            memory.settle()
        for returned in memory._returned:
            returned.clear()
        memory._owed = False
        assert memory.live_units() == before


def interleavings(depth: int) -> list[str]:
    """Words over tick, report and two retractions that can all be acted out, those of full length; the first ticks."""
    words = ["t"]
    for _ in range(depth - 1):
        words = [word + letter for word in words for letter in "trab" if feasible(word + letter)]
    return words


def feasible(word: str) -> bool:
    """A report needs a launch before it, and at most two are in flight; of retractions in a row one order is enough."""
    waiting = word.count("t") - word.count("r")
    return 0 <= waiting <= 2 and word[-2:] not in ("aa", "bb", "ba")


@pytest.mark.parametrize("toy", [Toy(), HYBRID], ids=["full", "hybrid"])
def test_H7_every_interleaving_of_launch_result_and_retract(toy: Toy) -> None:
    """Two requests, every order of launches, results and retractions: right tokens, nothing freed twice, no leak."""
    words = interleavings(5)
    assert len(words) > 70
    for word in words:
        engine = world(toy, rows=2, rank_page=4, checkpoint_interval=8, chunked_prefill_size=16, max_batched_tokens=32)
        engine.late = 0.7
        sent = {"a": engine.submit(ids(1, 17), 4), "b": engine.submit(ids(1, 9) + ids(2, 4), 5)}
        for letter in word:
            if letter == "t" and engine.wants_tick:
                engine.tick()
            elif letter == "r" and engine.flights:
                engine.report()
            elif letter in sent:
                engine.retract(sent[letter])
        engine.run()
        assert_right(toy, *sent.values())
        live_after(engine)
        close(engine)
