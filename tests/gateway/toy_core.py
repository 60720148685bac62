"""A toy core behind a real gateway: every live choice gains a token per step; it counts, it does not schedule."""

from __future__ import annotations

import trio

from allocator.columns import pack_i64
from daemon.core.inputs import Aborted, Acknowledged, Arrived, FinishAsked, FrontEndLost, Input, Resumed
from daemon.core.outputs import Outputs, Reply
from daemon.core.reasons import RefusalCode
from ipc.messages import Accepted, Continued, Finished, Refused
from tests.gateway.harness import World, columns


class ToyCore:
    """Accepts everything, makes token `step` for every live choice, ends a choice after `length` tokens.

    Token k of a choice is k + 1 where `dense`, so that whoever reads it sees what is missing or comes twice.
    """

    def __init__(self, world: World, length: int = 10, dense: bool = False) -> None:
        self.world = world
        self.dense = dense
        self.known: dict[str, tuple[Accepted, dict[int, Finished]]] = {}  # until acknowledged
        self.forgotten = 0  # requests that were asked for and not known
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
            for id_ in item.ids:
                self.known.pop(id_, None)
        elif isinstance(item, Resumed):
            self._resume(item, out)
        elif isinstance(item, FrontEndLost):
            self.lost += 1
            self._end(list(self.live), "abort", out)
        self.world.gateway.deliver(out, self.sequence)

    def step(self, number: int) -> None:
        """A token for every live choice; some reach their length."""
        rows = [(row[0], request, row[3] + 1 if self.dense else number) for request, row in self.live.items()]
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
        if generate.id in self.known:
            accepted, ended = self.known[generate.id]
            self.arrived -= 1
            out.replies += [Reply(frontend, message) for message in (accepted, *ended.values())]
            return
        if generate.max_tokens == 0:
            out.replies.append(Reply(frontend, Refused(generate.id, "bad_parameter", "no output", "max_tokens")))
            return
        first = self.next_request
        self.next_request += generate.n
        for choice in range(generate.n):
            self.live[first + choice] = (frontend, generate.id, choice, 0)
        accepted = Accepted(generate.id, first, generate.n, self.length, item.seed)
        self.known[generate.id] = accepted, {}
        out.replies.append(Reply(frontend, accepted))

    def _resume(self, item: Resumed, out: Outputs) -> None:
        names = self.world.names
        if item.frontend not in names:
            names.append(item.frontend)
        frontend, held = names.index(item.frontend), len(item.tokens) // 8
        if item.id not in self.known:
            self.forgotten += 1
            out.replies.append(Reply(frontend, Refused(item.id, RefusalCode.UNKNOWN_REQUEST, "no such request")))
            return
        accepted, ended = self.known[item.id]
        request = accepted.first_request + item.choice
        made = self.live[request][3] if request in self.live else ended[item.choice].output_tokens
        if request in self.live:
            self.live[request] = (frontend, item.id, item.choice, max(made, held))
        rest = pack_i64(range(held + 1, made + 1))
        out.replies.append(Reply(frontend, Continued(item.id, item.choice, request, held, rest)))
        out.replies += [Reply(frontend, end) for choice, end in ended.items() if choice == item.choice]

    def _end(self, requests: list[int], reason: str, out: Outputs) -> None:
        for request in requests:
            frontend, id_, choice, count = self.live.pop(request)
            if reason == "abort":
                self.aborted += 1
            else:
                self.finished += 1
            end = Finished(id_, choice, request, reason, "", 1, count)
            if id_ in self.known:
                self.known[id_][1][choice] = end
            out.replies.append(Reply(frontend, end))
