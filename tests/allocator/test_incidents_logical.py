"""Faults of other systems that the logical chain alone decides: incidents by number, user reports by letter.

Each builds its state through public calls, takes the action, and asserts the right behaviour. `Cache` stands for what
a prefix tree may give back: it asks the read-only predicate per victim and frees once.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from allocator.capacity import CapacityRefusal, Demand
from allocator.demand import Purpose, RequestSizes, joint, request_demand
from allocator.errors import CapacityRefused, InvariantBroken
from allocator.geometry import Geometry
from allocator.logical.chain import LogicalChain
from tests.allocator.logical_world import LogicalWorld
from tests.allocator.shapes import hybrid_geometry, ids, stage_of


class Cache:
    """Cached tokens, one page and one window unit each (page size 1), the first one the first victim."""

    def __init__(self, world: LogicalWorld, tokens: int) -> None:
        self.world = world
        bands = len(world.chain.bands)
        pages = world.take((*(0,) * (bands - 2), tokens, tokens))[-1]
        self.pages = [int(page) for page in pages]
        self.asked = 0

    def per_token(self, tokens: int) -> Demand:
        """Units that so many victims give back."""
        return (*(0,) * (len(self.world.chain.bands) - 2), tokens, tokens)

    def take(self, demand: Demand) -> CapacityRefusal | None:
        """Takes, reclaiming as few tokens as it needs; a refusal has evicted nothing."""
        chain = self.world.chain
        never = chain.never_fits(demand)
        if never is not None:
            return never
        victims = 0
        self.asked = 1
        while not chain.fits(demand, self.per_token(victims)):
            if victims == len(self.pages):
                return chain.refusal(demand)
            victims += 1
            self.asked += 1
        if victims:
            gone, self.pages = self.pages[:victims], self.pages[victims:]
            parts = [None] * (len(chain.bands) - 2)
            self.world.free(*parts, ids(*gone), ids(*gone))
        self.world.take(demand)
        return None


def two_pools(cached: int) -> tuple[LogicalWorld, Cache]:
    """Full 4 free, window 4 free, and together only 3 tokens, beside what is cached."""
    geometry = hybrid_geometry(stage_of(8 * (2 * cached + 8), 8, (0, 8, 8)), pages=cached + 4, slots=0)
    geometry = Geometry(1, geometry.virtual_pages, 0, geometry.stages)
    world = LogicalWorld(geometry)
    cache = Cache(world, cached)
    assert world.chain.free_estimate()[1:] == (4, 4)
    assert world.chain.max_extra(per=(0, 1, 1)) == 3
    return world, cache


def three_pools(cached: int) -> tuple[LogicalWorld, Cache]:
    """The same beside two live states in the same arena, each three times as large as a page."""
    stage = stage_of(24 * 3 + 8 * (2 * cached + 7), 24, (24, 8, 8))
    world = LogicalWorld(Geometry(1, cached + 4, 3, [stage]))
    world.take((2, 0, 0))
    cache = Cache(world, cached)
    assert world.chain.free_estimate()[1:] == (4, 4)
    assert world.chain.max_extra(per=(0, 1, 1)) == 3
    return world, cache


@pytest.mark.parametrize("pools", [two_pools, three_pools])
@pytest.mark.parametrize(("tokens", "victims"), [(3, 0), (4, 1), (6, 3)])
def test_incident_18_a_joint_demand_reclaims_as_little_as_it_needs(pools: object, tokens: int, victims: int) -> None:
    """With 4 and 4 free and 3 together: 3 tokens take nothing from the cache, 4 take one of it, 6 take three."""
    world, cache = pools(20)  # type: ignore[operator]
    demand = (*(0,) * (len(world.chain.bands) - 2), tokens, tokens)
    assert (world.chain.refusal(demand) is None) == (victims == 0)
    assert cache.take(demand) is None
    assert len(cache.pages) == 20 - victims
    assert cache.asked == victims + 1
    world.step()


@pytest.mark.parametrize("pools", [two_pools, three_pools])
def test_incident_12_an_impossible_demand_leaves_all_cached_tokens(pools: object) -> None:
    """200 tokens can never fit beside nothing: refused for ever, with all 96 cached tokens and the digest as before."""
    world, cache = pools(96)  # type: ignore[operator]
    before = world.chain.state_digest()
    bands = len(world.chain.bands)
    refusal = cache.take((*(0,) * (bands - 2), 200, 200))
    assert refusal is not None
    assert refusal.never
    assert len(cache.pages) == 96
    assert world.chain.state_digest() == before
    # What would fit an empty arena, but not beside pages that nobody can give back, is `not now`, and costs as little.
    locked = cache.pages[:90]
    cache.pages = cache.pages[90:]
    later = cache.take((*(0,) * (bands - 2), 60, 60))
    assert later is not None
    assert not later.never
    assert len(cache.pages) + len(locked) == 96
    assert world.chain.state_digest() == before


def test_incident_13_a_deep_reclaim_asks_without_changing_and_acts_once() -> None:
    """For 90 victims the predicate is asked 91 times, one op frees and one takes, and no question changed anything."""
    world, cache = two_pools(96)
    world.step()
    before = world.chain.state_digest()
    for victims in range(96):
        world.chain.fits((0, 93, 93), cache.per_token(victims))
    assert world.chain.state_digest() == before
    assert cache.take((0, 93, 93)) is None
    assert len(cache.pages) == 6
    assert cache.asked == 91
    assert len(world.ops) == 2
    world.step()


def test_incident_4_whatever_is_freed_in_one_pass_is_counted_in_it() -> None:
    """Frees of every kind between two questions of one step raise the second answer, unit by unit."""
    world = LogicalWorld(hybrid_geometry(stage_of(8 * 25, 8, (8, 8, 8)), pages=12, slots=6))
    world.take((4, 10, 10))
    assert world.chain.refusal((0, 0, 1)) is not None
    for count in range(1, 5):
        world.free(ids(count), ids(count), None)
        assert world.chain.refusal((0, 0, min(2, 2 * count))) is None
        assert world.chain.free_estimate()[0] == min(2 + count, 2 * count)
    world.free(None, ids(*range(5, 11)), ids(*range(1, 11)))
    assert world.chain.refusal((6, 9, 9)) is None
    world.step()


def test_incident_16_a_load_is_priced_with_what_its_pass_has_promised() -> None:
    """Each of two demands fits alone; the joint one does not, and its refusal names what both lack."""
    world = LogicalWorld(hybrid_geometry(stage_of(8 * 21, 8, (8, 8, 8)), pages=20, slots=4))
    bands = world.chain.bands
    world.take((2, 3, 3))
    load = request_demand(bands, 16, RequestSizes(64, 0), Purpose.LOAD_BACK)
    decode = (0, 2, 2)
    assert load == (1, 4, 4)
    assert world.chain.refusal(load) is None
    assert world.chain.refusal(decode) is None
    both = joint([load, decode])
    refusal = world.chain.refusal(both)
    assert refusal is not None
    assert refusal.units_short == 1
    assert refusal.wanted == (1, 6, 6)
    world.free(None, ids(1), None)
    assert world.chain.refusal(both) is None


def test_incident_19_a_dead_peers_pages_wait_for_proof_however_long() -> None:
    """No number of steps gives them back; they are counted and reported as quarantined, and recovered on the proof."""
    world = LogicalWorld()
    _, window, pages = world.take((0, 4, 4))
    world.do(world.chain.hold(1, [None, window, pages]))
    world.step()
    world.do(world.chain.publish(1, [None, window, pages]))
    world.step()
    world.fixed([None, (16, 32), (448, 480)], 1)
    world.free(None, window, pages)
    for _ in range(1_000):
        world.step()
    assert world.chain.quarantined() == (0, 4, 4)
    assert world.chain.live_units() == (0, 4, 4)
    assert world.take((0, 1, 1))[2].tolist() == [5]
    assert world.end(1) == [(1, [1, 2, 3, 4]), (2, [1, 2, 3, 4])]
    world.step()
    assert world.chain.quarantined() == (0, 0, 0)
    assert world.take((0, 4, 4))[2].tolist() == [1, 2, 3, 4]


def test_incident_19_a_send_that_never_ends_costs_its_units_and_nothing_else() -> None:
    """An engine is stuck on three pages of a full arena: freed, they are not handed out, so no rank waits for it."""
    world = LogicalWorld(hybrid_geometry(stage_of(8 * 12, 8, (0, 8, 8)), pages=11, slots=0))
    chain = world.chain
    world.take((0, 0, 11))
    world.step()
    world.do(chain.send(1, [None, None, ids(1, 2, 3)]))
    world.step()
    assert world.free(None, None, ids(1, 2, 3)) == []
    world.step()
    refusal = chain.refusal((0, 0, 3))
    assert refusal is not None
    assert refusal.transfers
    assert not refusal.never
    world.free(None, None, ids(10, 11))
    assert world.take((0, 0, 2))[2].tolist() == [10, 11]
    assert chain.refusal((0, 0, 1)) is not None
    world.step()
    world.do(chain.fix(1))  # the daemon's patience is over: no rank waits for it from here on, not even to move
    world.step()
    world.fixed([None, None, (72, 96)], 1)
    world.free(None, None, ids(*range(4, 12)))
    for _ in range(100):
        world.step()
    assert chain.quarantined() == chain.live_units() == (0, 0, 3)
    assert chain.max_extra(per=(0, 1, 1)) == 4
    assert chain.never_fits((0, 0, 8)) is None
    assert world.end(1) == [(2, [1, 2, 3])]
    world.step()
    chain.check_idle()
    world.mirror.check_idle()


def test_a_unit_that_a_peer_reads_makes_nobody_impossible() -> None:
    """Its holder has it still, low in the arena: who does not fit around it is told `not now`, with the reason."""
    world = LogicalWorld(hybrid_geometry(stage_of(8 * 12, 8, (0, 8, 8)), pages=40, slots=0))
    world.take((0, 0, 8))
    world.free(None, None, ids(*range(1, 8)))
    world.do(world.chain.publish(1, [None, None, ids(8)]))
    world.step()
    for report in (False, True):
        if report:
            world.fixed([None, None, (32, 40)], 1)
        refusal = world.chain.refusal((0, 5, 5))
        assert refusal is not None
        assert (refusal.never, refusal.transfers) == (False, True)
        assert world.chain.never_fits((0, 5, 5)) is None
        assert world.chain.never_fits((0, 6, 6)) is not None
    world.end(1)
    world.step()
    assert world.chain.refusal((0, 5, 5)) is None
    assert world.chain.refusal((0, 6, 6)).never  # type: ignore[union-attr]


def test_incident_20_a_checkpoint_is_never_missing_for_its_owner() -> None:
    """All slots out: giving a checkpoint to the cache is refused and changes nothing; the owner's two slots remain."""
    world = LogicalWorld(hybrid_geometry(stage_of(512, 8, (8, 4, 8)), pages=24, slots=4))
    chain = world.chain
    demand = request_demand(chain.bands, 16, RequestSizes(40, 8, checkpoint_interval=16), Purpose.CEILING)
    assert demand[0] == 2
    first = world.take((2, 0, 0))[0]
    second = world.take((2, 0, 0))[0]
    before = chain.state_digest()
    with pytest.raises(CapacityRefused, match="band state on the id space is 1 units short"):
        chain.take((1, 0, 0))  # the replacement that a gift needs
    assert chain.state_digest() == before
    for working, checkpoint in (first, second):
        for _ in range(3):
            world.do(chain.copy_state(ids(working), ids(checkpoint)))
            world.step()
    assert chain.live_units() == (4, 0, 0)


