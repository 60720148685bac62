"""Fixed extents on the logical chain: the freeze after a publication, what reports change, what refusals say."""

from __future__ import annotations

import pytest

from allocator.capacity import FROZEN, CapacityForm
from allocator.errors import CapacityRefused
from tests.allocator.logical_world import LogicalWorld
from tests.allocator.shapes import full_geometry, hybrid_geometry, ids, stage_of


def published(extent: tuple[int, int] | None = None, pages: int = 10) -> LogicalWorld:
    """One band of 256-byte pages, page 1 published by use 1, and reported there if an extent is given."""
    world = LogicalWorld(full_geometry(pages))
    world.take((2,))
    world.do(world.chain.publish(1, [ids(1)]))
    world.step()
    if extent is not None:
        world.fixed([extent], 1)
    return world


def test_no_band_grows_until_the_ranks_report() -> None:
    """From a publication on, counts may fall and return to what they were, never above; the report ends that."""
    world = published()
    chain = world.chain
    refusal = chain.refusal((1,))
    assert refusal is not None
    assert (refusal.stage, refusal.band_name, refusal.units_short, refusal.never) == (FROZEN, "full", 1, False)
    assert refusal.text().endswith("the ranks must report where the published units lie first")
    assert chain.never_fits((9,)) is None, "a freeze ends by itself"
    assert chain.max_extra() == 0
    world.free(ids(2))
    assert chain.max_extra() == 1
    assert world.take((1,))[0].tolist() == [2]
    with pytest.raises(CapacityRefused, match="the ranks must report"):
        chain.take((1,))
    world.fixed([(256, 512)], 1)
    assert chain.max_extra() == 8


def test_only_the_last_publication_report_ends_the_freeze() -> None:
    """Reports of an earlier publication leave it; one that is over by now still needs a report of its state."""
    world = published()
    world.do(world.chain.publish(2, [ids(2)]))
    world.step()
    world.fixed([(256, 512)], 1)
    assert world.chain.max_extra() == 0
    world.fixed([(256, 768)], 2)
    assert world.chain.max_extra() == 8
    world.do(world.chain.publish(3, [ids(2)]))
    world.step()
    assert world.chain.max_extra() == 0
    world.end(3)
    world.step()
    world.fixed([(256, 768)], 2)
    assert world.chain.max_extra() == 0, "the report through 3 is on its way, and it shows the unit of 3"
    world.fixed([(256, 768)], 3)
    assert world.chain.max_extra() == 8
    world.fixed([(256, 768)], 3)
    assert world.chain.max_extra() == 8
    with pytest.raises(ValueError, match="through use 4, and the newest is 3"):
        world.fixed([(256, 768)], 4)


def test_a_freeze_counts_from_the_newest_publication() -> None:
    """What was freed between two publications does not come back before the report."""
    world = published()
    world.free(ids(2))
    world.do(world.chain.publish(2, [ids(1)]))
    world.step()
    assert world.chain.refusal((1,)) is not None
    world.fixed([(256, 512)], 2)
    assert world.chain.max_extra() == 9


def test_a_report_counts_publications_in_their_order_though_they_are_over() -> None:
    """Two publications in one step, the newer one over before the report: it covers both, and the freeze ends."""
    world = published()
    world.do(world.chain.hold(2, [ids(2)]))
    world.do(world.chain.publish(3, [ids(1)]))
    world.do(world.chain.publish(2, [ids(2)]))
    world.step()
    world.end(2)
    world.step()
    assert world.chain.max_extra() == 0, "not before the report"
    world.fixed([(256, 512)], 3)
    assert world.chain.max_extra() == 0, "2 was published after 3"
    world.fixed([(256, 768)], 2)
    assert world.chain.max_extra() == 8
    world.fixed([(256, 512)], 3)
    world.fixed([None], 0)
    world.fixed([(256, 512)], 2)
    assert world.chain.max_extra() == 8


