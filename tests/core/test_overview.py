"""Overview: the rows of a watcher say what the view says, are bounded, and change nothing."""

from __future__ import annotations

import pytest

from daemon.core.limits import CoreConfig
from daemon.core.overview import QUEUED_MAX, LiveRow, live_row, live_rows
from tests.core.scenes import drive, last_row_parks, stage
from tests.core.world import World

NOW_NS = 90_000_000_000_000


def seen(world: World, rows_max: int = 512) -> list[LiveRow]:
    """The overview of a world, which must not change it."""
    before = world.core.state_digest()
    rows = live_rows(world.core.state, NOW_NS, rows_max)
    assert world.core.state_digest() == before
    return rows


def two_rows_of_five() -> World:
    """Two requests run, three wait for rows."""
    world = World(CoreConfig(page_size=4, max_running_requests=2, max_batched_tokens=32))
    for k in range(5):
        world.send(f"r{k}", 5 + k, 12)
    drive(world, lambda: stage(world, "r1") == "running")
    world.tick()
    return world


def test_every_number_is_that_of_the_view() -> None:
    """Field by field, for those that run, wait and are parked."""
    same = ("request", "id", "frontend", "choice", "stage", "age_ms", "row", "prompt_tokens", "output_tokens")
    same += ("max_output", "pages", "shared_pages", "cached_tokens", "retractions", "losses")
    for world in (two_rows_of_five(), last_row_parks()):
        views = {view["request"]: view for view in world.core.view(NOW_NS)["requests"]}
        rows = seen(world)
        assert sorted(row.request for row in rows) == sorted(views)
        for row in rows:
            view = views[row.request]
            assert {name: getattr(row, name) for name in same} == {name: view[name] for name in same}
            assert [row.scheduled_tokens, row.target_tokens] == view["extent"]
            stands = row.ahead >= 0 or row.stage.startswith("parked")
            expected = (view["waits_for"], view["waits_numbers"]) if stands else ("", {})
            assert (row.waits_for, row.waits_numbers) == expected


def test_those_on_the_ranks_come_first_and_the_queue_from_its_head() -> None:
    """Rows 0 and 1, then the queue's first; the bound cuts its end."""
    world = two_rows_of_five()
    rows = seen(world)
    assert [(row.id, row.row, row.ahead) for row in rows] == [
        ("r0", 0, -1), ("r1", 1, -1), ("r2", -1, 0), ("r3", -1, 1), ("r4", -1, 2)
    ]  # fmt: skip
    assert [row.id for row in seen(world, 3)] == ["r0", "r1", "r2"]
    assert [row.id for row in seen(world, 1)] == ["r0"]
    assert seen(world, 0) == []


def test_no_more_of_the_queue_is_looked_at_than_is_told() -> None:
    """The walk over the queue ends with the bound, however many wait."""
    world = two_rows_of_five()
    looked: list[int] = []
    queue = world.core.state.queue

    class Counted:
        """The queue, which notes who was handed out."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            for request in queue:
                looked.append(request.number)
                yield request

    world.core.state.queue = Counted()  # type: ignore[assignment]
    assert len(live_rows(world.core.state, NOW_NS, 3)) == 3
    assert len(looked) == 1


def test_one_request_is_the_same_row() -> None:
    """Asked for by number, on a row or in the queue; None when it is not live."""
    world = two_rows_of_five()
    rows = seen(world)
    assert [live_row(world.core.state, row.request, NOW_NS) for row in rows] == rows
    assert live_row(world.core.state, 99, NOW_NS) is None


def test_before_the_first_epoch_there_is_nothing_to_show() -> None:
    """A core without memory has no rows; nothing raises."""
    world = World(CoreConfig(page_size=4))
    assert seen(world) == []


def test_of_a_long_queue_the_head_is_told() -> None:
    """However many wait, and however many rows are asked for."""
    world = World(CoreConfig(page_size=4, max_running_requests=1, max_batched_tokens=32))
    for k in range(QUEUED_MAX + 20):
        world.send(f"r{k}", 5, 12)
    rows = seen(world, 10**6)
    assert [row.ahead for row in rows if row.row < 0] == list(range(QUEUED_MAX))


def test_of_one_far_back_in_the_queue_the_place_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts a long queue for one answer."""
    monkeypatch.setattr("daemon.core.overview.LOOKED_MAX", 10)
    world = World(CoreConfig(page_size=4, max_running_requests=1, max_batched_tokens=32))
    for k in range(20):
        world.send(f"r{k}", 5, 12)
    rows = [live_row(world.core.state, request, NOW_NS) for request in (4, 20)]
    assert [row.ahead for row in rows if row is not None] == [3, 10]
