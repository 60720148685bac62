"""Watchers: they ask questions, and whatever else they do reaches neither the core nor a front end."""

from __future__ import annotations

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from daemon.core.inputs import Arrived
from ipc.client import DaemonClient
from ipc.handshake import Limits
from ipc.messages import Abort, Accepted, Acknowledge, Answer, Ask, Connect, FinishAt, Rejected, Resume, Welcome
from tests.gateway.harness import NOW_NS, SEED, Peer, World, accepted, gateway, out, request


async def fine(options: dict[str, int]) -> tuple[bool, str]:
    """A question's answer."""
    return True, "fine"


async def watcher(world: World, name: str) -> Peer:
    """A raw peer that was welcomed and only watches."""
    peer = await world.peer()
    assert isinstance(await peer.ask(Connect(name, watches=True)), Welcome)
    return peer


def core_heard_nothing(world: World) -> bool:
    """Whether no input came of it."""
    try:
        world.inputs.receive_nowait()
    except trio.WouldBlock:
        return True
    return False


async def test_a_watcher_asks_and_nothing_else(endpoint: str) -> None:
    """What else it sends is rejected, its silence is nobody's loss, and the core never hears of it."""
    async with gateway(endpoint, silence_s=0.2, asks={"status": fine}) as world:
        peer = await watcher(world, "top")
        assert [(row["name"], row["watches"]) for row in world.gateway.frontends()] == [("top", True)]
        assert await peer.ask(Ask("status", 1)) == Answer(1, True, "fine")
        for message in (request("a"), Abort("a"), FinishAt("a", 0, 1), Resume("a", 0, bytes(8)), Acknowledge(["a"])):
            answer = await peer.ask(message)
            assert isinstance(answer, Rejected)
            assert answer.code == "watches"
        unreadable = await peer.ask(msgspec.structs.replace(request("b"), prompt=b"abc"))  # nor is it refused a request
        assert isinstance(unreadable, Rejected)
        while world.gateway.frontends():
            await wait_all_tasks_blocked(0.02)
        assert world.log.of("watcher_left") == [{"frontend": "top"}]
        assert world.gateway.stats["frontends_lost"] == 0
        assert core_heard_nothing(world)


async def test_a_watcher_gives_no_order(endpoint: str) -> None:
    """An order is carried out for a front end; a watcher is told that it is one, and nothing happens."""
    carried_out = []

    async def drain(options: dict[str, int]) -> tuple[bool, str]:
        carried_out.append("drain")
        return True, "draining"

    async with gateway(endpoint, asks={"status": fine}, orders={"drain": drain}) as world:
        watching, serving = await watcher(world, "top"), await world.peer("fe")
        refused = await watching.ask(Ask("drain", 1))
        assert refused == Answer(1, False, "drain is an order, and top only watches: connect as a front end to give it")
        unknown = await watching.ask(Ask("what", 2))
        assert unknown == Answer(2, False, "unknown question 'what'; known: ping, status")
        assert carried_out == []
        assert await serving.ask(Ask("drain", 1)) == Answer(1, True, "draining")
        assert carried_out == ["drain"]


async def test_watchers_and_front_ends_have_places_of_their_own(endpoint: str) -> None:
    """Neither kind fills the other's, and who finds no place is told which are taken."""
    async with gateway(endpoint, limits=Limits(frontends_max=2, watchers_max=3)) as world:
        for number in range(3):
            await watcher(world, f"top-{number}")
        one_more = await (await world.peer()).ask(Connect("top-3", watches=True))
        assert one_more == Rejected(
            "too_many_watchers", "3 watchers are connected or left just now, which is the limit"
        )
        await world.peer("fe-0")
        await world.peer("fe-1")
        one_more = await (await world.peer()).ask(Connect("fe-2"))
        assert one_more == Rejected(
            "too_many_frontends", "2 front ends are connected or left just now, which is the limit"
        )
        stats = world.gateway.stats
        assert (stats["too_many_watchers"], stats["too_many_frontends"]) == (1, 1)
        assert len(world.log.of("too_many_watchers")) == len(world.log.of("too_many_front_ends")) == 1


async def test_a_watcher_takes_nobody_s_name(endpoint: str) -> None:
    """One that goes by a front end's name is another: both are served, and what is the front end's goes to it."""
    async with gateway(endpoint) as world:
        serving = await world.peer("fe")
        watching = await watcher(world, "fe")
        await serving.send(request("a"))
        assert await world.inputs.receive() == Arrived(NOW_NS, "fe", request("a"), SEED)
        world.deliver(out(accepted(0, "a", 1)))
        assert isinstance(await serving.recv(), Accepted)
        assert await watching.ask(Ask("ping", 3)) == Answer(3, True, "life-1")
        assert world.gateway.stats["takeovers"] == 0
        assert [row["live_requests"] for row in world.gateway.frontends()] == [1, 0]


async def test_a_watcher_s_questions_take_no_place_of_a_front_end(endpoint: str) -> None:
    """However many of them are being answered, a front end's next one is."""
    release = trio.Event()

    async def slow(options: dict[str, int]) -> tuple[bool, str]:
        await release.wait()
        return True, "done"

    async with gateway(endpoint, asks={"slow": slow}, limits=Limits(asks_running_max=2)) as world:
        watching, serving = await watcher(world, "top"), await world.peer("fe")
        await watching.send(Ask("slow", 1), Ask("slow", 2), Ask("slow", 3))
        busy = await watching.recv()
        assert busy == Answer(3, False, "2 questions are being answered, which is the limit; ask again")
        await serving.send(Ask("slow", 1))
        while world.gateway.stats["asks"] < 4:
            await wait_all_tasks_blocked(0.01)
        release.set()
        assert await serving.recv() == Answer(1, True, "done")


async def test_a_client_that_watches_sends_no_request(endpoint: str) -> None:
    """It says so at once and stays connected, where the daemon would reject it and end the connection."""
    async with gateway(endpoint, asks={"status": fine}) as world:
        async with DaemonClient(endpoint, "top", watches=True) as client:
            await client.wait_connected()
            with pytest.raises(ValueError, match="top only watches"):
                async with client.generate(request("a")):
                    raise AssertionError("not reached")
            assert (await client.ask("status")).ok
            assert client.stats["connects"] == 1
        assert core_heard_nothing(world)
