"""Curve: throughput, retractions and work done twice as the arena gets too small for the requests that may run.

Owns the workload, the points and what "no cliff" means in numbers. Must never serve anything itself: the core does, on
a device that only takes time. Every point serves the same requests, all of which wait from the start; only the arena
differs.

    oversubscription x = bytes that all running requests hold at their ends / bytes of the arena
    x <= 1   everything that may run fits           x = 2   half of it does

`max_tokens` of a request is `slack` times the output it then makes before its stop token: nobody knows beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from allocator.columns import Int64s, pack_i64
from allocator.demand import Purpose, RequestSizes, request_demand
from allocator.geometry import BandGeometry, Geometry
from daemon.core.limits import CoreConfig
from ipc.messages import Accepted, Generate
from tools.simulate.engine import FACTS, GREEDY, NS_PER_S, Engine, Times, chain_start_bytes, one_stage

PAGE_TOKENS = 16
CHECKPOINT_TOKENS = 256
STOP_ID = FACTS.vocab_size - 1
ROWS_EACH = 8  # requests per row
FLOOR_OF_FULL = 0.95  # throughput is at least so much of that with `reserve = full`
FLOOR_OF_MEMORY = 0.9  # from one point to the next, at least so much of what the smaller arena accounts for
CEILING_OF_FULL = 3.0  # milliseconds per token, p99: at most so many times those with `reserve = full`
SLACK_MAX = 64


class Shape(NamedTuple):
    """What the requests of a load are like: lengths uniform from the first to the second number of tokens.

    Each prompt begins with the `shared` tokens of one of `groups` prefixes, which are in its length.
    """

    prompt: tuple[int, int]
    output: tuple[int, int]
    shared: int = 0
    groups: int = 1


SHAPES: dict[str, Shape] = {
    "mixed": Shape((128, 768), (64, 320)),
    "growing": Shape((16, 64), (256, 1024)),
    "shared": Shape((576, 1024), (64, 320), shared=512, groups=8),
}

FAMILIES: dict[str, tuple[BandGeometry, ...]] = {
    "full": (BandGeometry("full", "full", 65_536),),
    "full+window": (BandGeometry("window:512", "window", 98_304, 512), BandGeometry("full", "full", 32_768)),
    "full+window+state": (
        BandGeometry("state", "state", 1_572_864),
        BandGeometry("window:512", "window", 65_536, 512),
        BandGeometry("full", "full", 32_768),
    ),
}


class Load(NamedTuple):
    """The requests of a curve as columns, int64[n]: prompt lengths and outputs; `rows` of them may run at once."""

    name: str
    rows: int
    prompts: Int64s
    outputs: Int64s
    slack: int

    @property
    def longest_tokens(self) -> int:
        """The most that a prompt and its `max_tokens` come to."""
        return int((self.prompts + self.outputs * self.slack).max())


class Point(NamedTuple):
    """One family at one oversubscription with one kind of reservation; times are simulated, tokens those delivered.

    `tpot_ms` is the time per output token of a request after its first. `recomputed_tokens` were computed before and
    lost by a retraction; their percentage is of all positions computed, prompts and outputs together.
    """

    load: str
    family: str
    reserve: str
    oversubscription: float
    arena_bytes: int
    requests: int
    finished: int
    seconds: float
    tokens_per_s: float
    running_mean: float
    retractions: int
    retractions_per_request: float
    retractions_most: int
    recomputed_tokens: int
    recomputed_percent: float
    cached_percent: float
    parks: int
    tpot_ms_p50: float
    tpot_ms_p99: float
    steps: int


def load_of(name: str, rows: int, slack: int, seed: int) -> Load:
    """A seeded load of a shape for so many rows; raises KeyError for a shape there is not."""
    shape, count = SHAPES[name], rows * ROWS_EACH
    draw = np.random.default_rng(seed)
    prompts = draw.integers(shape.prompt[0], shape.prompt[1] + 1, count, dtype=np.int64)
    outputs = draw.integers(shape.output[0], shape.output[1] + 1, count, dtype=np.int64)
    return Load(name, rows, prompts, outputs, slack)


def prompts_of(load: Load) -> Iterator[Int64s]:
    """The prompts of a load, int64 each; no two share more than their group's prefix."""
    shape, draw = SHAPES[load.name], np.random.default_rng(len(load.prompts))
    below = STOP_ID - 1  # ids of outputs lie below the count of requests, those of prompts above it
    prefixes = draw.integers(len(load.prompts), below, (shape.groups, shape.shared), dtype=np.int64)
    for number, length in enumerate(load.prompts.tolist()):
        own = draw.integers(len(load.prompts), below, length - shape.shared, dtype=np.int64)
        yield np.concatenate([prefixes[number % shape.groups], own])


