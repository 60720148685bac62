"""Simulated runs as journals, for what-if: tight arenas of several bands, conversations, and all ways to end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from allocator.columns import Int64s, pack_i64
from allocator.geometry import BandGeometry, Geometry, StageGeometry
from daemon.core import inputs
from daemon.core.limits import CoreConfig
from daemon.settings_table import Settings
from ipc.messages import Generate, ModelFacts
from tools.simulate.engine import GREEDY, NS_PER_S, Engine, Times, TokenRule
from tools.simulate.recording import Recording
from tools.whatif.account import Account, Figures
from tools.whatif.changes import changed_geometry

EOS = 2
FACTS = ModelFacts("whatif", "simulated", 50_000, 4096, "none", [EOS])
TIMES = Times(4_000_000, 9_000, 30_000)
CONFIG = CoreConfig(
    page_size=16,
    max_running_requests=24,
    max_batched_tokens=256,
    chunked_prefill_size=128,
    priority_preemption=True,
    checkpoint_interval=32,
)
FULL = [BandGeometry("full", "full", 512)]
HYBRID = [
    BandGeometry("state", "state", 1024),
    BandGeometry("window:64", "window", 768, 64),
    BandGeometry("full", "full", 512),
]


def settings_for(config: CoreConfig, arena_bytes: int) -> Settings:
    """The settings that say the same as a configuration."""
    return Settings(
        arena_bytes=arena_bytes,
        page_size=config.page_size,
        max_running_requests=config.max_running_requests,
        max_num_batched_tokens=config.max_batched_tokens,
        chunked_prefill_size=config.chunked_prefill_size,
        checkpoint_interval=config.checkpoint_interval,
    )


def geometry_of(bands: list[BandGeometry], arena_bytes: int, config: CoreConfig = CONFIG) -> Geometry:
    """One stage with so many bytes, sized as a rank sizes it."""
    start = 1024 * 2 if any(band.kind == "state" for band in bands) else 512
    raw = Geometry(config.page_size, 0, 0, [StageGeometry(arena_bytes, start, bands)])
    wanted = settings_for(config, arena_bytes)
    return changed_geometry(raw, Settings(page_size=config.page_size), wanted, FACTS.max_model_len)


def lengths(seeds: Int64s, positions: Int64s) -> Int64s:
    """A request's seed says how long it is: at a place of its own it says that it is done, and never before."""
    ends = (seeds >> 20) + (seeds & 0xFFFFF)
    return np.where(positions >= ends, EOS, 10 + (seeds * 31 + positions * 7) % 40_000)


def requests(seed: int, count: int = 60, patient: bool = False) -> list[tuple[int, Generate, int, dict[str, Any]]]:
    """When, what, with which seed, and how soon its client leaves, if it does; `patient`: each is served to its end."""
    rng = random.Random(seed)
    talks = [[rng.randrange(10, 40_000) for _ in range(48)] for _ in range(6)]
    made = []
    for number in range(count):
        talk = rng.randrange(len(talks))
        prompt = talks[talk] + [rng.randrange(10, 40_000) for _ in range(rng.randint(3, 90))]
        talks[talk] = prompt if len(prompt) < 400 else prompt[:48]
        output = min(1 + int(rng.expovariate(1 / 30)), 160)
        generate = Generate(
            f"r{number}",
            pack_i64(prompt),
            GREEDY,
            max_tokens=160,
            stop_ids=pack_i64([EOS]),
            priority=5 * (rng.random() < 0.2),
            n=1 + (rng.random() < 0.1),
            deadline_ms=2500 if rng.random() < 0.05 and not patient else 0,
        )
        after: dict[str, Any] = {"leaves_ms": rng.randint(1, 900)} if rng.random() < 0.08 and not patient else {}
        made.append((number * 18_000_000 + rng.randrange(9_000_000), generate, (len(prompt) << 20) + output, after))
    return made


def follow(engine: Engine) -> Account:
    """The account of all that is fed to an engine from now on."""
    account = Account()
    feed = engine.core.feed

    def told(item: inputs.Input) -> Any:
        out = feed(item)
        account.take(item, out)
        return out

    engine.core.feed = told  # type: ignore[method-assign]
    return account


def serve(
    config: CoreConfig,
    geometry: Geometry,
    traffic: list[tuple[int, Generate, int, dict[str, Any]]],
    into: Path | None,
    times: Times = TIMES,
    tokens: TokenRule = lengths,
) -> Figures:
    """Run the traffic on a simulated device, as a journal if `into` is given; its figures."""
    recording = Recording(into, config) if into is not None else None
    engine = Engine(config, geometry, FACTS, times, tokens=tokens, recording=recording)
    account = follow(engine)
    doings: list[tuple[int, int, Any]] = []
    for at, (at_ns, generate, seed, after) in enumerate(traffic):
        doings.append((at_ns, at, (generate, seed)))
        if "leaves_ms" in after:
            doings.append((at_ns + after["leaves_ms"] * 1_000_000, at, generate.id))
    for at_ns, _, what in sorted(doings, key=lambda doing: doing[:2]):
        engine.advance(NS_PER_S + at_ns)
        if isinstance(what, str):
            engine.abort(what)
        else:
            engine.submit(msgspec.structs.replace(what[0]), what[1])
    engine.run()
    engine.check_counts()
    if recording is not None:
        recording.close(engine.now_ns, "served", engine.core)
        recording.__exit__(None, None, None)
    return account.figures()
