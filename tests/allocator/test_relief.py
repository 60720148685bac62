"""Relief: the least rearrangement that makes room, what it keeps in place, and what it waits for."""

from __future__ import annotations

import pytest

from allocator.checks import OFF, Checks
from allocator.columns import i32
from allocator.effects import Copy, Effect, HostWait, WaitForward
from allocator.errors import InvariantBroken
from allocator.ops import Free, Part, Take
from allocator.physical.chain import PhysicalChain
from allocator.physical.layout import Level
from tests.allocator.worlds import World, hybrid_geometry, ids, room, waits

STATE, WINDOW, FULL = 0, 1, 2


def moves(effects: list[Effect]) -> dict[int, list[tuple[int, int]]]:
    """Moves among effects: per band, (source, target) units."""
    out: dict[int, list[tuple[int, int]]] = {}
    for effect in effects:
        if isinstance(effect, Copy):
            pairs = zip(i32(effect.sources).tolist(), i32(effect.targets).tolist(), strict=True)
            out.setdefault(effect.band, []).extend(pairs)
    return out


def quiet(world: World) -> None:
    """Every forward is processed and its batches are back."""
    world.process(len(world.in_flight))
    world.step()


class Chain:
    """Three bands of 8 bytes over units 2 to 17: state from 2 up, full attention from 17 down, a window between.

    `windows` are indexes of pages that hold a window's unit; the float is placed in the middle of its gap.
    """

    def __init__(self, slots: int, pages: int, windows: list[int]) -> None:
        world = self.world = World(hybrid_geometry(room(8 * 16, 8, 8, 8)))
        self.slots, _, self.pages = world.take(slots, 0, pages)
        world.step()
        self.window = [self.pages[index] for index in windows]
        if windows:
            world.take(0, len(windows), 0, onto={WINDOW: self.window})
        world.step(writes={STATE: self.slots, WINDOW: self.window, FULL: self.pages})
        quiet(world)

    def free(self, band: int, column: list[int]) -> None:
        """Frees ids with nothing in flight: they leave holes."""
        self.world.free({band: column})
        self.world.step()

    def bind(self, pages: list[int]) -> list[Effect]:
        """A window take onto these pages."""
        self.world.take(0, len(pages), 0, onto={WINDOW: pages})
        return self.world.step()

    @property
    def relief(self) -> tuple[int, int, int]:
        """Reliefs, units moved, bytes moved beyond the least."""
        counts = self.world.chain().relief
        return counts.reliefs, counts.moves, counts.moved_bytes - counts.least_bytes

    def level(self, level: Level) -> int:
        """Reliefs of a level."""
        return self.world.chain().relief.by_level[level]


def packed() -> Chain:
    """State 2 to 4; 5 is free; window 6 to 9; 10 and 11 are free; full 12 to 17."""
    chain = Chain(slots=3, pages=6, windows=[0, 1, 2, 3])
    assert chain.world.where(WINDOW, chain.window) == [6, 7, 8, 9]
    return chain


def choice(state_holes: int) -> tuple[Chain, list[int]]:
    """State 2 to 5; 6 is free; window 7, 8; 9 is free; full 10 to 17 with holes at 11 and 17. And pages to bind.

    Full attention gives two units for one move (10 into 17), state one for each move into its `state_holes`.
    """
    chain = Chain(slots=4, pages=8, windows=[2, 3])
    assert chain.world.where(WINDOW, chain.window) == [7, 8]
    chain.free(FULL, [chain.pages[0], chain.pages[6]])
    if state_holes:
        chain.free(STATE, chain.slots[:state_holes])
    return chain, [chain.pages[index] for index in (1, 4, 5, 7)]


# --- levels ------------------------------------------------------------------------------------


def test_a_take_that_fits_in_place_rearranges_nothing() -> None:
    """Growth on both sides of a float is no relief."""
    chain = packed()
    assert moves(chain.bind(chain.pages[4:])) == {}
    chain.world.take(1, 0, 0)
    assert moves(chain.world.step()) == {}
    assert chain.relief == (0, 0, 0)
    chain.world.drain()


