"""Pauses: how long streams went without a token, within spans of time.

Owns the arithmetic. Must never cut a pause at an edge: it belongs, whole, to the span in which it ends, so that one
that begins just before the cancels is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Span(NamedTuple):
    """A time with a name, in whatever unit the arrivals have."""

    name: str
    begin: float
    end: float


def pauses(streams: Iterable[Sequence[float]], span: Span) -> list[float]:
    """The times between two arrivals of one stream that end in a span."""
    return [
        after - before for arrivals in streams for before, after in pairwise(arrivals) if span.begin < after <= span.end
    ]


def steps_between(streams: Iterable[Sequence[tuple[int, int]]], span: Span) -> list[int]:
    """The same for arrivals with a step's number, as the steps from one arrival to the next."""
    return [
        after[1] - before[1]
        for arrivals in streams
        for before, after in pairwise(arrivals)
        if span.begin < after[0] <= span.end
    ]


def figures(values: Sequence[float], unit: float) -> dict[str, float]:
    """p50, p99 and the largest, divided by a unit; all 0 without values."""
    if not values:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    p50, p99 = np.percentile(values, (50, 99))
    return {name: round(float(value) / unit, 2) for name, value in (("p50", p50), ("p99", p99), ("max", max(values)))}
