"""Faults of other systems, as tests of the parts that are built: incidents by number, user reports by letter.

Each builds its state through public calls, takes the action, and asserts the right behaviour.
"""

from __future__ import annotations

import numpy as np
import pytest

from allocator.capacity import CapacityForm
from allocator.checks import STRICT, Checks
from allocator.effects import WaitForward
from allocator.errors import CapacityRefused, InvariantBroken
from allocator.logical.chain import LogicalChain
from allocator.ops import Flush, Free, Take
from allocator.physical.chain import PhysicalChain
from tests.allocator.worlds import OneBand, full_geometry, hybrid_geometry, ids, stage_of
from tools.pagesafety.program import make_world, random_case, run_operation


def full_and_window(pages: int) -> LogicalChain:
    """A window and full attention whose units are equally large; together `pages` units fit."""
    stage = stage_of(8 * (pages + 1), 8, (0, 8, 8))
    return LogicalChain(hybrid_geometry(stage), Checks(STRICT))


def test_incident_4_a_freed_unit_is_visible_to_the_very_next_question() -> None:
    """Freed units count for the next question at once, though a forward may still read them on every rank."""
    world = OneBand(units=4)
    pages = world.take(4)
    world.step(writes=[pages[0]])
    assert world.logical.refusal((1,)) is not None
    world.free(pages[:2])
    assert world.logical.refusal((2,)) is None
    assert world.logical.refusal((3,)) is not None
    again = world.take(2)
    effects = world.step()
    assert [effect.seq for effect in effects if isinstance(effect, WaitForward)] == [1]
    assert sorted(world.where(again)) == [3, 4]


def test_incident_5_ranks_cannot_diverge_by_what_finished_on_them() -> None:
    """Two ranks on which forwards end at other times take the same units in the same steps (checked every step)."""
    case = random_case("full+window+state", 16, 3, 300)
    world = make_world(case)
    for operation in case.program:
        run_operation(world, operation)
    world.finish()
    one, other = world.fleet.digests()
    assert one == other


def test_incident_12_what_can_never_fit_is_refused_before_anything_is_given_up() -> None:
    """A demand above the empty arena is `never`, with everything live untouched; above what is free, it is not."""
    chain = LogicalChain(full_geometry(10), Checks(STRICT))
    chain.take((6,))
    before = chain.state_digest()
    never = chain.refusal((13,))
    assert never is not None
    assert never.never
    assert "not even an empty arena" in never.text()
    assert chain.never_fits((13,)) is not None
    later = chain.refusal((5,))
    assert later is not None
    assert not later.never
    assert later.units_short == 1
    assert chain.never_fits((5,)) is None
    assert chain.state_digest() == before


def test_incident_13_the_question_is_read_only() -> None:
    """Asked any number of times, the question changes neither the answer, the state, nor the next digest."""
    asked, silent = LogicalChain(full_geometry(10)), LogicalChain(full_geometry(10))
    ops: list[Take | Free | Flush] = []
    for chain in (asked, silent):
        ops = [chain.take((4,)).op]
    for pages in list(range(1, 9)) * 3:
        asked.refusal((pages,))
        asked.never_fits((pages,))
        asked.max_extra()
    assert asked.state_digest() == silent.state_digest()
    assert asked.step_digest(1, ops) == silent.step_digest(1, ops)


def test_incident_18_the_joint_question_is_asked() -> None:
    """Full 3 free, window 3 free, together only 3: taking 2 + 2 is refused until one more unit is given back."""
    chain = full_and_window(pages=8)
    chain.take((0, 2, 2))
    more = chain.take((0, 0, 1)).ids
    assert chain.free_estimate()[1:] == (3, 3), "each scalar check of 2 would pass"
    refusal = chain.refusal((0, 2, 2))
    assert refusal is not None
    assert not refusal.never
    assert refusal.units_short == 1
    chain.free([None, None, more[2]])
    assert chain.refusal((0, 2, 2)) is None
    assert chain.take((0, 2, 2)).ids[2].size == 2


def test_incident_22_a_refusal_names_stage_band_and_units_short() -> None:
    """With two stages the one that is full is named, with the band, the shortage and what must end first."""
    geometry = hybrid_geometry(stage_of(8 * 101, 8, (8,)), stage_of(8 * 11, 8, (8,)))
    chain = LogicalChain(geometry)
    chain.take((7,))
    refusal = chain.refusal((5,))
    assert refusal is not None
    assert (refusal.stage, refusal.band_name, refusal.units_short) == (1, "full", 2)
    assert refusal.text() == (
        "band full on stage 1 is 2 units short (5 wanted beside 7 live): 2 units of full must be freed first"
    )


def test_U2_one_more_than_fits_is_served_after_one_unit_goes() -> None:
    """A full arena refuses one page more by exactly one unit, and serves it once one unit is freed."""
    for pages in (1, 2, 9):
        world = OneBand(units=pages)
        held = world.take(pages)
        world.step(writes=[])
        refusal = world.logical.refusal((1,))
        assert refusal is not None
        assert refusal.units_short == 1
        world.free(held[-1:])
        assert world.logical.refusal((1,)) is None
        world.take(1)
        world.step()


