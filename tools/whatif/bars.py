"""Bars: how far each figure of a replay may be off, by what the journal alone says.

Owns the `±` of an answer. Must never look at a rerun: a bar is part of the prediction, and the rerun is what it is held
against. Three things are known before anything runs again; the largest of them is the bar:

* how far the replays of one kind lie apart, from the least to the most;
* of a median or a 99th percentile, what it would be if two in a hundred requests changed sides: where few requests lie
  about it, one that starts elsewhere moves it a lot, and no pace is to blame;
* of a prediction, how far the replay without changes is off what was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.whatif.account import Figures
from tools.whatif.rows import CHANGED, RECORDED, ROWS, TRUTHS, UNCHANGED, Row, off, value_of

OFF_LEAST = 0.01  # of what judges: replays that agree by chance are not surer than that


def bars(runs: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """Of each run that is not one alone the bar of each compared figure, in its own unit."""
    names = [name for name in runs if name in TRUTHS or "spread" in runs[name]]
    return {name: {row.name: bar(runs, name, row) for row in ROWS if row.compared} for name in names}


def bar(runs: Mapping[str, Figures], name: str, row: Row) -> float:
    """The bar of one figure of a replayed run."""
    value = value_of(runs[name], row)
    if value is None:
        return 0.0
    parts = [_apart(runs[name], row)]
    if name in TRUTHS:
        parts.append(_near(runs[name], row, value))
    if name == CHANGED:
        missed = off(value_of(runs[UNCHANGED], row), value_of(runs[RECORDED], row))
        parts.append(abs(missed or 0.0) * value)
    return max(parts)


def outside(runs: Mapping[str, Figures], name: str, row: Row) -> bool:
    """Whether the run that judges this one lies outside of its bar, by more than chance."""
    truth = TRUTHS[name]
    value, real = value_of(runs[name], row), value_of(runs[truth], row) if truth in runs else None
    if value is None or real is None:
        return False
    return abs(value - real) > max(bar(runs, name, row), _apart(runs[truth], row), row.least, OFF_LEAST * abs(real))


def _apart(figures: Mapping[str, Any], row: Row) -> float:
    """How far several replays lie apart."""
    found: Any = figures.get("spread")
    for name in row.path if found is not None else ():
        found = found[name]
    return float(found[1] - found[0]) if found else 0.0


def _near(figures: Mapping[str, Any], row: Row, value: float) -> float:
    """How far the values lie that a percentile has for two in a hundred requests more or fewer."""
    around = figures[row.path[0]] if len(row.path) > 1 else {}
    ends = [around.get(f"{row.path[-1]}_{side}") for side in ("low", "high")] if around else []
    return max((abs(end - value) for end in ends if end is not None), default=0.0)