def test_the_ends_move_before_a_float_does() -> None:
    """A float that lacks a unit gets it from an end that has a hole; its own units stay where they are."""
    chain, pages = choice(state_holes=0)
    effects = chain.bind(pages[:3])
    assert moves(effects) == {FULL: [(10, 17)]}
    assert chain.world.where(WINDOW, chain.window) == [7, 8]
    assert chain.relief == (1, 1, 0)
    assert chain.level(Level.FLUSH_ENDS) == 1
    chain.world.drain()


def test_the_fewest_bytes_win() -> None:
    """Two units short: full attention gives both for one move, state would move twice."""
    chain, pages = choice(state_holes=2)
    assert moves(chain.bind(pages)) == {FULL: [(10, 17)]}
    assert chain.relief == (1, 1, 0)
    chain.world.drain()


def test_a_float_moves_only_what_stands_in_the_way() -> None:
    """State wants the unit that the window begins with: that one goes to the window's other side."""
    chain = packed()
    chain.world.take(2, 0, 0)
    effects = chain.world.step()
    assert moves(effects) == {WINDOW: [(6, 10)]}
    assert chain.world.where(WINDOW, chain.window) == [10, 7, 8, 9]
    assert chain.relief == (1, 1, 0)
    assert chain.level(Level.RELAYOUT) == 1
    chain.world.drain()


@pytest.mark.parametrize("band", [STATE, FULL])
def test_all_free_bytes_can_be_had_by_any_band(band: int) -> None:
    """Whatever is free anywhere, an end gets all of it in one take, and not a unit more; contents survive."""
    chain, _ = choice(state_holes=2)
    free = 16 - 2 - 2 - 6
    demand = [0, 0, 0]
    demand[band] = free + 1
    assert chain.world.logical.refusal((demand[0], 0, demand[2])) is not None
    demand[band] = free
    chain.world.take(*demand)
    chain.world.step()
    assert chain.relief[2] == 0
    chain.world.drain()


# --- waits ------------------------------------------------------------------------------------


def test_moves_run_behind_the_newest_forward_and_wait_once() -> None:
    """A relief that moves waits for the forward that may write what it moves, before the first copy, and only once."""
    chain = packed()
    world = chain.world
    world.step(writes={WINDOW: chain.window})
    world.step(writes={WINDOW: chain.window[:1], FULL: chain.pages[-1:]})
    world.take(2, 0, 0)
    effects = world.step()
    assert waits(effects) == [("forward", world.seq - 1)]
    kinds = [type(effect) for effect in effects]
    assert kinds.index(WaitForward) < kinds.index(Copy)
    world.drain()


def test_handing_back_holes_waits_for_nobody() -> None:
    """A relief of the lowest level, under a forward in flight that touches nothing of it, needs no wait."""
    chain = packed()
    world = chain.world
    chain.free(WINDOW, chain.window)
    world.step(writes={STATE: chain.slots, FULL: chain.pages})
    world.take(5, 0, 0)
    effects = world.step()
    assert waits(effects) == []
    assert moves(effects) == {}
    assert chain.level(Level.NO_MOVE) == 1
    world.drain()


def test_pending_units_of_another_band_are_settled() -> None:
    """Bytes that a neighbour freed under a forward are had behind that forward, without a move."""
    chain = packed()
    world = chain.world
    world.step(writes={WINDOW: chain.window})
    world.step(writes={STATE: chain.slots})
    world.free({WINDOW: chain.window})
    assert world.logical.refusal((7, 0, 0)) is None
    world.take(7, 0, 0)
    effects = world.step()
    assert waits(effects) == [("forward", world.seq - 1)]
    assert moves(effects) == {}
    world.drain()


def test_a_forward_whose_writes_are_unknown_is_waited_for() -> None:
    """A speculative forward freezes its band for flushes until it retires; a relief waits for it."""
    chain = packed()
    world = chain.world
    chain.free(FULL, chain.pages[4:5])
    world.step(writes={FULL: chain.pages[:1]}, unknown=[FULL])
    world.flush()
    assert moves(world.step()) == {}, "any unit may be the one that is written"
    world.take(4, 0, 0)
    effects = world.step()
    assert waits(effects)[0] == ("forward", world.in_flight[0])
    world.drain()


