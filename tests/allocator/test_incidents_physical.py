"""Incidents of other systems on the ranks: public transitions, real bytes, late forwards and copies on every stage.

Each builds its state, takes the action, and asserts the right behaviour; `World` checks contents after every step.
"""

from __future__ import annotations

import numpy as np
import pytest

from allocator.columns import i32
from allocator.effects import Bind, Copy, Effect, HostWrite, WaitCopy, WaitForward, Zero
from allocator.errors import InvariantBroken
from allocator.ops import Free, Part
from allocator.physical.layout import Level
from tests.allocator.byte_arena import PACES, Pace
from tests.allocator.worlds import World, full_geometry, hybrid_geometry, ids, room, waits

STATE, WINDOW, FULL = 0, 1, 2


def of_kind(effects: list[Effect], kind: type[Effect]) -> list[int]:
    """The places of effects of a kind."""
    return [index for index, effect in enumerate(effects) if isinstance(effect, kind)]


def settled(world: World) -> None:
    """Every forward is processed."""
    world.process(len(world.in_flight))
    world.step()


# --- 1 to 13 --------------------------------------------------------------------------------------


def test_incident_2_relief_that_was_paid_for_is_used_by_the_same_call() -> None:
    """Short, then enough is freed while forwards run: the very take that was refused is accepted, and every rank
    realizes it in that step, in whatever band the freed bytes lay.
    """
    world = World(hybrid_geometry(room(16 * 3 + 8 * 6, 16, 8)))
    slots, pages = world.take(3, 6)
    world.step(writes={0: slots, 1: pages})
    world.step(writes={0: slots, 1: pages[:1]})
    assert world.logical.refusal((1, 0)) is not None
    world.free({1: [pages[1], pages[4]]})
    assert world.logical.refusal((1, 0)) is None
    (slot,) = world.take(1, 0)[0]
    effects = world.step(writes={0: [slot]})
    assert waits(effects) == [("forward", 2)]
    assert world.where(0, [slot]) == [5]
    assert world.chain().relief.moves == 1, "the lowest page went into the hole above"
    world.drain()


def test_incident_5_ranks_with_other_timing_and_other_room_decide_alike() -> None:
    """Four ranks of a stage on which forwards and copies end at other times take, move and wait alike in every step,
    and a stage with much more memory gets the same ids.
    """
    world = World(hybrid_geometry(room(8 * 24, 8, 8, 8), room(8 * 90, 8, 8, 8)))
    rng = np.random.default_rng(5)
    held: list[tuple[list[int], list[int]]] = []
    uses = 0
    for turn in range(160):
        demand = (1, int(rng.integers(0, 2)), int(rng.integers(1, 4)))
        demand = (demand[0], min(demand[1], demand[2]) * demand[2], demand[2])
        if world.logical.refusal(demand) is None:
            slots, _, pages = world.take(*demand)
            held.append((slots, pages))
        elif held:
            slots, pages = held.pop(int(rng.integers(0, len(held))))
            window = [page for page in pages if page in set(world.logical.live_ids(WINDOW).tolist())]
            world.free({STATE: slots, WINDOW: window, FULL: pages})
        if held and turn % 4 == 0:
            uses += 1
            world.backup(uses, {STATE: held[-1][0], FULL: held[-1][1]})
        if turn % 5 == 0:
            world.flush(int(rng.integers(0, 4)))
        if len(world.in_flight) == 2 or (world.in_flight and turn % 3 == 0):
            world.process()
        written = held[int(rng.integers(0, len(held)))] if held else ([], [])
        world.step(writes={STATE: written[0], FULL: written[1][-1:]} if turn % 2 else None)
        if len(world.uses) > 3:
            world.end(min(world.uses))
    digests = [{chain.digest for chain, _ in ranks} for ranks in world.stages]
    assert [len(found) for found in digests] == [1, 1]
    assert world.chain(0).relief.reliefs > 10 > world.chain(1).relief.reliefs
    world.drain()