def test_incident_22_a_refusal_says_whose_memory_is_short() -> None:
    """Of two stages, three bands, ids and transfers: the stage, the band, the units short and what must end first."""
    roomy, tight = stage_of(8 * 100, 8, (8, 8, 8)), stage_of(8 * 16, 8, (16, 4, 8))
    world = LogicalWorld(hybrid_geometry(roomy, tight, pages=50, slots=3))
    world.take((2, 4, 4))
    freed = "must be freed first"
    texts = {
        (2, 0, 0): f"band state on the id space is 1 units short (2 wanted beside 10 live): 1 units of state {freed}",
        (0, 0, 6): f"band full on stage 1 is 2 units short (6 wanted beside 10 live): 2 units of full {freed}",
        (0, 0, 60): "band full on the id space is 14 units short (60 wanted beside 10 live): "
        "not even an empty arena holds this demand",
    }
    for demand, text in texts.items():
        refusal = world.chain.refusal(demand)
        assert refusal is not None
        assert refusal.text() == text


def test_U1_bytes_of_one_kind_pay_for_another() -> None:
    """Cached pages fill the arena; each request that needs a state gets one after a few pages, and none is refused."""
    world = LogicalWorld(Geometry(1, 100, 12, [stage_of(24 * 2 + 8 * 88, 24, (24, 8, 8))]))
    cache = Cache(world, 44)
    shrunk = [len(cache.pages)]
    for _ in range(6):
        assert cache.take((1, 1, 1)) is None
        shrunk.append(len(cache.pages))
    assert all(0 <= before - after <= 3 for before, after in pairwise(shrunk))
    assert shrunk[-1] > 0
    assert world.chain.live_units()[0] == 6
    world.step()


