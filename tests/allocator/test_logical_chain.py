"""The logical chain and the mirror: ids, joint takes, digests, and what they refuse loudly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.checks import OFF, STRICT, WARN, Checks
from allocator.errors import CapacityRefused, InvariantBroken
from allocator.logical.chain import LogicalChain
from allocator.logical.mirror import LogicalMirror
from allocator.ops import Flush, Free, Op, Part, Take
from tests.allocator.shapes import full_geometry, hybrid_geometry, ids, stage_of


def strict(geometry: object) -> LogicalChain:
    """A chain with every check on."""
    return LogicalChain(geometry, Checks(STRICT))  # type: ignore[arg-type]


def hybrid() -> LogicalChain:
    """State, a window and full attention in one arena with room for a few of each."""
    return strict(hybrid_geometry(stage_of(256, 8, (8, 4, 8)), pages=20, slots=4))


def test_ids_are_the_lowest_free_ones() -> None:
    """Freed ids come back before higher ones, lowest first; 0, the sink, is never handed out."""
    chain = strict(full_geometry(10))
    assert chain.take((4,)).ids[0].tolist() == [1, 2, 3, 4]
    chain.free([ids(3, 1)])
    assert chain.take((3,)).ids[0].tolist() == [1, 3, 5]


def test_a_refused_take_changes_nothing() -> None:
    """The take that does not fit raises with the refusal's text, and the chain is byte for byte as before."""
    chain = hybrid()
    chain.take((1, 2, 2))
    before = chain.state_digest()
    refusal = chain.refusal((0, 0, 50))
    assert refusal is not None
    with pytest.raises(CapacityRefused, match="band full on the id space is 32 units short"):
        chain.take((0, 0, 50))
    assert chain.state_digest() == before
    assert chain.refusal((0, 0, 50)) == refusal


def test_a_take_of_windows_binds_pages_taken_with_it() -> None:
    """By default every page gets a window unit; `bound` names which; another count is an error before any change."""
    chain = hybrid()
    _, window, pages = chain.take((0, 3, 3)).ids
    assert window.tolist() == pages.tolist() == [1, 2, 3]
    _, window, pages = chain.take((0, 2, 4), bound=(None, ids(2, 3), None)).ids
    assert pages.tolist() == [4, 5, 6, 7]
    assert window.tolist() == [6, 7]
    before = chain.state_digest()
    for bound in (None, (None, ids(0), None), (None, ids(1, 4), None), (None, ids(1, 1), None)):
        with pytest.raises(ValueError, match="do not match"):
            chain.take((0, 2, 4), bound=bound)
    assert chain.state_digest() == before
    chain.check()


def test_a_window_unit_is_released_before_or_with_its_page() -> None:
    """Retiring a window unit and freeing its page are independent; a page cannot leave its window unit behind."""
    chain = hybrid()
    chain.take((1, 3, 3))
    chain.free([None, ids(1), None])
    with pytest.raises(InvariantBroken, match=r"window_segment_released.*pages 2 still hold"):
        chain.free([None, None, ids(1, 2)])
    chain.free([None, None, ids(1)])
    chain.free([ids(1), ids(2, 3), ids(2, 3)])
    chain.check_idle()
    with pytest.raises(InvariantBroken, match="hold no unit: a repeated free"):
        chain.free([None, ids(2), None])


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ([ids(9)], "ids 9 are free already: a repeated free"),
        ([ids(1, 1)], "ids 1 named twice"),
        ([ids(0)], "ids 0 lie outside 1..10"),
        ([ids(-1, 2)], "ids -1 lie outside"),
        ([ids(2, 11)], "ids 11 lie outside"),
    ],
)
def test_W6_a_repeated_free_fails_loudly(parts: list[np.ndarray], name: str) -> None:
    """Freeing what is not live, or twice, names the ids and changes nothing: at every level of checks."""
    for level in (OFF, WARN, STRICT):
        chain = LogicalChain(full_geometry(10), Checks(level))
        chain.take((4,))
        before = chain.state_digest()
        with pytest.raises(InvariantBroken, match=name) as caught:
            chain.free(parts)
        assert caught.value.name == "band.free_of_bound_unit"
        assert chain.state_digest() == before
        assert chain.live_units() == (4,)


def test_the_mirror_stops_at_an_op_that_no_correct_chain_made() -> None:
    """Taking a live id, freeing a free one, ids or parts out of order, and a broken column each stop the mirror."""
    geometry = full_geometry(10)
    taken = Take([Part(0, ids(1, 2).tobytes())])
    cases: list[tuple[Op, str]] = [
        (Take([Part(0, ids(2, 3).tobytes())]), "page ids 2 are live already"),
        (Free([Part(0, ids(2, 3).tobytes())]), "page ids 3 are free already"),
        (Take([Part(0, ids(4, 3).tobytes())]), "do not ascend strictly"),
        (Take([Part(0, ids(4, 4).tobytes())]), "do not ascend strictly"),
        (Take([Part(0, b"")]), "with 0 ids"),
        (Take([Part(1, ids(4).tobytes())]), "part of band 1"),
        (Take([Part(0, ids(4).tobytes()), Part(0, ids(5).tobytes())]), "part of band 0"),
        (Take([Part(0, b"abcde")]), "5 bytes are no int32 column"),
        (Take([Part(0, ids(11).tobytes())]), "lie outside 1..10"),
        (Flush(-1), "a flush of -1 moves"),
    ]
    for op, text in cases:
        mirror = LogicalMirror(geometry)
        mirror.apply_step(1, [taken])
        with pytest.raises(InvariantBroken, match=text):
            mirror.apply_step(2, [op])


