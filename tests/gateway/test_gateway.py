"""The gateway: inputs to the core, outputs to the right front end in the right order, and nothing ever blocks it."""

from __future__ import annotations

import pytest
import trio
import zmq
from trio.testing import wait_all_tasks_blocked

from allocator.columns import i64
from daemon.core.inputs import Aborted, Acknowledged, Arrived, FinishAsked, FrontEndLost, Resumed
from daemon.core.outputs import Reply
from daemon.gateway import SEND_HWM
from ipc.codec import encode, to_frontend
from ipc.errors import EndpointInUse
from ipc.handshake import Limits
from ipc.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Acknowledge,
    Answer,
    Ask,
    Connect,
    FinishAt,
    Finished,
    Logprobs,
    Refused,
    Rejected,
    RequestLogprobs,
    Resume,
    TokenBatch,
    Welcome,
)
from tests.gateway.harness import FACTS, NOW_NS, SEED, accepted, columns, finished, gateway, out, request

# --- in --------------------------------------------------------------------------------------------------------------


async def test_every_message_of_a_front_end_becomes_its_input(endpoint: str) -> None:
    """In order, with the front end's name, the clock and the seed that were passed in."""
    async with gateway(endpoint) as world:
        peer = await world.peer("fe")
        await peer.send(request("a"), FinishAt("a", 0, 3), Abort("a"), Acknowledge(["a"]), Resume("b", 1, bytes(8)))
        got = [await world.inputs.receive() for _ in range(5)]
        assert got == [
            Arrived(NOW_NS, "fe", request("a"), SEED),
            FinishAsked(NOW_NS, "fe", "a", 0, 3),
            Aborted(NOW_NS, "fe", "a", "client"),
            Acknowledged(NOW_NS, "fe", ["a"]),
            Resumed(NOW_NS, "fe", "b", 1, bytes(8)),
        ]


async def test_the_welcome_tells_version_model_limits_and_life(endpoint: str) -> None:
    """Before the model is ready a Connect is told to come again; afterwards it is welcomed."""
    async with gateway(endpoint, opened=False) as world:
        peer = await world.peer()
        answer = await peer.ask(Connect("fe"))
        assert isinstance(answer, Rejected)
        assert answer.code == "booting"
        world.gateway.open(FACTS)
        assert await peer.ask(Connect("fe")) == Welcome(PROTOCOL_VERSION, FACTS, Limits().as_dict(), "life-1")


async def test_a_closed_door_says_what_is_waited_for(endpoint: str) -> None:
    """The reason of the moment is in the answer; where there is none, the model is being loaded."""
    reasons = ["booting: ranks that have not joined: 0.1", ""]
    async with gateway(endpoint, opened=False, trouble=lambda: reasons.pop(0)) as world:
        peer = await world.peer()
        assert await peer.ask(Connect("fe")) == Rejected("booting", "booting: ranks that have not joined: 0.1")
        assert await peer.ask(Connect("fe")) == Rejected("booting", "the model is being loaded")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Connect("fe", version=99), "version"),
        (Connect(""), "empty"),
        (Connect("x" * 200), "too_long"),
        (Connect("a\nb"), "text"),
        (request("a"), "not_connected"),
        (Ask("ping", 1), "not_connected"),
    ],
)
async def test_strangers_are_told_why_they_are_not_heard(endpoint: str, message: Connect, code: str) -> None:
    """Nothing of theirs reaches the core."""
    async with gateway(endpoint) as world:
        peer = await world.peer()
        answer = await peer.ask(message)
        assert isinstance(answer, Rejected)
        assert answer.code == code
        with pytest.raises(trio.WouldBlock):
            world.inputs.receive_nowait()