def test_U2_above_the_arena_nothing_is_asked_of_the_cache() -> None:
    """One token more than is free is served by one victim; far more than the arena is refused without a question."""
    world, cache = two_pools(10)
    assert cache.take((0, 4, 4)) is None
    assert len(cache.pages) == 9
    cache.asked = 0
    assert cache.take((0, 500, 500)) is not None
    assert (cache.asked, len(cache.pages)) == (0, 9)
    world.step()


def test_U8_slots_held_at_the_peak_are_the_slots_charged() -> None:
    """With and without a checkpoint slot, admission charges exactly what the request then holds, and the last fits."""
    for interval, slots in ((0, 1), (16, 2)):
        world = LogicalWorld(hybrid_geometry(stage_of(4096, 8, (8, 4, 8)), pages=90, slots=10))
        sizes = RequestSizes(20, 4, chunk_tokens=20, checkpoint_interval=interval)
        charged = request_demand(world.chain.bands, 16, sizes, Purpose.ADMIT)
        assert charged[0] == slots
        running = 0
        while world.chain.refusal(charged) is None:
            world.take(charged)
            running += 1
        assert running == 10 // slots
        assert world.chain.live_units()[0] == 10, "no slot is budgeted and unused"
        world.step()


def test_S1_one_slot_short_takes_nothing_of_any_kind() -> None:
    """For every k: with k - 1 slots free a request of k waits, holds nothing, and runs when one slot comes back."""
    for k in (1, 2, 3):
        world = LogicalWorld(hybrid_geometry(stage_of(4096, 8, (8, 4, 8)), pages=90, slots=6))
        others = world.take((6 - k + 1, 2, 2))
        before = world.chain.state_digest()
        with pytest.raises(CapacityRefused, match="band state on the id space is 1 units short"):
            world.chain.take((k, 3, 3))
        assert world.chain.state_digest() == before
        world.free(others[0][:1], None, None)
        assert world.take((k, 3, 3))[0].size == k
        world.step()