def test_the_mirror_knows_windows() -> None:
    """A window part must name pages that are live after the op and hold no unit yet."""
    geometry = hybrid_geometry(stage_of(256, 8, (8, 4, 8)), pages=20, slots=4)

    def after(*ops: Take | Free) -> LogicalMirror:
        mirror = LogicalMirror(geometry)
        mirror.apply_step(1, list(ops))
        return mirror

    page = Part(2, ids(1).tobytes())
    window = Part(1, ids(1).tobytes())
    both = after(Take([window, page]))
    assert both.live_units() == (0, 1, 1)
    with pytest.raises(InvariantBroken, match="hold a unit already"):
        both.apply_step(2, [Take([window])])
    with pytest.raises(InvariantBroken, match="no page of the owner's"):
        after(Take([window]))
    with pytest.raises(InvariantBroken, match="lie outside"):
        after(Take([Part(1, ids(21).tobytes())]))
    later = after(Take([page]))
    later.apply_step(2, [Take([window])])
    assert later.live_units() == (0, 1, 1)
    with pytest.raises(InvariantBroken, match="still holds"):
        later.check_idle()


@settings(max_examples=40, deadline=None)
@given(
    choices=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 2**31)), max_size=40),
    stages=st.integers(1, 2),
)
def test_mirrors_reproduce_the_digest_from_the_ops(choices: list[tuple[int, int, int]], stages: int) -> None:
    """Two mirrors fed the ops hold the chain's digest after every step, and its live ids at the end."""
    stage = stage_of(400, 8, (8, 4, 8))
    geometry = hybrid_geometry(*[stage] * stages, pages=30, slots=5)
    chain = strict(geometry)
    mirrors = [LogicalMirror(geometry, Checks(STRICT)) for _ in range(2)]
    digests = set()
    for seq, (kind, size, seed) in enumerate(choices, start=1):
        ops: list[Op] = []
        rng = np.random.default_rng(seed)
        demand = [(1, 0, 0), (0, size, size), (1, 0, size), (0, 0, 0)][kind]
        if any(demand) and chain.refusal(demand) is None:
            ops.append(chain.take(demand).op)
        elif sum(chain.live_units()):
            pages = chain.live_ids(2)
            going = np.sort(rng.permutation(pages)[:size])
            window = going[np.isin(going, chain.live_ids(1))]
            slots = chain.live_ids(0)[:1]
            ops.append(chain.free([slots, window, going]))
        digest = chain.step_digest(seq, ops)
        assert [mirror.apply_step(seq, ops) for mirror in mirrors] == [digest, digest]
        digests.add(digest)
    assert len(digests) == len(choices), "every step has a digest of its own"
    for band in range(3):
        assert mirrors[0].live_ids(band).tolist() == chain.live_ids(band).tolist()


def test_a_difference_shows_in_its_step_and_every_later_one() -> None:
    """One step that differs in one id changes this digest and, the ops being equal again, all that follow."""
    geometry = full_geometry(10)
    left, right = LogicalMirror(geometry), LogicalMirror(geometry)
    one: Op = Take([Part(0, ids(1).tobytes())])
    other: Op = Take([Part(0, ids(2).tobytes())])
    assert left.apply_step(1, []) == right.apply_step(1, [])
    assert left.apply_step(2, [one]) != right.apply_step(2, [other])
    assert left.apply_step(3, [other]) != right.apply_step(3, [one])
    assert left.live_ids(0).tolist() == right.live_ids(0).tolist()
    assert left.apply_step(4, []) != right.apply_step(4, [])


def test_steps_are_dense() -> None:
    """A step that is skipped, repeated or out of order is named."""
    chain = strict(full_geometry(4))
    chain.step_digest(1, [])
    for seq in (1, 3, 0):
        with pytest.raises(InvariantBroken, match=f"step {seq} follows step 1"):
            chain.step_digest(seq, [])


def test_an_estimate_inside_a_decision_is_found() -> None:
    """Reading an estimate on a marked path raises at level 2, is collected once at level 1, and is free outside."""
    for level, found in ((OFF, 0), (WARN, 1)):
        chain = LogicalChain(full_geometry(5), Checks(level))
        assert chain.free_estimate() == (5,)
        with chain.decision():
            chain.free_estimate()
            chain.free_estimate()
        assert len(chain.checks.found) == found
        chain.checks.found.clear()  # as the shell does once it has logged them
        with chain.decision():
            chain.free_estimate()
        assert not chain.checks.found, "once"
    chain = strict(full_geometry(5))
    with pytest.raises(InvariantBroken, match="observe_only_read"), chain.decision():
        chain.free_estimate()
    assert chain.free_estimate() == (5,)


def test_misuse_is_an_error_before_any_change() -> None:
    """An empty take, an empty free, the wrong number of parts and an unknown level are refused by name."""
    chain = hybrid()
    with pytest.raises(ValueError, match="at least one unit"):
        chain.take((0, 0, 0))
    with pytest.raises(ValueError, match="at least one id"):
        chain.free([None, ids(), None])
    with pytest.raises(ValueError, match="1 parts for 3 bands"):
        chain.free([ids(1)])
    with pytest.raises(ValueError, match="0, 1 or 2"):
        Checks(3)
    assert chain.live_units() == (0, 0, 0)


def test_leaks_are_named_at_idle() -> None:
    """`check_idle` passes exactly when nothing is live, and names the band and the ids otherwise."""
    chain = strict(full_geometry(10))
    chain.check_idle()
    chain.take((2,))
    with pytest.raises(InvariantBroken, match="band full still holds 2 units: 1, 2"):
        chain.check_idle()
    chain.free([ids(1, 2)])
    chain.check_idle()