def test_incident_13_layout_work_happens_once_for_a_deep_reclaim() -> None:
    """Asked after each of many victims, the question changes nothing on any rank; one take then rearranges once."""
    world = World(hybrid_geometry(room(32 * 2 + 8 * 40, 32, 8)))
    slots, pages = world.take(2, 40)
    world.step(writes={0: slots, 1: pages})
    settled(world)
    victims = pages[::3]
    asked = 0
    for victim in victims:
        world.free({1: [victim]})
        asked += 1
        if world.logical.refusal((3, 0)) is None:
            break
    assert asked == 12, "three slots are 96 bytes"
    world.step()
    assert world.chain().relief.reliefs == 0
    before = world.chain().spans()
    world.logical.refusal((4, 0))
    world.logical.never_fits((4, 0))
    world.step()
    assert world.chain().spans() == before
    world.take(3, 0)
    world.step()
    assert world.chain().relief.reliefs == 1
    assert world.chain().relief.moved_bytes == world.chain().relief.least_bytes
    world.drain()


# --- 14: a load's address -----------------------------------------------------------------------------


class Reserved:
    """Full, a float and state; a host copy of two window units and their pages, evicted from the device since.

    Units of 8 bytes: state at 2; the window's other units follow so closely that a state slot needs the float to move.
    """

    def __init__(self) -> None:
        world = self.world = World(hybrid_geometry(room(8 * 12, 8, 8, 8)))
        self.slots, window, pages = world.take(1, 2, 3, bound={WINDOW: [0, 1]})
        world.step(writes={STATE: self.slots, WINDOW: window, FULL: pages})
        settled(world)
        self.host = world.backup(1, {WINDOW: window, FULL: pages[:2]})
        world.step()
        world.end(1)
        world.free({WINDOW: window, FULL: pages[:2]})
        world.flush()
        world.step()
        # The load's rows are taken; the copy is not queued yet.
        _, self.window, self.pages = world.take(0, 2, 2)
        world.step()
        self.reserved = world.where(WINDOW, self.window)

    def state_until_the_float_moves(self) -> list[int]:
        """State slots, taken one by one, until a reserved unit lies elsewhere."""
        world = self.world
        taken: list[int] = []
        while world.where(WINDOW, self.window) == self.reserved:
            assert world.logical.refusal((1, 0, 0)) is None, "the float never moved"
            taken += world.take(1, 0, 0)[STATE]
            world.step(writes={STATE: taken[-1:]})
        return taken


def test_incident_14_a_load_is_addressed_when_it_is_submitted() -> None:
    """Room for a state slot moves the reserved float units; the load, queued afterwards, goes to where they lie then,
    and neither the state's bytes nor the loaded ones are lost.
    """
    case = Reserved()
    world = case.world
    slots = case.state_until_the_float_moves()
    now = world.where(WINDOW, case.window)
    reserved_by_state = set(case.reserved) & set(world.where(STATE, slots))
    assert reserved_by_state, "state lies where the float's reservation was"
    world.load(2, {WINDOW: case.window, FULL: case.pages}, case.host)
    effects = world.step()
    writes = {effect.band: i32(effect.units).tolist() for effect in effects if isinstance(effect, HostWrite)}
    assert writes[WINDOW] == now
    world.end(2)
    world.step(writes={})
    assert all((STATE, slot) in world.known for slot in slots)
    world.drain()


def test_incident_14_nothing_moves_between_resolution_and_submission() -> None:
    """The load and the state slot in one step, the load first: the copy is submitted before the float moves, and the
    move waits for it.
    """
    case = Reserved()
    world = case.world
    probe = Reserved()
    needed = len(probe.state_until_the_float_moves())
    world.load(2, {WINDOW: case.window, FULL: case.pages}, case.host)
    slots = world.take(needed, 0, 0)[STATE]
    effects = world.step(writes={STATE: slots})
    submitted, waited, moved = (of_kind(effects, kind) for kind in (HostWrite, WaitCopy, Copy))
    assert max(submitted) < min(waited) < min(moved)
    assert waits(effects) == [("copy", 2)]
    world.end(2)
    world.step(writes={})
    world.drain()