async def test_a_request_with_impossible_content_is_refused_by_name(endpoint: str) -> None:
    """A front end that could be told apart gets the refusal of that request, not a lost connection."""
    limits = Limits(prompt_tokens_max=10)
    async with gateway(endpoint, limits=limits) as world:
        peer = await world.peer("fe")
        answer = await peer.ask(request("a", n=0))
        assert isinstance(answer, Refused)
        assert (answer.id, answer.code, answer.field) == ("a", "bad_parameter", "n")
        answer = await peer.ask(request("b", prompt=tuple(range(11))))
        assert isinstance(answer, Refused)
        assert (answer.id, answer.code, answer.field) == ("b", "prompt_too_long", "prompt")
        assert world.gateway.stats["malformed"] == 0


async def test_a_full_mailbox_stops_the_reading_and_loses_nothing(endpoint: str) -> None:
    """Backpressure: nothing is dropped while the engine does not read; all arrives in order when it does."""
    async with gateway(endpoint, mailbox=3) as world:
        peer = await world.peer("fe")
        await peer.send(*[Abort(str(number)) for number in range(200)])
        while not world.gateway.stats["mailbox_full"]:
            await wait_all_tasks_blocked(0.01)
        assert world.gateway.stats["received"] <= 10
        got = [await world.inputs.receive() for _ in range(200)]
        assert [item.id for item in got if isinstance(item, Aborted)] == [str(number) for number in range(200)]


async def test_requests_of_one_front_end_are_bounded(endpoint: str) -> None:
    """At the limit a new id is refused with a hint to retry; an end makes room; a repeated id is no new one."""
    async with gateway(endpoint, limits=Limits(requests_per_frontend_max=2)) as world:
        peer = await world.peer("fe")
        await peer.send(request("a", n=2), request("b"), request("a", n=2))
        for _ in range(3):
            assert isinstance(await world.inputs.receive(), Arrived)
        answer = await peer.ask(request("c"))
        assert isinstance(answer, Refused)
        assert (answer.id, answer.code, answer.limit, answer.value) == ("c", "queue_full", 2, 3)
        assert answer.retry_after_ms > 0
        world.deliver(out(accepted(0, "a", 1, n=2), finished(0, "a", 1, 0)))
        await peer.recv()
        await peer.recv()
        assert isinstance(await peer.ask(request("c")), Refused)  # one choice of "a" runs on
        world.deliver(out(finished(0, "a", 2, 1)))
        await peer.recv()
        await peer.send(request("c"))
        assert await world.inputs.receive() == Arrived(NOW_NS, "fe", request("c"), SEED)
        world.deliver(out(Reply(0, Refused("b", "queue_full", "full")), Reply(0, Refused("c", "queue_full", "full"))))
        assert world.gateway.frontends()[0]["live_requests"] == 0


# --- out -------------------------------------------------------------------------------------------------------------


async def test_tokens_come_before_the_end_of_the_same_step(endpoint: str) -> None:
    """One feed's tokens leave before its replies."""
    async with gateway(endpoint) as world:
        peer = await world.peer("fe")
        world.deliver(out(accepted(0, "a", 1)))
        world.deliver(out(finished(0, "a", 1), tokens=columns(1, [(0, 1, 11)])))
        first, second, third = [await peer.recv() for _ in range(3)]
        assert isinstance(first, Accepted)
        assert isinstance(second, TokenBatch)
        assert i64(second.tokens).tolist() == [11]
        assert isinstance(third, Finished)


async def test_each_front_end_gets_its_own_tokens_in_order(endpoint: str) -> None:
    """Interleaved rows of two front ends are told apart, their order kept; log probabilities follow their request."""
    values = Logprobs(0, b"", b"", b"", b"")
    async with gateway(endpoint) as world:
        one, two = await world.peer("one"), await world.peer("two")
        world.deliver(out(accepted(0, "a", 1), accepted(1, "b", 2), accepted(0, "c", 3), accepted(1, "d", 4)))
        for peer in (one, one, two, two):
            assert isinstance(await peer.recv(), Accepted)
        rows = [(1, 4, 44), (0, 3, 33), (1, 2, 22), (0, 1, 11)]
        logprobs = [RequestLogprobs(2, -1, values), RequestLogprobs(3, -1, values)]
        world.deliver(out(tokens=columns(7, rows, logprobs)))
        world.deliver(out(tokens=columns(8, [], [RequestLogprobs(4, 1, values)])))
        mine, others, prompt = await one.recv(), await two.recv(), await two.recv()
        assert isinstance(mine, TokenBatch)
        assert (i64(mine.requests).tolist(), i64(mine.tokens).tolist()) == ([3, 1], [33, 11])
        assert mine.logprobs == [logprobs[1]]
        assert isinstance(others, TokenBatch)
        assert (others.step, i64(others.requests).tolist(), i64(others.tokens).tolist()) == (7, [4, 2], [44, 22])
        assert others.logprobs == [logprobs[0]]
        assert prompt == TokenBatch(8, b"", b"", [RequestLogprobs(4, 1, values)])


