"""Streams over the daemon's deaths: nothing of the output is missing or repeated, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from allocator.columns import F32, pack_i32, pack_i64
from ipc.client import DaemonClient
from ipc.client_stream import Event, RequestStream, Tokens
from ipc.errors import DaemonLost
from ipc.handshake import Limits
from ipc.messages import (
    Abort,
    Accepted,
    Acknowledge,
    Continued,
    FinishAt,
    Finished,
    Generate,
    Logprobs,
    Refused,
    Rejected,
    RequestLogprobs,
    Resume,
    Sampling,
    TokenBatch,
)
from tests.ipc.fake_daemon import FakeDaemon, connected, fake_daemon, finished, tokens
from tests.ipc.test_client import accept, request


def continued(id: str, number: int, behind: int, rest: list[int], choice: int = 0, **more: Any) -> Continued:
    """The daemon goes on with a choice."""
    return Continued(id, choice, number, behind, pack_i64(rest), **more)


def resume(id: str, held: list[int], choice: int = 0) -> Resume:
    """What the client says of a choice of which it holds these tokens."""
    return Resume(id, choice, pack_i64(held))


@asynccontextmanager
async def cut(endpoint: str, limits: Limits | None = None, **waits: float) -> AsyncIterator[tuple[FakeDaemon, Any]]:
    """A daemon's first life, its client, and `again`: ends that life and begins the next, until it has welcomed."""
    lives: list[Any] = []
    with trio.fail_after(30):
        async with DaemonClient(endpoint, "fe", **({"return_within_s": 20.0} | waits)) as client:

            async def again(life: str = "life-2") -> FakeDaemon:
                if lives:
                    await lives.pop().__aexit__(None, None, None)
                context = fake_daemon(endpoint, life, limits)
                daemon = await context.__aenter__()
                lives.append(context)
                connects = client.stats["connects"]
                while client.stats["connects"] == connects:
                    await wait_all_tasks_blocked(0.005)
                return daemon

            try:
                yield client, again
            finally:
                while lives:
                    await lives.pop().__aexit__(None, None, None)


async def came(client: DaemonClient, count: int) -> None:
    """Wait until so many tokens have come."""
    while client.stats["tokens"] < count:
        await wait_all_tasks_blocked(0.001)


async def accepted_and_resumed(daemon: FakeDaemon, stream: RequestStream, again: Any) -> FakeDaemon:
    """A stream is accepted, its daemon is cut off, and the next one has heard that it would go on."""
    await accept(daemon, 5)
    assert isinstance(await anext(stream), Accepted)
    daemon = await again()
    assert await daemon.got.receive() == resume("a", [])
    return daemon


async def rest(stream: RequestStream) -> list[Event]:
    """Every event to the end, tokens of one choice in one event per run."""
    return [event async for event in stream]


@pytest.mark.parametrize("life", ["life-1", "life-2"])
async def test_a_stream_goes_on_behind_the_tokens_that_came(endpoint: str, life: str) -> None:
    """After a break, to the same life or another: the daemon hears what is held; what comes before its reply, and what
    was known, is dropped; the rest follows, and the end."""
    async with cut(endpoint) as (client, again):
        daemon = await again("life-1")
        async with client.generate(request()) as stream:
            await accept(daemon, 5)
            await daemon.send(tokens(1, {5: 10}), tokens(2, {5: 11}))
            assert isinstance(await anext(stream), Accepted)
            await came(client, 2)
            got = (await anext(stream)).tokens
            daemon = await again(life)
            assert await daemon.got.receive() == resume("a", [10, 11])
            await daemon.send(tokens(7, {5: 13}), finished("a", 5, output_tokens=4))  # of steps before the reply
            await daemon.send(continued("a", 5, 1, [11, 12, 13]), tokens(8, {5: 14}))
            await daemon.send(finished("a", 5, output_tokens=5))
            events = await rest(stream)
        got += [token for event in events if isinstance(event, Tokens) for token in event.tokens]
        assert got == [10, 11, 12, 13, 14]
        assert [type(event) for event in events].count(Finished) == 1
        assert isinstance(events[-1], Finished)
        assert await daemon.got.receive() == Acknowledge(["a"])
        assert client.stats["aborts"] == 0