def test_incident_14_a_load_in_flight_is_waited_for_by_a_later_move() -> None:
    """Queued a step earlier, the copy is still writing when the float must move: the move waits for exactly it."""
    case = Reserved()
    world = case.world
    world.backup(2, {FULL: case.pages[:1]})
    world.load(3, {WINDOW: case.window}, {WINDOW: case.host[WINDOW]})
    world.step()
    taken: list[int] = []
    while world.where(WINDOW, case.window) == case.reserved:
        taken += world.take(1, 0, 0)[STATE]
        effects = world.step(writes={STATE: taken[-1:]})
        settled(world)
    assert waits(effects) == [("copy", 3)], "and not for the backup"
    world.end(2, 3)
    world.step(writes={})
    world.drain()


# --- 15: waits on copies --------------------------------------------------------------------------


def test_incident_15_copies_that_do_not_touch_what_is_taken_are_not_waited_for() -> None:
    """Backups and loads are under way and a hole exists: takes of holes and of growth wait for nothing."""
    world = World(full_geometry(8, unit_bytes=8))
    (pages,) = world.take(6)
    world.step(writes={0: pages})
    settled(world)
    kept = world.backup(1, {0: pages[2:4]})
    world.step()
    world.end(1)
    world.load(2, {0: pages[2:4]}, kept)
    world.backup(3, {0: pages[4:5]})
    world.free({0: pages[5:]})
    world.step()
    world.take(1)
    assert waits(world.step()) == [], "the hole"
    world.take(2)
    assert waits(world.step()) == [], "growth"
    world.drain()


def test_incident_15_a_take_of_a_fenced_unit_waits_for_exactly_its_copy() -> None:
    """Of four copies under way, the take of the one unit left waits for the one that still reads it."""
    world = World(full_geometry(4, unit_bytes=8))
    (pages,) = world.take(4)
    world.step(writes={0: pages})
    settled(world)
    for use, page in enumerate(pages, start=1):
        world.backup(use, {0: [page]})
    world.step()
    world.free({0: pages[2:3]})
    (fresh,) = world.take(1)[0]
    effects = world.step(writes={0: [fresh]})
    assert waits(effects) == [("copy", 3)]
    assert of_kind(effects, WaitCopy) < of_kind(effects, Zero)
    world.drain()


# --- 18 -------------------------------------------------------------------------------------------


def test_incident_18_a_joint_take_that_is_accepted_is_had_on_every_rank() -> None:
    """Each kind alone could have 7, both together only 3 each: 4 of both are refused. One unit is given back, and both
    are placed side by side on all ranks, contents of the others intact.
    """
    world = World(hybrid_geometry(room(8 * 11, 0, 8, 8)))
    _, _, pages = world.take(0, 1, 3, bound={WINDOW: [1]})
    world.step(writes={WINDOW: pages[1:2], FULL: pages})
    estimate = world.logical.free_estimate()
    assert estimate[1:] == (7, 7)
    assert world.logical.refusal((0, 4, 4)) is not None
    before = world.logical.state_digest()
    assert world.logical.refusal((0, 3, 3)) is None
    assert world.logical.state_digest() == before
    world.free({FULL: pages[:1]})
    assert world.logical.refusal((0, 4, 4)) is None
    _, window, fresh = world.take(0, 4, 4)
    world.step(writes={WINDOW: window, FULL: fresh})
    assert world.counts(WINDOW)[0] + world.counts(FULL)[0] == 11
    world.drain()