def working_set_bytes(bands: Sequence[BandGeometry], load: Load) -> int:
    """Bytes that `rows` requests of the mean size hold when each is at its end."""
    state = any(band.kind == "state" for band in bands)
    total = 0
    for prompt, output in zip(load.prompts.tolist(), load.outputs.tolist(), strict=True):
        sizes = RequestSizes(prompt, output, checkpoint_interval=CHECKPOINT_TOKENS if state else 0)
        units = request_demand(bands, PAGE_TOKENS, sizes, Purpose.STEADY)
        total += sum(count * band.unit_bytes for count, band in zip(units, bands, strict=True))
    return total * load.rows // len(load.prompts)


def arena_of(bands: Sequence[BandGeometry], load: Load, oversubscription: float) -> Geometry:
    """The arena at a point, its sink beside the bytes that count; raises ValueError where it holds nothing."""
    chain = int(working_set_bytes(bands, load) / oversubscription)
    unit = bands[-1].unit_bytes
    size = -(-(chain_start_bytes(list(bands)) + chain) // unit) * unit
    return one_stage(list(bands), PAGE_TOKENS, size)


def config_of(load: Load, reserve: str, policy: str = "value") -> CoreConfig:
    """The core's settings for a load."""
    return CoreConfig(
        page_size=PAGE_TOKENS,
        max_running_requests=load.rows,
        max_queued_requests=len(load.prompts),
        checkpoint_interval=CHECKPOINT_TOKENS,
        reserve=reserve,
        eviction_policy=policy,
    )


def run(family: str, reserve: str, oversubscription: float, load: Load, times: Times, policy: str = "value") -> Point:
    """Serve the whole load in one arena."""
    facts = msgspec.structs.replace(FACTS, max_model_len=load.longest_tokens)
    ends = load.prompts + load.outputs - 1  # the position of each request's stop token

    def tokens(seeds: Int64s, positions: Int64s) -> Int64s:
        return np.where(positions >= ends[seeds], STOP_ID, seeds)

    running: list[int] = []
    engine = Engine(
        config_of(load, reserve, policy),
        arena_of(FAMILIES[family], load, oversubscription),
        facts,
        times,
        tokens=tokens,
        on_step=lambda step: running.append(len(step.forward.rows) // 4 if step.forward is not None else 0),
    )
    for number, prompt in enumerate(prompts_of(load)):
        most = int(load.outputs[number]) * load.slack
        stop = pack_i64([STOP_ID])
        asked = Generate(str(number), pack_i64(prompt), GREEDY, max_tokens=most, stop_ids=stop, clip=True)
        answer = engine.submit(asked, number)
        if not isinstance(answer, Accepted):
            raise RuntimeError(f"request {number} of {len(prompt)} tokens was refused: {answer.message}")
    engine.run()
    engine.check_rest()
    return _point(load, family, reserve, oversubscription, engine, running)


def _point(load: Load, family: str, reserve: str, oversubscription: float, engine: Engine, running: list[int]) -> Point:
    sent, gauges = list(engine.sent.values()), engine.core.gauges()
    seconds = max(one.ended_ns for one in sent) / NS_PER_S
    each_ms = [(one.ended_ns - one.first_token_ns) / (one.tokens - 1) / 1e6 for one in sent if one.tokens > 1]
    recomputed = sum(one.recomputed_tokens for one in sent)
    retractions = [one.retractions for one in sent]
    cached = sum(one.cached_tokens for one in sent)
    return Point(
        load=load.name,
        family=family,
        reserve=reserve,
        oversubscription=oversubscription,
        arena_bytes=engine.geometry.stages[0].arena_bytes,
        requests=len(sent),
        finished=gauges["finished_total"],
        seconds=round(seconds, 6),
        tokens_per_s=round(engine.output_tokens / seconds, 2),
        running_mean=round(float(np.mean([rows for rows in running if rows])), 2),
        retractions=sum(retractions),
        retractions_per_request=round(sum(retractions) / len(sent), 4),
        retractions_most=max(retractions),
        recomputed_tokens=recomputed,
        recomputed_percent=round(100 * recomputed / (engine.prompt_tokens + engine.output_tokens), 3),
        cached_percent=round(100 * cached / int(load.prompts.sum()), 3),
        parks=gauges["parks_total"],
        tpot_ms_p50=round(float(np.percentile(each_ms, 50)), 4),
        tpot_ms_p99=round(float(np.percentile(each_ms, 99)), 4),
        steps=gauges["forwards_total"],
    )


def problems(points: Sequence[Point], retracts_max: int = CoreConfig().retracts_max) -> Iterator[str]:
    """What of the promise does not hold, a sentence each: everything ends, no cliff, throughput and latency never far
    from those of `reserve = full`, retractions bounded."""
    full = {(one.load, one.family, one.oversubscription): one for one in points if one.reserve == "full"}
    for one in points:
        where = f"{one.load}, {one.family} at {one.oversubscription:g} with {one.reserve}"
        if one.finished != one.requests:
            yield f"{where}: {one.finished} of {one.requests} requests finished"
        if one.retractions_most > retracts_max:
            yield f"{where}: a request was retracted {one.retractions_most} times, at most {retracts_max} are allowed"
        beside = full.get((one.load, one.family, one.oversubscription))
        if beside is None:
            continue
        if one.tokens_per_s < FLOOR_OF_FULL * beside.tokens_per_s:
            least = f"below {FLOOR_OF_FULL:g} of reserve full's {beside.tokens_per_s:,.0f}"
            yield f"{where}: {one.tokens_per_s:,.0f} tokens/s, {least}"
        if one.tpot_ms_p99 > CEILING_OF_FULL * beside.tpot_ms_p99:
            most = f"above {CEILING_OF_FULL:g} times reserve full's {beside.tpot_ms_p99:.2f}"
            yield f"{where}: {one.tpot_ms_p99:.2f} ms per token at p99, {most}"
    for before, after in _neighbours(points):
        ratio = after.tokens_per_s / before.tokens_per_s
        floor = FLOOR_OF_MEMORY * min(1.0, before.oversubscription / after.oversubscription)
        if ratio < floor:
            where = f"{after.load}, {after.family} with {after.reserve}"
            where += f" from {before.oversubscription:g} to {after.oversubscription:g}"
            yield f"{where}: throughput falls to {ratio:.3f}, the memory accounts for {floor:.3f}"


def _neighbours(points: Sequence[Point]) -> Iterator[tuple[Point, Point]]:
    def curve(one: Point) -> tuple[str, str, str]:
        return (one.load, one.family, one.reserve)

    for key in dict.fromkeys(map(curve, points)):
        mine = sorted((one for one in points if curve(one) == key), key=lambda one: one.oversubscription)
        yield from pairwise(mine)


def point_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """JSON rows."""
    return [one._asdict() for one in points]
