"""One rank's layout from outside: the order of taking, what pends, what a flush moves, and loud failures."""

from __future__ import annotations

import pytest

from allocator.checks import OFF, Checks
from allocator.columns import i32
from allocator.effects import Bind, Copy, Effect, WaitForward, Zero
from allocator.errors import InvariantBroken
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from allocator.ops import Free, Op, Part, Take
from allocator.physical.chain import PhysicalChain
from tests.allocator.byte_arena import PADDING
from tests.allocator.worlds import OneBand, World, full_geometry, hybrid_geometry, ids, room, stage_of

Call = tuple[object, ...]
"""A method's name and its arguments."""


def kinds(effects: list[Effect]) -> list[str]:
    """The names of effects, in order."""
    return [type(effect).__name__ for effect in effects]


def waits(effects: list[Effect]) -> list[int]:
    """The forwards that the effects wait for."""
    return [effect.seq for effect in effects if isinstance(effect, WaitForward)]


def test_the_band_grows_down_from_the_arena_end() -> None:
    """First pages lie at the top of the arena, unit u at byte u * unit bytes, above the sink."""
    world = OneBand(units=4)
    pages = world.take(4)
    world.step()
    assert world.where(pages) == [4, 3, 2, 1]
    world.free(pages)
    world.step()
    assert world.where(pages) == [0, 0, 0, 0], "a freed page reads as the sink"


def test_tail_bytes_that_hold_no_unit_stay_unused() -> None:
    """An arena that is no multiple of the unit loses its last bytes; a chain start inside a unit rounds up."""
    band = BandGeometry("full", "full", 100)
    chain = PhysicalChain(Geometry(16, 9, 0, [StageGeometry(599, 101, [band])]), 0)
    chain.begin_step(1, 0)
    chain.apply([Take([Part(0, ids(1, 2, 3).tobytes())])])
    chain.end_step()
    assert chain.physical(0, ids(1, 2, 3)).tolist() == [4, 3, 2]
    assert chain.band_counts().tolist() == [3, 0, 0, 0]


def test_a_take_zeroes_before_it_binds() -> None:
    """The effects of a take: zero its units, then bind; a free only binds to the sink."""
    world = OneBand(units=4)
    pages = world.take(2)
    effects = world.step()
    assert kinds(effects) == ["Zero", "Bind"]
    assert isinstance(effects[0], Zero)
    assert i32(effects[0].units).tolist() == [4, 3]
    assert isinstance(effects[1], Bind)
    assert i32(effects[1].physical).tolist() == [4, 3]
    world.free(pages)
    (bind,) = world.step()
    assert isinstance(bind, Bind)
    assert i32(bind.virtual).tolist() == pages
    assert i32(bind.physical).tolist() == [0, 0]


def test_holes_come_first_then_pending_then_growth() -> None:
    """A take uses holes without waiting, then settles pending batches behind their forward, then grows."""
    world = OneBand(units=6)
    pages = world.take(4)
    world.step()
    world.free([pages[3]])
    world.step(writes=[pages[0]])  # forward 2; the hole was free before it
    world.free([pages[1]])
    world.step(writes=[])  # unit of pages[1] pends behind forward 2
    assert world.counts() == {"live": 2, "hole": 1, "pending": 1, "beyond": 2}
    hole = world.take(1)
    assert waits(world.step()) == []
    assert world.where(hole) == [3]
    pending_then_new = world.take(2)
    effects = world.step()
    assert kinds(effects) == ["WaitForward", "Zero", "Bind"]
    assert waits(effects) == [2]
    assert world.where(pending_then_new) == [5, 2]


def test_pending_settles_whole_batches_oldest_first() -> None:
    """One page wanted settles the oldest batch whole; the newer batch keeps pending and no later forward is waited."""
    world = OneBand(units=4)
    pages = world.take(4)
    world.step(writes=[pages[0]])
    world.free(pages[:2])
    world.step(writes=[pages[3]])  # two units pend behind forward 1
    world.free(pages[2:3])
    world.step()  # one unit pends behind forward 2
    assert world.counts() == {"live": 1, "hole": 0, "pending": 3, "beyond": 0}
    world.take(1)
    assert waits(world.step()) == [1]
    assert world.counts() == {"live": 2, "hole": 1, "pending": 1, "beyond": 0}
    world.take(2)
    assert waits(world.step()) == [2], "the hole first, then the batch behind forward 2"


