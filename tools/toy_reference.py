"""The toy model without memory: what the modeled runner must say of a sequence, computed from the sequence alone.

Owns the plain definition that every schedule is compared with. Must never know a page, a slot, a chunk or a batch, and
shares no code with the runner but the mixing function; `daemon.rank.modeled_hash` states the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daemon.rank.noise import GOLDEN, mix

Words = NDArray[np.uint64]
STATE_SALT = 0x5851F42D4C957F2D
STATE_WORDS = 30


class Toy(NamedTuple):
    """A shape of the toy: which bands store something, which ids it can say, and how often it ends itself."""

    full: bool = True
    windows: tuple[int, ...] = ()
    state: bool = False
    vocab_size: int = 49152
    first_token: int = 32
    eos_ppm: int = 0
    eos_id: int = 2
    depth: int = 0  # blocks; 0: 1 of full attention alone, else 2

    def options(self) -> dict[str, str]:
        """As options of the modeled runner."""
        return {
            "full": str(int(self.full)),
            "windows": "+".join(map(str, self.windows)),
            "state": str(int(self.state)),
            "vocab_size": str(self.vocab_size),
            "first_token": str(self.first_token),
            "eos_ppm": str(self.eos_ppm),
            "eos_id": str(self.eos_id),
            "depth": str(self.depth),
        }


def greedy(toy: Toy, tokens: Sequence[int]) -> list[int]:
    """For every position, the token that follows it when the sequence is `tokens` up to there."""
    at = np.arange(len(tokens), dtype=np.uint64)
    x = np.asarray(tokens, dtype=np.int64).astype(np.uint64) + at * GOLDEN
    span = np.uint64(toy.vocab_size - toy.first_token)
    draws = mix(_draws(toy, x, at))
    said = (draws % span).astype(np.int64) + toy.first_token
    ends = (draws >> np.uint64(32)) % np.uint64(1_000_000) < np.uint64(toy.eos_ppm)
    said[ends] = toy.eos_id
    return said.tolist()


def mismatches(toy: Toy, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """Places in `output` whose token is not the greedy one after everything before it; empty: a cold run is equal."""
    said = greedy(toy, [*prompt, *output])
    return [k for k, token in enumerate(output) if said[len(prompt) - 1 + k] != token]


def _draws(toy: Toy, x: Words, at: Words) -> Words:
    alone = toy.full and not toy.windows and not toy.state
    depth = toy.depth or (1 if alone else 2)
    if alone and depth == 1:
        return _sight(np.cumsum(mix(x), dtype=np.uint64), at, 0, 1)
    bands = [(window, 2 + number) for number, window in enumerate(sorted(toy.windows, reverse=True))]
    bands += [(0, 1)] if toy.full else []
    context = np.zeros(x.size, dtype=np.uint64)
    for window, copies in bands:
        salt = _salt(window)
        context += mix(_sight(np.cumsum(mix(x + salt), dtype=np.uint64), at, window, copies) + salt)
    if toy.state:
        whole = np.zeros(x.size, dtype=np.uint64)
        for word in range(STATE_WORDS):
            salt = np.uint64((word + 1) * STATE_SALT % 2**64)
            whole += mix(np.cumsum(mix(x + salt), dtype=np.uint64) + _golden(word))
        context += mix(whole)
    for _ in range(1, depth):
        out = context.copy()
        for window, copies in bands:
            out += mix(_sight(np.cumsum(mix(context + _salt(window)), dtype=np.uint64), at, window, copies))
        if toy.state:
            out += mix(np.cumsum(mix(context + np.uint64(STATE_SALT)), dtype=np.uint64))
        context = out
    return context


def _golden(times: int) -> np.uint64:
    return np.uint64(times * int(GOLDEN) % 2**64)


def _salt(window: int) -> np.uint64:
    return np.uint64(mix(np.array([window], dtype=np.uint64) * GOLDEN)[0] if window else 0)


def _sight(stored: Words, at: Words, window: int, copies: int) -> Words:
    """Per position, the hash of the stored words that it sees: the `window` newest ones, or (0) all."""
    words = np.zeros(stored.size, dtype=np.uint64)
    for copy in range(copies):
        words += mix(stored + _golden(copy) + at * GOLDEN)
    sums = np.cumsum(words, dtype=np.uint64)
    if window:
        sums[window:] -= np.cumsum(words, dtype=np.uint64)[:-window]
    return sums
