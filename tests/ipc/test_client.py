"""The front end's client: every stream ends, every hang-up arrives, every dead daemon is noticed."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from allocator.columns import F32, pack_i32, pack_i64
from ipc.client import DaemonClient
from ipc.client_stream import Event, RequestStream, Tokens
from ipc.codec import encode
from ipc.errors import DaemonLost
from ipc.handshake import Limits
from ipc.messages import (
    Abort,
    Accepted,
    Acknowledge,
    Answer,
    Ask,
    FinishAt,
    Generate,
    Logprobs,
    Refused,
    Rejected,
    RequestLogprobs,
    Sampling,
    TokenBatch,
    Welcome,
)
from ipc.sockets import bind_router
from tests.ipc.fake_daemon import FACTS, FakeDaemon, connected, fake_daemon, finished, tokens

HALF = np.array([-0.5], dtype=F32).tobytes()


def request(id: str = "a", n: int = 1, **fields: object) -> Generate:
    """A small request."""
    return Generate(id, pack_i64([1, 2, 3]), Sampling(), 8, n=n, **fields)  # type: ignore[arg-type]


async def accept(daemon: FakeDaemon, first: int, n: int = 1) -> Generate:
    """Read one Generate and accept it."""
    message = await daemon.got.receive()
    assert isinstance(message, Generate)
    await daemon.send(Accepted(message.id, first, n, 8, 7))
    return message


async def test_a_request_from_start_to_end(endpoint: str) -> None:
    """Accepted, tokens in order, Finished, the end; and the daemon hears that the end was seen."""
    async with connected(endpoint) as (daemon, client):
        got: list[Event] = []
        async with client.generate(request()) as stream:
            assert await accept(daemon, 5) == request()
            await daemon.send(tokens(1, {5: 10}), tokens(2, {5: 11}), finished("a", 5))
            async for event in stream:
                got.append(event)
        assert got[0] == Accepted("a", 5, 1, 8, 7)
        assert [t for event in got if isinstance(event, Tokens) for t in event.tokens] == [10, 11]
        assert got[-1] == finished("a", 5)
        assert await daemon.got.receive() == Acknowledge(["a"])
        assert client.stats["aborts"] == 0
        assert client.stats["tokens"] == 2


async def test_choices_get_their_own_tokens_and_ends(endpoint: str) -> None:
    """With n = 3, tokens of one step are told apart, and the stream ends with the last Finished, not the first."""
    async with connected(endpoint) as (daemon, client), client.generate(request(n=3)) as stream:
        await accept(daemon, 20, n=3)
        await daemon.send(tokens(1, {20: 1, 22: 3, 21: 2}), finished("a", 21, 1), tokens(2, {20: 4, 22: 6}))
        await daemon.send(finished("a", 22, 2), finished("a", 20, 0))
        by_choice: dict[int, list[int]] = {0: [], 1: [], 2: []}
        ends: list[int] = []
        async for event in stream:
            if isinstance(event, Tokens):
                assert event.choice not in ends
                by_choice[event.choice] += event.tokens
            elif not isinstance(event, Accepted):
                ends.append(event.choice)
        assert by_choice == {0: [1, 4], 1: [2], 2: [3, 6]}
        assert sorted(ends) == [0, 1, 2]


async def test_a_slow_reader_gets_everything_in_few_events(endpoint: str) -> None:
    """A thousand tokens that nobody read wait as one event; none is missing."""
    async with connected(endpoint) as (daemon, client), client.generate(request()) as stream:
        await accept(daemon, 1)
        assert isinstance(await anext(stream), Accepted)
        for step in range(1000):
            await daemon.send(tokens(step, {1: step}))
        await daemon.send(finished("a", 1))
        while client.stats["tokens"] < 1000:
            await wait_all_tasks_blocked(0.001)
        events = [event async for event in stream]
        assert events == [Tokens(0, list(range(1000))), finished("a", 1)]


async def test_log_probabilities_come_with_their_tokens(endpoint: str) -> None:
    """Output log probabilities stand beside the tokens, those of the prompt beside their first position."""
    values = Logprobs(1, HALF, pack_i32([1]), pack_i64([9]), HALF)
    async with connected(endpoint) as (daemon, client), client.generate(request()) as stream:
        await accept(daemon, 1)
        await daemon.send(TokenBatch(1, b"", b"", [RequestLogprobs(1, 1, values)]))
        await daemon.send(TokenBatch(2, pack_i64([1]), pack_i64([9]), [RequestLogprobs(1, -1, values)]))
        await daemon.send(finished("a", 1))
        while client.stats["token_batches"] < 2:
            await wait_all_tasks_blocked(0.001)
        assert isinstance(await anext(stream), Accepted)
        assert await anext(stream) == Tokens(0, [9], [values], [(1, values)])


async def test_a_refused_request_is_one_event(endpoint: str) -> None:
    """A refusal is the first and last event; there is nothing to abort or acknowledge."""
    async with connected(endpoint) as (daemon, client):
        async with client.generate(request()) as stream:
            await daemon.got.receive()
            await daemon.send(Refused("a", "queue_full", "full", retry_after_ms=500))
            assert [event async for event in stream] == [Refused("a", "queue_full", "full", retry_after_ms=500)]
        await client_is_quiet(daemon, client)


async def client_is_quiet(daemon: FakeDaemon, client: DaemonClient) -> None:
    """Nothing but what the client is asked next reaches the daemon."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, "marker")
        marker = await daemon.got.receive()
        assert isinstance(marker, Ask)
        assert marker.what == "marker"
        await daemon.send(Answer(marker.ticket, True, ""))