def test_a_forward_is_waited_for_once() -> None:
    """Units freed later behind a forward that the stream already waited for need no second wait."""
    world = OneBand(units=3)
    pages = world.take(3)
    world.step(writes=[])
    world.free(pages[:1])
    world.take(1)
    assert waits(world.step()) == [1]
    world.free(pages[1:2])
    world.take(1)
    assert waits(world.step()) == []


def test_processing_returns_what_pends() -> None:
    """A processed forward makes what pended behind it a hole; what pends behind the next one stays."""
    world = OneBand(units=4)
    pages = world.take(4)
    world.step(writes=[])
    world.free(pages[:1])
    world.step(writes=[])
    world.free(pages[1:3])
    world.step()
    assert world.counts()["pending"] == 3
    world.process()
    world.step()
    assert world.counts() == {"live": 1, "hole": 1, "pending": 2, "beyond": 0}
    world.process()
    world.step()
    assert world.counts() == {"live": 1, "hole": 3, "pending": 0, "beyond": 0}


def test_without_a_forward_in_flight_nothing_pends() -> None:
    """A free with nothing in flight leaves a hole at once, and the next take needs no wait."""
    world = OneBand(units=1)
    for _ in range(3):
        pages = world.take(1)
        assert waits(world.step(writes=[1])) == []
        world.process()
        world.free(pages)
        world.step()
        assert world.counts() == {"live": 0, "hole": 1, "pending": 0, "beyond": 0}


def test_a_flush_moves_the_highest_into_the_lowest_and_gives_the_rest_back() -> None:
    """Moves fill the deepest holes from the boundary, rebind the pages, and the frontier retreats."""
    world = OneBand(units=6)
    pages = world.take(6)
    world.step()
    world.free([pages[0], pages[2]])
    world.flush(8)
    effects = world.step()
    assert kinds(effects) == ["Bind", "Copy", "Bind"]
    copy = effects[1]
    assert isinstance(copy, Copy)
    assert (i32(copy.sources).tolist(), i32(copy.targets).tolist()) == ([1, 2], [6, 4])
    assert world.where(pages) == [0, 5, 0, 3, 4, 6]
    assert world.counts() == {"live": 4, "hole": 0, "pending": 0, "beyond": 2}


def test_a_flush_keeps_its_budget() -> None:
    """At most `moves_max` units move; zero moves only gives boundary holes back."""
    world = OneBand(units=8)
    pages = world.take(8)
    world.step()
    world.free([*pages[:3], pages[7]])
    world.flush(0)
    world.step()
    assert world.counts() == {"live": 4, "hole": 3, "pending": 0, "beyond": 1}
    world.flush(1)
    world.step()
    assert world.counts() == {"live": 4, "hole": 2, "pending": 0, "beyond": 2}
    world.flush(100)
    world.step()
    assert world.counts() == {"live": 4, "hole": 0, "pending": 0, "beyond": 4}


def test_a_flush_under_a_forward_vacates_and_stops_at_what_it_writes() -> None:
    """Sources stay out of circulation until their readers retire; a unit the forward writes is where moving stops."""
    world = OneBand(units=5)
    pages = world.take(5)
    world.step()
    world.free(pages[:2])
    world.step(writes=[pages[3]])
    world.flush(8)
    effects = world.step()
    assert kinds(effects) == ["Copy", "Bind"], "pages[4] moves, pages[3] is being written"
    assert waits(effects) == []
    assert world.where(pages[2:]) == [3, 2, 5]
    assert world.counts() == {"live": 3, "hole": 1, "pending": 1, "beyond": 0}
    world.process()
    world.flush(8)
    world.step()
    assert world.counts() == {"live": 3, "hole": 0, "pending": 0, "beyond": 2}


