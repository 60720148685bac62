"""Endings: abort, found stop strings, lost front ends, drain, deadlines and epochs, at every stage, exactly once."""

from __future__ import annotations

import msgspec
import pytest

from allocator.errors import InvariantBroken
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from tests.core.rank_double import geometry
from tests.core.scenes import drive, stage
from tests.core.world import World, facts

SMALL = CoreConfig(page_size=4, max_running_requests=3, max_batched_tokens=16, chunked_prefill_size=8)


def busy(overlap: bool = True) -> World:
    """A world with requests in every ordinary stage."""
    world = World(CoreConfig(page_size=4, max_running_requests=2, max_batched_tokens=16, overlap=overlap))
    for id, prompt in (("running", 5), ("long", 40), ("waiting", 6)):
        world.send(id, prompt, 6)
    world.tick()
    world.tick()
    return world


@pytest.mark.parametrize("id", ["running", "long", "waiting"])
@pytest.mark.parametrize("overlap", [True, False])
def test_abort_at_any_stage(id: str, overlap: bool) -> None:
    """An aborted request gets one terminal message at once, and the others finish as if it had never been."""
    world = busy(overlap)
    out = world.abort(id)
    assert [(reply.message.id, reply.message.reason) for reply in out.replies] == [(id, "abort")]  # type: ignore[union-attr]
    assert world.finished(id).detail == "by client"
    assert not world.abort(id).replies, "an abort after the end is harmless"
    assert not world.abort("nobody").decisions
    world.run()
    world.check_rest()
    assert all(world.finished(other).reason == "length" for other in {"running", "long", "waiting"} - {id})


def test_a_found_stop_string_sets_the_usage() -> None:
    """The front end's stop string ends the choice with its own count, at most what was committed."""
    world = World(SMALL)
    for id in ("a", "b", "c"):
        world.send(id, 3, 9)
    for _ in range(4):
        world.tick()
        world.report()
    for id, told in (("a", 2), ("b", 99), ("c", -5)):
        world.feed(inputs.FinishAsked(world.now_ns, "fe", id, 0, told))
    committed = len(world.output("b"))
    assert [world.finished(id).output_tokens for id in ("a", "b", "c")] == [2, committed, 0]
    assert all(world.finished(id).reason == "stop" for id in ("a", "b", "c"))
    for choice in (-1, 1, 2**31):
        assert not world.feed(inputs.FinishAsked(0, "fe", "a", choice, 0)).replies
    world.run()
    world.check_rest()


def test_one_choice_ends_and_its_siblings_go_on() -> None:
    """FinishAsked ends a choice, Aborted ends all that are left."""
    world = World(SMALL)
    world.send("r", 3, 20, n=3)
    for _ in range(3):
        world.tick()
        world.report()
    world.feed(inputs.FinishAsked(world.now_ns, "fe", "r", 1, 1))
    assert world.core.gauges()["live"] == 2
    world.abort("r")
    assert [world.finished("r", choice).reason for choice in range(3)] == ["abort", "stop", "abort"]
    world.run()
    world.check_rest()


