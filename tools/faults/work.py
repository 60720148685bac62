"""Work: what the clients of a campaign ask for, and what each of them was told, token by token.

Owns tasks and the books about them. Must never decide what is right (`tools.faults.judge` does). A task is drawn from
the seed and its place alone, so that every round and the undisturbed run ask the same; only the cache key differs from
round to round, so that no round is served from what an earlier one left.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from allocator.columns import pack_i64
from ipc.messages import Generate, Sampling

HTTP, CLIENT, WIRE = "http", "client", "wire"  # how a task reaches the server
PROMPT_IDS = (1000, 20_000)  # in every vocabulary, and no special tokens


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bounds of the drawn lengths, in tokens, and how many tasks sample at a temperature instead of greedily."""

    prompt: tuple[int, int] = (8, 96)
    output: tuple[int, int] = (100, 400)
    sampled_one_in: int = 4  # 0: none


@dataclass(frozen=True, slots=True)
class Task:
    """One request: `index` says which one of a round it is."""

    index: int
    via: str
    prompt: tuple[int, ...]
    output_tokens: int
    temperature: float
    seed: int

    def salt(self, round_: int) -> str:
        """The cache key in that round; empty where the rounds share."""
        return f"round-{round_}" if self.index // 4 % 2 else ""  # every other four share nothing with other rounds

    def body(self, round_: int) -> dict[str, Any]:
        """As a streamed completion over HTTP."""
        fields: dict[str, Any] = {
            "prompt": list(self.prompt),
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        return fields | ({"cache_salt": self.salt(round_)} if self.salt(round_) else {})

    def generate(self, round_: int, id_: str) -> Generate:
        """As a message to the daemon."""
        salt = self.salt(round_)
        sampling = Sampling(temperature=self.temperature, seed=self.seed)
        return Generate(
            id_,
            pack_i64(self.prompt),
            sampling,
            max_tokens=self.output_tokens,
            namespace=f"salt:{salt}" if salt else "",
        )


def draw_tasks(seed: int, clients: int, sizes: Sizes) -> list[Task]:
    """The tasks of a round: half over HTTP, a quarter by the product's own client, a quarter by one of the campaign."""
    ways = (HTTP, CLIENT, HTTP, WIRE)
    tasks = []
    for index in range(clients):
        draw = random.Random(f"{seed}/task/{index}")
        prompt = tuple(draw.randrange(*PROMPT_IDS) for _ in range(draw.randint(*sizes.prompt)))
        four = index // len(ways)  # every four go all ways
        sampled = bool(sizes.sampled_one_in) and four % sizes.sampled_one_in == sizes.sampled_one_in - 1
        output = draw.randint(*sizes.output)
        tasks.append(
            Task(index, ways[index % len(ways)], prompt, output, 0.8 if sampled else 0.0, draw.getrandbits(48))
        )
    return tasks


@dataclass(slots=True)
class Story:
    """What one client was told of one task in one round."""

    task: Task
    tokens: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)  # monotonic, one per delivery
    finish: str = ""  # the reason of its end; empty while it has none
    told_tokens: int = -1  # how many output tokens its end named
    error: str = ""  # it will never end well
    cuts: list[list[int]] = field(default_factory=list)  # what came on connections that broke, before it asked anew
    turned_away: int = 0  # times it was refused before it was accepted, and asked again
    resumes: int = 0  # times it was continued on another connection
    wrong: list[str] = field(default_factory=list)  # positions that contradict each other

    def take(self, tokens: list[int]) -> None:
        """Tokens came."""
        self.tokens += tokens
        self.arrivals_s.append(time.monotonic())

    def cut(self) -> None:
        """The connection broke for good: what came is kept aside, and the task begins anew."""
        self.cuts.append(self.tokens)
        self.tokens = []

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return bool(self.finish or self.error)