# --- 19 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", [True, False])
def test_incident_19_units_of_a_dead_peer_stay_out_of_circulation_until_proof(writes: bool) -> None:
    """Published, then freed by their owner: counted as live everywhere, never handed out, never moved, through flushes,
    reliefs and any number of steps; whatever the peer does to them harms nobody. On proof they come back, once.
    """
    world = World(hybrid_geometry(room(8 * 12, 8, 8, 8)))
    slots, window, pages = world.take(1, 2, 4, bound={WINDOW: [0, 1]})
    world.step(writes={STATE: slots, WINDOW: window, FULL: pages})
    lost = {WINDOW: window[:1], FULL: pages[:1]}
    if writes:
        world.hold(1, lost)
    world.publish(1, lost, writes=writes)
    world.step()
    world.report()
    world.free({WINDOW: window, FULL: pages[:2]})
    world.flush()
    world.step()
    assert world.logical.quarantined() == (0, 1, 1)
    at = (world.where(WINDOW, lost[WINDOW]), world.where(FULL, lost[FULL]))
    extents = world.chain().fixed_extents()
    assert extents[WINDOW:] == [(8 * at[0][0], 8 * at[0][0] + 8), (8 * at[1][0], 8 * at[1][0] + 8)]
    taken: list[int] = []
    for _ in range(30):
        demand = next((d for d in ((1, 0, 0), (0, 0, 1)) if world.logical.refusal(d) is None), None)
        if demand:
            got = world.take(*demand)
            assert not set(got[FULL]) & set(lost[FULL]), "its id is not minted either"
            taken += got[STATE]
        world.flush()
        world.step(writes={STATE: taken[-1:]})
        world.process()
        assert (world.where(WINDOW, lost[WINDOW]), world.where(FULL, lost[FULL])) == at
        assert world.logical.live_units()[FULL] == world.counts(FULL)[0]
    assert world.logical.refusal((1, 0, 0)) is not None
    live = world.logical.live_units()
    freed = world.end(1)
    assert [part.band for part in freed.parts] == [WINDOW, FULL]
    world.step()
    assert world.logical.live_units() == (live[STATE], live[WINDOW] - 1, live[FULL] - 1)
    assert world.logical.quarantined() == (0, 0, 0)
    assert world.chain().fixed_extents() == [None, None, None]
    world.take(1, 0, 0)
    world.step()
    world.drain()


def test_incident_19_no_time_and_no_number_of_steps_is_a_proof() -> None:
    """A rank that hears of a free of a published unit stops: only a release may come before it."""
    world = World(full_geometry(3, unit_bytes=8), paces=PACES[:1])
    (pages,) = world.take(2)
    world.publish(1, {0: pages[:1]})
    world.step()
    chain = world.chain()
    chain.begin_step(2, 0)
    with pytest.raises(InvariantBroken, match="ids 1 are on a transfer that is not released") as caught:
        chain.apply([Free([Part(0, ids(1).tobytes())])])
    assert caught.value.name == "band.free_of_fixed_unit"


# --- 21 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_incident_21_a_row_handed_out_under_its_old_chunk_is_not_touched_before_it_ends(late: bool) -> None:
    """Aborted while its chunk runs, the request's slot and pages have a new owner in the next step. The slot is neither
    zeroed nor waited for: the new owner's first forward, on the same stream, resets it. The pages are zeroed behind
    the chunk, which may still write them.
    """
    world = World(hybrid_geometry(room(16 * 1 + 8 * 2, 16, 8)), paces=[Pace(late, late)])
    slots, pages = world.take(1, 2)
    world.step(writes={0: slots, 1: pages})
    chunk = world.seq
    world.free({0: slots, 1: pages})
    fresh_slots, fresh_pages = world.take(1, 2)
    effects = world.step(writes={0: fresh_slots, 1: fresh_pages[:1]})
    assert [effect.band for effect in effects if isinstance(effect, Zero)] == [1]
    assert waits(effects) == [("forward", chunk)]
    assert of_kind(effects, WaitForward) < of_kind(effects, Zero)
    state_bind = [i for i, effect in enumerate(effects) if isinstance(effect, Bind) and effect.band == 0]
    assert max(state_bind) < of_kind(effects, WaitForward)[0], "the slot was handed out before any wait"
    assert world.where(0, fresh_slots) == [2]
    world.process()
    world.step()
    assert world.known[1, fresh_pages[1]] == 0, "the old chunk's rows are gone"
    world.drain()


def test_incident_21_a_hand_over_under_a_running_forward_rearranges_nothing() -> None:
    """Handing a whole request's memory to the next one, over and over under its last forward, rearranges nothing."""
    world = World(hybrid_geometry(room(16 * 2 + 8 * 6, 16, 8)))
    held = world.take(2, 6)
    for _ in range(20):
        world.step(writes={0: held[0], 1: held[1]})
        if len(world.in_flight) == 2:
            world.process()
        world.free({0: held[0], 1: held[1]})
        held = world.take(2, 6)
    world.step()
    assert world.chain().relief.reliefs == 0
    assert world.chain().relief.by_level == dict.fromkeys(Level, 0)
    world.drain()