async def test_what_was_not_accepted_is_sent_again(endpoint: str) -> None:
    """The acceptance may have been lost, and tokens behind it: each choice is taken up from nothing."""
    async with cut(endpoint) as (client, again):
        daemon = await again()
        async with client.generate(request(n=2)) as stream:
            assert await daemon.got.receive() == request(n=2)
            daemon = await again()
            assert await accept(daemon, 3, n=2) == request(n=2)
            await daemon.send(finished("a", 4, 1, output_tokens=1))  # one choice has ended over there already
            assert [await daemon.got.receive() for _ in range(2)] == [resume("a", []), resume("a", [], 1)]
            await daemon.send(continued("a", 4, 0, [9], choice=1), finished("a", 4, 1, output_tokens=1))
            await daemon.send(continued("a", 3, 0, [7]), tokens(5, {3: 8}), finished("a", 3, output_tokens=2))
            events = await rest(stream)
        assert isinstance(events[0], Accepted)
        assert [type(event) for event in events].count(Accepted) == 1
        by_choice: dict[int, list[int]] = {0: [], 1: []}
        for event in events:
            if isinstance(event, Tokens):
                by_choice[event.choice] += event.tokens
        assert by_choice == {0: [7, 8], 1: [9]}


async def test_a_refusal_of_what_is_sent_again_is_its_answer(endpoint: str) -> None:
    """A daemon that comes back full or draining refuses what it had not accepted; that is one event."""
    async with cut(endpoint) as (client, again):
        daemon = await again()
        async with client.generate(request()) as stream:
            await daemon.got.receive()
            daemon = await again()
            await daemon.got.receive()
            await daemon.send(Refused("a", "draining", "no more"))
            assert await rest(stream) == [Refused("a", "draining", "no more")]


async def test_a_request_that_the_daemon_forgot_is_begun_anew_behind_its_tokens(endpoint: str) -> None:
    """Its journal lost the end: the request is sent again with the seed that it had, then what is held; ended choices
    end there at once."""
    async with cut(endpoint) as (client, again):
        daemon = await again()
        async with client.generate(request(n=2)) as stream:
            await accept(daemon, 5, n=2)
            await daemon.send(tokens(1, {5: 10, 6: 20}), finished("a", 6, 1, output_tokens=1))
            assert await anext(stream) == Accepted("a", 5, 2, 8, 7)
            await came(client, 2)
            assert {(await anext(stream)).choice for _ in range(2)} == {0, 1}
            assert isinstance(await anext(stream), Finished)
            daemon = await again()
            heard = [await daemon.got.receive() for _ in range(2)]
            assert heard == [resume("a", [10]), FinishAt("a", 1, 1)]
            await daemon.send(Refused("a", "unknown_request", "no such request"))
            seeded = await accept(daemon, 2, n=2)
            assert (seeded.id, seeded.prompt, seeded.sampling) == ("a", request().prompt, Sampling(seed=7))
            assert [await daemon.got.receive() for _ in range(2)] == [resume("a", [10]), FinishAt("a", 1, 1)]
            await daemon.send(continued("a", 2, 1, []), tokens(1, {2: 11, 3: 99}), finished("a", 3, 1))
            await daemon.send(finished("a", 2, output_tokens=2))
            assert await rest(stream) == [Tokens(0, [11]), finished("a", 2, output_tokens=2)]
        assert await daemon.got.receive() == Acknowledge(["a"])


async def test_a_request_that_was_forgotten_and_is_refused_is_lost_in_words(endpoint: str) -> None:
    """Accepted once, it cannot end as a plain refusal; nothing of it stays behind."""
    async with cut(endpoint) as (client, again):
        daemon = await again()
        async with client.generate(request()) as stream:
            daemon = await accepted_and_resumed(daemon, stream, again)
            await daemon.send(Refused("a", "unknown_request", "no such request"))
            assert isinstance(await daemon.got.receive(), Generate)
            await daemon.send(Refused("a", "queue_full", "full"))
            with pytest.raises(DaemonLost, match="refuses it: full"):
                await anext(stream)
        assert [await daemon.got.receive() for _ in range(2)] == [Abort("a"), Acknowledge(["a"])]
        assert not len(client._streams)