def test_a_late_report_is_no_disagreement() -> None:
    """What lies where a transfer was that is over by now: the counts that grew since fit what is still fixed."""
    geometry = hybrid_geometry(stage_of(8 * 12, 8, (0, 8, 8)), pages=40)
    world = LogicalWorld(geometry)
    world.take((0, 0, 8))
    world.do(world.chain.publish(1, [None, None, ids(1)]))
    world.step()
    world.fixed([None, None, (88, 96)], 1)
    world.do(world.chain.publish(2, [None, None, ids(8)]))
    world.step()
    world.end(2)
    world.free(None, None, ids(3, 4, 5, 6, 7, 8))
    world.step()
    assert world.chain.max_extra(per=(0, 1, 1)) == 0, "the freeze lasts although 2 is over"
    world.take((0, 0, 6))
    world.fixed([None, None, (32, 96)], 2)  # as of the step that published 2
    assert world.chain.max_extra((0, 1, 0), (0, 1, 0)) == 2, "what only 2 fixed is known to be free by its own report"
    world.fixed([None, None, (88, 96)], 2)  # as of the step that released it
    world.free(None, None, ids(3, 4, 5, 6, 7, 8))
    assert world.chain.max_extra(per=(0, 1, 1)) == 4
    world.take((0, 4, 4))
    world.fixed([None, None, (32, 96)], 2)  # the older one once more
    world.step()


def test_a_fixed_send_freezes_and_counts_as_a_publication() -> None:
    """From `fix` no band grows until the report through it; a stage that waited for the send has nothing to report."""
    stages = [stage_of(8 * 12, 8, (0, 8, 8))] * 2
    world = LogicalWorld(hybrid_geometry(*stages, pages=40))
    _, _, pages = world.take((0, 0, 3))
    chain = world.chain
    world.do(chain.send(1, [None, None, pages[:1]]))
    world.do(chain.publish(2, [None, None, pages[1:2]]))
    world.step()
    lent = (None, None, (80, 88))
    chain.extents_fixed((lent, lent), 2)
    assert chain.refusal((0, 1, 0)) is None, "an open send freezes nothing"
    world.do(chain.fix(1))
    world.step()
    refusal = chain.refusal((0, 1, 0))
    assert refusal is not None
    assert refusal.stage == FROZEN
    assert not refusal.never
    chain.extents_fixed((lent, lent), 2)
    assert chain.refusal((0, 1, 0)) is not None
    chain.extents_fixed(((None, None, (24, 88)), lent), 1)
    assert chain.max_extra(per=(0, 1, 0)) == 2
    world.end(2)
    world.step()
    chain.extents_fixed(((None, None, (24, 32)), (None, None, None)), 1)
    assert chain.max_extra(per=(0, 1, 0)) == 2
    world.end(1)
    assert chain.max_extra(per=(0, 1, 0)) == 8
    world.step()


def test_extents_bind_the_neighbours_until_the_use_ends() -> None:
    """A page fixed low in the arena bounds the window band below it; the end of the transfer unbinds it at once."""
    geometry = hybrid_geometry(stage_of(8 * 41, 8, (0, 8, 8)), pages=40)
    world = LogicalWorld(geometry)
    world.take((0, 1, 1))
    chain = world.chain
    free = chain.max_extra(per=(0, 1, 1))
    assert free == 19
    world.do(chain.publish(1, [None, None, ids(1)]))
    world.step()
    # The page lies at [80, 88), far from the end: windows must end at byte 80 at most, and nine fit below it.
    world.fixed([None, None, (80, 88)], 1)
    assert chain.max_extra(per=(0, 1, 1)) == 8
    refusal = chain.refusal((0, 9, 9))
    assert refusal is not None
    assert refusal.transfers
    assert not refusal.never
    assert refusal.text().endswith("1 units of window:64 must be freed first, or transfers must end")
    more = chain.refusal((0, 11, 11))
    assert more is not None
    assert more.transfers
    assert not more.never, "its owner still has the page: where a peer reads it is nothing for ever"
    assert chain.never_fits((0, 20, 20)) is None
    assert chain.never_fits((0, 21, 20)) is not None
    assert chain.most_ever((0, 1, 1)) == 20
    world.end(1)
    assert chain.refusal((0, 11, 11)) is None
    world.step()
    world.fixed([None, None, (80, 88)], 1)
    assert chain.max_extra(per=(0, 1, 1)) == free, "an old report of a band with nothing published fixes nothing"


