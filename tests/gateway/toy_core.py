"""A toy core behind a real gateway: every live choice gains a token per step; it counts, it does not schedule."""

from __future__ import annotations

import trio

from daemon.core.inputs import Aborted, Acknowledged, Arrived, FinishAsked, FrontEndLost, Input
from daemon.core.outputs import Outputs, Reply
from ipc.messages import Accepted, Finished, Refused
from tests.gateway.harness import World, columns


class ToyCore:
    """Accepts everything, makes token `step` for every live choice, ends a choice after `length` tokens."""

    def __init__(self, world: World, length: int = 10) -> None:
        self.world = world
        self.length = length
        self.next_request = 1
        self.live: dict[int, tuple[int, str, int, int]] = {}  # request -> (front end, id, choice, tokens so far)
        self.arrived = self.aborted = self.finished = self.acknowledged = self.lost = 0
        self.sequence = 0
        self._turned = trio.Event()

    def feed(self, item: Input) -> None:
        """One input."""
        self.sequence += 1
        out = Outputs()
        if isinstance(item, Arrived):
            self._arrive(item, out)
        elif isinstance(item, Aborted):
            self._end([r for r, row in self.live.items() if row[1] == item.id], "abort", out)
        elif isinstance(item, FinishAsked):
            mine = [r for r, row in self.live.items() if (row[1], row[2]) == (item.id, item.choice)]
            self._end(mine, "stop", out)
        elif isinstance(item, Acknowledged):
            self.acknowledged += len(item.ids)
        elif isinstance(item, FrontEndLost):
            self.lost += 1
            self._end(list(self.live), "abort", out)
        self.world.gateway.deliver(out, self.sequence)

    def step(self, number: int) -> None:
        """A token for every live choice; some reach their length."""
        rows = [(row[0], request, number) for request, row in self.live.items()]
        out = Outputs(tokens=columns(number, rows) if rows else None)
        for request, (frontend, id_, choice, count) in self.live.items():
            self.live[request] = (frontend, id_, choice, count + 1)
        self._end([r for r, row in self.live.items() if row[3] >= self.length], "length", out)
        self.world.gateway.deliver(out, self.sequence)

    async def run(self, durable_every: int = 3) -> None:
        """Feed what comes, step in between, let the disk follow a few steps behind."""
        number = 0
        while True:
            if not self.live:
                self.world.gateway.durable(self.sequence)
                self.feed(await self.world.inputs.receive())
            while self.world.inputs.statistics().current_buffer_used:
                self.feed(self.world.inputs.receive_nowait())
            number += 1
            self.step(number)
            if number % durable_every == 0:
                self.world.gateway.durable(self.sequence)
            self._turned.set()
            self._turned = trio.Event()
            await trio.sleep(0.001)  # the forward

    async def turned(self) -> None:
        """Wait for the end of an iteration."""
        await self._turned.wait()

    def _arrive(self, item: Arrived, out: Outputs) -> None:
        self.arrived += 1
        names = self.world.names
        if item.frontend not in names:
            names.append(item.frontend)
        frontend, generate = names.index(item.frontend), item.generate
        if generate.max_tokens == 0:
            out.replies.append(Reply(frontend, Refused(generate.id, "bad_parameter", "no output", "max_tokens")))
            return
        first = self.next_request
        self.next_request += generate.n
        for choice in range(generate.n):
            self.live[first + choice] = (frontend, generate.id, choice, 0)
        out.replies.append(Reply(frontend, Accepted(generate.id, first, generate.n, self.length, item.seed)))

    def _end(self, requests: list[int], reason: str, out: Outputs) -> None:
        for request in requests:
            frontend, id_, choice, count = self.live.pop(request)
            if reason == "abort":
                self.aborted += 1
            else:
                self.finished += 1
            out.replies.append(Reply(frontend, Finished(id_, choice, request, reason, "", 1, count)))