@pytest.mark.parametrize(
    ("behind", "known"), [(1, [99]), (3, []), (0, [10])], ids=["other tokens", "a gap", "fewer than are held"]
)
async def test_a_daemon_that_remembers_other_tokens_is_not_believed(
    endpoint: str, behind: int, known: list[int]
) -> None:
    """A conflict ends the stream with its numbers; no token of it is delivered."""
    async with cut(endpoint) as (client, again):
        daemon = await again()
        async with client.generate(request()) as stream:
            await accept(daemon, 5)
            await daemon.send(tokens(1, {5: 10}), tokens(2, {5: 11}))
            assert isinstance(await anext(stream), Accepted)
            await came(client, 2)
            assert await anext(stream) == Tokens(0, [10, 11])
            daemon = await again()
            await daemon.got.receive()
            await daemon.send(continued("a", 5, behind, known))
            with pytest.raises(DaemonLost, match="remembers another request"):
                await anext(stream)
        assert [await daemon.got.receive() for _ in range(2)] == [Abort("a"), Acknowledge(["a"])]


async def test_the_daemons_own_verdict_of_a_conflict_is_the_end(endpoint: str) -> None:
    """A fault while the choice is taken up needs no Continued."""
    async with cut(endpoint) as (client, again):
        daemon = await again()
        async with client.generate(request()) as stream:
            daemon = await accepted_and_resumed(daemon, stream, again)
            await daemon.send(finished("a", 5, reason="fault"))
            assert await rest(stream) == [finished("a", 5, reason="fault")]


async def test_what_was_said_into_the_void_is_said_again(endpoint: str) -> None:
    """A stop string found and an abort asked for while nobody listened reach the next life, behind the resume."""
    async with cut(endpoint) as (client, again):
        daemon = await again()
        async with client.generate(request("a")) as stopped, client.generate(request("b")) as aborted:
            await accept(daemon, 1)
            await accept(daemon, 2)
            await daemon.send(tokens(1, {1: 10, 2: 20}))
            await came(client, 2)
            for stream in (stopped, aborted):
                assert isinstance(await anext(stream), Accepted)
                await anext(stream)
            daemon.socket.close()
            while client.connected:
                await wait_all_tasks_blocked(0.005)
            stopped.finish_at(0, 1)
            aborted.abort()
            daemon = await again()
            heard = [await daemon.got.receive() for _ in range(3)]
            assert heard == [resume("a", [10]), resume("b", [20]), Abort("b")]
            await daemon.send(continued("a", 1, 1, [11]), finished("b", 2, reason="abort"))
            assert await daemon.got.receive() == FinishAt("a", 0, 1)
            await daemon.send(finished("a", 1, output_tokens=1), continued("b", 2, 1, []))
            await daemon.send(finished("b", 2, reason="abort", output_tokens=1))
            assert (await rest(stopped))[-1] == finished("a", 1, output_tokens=1)
            assert (await rest(aborted))[-1].reason == "abort"


async def test_C10_a_reader_that_left_while_the_daemon_was_away_leaves_nothing_running(endpoint: str) -> None:
    """Its request is not taken up but aborted and acknowledged, accepted or not, in whichever life."""
    async with cut(endpoint) as (client, again):
        daemon = await again()
        async with client.generate(request("a")), client.generate(request("b")):
            await daemon.got.receive()
            await accept(daemon, 2)
            daemon.socket.close()
            while client.connected:
                await wait_all_tasks_blocked(0.005)
        daemon = await again()
        heard = [await daemon.got.receive() for _ in range(4)]
        assert heard == [Abort("a"), Acknowledge(["a"]), Abort("b"), Acknowledge(["b"])]
        assert not len(client._streams)


