"""The last word reaches every rank: whoever dies, leaves or joins while it is said, at random moments."""

from __future__ import annotations

import contextlib
import random

import pytest
import trio

from ipc.errors import Dismissed, PeerGone, RankStalled, StreamBroken
from ipc.farewell import Farewell
from ipc.messages import Hello, Join, Left, Stop
from ipc.rank_id import RankId
from ipc.rank_stream import RankStream
from ipc.streams import RankServer
from tests.ipc.test_streams import SETTINGS, TOKEN

PATIENCE_S = 20
KILLS_AFTER_S = 0.15  # processes go on dying for so long while the last word is said


async def test_what_counts_is_that_it_was_read() -> None:
    """By each rank, on a connection on which it was sent, and not another Stop that came before it."""
    farewell = Farewell([(0, 0), (0, 1)], b"stop")
    farewell.told(b"a", (0, 0))
    farewell.told(b"b", (0, 1))
    assert not farewell.read(b"stranger", Left(0, 0, False))
    assert not farewell.read(b"a", Left(0, 1, False)), "as another rank than it joined as"
    assert farewell.read(b"b", Left(0, 1, True))
    assert farewell.read(b"a", Left(0, 0, False))
    assert farewell.unread == {(0, 1)}
    assert not farewell.scope.cancel_called
    farewell.told(b"c", (0, 1))
    assert farewell.read(b"c", Left(0, 1, False))
    assert farewell.scope.cancel_called


class World:
    """Supervised ranks that are killed at random, and a daemon whose epochs end with each of them."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.endpoint = endpoint
        self.ranks: list[RankId] = [(0, rank) for rank in range(3)]
        self.server = RankServer(endpoint, token=TOKEN, ranks=self.ranks, replaced=True)
        self.lives: dict[RankId, trio.CancelScope] = {}
        self.ended: dict[RankId, str] = {}
        self.epoch = 0
        self.kills = 0

    async def supervise(self, rank: RankId) -> None:
        """As `bandmaster rank`: one process after the other, until one was told that it is over."""
        while rank not in self.ended:
            with trio.CancelScope() as self.lives[rank]:
                await self.live(rank)
            await trio.sleep(self.rng.random() * 0.05)

    async def live(self, rank: RankId) -> None:
        """One process; killed, it says nothing more, but what it sent before."""
        stream = RankStream(self.endpoint, stage=rank[0], rank=rank[1], token=TOKEN)
        drain_ms = 0
        try:
            await stream.join(1)
            while not isinstance(message := await stream.recv(), Stop):
                await trio.sleep(self.rng.random() * 0.02)  # slow to read
            drain_ms, why, again = 200, message.why, message.again
        except Dismissed as dismissed:
            drain_ms, why, again = 200, str(dismissed), dismissed.again
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose(drain_ms)
        if not again:
            self.ended[rank] = why

    async def kill(self, within_s: float) -> None:
        """One process after the other, with so long between two at most."""
        while True:
            await trio.sleep(self.rng.random() * within_s)
            self.lives[self.rng.choice(self.ranks)].cancel()
            self.kills += 1

    async def serve(self) -> None:
        """As the daemon: who joins is greeted, an epoch ends when one joins anew or cannot be reached."""
        while True:
            self.epoch += 1
            self.server.begin_epoch(self.epoch)
            with contextlib.suppress(StreamBroken, PeerGone, RankStalled):
                while True:
                    with trio.move_on_after(self.rng.random() * 0.2):
                        for message in await self.server.recv_batch(8):
                            if isinstance(message, Join):
                                await self.server.send(message.stage, message.rank, Hello(self.epoch, SETTINGS))
                    if self.rng.random() < 0.2:
                        break
            with contextlib.suppress(PeerGone, RankStalled):
                self.server.broadcast(Stop("lost", again=True))
            await trio.sleep(self.rng.random() * 0.05)

    async def run(self) -> None:
        """Epochs for a moment; then the last word, while more processes die than before, and epochs may go on."""
        async with trio.open_nursery() as nursery:
            for rank in self.ranks:
                nursery.start_soon(self.supervise, rank)
            async with trio.open_nursery() as serving:
                serving.start_soon(self.serve)
                with trio.move_on_after(0.1 + self.rng.random() * 0.4):
                    await self.kill(0.1)
                nursery.start_soon(self.server.dismiss, Stop("over"))
                if self.rng.random() < 0.5:
                    serving.cancel_scope.cancel()
                with trio.CancelScope(shield=True), trio.move_on_after(KILLS_AFTER_S):
                    await self.kill(0.01)
                serving.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(12))
async def test_every_rank_is_told_whatever_happens_meanwhile(endpoint: str, seed: int) -> None:
    """Kills, epochs that end, joins between two of them: the daemon waits until all have read, and then all end."""
    world = World(endpoint, seed)
    with trio.fail_after(PATIENCE_S):
        await world.run()
    assert world.ended.keys() == set(world.ranks)
    assert all("over" in why for why in world.ended.values())
    assert world.server.untold == []
    assert world.kills > 0
    await world.server.aclose(0)
