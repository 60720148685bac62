"""Doubts: what a reader must know before believing the figures of an answer, as notes.

Owns the shares from which on something is said. Must never change a figure, nor keep one back: what is doubtful is
shown, and named. Invariant: an unchanged replay that has every figure of the record is not doubted for its figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.simulate.show import duration
from tools.whatif.account import Figures
from tools.whatif.pace import STRETCH, Pace, Work
from tools.whatif.recorded import Recorded
from tools.whatif.rows import CHANGED, RECORDED, ROWS, UNCHANGED, Row, off, value_of
from tools.why.nouns import times

OFF_MAX = 0.10  # of what was recorded
FIT_OFF_MAX = 0.75  # of a forward's mean; half of it, as on a busy machine, still predicts well
STRETCH_OFF_MAX = 0.15  # of a stretch's; waiting adds up over stretches
FEW_OFF_MAX = 0.25  # of a percentile
OTHER_PACE = 0.03  # apart, from which on the rerun's machine is named
SLOW_SHARE = 0.05  # of the time, from which on slow stretches are named as the reason


def downtime(found: Recorded) -> list[str]:
    """What of the daemon's and the ranks' absence is in the figures."""
    notes = []
    daemon, ranks = (duration(found.away.spent_ns[what] / 1e6) for what in ("daemon", "ranks"))
    again = times(found.lives - 1)
    if found.lives > 1:
        notes.append(
            f"the daemon ended and was started again {again}, and for {daemon} in all, until ranks were "
            "ready, it served nobody: that time is in the recorded figures and in the replays, at the same moments; a "
            "rerun has none of it"
        )
    if found.losses:
        notes.append(
            f"the ranks were lost {times(found.losses)}, for {ranks} in all: so they are in the replays, at the same "
            "moments; a rerun loses none"
        )
    return notes


def other_pace(recorded: Pace, reruns: list[tuple[Pace, Work]]) -> list[str]:
    """How much faster or slower the forwards of reruns were than the recorded pace says of the same work."""
    times = [pace.forward_ns(work) / max(recorded.forward_ns(work), 1) for pace, work in reruns]
    mean = sum(times) / len(times)
    if abs(mean - 1) <= OTHER_PACE:
        return []
    return [
        f"forwards of the rerun took {mean:.2f} times what the recorded pace says: it moves all times, and is no error "
        f"of the replay; the replays at its pace leave it out"
    ]


def doubts(runs: Mapping[str, Figures], paces: Mapping[str, Pace]) -> list[str]:
    """Where the pace does not fit, where the unchanged replay is not what was recorded, and what only looks wrong."""
    notes = [f"{name}: {text}" for name, pace in paces.items() if (text := _misfit(pace))]
    far = [text for row in ROWS if row.compared and (text := _far(runs, row))]
    if far:
        notes.append(
            f"the replay without changes is more than {OFF_MAX:.0%} off what was recorded: {'; '.join(far)}. A "
            "prediction of these is no better: do not trust it"
        )
    few = [text for row in ROWS if row.compared and (text := _hangs_on_few(runs, row))]
    if few:
        notes.append(
            f"about these percentiles lie so few requests that two in a hundred move them far: {'; '.join(few)}. Their "
            "means say more"
        )
    if any(_above(run["waiting_ms"]["mean"], run["first_token_ms"]["mean"]) for run in runs.values()):
        notes.append(
            "waiting may be longer than the time to the first token: it is of all requests, also of those that ended "
            "before they had a token, and counts what was waited again behind a retraction, lost ranks or a lost daemon"
        )
    return notes


def _misfit(pace: Pace) -> str:
    """Why the times of replays at this pace are not to be trusted; empty where they are."""
    if pace.error <= FIT_OFF_MAX and pace.stretch <= STRETCH_OFF_MAX:
        return ""
    return (
        f"the pace fits badly: single forwards are {pace.error:.0%} of their mean off what it says (more than "
        f"{FIT_OFF_MAX:.0%} is too much), {STRETCH} in a row {pace.stretch:.0%} (more than {STRETCH_OFF_MAX:.0%}), so "
        f"do not trust waiting, times and whatever hangs on them in its replays. {_why(pace)}"
    )


def _why(pace: Pace) -> str:
    if pace.slow_ns > SLOW_SHARE * pace.fitted_ns:
        return (
            f"For {duration(pace.slow_ns / 1e6)} of {duration(pace.fitted_ns / 1e6)} forwards took "
            f"{pace.slow_times:.1f} times as long as the others make one expect: two paces are mixed there, as where "
            "something else kept the machine busy for a while"
        )
    if pace.stretch > STRETCH_OFF_MAX:
        return "What forwards take hangs on something that is none of their tokens, rows and positions"
    return (
        "They are off one by one, and less in a row: a busy machine gives its processors to others in between, and "
        "forwards are shorter than that takes"
    )


def _hangs_on_few(runs: Mapping[str, Figures], row: Row) -> str:
    """A predicted percentile that few requests decide, with what it may be; empty where it is none."""
    name = CHANGED if CHANGED in runs else UNCHANGED
    figures, value = runs[name][row.path[0]], value_of(runs[name], row)
    ends = (figures.get(f"{row.path[-1]}_{side}") for side in ("low", "high")) if len(row.path) > 1 else (None, None)
    low, high = ends
    if value is None or low is None or high is None or high - low <= max(FEW_OFF_MAX * value, row.least):
        return ""
    return f"{row.name}, {row.write(low)} to {row.write(high)}"


def _far(runs: Mapping[str, Figures], row: Row) -> str:
    """How far a figure of the unchanged replay is from the recorded one; empty where that is near enough."""
    truth, value = value_of(runs[RECORDED], row), value_of(runs[UNCHANGED], row)
    if truth is None or value is None:
        return ""
    part = off(value, truth)
    if abs(value - truth) <= row.least or (part is not None and abs(part) <= OFF_MAX):
        return ""
    apart = f" ({part:+.0%})" if part is not None else ""
    return f"{row.name} {row.write(value)} for {row.write(truth)}{apart}"


def _above(one: Any, other: Any) -> bool:
    return one is not None and other is not None and one > other