def test_U6_answers_always_match_a_fresh_recount() -> None:
    """Through 300 changes the remembered answers equal those of a chain that is asked for the first time."""
    geometry = hybrid_geometry(stage_of(500, 8, (8, 4, 8)), pages=40, slots=9)
    chain = LogicalChain(geometry, Checks(STRICT))
    rng = np.random.default_rng(6)
    for _ in range(300):
        demand = (int(rng.integers(0, 2)), 0, int(rng.integers(0, 5)))
        fresh = CapacityForm(geometry).refusal(chain.live_units(), demand)
        assert chain.refusal(demand) == fresh
        assert chain.refusal(demand) == fresh, "remembered"
        if any(demand) and fresh is None:
            chain.take(demand)
        elif sum(chain.live_units()):
            chain.free([chain.live_ids(0)[:1], None, rng.permutation(chain.live_ids(2))[:3]])
    chain.check()


def test_S1_a_take_of_several_kinds_is_all_or_nothing() -> None:
    """With k - 1 of k slots free the joint take is refused and holds nothing, pages included."""
    chain = LogicalChain(hybrid_geometry(stage_of(8 * 40, 8, (8, 8, 8)), slots=3), Checks(STRICT))
    chain.take((2, 1, 1))
    before = chain.state_digest()
    with pytest.raises(CapacityRefused, match="band state on the id space is 1 units short"):
        chain.take((2, 2, 2))
    assert chain.state_digest() == before
    assert chain.take((1, 2, 2)).ids[0].tolist() == [3]


def test_S4_thousands_of_sessions_leave_capacity_as_it_was() -> None:
    """Opening and closing sessions over and over ends with the free units of the start, logically and on the rank."""
    world = OneBand(units=7)
    for turn in range(2_000):
        pages = world.take(1 + turn % 7)
        world.step(writes=pages[-1:])
        world.free(pages)
        if turn % 3 == 0:
            world.flush(2)
        world.step()
        world.process()
    world.step()
    world.physical.check_idle()
    world.mirror.check_idle()
    assert world.logical.max_extra() == 7


def test_H5_pages_promised_by_a_retraction_are_really_freed() -> None:
    """Giving a request's pages back frees exactly as many units as it held, whatever forwards read them."""
    world = OneBand(units=12)
    requests = [world.take(pages) for pages in (5, 3, 4)]
    world.step(writes=[requests[0][-1], requests[2][-1]])
    before = world.logical.max_extra()
    world.free(requests[0])
    assert world.logical.max_extra() == before + 5
    regained = world.take(5)
    world.step()
    assert 0 not in world.where(regained)


def test_H7_a_retraction_under_every_interleaving_neither_leaks_nor_frees_twice() -> None:
    """Launch, result and retraction in every order: all pages are back, and a second free of them is refused."""
    for processed_before in (0, 1, 2):
        world = OneBand(units=6)
        pages = world.take(4)
        world.step(writes=[pages[-1]])
        world.step(writes=[pages[-1]])
        world.process(processed_before)
        world.free(pages)
        world.step()
        world.process(2 - processed_before)
        world.step()
        world.physical.check_idle()
        with pytest.raises(InvariantBroken, match="a repeated free"):
            world.logical.free([ids(*pages)])


def test_C6_freed_units_count_as_free_but_are_handed_out_behind_the_forward() -> None:
    """A request ends while the next forward still reads it: its units are reusable at once, behind that forward."""
    world = OneBand(units=2)
    pages = world.take(2)
    world.step(writes=[pages[1]])
    world.step(writes=[pages[1]])  # launched before the first one's result ended the request
    world.process()
    world.free(pages)
    assert world.logical.max_extra() == 2
    world.take(2)
    effects = world.step()
    assert isinstance(effects[1], WaitForward)
    assert effects[1].seq == 2
    assert [type(effect).__name__ for effect in effects] == ["Bind", "WaitForward", "Zero", "Bind"]


def test_R2_a_local_read_is_found_in_its_step() -> None:
    """A rank that decides by what finished locally (it processed one forward early) differs in that very step."""
    geometry = full_geometry(4)
    ranks = [PhysicalChain(geometry, 0) for _ in range(2)]
    chain = LogicalChain(geometry)
    pages = chain.take((3,))
    steps: list[list[Take | Free | Flush]] = [[pages.op], [chain.free([pages.ids[0][:1]])], [chain.take((1,)).op]]
    digests: list[list[bytes]] = [[], []]
    for seq, ops in enumerate(steps, start=1):
        for number, rank in enumerate(ranks):
            local_read = number == 1 and seq >= 2
            rank.begin_step(seq, 1 if local_read else 0)
            rank.apply(ops)
            digests[number].append(rank.end_step())
            if seq == 1:
                rank.launched(1, {0: pages.ids[0]})
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]
