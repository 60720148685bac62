"""The wire client against a scripted daemon: what it sends again, and what it takes, drops and calls wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from allocator.columns import i64, pack_i64
from ipc import codec
from ipc.handshake import Limits
from ipc.messages import (
    Accepted,
    Acknowledge,
    Ask,
    Connect,
    Continued,
    Finished,
    FromFrontEnd,
    Generate,
    ModelFacts,
    Refused,
    Resume,
    ToFrontEnd,
    TokenBatch,
    Welcome,
)
from ipc.sockets import Socket, bind_router
from tools.faults.wire_clients import WireFrontEnd
from tools.faults.work import WIRE, Story, Task

REFERENCE = list(range(40, 52))
WELCOME = Welcome(1, ModelFacts("m", "modeled", 100, 100, "uint64"), Limits().as_dict(), "life")


class Daemon:
    """The daemon's socket, spoken for by the test; pings are swallowed."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._peer = b""

    async def hears(self) -> FromFrontEnd:
        """The next message that is no ping."""
        while True:
            self._peer, data = await self._socket.recv()
            message = codec.from_frontend(data, Limits())
            if not isinstance(message, Ask):
                return message

    async def says(self, *messages: ToFrontEnd) -> None:
        """Send to whoever spoke last."""
        for message in messages:
            await self._socket.send([self._peer, codec.encode(message)])

    async def welcomes(self) -> FromFrontEnd:
        """A front end connects; what it says next."""
        assert isinstance(await self.hears(), Connect)
        await self.says(WELCOME)
        return await self.hears()


class World:
    """One request of one wire front end, and the daemons it meets one after the other."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.story = Story(Task(0, WIRE, (1, 2, 3), len(REFERENCE), 0.0, 7))
        self.front = WireFrontEnd(endpoint, "wire-test")

    @asynccontextmanager
    async def daemon(self) -> AsyncIterator[Daemon]:
        """A life of the daemon."""
        socket = bind_router(self.endpoint)
        try:
            yield Daemon(socket)
        finally:
            await socket.aclose(200)


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    """A front end that asks for one request, for at most ten seconds."""
    made = World(f"ipc://{directory / 'front.sock'}")
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.front.run)
            nursery.start_soon(made.front.follow, made.story, made.story.task.generate(1, "a"))
            yield made
            nursery.cancel_scope.cancel()


def tokens(first: int, last: int, request: int = 5) -> TokenBatch:
    """Tokens of the reference from one position up to another."""
    some = REFERENCE[first:last]
    return TokenBatch(1, pack_i64([request] * len(some)), pack_i64(some))


def end(told: int = len(REFERENCE), reason: str = "length") -> Finished:
    """The end of the request."""
    return Finished("a", 0, 5, reason, "", 3, told)


async def accepts_and_goes_on(daemon: Daemon, held: int, *astray: ToFrontEnd) -> None:
    """A daemon accepts what the front end holds so many tokens of, is told them, and gives the rest and the end."""
    await daemon.says(Accepted("a", 5, 1, len(REFERENCE), 7), *astray)
    resume = await daemon.hears()
    assert isinstance(resume, Resume)
    assert i64(resume.tokens).tolist() == REFERENCE[:held]
    await daemon.says(Continued("a", 0, 5, held, pack_i64(REFERENCE[held:])), end())
    assert isinstance(await daemon.hears(), Acknowledge)


async def first_life(world_: World, held: int) -> None:
    """A daemon that accepts, gives so many tokens and is gone."""
    async with world_.daemon() as daemon:
        assert isinstance(await daemon.welcomes(), Generate)
        await daemon.says(Accepted("a", 5, 1, len(REFERENCE), 7), tokens(0, held))
        while len(world_.story.tokens) < held:
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("back", [0, 1, 4])
async def test_overlapping_tokens_are_taken_once(tmp_path: Path, back: int) -> None:
    """The next life goes on at or before our position: what we hold already is dropped, and the rest joins on."""
    async with world(tmp_path) as w:
        await first_life(w, 4)
        async with w.daemon() as daemon:
            resume = await daemon.welcomes()
            assert isinstance(resume, Resume)
            assert i64(resume.tokens).tolist() == REFERENCE[:4]
            stray = tokens(0, 9, request=8)  # before `Continued` nothing counts
            rest = pack_i64(REFERENCE[4 - back : 7])
            await daemon.says(stray, end(), Continued("a", 0, 8, 4 - back, rest), tokens(7, 12, request=8), end())
            assert isinstance(await daemon.hears(), Acknowledge)
    assert w.story.tokens == REFERENCE
    assert (w.story.finish, w.story.told_tokens, w.story.wrong, w.story.resumes) == ("length", 12, [], 1)


@pytest.mark.parametrize(
    ("position", "known", "wrong"),
    [(6, REFERENCE[6:], "2 are missing"), (2, [1, *REFERENCE[3:]], "other tokens than we hold")],
    ids=["skipped", "other text"],
)
async def test_a_skipped_position_and_another_text_are_wrong(
    tmp_path: Path, position: int, known: list[int], wrong: str
) -> None:
    """A life that goes on behind our position, or says other tokens for places that we hold, is written down."""
    async with world(tmp_path) as w:
        await first_life(w, 4)
        async with w.daemon() as daemon:
            assert isinstance(await daemon.welcomes(), Resume)
            await daemon.says(Continued("a", 0, 5, position, pack_i64(known)), end())
            assert isinstance(await daemon.hears(), Acknowledge)
    assert wrong in w.story.wrong[0]


async def test_an_acceptance_that_was_lost_is_asked_for_again(tmp_path: Path) -> None:
    """A request without an answer is sent again; accepted then, it resumes: some tokens may have gone astray."""
    async with world(tmp_path) as w:
        async with w.daemon() as daemon:
            assert isinstance(await daemon.welcomes(), Generate)
        async with w.daemon() as daemon:
            assert isinstance(await daemon.welcomes(), Generate)
            await accepts_and_goes_on(daemon, 0, tokens(3, 5))
    assert (w.story.tokens, w.story.finish) == (REFERENCE, "length")


async def test_a_daemon_that_lost_the_request_is_given_it_again(tmp_path: Path) -> None:
    """`unknown_request` to a Resume: the request goes out anew, and then what we hold of it."""
    async with world(tmp_path) as w:
        await first_life(w, 4)
        async with w.daemon() as daemon:
            assert isinstance(await daemon.welcomes(), Resume)
            await daemon.says(Refused("a", "unknown_request", "never heard of it"))
            assert isinstance(await daemon.hears(), Generate)
            await accepts_and_goes_on(daemon, 4)
    assert (w.story.tokens, w.story.finish) == (REFERENCE, "length")


async def test_an_end_that_is_a_fault_is_an_error(tmp_path: Path) -> None:
    """Every reason but length and stop ends the story with an error, also while it is being resumed."""
    async with world(tmp_path) as w:
        await first_life(w, 4)
        async with w.daemon() as daemon:
            assert isinstance(await daemon.welcomes(), Resume)
            await daemon.says(end(4, "fault"))
            assert isinstance(await daemon.hears(), Acknowledge)
    assert w.story.error.startswith("fault")