async def test_log_probabilities_are_taken_up_by_position(endpoint: str) -> None:
    """Those of the output come one per token, also when several positions share one entry; those of the prompt go on
    where they stopped."""

    def values(*chosen: float) -> Logprobs:
        column = np.array(chosen, dtype=F32).tobytes()
        return Logprobs(1, column, pack_i32([1] * len(chosen)), pack_i64([9] * len(chosen)), column)

    async with cut(endpoint) as (client, again):
        daemon = await again()
        async with client.generate(request()) as stream:
            await accept(daemon, 1)
            await daemon.send(TokenBatch(1, b"", b"", [RequestLogprobs(1, 1, values(-1.0))]))
            await daemon.send(TokenBatch(2, pack_i64([1]), pack_i64([5]), [RequestLogprobs(1, -1, values(-0.5))]))
            assert isinstance(await anext(stream), Accepted)
            first = await anext(stream)
            if not first.tokens:
                first = await anext(stream)
            daemon = await again()
            await daemon.got.receive()
            known = [RequestLogprobs(1, 1, values(-1.0, -2.0)), RequestLogprobs(1, -1, values(-0.5, -0.25, -0.125))]
            await daemon.send(continued("a", 1, 0, [5, 6, 7], logprobs=known))
            assert await anext(stream) == Tokens(0, [6, 7], [values(-0.25), values(-0.125)], [(2, values(-2.0))])


async def test_a_lost_message_is_noticed_at_the_end_and_asked_for(endpoint: str) -> None:
    """The end counts more tokens than came: the rest is asked for; when that helps nothing, the stream is lost."""
    async with cut(endpoint) as (client, again):
        daemon = await again()
        async with client.generate(request("a")) as stream:
            await accept(daemon, 1)
            await daemon.send(tokens(1, {1: 10}), finished("a", 1, output_tokens=2))
            assert await daemon.got.receive() == resume("a", [10])
            await daemon.send(continued("a", 1, 1, [11]), finished("a", 1, output_tokens=2))
            got = [token for event in await rest(stream) if isinstance(event, Tokens) for token in event.tokens]
            assert got == [10, 11]
        assert await daemon.got.receive() == Acknowledge(["a"])
        async with client.generate(request("b")) as stream:
            await accept(daemon, 2)
            await daemon.send(finished("b", 2, output_tokens=1))
            for _ in range(3):
                assert await daemon.got.receive() == resume("b", [])
                await daemon.send(continued("b", 2, 0, []), finished("b", 2, output_tokens=1))
            with pytest.raises(DaemonLost, match="1 tokens were sent, 0 came"):
                await rest(stream)


async def test_a_daemon_that_stays_away_is_not_waited_for_beyond_the_limit(endpoint: str) -> None:
    """Nobody answers: after `return_within_s` every reader is told, and what was open is aborted if one comes after."""
    async with cut(endpoint, return_within_s=1.0) as (client, again):
        daemon = await again()
        begun = trio.current_time()
        async with client.generate(request()) as stream:
            await accept(daemon, 1)
            daemon.socket.close()
            with pytest.raises(DaemonLost, match="nobody answers"):
                await rest(stream)
        assert 0.9 < trio.current_time() - begun < 8.0
        assert client.stats["given_up"] == 1
        daemon = await again()
        assert [await daemon.got.receive() for _ in range(2)] == [Abort("a"), Acknowledge(["a"])]


async def test_a_daemon_that_boots_is_waited_for(endpoint: str) -> None:
    """It says that it boots for longer than the limit for silence: that is a sign of life, and the stream goes on."""
    async with cut(endpoint, return_within_s=0.5) as (client, again):
        daemon = await again()
        async with client.generate(request()) as stream:
            await accept(daemon, 1)
            assert isinstance(await anext(stream), Accepted)
            daemon.welcoming = False
            await daemon.send(Rejected("not_connected", "who are you?"))
            begun = trio.current_time()
            while trio.current_time() - begun < 1.0:
                await daemon.got.receive()  # Connect, again and again
                await daemon.send(Rejected("booting", "the model is being loaded"))
            await daemon.got.receive()
            daemon.welcoming = True
            await daemon.send(Rejected("booting", "the model is being loaded"))
            assert await daemon.got.receive() == resume("a", [])


async def test_a_front_end_that_stops_waits_for_nobody(endpoint: str) -> None:
    """Told to end, it gives up what waits for a daemon at once, and later losses too."""
    async with cut(endpoint) as (client, again):
        daemon = await again()
        async with client.generate(request("a")) as first:
            await daemon.got.receive()
            daemon.socket.close()
            while client.connected:
                await wait_all_tasks_blocked(0.005)
            client.stop_waiting()
            with pytest.raises(DaemonLost):
                await anext(first)
        daemon = await again()
        async with client.generate(request("b")) as second:
            daemon.socket.close()
            with pytest.raises(DaemonLost):
                await anext(second)