def test_a_lost_front_end_loses_its_requests_only() -> None:
    """Its requests are aborted in every stage and its ids forgotten; others do not notice."""
    world = World(SMALL)
    world.send("mine", 5, 6)
    for k in range(4):
        world.arrive(msgspec.structs.replace(world.clients["fe", "mine"].generate, id=f"x{k}"), frontend="gone")
    world.tick()
    world.feed(inputs.FrontEndLost(world.now_ns, "gone"))
    assert not any(world.knows("gone", f"x{k}") for k in range(4))
    assert world.knows("fe", "mine")
    world.feed(inputs.FrontEndLost(world.now_ns, "never seen"))
    world.run()
    world.check_rest()
    assert world.finished("mine").reason == "length"
    assert world.finished("x0", frontend="gone").detail == "by frontend: it was lost"


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_lost_front_end_whose_ends_pass_the_bound_is_given_up_like_any_other(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Each end of a live request may push out an ended one, of its own front end too."""
    world = World(SMALL)
    for k in range(2):
        world.send(f"live{k}", 3, 20)
    for k in range(2):
        world.send(f"done{k}", 3, 1)
    drive(world, lambda: len(world.core.state.ended_groups) == 2)
    monkeypatch.setattr("daemon.core.endings.ENDED_GROUPS_MAX", most)
    world.feed(inputs.FrontEndLost(world.now_ns, "fe"))
    assert not any(world.knows("fe", id) for _, id in world.clients)
    assert world.core.state.ended_bytes == 0
    world.run()
    world.check_rest()


def test_drain_finishes_what_it_has_and_its_expiry_ends_the_rest() -> None:
    """Drain admits nothing new and finishes; when its time is over what lives ends as drained."""
    world = busy()
    world.feed(inputs.Controlled(world.now_ns, "drain"))
    drive(world, lambda: stage(world, "running") == "ended")
    assert world.finished("running").reason == "length"
    out = world.feed(inputs.Controlled(world.now_ns, "drain_expired"))
    assert {reply.message.reason for reply in out.replies} == {"drained"}  # type: ignore[union-attr]
    assert "timeout" in world.finished("waiting").detail
    world.run()
    world.check_rest()
    assert [decision.reason for decision in world.verdicts("draining")] == ["drain", "drain_expired"]


def test_stop_ends_everything_at_once() -> None:
    """An order to stop ends all stages; the last pages come back with the idle step."""
    world = busy()
    world.feed(inputs.Controlled(world.now_ns, "stop"))
    assert world.core.gauges()["live"] == 0
    world.run()
    world.check_rest()
    with pytest.raises(InvariantBroken, match="reload"):
        world.core.feed(inputs.Controlled(0, "reload"))


@pytest.mark.parametrize("overlap", [True, False])
def test_deadlines_end_requests_in_every_stage(overlap: bool) -> None:
    """A passed deadline ends a request at the next tick, and the next one is when the tick is due."""
    world = World(CoreConfig(page_size=4, max_running_requests=1, max_batched_tokens=16, overlap=overlap))
    world.send("long", 40, 20, deadline_ms=6)
    out = world.send("waiting", 5, 4, deadline_ms=4)
    assert out.due_ns == world.now_ns + 4_000_000
    assert world.tick().due_ns == world.now_ns + 3_000_000
    world.run()
    world.check_rest()
    assert {world.finished(id).reason for id in ("long", "waiting")} == {"deadline"}
    assert world.core.feed(inputs.Ticked(world.now_ns)).due_ns is None


def test_the_end_of_an_epoch_ends_every_request_as_fault() -> None:
    """Device memory is gone: all live requests end, nothing of the old epoch is heard, a new epoch serves."""
    world = busy()
    assert world.rank is not None
    stale = world.rank.reports[0]
    world.feed(inputs.EpochEnded(world.now_ns, 1, "rank 0 died"))
    assert {world.finished(id).reason for id in ("running", "long", "waiting")} == {"fault"}
    assert "rank 0 died" in world.finished("running").detail
    assert not world.wants_tick
    world.send("early", 3)
    assert world.refusals[-1].code == "not_ready"
    assert not world.feed(stale).decisions
    assert not world.feed(inputs.EpochEnded(world.now_ns, 1, "again")).decisions
    world.begin()
    assert world.feed(stale).tokens is None, "a report of an old epoch is ignored"
    world.send("late", 9, 3)
    assert not world.feed(inputs.EpochEnded(world.now_ns, 1, "late news")).decisions, "only the present one can end"
    world.run()
    assert world.finished("late").reason == "length"
    assert world.steps[-1].epoch == 2
    world.check_rest()


def test_an_epoch_begins_once_and_with_the_configured_page_size() -> None:
    """What ranks cannot mean breaks the invariant by name."""
    world = World(SMALL)
    with pytest.raises(InvariantBroken, match="began while"):
        world.core.feed(inputs.EpochBegan(0, 2, geometry(8), facts()))
    other = World(SMALL, begin=False)
    with pytest.raises(InvariantBroken, match="page size"):
        other.core.feed(inputs.EpochBegan(0, 1, geometry(8, page_size=16), facts()))


@pytest.mark.parametrize(
    "item", [inputs.TransferEnded(0, 1, "done"), inputs.ExtentsFixed(0, 0, 0, -1, -1)], ids=["transfer", "extents"]
)
def test_inputs_about_things_that_do_not_exist_break_the_invariant(item: inputs.Input) -> None:
    """No transfer was submitted, so a report about one is a fault of the shell."""
    with pytest.raises(InvariantBroken, match="no transfer"):
        World(SMALL).core.feed(item)
