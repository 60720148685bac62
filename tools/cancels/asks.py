"""Asks: the requests of a round, those that are kept and those that are cancelled.

Owns their drawing. Must never depend on anything but the seed, the round and the place of a request in it, so that the
same requests can be asked again without the cancels. No two prompts begin alike, and none is served from the cache.
"""

from __future__ import annotations

import msgspec
import numpy as np

from allocator.columns import pack_i64
from ipc.messages import Generate, Sampling

PROMPT_IDS = (1000, 20_000)  # in every vocabulary, and no special tokens
KEPT_PROMPT = (8, 96)  # tokens, both ends possible
KEPT_OUTPUT = 7000  # more than a round lasts: they are told when to stop
SHORT, LONG = (8, 96), (1500, 4000)
LONG_ONE_IN = 2  # a long prompt takes several steps: some of them are cancelled in between
CROWD_OUTPUT = 4000


def kept(seed: int, round_: int, count: int) -> list[Generate]:
    """Those that are never cancelled; every other samples at a temperature."""
    asks = []
    for place in range(count):
        draw = np.random.default_rng([seed, round_, 0, place])
        sampling = Sampling(temperature=0.8 * (place % 2), seed=int(draw.integers(2**48)))
        asks.append(Generate(f"kept-{round_}-{place}", _prompt(draw, KEPT_PROMPT), sampling, max_tokens=KEPT_OUTPUT))
    return asks


def crowd(seed: int, round_: int, count: int) -> list[Generate]:
    """Those that are cancelled: short prompts and long ones, and more output than they ever get."""
    asks = []
    for place in range(count):
        draw = np.random.default_rng([seed, round_, 1, place])
        prompt = _prompt(draw, LONG if place % LONG_ONE_IN else SHORT)
        asks.append(Generate(f"gone-{round_}-{place}", prompt, Sampling(temperature=0.0), max_tokens=CROWD_OUTPUT))
    return asks


def again(ask: Generate, output_tokens: int) -> Generate:
    """The same request for so many tokens, under a name and a cache key of its own."""
    return msgspec.structs.replace(ask, id=f"again-{ask.id}", namespace="again", max_tokens=output_tokens)


def order(seed: int, round_: int, count: int) -> list[int]:
    """In which order the places of a crowd are cancelled."""
    return [int(place) for place in np.random.default_rng([seed, round_, 2]).permutation(count)]


def _prompt(draw: np.random.Generator, lengths: tuple[int, int]) -> bytes:
    return pack_i64(draw.integers(*PROMPT_IDS, size=int(draw.integers(lengths[0], lengths[1] + 1))))
