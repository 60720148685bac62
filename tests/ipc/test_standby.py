"""Standby: who starts a rank's processes hears the last word, whatever became of them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import trio

from ipc.codec import encode
from ipc.messages import Join, Stop
from ipc.rank_stream import RankStream
from ipc.standby import SAY_EVERY_S, Standby
from ipc.streams import RankServer
from tests.ipc.test_streams import TOKEN

RANKS = [(0, 0), (0, 1)]
LOOK_S = 0.002
WITHIN_S = 20.0


class Clock:
    """Time that passes as it is looked at: each look is a moment to say that one stands by."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += SAY_EVERY_S
        return self.now


def standing(endpoint: str, rank: int, token: str = TOKEN) -> Standby:
    return Standby(endpoint, stage=0, rank=rank, token=token, clock=Clock())


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again."""
    with trio.fail_after(WITHIN_S):
        while not condition():
            await trio.sleep(LOOK_S)


async def heard_by(server: RankServer, condition: Callable[[], bool]) -> None:
    """Let the daemon read what comes until the condition holds."""
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            while True:
                await server.recv()

        nursery.start_soon(read)
        await until(condition)
        nursery.cancel_scope.cancel()


async def dismissed(server: RankServer, standby: Standby) -> None:
    """The last word, until it is known that everybody read it."""
    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.dismiss, Stop("drained"))
            nursery.start_soon(until, standby.over)


async def test_the_last_word_reaches_who_has_no_process(endpoint: str) -> None:
    """One rank joined and leaves by Stop, of the other no process is there: the daemon knows that both heard it."""
    server = RankServer(endpoint, token=TOKEN, ranks=RANKS, replaced=True)
    server.begin_epoch(1)
    stream = RankStream(endpoint, stage=0, rank=0, token=TOKEN)
    await stream.send(Join(0, 0, 1, TOKEN))
    assert await server.recv() == Join(0, 0, 1, TOKEN)
    other = standing(endpoint, 1)
    await heard_by(server, lambda: not other.over() and (0, 1) in server._standing)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dismissed, server, other)
        assert await stream.recv() == Stop("drained")
    assert server.untold == []
    assert other.over()
    other.close()
    await stream.aclose(0)
    await server.aclose(0)


async def test_who_comes_to_stand_by_behind_the_last_word_is_told_at_once(endpoint: str) -> None:
    """As a process that joins then."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0)], replaced=True)
    server.begin_epoch(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.dismiss, Stop("drained"))
        await until(lambda: server.untold == [(0, 0)])
        late = standing(endpoint, 0)
        await until(late.over)
    assert server.untold == []
    late.close()
    await server.aclose(0)


async def test_who_stands_by_is_known_to_the_next_life(endpoint: str) -> None:
    """A daemon that goes without a word, for as long as it likes, says nothing; the next one ends in order."""
    standby = standing(endpoint, 0)
    for life in range(2):
        server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0)], replaced=True)
        server.begin_epoch(1)
        await heard_by(server, lambda: not standby.over() and (0, 0) in server._standing)  # noqa: B023
        if life:
            await dismissed(server, standby)
            assert server.untold == []
        await server.aclose(0)
    standby.close()


async def test_a_pause_ends_with_the_last_word(endpoint: str) -> None:
    """Who rests between two processes for ten minutes hears it then."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0)], replaced=True)
    server.begin_epoch(1)
    standby = Standby(endpoint, stage=0, rank=0, token=TOKEN)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.dismiss, Stop("drained"))
        await trio.to_thread.run_sync(standby.pause, 600.0)
    assert standby.over()
    standby.close()
    await server.aclose(0)


async def test_another_epoch_is_no_last_word(endpoint: str) -> None:
    """A Stop behind which it goes on concerns the process alone; were it said to the starter, it would not end."""
    server = RankServer(endpoint, token=TOKEN, ranks=[(0, 0)], replaced=True)
    server.begin_epoch(1)
    standby = standing(endpoint, 0)
    await heard_by(server, lambda: not standby.over() and (0, 0) in server._standing)
    server._socket.try_send([server._standing[0, 0], encode(Stop("a rank was lost", again=True))])
    server._socket.try_send([server._standing[0, 0], b"\xc1 of another release"])
    server.broadcast(Stop("a rank was lost", again=True))
    await until(lambda: not standby.over() and not standby._socket.poll(0))
    server.begin_epoch(2)
    await dismissed(server, standby)
    standby.close()
    await server.aclose(0)


async def test_strangers_do_not_stand_by(endpoint: str) -> None:
    """A wrong token, a rank that is not expected, a version that is not ours, ranks that this daemon starts itself."""
    said: list[str] = []
    for replaced in (True, False):
        server = RankServer(
            endpoint, token=TOKEN, ranks=[(0, 0)], replaced=replaced, complain=lambda _, text: said.append(text)
        )
        server.begin_epoch(1)
        for rank, token in [(0, "guess"), (5, TOKEN)] if replaced else [(0, TOKEN)]:
            stranger = standing(endpoint, rank, token)
            before = len(said)
            await heard_by(server, lambda: not stranger.over() and len(said) > before)  # noqa: B023
            stranger.close()
        assert server._standing == {}
        await server.aclose(0)
    who = "the starter of stage 0 rank"
    assert {text for text in said if "guess" not in text} == {
        f"{who} 0 stands by with a wrong token", f"{who} 5 stands by: it is not expected",
        f"{who} 0 stands by: it is not expected",
    }  # fmt: skip
