"""Hit sweep: requests that share a beginning and differ behind it, for every length of what they share.

Owns the traffic of a split and what each request found. Must never help the core. Invariant: two requests of a split
share exactly `shared` tokens, and requests of different splits share nothing, or with `nested` the shorter beginning.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from allocator.columns import Int64s, pack_i64
from ipc.messages import Accepted, Generate
from tools.hits.arena import Served
from tools.simulate.engine import GREEDY, Engine

OUTPUT_TOKENS = 16
SETTLED_FROM = 2  # the first requests of a split, which find nothing and find where they part
TOGETHER_ROWS = 8


class Split(NamedTuple):
    """One split's outcome. `found` are the tokens that each request found, in order of arrival.

    `given` and `hit` count states over the whole cache since the split began.
    """

    mode: str
    shared_tokens: int
    own_tokens: int
    interval: int
    found: tuple[int, ...]
    given: int
    hit: int

    @property
    def below_tokens(self) -> int:
        """How far below what is shared the worst hit ends, from the third request on."""
        return self.shared_tokens - min(self.found[SETTLED_FROM:])

    @property
    def settled_at(self) -> int:
        """The first request, from 1 on, from which every one finds all but an interval of what is shared."""
        short = [at for at, found in enumerate(self.found) if self.shared_tokens - found > self.interval]
        return short[-1] + 2 if short else 1

    @property
    def holds(self) -> bool:
        """Whether every hit from the third request on ends at most one interval below what is shared."""
        return self.below_tokens <= self.interval


def prompt_of(shared: int, own: int, stem: int, number: int) -> Int64s:
    """The prompt of a request (int64): `shared` tokens of beginning `stem` and `own` of its own."""
    begin = (np.arange(shared, dtype=np.int64) * 7919 + stem * 104_729) % 500_000
    return np.concatenate([begin, (np.arange(own, dtype=np.int64) * 31 + number * 15_485_863) % 500_000 + 500_000])


def sweep(served: Served, splits: list[int], total: int, requests: int, mode: str) -> list[Split]:
    """Every split of `total` tokens, `requests` requests each.

    Modes: `alone` one request after the other, every split with a beginning of its own and an empty cache; `nested` one
    cache, and each beginning goes on from the one before; `together` as `alone`, but all of a split arrive at once.
    """
    running = TOGETHER_ROWS if mode == "together" else 1
    tokens = (total + OUTPUT_TOKENS) * requests * (len(splits) if mode == "nested" else 1)
    number = requests * (len(splits) if mode == "nested" else 1)
    rows: list[Split] = []
    engine: Engine | None = None
    for at, shared in enumerate(splits):
        if engine is None or mode != "nested":
            engine = Engine(served.config(running), served.geometry(tokens, number, running))
        stem = 0 if mode == "nested" else at
        rows.append(_split(engine, served, mode, shared, total - shared, stem, at * requests, requests))
        engine.check_rest()
    return rows


def _split(
    engine: Engine, served: Served, mode: str, shared: int, own: int, stem: int, first: int, requests: int
) -> Split:
    before = engine.core.gauges()
    ids = [f"{shared}/{number}" for number in range(requests)]
    for number, id in enumerate(ids):
        prompt = prompt_of(shared, own, stem, first + number)
        answer = engine.submit(Generate(id, pack_i64(prompt), GREEDY, max_tokens=OUTPUT_TOKENS), 1_000_001 + number)
        assert isinstance(answer, Accepted), "the arena holds everything"
        if mode != "together":
            engine.run()
    engine.run()
    after = engine.core.gauges()
    return Split(
        mode=mode,
        shared_tokens=shared,
        own_tokens=own,
        interval=served.interval,
        found=tuple(engine.sent[id].cached_tokens for id in ids),
        given=after["checkpoints_given_total"] - before["checkpoints_given_total"],
        hit=sum(after[name] - before[name] for name in after if name.startswith("states_hit_")),
    )