@pytest.mark.parametrize(
    ("generate", "field"),
    [
        (request(n=0), "n"),
        (request(min_tokens=-1), "min_tokens"),
        (request(stop_ids=b"123"), "stop_ids"),
        (request(priority=2**70), "priority"),
        (Generate("a", b"1234567", Sampling()), "prompt"),
        (Generate("a", b"", Sampling(temperature=math.nan)), "temperature"),
        (Generate("a", b"", Sampling(seed=10**20)), "seed"),
        (Generate("a", b"", Sampling(top_k=2**31)), "top_k"),
        (Generate("", b"", Sampling()), "id"),
    ],
)
async def test_what_the_daemon_could_not_read_is_refused_before_it_is_sent(
    endpoint: str, generate: Generate, field: str
) -> None:
    """The field at fault is named, the other streams are untouched, nothing is sent."""
    async with connected(endpoint) as (daemon, client):
        async with client.generate(generate) as stream:
            (event,) = [event async for event in stream]
            assert isinstance(event, Refused)
            assert (event.code, event.field) == ("bad_parameter", field)
        await client_is_quiet(daemon, client)


async def test_a_request_over_the_size_limit_is_refused_before_it_is_sent(endpoint: str) -> None:
    """ZeroMQ would cut the connection, and with it every other stream: the client knows the limit."""
    limits = Limits(message_bytes_max=1000, prompt_tokens_max=200)
    async with fake_daemon(endpoint, limits=limits) as daemon, DaemonClient(endpoint, "fe") as client:
        await client.wait_connected(5)
        for count, code in ((190, "bad_parameter"), (201, "prompt_too_long")):
            async with client.generate(Generate("a", bytes(8 * count), Sampling())) as stream:
                (event,) = [event async for event in stream]
                assert isinstance(event, Refused)
                assert event.code == code
        await client_is_quiet(daemon, client)


# --- hanging up ------------------------------------------------------------------------------------------------------


async def leave_before_acceptance(daemon: FakeDaemon, stream: RequestStream) -> None:
    """Hang up while the request waits."""
    await daemon.got.receive()


async def leave_after_acceptance(daemon: FakeDaemon, stream: RequestStream) -> None:
    """Hang up between acceptance and the first token."""
    await accept(daemon, 1)
    await anext(stream)


async def leave_in_the_middle(daemon: FakeDaemon, stream: RequestStream) -> None:
    """Hang up with tokens read and tokens unread."""
    await accept(daemon, 1)
    await daemon.send(tokens(1, {1: 1}))
    await anext(stream)
    await anext(stream)
    await daemon.send(tokens(2, {1: 2}))


PLACES = [leave_before_acceptance, leave_after_acceptance, leave_in_the_middle]
Place = Callable[[FakeDaemon, RequestStream], Awaitable[None]]


@pytest.mark.parametrize("place", PLACES)
async def test_C10_hanging_up_always_reaches_the_daemon(endpoint: str, place: Place) -> None:
    """However the reader leaves, one Abort is sent; later tokens are dropped; the end is acknowledged."""
    async with connected(endpoint) as (daemon, client):
        async with client.generate(request()) as stream:
            await place(daemon, stream)
        assert await daemon.got.receive() == Abort("a")
        if place is leave_before_acceptance:
            await daemon.send(Accepted("a", 1, 1, 8, 7))
        await daemon.send(tokens(3, {1: 3}), finished("a", 1, reason="abort"))
        assert await daemon.got.receive() == Acknowledge(["a"])
        assert client.stats["stray_tokens"] >= 1
        async with client.generate(request()) as again:  # the id is free again
            await accept(daemon, 2)
            assert isinstance(await anext(again), Accepted)


