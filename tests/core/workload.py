"""Seeded random workloads over the simulated world: arrivals, hang-ups, stops, flushes and ticks in any order.

Each seed switches some actions off and skews the others, so that rare mixes are reached too.
"""

from __future__ import annotations

import random

import msgspec

from allocator.columns import pack_i64
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from ipc.messages import Generate, Sampling
from tests.core.rank_double import FULL_ONLY, Shape
from tests.core.world import World, facts

ACTIONS = ("arrive", "abort", "finish", "tick", "report", "flush", "acknowledge", "lose", "repeat")


FAMILIES = {
    "full": FULL_ONLY,
    "window": Shape(windows=(20,)),
    "state": Shape(state=True),
    "window_state": Shape(windows=(12,), state=True),
    "windows_state": Shape(windows=(33, 9), state=True),
    "windows_only": Shape(windows=(24,), full_bytes=0),
}


def random_config(rng: random.Random) -> CoreConfig:
    """A small configuration with every policy in it."""
    page_size = rng.choice([1, 2, 4, 16, 64])
    return CoreConfig(
        page_size=page_size,
        checkpoint_interval=page_size * rng.choice([1, 2, 3, 8]),
        state_cache=rng.choice(["extra_buffer", "no_buffer"]) if page_size == 1 else "extra_buffer",
        max_running_requests=rng.choice([1, 2, 4, 7]),
        max_batched_tokens=rng.choice([8, 16, 64]),
        chunked_prefill_size=rng.choice([1, 5, 16, 64]),
        max_queued_requests=rng.choice([3, 20, 200]),
        schedule_policy=rng.choice(["fcfs", "priority"]),
        overlap=rng.random() < 0.7,
        reserve=rng.choice(["estimate", "estimate", "full"]),
        retracts_max=rng.choice([0, 1, 3]),
        stall_steps=8,
    )


class Workload:
    """One seed: a world and the actions on it."""

    def __init__(self, seed: int, *, pressed: bool = False, family: str = "full", caching: bool = False) -> None:
        self.rng = random.Random(seed)
        # With a cache prompts share beginnings: each is the start of one of a few long ones, and an own end.
        self.stems = [[self.rng.randrange(97) for _ in range(100)] for _ in range(3)] if caching else []
        self.pressed = pressed
        config = random_config(self.rng)
        if pressed:
            config = msgspec.structs.replace(config, max_running_requests=7, reserve="estimate", max_batched_tokens=64)
        tokens = 60 if pressed else self.rng.choice([40, 90, 400])
        pages = max(2, tokens // config.page_size) * (1 if family == "full" else 2)
        self.world = World(config, pages=pages, model=facts(97, 128), shape=FAMILIES[family], caching=caching)
        self.weights = {action: self.rng.choice([0, 1, 1, 2]) for action in ACTIONS}
        self.weights |= {"arrive": self.rng.choice([1, 3, 6]), "tick": 12, "report": self.rng.choice([6, 10, 14])}
        if pressed:
            self.weights |= dict.fromkeys(("abort", "finish", "lose"), 0) | {"arrive": 2}
        self.sent: list[Generate] = []

    def act(self) -> None:
        """One random action."""
        actions = [action for action in ACTIONS if self.weights[action]]
        action = self.rng.choices(actions, [self.weights[action] for action in actions])[0]
        world = self.world
        if action == "tick":
            world.tick()
        elif action == "report":
            if world.reports_waiting:
                world.report()
        elif action == "arrive":
            self._arrive()
        elif action == "flush":
            world.feed(inputs.FlushAsked(world.now_ns, self.rng.randint(0, 50)))
        elif action == "lose":
            if self.rng.random() < 0.1:
                world.feed(inputs.FrontEndLost(world.now_ns, self.rng.choice(["fe", "other"])))
        elif self.sent:
            self._on_known(action, self.rng.choice(self.sent))

    def _on_known(self, action: str, generate: Generate) -> None:
        world = self.world
        frontend = "other" if generate.id.startswith("o") else "fe"
        if action == "abort":
            world.abort(generate.id, frontend)
        elif action == "finish":
            choice, tokens = self.rng.randint(-1, generate.n), self.rng.randint(-1, 20)
            world.feed(inputs.FinishAsked(world.now_ns, frontend, generate.id, choice, tokens))
        elif action == "acknowledge":
            world.feed(inputs.Acknowledged(world.now_ns, frontend, [generate.id, "nobody"]))
        elif (frontend, generate.id) in world.clients and world.knows(frontend, generate.id):
            world.arrive(generate, frontend)

    def _arrive(self) -> None:
        rng, frontend = self.rng, self.rng.choice(["fe", "fe", "other"])
        sampling = Sampling(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.choice([None, rng.randint(-(2**63), 2**63 - 1)]),
            presence_penalty=rng.choice([0.0, 0.5]),
            logprobs=rng.choice([-1, -1, 1]),
            prompt_logprobs=rng.choice([-1, -1, 1]),
        )
        lengths = [1, 3, 9, 30] if self.pressed else [1, 3, 9, 30, 70]
        scoring = sampling.prompt_logprobs >= 0 and rng.random() < 0.3
        generate = Generate(
            id=f"{frontend[0]}{len(self.sent)}",
            prompt=pack_i64(self._prompt(rng.choice(lengths))),
            sampling=sampling,
            max_tokens=0 if scoring else rng.choice([30, 40] if self.pressed else [1, 2, 8, 40, None]),
            min_tokens=rng.choice([0, 0, 1]) if not scoring else 0,
            stop_ids=pack_i64(rng.sample(range(97), rng.choice([0, 1] if self.pressed else [0, 1, 9]))),
            n=rng.choice([1, 1, 1, 3]),
            priority=rng.randint(-2, 2) if self.world.config.schedule_policy == "priority" else 0,
            deadline_ms=rng.choice([0, 0, 0, 20]) if not self.pressed else 0,
            clip=rng.random() < 0.8,
        )
        self.sent.append(generate)
        self.world.arrive(generate, frontend, seed=rng.randint(0, 2**63 - 1))

    def _prompt(self, tokens: int) -> list[int]:
        own = self.rng.choice([tokens, 1, 5]) if self.stems else tokens
        stem = self.rng.choice(self.stems)[: max(0, tokens - own)] if self.stems else []
        return stem + [self.rng.randrange(97) for _ in range(tokens - len(stem))]

    def run(self, actions: int) -> World:
        """Random actions, then rest."""
        for _ in range(actions):
            self.act()
        self.world.run()
        self.world.check_rest()
        return self.world
