"""A round: streams go on, a crowd comes, all of it is cancelled at once, the streams still go on.

Owns the order of events and what was seen of them from outside. Must never judge. Invariant: the kept streams are
asked first and end last, and are asked once more when nothing else is there. Times are seconds of the monotonic clock;
borders are kept in nanoseconds since 1970 too, so that they can be found in the journal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from ipc.client import DaemonClient
from tools.cancels import asks
from tools.cancels.failed import Failed
from tools.cancels.http_crowd import HttpCrowd
from tools.cancels.kept import Kept
from tools.cancels.wire_crowd import WireCrowd

LOOK_S = 0.01
ANSWER_WITHIN_S = 10.0
DECODING_ONE_IN = 2  # of the places a crowd has: before so many decode nothing is cancelled
Crowd = WireCrowd | HttpCrowd


@dataclass(frozen=True, slots=True)
class Plan:
    """What a round does: how many requests, in how many places, and for how long things go on by themselves."""

    cancels: int
    keep: int
    running: int
    seed: int
    spread_s: float  # over which the cancels are sent
    quiet_s: float  # of the kept streams alone, before the crowd and behind its ends
    patience_s: float


class Mark(NamedTuple):
    """A moment on both clocks: monotonic seconds, and nanoseconds since 1970."""

    s: float
    ns: int


@dataclass(slots=True)
class Seen:
    """What one round looked like from outside; `marks` say when each of its parts began, and when it was over."""

    number: int
    kept: list[Kept]
    again: list[Kept] = field(default_factory=list)
    marks: dict[str, Mark] = field(default_factory=dict)  # alone, crowd, cancels, sent, after, over
    accepted: int = 0

    def mark(self, name: str) -> None:
        """It is now."""
        self.marks[name] = Mark(time.monotonic(), time.time_ns())


async def gauges(client: DaemonClient) -> dict[str, int]:
    """The core's numbers by name, as the daemon says them now."""
    answer = await client.ask("watch", {"rows": 0, "decisions": 0}, timeout_s=ANSWER_WITHIN_S)
    return dict(json.loads(answer.body)["gauges"])


class Rounds:
    """Runs rounds by one client of the daemon; `told` is called with what is waited for, how much came, of how much."""

    def __init__(self, plan: Plan, client: DaemonClient, told: Callable[[str, int, int], None]) -> None:
        self._plan, self._client, self._told = plan, client, told

    async def run(self, number: int, crowd: Crowd) -> Seen:
        """One round with a crowd that is connected; raises Failed when something does not come in time."""
        plan = self._plan
        seen = Seen(number, [Kept(ask) for ask in asks.kept(plan.seed, number, plan.keep)])
        async with trio.open_nursery() as nursery:
            for one in seen.kept:
                nursery.start_soon(one.read, self._client)
            await self._until(lambda: sum(one.decoding.is_set() for one in seen.kept), plan.keep, "kept streams")
            seen.mark("alone")
            await trio.sleep(plan.quiet_s)
            seen.mark("crowd")
            await self._gather(crowd)
            seen.accepted = crowd.accepted
            seen.mark("cancels")
            await self._cancel(crowd, number)
            seen.mark("sent")
            with trio.move_on_after(plan.patience_s):  # who is never answered is found in the books
                while (ended := await self._ended(crowd)) < plan.cancels:
                    self._told("cancels answered", ended, plan.cancels)
                    await trio.sleep(LOOK_S)
            seen.mark("after")
            await trio.sleep(plan.quiet_s)
            seen.mark("over")
            for one in seen.kept:
                if not one.over.is_set():
                    one.finish()
            await self._until(
                lambda: sum(one.over.is_set() for one in seen.kept), plan.keep, "kept streams at their end"
            )
        return seen

    async def repeat(self, seen: Seen) -> None:
        """The kept requests of a round once more, without anything beside them."""
        seen.again = [Kept(asks.again(one.ask, max(1, len(one.tokens)))) for one in seen.kept]
        async with trio.open_nursery() as nursery:
            for one in seen.again:
                nursery.start_soon(one.read, self._client)
            what = "the same without cancels"
            took_s = seen.marks["over"].s - seen.marks["alone"].s
            await self._until(lambda: sum(one.over.is_set() for one in seen.again), len(seen.again), what, took_s)

    async def _gather(self, crowd: Crowd) -> None:
        """All are accepted, and a share of those that can run decodes."""
        plan = self._plan
        await crowd.ask()
        await self._until(lambda: crowd.accepted + len(crowd.refused), plan.cancels, "requests accepted")
        if crowd.refused:
            raise Failed(
                f"{len(crowd.refused)} of {plan.cancels} requests were not taken, the first: {crowd.refused[0]}"
            )
        share = -(-min(plan.cancels, max(1, plan.running - plan.keep)) // DECODING_ONE_IN)
        await self._until(lambda: crowd.decoding, share, "requests decoding")

    async def _cancel(self, crowd: Crowd, number: int) -> None:
        plan, began_s = self._plan, trio.current_time()
        for sent, place in enumerate(asks.order(plan.seed, number, plan.cancels)):
            if plan.spread_s:
                await trio.sleep_until(began_s + plan.spread_s * sent / plan.cancels)
            await crowd.cancel(place)

    async def _ended(self, crowd: Crowd) -> int:
        """Of the crowd, by what it was told; whoever hung up is told nothing, so the daemon says what lives."""
        if isinstance(crowd, WireCrowd):
            return crowd.ended
        live = (await gauges(self._client))["live"]
        return self._plan.cancels + self._plan.keep - live

    async def _until(self, count: Callable[[], int], expected: int, what: str, took_s: float = 0.0) -> None:
        """Until a count is reached; `took_s`: what the same has taken before, on top of the patience."""
        patience_s = self._plan.patience_s + took_s
        with trio.move_on_after(patience_s):
            while (came := count()) < expected:
                self._told(what, came, expected)
                await trio.sleep(LOOK_S)
            return
        raise Failed(f"{what}: {count()} of {expected} within {patience_s:.0f} s")
