"""Traffic: requests of every kind, and clients that leave, come back, repeat themselves and disappear.

Owns what is sent and what each client was told. Must never know what the daemon counts. Two sorts of clients: the
product's own, which take their streams up again over deaths of the daemon, and bare ones that speak the protocol
themselves and break its manners.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import trio

from allocator.columns import pack_i64
from ipc import codec
from ipc.client import DaemonClient
from ipc.client_stream import Tokens
from ipc.errors import DaemonLost
from ipc.messages import (
    Abort,
    Accepted,
    Acknowledge,
    Connect,
    FinishAt,
    Finished,
    FromFrontEnd,
    Generate,
    Refused,
    Resume,
    Sampling,
    Welcome,
)
from tools.accounts.world.wire import Dealer, Switchboard

VOCABULARY = 512
LENGTH_MAX = 256
BARE_REQUESTS = 24  # of one bare client
AGAIN = 4  # of its requests that have ended, how many a bare client sends again
ENDS_WITHIN_S = 2.0
RETRY_S = 0.1
PATIENCE_S = 30.0


@dataclass
class Tally:
    """What clients saw: requests sent, their answers and ends by kind; and the ends by request number."""

    sent: int = 0
    told: Counter[str] = field(default_factory=Counter)
    ends: dict[int, str] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)

    def finished(self, message: Finished) -> None:
        """A client was told an end; being told twice is well, as long as it is the same."""
        said = self.ends.setdefault(message.request, message.reason)
        if said != message.reason:
            self.contradictions.append(f"request {message.request} ended with {said}, then with {message.reason}")
        self.told[message.reason] += 1


def request(rng: random.Random, id: str) -> Generate:
    """A request of any kind: most are well, some can never be served."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 3, 8, 8, 17, 40)))]
    generate = Generate(id, pack_i64(prompt), Sampling(temperature=rng.choice((0.0, 1.0))), rng.randint(1, 10))
    kind = rng.random()
    if kind < 0.10:
        generate.n = rng.randint(2, 4)
    elif kind < 0.14:
        generate.deadline_ms = rng.choice((5, 40, 200))
    elif kind < 0.20:
        _spoil(rng, generate)
    elif kind < 0.26:
        generate.stop_ids = pack_i64(sorted(rng.sample(range(VOCABULARY), 64)))
    elif kind < 0.29:
        generate.max_tokens, generate.clip = 60, True
    elif kind < 0.32:
        generate.max_tokens, generate.sampling = 0, Sampling(prompt_logprobs=1)
    return generate


def _spoil(rng: random.Random, generate: Generate) -> None:
    """Make a request that is refused."""
    kind = rng.randrange(6)
    if kind == 0:
        generate.prompt = b""
    elif kind == 1:
        generate.prompt = pack_i64([VOCABULARY])
    elif kind == 2:
        generate.prompt = pack_i64([1] * (LENGTH_MAX + 1))
    elif kind == 3:
        generate.n = rng.choice((0, 10_000))
    elif kind == 4:
        generate.max_tokens = LENGTH_MAX
    else:
        generate.n, generate.sampling = 3, Sampling(temperature=-1.0)


async def ask(client: DaemonClient, rng: random.Random, id: str, tally: Tally) -> None:
    """One request by the product's client, which may leave in the middle, or find a stop string."""
    generate = request(rng, id)
    leaves_after = rng.randint(0, 4) if rng.random() < 0.1 else -1
    stops_after = rng.randint(1, 4) if rng.random() < 0.05 else -1
    got = 0
    while True:
        try:
            await client.wait_connected(PATIENCE_S)
            async with client.generate(generate) as stream:
                tally.sent += 1
                async for event in stream:
                    if isinstance(event, Refused):
                        tally.told["refused"] += 1
                    elif isinstance(event, Finished):
                        tally.finished(event)
                    elif isinstance(event, Tokens):
                        got += len(event.tokens)
                        if got > stops_after > 0 and event.choice == 0:
                            client.finish_at(stream, 0, stops_after)
                            stops_after = -1
                    if 0 <= leaves_after <= got:
                        tally.told["left"] += 1
                        return
            return
        except DaemonLost:
            tally.told["lost"] += 1
            if got or not client.connected:
                return
            await trio.sleep(RETRY_S)