def test_vacated_units_are_taken_last_and_behind_their_readers() -> None:
    """A full arena is still realizable while moved-from units have readers: the take waits for them."""
    world = OneBand(units=4)
    pages = world.take(4)
    world.step()
    world.free(pages[:1])
    world.step(writes=[pages[1]])
    world.flush(8)
    world.step()
    assert world.counts() == {"live": 3, "hole": 0, "pending": 1, "beyond": 0}
    last = world.take(1)
    assert waits(world.step()) == [2]
    assert world.where(last) == [1]


def test_a_flush_leaves_a_band_with_pending_units_where_it_is() -> None:
    """While units pend nothing moves and the frontier does not pass them; holes at the boundary are given back."""
    world = OneBand(units=5)
    pages = world.take(5)
    world.step()
    world.free([pages[4]])
    world.step(writes=[])
    world.free([pages[0], pages[2]])
    world.flush(8)
    assert kinds(world.step()) == ["Bind"]
    assert world.counts() == {"live": 2, "hole": 0, "pending": 2, "beyond": 1}


def test_layout_digests_tell_layouts_apart() -> None:
    """Equal steps give equal digests on two ranks; one that processed earlier differs from that step on."""

    def digests(early: bool) -> list[bytes]:
        chain = PhysicalChain(full_geometry(4), 0)
        out = []
        steps: list[list[Op]] = [[Take([Part(0, ids(1, 2).tobytes())])], [Free([Part(0, ids(1).tobytes())])], [], []]
        for seq, ops in enumerate(steps, start=1):
            chain.begin_step(seq, 1 if seq > (1 if early else 3) else 0)
            chain.apply(ops)
            out.append(chain.end_step())
            if seq == 1:
                chain.launched(1, {})
        return out

    one, two, other = digests(False), digests(False), digests(True)
    assert one == two
    assert one[0] == other[0]
    assert all(a != b for a, b in zip(one[1:], other[1:], strict=True))


def test_steps_come_in_their_order() -> None:
    """Each call out of the documented order, and progress that no forward explains, is named."""

    def chain() -> PhysicalChain:
        made = PhysicalChain(full_geometry(4), 0)
        made.begin_step(1, 0)
        made.apply([])
        made.end_step()
        made.launched(1, {})
        return made

    cases: list[tuple[list[Call], str]] = [
        ([("begin_step", 3, 0)], "step 3 cannot begin: step 1 is ended"),
        ([("begin_step", 2, 2)], "in flight: 1, processed before: 0"),
        ([("begin_step", 2, -1)], "processed through -1"),
        ([("apply", [])], "apply after step 1 ended"),
        ([("end_step",)], "step 1 ends before its ops were applied"),
        ([("launched", 1, {})], "forward 1 cannot be launched"),
        ([("launched", 2, {})], "forward 2 cannot be launched"),
        ([("begin_step", 2, 1), ("begin_step", 3, 1)], "step 2 is still open"),
        ([("begin_step", 2, 1), ("launched", 2, {})], "forward 2 cannot be launched"),
        ([("begin_step", 2, 1), ("apply", []), ("apply", [])], "were applied already"),
    ]
    for calls, text in cases:
        tried = chain()
        for name, *arguments in calls[:-1]:
            getattr(tried, str(name))(*arguments)
        name, *arguments = calls[-1]
        with pytest.raises(InvariantBroken, match=text) as caught:
            getattr(tried, str(name))(*arguments)
        assert caught.value.name == "chain.step_order"


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (Free([Part(0, ids(3).tobytes())]), "band.free_of_bound_unit"),
        (Free([Part(0, ids(99).tobytes())]), "band.free_of_bound_unit"),
        (Take([Part(0, ids(1).tobytes())]), "band.take_of_unbound_id"),
        (Take([Part(0, ids(0).tobytes())]), "band.take_of_unbound_id"),
        (Take([Part(0, ids(3, 4, 5, 6).tobytes())]), "chain.realizable"),
        (Take([Part(1, ids(3).tobytes())]), "op.canonical"),
    ],
)
def test_what_cannot_be_realized_ends_the_epoch(op: Op, name: str) -> None:
    """A free of what is not bound, a take of what is, or one that does not fit raises, changing nothing."""
    chain = PhysicalChain(full_geometry(5, virtual_pages=9), 0, Checks(OFF))
    chain.begin_step(1, 0)
    chain.apply([Take([Part(0, ids(1, 2).tobytes())])])
    chain.end_step()
    chain.begin_step(2, 0)
    before = chain.band_counts().tolist()
    with pytest.raises(InvariantBroken) as caught:
        chain.apply([op])
    assert caught.value.name == name
    assert chain.band_counts().tolist() == before
    chain.check()