# --- what stays in place ------------------------------------------------------------------------------------


def begin(chain: Chain, kind: str, band: int, column: list[int]) -> None:
    """A send of, or a hold on, these units, in a step of its own: use 5."""
    (chain.world.send if kind == "send" else chain.world.hold)(5, {band: column})
    chain.world.step()


@pytest.mark.parametrize("kind", ["send", "hold"])
def test_units_on_transfers_stay_while_another_layout_exists(kind: str) -> None:
    """The cheapest move would be of a unit that our engine reads or a peer's row: state moves twice instead."""
    chain, pages = choice(state_holes=2)
    begin(chain, kind, FULL, chain.pages[7:])  # unit 10
    effects = chain.bind(pages[:3])
    assert moves(effects) == {STATE: [(5, 2)]}
    assert waits(effects) == []
    effects = chain.bind(pages[3:])
    assert moves(effects) == {STATE: [(4, 3)]}
    assert waits(effects) == []
    assert chain.world.where(FULL, chain.pages[7:]) == [10]
    chain.world.drain()


def test_the_host_waits_for_a_send_only_when_nothing_else_helps() -> None:
    """With no hole but those behind the sent unit, the host waits for our engine, and then the unit moves."""
    chain, pages = choice(state_holes=0)
    begin(chain, "send", FULL, chain.pages[7:])
    effects = chain.bind(pages[:3])
    assert waits(effects) == [("host", 5)]
    assert moves(effects) == {FULL: [(10, 17)]}
    kinds = [type(effect) for effect in effects]
    assert kinds.index(HostWait) < kinds.index(Copy)
    assert chain.world.chain().open_uses == 1, "the daemon has yet to release it"
    chain.world.drain()


def test_held_rows_move_without_a_wait_when_nothing_else_helps() -> None:
    """Nobody knows their addresses yet, so they may; their peer then learns the new ones."""
    chain, pages = choice(state_holes=0)
    begin(chain, "hold", FULL, chain.pages[7:])
    effects = chain.bind(pages[:3])
    assert waits(effects) == []
    assert moves(effects) == {FULL: [(10, 17)]}
    chain.world.publish(5, {FULL: chain.pages[7:]})
    chain.world.step()
    assert chain.world.chain().fixed_extents() == [None, None, (17 * 8, 18 * 8)]
    chain.world.drain()


def test_published_units_never_move_and_the_question_knows_it() -> None:
    """Fixed at 10, the unit keeps full attention from giving anything: three more window units are refused until
    the peer is done, and then had.
    """
    chain, pages = choice(state_holes=0)
    chain.world.publish(5, {FULL: chain.pages[7:]}, writes=False)
    chain.world.step()
    demand = (0, 3, 0)
    assert chain.world.logical.refusal((0, 1, 0)) is not None, "frozen until the ranks report"
    chain.world.report()
    refusal = chain.world.logical.refusal(demand)
    assert refusal is not None
    assert refusal.transfers
    assert moves(chain.bind(pages[:2])) == {}, "two have room in place"
    chain.world.end(5)
    assert chain.world.logical.refusal((0, 1, 0)) is None
    assert moves(chain.bind(pages[2:3])) == {FULL: [(10, 17)]}
    chain.world.drain()


def test_relief_works_around_a_published_unit() -> None:
    """A fixed unit in the middle of the window: what stands in the way moves past it, it stays."""
    chain = packed()
    world = chain.world
    fixed = chain.window[2:3]  # unit 8
    world.publish(5, {WINDOW: fixed}, writes=False)
    world.step()
    world.report()
    world.take(3, 0, 0)
    effects = world.step()
    assert moves(effects) == {WINDOW: [(6, 10), (7, 11)]}
    assert world.where(WINDOW, fixed) == [8]
    assert world.logical.refusal((1, 0, 0)) is not None
    world.drain()


# --- copies beside a relief ------------------------------------------------------------------------------------