class BareClient:
    """A front end that pings nobody, acknowledges little, repeats itself and vanishes without a word."""

    def __init__(self, board: Switchboard, name: str, rng: random.Random, tally: Tally) -> None:
        self._board, self._name, self._rng, self._tally = board, name, rng, tally
        self._ended: set[str] = set()
        self._some_ended = trio.Event()

    async def run(self) -> None:
        """Say what it has to say, then be gone; a daemon that is not there is not waited for."""
        dealer: Dealer = self._board.connect("world")
        try:
            with trio.move_on_after(PATIENCE_S):
                await self._speak(dealer)
        except trio.ClosedResourceError:
            return
        finally:
            dealer.close()

    async def _speak(self, dealer: Dealer) -> None:
        if not await self._welcomed(dealer):
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, dealer)
            sent = [request(self._rng, f"{self._name}-{index}") for index in range(BARE_REQUESTS)]
            for generate in sent:
                self._say(dealer, generate)
                self._tally.sent += 1
                await self._misbehave(dealer, sent, generate)
                await trio.sleep(self._rng.expovariate(1 / 0.01))
            with trio.move_on_after(ENDS_WITHIN_S):
                await self._some_ended.wait()
            for earlier in [one for one in sent if one.id in self._ended][:AGAIN]:
                self._say(dealer, earlier)
                self._tally.sent += 1
            await trio.sleep(self._rng.choice((0.0, 0.1)))
            nursery.cancel_scope.cancel()

    async def _welcomed(self, dealer: Dealer) -> bool:
        for _ in range(20):
            self._say(dealer, Connect(self._name))
            with trio.move_on_after(RETRY_S):
                while True:
                    message = codec.to_frontend((await dealer.recv())[-1])
                    if isinstance(message, Welcome):
                        return True
            await trio.sleep(RETRY_S)
        return False

    async def _misbehave(self, dealer: Dealer, sent: list[Generate], newest: Generate) -> None:
        """Something that no decent client does, or nothing."""
        earlier, kind = self._rng.choice(sent), self._rng.random()
        if kind < 0.30:  # the same once more, before or after its end
            self._say(dealer, newest)
            self._say(dealer, earlier)
            self._tally.sent += 2
        elif kind < 0.40:  # a known id with another content
            self._say(dealer, Generate(newest.id, pack_i64([7]), Sampling(), 3))
            self._tally.sent += 1
        elif kind < 0.50:  # back for what was never sent, or for what is known
            self._say(dealer, Resume(self._rng.choice(("nothing", earlier.id)), 0, b""))
        elif kind < 0.55:
            dealer.try_send([b"no message"])
        elif kind < 0.60:  # readable as far as its id, and refused at the door
            dealer.try_send([codec.encode(Generate(newest.id + "x", b"odd", Sampling(), 1))])
            self._tally.sent += 1
        elif kind < 0.65:
            self._say(dealer, Abort(self._rng.choice(("nothing", newest.id))))
        elif kind < 0.70:
            self._say(dealer, Acknowledge([earlier.id]))
        elif kind < 0.75:
            self._say(dealer, FinishAt(earlier.id, self._rng.choice((0, 9)), self._rng.randint(0, 3)))

    def _say(self, dealer: Dealer, message: FromFrontEnd) -> None:
        dealer.try_send([codec.encode(message)])

    async def _listen(self, dealer: Dealer) -> None:
        while True:
            try:
                messages: list[Any] = [codec.to_frontend(frames[-1]) for frames in await dealer.recv_batch(256)]
            except trio.ClosedResourceError:
                return
            for message in messages:
                if isinstance(message, Finished):
                    self._tally.finished(message)
                    self._ended.add(message.id)
                    if len(self._ended) >= AGAIN:
                        self._some_ended.set()
                elif isinstance(message, Refused):
                    self._tally.told["refused"] += 1
                elif isinstance(message, Accepted):
                    self._tally.told["accepted"] += 1