def test_S2_a_checkpoint_that_nobody_has_room_for_is_no_error_of_its_request() -> None:
    """All spare slots are read by stalled host copies: the gift is refused, decoding goes on, later it is given."""
    world = LogicalWorld(hybrid_geometry(stage_of(4096, 8, (8, 4, 8)), pages=90, slots=4))
    mine = world.take((2, 2, 2))[0]
    cached = world.take((2, 0, 0))[0]
    world.do(world.chain.backup(1, [cached, None, None], [np.arange(2), None, None]))
    world.step()
    for mark in range(5):
        assert world.chain.refusal((1, 0, 0)) is not None
        world.do(world.chain.copy_state(mine[:1], mine[1:]))
        world.take((0, 1, 1))
        world.step()
        assert world.chain.live_units() == (4, 3 + mark, 3 + mark)
    world.end(1)
    world.free(cached, None, None)
    assert world.take((1, 0, 0))[0].tolist() == [3]
    world.step()


def test_S4_sessions_leave_slots_and_windows_as_they_were() -> None:
    """10,000 sessions with working and checkpoint slots: the answer at the end is the one at the start."""
    world = LogicalWorld(hybrid_geometry(stage_of(512, 8, (8, 4, 8)), pages=24, slots=6))
    world.chain.checks.level = 1
    chain = world.chain
    at_boot = [chain.max_extra(per=per) for per in ((1, 0, 0), (0, 1, 1), (0, 0, 1))]
    open_: list[tuple[np.ndarray, ...]] = []
    for session in range(10_000):
        if len(open_) == 3:
            slots, window, pages = open_.pop(session % 3)
            chain.free([slots, window, pages])
        open_.append(chain.take((2, 1 + session % 3, 1 + session % 3)).ids)
    for slots, window, pages in open_:
        chain.free([slots, window, pages])
    assert [chain.max_extra(per=per) for per in ((1, 0, 0), (0, 1, 1), (0, 0, 1))] == at_boot
    chain.check()
    chain.check_idle()