def test_quarantined_units_count_in_what_can_never_fit() -> None:
    """`never` and `most_ever` ask about an arena that holds only what is quarantined."""
    world = published((256, 512))
    world.free(ids(1, 2))
    chain = world.chain
    assert chain.quarantined() == (1,)
    assert chain.most_ever() == 9
    refusal = chain.refusal((10,))
    assert refusal is not None
    assert refusal.never
    assert refusal.transfers
    assert refusal.text().endswith("arena freed of all but what transfers keep holds it; those must end first")
    assert chain.never_fits((10,)) is not None
    assert chain.never_fits((9,)) is None
    eleven = chain.refusal((11,))
    assert eleven is not None
    assert "not even an empty arena" in eleven.text()
    world.end(1)
    assert chain.most_ever() == 10


@pytest.mark.parametrize(
    ("extent", "text"),
    [
        ((0, 256), r"fixed bytes \[0, 256\) are no units of 256 bytes inside \[256, 2816\)"),
        ((256, 500), "are no units"),
        ((300, 512), "are no units"),
        ((512, 512), "are no units"),
        ((2560, 3072), "are no units"),
    ],
)
def test_extents_that_are_none_are_refused(extent: tuple[int, int], text: str) -> None:
    """Bytes outside the chain, off the band's grid or empty change nothing and are named."""
    world = published()
    before = world.chain.state_digest()
    with pytest.raises(ValueError, match=text):
        world.fixed([extent], 1)
    with pytest.raises(ValueError, match="1 bands"):
        world.chain.extents_fixed(((None, None),), 1)
    assert world.chain.state_digest() == before


def test_reports_that_cannot_be_are_found() -> None:
    """Extents that what is live does not fit around, and none where a unit is published, break the agreement."""
    world = published()
    world.refuses("chain.stage_capacity_agreement", lambda: world.fixed([None], 1), "reports none fixed")
    geometry = hybrid_geometry(stage_of(8 * 11, 8, (0, 8, 8)), pages=10)
    world = LogicalWorld(geometry)
    world.take((0, 3, 3))
    world.do(world.chain.publish(1, [None, None, ids(1)]))
    world.step()
    world.refuses("chain.stage_capacity_agreement", lambda: world.fixed([None, None, (16, 24)], 1), "do not fit")
    world.fixed([None, None, (32, 40)], 1)


def test_answers_are_remembered_per_epoch_of_capacity() -> None:
    """Every change that can change an answer raises the epoch; questions and steps do not."""
    world = LogicalWorld(full_geometry(8))
    chain = world.chain
    epochs = [chain.epoch]

    def rose() -> bool:
        epochs.append(chain.epoch)
        return epochs[-1] > epochs[-2]

    world.take((2,))
    assert rose()
    chain.refusal((1,))
    chain.max_extra()
    chain.never_fits((9,))
    chain.state_digest()
    assert not rose()
    world.do(chain.publish(1, [ids(1)]))
    assert rose()
    world.step()
    assert not rose()
    world.fixed([(256, 512)], 1)
    assert rose()
    world.free(ids(2))
    assert rose()
    world.end(1)
    assert rose()


def test_U6_a_transfer_toggled_a_hundred_times_leaves_answers_exact() -> None:
    """After every publication, report and release answers equal a recount; at the end capacity is as at boot."""
    geometry = hybrid_geometry(stage_of(8 * 41, 8, (8, 8, 8)), pages=30, slots=5)
    world = LogicalWorld(geometry)
    chain = world.chain
    free = chain.max_extra(per=(0, 1, 1))
    for use in range(1, 101):
        low = 80 + 8 * (use % 9)
        _, _, pages = world.take((1, 2, 2))
        world.do(chain.publish(use, [None, None, pages]))
        world.step()
        extents = ((None, None, (low, low + 16)),)
        chain.extents_fixed(extents, use)
        fresh = CapacityForm(geometry, extents)
        for n in range(12):
            demand = (n % 3, n, n)
            assert chain.refusal(demand) == fresh.refusal(chain.live_units(), demand, chain.quarantined())
        world.free(ids(1), pages, pages)
        assert chain.quarantined() == (0, 0, 2)
        world.step()
        world.end(use)
        bare = CapacityForm(geometry)
        assert chain.refusal((0, 20, 20)) == bare.refusal(chain.live_units(), (0, 20, 20))
        world.step()
        assert chain.max_extra(per=(0, 1, 1)) == free
    chain.check_idle()
    world.mirror.check_idle()
