"""Ties: why an output parted from the undisturbed one, by asking the same server for log probabilities.

Owns the questions. Must never excuse what is not shown: a near-tie is one where both tokens are among the best at that
place and their log probabilities differ by less than the bound, and everything behind it is what the model says there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from allocator.columns import i64, pack_i64
from ipc.client import DaemonClient
from ipc.client_stream import Tokens
from ipc.messages import Finished, Generate, Logprobs, Sampling
from tools.faults.judge import parting
from tools.faults.work import Story

if TYPE_CHECKING:
    from tools.faults.rounds import Rounds

ALTERNATIVES = 8
PARTINGS_MAX = 16  # behind a near-tie the rest is another text, which may have one too


class Tie(NamedTuple):
    """Where a request parted, both tokens there, and the distance of their log probabilities; `near` excuses it."""

    request: int
    at: int
    expected: int
    got: int
    distance: float
    near: bool
    text: str


async def explain(rounds: Rounds, story: Story, reference: Sequence[int], bound: float) -> Tie:
    """Follow an output from parting to parting: at each, both tokens must be a near-tie, and the rest what follows."""
    client = rounds.client
    outputs = [cut for cut in story.cuts if parting(cut, reference[: len(cut)]) >= 0] or [story.tokens]
    told, first = outputs[0], None
    expected = list(reference[: len(told)])
    for number in range(PARTINGS_MAX):
        at = parting(told, expected)
        if at < 0:
            break
        name = f"tie-{story.task.index}-{id(story)}-{number}"
        distance = await _distance(client, name, [*story.task.prompt, *told[:at]], expected[at], told[at])
        near = distance <= bound
        if first is None or not near:
            first = Tie(story.task.index, at, expected[at], told[at], distance, near, f"distance {distance:.2e}")
        if not near:
            return first
        rest = len(told) - at - 1
        follows = await _greedy(client, f"{name}-rest", [*story.task.prompt, *told[: at + 1]], rest) if rest else []
        expected = [*told[: at + 1], *follows]
    else:
        assert first is not None
        return first._replace(near=False, text=f"it parts {PARTINGS_MAX} times")
    assert first is not None, "a story that parted, parts"
    return first


async def _distance(client: DaemonClient, name: str, tokens: list[int], one: int, other: int) -> float:
    """How far the log probabilities of two tokens are apart behind `tokens`; infinite if one is not among the best."""
    values: list[Logprobs] = []
    sampling = Sampling(temperature=0.0, logprobs=ALTERNATIVES)
    async with client.generate(Generate(name, pack_i64(tokens), sampling, max_tokens=1)) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                values += event.logprobs
    if not values:
        return float("inf")
    best = dict(zip(i64(values[0].top_ids).tolist(), np.frombuffer(values[0].top_values, "<f4").tolist(), strict=True))
    return abs(best[one] - best[other]) if one in best and other in best else float("inf")


async def _greedy(client: DaemonClient, name: str, tokens: list[int], count: int) -> list[int]:
    """The next `count` greedy tokens behind `tokens`."""
    found: list[int] = []
    asked = Generate(name, pack_i64(tokens), Sampling(temperature=0.0), max_tokens=count)
    async with client.generate(asked) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                found += event.tokens
            elif isinstance(event, Finished) and event.reason not in ("length", "stop"):
                break
    return found
