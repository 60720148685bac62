"""Exchanges of simulated ranks: forwards that stop at each collective and go on when everyone has come to it.

Owns what has been published by which rank, and who must be pulled along so that somebody can go on. Must never answer
before every rank that takes part has published. Invariants: the tensor ranks of a stage make the same calls in the same
order, whatever the delays are; each value is that of the step it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

import numpy as np

from daemon.rank.layout import Layout
from daemon.rank.modeled_hash import Exchange, ToyStage
from daemon.rank.noise import Hashes
from daemon.rank.runner import Outcome

Place = tuple[int, int]  # stage, tensor rank
ALL = 2**31


class RanksDiffer(Exception):
    """Tensor ranks of a stage made different calls: on a real group one of them would wait for ever."""


class Peer(Protocol):
    """What a hub asks of a rank."""

    def reach(self, seq: int, calls: int) -> None:
        """Launch and run forward `seq` until it has published so many calls (`ALL`: to its end)."""


class Forward:
    """One forward of one rank: runs when its device lets it, stops at each exchange until that is answered."""

    def __init__(
        self, hub: Hub, layout: Layout, seq: int, compute: Callable[[ToyStage], Generator[Exchange, Hashes, Outcome]]
    ) -> None:
        self._hub, self._place, self._seq = hub, (layout.stage, layout.rank), seq
        self._compute = compute
        self._work: Generator[Exchange, Hashes, Outcome] | None = None
        self._calls = 0
        self.outcome: Outcome | None = None

    def run(self, stage: ToyStage, calls: int = ALL) -> None:
        """Go on until so many calls are published, or to the end; `stage` are the words that it runs over."""
        while self.outcome is None and self._calls < calls:
            try:
                if self._work is None:
                    self._work = self._compute(stage)
                    exchange = next(self._work)
                else:
                    exchange = self._work.send(self._hub.answer(self._place, self._seq, self._calls - 1))
            except StopIteration as end:
                self.outcome = end.value
            else:
                self._hub.publish(self._place, self._seq, self._calls, exchange)
                self._calls += 1


class Hub:
    """Everything that was published and may still be asked for; `calls` counts what each rank did, per step."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._published: dict[tuple[Place, int, int], Exchange] = {}
        self._sent: dict[tuple[Place, int], Hashes] = {}
        self.peers: dict[Place, Peer] = {}
        self.calls: dict[int, dict[Place, list[str]]] = {}

    def publish(self, place: Place, seq: int, number: int, exchange: Exchange) -> None:
        """A rank comes to its exchange `number` in forward `seq`."""
        self._published[place, seq, number] = exchange
        self.calls.setdefault(seq, {}).setdefault(place, []).append(exchange.call)
        if exchange.call == "send":
            self._sent[place, seq] = exchange.values

    def answer(self, place: Place, seq: int, number: int) -> Hashes:
        """What the rank gets for that exchange, after whoever takes part was pulled along; raises RanksDiffer."""
        exchange = self._published[place, seq, number]
        stage, rank = place
        if exchange.call == "send":
            return exchange.values
        if exchange.call == "receive":
            before = (stage - 1, rank)
            self.peers[before].reach(seq, ALL)
            values = self._sent.get((before, seq))
            if values is None or values.shape != exchange.values.shape:
                raise RanksDiffer(f"step {seq}: rank {stage}.{rank} waits for values that {before} does not send")
            return values
        mates = [self._mate((stage, other), place, seq, number) for other in range(self._ranks)]
        if exchange.call == "broadcast":
            return mates[0]
        return np.sum(mates, axis=0, dtype=np.uint64)

    def forget(self, through: int) -> None:
        """Forwards up to `through` were processed."""
        for done in [key for key in self._published if key[1] <= through]:
            del self._published[done]
        for sent in [key for key in self._sent if key[1] <= through]:
            del self._sent[sent]

    def _mate(self, mate: Place, place: Place, seq: int, number: int) -> Hashes:
        if mate != place:
            self.peers[mate].reach(seq, number + 1)
        mine, theirs = self._published[place, seq, number], self._published.get((mate, seq, number))
        if theirs is None or theirs.call != mine.call or theirs.values.shape != mine.values.shape:
            told = "nothing" if theirs is None else f"{theirs.call} of {theirs.values.shape}"
            raise RanksDiffer(
                f"step {seq}, call {number}: rank {place[0]}.{place[1]} makes {mine.call} of {mine.values.shape}, "
                f"rank {mate[0]}.{mate[1]} {told}"
            )
        return theirs.values
