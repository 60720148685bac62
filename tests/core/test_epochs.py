"""Epochs: what outlives device memory, and what a new one cannot take on any more."""

from __future__ import annotations

import msgspec
import pytest

from daemon.core import inputs
from daemon.core.fair import FairShare
from daemon.core.limits import CoreConfig
from daemon.core.outputs import Outputs
from ipc.messages import Sampling
from tests.core.scenes import (
    chunk_retracted,
    chunk_retracted_while_parked,
    drive,
    last_row_parks,
    parked_and_shrunk,
    stage,
)
from tests.core.world import World, facts
from tools.worlds.rank_double import geometry

CONFIG = CoreConfig(page_size=4, max_running_requests=2, max_batched_tokens=16, chunked_prefill_size=8)
SCORED = Sampling(temperature=0.0, logprobs=1, prompt_logprobs=1)


def lose(world: World, recovers: bool = True) -> Outputs:
    """A rank died."""
    return world.feed(inputs.EpochEnded(world.now_ns, world.epoch, "rank 0.1 was killed", recovers))


def busy(config: CoreConfig = CONFIG) -> World:
    """One decodes, one is partly prefilled, one waits; steps are in flight."""
    world = World(config)
    world.send("decodes", 5, 20, sampling=SCORED)
    world.send("chunked", 90, 6, sampling=SCORED)
    world.send("waits", 9, 4)
    drive(world, lambda: len(world.output("decodes")) == 3)
    assert stage(world, "chunked") == "prefilling"
    world.tick()
    return world


@pytest.mark.parametrize("overlap", [True, False])
def test_what_had_a_row_waits_again_and_every_client_gets_its_tokens_once(overlap: bool) -> None:
    """Output stays, nothing is sent twice, log probabilities neither, and the tokens are those of a lone run."""
    world = busy(msgspec.structs.replace(CONFIG, overlap=overlap))
    had = list(world.output("decodes"))
    out = lose(world)
    assert [(one.verdict, one.request, one.reason) for one in out.decisions] == [
        ("requeued", 1, "epoch"),
        ("requeued", 2, "epoch"),
    ]
    assert out.decisions[0].numbers["output_tokens"] == len(had)
    assert not out.replies
    assert not out.wants_tick
    assert [stage(world, id) for id in ("decodes", "chunked", "waits")] == ["retracted", "retracted", "waiting"]
    world.begin()
    world.run()
    assert world.output("decodes")[: len(had)] == had
    assert {world.finished(id).reason for id in ("decodes", "chunked", "waits")} == {"length"}
    world.check_rest()
    assert world.core.gauges()["requeued_total"] == 2
    assert world.core.gauges()["retractions_total"] == 0, "the bound of retractions is not touched"


@pytest.mark.parametrize("scene", [parked_and_shrunk, chunk_retracted_while_parked, chunk_retracted, last_row_parks])
def test_an_epoch_may_end_in_every_stage(scene: object) -> None:
    """Whatever the ladder is doing, at every turn of it, the epoch can end, and everything is served by the next."""
    turns, ends = 0, 0
    while True:
        world = scene()  # type: ignore[operator]
        went_on = all(world.turn() for _ in range(turns))
        lose(world)
        world.begin()
        world.run()
        world.check_rest()
        ends += 1
        if not went_on:
            break
        turns += 7
    assert ends > 3


def test_arrivals_while_there_is_no_epoch_are_accepted_and_wait() -> None:
    """They are checked as ever, by the memory that was; aborts, deadlines and stops reach them; ticks do nothing."""
    world = busy()
    lose(world)
    world.send("new", 9, 4)
    world.send("stops", 9, 40, stop_ids=bytes(range(8)) * 0 + (3).to_bytes(8, "little"))
    world.send("hopeless", 600, 4)
    assert world.refusals[-1].code == "prompt_too_long"
    world.send("hangs up", 9, 4)
    world.abort("hangs up")
    world.send("late", 9, 4, deadline_ms=5)
    assert world.tick().step is None
    world.wait(10)
    assert world.finished("late").reason == "deadline"
    for order in ("flush_cache", "drain"):
        assert world.feed(inputs.Controlled(world.now_ns, order)).step is None
    assert not world.feed(inputs.FlushAsked(world.now_ns, 3)).wants_tick
    world.begin()
    world.run()
    world.check_rest()
    assert world.finished("new").reason == "length"


def test_a_smaller_arena_ends_what_it_can_never_hold() -> None:
    """What was accepted for a larger arena ends when the next one cannot hold it, and only that."""
    world = World(CONFIG)
    world.send("long", 9, 60)
    world.send("short", 9, 4)
    world.tick()
    lose(world)
    world.pages = 8
    world.begin()
    assert world.finished("long").reason == "unschedulable"
    assert "epoch 2" in world.finished("long").detail
    world.run()
    assert world.finished("short").reason == "length"
    world.check_all_free()
    world.check_ends()


