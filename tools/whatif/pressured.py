"""Pressured: traffic that does not fit, to be recorded: conversations under a few system prompts, in bursts.

Owns the drawing. Must never depend on what a server does: everything is drawn from the seed before the first request is
sent. Later turns of a conversation begin with the turns before, with an answer that was drawn, not one that was given.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from allocator.columns import pack_i64
from ipc.messages import Generate, Sampling
from tools.whatif.rerun import Sending

URGENT = 10
NS_PER_S = 1_000_000_000
IDS = (1000, 20_000)  # of prompts: in every vocabulary, and no special tokens
MOST_TOKENS = 1200  # of a prompt; a conversation that is longer begins anew


class Load(NamedTuple):
    """How much comes, and how long it is, in tokens. About half of them come in bursts."""

    requests: int = 400
    seconds: float = 25.0
    systems: int = 4
    system_tokens: int = 192
    talks: int = 60
    turn_tokens: tuple[int, int] = (16, 160)
    answer_tokens: tuple[int, int] = (16, 96)
    max_tokens: int = 500
    burst: int = 16
    long_tokens: int = 200  # the least output of every request of a burst: longer than the others are
    urgent_one_in: int = 4  # with a priority: under preemption they take the place of others
    hang_up_one_in: int = 12  # clients that leave before they have everything


def draw(load: Load, seed: int) -> list[Sending]:
    """The requests, in order of time."""
    rng = random.Random(f"pressured/{seed}")
    systems = [tokens(rng, load.system_tokens) for _ in range(load.systems)]
    talks = [list(systems[at % len(systems)]) for at in range(load.talks)]
    found = []
    for number, (at_s, burst) in enumerate(_times(rng, load)):
        which = rng.randrange(len(talks))
        prompt = talks[which] + tokens(rng, rng.randint(*load.turn_tokens))
        if len(prompt) > MOST_TOKENS:
            prompt = list(systems[which % len(systems)]) + prompt[-load.turn_tokens[1] :]
        talks[which] = prompt + tokens(rng, rng.randint(*load.answer_tokens))
        at_ns = round(at_s * NS_PER_S)
        leaves = load.hang_up_one_in and rng.randrange(load.hang_up_one_in) == 0
        hang_up_ns = at_ns + round(rng.uniform(1.0, 6.0) * NS_PER_S) if leaves else -1
        sampling = Sampling(temperature=0.0, seed=number)
        generate = Generate(
            id=f"p{number}",
            prompt=pack_i64(prompt),
            sampling=sampling,
            max_tokens=load.max_tokens,
            min_tokens=load.long_tokens if burst else 0,
            priority=URGENT if rng.randrange(load.urgent_one_in) == 0 else 0,
        )
        found.append(Sending(at_ns, generate, hang_up_ns))
    return found


def _times(rng: random.Random, load: Load) -> list[tuple[float, int]]:
    """Seconds of arrivals, and the burst that they are of: many within a moment; 0: a single one between bursts."""
    times: list[tuple[float, int]] = []
    bursts = 0
    while len(times) < load.requests:
        at = rng.uniform(0, load.seconds)
        many = load.burst if rng.random() < 1 / load.burst else 1
        bursts += many > 1
        count = min(many, load.requests - len(times))
        times += [(at + rng.uniform(0, 0.2), bursts if many > 1 else 0) for _ in range(count)]
    return sorted(times)


def tokens(rng: random.Random, count: int) -> list[int]:
    """So many token ids of a prompt."""
    return [rng.randrange(*IDS) for _ in range(count)]
