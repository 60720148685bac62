"""The grid: which points of a sequence are wanted, and where chunks end because of them."""

from __future__ import annotations

from random import Random

import pytest

from daemon.core.grid import KIND_NAMES, Kind, Wanted, cut, next_point


def points(wanted: Wanted, start: int = 0) -> dict[int, Kind]:
    """The wanted points behind `start`, found one after the other, with their kinds."""
    found: dict[int, Kind] = {}
    at = wanted.behind(start)
    while at:
        found[at] = wanted.kind(at)
        at = wanted.behind(at)
    return found


@pytest.mark.parametrize(
    ("known", "target", "mark", "expected"),
    [
        # A prompt that nobody has seen: the last grid point before its last token, and marks.
        (0, 2200, 0, {2048: Kind.PROMPT}),
        (0, 2200, 1024, {1024: Kind.MARK, 2048: Kind.PROMPT}),
        (0, 2304, 0, {2048: Kind.PROMPT}),  # it ends on the grid: its last token is always computed
        (0, 2305, 0, {2048: Kind.STEM, 2304: Kind.PROMPT}),
        (0, 511, 0, {256: Kind.PROMPT}),  # no point of the coarser grid
        (0, 256, 0, {}),  # no grid point before the last token
        # A part of it is known: the grid point where it leaves the known part, marks only behind that.
        (1488, 2200, 512, {1280: Kind.BRANCH, 1536: Kind.MARK, 2048: Kind.PROMPT}),
        (1536, 2200, 1024, {1536: Kind.BRANCH, 2048: Kind.PROMPT}),
        (200, 2200, 0, {2048: Kind.PROMPT}),  # it leaves before the first grid point
        # All of it is known: the last point is the branch.
        (2192, 2200, 0, {2048: Kind.BRANCH}),
        (9999, 2200, 256, {2048: Kind.BRANCH}),
        # Marks closer than the grid are grid points; those that lie on no grid point are rounded down.
        (1000, 2000, 16, {768: Kind.BRANCH, 1024: Kind.MARK, 1280: Kind.MARK, 1536: Kind.STEM, 1792: Kind.PROMPT}),
        (0, 2000, 600, {512: Kind.MARK, 1024: Kind.MARK, 1536: Kind.STEM, 1792: Kind.PROMPT}),
    ],
)
def test_what_is_wanted_of_a_prompt(known: int, target: int, mark: int, expected: dict[int, Kind]) -> None:
    """Wanted points and why, on a grid of 256."""
    assert points(Wanted(256, known, target, mark)) == expected


def test_everywhere_is_every_grid_point() -> None:
    """The policy that keeps all: each point before the last token."""
    assert points(Wanted(256, 700, 1025, 512, everywhere=True)) == dict.fromkeys((256, 512, 768, 1024), Kind.GRID)


def test_a_conversation_that_goes_on_from_its_turns_ends_wants_none_of_its_prompts() -> None:
    """Branches and marks remain; the chunk still ends where the row can keep its state."""
    wanted = Wanted(256, 1000, 2900, 1024, ends=False)
    assert points(wanted) == {768: Kind.BRANCH, 1024: Kind.MARK, 2048: Kind.MARK}
    assert cut(wanted, 2048, 852) == 768
    assert points(Wanted(256, 2890, 2900, 0, ends=False)) == {2816: Kind.BRANCH}


def test_without_a_grid_nothing_is_wanted_and_nothing_cut() -> None:
    """A model without states, and a request that is not to be stored."""
    wanted = Wanted(0, 500, 1000, 64)
    assert wanted.behind(0) == 0
    assert cut(wanted, 0, 700) == 700


def test_every_kind_has_a_name() -> None:
    """What metrics count by."""
    assert sorted(KIND_NAMES.values()) == ["branch", "grid", "mark", "prompt", "retracted", "stem", "turn"]


@pytest.mark.parametrize(
    ("wanted", "start", "count", "runs"),
    [
        (Wanted(256, 0, 700, 0), 0, 1024, 512),  # up to the last grid point before the end
        (Wanted(256, 0, 700, 0), 512, 188, 188),  # and the rest
        (Wanted(256, 0, 2000, 0), 0, 600, 512),  # nothing wanted in reach: the last grid point in reach
        (Wanted(256, 0, 2000, 0), 512, 100, 100),  # no grid point in reach: progress over the grid
        (Wanted(256, 0, 2000, 0), 612, 600, 412),
        (Wanted(256, 0, 256, 0), 0, 256, 256),
        (Wanted(256, 0, 257, 0), 0, 257, 256),
        (Wanted(256, 0, 512, 0), 0, 512, 256),
        (Wanted(256, 300, 2000, 0), 0, 1024, 256),  # the branch first
        (Wanted(256, 300, 2000, 0), 256, 1024, 1024),
        (Wanted(256, 0, 2000, 512), 0, 1200, 512),  # each mark ends a chunk
        (Wanted(256, 0, 2000, 512, everywhere=True), 0, 1200, 256),
        (Wanted(4, 0, 10, 0), 0, 0, 0),
    ],
)
def test_where_a_chunk_ends(wanted: Wanted, start: int, count: int, runs: int) -> None:
    """How many of `count` tokens run."""
    assert cut(wanted, start, count) == runs


@pytest.mark.parametrize(("interval", "end", "point"), [(256, 0, 0), (256, 1, 256), (256, 256, 256), (256, 257, 512)])
def test_the_next_point_of_a_sequence(interval: int, end: int, point: int) -> None:
    """A sequence that ends on the grid stands on its point."""
    assert next_point(interval, end) == point


def test_any_chunks_of_any_prompt_end_at_every_wanted_point() -> None:
    """Random prompts, chunk sizes and rooms: the prompt is covered, no chunk runs over a wanted point, and the points
    are those that a look at every grid point finds."""
    random = Random(5)
    for _ in range(2000):
        interval, target = random.randrange(1, 9), random.randrange(1, random.choice([150, 1200]))
        known, mark = random.randrange(0, 160), random.choice([0, 3, 10, 40])
        ends, everywhere = random.random() < 0.8, random.random() < 0.1
        wanted = Wanted(interval, known, target, mark, ends, everywhere)
        found, at, stops = points(wanted), 0, []
        while at < target:
            count = cut(wanted, at, min(random.randrange(1, 60), target - at))
            assert count > 0
            assert not any(at < point < at + count for point in found)
            at += count
            stops.append(at)
        assert stops[-1] == target
        assert set(found) <= set(stops)
        grid = list(range(interval, target, interval))
        assert found == {point: wanted.kind(point) for point in grid if wanted.kind(point)}
        apart = max(mark, interval)
        marks = {n * apart // interval * interval for n in range(1, target // apart + 1)} if mark else set()
        if not wanted.everywhere:
            assert {p for p in grid if p > known and p in marks} | set(grid[-1:] if ends else []) <= set(found)
            assert len(found) <= len(marks) + 3