@pytest.mark.parametrize("place", PLACES)
async def test_C10_hanging_up_under_cancellation_reaches_the_daemon(endpoint: str, place: Place) -> None:
    """A reader that is cancelled while it waits for the next event sends its Abort all the same."""
    async with connected(endpoint) as (daemon, client):
        left = trio.Event()

        async def read() -> None:
            async with client.generate(request()) as stream:
                await place(daemon, stream)
                left.set()
                async for _ in stream:
                    pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await left.wait()
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert await daemon.got.receive() == Abort("a")


async def test_C10_a_hang_up_while_the_daemon_reads_nothing_is_sent_when_it_does(endpoint: str) -> None:
    """With every queue full, leaving does not wait, and the Abort follows as soon as there is room."""
    async with connected(endpoint) as (daemon, client):
        async with client.generate(request()):
            await accept(daemon, 1)
            connection = client._connection
            assert connection is not None
            connection.backlog.append(encode(Ask("marker", 1)))  # as if the high-water mark were reached
            connection.backlog_grew.set()
        assert await daemon.got.receive() == Ask("marker", 1)
        assert await daemon.got.receive() == Abort("a")


async def test_a_request_cancelled_before_it_was_sent_is_forgotten(endpoint: str) -> None:
    """Cancelled at the entrance: nothing was sent, nothing is aborted, the id can be used."""
    async with connected(endpoint) as (daemon, client):
        with trio.CancelScope() as scope:
            scope.cancel()
            async with client.generate(request()):
                raise AssertionError("not reached")
        await client_is_quiet(daemon, client)
        async with client.generate(request()):
            await accept(daemon, 1)


async def test_an_id_in_use_is_an_error_of_the_caller(endpoint: str) -> None:
    """Two open streams cannot share an id."""
    async with connected(endpoint) as (daemon, client), client.generate(request()):
        await accept(daemon, 1)
        with pytest.raises(ValueError, match="'a' is in use"):
            await client.generate(request()).__aenter__()


async def test_abort_and_finish_at_let_the_stream_go_on_to_its_end(endpoint: str) -> None:
    """Both reach the daemon; the stream still delivers what comes, then the end."""
    async with connected(endpoint) as (daemon, client):
        async with client.generate(request()) as stream:
            await accept(daemon, 1)
            assert isinstance(await anext(stream), Accepted)
            stream.finish_at(0, 3)
            assert await daemon.got.receive() == FinishAt("a", 0, 3)
            stream.abort()
            assert await daemon.got.receive() == Abort("a")
            await daemon.send(finished("a", 1, reason="abort"))
            assert [event async for event in stream][-1] == finished("a", 1, reason="abort")
            stream.abort()
            stream.finish_at(0, 3)
        assert await daemon.got.receive() == Acknowledge(["a"])
        await client_is_quiet(daemon, client)


class LevelLog:
    """Keeps level and event of every line."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda event, **_: self.lines.append((level, event))


async def test_leaving_the_client_aborts_what_is_open_and_ends_its_readers(endpoint: str) -> None:
    """When the front end stops, the daemon hears of every open request."""
    with trio.fail_after(10):
        async with fake_daemon(endpoint) as daemon, trio.open_nursery() as nursery:
            log = LevelLog()
            async with DaemonClient(endpoint, "fe", log=log) as client:
                await client.wait_connected(5)
                reasons: list[str] = []
                nursery.start_soon(read_to_the_end, client, "a", trio.Event(), reasons)
                await accept(daemon, 1)
            assert await daemon.got.receive() == Abort("a")
            assert reasons == ["this front end is stopping"]
            assert log.lines == [("info", "daemon_connected"), ("info", "daemon_left")], "no loss, no warning"


# --- questions -------------------------------------------------------------------------------------------------------


async def test_answers_find_their_questions(endpoint: str) -> None:
    """Two questions answered in the other order; an unanswered one gives up in time."""
    async with connected(endpoint) as (daemon, client):
        answers: dict[str, Answer] = {}

        async def ask(what: str) -> None:
            answers[what] = await client.ask(what, {"k": 1})

        async with trio.open_nursery() as nursery:
            for what in ("status", "metrics"):
                nursery.start_soon(ask, what)
            asked = [await daemon.got.receive() for _ in range(2)]
            for message in reversed(asked):
                assert isinstance(message, Ask)
                assert message.options == {"k": 1}
                await daemon.send(Answer(message.ticket, True, message.what))
        assert {what: answer.body for what, answer in answers.items()} == {"status": "status", "metrics": "metrics"}
        with pytest.raises(trio.TooSlowError):
            await client.ask("status", timeout_s=0.01)


# --- losing the daemon -----------------------------------------------------------------------------------------------


async def read_to_the_end(client: DaemonClient, id: str, started: trio.Event, reasons: list[str]) -> None:
    """Read a stream until its daemon is lost; note the reason."""
    try:
        async with client.generate(request(id)) as stream:
            started.set()
            async for _ in stream:
                pass
    except DaemonLost as lost:
        reasons.append(lost.reason)


async def test_X1_a_dead_daemon_ends_every_stream_at_once(endpoint: str) -> None:
    """The end of the daemon's process is noticed without waiting for a ping; streams and questions get DaemonLost."""
    reasons: list[str] = []
    async with connected(endpoint) as (daemon, client):
        with trio.fail_after(2):
            async with trio.open_nursery() as nursery:
                for id_ in ("a", "b"):
                    started = trio.Event()
                    nursery.start_soon(read_to_the_end, client, id_, started, reasons)
                    await started.wait()
                    await accept(daemon, ord(id_))
                daemon.socket.close()
        assert len(reasons) == 2
        assert all("process ended" in reason for reason in reasons)
        assert not client.connected
        with pytest.raises(DaemonLost):
            await client.generate(request("c")).__aenter__()
        with pytest.raises(DaemonLost):
            await client.ask("status")


