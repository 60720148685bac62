"""What is asked of a simulated group: a seeded load of requests, hang-ups, flushes and orders, by the step's number.

Owns the load. Must never depend on delays: what happens is tied to how many steps the core has sent.
"""

from __future__ import annotations

import random

from daemon.core.limits import CoreConfig
from ipc.messages import RankSettings
from tools.groups.group import Client, SimulatedGroup
from tools.toy_reference import Toy, mismatches

TOY = Toy(windows=(24, 40), state=True, depth=2)
ROWS = 8
PAGE_SIZE = 4
INTERVAL = 16


def core_config(**changes: object) -> CoreConfig:
    """A small core whose chunks are a few pages, so that prompts take several steps."""
    fields: dict[str, object] = {
        "page_size": PAGE_SIZE,
        "max_running_requests": ROWS,
        "max_batched_tokens": 64,
        "chunked_prefill_size": 16,
        "checkpoint_interval": INTERVAL,
        "retracts_max": 64,
    }
    return CoreConfig(**(fields | changes))  # type: ignore[arg-type]


def stage_settings(stages: int, ranks: int, arena_bytes: int, toy: Toy = TOY) -> list[RankSettings]:
    """Settings of each stage; the first stage's arena is the tightest, later ones have a little more."""
    made = []
    for stage in range(stages):
        made.append(
            RankSettings(
                model_path="",
                model_name="toy",
                dtype="float32",
                page_size=PAGE_SIZE,
                max_running_requests=ROWS,
                max_batched_tokens=64,
                max_model_len=400,
                arena_bytes=arena_bytes + stage * 4096,
                mem_fraction_ppm=0,
                runner="modeled",
                threads=1,
                invariants=2,
                options=toy.options(),
                checkpoint_interval=INTERVAL,
                tensor_ranks=ranks,
                stage_layers=[0] * stages,
            )
        )
    return made


class Load:
    """Requests that share beginnings, come in bursts, and are hung up on now and then."""

    def __init__(self, seed: int, toy: Toy = TOY) -> None:
        self._rng = random.Random(seed)
        self._toy = toy
        self._prompts = [self._random(self._rng.randint(20, 90)) for _ in range(6)]
        self._next = 0

    def drive(self, group: SimulatedGroup, steps: int) -> None:
        """Keep the group busy until it has sent so many steps, then let it come to rest."""
        while len(group.steps) < steps:
            if len(group.steps) >= self._next:
                self._event(group)
                self._next = len(group.steps) + self._rng.randint(1, 6)
            if not group.turn():
                self._next = 0
        group.run()

    def check_outputs(self, group: SimulatedGroup) -> int:
        """Every output is that of the sequence alone; returns the number of tokens compared."""
        for client in group.clients:
            wrong = mismatches(self._toy, client.prompt, client.tokens)
            assert not wrong, f"request {client.number}: tokens {wrong} of {len(client.tokens)} are not the toy's"
        return sum(len(client.tokens) for client in group.clients)

    def _event(self, group: SimulatedGroup) -> None:
        kind = self._rng.random()
        live = [client for client in group.clients if client.finished is None and client.refused is None]
        if kind < 0.12 and live:
            group.abort(self._rng.choice(live))
        elif kind < 0.17:
            group.flush(self._rng.randint(1, 8))
        elif kind < 0.19:
            group.control("flush_cache")
        elif len(live) < 2 * ROWS:
            for _ in range(self._rng.choice((1, 1, 2, 5))):
                self._submit(group)

    def _submit(self, group: SimulatedGroup) -> Client:
        shared = self._rng.choice(self._prompts)
        prompt = shared[: self._rng.randint(1, len(shared))] + self._random(self._rng.randint(1, 30))
        return group.submit(prompt, self._rng.randint(1, 40))

    def _random(self, count: int) -> list[int]:
        return [self._rng.randrange(self._toy.vocab_size) for _ in range(count)]