def test_W1_rows_that_left_the_window_pay_before_anyone_is_retracted() -> None:
    """The arena is full of expired window units: retiring them, and nothing else, makes the decode step fit."""
    world = LogicalWorld(hybrid_geometry(stage_of(8 * 21, 8, (0, 8, 8)), pages=20, slots=0))
    first = world.take((0, 5, 5))
    world.take((0, 5, 5))
    world.step()
    step = (0, 1, 1)
    refusal = world.chain.refusal(step)
    assert refusal is not None
    assert not refusal.never
    world.free(None, first[1][:3], None)
    assert world.chain.refusal(step) is None
    world.take(step)
    assert world.chain.live_units() == (0, 8, 11)
    world.step()


@pytest.mark.parametrize("page", [1, 16, 256])
def test_W3_rejected_drafts_leave_no_page_behind(page: int) -> None:
    """Pages taken for drafts and given back when these are rejected: owners' pages equal the chain's at every step."""
    geometry = hybrid_geometry(stage_of(8 * 401, 8, (0, 4, 8)), pages=300, slots=0)
    world = LogicalWorld(Geometry(page, 300, 0, geometry.stages))
    rng = np.random.default_rng(page)
    owned: list[int] = []
    tokens = 1
    for _ in range(150):
        wanted = -(-(tokens + 4) // page) - len(owned)
        if wanted > 0:
            owned += world.take((0, wanted, wanted))[2].tolist()
        tokens += int(rng.integers(1, 5))
        keep = -(-tokens // page)
        if len(owned) > keep:
            world.free(None, ids(*owned[keep:]), ids(*owned[keep:]))
            owned = owned[:keep]
        world.step()
        assert world.chain.live_ids(2).tolist() == world.chain.live_ids(1).tolist() == sorted(owned)
        if len(owned) > 60:
            world.free(None, ids(*owned), ids(*owned))
            owned, tokens = [], 1
    assert world.chain.max_extra(per=(0, 1, 1)) == 266 - len(owned)


def test_W6_a_page_that_reenters_its_window_is_freed_once() -> None:
    """Retired, bound again onto the same page while a host copy reads it, freed: a second free names page and band."""
    world = LogicalWorld()
    _, window, pages = world.take((0, 3, 3))
    for use in range(1, 40):
        world.do(world.chain.backup(use, [None, window, pages], [None, np.arange(3), np.arange(3)]))
        world.step()
        world.free(None, window[:1], None)
        world.refuses("band.free_of_bound_unit", lambda: world.chain.free([None, window[:1], None]), "window:64: ids 1")
        assert world.take((0, 1, 0), onto=(None, window[:1], None))[1].tolist() == [1]
        world.step()
        assert sum(world.chain.live_units()) == 6
        world.end(use)
        world.step()
    world.free(None, window, pages)
    with pytest.raises(InvariantBroken, match=r"page ids 1, 2, 3 are free already: a repeated free"):
        world.chain.free([None, None, pages])
    world.step()
    world.chain.check_idle()
    assert world.chain.max_extra() == LogicalChain(world.geometry).max_extra()