def test_a_backup_does_not_keep_units_from_moving_but_guards_the_old_bytes() -> None:
    """The moved unit's old bytes go to another band, whose first writer waits for that copy, and for no other."""
    chain = packed()
    world = chain.world
    world.backup(1, {FULL: chain.pages[:1]})
    world.backup(2, {WINDOW: chain.window[:1]})  # unit 6
    world.step()
    slots = world.take(2, 0, 0)[STATE]
    effects = world.step()
    assert moves(effects) == {WINDOW: [(6, 10)]}
    assert waits(effects) == [("copy", 2)]
    assert world.where(STATE, slots) == [5, 6]
    world.end(1, 2)
    world.step(writes={STATE: slots})
    world.drain()


def test_bytes_given_up_under_copies_are_waited_for_one_by_one() -> None:
    """Freed pages that two copies read go to state unit by unit: each take waits for the copy of its own bytes."""
    world = World(hybrid_geometry(room(8 * 6, 8, 8)))
    _, pages = world.take(1, 5)
    world.step(writes={1: pages})
    quiet(world)
    assert world.where(1, pages[3:]) == [4, 3]
    world.backup(1, {1: pages[4:]})
    world.backup(2, {1: pages[3:4]})
    world.step()
    world.free({1: pages[3:]})
    world.step()
    for use, unit in ((1, 3), (2, 4)):
        (slot,) = world.take(1, 0)[0]
        assert waits(world.step()) == [("copy", use)]
        assert world.where(0, [slot]) == [unit]
        world.step(writes={0: [slot]})
    world.drain()


def test_a_loading_unit_moves_behind_its_copy() -> None:
    """A relief that must move a unit while a host copy still writes it waits for that copy first."""
    chain = packed()
    world = chain.world
    slots = world.backup(1, {WINDOW: chain.window[:1]})
    world.step()
    world.end(1)
    world.load(2, {WINDOW: chain.window[:1]}, slots)
    world.step()
    world.take(2, 0, 0)
    effects = world.step()
    assert waits(effects) == [("copy", 2)]
    assert moves(effects) == {WINDOW: [(6, 10)]}
    world.end(2)
    world.step(writes={})
    world.drain()


# --- stages and refusals ------------------------------------------------------------------------------------


def test_each_stage_rearranges_as_its_own_layout_needs() -> None:
    """The same take moves units on the stage whose pages are large, and none on the roomy one; ids stay the same."""
    world = World(hybrid_geometry(room(8 * 16, 8, 8, 8), room(8 * 40, 8, 8, 8)))
    _, _, pages = world.take(3, 0, 6)
    world.step()
    world.take(0, 4, 0, onto={WINDOW: pages[:4]})
    world.step(writes={WINDOW: pages[:4], FULL: pages})
    quiet(world)
    world.take(2, 0, 0)
    world.step()
    assert [len(moves(effects)) for effects in world.effects] == [1, 0]
    assert [world.chain(stage).relief.reliefs for stage in range(2)] == [1, 0]
    world.drain()


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_take_that_no_layout_serves_ends_the_epoch_and_changes_nothing(in_flight: bool) -> None:
    """One that the logical chain never accepts is named with every band's counts; nothing was settled or bound."""
    chain = PhysicalChain(hybrid_geometry(room(8 * 8, 8, 8, 8)), 0, Checks(OFF))

    def step(seq: int, *parts: tuple[int, list[int]]) -> None:
        chain.begin_step(seq, 0)
        chain.apply([Take([Part(band, ids(*column).tobytes()) for band, column in parts])])
        chain.end_step()

    step(1, (0, [1, 2]), (1, [1]), (2, [1, 2]))
    if in_flight:
        chain.launched(1, {2: ids(1, 2)})
    chain.begin_step(2, 0)
    chain.apply([Free([Part(0, ids(1).tobytes())])])
    chain.end_step()
    chain.begin_step(3, 0)
    before = (chain.band_counts().tolist(), chain.spans(), chain.physical(2, ids(1, 2)).tolist())
    with pytest.raises(InvariantBroken, match="no layout serves this take: state: 0 wanted") as caught:
        chain.apply([Take([Part(2, ids(*range(3, 9)).tobytes())])])
    assert caught.value.name == "chain.realizable"
    assert (chain.band_counts().tolist(), chain.spans(), chain.physical(2, ids(1, 2)).tolist()) == before
    chain.check()