async def test_an_acceptance_and_what_follows_it_wait_for_the_disk(endpoint: str) -> None:
    """Another request's tokens pass; the held one's come in order once the journal is synced."""
    async with gateway(endpoint) as world:
        peer = await world.peer("fe")
        world.deliver(out(accepted(0, "a", 1)))
        world.deliver(out(accepted(0, "b", 2)), sequence=10)
        world.deliver(out(finished(0, "b", 2), tokens=columns(1, [(0, 1, 11), (0, 2, 22)])), sequence=12)
        assert isinstance(await peer.recv(), Accepted)
        only = await peer.recv()
        assert isinstance(only, TokenBatch)
        assert i64(only.tokens).tolist() == [11]
        world.gateway.durable(9)
        assert await peer.ask(Ask("ping", 1)) == Answer(1, True, "life-1")  # nothing else came first
        world.gateway.durable(10)
        first, second, third = [await peer.recv() for _ in range(3)]
        assert first == accepted(0, "b", 2).message
        assert isinstance(second, TokenBatch)
        assert i64(second.tokens).tolist() == [22]
        assert third == finished(0, "b", 2).message


async def test_drain_waits_for_what_is_held(endpoint: str) -> None:
    """At a graceful end nothing that was promised stays behind."""
    async with gateway(endpoint) as world:
        await world.peer("fe")
        assert await world.gateway.drain(1.0)
        world.deliver(out(accepted(0, "a", 1)), sequence=5)
        assert not await world.gateway.drain(0.05)
        world.gateway.durable(5)
        assert await world.gateway.drain(1.0)


# --- reconnects, slow and silent front ends --------------------------------------------------------------------------


async def test_a_reconnect_under_the_same_name_takes_over(endpoint: str) -> None:
    """The new connection gets the tokens, the old one is told and no longer heard."""
    async with gateway(endpoint) as world:
        old = await world.peer("fe")
        new = await world.peer("fe")
        farewell = await old.recv()
        assert isinstance(farewell, Rejected)
        assert farewell.code == "taken_over"
        world.deliver(out(accepted(0, "a", 1)))
        assert isinstance(await new.recv(), Accepted)
        answer = await old.ask(Abort("a"))
        assert isinstance(answer, Rejected)
        assert answer.code == "not_connected"
        await new.send(Abort("a"))
        assert await world.inputs.receive() == Aborted(NOW_NS, "fe", "a", "client")
        assert world.gateway.stats["takeovers"] == 1


async def test_an_earlier_attempt_that_arrives_late_takes_nothing_over(endpoint: str) -> None:
    """Connections of one process are numbered: streams stay with the latest, and another process still takes over."""
    async with gateway(endpoint) as world:
        new, late, other = await world.peer(), await world.peer(), await world.peer()
        world.names.append("fe")
        assert isinstance(await new.ask(Connect("fe", process="p", attempt=2)), Welcome)
        answer = await late.ask(Connect("fe", process="p", attempt=1))
        assert isinstance(answer, Rejected)
        assert answer.code == "late"
        world.deliver(out(accepted(0, "a", 1)))
        assert isinstance(await new.recv(), Accepted)
        assert world.gateway.stats["takeovers"] == 0
        assert isinstance(await other.ask(Connect("fe", process="q", attempt=1)), Welcome)
        farewell = await new.recv()
        assert isinstance(farewell, Rejected)
        assert farewell.code == "taken_over"