def test_a_forward_writes_only_bound_pages() -> None:
    """Writes of an unbound page are a defect that is named at the launch."""
    world = OneBand(units=2)
    with pytest.raises(InvariantBroken, match="forward 1 writes ids 1, which are not bound"):
        world.step(writes=[1])


def test_a_geometry_without_its_sinks_or_padding_slot_is_refused_by_name() -> None:
    """Bytes before the chain hold the sink of the largest page, and with state a slot of padding rows beside it."""
    with pytest.raises(ValueError, match="its sink needs 8 bytes before the chain, which starts at 4"):
        PhysicalChain(hybrid_geometry(stage_of(256, 4, (8,))), 0)
    with pytest.raises(ValueError, match="padding slot needs 8 bytes between the sinks, which end at 0"):
        PhysicalChain(hybrid_geometry(stage_of(256, 4, (8, 0))), 0)
    with pytest.raises(ValueError, match="padding slot needs 16 bytes between the sinks, which end at 24"):
        PhysicalChain(hybrid_geometry(stage_of(256, 32, (16, 24))), 0)


def test_the_padding_slot_lies_between_the_sinks_and_the_chain() -> None:
    """Unbound slots read as the slot just below the first one; unbound pages read as unit 0."""
    world = World(hybrid_geometry(room(64, 16, 8, 8)))
    assert [world.chain().resting_unit(band) for band in range(3)] == [1, 0, 0]
    slots, _, _ = world.take(2, 0, 1)
    world.step(writes={0: slots})  # padding rows write it beside them
    assert world.where(0, [0, *slots, 3]) == [1, 2, 3, 1]
    assert [world.stages[0][0].arena.value((0, unit)) for unit in (0, 1)] == [0, PADDING]
    world.drain()


def test_a_release_of_what_never_began_stops_there() -> None:
    """A step that releases a use nobody began, or a second time, is a defect of the stream."""
    chain = PhysicalChain(full_geometry(2), 0)
    with pytest.raises(InvariantBroken, match="use 7 is released, but not on record") as caught:
        chain.begin_step(1, 0, released=[7])
    assert caught.value.name == "use.once"


def test_a_stage_without_a_band_applies_its_ops_all_the_same() -> None:
    """Where a stage stores nothing of a kind, ops of it have no effect, reads are the sink, and digests go on."""
    geometry = hybrid_geometry(stage_of(256, 8, (0, 0, 8)), stage_of(256, 8, (0, 0, 0)))
    take: list[Op] = [Take([Part(0, ids(1).tobytes()), Part(1, ids(1, 2).tobytes()), Part(2, ids(1, 2).tobytes())])]
    stores, empty = PhysicalChain(geometry, 0), PhysicalChain(geometry, 1)
    for chain in (stores, empty):
        chain.begin_step(1, 0)
    assert kinds(stores.apply(take)) == ["Zero", "Bind"]
    assert empty.apply(take) == []
    assert stores.end_step() != empty.end_step()
    assert stores.physical(1, ids(1, 2)).tolist() == [0, 0]
    assert empty.physical(2, ids(1, 2)).tolist() == [0, 0]
    assert stores.band_counts().tolist() == [0] * 8 + [2, 0, 0, 29]
    empty.check_idle()
    with pytest.raises(InvariantBroken, match="2 units live, 0 pending at idle"):
        stores.check_idle()


def test_flush_and_frees_agree_in_any_order_within_a_step() -> None:
    """Ops of one step apply in order: a unit freed after a flush is a hole that the flush did not see."""
    world = OneBand(units=4)
    pages = world.take(4)
    world.step()
    world.flush(4)
    world.free(pages[:2])
    world.step()
    assert world.counts() == {"live": 2, "hole": 2, "pending": 0, "beyond": 0}
    world.flush(4)
    world.free(pages[2:])
    world.step()
    assert world.counts() == {"live": 0, "hole": 2, "pending": 0, "beyond": 2}
