"""Rows of an answer: which figures are compared, how they are written, and how far apart two of them are.

Owns the names of the runs and of their figures. Must never compute a figure. A column is a run: recorded, replayed
unchanged, replayed with the changes, run for real, and replayed with the pace of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tools.simulate.show import duration
from tools.whatif.account import Figures

RECORDED, UNCHANGED, CHANGED, RERUN = "recorded", "unchanged", "changed", "rerun"
PACED = "at the rerun's pace"
TRUTHS = {UNCHANGED: RECORDED, CHANGED: RERUN, PACED: RERUN}
"""By what a run is judged."""

LEAST_COUNT = 5.0  # fewer retractions, tokens, ... apart are chance
LEAST_MS = 1.0
RATES = frozenset({"hit_rate", "output_tokens_per_s"})  # any difference counts


class Row(NamedTuple):
    """A figure: where it stands, how it is written, and whether two runs are compared by it."""

    name: str
    path: tuple[str, ...]
    write: Callable[[Any], str]
    compared: bool = True

    @property
    def least(self) -> float:
        """Two values so far apart are taken for the same."""
        if self.path[0] in RATES:
            return 0.0
        return LEAST_MS if self.path[0].endswith("_ms") else LEAST_COUNT


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _one(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


ROWS = (
    Row("requests", ("requests",), _count, compared=False),
    Row("refused", ("refused",), _count),
    Row("prompt tokens found in the cache", ("cached_tokens",), _count),
    Row("hit rate", ("hit_rate",), _part),
    Row("prompt tokens computed", ("computed_prompt_tokens",), _count),
    Row("retractions", ("retractions",), _count),
    Row("parked for memory", ("parks",), _count),
    Row("units evicted from the cache", ("evicted_units",), _count),
    Row("waiting, mean", ("waiting_ms", "mean"), duration),
    Row("waiting, median", ("waiting_ms", "p50"), duration),
    Row("waiting, 99th percentile", ("waiting_ms", "p99"), duration),
    Row("time to first token, mean", ("first_token_ms", "mean"), duration),
    Row("time to first token, median", ("first_token_ms", "p50"), duration),
    Row("time to first token, 99th", ("first_token_ms", "p99"), duration),
    Row("whole request, mean", ("request_ms", "mean"), duration),
    Row("output tokens", ("output_tokens",), _count),
    Row("output tokens/s", ("output_tokens_per_s",), _one),
    Row("forwards and other steps", ("steps",), _count),
)


def value_of(figures: Mapping[str, Any], row: Row) -> float | None:
    """A figure of a run."""
    found: Any = figures
    for name in row.path:
        found = found[name]
    return None if found is None else float(found)


def off(value: float | None, truth: float | None) -> float | None:
    """How far a value is from another, as a part of it; None where that cannot be said."""
    if value is None or truth is None:
        return None
    if not truth:
        return 0.0 if not value else None
    return (value - truth) / truth


def compared(runs: Mapping[str, Figures], one: str, truth: str) -> dict[str, float | None]:
    """Of each compared figure how far run `one` is off run `truth`."""
    return {row.name: off(value_of(runs[one], row), value_of(runs[truth], row)) for row in ROWS if row.compared}