async def test_a_connection_that_changes_its_name_gives_up_the_old_one(endpoint: str) -> None:
    """One identity never speaks for two front ends."""
    async with gateway(endpoint) as world:
        peer = await world.peer("first")
        assert isinstance(await peer.ask(Connect("second")), Welcome)
        await peer.send(Abort("a"))
        assert await world.inputs.receive() == Aborted(NOW_NS, "second", "a", "client")
        states = {row["name"]: row["connected"] for row in world.gateway.frontends()}
        assert states == {"first": False, "second": True}


async def test_front_ends_are_bounded(endpoint: str) -> None:
    """One name too many is turned away and told why; the others go on; a known name may still return."""
    async with gateway(endpoint, limits=Limits(frontends_max=2)) as world:
        await world.peer("one")
        two = await world.peer("two")
        three = await world.peer()
        answer = await three.ask(Connect("three"))
        assert isinstance(answer, Rejected)
        assert answer.code == "too_many_frontends"
        assert await two.ask(Ask("ping", 4)) == Answer(4, True, "life-1")
        await world.peer("one")


async def test_a_slow_reader_is_cut_off_and_the_others_are_served(endpoint: str) -> None:
    """Who does not read fills a bounded queue, loses its connection, never its requests, and may come back."""
    limits = Limits(outbox_messages_max=50)
    async with gateway(endpoint, limits=limits) as world:
        _slow, good = await world.peer("slow", recv_hwm=1), await world.peer("good")
        world.deliver(out(accepted(0, "a", 1), accepted(1, "b", 2)))
        assert isinstance(await good.recv(), Accepted)
        step = 0
        wide = [(0, 1, 5)] * 2000  # large, so that the kernel's buffers fill soon
        while not world.gateway.stats["slow_readers_cut"]:
            step += 1
            world.deliver(out(tokens=columns(step, [*wide, (1, 2, step)])))
            batch = await good.recv()
            assert isinstance(batch, TokenBatch)
            assert i64(batch.tokens).tolist() == [step]
            assert world.gateway.frontends()[0]["queued_messages"] <= limits.outbox_messages_max
            assert step < 4 * SEND_HWM
        assert world.gateway.stats["outbox_dropped"] > 0
        assert world.log.of("slow_reader_cut")[0]["frontend"] == "slow"
        row = world.gateway.frontends()[0]
        assert (row["connected"], row["live_requests"]) == (False, 1)
        back = await world.peer("slow")
        world.deliver(out(finished(0, "a", 1)))
        assert await back.recv() == finished(0, "a", 1).message


async def test_a_reader_that_falls_behind_and_catches_up_gets_everything_in_order(endpoint: str) -> None:
    """The outbox is emptied in order; nothing overtakes it."""
    async with gateway(endpoint) as world:
        peer = await world.peer("fe", recv_hwm=1)
        world.deliver(out(accepted(0, "a", 1)))
        step, wide = 0, [(0, 1, 5)] * 500
        while world.gateway.frontends()[0]["queued_messages"] < 20:
            step += 1
            world.deliver(out(tokens=columns(step, wide)))
        world.deliver(out(finished(0, "a", 1)))
        assert isinstance(await peer.recv(), Accepted)
        steps = []
        for _ in range(step):
            batch = await peer.recv()
            assert isinstance(batch, TokenBatch)
            steps.append(batch.step)
        assert steps == list(range(1, step + 1))
        assert isinstance(await peer.recv(), Finished)
        assert await world.gateway.drain(5.0)


