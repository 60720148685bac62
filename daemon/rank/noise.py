"""Counter-based noise keys: 64 bits from (seed, choice, position), equal on every rank and in every batch.

Owns the one hash that keys randomness. Must never hold state or import torch. Invariant: a key depends on its three
numbers only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from allocator.columns import Int32s, Int64s

Hashes = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: Hashes) -> Hashes:
    """The splitmix64 finalizer: a bijection of uint64 that spreads every bit; returns a new array."""
    x = values ^ (values >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def row_keys(seeds: Hashes, choices: Int32s, positions: Int64s) -> Hashes:
    """uint64[n] keys of sampled positions: mix(mix(seed + G) + choice * G + position)."""
    return mix(mix(seeds + GOLDEN) + choices.astype(np.uint64) * GOLDEN + positions.astype(np.uint64))
