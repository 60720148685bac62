"""Log probabilities of several positions, cut by position.

Owns nothing; plain functions on columns. Must never change a value.
"""

from __future__ import annotations

from collections.abc import Iterator

from ipc.messages import Logprobs

FLOAT32, INT32, INT64 = 4, 4, 8  # bytes


def cut(values: Logprobs, first: int, end: int) -> Logprobs:
    """The positions from `first` up to `end`."""
    k = values.k
    return Logprobs(
        k,
        values.chosen[first * FLOAT32 : end * FLOAT32],
        values.ranks[first * INT32 : end * INT32],
        values.top_ids[first * k * INT64 : end * k * INT64],
        values.top_values[first * k * FLOAT32 : end * k * FLOAT32],
    )


def from_position(values: Logprobs, first: int) -> Logprobs | None:
    """The positions from `first` on, all of them when it is not positive; None when none is left."""
    positions = len(values.chosen) // FLOAT32
    if first <= 0:
        return values
    return cut(values, first, positions) if first < positions else None


def each_position(values: Logprobs) -> Iterator[Logprobs]:
    """One value per position."""
    positions = len(values.chosen) // FLOAT32
    if positions == 1:
        yield values
    else:
        yield from (cut(values, position, position + 1) for position in range(positions))