async def test_nothing_overtakes_the_outbox(endpoint: str) -> None:
    """Room that appears while older messages are queued is for those, not for what is delivered next."""
    async with gateway(endpoint) as world:
        plain = zmq.Context.instance().socket(zmq.DEALER)  # read without giving the gateway's tasks a turn
        plain.setsockopt(zmq.LINGER, 0)
        plain.setsockopt(zmq.RCVHWM, 1)
        plain.setsockopt(zmq.RCVTIMEO, 5000)
        plain.connect(endpoint)
        plain.send(encode(Connect("fe")))
        world.names.append("fe")
        while not world.gateway.frontends():
            await wait_all_tasks_blocked(0.002)
        assert isinstance(to_frontend(plain.recv()), Welcome)
        step, wide = 0, [(0, 1, 5)] * 500
        while world.gateway.frontends()[0]["queued_messages"] < 5:
            step += 1
            world.deliver(out(tokens=columns(step, wide)))
        steps = []
        while len(steps) < step + 1:
            batch = to_frontend(plain.recv())
            assert isinstance(batch, TokenBatch)
            steps.append(batch.step)
            if len(steps) == SEND_HWM // 2:
                world.deliver(out(tokens=columns(step + 1, wide)))
            if len(steps) > SEND_HWM // 2:
                await trio.lowlevel.checkpoint()
        assert steps == list(range(1, step + 2))
        plain.close()


async def test_a_vanished_front_end_costs_nothing_and_is_given_up_after_its_silence(endpoint: str) -> None:
    """Its connection is found gone when something is sent; the core hears of it once, after the grace period."""
    async with gateway(endpoint, silence_s=0.2) as world:
        gone = await world.peer("gone")
        gone.socket.close()
        step = 0
        while not world.gateway.stats["disconnects"]:
            step += 1
            world.deliver(out(tokens=columns(step, [(0, 1, 1)])))
            await wait_all_tasks_blocked(0.01)
        world.deliver(out(tokens=columns(step, [(0, 1, 1)])))
        assert world.gateway.stats["undelivered"] >= 1
        assert await world.inputs.receive() == FrontEndLost(NOW_NS, "gone")
        assert world.gateway.frontends() == []
        await wait_all_tasks_blocked(0.1)
        with pytest.raises(trio.WouldBlock):
            world.inputs.receive_nowait()


async def test_a_front_end_that_pings_outlives_one_that_is_silent(endpoint: str) -> None:
    """Any message counts as a sign of life."""
    async with gateway(endpoint, silence_s=0.2) as world:
        peer = await world.peer("fe")
        await world.peer("silent")
        await peer.send(request("a"))
        assert isinstance(await world.inputs.receive(), Arrived)
        while not world.gateway.stats["frontends_lost"]:
            await peer.ask(Ask("ping", 1))
            await wait_all_tasks_blocked(0.02)
        assert await world.inputs.receive() == FrontEndLost(NOW_NS, "silent")
        assert [row["name"] for row in world.gateway.frontends()] == ["fe"]


async def test_nobody_is_given_up_for_what_the_daemon_itself_did_not_read(endpoint: str) -> None:
    """Neither a full mailbox nor a stall of the whole process counts as a front end's silence."""
    async with gateway(endpoint, silence_s=0.2, mailbox=1) as world:
        peer = await world.peer("fe")
        await peer.send(*[Abort(str(number)) for number in range(5)])
        for _ in range(15):
            await wait_all_tasks_blocked(0.02)  # reading has stopped; pings would lie unread
        assert world.gateway.stats["mailbox_full"] == 1
        assert world.gateway.stats["frontends_lost"] == 0
        for number in range(5):
            assert await world.inputs.receive() == Aborted(NOW_NS, "fe", str(number), "client")
        await peer.send(Ask("ping", 1))
        until = trio.current_time() + 0.3
        while trio.current_time() < until:
            pass  # the loop itself stands still
        assert await peer.recv() == Answer(1, True, "life-1")
        assert world.gateway.stats["frontends_lost"] == 0


