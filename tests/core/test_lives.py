"""Lives: what a core leaves when its daemon dies, and how the next one goes on with it."""

from __future__ import annotations

import msgspec
import pytest

from allocator.checks import STRICT, Checks
from allocator.columns import i64, pack_i64
from allocator.errors import InvariantBroken
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.core.scheduler import SchedulerCore
from daemon.recovered_parts import parts_of
from ipc.messages import Continued, Finished, Sampling
from tests.core.scenes import drive, stage
from tests.core.world import World

CONFIG = CoreConfig(page_size=4, max_running_requests=3, max_batched_tokens=16, chunked_prefill_size=8)
SCORED = Sampling(temperature=0.0, logprobs=1, prompt_logprobs=1)


def busy() -> World:
    """One has ended and is not acknowledged, one decodes, one has an ended choice, one is prefilled, one waits."""
    world = World(CONFIG)
    world.send("ended", 3, 2, sampling=SCORED)
    world.run()
    world.send("decodes", 5, 20, sampling=SCORED, deadline_ms=5000)
    world.send("choices", 4, 30, n=2, stop_ids=pack_i64([96]))
    drive(world, lambda: len(world.output("decodes")) == 4)
    world.feed(inputs.FinishAsked(world.now_ns, "fe", "choices", 0, 1))
    world.send("chunked", 90, 4, priority=1)
    world.tick()
    world.report()
    world.send("waits", 9, 4)
    world.tick()
    assert stage(world, "chunked") == "prefilling"
    return world


def test_every_client_gets_its_tokens_once_over_a_restart() -> None:
    """Numbers, seeds, priorities and deadlines are those of before; only what had not reached a client comes again."""
    world = busy()
    before = world.core.view()["requests"]
    out = world.restart()
    assert [(one.verdict, one.request) for one in out.decisions] == [("recovered", n) for n in (2, 4, 5, 6)]
    after = world.core.view()["requests"]
    same = ("request", "id", "choice", "prompt_tokens", "output_tokens", "max_output", "cached_tokens")
    assert [[one[name] for name in same] for one in after] == [[one[name] for name in same] for one in before]
    assert world.core.next_request == 7
    assert world.core.gauges()["recovered_total"] == 4
    assert not out.wants_tick
    for id in ("decodes", "choices", "chunked", "waits"):
        world.resume(id, lost=1)
    world.resume("choices", choice=1, lost=2)
    world.resume_all()
    world.begin()
    world.run()
    world.check_rest()
    world.send("next", 3, 2)
    assert world.clients["fe", "next"].accepted.first_request == 7


def test_ends_that_were_not_acknowledged_are_told_again_in_the_next_life() -> None:
    """With all output and log probabilities; a request sent again under the id is the same one."""
    world = busy()
    whole = list(world.output("ended"))
    world.restart()
    out = world.resume("ended", lost=2)
    continued, finished = (reply.message for reply in out.replies)
    assert isinstance(continued, Continued)
    assert isinstance(finished, Finished)
    assert i64(continued.tokens).tolist() == whole
    assert finished == world.finished("ended")
    for _ in range(2):
        out = world.arrive(world.clients["fe", "ended"].generate)
        assert [type(reply.message).__name__ for reply in out.replies] == ["Accepted", "Finished"]
        if world.rank is None:
            world.begin()
    world.feed(inputs.Acknowledged(0, "fe", ["ended"]))
    assert not world.knows("fe", "ended")


def test_a_second_restart_leaves_what_the_first_one_did() -> None:
    """Recoverable of a core that only recovered is what it recovered."""
    world = busy()
    groups = world.core.recoverable()
    for _ in range(2):
        world.restart()
        again = world.core.recoverable()
        assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(groups)
    world.resume_all()
    world.begin()
    world.run()
    world.check_rest()


def test_reading_what_is_left_changes_nothing() -> None:
    """The state behind it is the one before."""
    world = busy()
    digest = world.core.state_digest()
    world.core.recoverable()
    assert world.core.state_digest() == digest


def test_before_the_first_epoch_of_a_life_requests_can_end() -> None:
    """Aborts, stop strings, deadlines and lost front ends reach what was recovered."""
    world = busy()
    world.restart()
    world.abort("waits")
    world.feed(inputs.FinishAsked(world.now_ns, "fe", "choices", 1, 1))
    world.wait(6000)
    assert world.finished("decodes").reason == "deadline"
    assert world.finished("waits").reason == "abort"
    world.feed(inputs.FrontEndLost(world.now_ns, "fe"))
    assert world.finished("chunked").reason == "abort"
    assert not world.core.gauges()["live"]
    world.begin()
    world.send("next", 3, 2)
    world.run()
    world.check_all_free()


def test_a_life_whose_tail_the_machine_lost_takes_the_clients_tokens() -> None:
    """The journal ends some steps early: the client brings what it lacks, and nothing is computed differently."""
    world = busy()
    whole = list(world.output("decodes"))
    for _ in range(4):
        world.tick()
        world.report()
    held = list(world.output("decodes"))
    assert len(held) > len(whole)
    assert stage(world, "chunked") == "prefilling"
    world.restart(lost_inputs=8)
    out = world.resume("decodes")
    assert [(one.verdict, one.reason) for one in out.decisions] == [("resumed", "adopted")]
    assert out.decisions[0].numbers["held_tokens"] == len(held)
    world.resume_all()
    world.begin()
    world.run()
    assert world.output("decodes")[: len(held)] == held
    world.check_rest()


