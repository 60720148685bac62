"""Doubts: what a reader must know before believing the figures of an answer, as notes.

Owns the shares from which on something is said. Must never change a figure, nor keep one back: what is doubtful is
shown, and named. Invariant: an unchanged replay that has every figure of the record is not doubted for its figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.simulate.show import duration
from tools.whatif.account import Figures
from tools.whatif.pace import Pace
from tools.whatif.recorded import Recorded
from tools.whatif.show import RECORDED, ROWS, UNCHANGED, Row, off, value_of
from tools.why.nouns import times

OFF_MAX = 0.10  # of what was recorded
FIT_OFF_MAX = 0.75  # of a forward's mean; half of it, as on a busy machine, still predicts well
LEAST_COUNT = 5.0  # fewer retractions, tokens, ... apart are chance
LEAST_MS = 1.0
RATES = frozenset({"hit_rate", "output_tokens_per_s"})  # any difference counts


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


def doubts(runs: Mapping[str, Figures], paces: Mapping[str, Pace]) -> list[str]:
    """Where the pace does not fit, where the unchanged replay is not what was recorded, and what only looks wrong."""
    notes = [
        f"{name}: the pace fits badly: single forwards are {pace.error:.0%} of their mean off what it says (more than "
        f"{FIT_OFF_MAX:.0%} is too much), so do not trust waiting, times and whatever hangs on them in its replays"
        for name, pace in paces.items()
        if pace.error > FIT_OFF_MAX
    ]
    far = [text for row in ROWS if row.compared and (text := _far(runs, row))]
    if far:
        notes.append(
            f"the replay without changes is more than {OFF_MAX:.0%} off what was recorded: {'; '.join(far)}. A "
            "prediction of these is no better: do not trust it"
        )
    if any(_above(run["waiting_ms"]["mean"], run["first_token_ms"]["mean"]) for run in runs.values()):
        notes.append(
            "waiting may be longer than the time to the first token: it is of all requests, also of those that ended "
            "before they had a token, and counts what was waited again behind a retraction, lost ranks or a lost daemon"
        )
    return notes


def _far(runs: Mapping[str, Figures], row: Row) -> str:
    """How far a figure of the unchanged replay is from the recorded one; empty where that is near enough."""
    truth, value = value_of(runs[RECORDED], row), value_of(runs[UNCHANGED], row)
    if truth is None or value is None:
        return ""
    part, least = off(value, truth), LEAST_MS if row.path[0].endswith("_ms") else LEAST_COUNT
    if row.path[0] in RATES:
        least = 0.0
    if abs(value - truth) <= least or (part is not None and abs(part) <= OFF_MAX):
        return ""
    apart = f" ({part:+.0%})" if part is not None else ""
    return f"{row.name} {row.write(value)} for {row.write(truth)}{apart}"


def _above(one: Any, other: Any) -> bool:
    return one is not None and other is not None and one > other