async def test_nobody_is_given_up_for_what_was_silent_before_a_wait(endpoint: str) -> None:
    """While the loss of one front end waits for room in the mailbox, another one that is heard keeps its session."""
    async with gateway(endpoint, silence_s=0.4, mailbox=1) as world:
        await world.peer("gone")
        other = await world.peer("other")
        await other.send(Abort("fills the mailbox"))
        while not world.gateway.stats["mailbox_full"]:
            await wait_all_tasks_blocked(0.02)
        await other.ask(Ask("ping", 1))  # read, and answered: the reader is not what waits
        assert await world.inputs.receive() == Aborted(NOW_NS, "other", "fills the mailbox", "client")
        assert await world.inputs.receive() == FrontEndLost(NOW_NS, "gone")
        await other.ask(Ask("ping", 2))
        await wait_all_tasks_blocked(0.05)
        assert [row["name"] for row in world.gateway.frontends()] == ["other"]
        assert world.gateway.stats["frontends_lost"] == 1


async def test_two_waits_are_counted_apart(endpoint: str) -> None:
    """The reader stays deaf, and silence means nothing, when another input that waited got its place first."""
    async with gateway(endpoint, silence_s=0.2, mailbox=1) as world:
        await world.peer("gone")
        other = await world.peer("other")
        await other.send(Abort("0"))
        while not world.gateway.stats["frontends_lost"]:  # its loss waits for room
            await other.ask(Ask("ping", 1))
            await wait_all_tasks_blocked(0.02)
        await other.send(Abort("1"), Abort("2"))  # and the reader behind it
        while world.gateway.stats["mailbox_full"] < 2:
            await wait_all_tasks_blocked(0.02)
        assert await world.inputs.receive() == Aborted(NOW_NS, "other", "0", "client")
        for _ in range(20):
            await wait_all_tasks_blocked(0.02)
        assert [row["name"] for row in world.gateway.frontends()] == ["other"]
        assert world.gateway.stats["frontends_lost"] == 1


# --- questions -------------------------------------------------------------------------------------------------------


async def test_questions_are_answered_by_their_handlers(endpoint: str) -> None:
    """Known ones by what was passed in, an unknown one with the list of those known, a failing one as a failure."""

    async def status(options: dict[str, int]) -> tuple[bool, str]:
        return True, f"deep={options['deep']}"

    async def broken(options: dict[str, int]) -> tuple[bool, str]:
        raise OSError("no disk")

    async with gateway(endpoint, asks={"status": status, "broken": broken}) as world:
        peer = await world.peer("fe")
        assert await peer.ask(Ask("status", 1, {"deep": 2})) == Answer(1, True, "deep=2")
        unknown = await peer.ask(Ask("what", 2))
        assert isinstance(unknown, Answer)
        assert not unknown.ok
        assert "broken, ping, status" in unknown.body
        failed = await peer.ask(Ask("broken", 3))
        assert failed == Answer(3, False, "broken failed: OSError('no disk')")
        assert world.gateway.stats["asks_failed"] == 1
        assert await peer.ask(Ask("ping", 4)) == Answer(4, True, "life-1")


async def test_slow_questions_do_not_pile_up_nor_stop_the_reading(endpoint: str) -> None:
    """While as many as allowed are being answered, the next one is told so, and requests go through."""
    release = trio.Event()

    async def slow(options: dict[str, int]) -> tuple[bool, str]:
        await release.wait()
        return True, "done"

    async with gateway(endpoint, asks={"slow": slow}, limits=Limits(asks_running_max=2)) as world:
        peer = await world.peer("fe")
        await peer.send(Ask("slow", 1), Ask("slow", 2))
        answer = await peer.ask(Ask("slow", 3))
        assert isinstance(answer, Answer)
        assert (answer.ticket, answer.ok) == (3, False)
        await peer.send(Abort("a"))
        assert isinstance(await world.inputs.receive(), Aborted)
        release.set()
        tickets = {message.ticket for message in [await peer.recv(), await peer.recv()] if isinstance(message, Answer)}
        assert tickets == {1, 2}
        assert isinstance(await peer.ask(Ask("slow", 4)), Answer)


async def test_two_gateways_cannot_share_a_socket(endpoint: str) -> None:
    """The second one says who is in the way instead of stealing the address."""
    async with gateway(endpoint):
        with pytest.raises(BaseExceptionGroup) as caught:
            async with gateway(endpoint):
                raise AssertionError("not reached")
        assert caught.group_contains(EndpointInUse, match="a live process listens")