def test_output_that_the_journal_has_cannot_be_another_one() -> None:
    """A client that holds other tokens than those that the last life said ends with a fault."""
    world = busy()
    held = [*world.output("decodes")[:1], 96, 96]
    world.restart()
    out = world.feed(inputs.Resumed(world.now_ns, "fe", "decodes", 0, pack_i64(held)))
    assert [reply.message.reason for reply in out.replies if isinstance(reply.message, Finished)] == ["fault"]
    assert "only the first 1 agree" in world.finished("decodes").detail


def lives_that_go_on_alone(deaths: int) -> tuple[World, int, list[int]]:
    """A machine lost the end of a life; the next ones compute on and die, nobody came back. What is sure, and held."""
    world = busy()
    for _ in range(4):
        world.tick()
        world.report()
    held = list(world.output("decodes"))
    world.restart(lost_inputs=8)
    sure = len(world.clients["fe", "decodes"].told[0])
    assert sure < len(held) - 1
    for _ in range(deaths - 1):
        world.begin()
        drive(world, lambda: len(world.clients["fe", "decodes"].told[0]) > len(held))
        world.restart()
    return world, sure, held


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_what_the_machine_lost_is_the_clients_over_any_number_of_lives(deaths: int) -> None:
    """Tokens that later lives computed in their place, unheard, are no conflict with those that the client holds."""
    world, sure, held = lives_that_go_on_alone(deaths)
    held[sure:] = [(token + 1) % 97 for token in held[sure:]]  # the arithmetic of another batch
    out = world.feed(inputs.Resumed(world.now_ns, "fe", "decodes", 0, pack_i64(held)))
    assert [(one.verdict, one.reason) for one in out.decisions] == [("resumed", "adopted")]
    assert (out.decisions[0].numbers["held_tokens"], out.decisions[0].numbers["confirmed_tokens"]) == (len(held), sure)
    world.restart()
    out = world.feed(inputs.Resumed(world.now_ns, "fe", "decodes", 0, pack_i64([*held[:-1], held[-1] + 1])))
    assert "agree; one of them is wrong" in world.finished("decodes").detail, "once it was heard it is sure"


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_what_was_sure_stays_sure(deaths: int) -> None:
    """Other tokens before the place where the machine lost some are a conflict, however many lives ago that was."""
    world, sure, held = lives_that_go_on_alone(deaths)
    held[sure - 1] = (held[sure - 1] + 1) % 97
    world.feed(inputs.Resumed(world.now_ns, "fe", "decodes", 0, pack_i64(held)))
    assert world.finished("decodes").reason == "fault"
    assert f"only the first {sure - 1} agree" in world.finished("decodes").detail


def test_a_client_that_came_back_makes_sure_what_that_life_said() -> None:
    """What it was told then is what it holds: nothing of it can be another one in the life that follows."""
    world, sure, held = lives_that_go_on_alone(2)
    world.resume("decodes")
    world.begin()
    drive(world, lambda: len(world.output("decodes")) > len(held) + 2)
    world.restart()
    assert len(world.output("decodes")) > sure
    other = [*world.output("decodes")[:-1], 96]
    world.feed(inputs.Resumed(world.now_ns, "fe", "decodes", 0, pack_i64(other)))
    assert world.finished("decodes").reason == "fault"


def test_what_a_life_leaves_comes_first_and_in_order() -> None:
    """Behind anything else, twice, with numbers that overlap, or a next number that is taken: the shell is wrong."""
    groups = busy().core.recoverable()
    with pytest.raises(InvariantBroken, match="comes first"):
        World(CONFIG).core.feed(inputs.Recovered(0, groups, 99))
    for wrong, next_request, words in (
        (groups, 3, "is taken"),
        ([groups[1], groups[0]], 99, "next free"),
        ([msgspec.structs.replace(groups[0], choices=[])], 99, "0 choices"),
    ):
        core = SchedulerCore(CONFIG, Checks(STRICT))
        with pytest.raises(InvariantBroken, match=words):
            core.feed(inputs.Recovered(0, wrong, next_request))


def test_what_no_record_can_hold_is_left_out_and_all_else_goes_on() -> None:
    """First log probabilities, then output that its client brings back, at last the request, each time in words."""
    world = busy()
    groups, most = world.core.recoverable(), 408
    parts, notes = parts_of(groups, world.core.next_request, world.now_ns, 1, most)
    assert [note.split("left out: ")[1] for note in notes] == [
        "log probabilities",
        "log probabilities",
        "log probabilities, and the output of choices that go on",
        "all of it, until its client sends it again",
    ]
    known = [part.groups[0] for part in parts]
    assert [group.accepted.id for group in known] == ["ended", "decodes", "choices", "waits"]
    assert max(len(msgspec.msgpack.encode(group)) for group in known) <= most
    core = SchedulerCore(CONFIG, Checks(STRICT))
    for part in parts:
        core.feed(part)
    assert core.next_request == world.core.next_request
    for id, choice in (("ended", 0), ("decodes", 0), ("choices", 0), ("choices", 1)):
        told = world.output(id, choice)
        out = core.feed(inputs.Resumed(world.now_ns, "fe", id, choice, pack_i64(told[:1])))
        continued = out.replies[0].message
        assert isinstance(continued, Continued)
        more = i64(continued.tokens).tolist()
        assert told[:1] + more == (told[:1] if id == "choices" else told)
        logprobs = [entry for entry in continued.logprobs if entry.prompt_position < 0]
        assert len(logprobs) == (len(more) if id in ("ended", "decodes") else 0)
