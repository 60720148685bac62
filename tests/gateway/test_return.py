"""Coming back: front ends to a daemon of another life, and their streams to where they stood."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from daemon.core.inputs import FrontEndLost, Resumed
from daemon.core.outputs import Reply, TokenColumns
from daemon.gateway_hold import HoldBack
from ipc.client import DaemonClient
from ipc.client_stream import Tokens
from ipc.messages import Accepted, Answer, Ask, Continued, Finished, Logprobs, Refused, RequestLogprobs, Resume
from tests.gateway.harness import FACTS, NOW_NS, accepted, columns, finished, gateway, out, request
from tests.gateway.toy_core import ToyCore


def continued(frontend: int, id: str, number: int, choice: int = 0) -> Reply:
    """The core goes on with a choice from its first token."""
    return Reply(frontend, Continued(id, choice, number, 0, b""))


# --- the gateway -----------------------------------------------------------------------------------------------------


async def test_who_asks_for_life_needs_no_introduction(endpoint: str) -> None:
    """Whoever looks after the daemon hears that its loop turns, also while it boots; nothing else is told."""
    async with gateway(endpoint, opened=False) as world:
        peer = await world.peer()
        assert await peer.ask(Ask("alive", 3)) == Answer(3, True, "life-1")
        for what in ("ping", "status"):  # a front end whose connection was given up must learn it by its pings
            assert getattr(await peer.ask(Ask(what, 4)), "code", "") == "not_connected"
        assert world.gateway.frontends() == []


async def test_front_ends_of_an_earlier_life_have_time_to_come_back(endpoint: str) -> None:
    """It begins when the door opens, not before; who does not come is lost, who comes is not."""
    async with gateway(endpoint, opened=False, silence_s=0.2) as world:
        world.gateway.expect(["stays away", "comes back"], 9)
        for _ in range(20):
            await wait_all_tasks_blocked(0.02)  # booting, for longer than silence is allowed
        assert world.gateway.stats["frontends_lost"] == 0
        world.gateway.open(FACTS)
        peer = await world.peer("comes back")
        await peer.send(Resume("a", 0, b""))
        assert await world.inputs.receive() == Resumed(NOW_NS, "comes back", "a", 0, b"")
        while not world.gateway.stats["frontends_lost"]:
            await peer.ask(Ask("ping", 1))
            await wait_all_tasks_blocked(0.02)
        assert await world.inputs.receive() == FrontEndLost(NOW_NS, "stays away")
        assert [row["name"] for row in world.gateway.frontends()] == ["comes back"]


async def test_live_requests_are_counted_over_returns(endpoint: str) -> None:
    """However often an acceptance, an end or a place in a stream is told again, a choice counts while it lives."""
    async with gateway(endpoint) as world:
        await world.peer("fe")

        def live() -> int:
            return world.gateway.frontends()[0]["live_requests"]

        world.deliver(out(continued(0, "old", 3), continued(0, "old", 4, choice=1)))  # of an earlier life
        assert live() == 1
        world.deliver(out(finished(0, "old", 4, 1), continued(0, "old", 4, choice=1), finished(0, "old", 4, 1)))
        assert live() == 1
        world.deliver(out(accepted(0, "a", 7, n=2), finished(0, "a", 7, 0)))
        world.deliver(out(accepted(0, "a", 7, n=2), finished(0, "a", 7, 0)))  # asked again
        world.deliver(out(continued(0, "a", 7), finished(0, "a", 7, 0), continued(0, "a", 8, choice=1)))
        assert live() == 2
        world.deliver(out(finished(0, "a", 8, 1), finished(0, "old", 3, 0)))
        assert live() == 0
        world.deliver(out(Reply(0, Refused("gone", "unknown_request", "no such request"))))
        assert live() == 0


async def test_log_probabilities_find_a_front_end_that_came_back(endpoint: str) -> None:
    """Those of a prompt come without a token: whose they are is known from the Continued on."""
    async with gateway(endpoint) as world:
        await world.peer("other")
        peer = await world.peer("fe")
        values = Logprobs(0, bytes(4), bytes(4), b"", b"")
        world.deliver(out(continued(1, "a", 5)))
        assert isinstance(await peer.recv(), Continued)
        world.deliver(out(tokens=columns(1, [(0, 1, 1)], logprobs=[RequestLogprobs(5, 1, values)])))
        batch = await peer.recv()
        assert batch.logprobs == [RequestLogprobs(5, 1, values)]


def test_a_continued_waits_behind_its_acceptance() -> None:
    """It is not overtaken by, nor overtakes, the tokens of its request that wait for the disk."""
    hold = HoldBack()
    assert not hold.reply(accepted(0, "a", 2), 5)
    hold.tokens(columns(1, [(0, 2, 10)]))
    assert not hold.reply(continued(0, "a", 2), 6)
    hold.tokens(columns(2, [(0, 2, 11)]))
    assert hold.reply(continued(0, "b", 1), 6)
    kinds = [type(item) if isinstance(item, TokenColumns) else type(item.message) for item in hold.durable(5)]
    assert kinds == [Accepted, TokenColumns, Continued, TokenColumns]


def test_acceptances_of_an_earlier_life_wait_for_no_disk() -> None:
    """They were durable before; only a new one waits, and holds back nothing older than itself."""
    hold = HoldBack()
    hold.known_below(8)
    assert hold.reply(accepted(0, "old", 7), 5)
    assert not hold.reply(accepted(0, "new", 8), 6)
    assert hold.reply(accepted(0, "older", 3), 7)
    assert hold.reply(continued(0, "older", 3), 7)


# --- with clients ----------------------------------------------------------------------------------------------------


async def read_dense(client: DaemonClient, id: str, n: int, length: int) -> None:
    """Read a request of the toy core to its end: tokens 1, 2, 3, ... of each choice, none missing, none twice."""
    got: dict[int, list[int]] = {choice: [] for choice in range(n)}
    ends: dict[int, Finished] = {}
    async with client.generate(request(id, n=n)) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                assert event.choice not in ends
                got[event.choice] += event.tokens
            elif isinstance(event, Finished):
                assert event.choice not in ends
                ends[event.choice] = event
    assert got == {choice: list(range(1, length + 1)) for choice in range(n)}
    assert sorted(ends) == list(range(n))


@pytest.mark.parametrize("forgets", [False, True])
async def test_X1_many_streams_over_many_deaths_of_the_daemon(endpoint: str, forgets: bool) -> None:
    """40 streams of two front ends while the daemon's door dies 12 times at any moment, and the core, where it forgets,
    loses requests: each is whole at its reader, and nothing stays behind."""
    rng = random.Random(11)
    length = 200
    core: ToyCore | None = None
    done = trio.Event()
    waits = {"return_within_s": 20.0}
    async with DaemonClient(endpoint, "one", **waits) as one, DaemonClient(endpoint, "two", **waits) as two:

        async def read_all() -> None:
            await one.wait_connected(20)
            await two.wait_connected(20)
            async with trio.open_nursery() as readers:
                for number in range(40):
                    client = rng.choice([one, two])
                    while not client.connected:
                        await trio.sleep(0.001)
                    readers.start_soon(read_dense, client, f"r{number}", rng.randrange(1, 4), length)
                    for _ in range(2):
                        if core is not None and core.live:
                            await core.turned()
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all)
            for lives in range(1, 13):
                async with gateway(endpoint) as world, trio.open_nursery() as life:
                    if core is None:
                        core = ToyCore(world, length, dense=True)
                    core.world = world
                    world.names += [name for name in ("one", "two") if name not in world.names]
                    core.live = {r: (world.names.index("one"), *row[1:]) for r, row in core.live.items()}
                    world.gateway.expect(["one", "two"], core.next_request)
                    life.start_soon(core.run)
                    while min(one.stats["connects"], two.stats["connects"]) < lives or not (core.live or done.is_set()):
                        await trio.sleep(0.001)
                    turns = rng.randrange(10, 40)
                    while turns and core.live:
                        await core.turned()
                        turns -= 1
                    if forgets and core.live:
                        for id_ in {row[1] for row in core.live.values()}:
                            if rng.random() < 0.3:
                                core.live = {r: row for r, row in core.live.items() if row[1] != id_}
                                del core.known[id_]
                    life.cancel_scope.cancel()
            async with gateway(endpoint) as world, trio.open_nursery() as life:
                core.world = world
                world.names += ["one", "two"]
                life.start_soon(core.run)
                await done.wait()
                while len(one._streams) or len(two._streams) or core.known:
                    await core.turned()
                life.cancel_scope.cancel()
        assert not core.live
        assert core.aborted == 0
        assert (core.forgotten > 0) == forgets
        assert one.stats["resumed"] + two.stats["resumed"] > 40
