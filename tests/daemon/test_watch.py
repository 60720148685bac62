"""Watch: answers to a live view are bounded, agree with the core's own view, and change nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from daemon.app import Daemon
from daemon.core.inputs import Input, Ticked
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Decided, Outputs
from daemon.mailbox import Iteration
from daemon.recent import Recent
from daemon.watch import DECISIONS_MAX, ROWS_MAX, Watched, WatchedLife, life_of, watched
from tests.core.world import World
from tools.worlds.rank_double import geometry

NOW_NS = 5_000_000_000


def daemon_around(world: World, counts: list[list[tuple[int, int, int, int]]] | None = None) -> Daemon:
    """As much of a daemon as its answers read, around a simulated world's core."""
    arena = geometry(world.pages, world.config.page_size, world.shape, world.stages)
    epoch = SimpleNamespace(geometry=arena, facts=None, versions={})
    epochs = SimpleNamespace(epoch=epoch, status=lambda: {"number": 1})
    fake: Any = SimpleNamespace(
        clock=SimpleNamespace(now_ns=lambda: NOW_NS),
        observer=SimpleNamespace(recent=Recent(), bands=counts or []),
        epochs=epochs,
        core=world.core,
        life="life",
        core_config=world.core.state.config,
        health=SimpleNamespace(report=lambda: {"ready": True}),
        gateway=SimpleNamespace(frontends=list),
        journal_state=dict,
    )
    return cast(Daemon, fake)


def busy() -> World:
    """Two requests run and four wait."""
    world = World(CoreConfig(page_size=4, max_running_requests=2, max_batched_tokens=32), pages=40)
    for k in range(6):
        world.send(f"r{k}", 5, 12)
    world.tick()
    world.tick()
    return world


@pytest.mark.parametrize(("asked", "told"), [(None, 6), (0, 0), (3, 3), (-5, 0), (10**9, 6)])
def test_rows_are_as_many_as_asked_for(asked: int | None, told: int) -> None:
    """Within the bound; a nonsensical number is none."""
    world = busy()
    before = world.core.state_digest()
    answer = watched(daemon_around(world), {} if asked is None else {"rows": asked}, 0, 0)
    assert len(answer.requests) == told
    assert answer.gauges == world.core.gauges()
    assert world.core.state_digest() == before
    assert ROWS_MAX >= 256


def test_decisions_are_as_many_as_asked_for_and_none_twice() -> None:
    """Behind the serial that was named; never more than the bound."""
    daemon = daemon_around(busy())
    for k in range(2 * DECISIONS_MAX):
        daemon.observer.recent.take(Iteration(1, [Ticked(1)], [Outputs(decisions=[Decided(k, "idle", 0, "")])]))
    first = watched(daemon, {"since": 0, "decisions": 10**9}, 0, 0)
    assert len(first.decisions) == DECISIONS_MAX
    assert first.serial == 2 * DECISIONS_MAX
    assert watched(daemon, {"since": first.serial}, 0, 0).decisions == []
    assert len(watched(daemon, {"since": first.serial - 3}, 0, 0).decisions) == 3


def test_bands_stand_beside_what_the_cache_holds_of_them() -> None:
    """The ranks' counts by stage and band; zeros before the first report; an answer is what its bytes say."""
    world = busy()
    bands = len(daemon_around(world).epochs.epoch.geometry.stages[0].bands)  # type: ignore[union-attr]
    counts = [[(9, 1, 2, 3)] * bands]
    answer = watched(daemon_around(world, counts), {}, 7, 2500)
    gauges = world.core.gauges()
    for band in answer.stages[0].bands:
        assert (band.live, band.hole, band.pending, band.beyond) == (9, 1, 2, 3)
        assert band.cached == gauges[f"cached_units_{band.name}"]
    assert all(band.live == 0 for band in watched(daemon_around(world), {}, 0, 0).stages[0].bands)
    assert (answer.began_ns, answer.answer_us) == (7, 2)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Watched) == answer


def test_a_life_is_known_while_the_request_lives_and_a_while_longer() -> None:
    """Live without decisions (an earlier life's), live with them, ended, never heard of."""
    world = busy()
    daemon = daemon_around(world)
    bare = life_of(daemon, 1)
    assert isinstance(bare, WatchedLife)
    assert (bare.id, bare.events, bare.live is not None) == ("r0", [], True)
    told = Decided(3, "ended", 77, "length")
    daemon.observer.recent.take(Iteration(1, [Ticked(1)], [Outputs(decisions=[told])]))
    ended = life_of(daemon, 77)
    assert ended is not None
    assert ended.live is None
    assert [entry.decided for entry in ended.events] == [told]
    assert life_of(daemon, 78) is None


def test_who_lost_its_ranks_is_requeued_and_who_lost_its_memory_retracted() -> None:
    """The core has one state for both; a watcher is told which, also of one whose decisions are forgotten."""
    world = World(CoreConfig(page_size=4, max_running_requests=4, max_batched_tokens=32), pages=10)
    daemon, fed = daemon_around(world), world.feed

    def feed(item: Input) -> Outputs:
        outputs = fed(item)
        daemon.observer.recent.take(Iteration(1, [item], [outputs]))
        return outputs

    world.feed = feed  # type: ignore[method-assign]
    for k in range(4):
        world.send(f"r{k}", 5, 20)
    while not world.core.gauges()["retractions_total"]:
        assert world.turn()
    stages = {row.request: row.stage for row in watched(daemon, {}, 0, 0).requests}
    (retracted,) = (number for number, stage in stages.items() if stage == "retracted")
    ran = [number for number, stage in stages.items() if stage == "running"]
    assert ran
    assert "requeued" not in stages.values()
    world.end_epoch()
    for _ in range(2):
        found = watched(daemon, {}, 0, 0).requests
        assert {row.request for row in found if row.stage == "requeued"} == set(ran)
        assert [row.request for row in found if row.stage == "retracted"] == [retracted]
        for number in ran:
            life = life_of(daemon, number)
            assert life is not None
            assert life.live is not None
            assert life.live.stage == "requeued"
        daemon.observer.recent = Recent()
    world.begin()
    world.run()