async def test_X1_a_stopped_daemon_is_noticed_within_the_stated_time(endpoint: str) -> None:
    """A daemon that takes messages and answers none, as under SIGSTOP, is lost after `lost_after_s` and one ping."""
    async with connected(endpoint, lost_after_s=1.0) as (daemon, client):
        daemon.answering = False
        reasons: list[str] = []
        begun = trio.current_time()
        await read_to_the_end(client, "a", trio.Event(), reasons)
        assert trio.current_time() - begun <= 3.5
        assert "not answered" in reasons[0]
        assert daemon.pings >= 2


async def test_after_a_break_the_client_returns_and_aborts_what_it_lost(endpoint: str) -> None:
    """What was given up with a connection is aborted and acknowledged on the next one, in one breath."""
    async with connected(endpoint) as (daemon, client):
        reasons: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_to_the_end, client, "a", trio.Event(), reasons)
            await accept(daemon, 1)
            await daemon.send(Rejected("malformed", "what did you say?"))
        assert "malformed" in reasons[0]
        await client.wait_connected(5)
        assert client.stats["connects"] == 2
        assert await daemon.got.receive() == Abort("a")
        assert await daemon.got.receive() == Acknowledge(["a"])
        await daemon.send(finished("a", 1, reason="abort"))
        async with client.generate(request()) as again:  # the id is free, and the old end is none of its own
            await accept(daemon, 2)
            assert isinstance(await anext(again), Accepted)
            await daemon.send(finished("a", 1, reason="abort"), tokens(1, {2: 4}))
            assert await anext(again) == Tokens(0, [4])


async def test_the_client_waits_while_the_daemon_boots(endpoint: str) -> None:
    """First nobody listens, then the model is being loaded, then it is welcomed."""
    with trio.fail_after(20):
        async with DaemonClient(endpoint, "fe") as client:
            with pytest.raises(DaemonLost, match="no daemon at"):
                await client.wait_connected(0.01)
            assert client.last_answer_age() == math.inf
            async with fake_daemon(endpoint) as daemon:
                daemon.welcoming = False
                await daemon.got.receive()
                await daemon.send(Rejected("booting", "the model is being loaded"))
                daemon.welcoming = True
                welcome = await client.wait_connected(10)
                assert welcome.facts == FACTS
                assert client.last_answer_age() < 10


async def test_a_daemon_of_another_version_ends_the_waiting_at_once(endpoint: str) -> None:
    """It will not change by waiting: the reason is given, without running into the time limit."""
    router = bind_router(endpoint)
    with trio.fail_after(10):
        async with DaemonClient(endpoint, "fe") as client:
            identity, _ = await router.recv()
            await router.send([identity, encode(Welcome(99, FACTS, {}, "life"))])
            with pytest.raises(DaemonLost, match="speaks protocol version 99"):
                await client.wait_connected(60)
    router.close()


async def test_noise_from_the_daemon_ends_the_connection_not_the_client(endpoint: str) -> None:
    """Bytes that are no message cost the connection; the client comes back."""
    async with connected(endpoint) as (daemon, client):
        await daemon.socket.send([daemon.peer, b"\xc1"])
        while client.stats["connects"] < 2:
            await wait_all_tasks_blocked(0.01)
        assert client.connected


async def test_the_body_of_the_client_raises_its_own_exceptions(endpoint: str) -> None:
    """An error inside `async with` comes out as itself, not wrapped in a group."""
    with pytest.raises(KeyError, match="mine"):
        async with DaemonClient(endpoint, "fe"):
            raise KeyError("mine")