@pytest.mark.parametrize(
    ("vocab_size", "max_model_len", "names"), [(40, 512, "token ids of the model"), (97, 16, "length of the model")]
)
def test_another_model_ends_what_it_cannot_go_on_with(vocab_size: int, max_model_len: int, names: str) -> None:
    """A vocabulary or a length that is smaller than what a request has."""
    world = World(CONFIG)
    world.send("has", [60, 61, 62], 30)
    world.send("fits", [1, 2, 3], 4)
    lose(world)
    world.facts = facts(vocab_size, max_model_len)
    world.begin()
    assert world.finished("has").reason == "fault"
    assert names in world.finished("has").detail
    world.run()
    assert world.finished("fits").reason == "length"


def test_nothing_follows_an_end_that_does_not_recover() -> None:
    """Between epochs, and before the first one, it ends all that lives; then nothing is accepted."""
    world = busy()
    lose(world)
    world.send("new", 9, 4)
    out = world.feed(inputs.EpochEnded(world.now_ns, 2, "too many restarts", False))
    assert {world.finished(id).reason for id in ("decodes", "chunked", "waits", "new")} == {"fault"}
    assert len(out.replies) == 4
    world.send("after", 9, 4)
    assert world.refusals[-1].code == "not_ready"
    early = World(CONFIG, begin=False)
    assert not early.feed(inputs.EpochEnded(0, 1, "no rank came up", False)).decisions


def test_reports_of_a_dead_epoch_are_not_heard() -> None:
    """A late report, and a late end, of the epoch before change nothing."""
    world = busy()
    assert world.rank is not None
    stale = world.rank.reports[0]
    lose(world)
    digest = world.core.state_digest()
    assert world.core.feed(stale).tokens is None
    lose(world)
    assert world.core.state_digest() == digest
    world.begin()
    digest = world.core.state_digest()
    assert world.core.feed(stale).tokens is None
    assert not world.core.feed(inputs.EpochEnded(world.now_ns, 1, "late news", True)).decisions
    assert world.core.state_digest() == digest
    world.run()
    world.check_rest()


def test_a_namespace_pays_for_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the policy fair, what an epoch's end makes necessary again is not charged again."""
    charged: list[int] = []
    charge = FairShare.charge
    monkeypatch.setattr(FairShare, "charge", lambda self, name, n: (charged.append(n), charge(self, name, n)))
    world = World(msgspec.structs.replace(CONFIG, schedule_policy="fair"))
    world.send("a", 9, 8, namespace="x")
    for _ in range(3):
        world.tick()
        world.report()
    lose(world)
    world.begin()
    world.run()
    assert (charged[0], sum(charged)) == (9, 9 + 8)


def test_what_the_dead_cache_knew_sorts_nobody() -> None:
    """Under the policy lpm, hits found in a tree that is gone do not count any more."""
    config = msgspec.structs.replace(CONFIG, schedule_policy="lpm", max_running_requests=1)
    world = World(config)
    world.send("gives", [5] * 12, 4)
    world.run()
    world.send("runs", [9] * 3, 30)
    world.tick()
    world.send("plain", [7] * 8, 2)
    world.send("knows", [5] * 12 + [6], 2)
    for _ in range(6):
        world.turn()
    assert [request.group.id for request in world.core._state.queue] == ["knows", "plain"]
    lose(world)
    assert [request.group.id for request in world.core._state.queue] == ["runs", "plain", "knows"]
    world.begin()
    world.run()
    world.check_rest()


def test_the_arena_that_prices_arrivals_is_part_of_the_state() -> None:
    """Between epochs two cores that would accept other requests digest differently."""
    digests = set()
    for pages in (64, 65):
        world = World(CONFIG, pages=pages)
        lose(world)
        digests.add(world.core.state_digest())
    assert len(digests) == 2
    assert geometry(64) != geometry(65)


def test_a_snapshot_is_asked_for_by_the_next_step_of_any_epoch() -> None:
    """A step that comes anyway, a bare one where there is none, and one wish is one step, also over an epoch's end."""
    world = busy()
    before = len(world.steps)
    world.feed(inputs.Controlled(world.now_ns, "snapshot"))
    lose(world)
    assert not world.wants_tick
    world.begin()
    world.run()
    asked = [step.seq for step in world.steps[before:] if step.snapshot]
    assert asked == [1], "of the next epoch"
    assert world.wants_tick is False
    assert world.feed(inputs.Controlled(world.now_ns, "snapshot")).wants_tick
    step = world.tick().step
    assert step is not None
    assert step.snapshot
    assert step.forward is None
    world.run()
    assert sum(step.snapshot for step in world.steps) == 2
    world.check_rest()