async def test_two_processes_of_one_name_do_not_fight(endpoint: str) -> None:
    """Whoever was taken over ends its streams and stays away, instead of taking the connection back."""
    async with connected(endpoint, return_within_s=20.0) as (daemon, client):
        async with client.generate(request()) as stream:
            await accept(daemon, 1)
            assert isinstance(await anext(stream), Accepted)
            await daemon.send(Rejected("taken_over", "another connection introduced itself as fe"))
            with pytest.raises(DaemonLost, match="taken_over"):
                await anext(stream)
        with pytest.raises(DaemonLost, match="taken_over"):
            await client.wait_connected(60)
        assert client.stats["connects"] == 1


async def test_a_process_that_was_killed_comes_back_for_its_requests(endpoint: str) -> None:
    """Another process of the same name, which kept request and tokens, goes on behind them."""
    async with connected(endpoint) as (daemon, client):
        async with client.resume(request(), [[10, 11]]) as stream:
            await accept(daemon, 5)
            assert await daemon.got.receive() == resume("a", [10, 11])
            await daemon.send(continued("a", 5, 2, [12]), tokens(4, {5: 13}), finished("a", 5, output_tokens=4))
            events = await rest(stream)
        assert [token for event in events if isinstance(event, Tokens) for token in event.tokens] == [12, 13]


async def test_output_that_no_message_can_hold_is_lost_in_words(endpoint: str) -> None:
    """A Resume over the size limit would cost every stream its connection: this one alone ends."""
    limits = Limits(message_bytes_max=2000, prompt_tokens_max=100)
    async with cut(endpoint, limits) as (client, again):
        daemon = await again()
        async with client.generate(request("a")) as long, client.generate(request("b")) as short:
            await accept(daemon, 1)
            await accept(daemon, 2)
            for step in range(200):
                await daemon.send(tokens(step, {1: step}))
            assert isinstance(await anext(long), Accepted)
            await came(client, 200)
            daemon = await again()
            await anext(long)
            with pytest.raises(DaemonLost, match="200 output tokens"):
                await anext(long)
            heard = [await daemon.got.receive() for _ in range(3)]
            assert heard == [Abort("a"), Acknowledge(["a"]), resume("b", [])]
            await daemon.send(continued("b", 2, 0, []), finished("b", 2))
            assert isinstance((await rest(short))[-1], Finished)


async def test_nothing_heard_of_a_stream_ends_it(endpoint: str) -> None:
    """A daemon that never says how a stream goes on, connection after connection, costs that stream only."""
    async with connected(endpoint, return_within_s=20.0) as (daemon, client), client.generate(request()) as stream:
        await accept(daemon, 1)
        assert isinstance(await anext(stream), Accepted)
        for _ in range(16):
            connects = client.stats["connects"]
            await daemon.send(Rejected("not_connected", "who are you?"))
            while client.stats["connects"] == connects:
                await wait_all_tasks_blocked(0.002)
            assert await daemon.got.receive() == resume("a", [])
        await daemon.send(Rejected("not_connected", "who are you?"))
        with pytest.raises(DaemonLost, match="taken up 16 times"):
            await anext(stream)


async def test_who_waits_says_what_for(endpoint: str) -> None:
    """How the last connection ended, how many wait, how it looks now; nothing of it while one is there."""
    async with cut(endpoint) as (client, again):
        assert client.lost_reason == "not connected yet"
        daemon = await again()
        assert client.lost_reason == ""
        async with client.generate(request()) as stream:
            await accept(daemon, 1)
            assert isinstance(await anext(stream), Accepted)
            daemon.welcoming = False
            await daemon.send(Rejected("not_connected", "who are you?"))
            await daemon.got.receive()
            assert "who are you?; streams that wait for it: 1" in client.lost_reason
            await daemon.send(Rejected("booting", "booting: ranks that have not joined: 0.1"))
            await daemon.got.receive()
            assert "who are you?; streams that wait for it: 1" in client.lost_reason
            assert client.lost_reason.endswith("; now: booting: ranks that have not joined: 0.1")
            daemon.welcoming = True
            await daemon.send(Rejected("booting", "soon"))
            assert await daemon.got.receive() == resume("a", [])
            assert client.lost_reason == ""
