"""Episode: one row of the mapping on the real core, request by request, with what each left of the hot prompts.

Owns the traffic of a row and the account of it. Must never help the core: it is asked nothing but what a front end may
ask, and looked at only between requests. Invariants: one request at a time, each served to its end; no two prompts
share a page unless they are the same prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from allocator.capacity import Demand
from allocator.checks import STRICT, Checks
from allocator.columns import Int64s, pack_i64
from daemon.core.limits import CoreConfig
from ipc.messages import Accepted, Generate
from tools.pressure.mapping import (
    CHECKPOINT_TOKENS,
    CHUNK_TOKENS,
    COLD_TOKENS,
    CONTEXT_TOKENS,
    OUTPUT_TOKENS,
    PAGE_TOKENS,
    RUNNING_MAX,
    Condition,
    geometry,
)
from tools.simulate.engine import FACTS, GREEDY, Engine

PROMPT_IDS = 8192  # token ids of one prompt's range; no two ranges meet
HOT = ("A", "B")


class Served(NamedTuple):
    """One request of an episode: what it found and what the cache is like after it.

    `evicted` are the units per band that the cache gave up since the request before, `held` those that it holds,
    `usable` how many tokens of each hot prompt a request with exactly this prompt would find now.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int
    matched_tokens: int
    cut: str
    evicted: Demand
    held: Demand
    usable: tuple[int, ...]


class Episode(NamedTuple):
    """A row's outcome. `cached_tokens` is the sum over the two revisits, what the row is about."""

    condition: Condition
    policy: str
    checkpoints: str
    cached_tokens: int
    computed_tokens: int
    evicted: Demand
    served: tuple[Served, ...]


def config_of(policy: str = "value", checkpoints: str = "likely") -> CoreConfig:
    """The settings of the published runs, with an eviction policy and a checkpoint policy of ours."""
    return CoreConfig(
        page_size=PAGE_TOKENS,
        max_running_requests=RUNNING_MAX,
        max_batched_tokens=CHUNK_TOKENS + RUNNING_MAX,
        chunked_prefill_size=CHUNK_TOKENS,
        max_model_len=CONTEXT_TOKENS,
        checkpoint_interval=CHECKPOINT_TOKENS,
        eviction_policy=policy,
        checkpoint_policy=checkpoints,
    )


def prompt_of(case: int, tokens: int) -> Int64s:
    """The prompt of a case, int64[tokens]: ids of its own, so that it shares no page with another; longer ones begin
    with the shorter ones."""
    assert 0 < tokens <= PROMPT_IDS, "a prompt stays in its range"
    return np.arange(case * PROMPT_IDS, case * PROMPT_IDS + tokens, dtype=np.int64)


def traffic(condition: Condition) -> list[tuple[str, Int64s]]:
    """Names and prompts in the order in which they are served."""
    hot = [(name, prompt_of(case, condition.hot_tokens)) for case, name in enumerate(HOT)]
    cold = [(f"cold {k + 1}", prompt_of(len(HOT) + k, COLD_TOKENS)) for k in range(condition.cold)]
    revisits = hot if condition.order == "oldest" else hot[::-1]
    return [*hot, *cold, *((f"{name} again", prompt) for name, prompt in revisits)]


def run(condition: Condition, config: CoreConfig) -> Episode:
    """Serve one row's traffic, one request at a time, from an empty cache; every broken invariant raises."""
    facts = msgspec.structs.replace(FACTS, max_model_len=CONTEXT_TOKENS)
    engine = Engine(config, geometry(condition.model, condition.cap_tokens), facts, checks=Checks(STRICT))
    hot = [prompt_of(case, condition.hot_tokens) for case in range(len(HOT))]
    served: list[Served] = []
    before = _evicted(engine)
    first = before
    for number, (name, prompt) in enumerate(traffic(condition)):
        served.append(_serve(engine, name, prompt, number, hot, before))
        before = _evicted(engine)
    engine.check_rest()
    return Episode(
        condition=condition,
        policy=config.eviction_policy,
        checkpoints=config.checkpoint_policy,
        cached_tokens=sum(one.cached_tokens for one in served[-len(HOT) :]),
        computed_tokens=engine.prompt_tokens,
        evicted=tuple(now - then for now, then in zip(before, first, strict=True)),
        served=tuple(served),
    )


def _serve(engine: Engine, name: str, prompt: Int64s, number: int, hot: list[Int64s], before: Demand) -> Served:
    # Output ids lie above every prompt's, so that no output continues another prompt.
    seed = engine.facts.vocab_size - 1 - number
    asked = Generate(name, pack_i64(prompt), GREEDY, max_tokens=OUTPUT_TOKENS)
    answer = engine.submit(asked, seed)
    if not isinstance(answer, Accepted):
        raise RuntimeError(f"request {name!r} of {len(prompt)} tokens was refused: {answer.message}")
    engine.run()
    ended = engine.sent[name].finished
    if ended is None or ended.reason != "length" or ended.output_tokens != OUTPUT_TOKENS:
        raise RuntimeError(f"request {name!r} ended otherwise than by its length: {ended}")
    return Served(
        name=name,
        prompt_tokens=len(prompt),
        cached_tokens=ended.cached_tokens,
        matched_tokens=ended.matched_tokens,
        cut=ended.hit_cut,
        evicted=tuple(now - then for now, then in zip(_evicted(engine), before, strict=True)),
        held=engine.cached_units(),
        usable=tuple(_usable(engine, one) for one in hot),
    )


def _evicted(engine: Engine) -> Demand:
    memory = engine.state.memory
    assert memory is not None, "the epoch has begun"
    return tuple(memory.evicted[band.name] for band in memory.chain.bands)


def _usable(engine: Engine, prompt: Int64s) -> int:
    """What a request with this prompt would find now."""
    memory = engine.state.memory
    assert memory is not None, "the epoch has begun"
    return memory.cache.match("", prompt, len(prompt) - 1).tokens if memory.cache is not None else 0
